"""One training example at a time, as fixed-shape arrays: pure functions of (sources, example number, random generator).

Each maker first lists the examples that exist (`total`), so that nothing is filtered later, and then makes the i-th
one. This module has the functions that several makers share; the makers of a task are in its file (`tasks/`).

Order, batches and prefetch (Grain) are at the end: the batch at step s is a pure function of (seed, task, s). Example
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
    import grain  # otherwise in functions, so that answering starts sooner: it needs no order of examples

Example = dict[str, Any]  # arrays of one example; scalars are NumPy scalars
Maker = Callable[[int, np.random.Generator], Example]
MINIMUM_SENTENCE = 4  # tokens; shorter ones ("Yes.") tell nothing about their passage
BLANK = 2  # [MASK]s of a blank; one answers as many questions: `docs/notebook/adaptation-2026-11-27.md`
QUESTION_WORDS = re.compile(r"\b(how (many|much|long|old|far)|whom?|whose|what|which|when|where)\b", re.IGNORECASE)


class Lengths(NamedTuple):
    """Fixed sizes of the arrays of an example.

    Attributes:
        query: tokens of a query, special ones included.
        document: tokens of a passage with its title, special ones included.
        predictions: hidden tokens of a sentence that are predicted.
        answers: answers of a question.
        span_width: tokens of an answer.
    """

    query: int
    document: int
    predictions: int
    answers: int
    span_width: int

    @property
    def hidden(self) -> tuple[int, int]:
        """Return how many tokens of a sentence a query has room for, and the most tokens of a hidden span."""
        return self.query - 2, min(self.predictions, self.span_width)


class Examples(NamedTuple):
    """All examples of a task, made one at a time.

    Attributes:
        total: number of examples.
        make: makes the i-th example from i and a random generator.
        lengths: used tokens of each example's array `joint`, int64 [total], if examples are batched by it; the arrays
            of a batch are then no longer than its longest needs. None: examples are not sorted by length.
        group: so many consecutive examples come together; the batch size and `total` are multiples of it.
    """

    total: int
    make: Maker
    lengths: NDArray[np.int64] | None = None
    group: int = 1


def lengths_from(query: int, document: int, masking: str, predictions: int, answers: int, span_width: int) -> Lengths:
    """Return the lengths of a config; `predictions` 0 sizes it to the kind of masking.

    Args:
        query: tokens of a query, special ones included.
        document: tokens of a passage with its title.
        masking: one of `masking.KINDS`.
        predictions: hidden tokens of a sentence that are predicted, or 0.
        answers: answers of a question.
        span_width: tokens of an answer.
    """
    return Lengths(query, document, predictions or predictions_needed(masking, query - 2), answers, span_width)


def query_arrays(ids: NDArray, length: int, tokenizer: Tokenizer) -> Example:
    """Lay out a query as `[CLS] ids [SEP]`, padded.

    Args:
        ids: tokens without special ones [n].
        length: tokens of the padded query.
        tokenizer: gives the special tokens and the dtype.

    Returns:
        query [length], of the tokenizer's dtype, and query_length.
    """
    layout = layouts.query(ids, length, tokenizer.special)
    return {"query": layout.ids.astype(tokenizer.dtype), "query_length": np.int32(layout.used)}


def document_arrays(title: NDArray, body: NDArray, length: int, tokenizer: Tokenizer) -> Example:
    """Lay out a passage as `[CLS] title [SEP] body [SEP]`, padded.

    Args:
        title: tokens of the title [m].
        body: tokens of the body [n].
        length: tokens of the padded passage.
        tokenizer: gives the special tokens and the dtype.

    Returns:
        document [length], of the tokenizer's dtype, document_length and document_title_length.
    """
    layout = layouts.document(title, body, length, tokenizer.special)
    return {
        "document": layout.ids.astype(tokenizer.dtype),
        "document_length": np.int32(layout.used),
        "document_title_length": np.int32(min(len(title), length - 3)),
    }


def masked_arrays(
    sentence: NDArray, spans: NDArray, kind: str, rng: np.random.Generator, lengths: Lengths, tokenizer: Tokenizer
) -> Example:
    """Make a masked sentence: a query with its targets.

    Args:
        sentence: its tokens [n].
        spans: ranges of tokens that may be hidden [m, 2].
        kind: one of `masking.KINDS`.
        rng: decides which spans are masked.
        lengths: sizes of the arrays.
        tokenizer: gives the special tokens and the dtype.

    Returns:
        `query_arrays`, and positions (which count [CLS]), targets and weights, all [predictions]. Weights are 0 for
        padding, and all of them if there is nothing to mask.
    """
    masked = mask(kind, sentence, spans, rng, tokenizer, lengths.predictions, room=lengths.query - 2)
    positions, targets = np.zeros((2, lengths.predictions), np.int32)  # [predictions] both
    weights = np.zeros(lengths.predictions, np.float32)  # [predictions]
    if masked is not None:
        count = len(masked.positions)
        positions[:count] = masked.positions + 1
        targets[:count] = masked.targets
        weights[:count] = 1.0
    arrays = {"positions": positions, "targets": targets, "weights": weights}
    return arrays | query_arrays(sentence if masked is None else masked.ids, lengths.query, tokenizer)


def spans_of(store: PassageStore, row: int, number: int) -> tuple[NDArray, NDArray]:
    """Return the tokens of a sentence and the salient spans in it.

    Args:
        store: the passages.
        row: the passage.
        number: number of the sentence in the passage.

    Returns:
        Tokens [n], and spans relative to the sentence, int32 [m, 2].
    """
    start, end = store.sentences(row)[number]
    spans = store.spans(row)
    inside = spans[(spans[:, 0] >= start) & (spans[:, 1] <= end)]
    return store.body_tokens(row)[start:end], inside[:, :2] - start


def pieces_without(token_ids: NDArray, start: int, end: int) -> NDArray:
    """Remove a range of tokens.

    Args:
        token_ids: tokens [n].
        start: first token to remove.
        end: token behind the last one to remove.

    Returns:
        The other tokens, in order [n - (end - start)].
    """
    return np.concatenate([token_ids[:start], token_ids[end:]])


class SentenceRefs(NamedTuple):
    """Sentences with at least one salient span.

    Attributes:
        rows: passage of each sentence, int64 [n].
        numbers: number of each sentence in its passage, int64 [n].
    """

    rows: NDArray[np.int64]
    numbers: NDArray[np.int64]


def salient_sentences(store: PassageStore, query_length: int) -> SentenceRefs:
    """List all sentences with a salient span that a query has room for, in order.

    Args:
        store: the passages.
        query_length: tokens of a query, special ones included.

    Returns:
        The sentences, in the order of rows and then of their numbers.
    """
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
    """List the passages of `salient_sentences`.

    Args:
        store: the passages.
        max_tokens: tokens of a sentence that a query has room for.

    Returns:
        Rows in order, int64 [n].
    """
    reach = np.concatenate([salient_reach(segment) for segment in store.segments])[store.visible_rows]  # [rows]
    return np.flatnonzero(reach <= min(max_tokens, NO_SPAN - 1))


Bm25Lookup = Callable[[str, int], Example]  # text and own row (−1 for none) → `Bm25Hits.arrays` of the text


class Bm25Hits(NamedTuple):
    """The best passages of texts by BM25; row -1 with score 0 if fewer passages share a word with the text.

    Attributes:
        rows: passages, int32 [texts, depth].
        scores: their BM25 scores, float32 [texts, depth].
    """

    rows: NDArray[np.int32]
    scores: NDArray[np.float32]

    def arrays(self, number: int) -> Example:
        """Return the hits of one text as arrays of an example, [depth] each."""
        return {"bm25_rows": self.rows[number], "bm25_scores": self.scores[number]}


def with_reader_query(arrays: Example) -> Example:
    """Rename the query of some arrays to `reader_query`: the retriever asks for something else."""
    names = ("query", "query_length")
    return {f"reader_{name}" if name in names else name: value for name, value in arrays.items()}


def question_arrays(ids: Sequence[int], answers: Sequence[str], tokenizer: Tokenizer, lengths: Lengths) -> Example:
    """Make a question with its answers.

    We keep the first answers that can be spans, and skip those that are too long. If the tokens of an answer depend on
    the character before it, all of its forms are answers, after the answers as they are by themselves.

    Args:
        ids: tokens of the question [n].
        answers: answer strings.
        tokenizer: gives the tokens of the answers, the special tokens and the dtype.
        lengths: sizes of the arrays.

    Returns:
        `query_arrays`, answers int32 [answers, span_width], and answer_lengths int32 [answers], 0 for padding.
    """
    forms = [tokenizer.forms(answer) for answer in answers]
    encoded = [form[0] for form in forms] + [other for form in forms for other in form[1:]]
    fitting = [answer for answer in encoded if 0 < len(answer) <= lengths.span_width]
    answer_ids = np.zeros((lengths.answers, lengths.span_width), np.int32)  # [answers, span_width]
    answer_lengths = np.zeros(lengths.answers, np.int32)  # [answers]
    for number, answer in enumerate(fitting[: lengths.answers]):
        answer_ids[number, : len(answer)] = answer
        answer_lengths[number] = len(answer)
    query = query_arrays(np.asarray(ids, np.int32), lengths.query, tokenizer)
    return query | {"answers": answer_ids, "answer_lengths": answer_lengths}


def cloze_pieces(question: str, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Lay a question out as a sentence with a blank: "[MASK] [MASK] wrote Emma?".

    REALM by pointing (`realm.marginal=span`) teaches a reader with hidden names and no question, so that it points at
    the words of a blank. The blank replaces the first English question word, or is at the end; without a [MASK] in the
    vocabulary there is none.

    Args:
        question: its text.
        tokenizer: gives the tokens.

    Returns:
        Tokens without special ones but [MASK], int32 [n].
    """
    if tokenizer.mask_id == NO_TOKEN:
        return np.asarray(tokenizer.encode(question).ids, np.int32)
    word = QUESTION_WORDS.search(question)
    before, after = (question, "") if word is None else (question[: word.start()], question[word.end() :])
    ids = [*tokenizer.encode(before).ids, *[tokenizer.mask_id] * BLANK, *tokenizer.encode(after).ids]
    return np.asarray(ids, np.int32)


