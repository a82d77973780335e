"""One training example at a time, as fixed-shape arrays: pure functions of (sources, example number, random generator).

Each maker first lists the examples that exist (`total`), so that the pipeline filters nothing, and then makes the i-th
one. Keys of the arrays are those that `training/tasks.py` reads. Order and batches: `pipeline.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.corpus.jsonl import Question
from realm_jax.corpus.store import PassageStore
from realm_jax.errors import UserError
from realm_jax.text import layouts
from realm_jax.text.masking import mask, predictions_needed
from realm_jax.text.tokenizer import Tokenizer

Example = dict[str, Any]  # arrays of one example; scalars are NumPy scalars
Maker = Callable[[int, np.random.Generator], Example]
WHOLE_RATE = 0.5  # warm-up: excerpts that hold all other sentences; the rest are mostly short
KEPT_RATE = 0.1  # warm-up: excerpts that hold the masked sentence too, as in the inverse cloze task
MINIMUM_SENTENCE = 4  # word pieces; shorter ones ("Yes.") tell nothing about their passage


class Lengths(NamedTuple):
    """Fixed sizes of the arrays: word pieces of queries and documents, predictions of a sentence, answers."""

    query: int
    document: int
    predictions: int
    answers: int
    span_width: int


class Examples(NamedTuple):
    """`total` examples; `make(i, generator)` gives the i-th.

    lengths: places in use of each example's array `joint`, int64 [total], where examples are batched by it (None: they
    are not); the arrays of a batch are then no longer than its longest needs.
    """

    total: int
    make: Maker
    lengths: NDArray[np.int64] | None = None


def lengths_from(query: int, document: int, masking: str, predictions: int, answers: int, span_width: int) -> Lengths:
    """Lengths of a config; `predictions` 0 sizes it to the kind of masking."""
    return Lengths(query, document, predictions or predictions_needed(masking, query - 2), answers, span_width)


def array_shapes(
    task: str, lengths: Lengths, found: int = 0, joint: int = 0, ids: Any = np.uint16
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and dtype of every array of an example of a task, as its maker gives them.

    found: passages that BM25 finds for a question or a masked sentence. joint: places of a question joined with its
    positive passage, the longest that a batch can be padded to; 0 where questions come without one. ids: dtype of
    those of texts, `Tokenizer.dtype`.
    """
    query = {"query": ((lengths.query,), ids), "query_length": ((), np.int32)}
    document = {
        "document": ((lengths.document,), ids),
        "document_length": ((), np.int32),
        "document_title_length": ((), np.int32),
    }
    masked: dict[str, Any] = {name: ((lengths.predictions,), np.int32) for name in ("positions", "targets")}
    masked |= {"weights": ((lengths.predictions,), np.float32)}
    if task in ("mlm", "closed_book"):
        return query | masked | document
    if task == "ict":
        return query | document | {"own_row": ((), np.int32)}
    passages: dict[str, Any] = {"word_rows": ((found,), np.int32), "word_scores": ((found,), np.float32)}
    passages = passages if found else {}
    if task == "realm":
        sentence = {"sentence": ((lengths.query,), ids), "sentence_length": ((), np.int32)}
        return query | masked | sentence | {"own_row": ((), np.int32)} | passages
    answers = {
        "answers": ((lengths.answers, lengths.span_width), np.int32),
        "answer_lengths": ((lengths.answers,), np.int32),
    }
    beside: dict[str, Any] = {
        "joint": ((joint,), ids),
        "joint_length": ((), np.int32),
        "body_start": ((), np.int32),
    }
    return query | answers | passages | (beside if joint else {})


def query_arrays(ids: NDArray, length: int, wordpiece: Tokenizer, name: str = "query") -> Example:
    """`[CLS] ids [SEP]`, padded: {name} [length], of the tokenizer's dtype, and {name}_length."""
    layout = layouts.query(ids, length, wordpiece.special)
    return {name: layout.ids.astype(wordpiece.dtype), f"{name}_length": np.int32(layout.used)}


