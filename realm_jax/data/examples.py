"""One training example at a time, as fixed-shape arrays: pure functions of (sources, example number, random generator).

Each maker first lists the examples that exist (`total`), so that nothing is filtered later, and then makes the i-th
one. Here stands what several of them have in common; the makers of a task stand in its file (`tasks/`).

Order, batches and prefetch (Grain) stand at the end: the batch at step s is a pure function of (seed, task, s). Example
number `position` of a run is example `permutation(epoch)[position mod count]`; its random generator is seeded with
(seed, task, epoch, example), so a mask depends on nothing else. Any step can be asked for at once, which is how a run
resumes: the input position is one integer. Examples that have lengths are sorted by them within a window of batches, so
that a batch is padded to what its longest example needs.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from realm_jax.data import layouts
from realm_jax.data.masking import mask, predictions_needed
from realm_jax.data.store import NO_SPAN, PassageStore, salient_reach, sentences_of_spans
from realm_jax.data.tokenizer import NO_TOKEN, Tokenizer
from realm_jax.errors import UserError

if TYPE_CHECKING:
    import grain  # in functions otherwise: what only answers needs no order of examples, and starts sooner

Example = dict[str, Any]  # arrays of one example; scalars are NumPy scalars
Maker = Callable[[int, np.random.Generator], Example]
MINIMUM_SENTENCE = 4  # tokens; shorter ones ("Yes.") tell nothing about their passage
BLANK = 2  # [MASK]s of a blank; one answers as many questions: `docs/results/adaptation.md`
QUESTION_WORDS = re.compile(r"\b(how (many|much|long|old|far)|whom?|whose|what|which|when|where)\b", re.IGNORECASE)


class Lengths(NamedTuple):
    """Fixed sizes of the arrays: tokens of queries and documents, predictions of a sentence, answers."""

    query: int
    document: int
    predictions: int
    answers: int
    span_width: int

    @property
    def hidden(self) -> tuple[int, int]:
        """What may be hidden: pieces of a sentence that a query has room for, and pieces of a span at most."""
        return self.query - 2, min(self.predictions, self.span_width)


class Examples(NamedTuple):
    """`total` examples; `make(i, generator)` gives the i-th.

    group: so many examples that follow one another come together; a batch has a multiple of it, as has `total`.
    lengths: places in use of each example's array `joint`, int64 [total], where examples are batched by it (None: they
    are not); the arrays of a batch are then no longer than its longest needs.
    """

    total: int
    make: Maker
    lengths: NDArray[np.int64] | None = None
    group: int = 1


def lengths_from(query: int, document: int, masking: str, predictions: int, answers: int, span_width: int) -> Lengths:
    """Lengths of a config; `predictions` 0 sizes it to the kind of masking."""
    return Lengths(query, document, predictions or predictions_needed(masking, query - 2), answers, span_width)


def query_arrays(ids: NDArray, length: int, tokenizer: Tokenizer, name: str = "query") -> Example:
    """`[CLS] ids [SEP]`, padded: {name} [length], of the tokenizer's dtype, and {name}_length."""
    layout = layouts.query(ids, length, tokenizer.special)
    return {name: layout.ids.astype(tokenizer.dtype), f"{name}_length": np.int32(layout.used)}


def document_arrays(title: NDArray, body: NDArray, length: int, tokenizer: Tokenizer) -> Example:
    """`[CLS] title [SEP] body [SEP]`, padded, with its length and the title's."""
    layout = layouts.document(title, body, length, tokenizer.special)
    return {
        "document": layout.ids.astype(tokenizer.dtype),
        "document_length": np.int32(layout.used),
        "document_title_length": np.int32(min(len(title), length - 3)),
    }


def masked_arrays(
    sentence: NDArray, spans: NDArray, kind: str, rng: np.random.Generator, lengths: Lengths, tokenizer: Tokenizer
) -> Example:
    """A masked sentence as a query, with its targets; positions count [CLS]. With nothing to mask it weighs 0."""
    masked = mask(kind, sentence, spans, rng, tokenizer, lengths.predictions, room=lengths.query - 2)
    positions, targets = np.zeros((2, lengths.predictions), np.int32)  # [predictions] both
    weights = np.zeros(lengths.predictions, np.float32)
    if masked is not None:
        count = len(masked.positions)
        positions[:count] = masked.positions + 1
        targets[:count] = masked.targets
        weights[:count] = 1.0
    arrays = {"positions": positions, "targets": targets, "weights": weights}
    return arrays | query_arrays(sentence if masked is None else masked.ids, lengths.query, tokenizer)