def row_has_answer(store: PassageStore, row: int, answers: Sequence[NDArray], lengths: Lengths) -> bool:
    """Return True if the body of a passage, as far as it is read, contains an answer.

    Args:
        store: the passages.
        row: the passage.
        answers: tokens of each answer [n], of the store's dtype.
        lengths: decides how much of the passage is read.
    """
    body = truncated_body(store, row, lengths)
    text = body.tobytes()  # a search in bytes is many times faster than one in arrays
    return any(contains_items(text, answer.tobytes(), body.itemsize) for answer in answers)


def contains_items(text: bytes, wanted: bytes, size: int) -> bool:
    """Return True if an array contains another one as a run, both given as bytes.

    Args:
        text: items of the array that is searched.
        wanted: items of the run.
        size: bytes of an item.
    """
    offset = text.find(wanted)
    # A match that begins within an item is none.
    while offset >= 0 and offset % size:
        offset = text.find(wanted, offset + 1)
    return offset >= 0


def truncated_body(store: PassageStore, row: int, lengths: Lengths) -> NDArray:
    """Return the body of a passage as far as it is read: behind its title and with three special tokens.

    Args:
        store: the passages.
        row: the passage.
        lengths: decides how much of the passage is read.
    """
    return store.body_tokens(row)[: lengths.document - 3 - len(truncated_title(store, row, lengths))]