def document_arrays(title: NDArray, body: NDArray, length: int, wordpiece: Tokenizer) -> Example:
    """`[CLS] title [SEP] body [SEP]`, padded, with its length and the title's."""
    layout = layouts.document(title, body, length, wordpiece.special)
    return {
        "document": layout.ids.astype(wordpiece.dtype),
        "document_length": np.int32(layout.used),
        "document_title_length": np.int32(min(len(title), length - 3)),
    }


def masked_arrays(
    sentence: NDArray, spans: NDArray, kind: str, rng: np.random.Generator, lengths: Lengths, wordpiece: Tokenizer
) -> Example:
    """A masked sentence as a query, with its targets; positions count [CLS]. With nothing to mask it weighs 0."""
    masked = mask(kind, sentence, spans, rng, wordpiece, lengths.predictions, room=lengths.query - 2)
    positions = np.zeros(lengths.predictions, np.int32)
    targets = np.zeros(lengths.predictions, np.int32)
    weights = np.zeros(lengths.predictions, np.float32)
    if masked is not None:
        count = len(masked.positions)
        positions[:count] = masked.positions + 1
        targets[:count] = masked.targets
        weights[:count] = 1.0
    ids = sentence if masked is None else masked.ids
    arrays = {"positions": positions, "targets": targets, "weights": weights}
    return arrays | query_arrays(ids, lengths.query, wordpiece)


def spans_of(store: PassageStore, row: int, number: int) -> tuple[NDArray, NDArray]:
    """Word pieces of a row's sentence, and its salient spans relative to it, int32 [m, 2]."""
    start, end = store.sentences(row)[number]
    spans = store.spans(row)
    inside = spans[(spans[:, 0] >= start) & (spans[:, 1] <= end)]
    return store.body_tokens(row)[start:end], inside[:, :2] - start


class Annotated(NamedTuple):
    """Sentences with at least one salient span, flat: row and number of the sentence in its row, int64 [n] each."""

    rows: NDArray[np.int64]
    numbers: NDArray[np.int64]


def salient_sentences(store: PassageStore, query_length: int) -> Annotated:
    """All sentences that have a salient span within the query's reach."""
    rows, numbers = zip(*store.salient_sentences(query_length - 2), strict=True)
    return Annotated(np.concatenate(rows), np.concatenate(numbers))


def _salient_numbers(store: PassageStore, row: int, room: int) -> NDArray[np.int64]:
    """`salient_sentences` of one row, without a list of all: numbers, int64 [n]."""
    sentences, spans = store.sentences(row), store.spans(row)
    owner = np.searchsorted(sentences[:, 0], spans[:, 0], side="right") - 1
    return np.unique(owner[spans[:, 1] - sentences[owner, 0] <= room])


def recurring_spans(store: PassageStore, query_length: int) -> NDArray[np.int32]:
    """Salient spans that occur again in another sentence of their passage: int32 [n, 4].

    A row is (passage, sentence, place of the span among the passage's, that other sentence).

    Only such a span can be read off the rest of its passage; in a text that repeats its facts they are common.
    """
    found = []
    for row in range(len(store)):
        sentences, spans, body = store.sentences(row), store.spans(row), store.body_tokens(row)
        for place, (start, end, _) in enumerate(spans):
            number = int(np.searchsorted(sentences[:, 0], start, side="right")) - 1
            if end - sentences[number, 0] <= query_length - 2:
                other = _recurs(body, sentences, number, body[start:end])
                found += [] if other is None else [(row, number, place, other)]
    return np.array(found, np.int32).reshape(-1, 4)


