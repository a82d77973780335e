"""A reader of Hugging Face's library that was trained on questions, such as one of SQuAD.

It is any encoder with a question-answering head: a folder, `hf:NAME` or `py:NAME` with `config.json`,
`model.safetensors` and a tokenizer. It has its own tokenizer, so it reads the text of passages, in float32:
`[CLS] x [SEP] z [SEP]`. A long passage is read in overlapping windows. Its head gives every token a score as the start
and one as the end of the answer, and [CLS] those of no answer, as SQuAD 2 trains it:

    p(i … j|z,x) ∝ exp(start_i + end_j)        p(no answer|z,x) ∝ exp(start_CLS + end_CLS)

normalized over the spans of one passage, and no answer. Read next: `token_classifier.py` for the network,
`eval/prediction.py` for the sum over passages.
"""

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray
from tokenizers import Encoding

from realm_jax.checksums import arrays_digest, named_arrays
from realm_jax.errors import UserError
from realm_jax.mesh import batch_parts, logical_sharding, replicated, to_host
from realm_jax.models.attention import select_attention
from realm_jax.models.folders import resolve_model_path
from realm_jax.models.layers import Params
from realm_jax.models.token_classifier import load_token_classifier
from realm_jax.models.weights import SETTINGS, question_head
from realm_jax.storage import read_settings

Array = jax.Array
FLAG = "--reader"  # for messages
PURPOSE = "ForQuestionAnswering"  # end of the names of classes of transformers with such a head
LONGEST, OVERLAP = 384, 128  # tokens of a window, and common to two windows, as transformers reads and SQuAD trains
QUESTION_SHARE = 4  # a question takes at most a fourth of a window
WINDOWS = 16  # largest number of windows that a device reads at a time
WIDTH_STEP = 64  # windows are padded to a multiple of it, so that few programs are compiled


class ReaderText(NamedTuple):
    """A passage to read for a question.

    Attributes:
        question: question of the user.
        title: read in a line before the text; '' for none. No answer is taken from it.
        text: text of the passage.
    """

    question: str
    title: str
    text: str

    @property
    def context(self) -> str:
        """Return the title and the text as they are read."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Window(NamedTuple):
    """A question and a part of its passage, joined with special tokens.

    Attributes:
        first: number of its first token of the passage, among the tokens of the whole passage.
        body: its tokens of the passage.
        encoding: all of its tokens.
    """

    first: int
    body: slice
    encoding: Encoding


class PassageReading(NamedTuple):
    """The most probable answers of a passage.

    Attributes:
        spans: [start, end) in characters of its text, the most probable first.
        probabilities: p(span|z,x) of each.
        no_answer: p(no answer|z,x).
    """

    spans: list[tuple[int, int]]
    probabilities: list[float]
    no_answer: float = 0.0


class NoReader:
    """Takes the place of a reader if none was trained: it finds no answer, and computes nothing."""

    def read(self, inputs: Sequence[ReaderText], answer_tokens: int, top: int) -> list[PassageReading]:
        """Return a reading without spans for each passage. Arguments: see `QuestionReader.read`."""
        return [PassageReading([], []) for _ in inputs]


def open_question_reader(name: str, mesh: Mesh) -> "QuestionReader":
    """Open a reader, or return the one that was opened last if its files are the same.

    Args:
        name: a folder, `hf:NAME` or `py:NAME`.
        mesh: the devices that read.

    Raises:
        UserError: there is no such model, it has no question-answering head or no tokenizer, or its architecture cannot
            be loaded.
    """
    folder = resolve_model_path(name, FLAG)
    if not folder.is_dir():
        raise UserError(f"{FLAG}={name}: there is no such folder; name a folder, hf:NAME or py:NAME")
    try:
        return _open(folder.resolve(), _file_states(folder), mesh)
    except UserError as error:
        raise UserError(f"{FLAG}={name}: {error}") from None


def _file_states(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, time of the last change and size of the files in a folder."""
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in files)


@lru_cache(maxsize=1)  # a service opens it for every newer model of its run
def _open(folder: Path, file_states: tuple[tuple[str, int, int], ...], mesh: Mesh) -> "QuestionReader":
    return QuestionReader(folder, mesh)