def truncated_title(store: PassageStore, row: int, lengths: Lengths) -> NDArray:
    """Return the title of a passage as far as it is read: with three special tokens.

    Args:
        store: the passages.
        row: the passage.
        lengths: decides how much of the passage is read.
    """
    return store.title_tokens(row)[: lengths.document - 3]


def require_passages(
    count: int, store: PassageStore, content: str, task: str, is_trained: NDArray[np.bool_] | None
) -> None:
    """Check that there are passages to learn from.

    Args:
        count: number of such passages.
        store: the passages.
        content: content of such a passage, in words.
        task: the task that needs it, in words.
        is_trained: rows that are not held out [rows]; None for all.

    Raises:
        UserError: there is no such passage.
    """
    if not count:
        where = "" if is_trained is None else " in a document that is not held out (config.evaluation.held_out)"
        raise UserError(f"{store.folder}: {task} needs at least one passage with {content}{where}, and there is none")


# --- Order and batches ------------------------------------------------------------------------------------------------

# The stream of random numbers of sample queries; a task has its own (`Task.stream`).
SAMPLE = 5
ENDLESS = 1 << 40  # steps; no run has as many
PREFETCH = 4  # batches made ahead, in one thread
WINDOW = 32  # batches among which examples are sorted by length
LENGTH_MULTIPLE = 32  # padded lengths are multiples of this: a step is compiled for a handful of them