def _recurs(body: NDArray, sentences: NDArray[np.int32], number: int, span: NDArray) -> int | None:
    """The first sentence but `number` in which the pieces of `span` occur."""
    text, wanted = body.tobytes(), span.tobytes()
    place = text.find(wanted)
    while place >= 0:
        piece, aligned = place // body.itemsize, place % body.itemsize == 0
        other = int(np.searchsorted(sentences[:, 0], piece, side="right")) - 1
        if aligned and other != number and piece + len(span) <= sentences[other, 1]:
            return other
        place = text.find(wanted, place + 1)
    return None


def warmup_examples(
    passages: PassageStore,
    pretraining: PassageStore,
    wordpiece: Tokenizer,
    lengths: Lengths,
    null_rate: float,
    unrelated_rate: float,
    kept: tuple[NDArray[np.bool_] | None, NDArray[np.bool_] | None] = (None, None),
) -> Examples:
    """The reader's warm-up: masked salient spans of three kinds, all pairs that any text has.

    * A sentence of a passage beside an excerpt of that passage in which the span occurs again. The excerpt is a random
      choice of the other sentences, in order: short ones teach copying quickly, long ones teach what to copy.
    * A share `unrelated_rate`: such a sentence beside a passage drawn at random, so that the reader does not believe
      every passage: what retrieval offers at first is mostly wrong.
    * A share `null_rate`: a sentence of the pre-training text beside the empty document (plain masked words). Beside
      unrelated passages these would teach that the pre-training text's style means that no passage helps.

    kept: rows of passages and of pre-training text that may be trained on, bool [rows]; None for all.
    """
    spans = recurring_spans(passages, lengths.query)
    spans = spans if kept[0] is None else spans[kept[0][spans[:, 0]]]
    _require(len(spans), passages, "a name or date that it mentions in two sentences", "the warm-up", kept[0])
    sentences = salient_sentences(pretraining, lengths.query)
    if kept[1] is not None:
        sentences = Annotated(*(part[kept[1][sentences.rows]] for part in sentences))
    _require(len(sentences.rows), pretraining, "a salient span", "the warm-up", kept[1])

    def make(index: int, rng: np.random.Generator) -> Example:
        draw = rng.random()
        if draw >= null_rate:
            unrelated = draw < null_rate + unrelated_rate
            return _excerpt_example(passages, spans[index], unrelated, rng, lengths, wordpiece)
        choice = int(rng.integers(len(sentences.rows)))
        sentence, salient = spans_of(pretraining, int(sentences.rows[choice]), int(sentences.numbers[choice]))
        arrays = masked_arrays(sentence, salient, "salient", rng, lengths, wordpiece)
        return arrays | document_arrays(sentence[:0], sentence[:0], lengths.document, wordpiece)

    return Examples(len(spans), make)


def _excerpt_example(
    store: PassageStore,
    entry: NDArray[np.int32],
    unrelated: bool,
    rng: np.random.Generator,
    lengths: Lengths,
    wordpiece: Tokenizer,
) -> Example:
    """A sentence with its recurring span masked, beside some of its passage's other sentences, one with the span.

    unrelated: beside an excerpt of a passage drawn at random instead, made in the same way, so that length tells
    nothing. A share KEPT_RATE of the excerpts holds the sentence itself too, so that whole passages occur.
    """
    row, number, place, other = map(int, entry)
    start, end = store.sentences(row)[number]
    span = store.spans(row)[place : place + 1, :2] - start
    arrays = masked_arrays(store.body_tokens(row)[start:end], span, "salient", rng, lengths, wordpiece)
    if unrelated:
        row = (row + 1 + int(rng.integers(max(1, len(store) - 1)))) % len(store)
        number, other = (int(rng.integers(len(store.sentences(row)))) for _ in range(2))
    sentences, body = store.sentences(row), store.body_tokens(row)
    kept = rng.random(len(sentences)) < (1.0 if rng.random() < WHOLE_RATE else rng.random() ** 2)
    kept[number] = rng.random() < KEPT_RATE
    kept[other] = True
    excerpt = np.concatenate([body[first:last] for first, last in sentences[kept]])
    return arrays | document_arrays(store.title_tokens(row), excerpt, lengths.document, wordpiece)