class QuestionReader:
    """A network that points at answers, with its tokenizer, on the devices."""

    def __init__(self, folder: Path, mesh: Mesh) -> None:
        """Load a reader. See `open_question_reader`."""
        self._settings = read_settings(folder / SETTINGS)
        classes = self._settings.get("architectures")
        if isinstance(classes, list) and not any(str(name).endswith(PURPOSE) for name in classes):
            raise UserError(
                f"{folder / SETTINGS}: names the class {' and '.join(map(str, classes))}, which has no "
                "question-answering head; choose a model for question answering"
            )
        model = load_token_classifier(folder, 2, question_head, "question answering")
        self._mesh, self._tokenizer = mesh, model.tokenizer
        self.longest = min(model.network.config.max_length, LONGEST)
        self.overlap = min(OVERLAP, self.longest // 2)
        self._pairs = model.tokenizer.pair_tokenizer(self.longest, self.overlap)
        self._params = jax.device_put(model.params, replicated(mesh))
        self.parameters = sum(array.size for array in jax.tree.leaves(model.params))
        attention = select_attention(mesh, jnp.float32)
        hidden = None if attention == "cpu" else logical_sharding(mesh, "batch", None, None)
        network = model.network.clone(
            config=model.network.config.with_compute(attention=attention, hidden_sharding=hidden)
        )

        @jax.jit
        def score(params: Params, ids: Array, segments: Array, lengths: Array) -> Array:
            mask = jnp.arange(ids.shape[1]) < lengths[:, None]  # [rows, width]
            logits: Any = network.apply({"params": params}, ids, mask, segments)  # [rows, width, 2]
            return logits

        self._score = score

    @cached_property
    def identity(self) -> str:
        """Return digits that change with any weight, setting or token."""
        arrays = {name: to_host(array) for name, array in named_arrays(self._params).items()}
        settings = json.dumps([self._settings, self._tokenizer.fingerprint], sort_keys=True)
        return arrays_digest(arrays, settings.encode())[:32]

    def token_count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer.encode(text).ids)

    # --- read

    def read(self, inputs: Sequence[ReaderText], answer_tokens: int, top: int) -> list[PassageReading]:
        """Read passages.

        Args:
            inputs: passages with their questions; those of all questions share batches.
            answer_tokens: tokens of an answer at most.
            top: spans of each passage at most.
        """
        windows = self.windows(inputs)
        scores = iter(self.scores([window for of_passage in windows for window in of_passage]))
        return [
            best_spans(part, of_passage, [next(scores) for _ in of_passage], answer_tokens, top)
            for part, of_passage in zip(inputs, windows, strict=True)
        ]

    def windows(self, inputs: Sequence[ReaderText]) -> list[list[Window]]:
        """Return the windows of each passage, in the order of its text. Questions that are too long are cut."""
        max_tokens = self.longest // QUESTION_SHARE
        questions: dict[str, str] = {}
        for question in {part.question for part in inputs}:
            offsets = self._tokenizer.encode(question).offsets
            questions[question] = question if len(offsets) <= max_tokens else question[: offsets[max_tokens - 1][1]]
        encodings = self._pairs.encode_batch([(questions[part.question], part.context) for part in inputs])
        windows = []
        for encoding in encodings:
            of_passage: list[Window] = []
            for number, part in enumerate([encoding, *encoding.overflowing]):
                body = np.flatnonzero(np.array([sequence == 1 for sequence in part.sequence_ids]))
                first, stop = (int(body[0]), int(body[-1]) + 1) if len(body) else (0, 0)
                window_tokens = of_passage[0].body.stop - of_passage[0].body.start if of_passage else 0
                of_passage.append(Window(number * (window_tokens - self.overlap), slice(first, stop), part))
            windows.append(of_passage)
        return windows

    def scores(self, windows: Sequence[Window]) -> list[NDArray[np.float32]]:
        """Score the tokens of each window as start and end.

        Windows of like length share a batch, and batches have few shapes, so that few programs are compiled.

        Args:
            windows: windows of any passages.

        Returns:
            [tokens, 2] of each window.
        """
        lengths = np.array([len(window.encoding.ids) for window in windows], np.int32)  # [windows]
        order, parts = np.argsort(lengths, kind="stable"), batch_parts(self._mesh)
        pending = []
        for begin in range(0, len(order), WINDOWS * parts):
            batch = order[begin : begin + WINDOWS * parts]
            width = min(-(-int(lengths[batch].max()) // WIDTH_STEP) * WIDTH_STEP, self.longest)
            rows = parts << (-(-len(batch) // parts) - 1).bit_length()  # a power of two for each device
            ids = np.full((rows, width), self._tokenizer.pad_id, np.int32)
            segments, used = np.zeros_like(ids), np.ones(rows, np.int32)
            used[: len(batch)] = lengths[batch]
            for row, number in enumerate(batch):
                encoding = windows[number].encoding
                ids[row, : used[row]], segments[row, : used[row]] = encoding.ids, encoding.type_ids
            shardings = [logical_sharding(self._mesh, "batch", *[None] * (part.ndim - 1)) for part in (ids, used)]
            placed = jax.device_put((ids, segments, used), (shardings[0], *shardings))
            pending.append((batch, self._score(self._params, *placed)))  # nothing waits for the devices yet
        scores: list[Any] = [None] * len(windows)
        for batch, logits in pending:
            for number, row in zip(batch.tolist(), to_host(logits), strict=False):  # without the rows of padding
                scores[number] = row[: lengths[number]]
        return scores


def best_spans(
    part: ReaderText, windows: Sequence[Window], scores: Sequence[NDArray[np.float32]], answer_tokens: int, top: int
) -> PassageReading:
    """Normalize the scores of a passage and take its most probable spans.

    A span in two windows has the larger of its scores. No answer has the smallest of the windows' scores, because each
    of them must lack an answer, as in SQuAD's evaluation.

    Args:
        part: the passage.
        windows: windows of the passage, in order.
        scores: start and end of each window's tokens, [tokens, 2].
        answer_tokens: tokens of an answer at most.
        top: spans at most.
    """
    tokens = windows[-1].first + windows[-1].body.stop - windows[-1].body.start
    if not tokens:
        return PassageReading([], [], 1.0)
    begin = len(part.context) - len(part.text)  # of the text, in characters of what is read
    offsets = np.zeros((tokens, 2), np.int64)
    spans = np.full((tokens, answer_tokens), -np.inf)  # [first token, tokens after it]
    for window, scored in zip(windows, scores, strict=True):
        tokens_read = slice(window.first, window.first + window.body.stop - window.body.start)
        offsets[tokens_read] = np.maximum(np.array(window.encoding.offsets[window.body]) - begin, 0)
        is_text = offsets[tokens_read, 1] > offsets[tokens_read, 0]  # not of the title; a token may have no character
        starts, ends = np.where(is_text[:, None], scored[window.body], -np.inf).T.astype(np.float64)  # [tokens] both
        ends = np.concatenate([ends, np.full(answer_tokens - 1, -np.inf)])
        ends = np.lib.stride_tricks.sliding_window_view(ends, answer_tokens)  # [tokens, answer_tokens]
        np.maximum(spans[tokens_read], starts[:, None] + ends, out=spans[tokens_read])
    no_answer = min(float(scored[0].sum(dtype=np.float64)) for scored in scores)
    total = np.logaddexp(np.logaddexp.reduce(spans, axis=None), no_answer)
    flat = spans.ravel()
    best = np.argsort(-flat, kind="stable")[:top]
    reading = PassageReading([], [], float(np.exp(no_answer - total)))
    for number in best[flat[best] > -np.inf].tolist():
        first, more = divmod(number, answer_tokens)
        start, end = int(offsets[first, 0]), int(offsets[first + more, 1])
        answer = part.text[start:end]  # many tokenizers count the space before a word to it
        start, end = end - len(answer.lstrip()), start + len(answer.rstrip())
        if start < end:
            reading.spans.append((start, end))
            reading.probabilities.append(float(np.exp(flat[number] - total)))
    return reading