def spans_of(store: PassageStore, row: int, number: int) -> tuple[NDArray, NDArray]:
    """Tokens of a row's sentence, and its salient spans relative to it, int32 [m, 2]."""
    start, end = store.sentences(row)[number]
    spans = store.spans(row)
    inside = spans[(spans[:, 0] >= start) & (spans[:, 1] <= end)]
    return store.body_tokens(row)[start:end], inside[:, :2] - start


def pieces_without(pieces: NDArray, start: int, end: int) -> NDArray:
    """Pieces without those from `start` to before `end`."""
    return np.concatenate([pieces[:start], pieces[end:]])


class SentenceRefs(NamedTuple):
    """Sentences with at least one salient span, flat: row and number of the sentence in its row, int64 [n] each."""

    rows: NDArray[np.int64]
    numbers: NDArray[np.int64]


def salient_sentences(store: PassageStore, query_length: int) -> SentenceRefs:
    """List all sentences with a salient span that a query of `query_length` tokens has room for, in order."""
    parts = []
    for segment in store.segments:
        segment_rows, sentences, ends = sentences_of_spans(segment)  # [spans] each
        in_reach = ends <= query_length - 2
        sentences, first_spans = np.unique(sentences[in_reach], return_index=True)
        segment_rows = segment_rows[in_reach][first_spans]  # [sentences]
        rows = store.rows_at(segment.start + segment_rows)
        parts.append(np.stack([rows, sentences - segment.offsets["sentences"][segment_rows]])[:, rows >= 0])
    return SentenceRefs(*np.concatenate(parts, axis=1))


def salient_rows(store: PassageStore, max_tokens: int) -> NDArray[np.int64]:
    """List the rows of `salient_sentences` of a query with room for `max_tokens` of a sentence, in order."""
    reach = np.concatenate([salient_reach(segment) for segment in store.segments])[store.visible_rows]  # [rows]
    return np.flatnonzero(reach <= min(max_tokens, NO_SPAN - 1))


Bm25Lookup = Callable[[str, int], Example]  # text and own row (−1 for none) → `Bm25Hits.arrays` of the text


class Bm25Hits(NamedTuple):
    """The best passages of texts by BM25: rows int32 and scores float32 [texts, depth].

    Row -1 with score 0 where fewer passages share a word with the text.
    """

    rows: NDArray[np.int32]
    scores: NDArray[np.float32]

    def arrays(self, number: int) -> Example:
        """Those of one question."""
        return {"bm25_rows": self.rows[number], "bm25_scores": self.scores[number]}


def with_reader_query(arrays: Example) -> Example:
    """Rename the query of some arrays to `reader_query`: the retriever asks for something else."""
    names = ("query", "query_length")
    return {f"reader_{name}" if name in names else name: value for name, value in arrays.items()}


def question_arrays(ids: Sequence[int], answers: Sequence[str], tokenizer: Tokenizer, lengths: Lengths) -> Example:
    """One question: query arrays, answers [answers, span_width] and their lengths (0 where there is none).

    The first answers that can be spans are kept; one that is too long takes no place. An answer whose tokens depend on
    what stands before it stands there in each of its forms, after the answers as they are by themselves.
    """
    forms = [tokenizer.forms(answer) for answer in answers]
    encoded = [form[0] for form in forms] + [other for form in forms for other in form[1:]]
    fitting = [answer for answer in encoded if 0 < len(answer) <= lengths.span_width]
    pieces = np.zeros((lengths.answers, lengths.span_width), np.int32)
    sizes = np.zeros(lengths.answers, np.int32)
    for number, answer in enumerate(fitting[: lengths.answers]):
        pieces[number, : len(answer)] = answer
        sizes[number] = len(answer)
    query = query_arrays(np.asarray(ids, np.int32), lengths.query, tokenizer)
    return query | {"answers": pieces, "answer_lengths": sizes}