def cloze_examples(
    store: PassageStore, wordpiece: Tokenizer, lengths: Lengths, mask_rate: float, kept: NDArray[np.bool_] | None = None
) -> Examples:
    """Inverse cloze task: a sentence and its passage, out of which a share `mask_rate` of the sentences is taken.

    kept: rows that may be trained on, bool [rows]; None for all.
    """
    several = store.sentence_counts() > 1
    rows = np.flatnonzero(several if kept is None else several & kept)
    _require(len(rows), store, "two or more sentences", "the inverse cloze task", kept)

    def make(index: int, rng: np.random.Generator) -> Example:
        row = int(rows[index])
        sentences, body = store.sentences(row), store.body_tokens(row)
        long_enough = np.flatnonzero(sentences[:, 1] - sentences[:, 0] >= MINIMUM_SENTENCE)
        number = rng.choice(long_enough) if len(long_enough) else rng.integers(len(sentences))
        start, end = sentences[number]
        query = query_arrays(body[start:end], lengths.query, wordpiece)
        if rng.random() < mask_rate:
            body = np.concatenate([body[:start], body[end:]])
        document = document_arrays(store.title_tokens(row), body, lengths.document, wordpiece)
        return query | document | {"own_row": np.int32(row)}

    return Examples(len(rows), make)


Find = Callable[[str, int], Example]  # text and own row (−1 for none) → `Found.arrays` of the text


def masked_examples(
    store: PassageStore,
    wordpiece: Tokenizer,
    lengths: Lengths,
    kind: str,
    own_text: bool,
    find: Find | None = None,
    kept: NDArray[np.bool_] | None = None,
) -> Examples:
    """REALM's queries: one masked sentence a passage and pass, spans chosen as `mask(kind, …)` does.

    own_text: the rows are the corpus's own, so that `own_row` names the passage that may not be retrieved (else −1).
    For 'salient' the sentence is that of a span chosen uniformly over the passage, as in the reference. find: the list
    of BM25 for the words that are left, where that comes with an example. kept: rows that may be trained on, bool
    [rows]; None for all.
    """
    room = lengths.query - 2
    if kind == "salient":
        rows = np.concatenate([np.unique(rows) for rows, _ in store.salient_sentences(room)])
    else:
        rows = np.flatnonzero(store.sentence_counts())
    rows = rows if kept is None else rows[kept[rows]]
    _require(len(rows), store, "a salient span", "REALM pre-training", kept)

    def make(index: int, rng: np.random.Generator) -> Example:
        row = int(rows[index])
        numbers = _salient_numbers(store, row, room) if kind == "salient" else range(len(store.sentences(row)))
        parts = [spans_of(store, row, int(number)) for number in numbers]
        share = np.array([_share(kind, spans, lengths.query - 2) for _, spans in parts], np.float64)
        chosen = rng.choice(len(parts), p=share / share.sum())
        sentence, spans = parts[chosen]
        arrays = masked_arrays(sentence, spans, kind, rng, lengths, wordpiece)
        text = np.zeros(lengths.query, wordpiece.dtype)
        text[: min(len(sentence), lengths.query)] = sentence[: lengths.query]
        arrays |= {"sentence": text, "sentence_length": np.int32(min(len(sentence), lengths.query))}
        own_row = row if own_text else -1
        arrays |= {"own_row": np.int32(own_row)}
        if find is None:
            return arrays
        hidden = arrays["positions"][arrays["weights"] > 0] - 1
        return arrays | find(words_left(store, wordpiece, row, int(list(numbers)[chosen]), hidden), own_row)

    return Examples(len(rows), make)