def dataset(
    examples: Examples, seed: int, stream: int, batch_size: int, rows: NDArray[np.int64] | None = None
) -> "grain.MapDataset":
    """Return batches without end: element s is the batch of step s.

    Args:
        examples: the examples of the task.
        seed: seed of the run.
        stream: stream of the task, so that tasks draw independently.
        batch_size: examples of a batch, over all processes.
        rows: the examples of each batch that this process makes, in order; None for all.

    Returns:
        A dataset of dictionaries of arrays [len(rows), …].
    """
    import grain

    source = (seed, stream)
    shuffle_seed = int(np.random.SeedSequence(source).generate_state(1)[0])
    order = grain.MapDataset.range(examples.total // examples.group).shuffle(seed=shuffle_seed).repeat()
    process_rows = np.arange(batch_size) if rows is None else rows  # [rows]
    lengths = examples.lengths

    # Order and seed follow from the position, so that a run can resume at any step.
    def make(position: int) -> Example:
        group, member = divmod(position, examples.group)
        epoch, example = position // examples.total, int(order[group]) * examples.group + member
        return examples.make(example, np.random.default_rng((*source, epoch, example)))

    if lengths is None:

        def make_in_order(number: int) -> Example:
            step, index = divmod(number, len(process_rows))
            return make(step * batch_size + int(process_rows[index]))

        return grain.MapDataset.range(ENDLESS * len(process_rows)).map(make_in_order).batch(len(process_rows))

    # With the cache, the steps of a window sort it only once.
    @lru_cache(4)
    def window_positions(window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the batches of a window of steps: examples are sorted by length, batches in random order.

        Positions in the order of examples [WINDOW, batch_size], and the longest length of each batch [WINDOW].
        """
        positions = window * WINDOW * batch_size + np.arange(WINDOW * batch_size)  # [WINDOW * batch_size]
        window_lengths = lengths[[int(order[int(position)]) for position in positions]]  # [WINDOW * batch_size]
        by_length = np.argsort(window_lengths, kind="stable").reshape(WINDOW, batch_size)  # [WINDOW, batch_size]
        by_length = by_length[np.random.default_rng((*source, window)).permutation(WINDOW)]
        return positions[by_length], window_lengths[by_length].max(axis=1)

    def make_by_length(step: int) -> Example:
        """Make this process's rows of a batch, with `joint` as long as the longest of all rows needs."""
        positions, longest = window_positions(step // WINDOW)
        parts = [make(int(position)) for position in positions[step % WINDOW][process_rows]]
        batch = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
        width = -(-int(longest[step % WINDOW]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        return batch | {"joint": batch["joint"][:, :width]}

    return grain.MapDataset.range(ENDLESS).map(make_by_length)


def padded_lengths(examples: Examples) -> int:
    """Return how many different lengths the batches of examples are padded to at most."""
    return 1 if examples.lengths is None else len(np.unique(-(-examples.lengths // LENGTH_MULTIPLE)))


def batches(
    examples: Examples, seed: int, stream: int, batch_size: int, start: int, stop: int,
    rows: NDArray[np.int64] | None = None,
) -> Iterator[dict]:  # fmt: skip
    """Return an iterator over the batches of steps start … stop − 1, which a thread makes ahead.

    Args:
        examples: the examples of the task.
        seed: seed of the run.
        stream: stream of the task.
        batch_size: examples of a batch, over all processes.
        start: first step.
        stop: step behind the last one.
        rows: the examples of each batch that this process makes, in order; None for all.
    """
    import grain

    steps = dataset(examples, seed, stream, batch_size, rows)[start:stop]
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH)
    return iter(steps.to_iter_dataset(options))