def cloze_pieces(question: str, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Lay a question out as a sentence with a blank: "[MASK] [MASK] wrote Emma?".

    REALM by pointing (`realm.marginal=span`) teaches a reader with hidden names and no question, so that it points at
    what stands in a blank. The blank takes the place of the first English question word, or stands at the end; without
    a [MASK] there is none.
    """
    if tokenizer.mask_id == NO_TOKEN:
        return np.asarray(tokenizer.encode(question).ids, np.int32)
    word = QUESTION_WORDS.search(question)
    before, after = (question, "") if word is None else (question[: word.start()], question[word.end() :])
    ids = [*tokenizer.encode(before).ids, *[tokenizer.mask_id] * BLANK, *tokenizer.encode(after).ids]
    return np.asarray(ids, np.int32)


def row_has_answer(store: PassageStore, row: int, answers: Sequence[NDArray], lengths: Lengths) -> bool:
    """Whether the body of a row, as far as it is read, has one of some runs of pieces."""
    body = truncated_body(store, row, lengths)
    text = body.tobytes()
    return any(contains_items(text, answer.tobytes(), body.itemsize) for answer in answers)


def contains_items(text: bytes, wanted: bytes, size: int) -> bool:
    """Whether some items of `size` bytes each stand in a row of such items."""
    offset = text.find(wanted)
    while offset >= 0 and offset % size:
        offset = text.find(wanted, offset + 1)
    return offset >= 0


def truncated_body(store: PassageStore, row: int, lengths: Lengths) -> NDArray:
    """The body of a row as far as it is read: beside its title and three special pieces."""
    return store.body_tokens(row)[: lengths.document - 3 - len(truncated_title(store, row, lengths))]


def truncated_title(store: PassageStore, row: int, lengths: Lengths) -> NDArray:
    """The title of a row as far as it is read: beside three special pieces."""
    return store.title_tokens(row)[: lengths.document - 3]


def require_passages(count: int, store: PassageStore, what: str, task: str, kept: NDArray[np.bool_] | None) -> None:
    """Raise UserError unless there are some passages to learn from. kept: rows that are not held out, None for all."""
    if not count:
        where = "" if kept is None else " in a document that is not held out (config.evaluation.held_out)"
        raise UserError(f"{store.folder}: {task} needs at least one passage with {what}{where}, and there is none")


# --- order and batches ------------------------------------------------------------------------------------------------

# The stream of random numbers of sample queries; a task has its own (`Task.stream`).
SAMPLE = 5
ENDLESS = 1 << 40  # steps; no run has as many
PREFETCH = 4  # batches made ahead, in one thread
WINDOW = 32  # batches among which examples are sorted by length
LENGTH_MULTIPLE = 32  # padded lengths are multiples of this: a step is compiled for a handful of them


def dataset(
    examples: Examples, seed: int, stream: int, batch_size: int, rows: NDArray[np.int64] | None = None
) -> "grain.MapDataset":
    """Batches without end; element s is the batch of step s, a dictionary of arrays [batch_size, …].

    rows: the examples of each batch that this process makes, in order; None for all.
    """
    import grain

    source = (seed, stream)
    shuffle_seed = int(np.random.SeedSequence(source).generate_state(1)[0])
    order = grain.MapDataset.range(examples.total // examples.group).shuffle(seed=shuffle_seed).repeat()
    own_rows = np.arange(batch_size) if rows is None else rows
    lengths = examples.lengths

    def make(position: int) -> Example:
        place, member = divmod(position, examples.group)
        epoch, example = position // examples.total, int(order[place]) * examples.group + member
        return examples.make(example, np.random.default_rng((*source, epoch, example)))

    if lengths is None:

        def make_in_order(number: int) -> Example:
            step, place = divmod(number, len(own_rows))
            return make(step * batch_size + int(own_rows[place]))

        return grain.MapDataset.range(ENDLESS * len(own_rows)).map(make_in_order).batch(len(own_rows))

    @lru_cache(4)
    def window_positions(window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The batches of a window of steps: positions in the order of examples [WINDOW, batch_size], sorted by length,
        the batches in random order, and the longest of each batch [WINDOW]."""
        positions = window * WINDOW * batch_size + np.arange(WINDOW * batch_size)
        in_order = lengths[[int(order[int(position)]) for position in positions]]
        places = np.argsort(in_order, kind="stable").reshape(WINDOW, batch_size)
        places = places[np.random.default_rng((*source, window)).permutation(WINDOW)]
        return positions[places], in_order[places].max(axis=1)

    def make_by_length(step: int) -> Example:
        """The own rows of the batch of a step, with `joint` as long as the longest of the whole batch needs."""
        positions, longest = window_positions(step // WINDOW)
        parts = [make(int(position)) for position in positions[step % WINDOW][own_rows]]
        batch = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
        width = -(-int(longest[step % WINDOW]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        return batch | {"joint": batch["joint"][:, :width]}

    return grain.MapDataset.range(ENDLESS).map(make_by_length)


def padded_lengths(examples: Examples) -> int:
    """How many different lengths the batches of examples are padded to at most."""
    return 1 if examples.lengths is None else len(np.unique(-(-examples.lengths // LENGTH_MULTIPLE)))


def batches(
    examples: Examples, seed: int, stream: int, batch_size: int, start: int, stop: int,
    rows: NDArray[np.int64] | None = None,
) -> Iterator[dict]:  # fmt: skip
    """The batches of steps start … stop − 1, made ahead in a thread. rows: as of `dataset`."""
    import grain

    steps = dataset(examples, seed, stream, batch_size, rows)[start:stop]
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH)
    return iter(steps.to_iter_dataset(options))