def words_left(store: PassageStore, wordpiece: Tokenizer, row: int, number: int, hidden: NDArray) -> str:
    """The text of a sentence with spaces in place of its hidden pieces. hidden: their places in the sentence."""
    text, body, (start, end) = store.text(row), store.body_tokens(row), store.sentences(row)[number]
    offsets = wordpiece.offsets_of(text, body)
    if offsets is None:  # the passage was cut within a word
        return wordpiece.decode(np.delete(body[start:end], hidden).tolist())
    letters = list(text)
    for first, last in offsets[start:end][hidden].tolist():
        letters[first:last] = " " * (last - first)
    return "".join(letters[offsets[start, 0] : offsets[end - 1, 1]])


def _share(kind: str, spans: NDArray[np.int32], room: int) -> int:
    """How likely a sentence is drawn: by its spans within reach for 'salient', else like any other."""
    return int((spans[:, 1] <= room).sum()) if kind == "salient" else 1


class Found(NamedTuple):
    """The best passages of texts by BM25: rows int32 and scores float32 [texts, depth].

    Row -1 with score 0 where fewer passages share a word with the text.
    """

    rows: NDArray[np.int32]
    scores: NDArray[np.float32]

    def arrays(self, number: int) -> Example:
        """Those of one question."""
        return {"word_rows": self.rows[number], "word_scores": self.scores[number]}


def question_examples(
    questions: Sequence[Question], wordpiece: Tokenizer, lengths: Lengths, found: Found | None = None
) -> Examples:
    """Questions with their answers as word pieces; an answer of more than `span_width` pieces can not be a span."""
    if not questions:
        raise UserError("no training questions in the prepared folder; give `realm prepare --questions train=FILE`")
    check_strings(questions)
    encoded = [encoding.ids for encoding in wordpiece.encode_batch([q.question for q in questions])]

    def make(index: int, rng: np.random.Generator) -> Example:
        return question_arrays(encoded[index], questions[index].answers, wordpiece, lengths)

    examples = Examples(len(questions), make)
    return examples if found is None else with_found(examples, found)


def with_found(examples: Examples, found: Found) -> Examples:
    """Examples with BM25's list of each."""
    return examples._replace(make=lambda index, rng: examples.make(index, rng) | found.arrays(index))


def check_strings(questions: Sequence[Question]) -> None:
    """Raise UserError where answers are regular expressions: there is no telling which pieces they are."""
    if patterns := sum(question.is_regex for question in questions):
        raise UserError(
            f"{patterns} of {len(questions)} training questions have regular expressions for answers, which cannot be "
            "learned from; prepare training questions with answers as strings"
        )


def question_arrays(ids: Sequence[int], answers: Sequence[str], wordpiece: Tokenizer, lengths: Lengths) -> Example:
    """One question: query arrays, answers [answers, span_width] and their lengths (0 where there is none).

    The first answers that can be spans are kept; one that is too long takes no place. An answer whose tokens depend on
    what stands before it stands there in each of its forms, after the answers as they are by themselves.
    """
    forms = [wordpiece.forms(answer) for answer in answers]
    encoded = [form[0] for form in forms] + [other for form in forms for other in form[1:]]
    fitting = [answer for answer in encoded if 0 < len(answer) <= lengths.span_width]
    pieces = np.zeros((lengths.answers, lengths.span_width), np.int32)
    sizes = np.zeros(lengths.answers, np.int32)
    for place, answer in enumerate(fitting[: lengths.answers]):
        pieces[place, : len(answer)] = answer
        sizes[place] = len(answer)
    query = query_arrays(np.asarray(ids, np.int32), lengths.query, wordpiece)
    return query | {"answers": pieces, "answer_lengths": sizes}


def _require(count: int, store: PassageStore, what: str, task: str, kept: NDArray[np.bool_] | None = None) -> None:
    """kept: rows of documents that are not held out, None for all."""
    if not count:
        left = "" if kept is None else " in a document that is not held out (config.evaluation.held_out)"
        raise UserError(f"{store.folder}: {task} needs at least one passage with {what}{left}, and there is none")
