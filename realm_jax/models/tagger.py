"""BERT for token classification as a finder of salient spans, `hf:NAME`, as REALM's authors used one.

REALM's names came from a BERT that was fine-tuned on CoNLL-2003 (Guu et al. 2020, section 3.4). Here it is any
`BertForTokenClassification` of Hugging Face: a folder, or a repository of the hub, with `config.json` (its `id2label`
names the labels), `model.safetensors` and a tokenizer. The network is ours, on all devices of this process.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from realm_jax.cache import cache_programs
from realm_jax.data import sentences
from realm_jax.data.passage_packing import sentence_parts
from realm_jax.data.spans import Span, find_dates, with_dates, without_overlaps
from realm_jax.data.tokenizer import Tokenizer, Tokens
from realm_jax.errors import UserError
from realm_jax.models.architectures.bert import BERT
from realm_jax.models.folders import HUB, resolve_model_path
from realm_jax.models.layers import Params
from realm_jax.models.token_classifier import TokenClassifier, digest_of, load_token_classifier
from realm_jax.models.weights import SETTINGS, token_classifier
from realm_jax.storage import read_settings

Array = jax.Array
WINDOWS = 32  # a device reads at a time; the same for every batch, so that few programs are compiled
WIDTHS = (32, 64, 96, 128, 192, 256, 384, 512)  # padded lengths of windows
NAMELESS = re.compile(r"LABEL_\d+")  # transformers' default for a label without a name
PREFIXED = re.compile(r"([BIESLU])-(.+)")  # of BIO, BIOES and BILOU
OUTSIDE, BEGINS, ENDS = "O", "BSU", "ESLU"


# --- The network ------------------------------------------------------------------------------------------------------


class LoadedTagger(NamedTuple):
    """A network with its parameters.

    Attributes:
        network: without parameters.
        params: parameters of the network.
        tokenizer: tokenizer of the model.
        labels: the name of each label.
    """

    network: TokenClassifier
    params: Params
    tokenizer: Tokenizer
    labels: tuple[str, ...]


def load_tagger(folder: Path) -> LoadedTagger:
    """Load a BERT for token classification. Raises UserError, naming the file, if a part is missing or does not fit."""
    path = folder / SETTINGS
    settings = read_settings(path)
    if (kind := settings.get("model_type", BERT.model_type)) != BERT.model_type:
        raise UserError(f"{path}: model_type is {kind!r}, not {BERT.model_type!r}; choose a plain BERT")
    names = settings.get("id2label")
    if not (isinstance(names, dict) and names and {*names} == {str(number) for number in range(len(names))}):
        raise UserError(f"{path}: has no `id2label` that names its labels; choose a model for token classification")
    labels = tuple(str(names[str(number)]) for number in range(len(names)))
    if all(NAMELESS.fullmatch(label) for label in labels):
        raise UserError(f"{path}: `id2label` has no names but {labels[0]}; write there what each label means")
    head_of = partial(token_classifier, labels=len(labels))
    return LoadedTagger(*load_token_classifier(folder, len(labels), head_of, "token classification"), labels)


# --- The finder -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)  # every packer asks for its finder by name
def hugging_face(name: str) -> "NetworkFinder":
    """Return the finder of `hf:NAME`: a model by the name of its repository, or by its folder.

    Raises UserError if it cannot be fetched, is not a BERT for token classification, or its files do not fit together.
    """
    folder = Path(name) if Path(name).is_dir() else resolve_model_path(f"{HUB}{name}", "--spans")
    cache_programs()
    tagger = load_tagger(folder)
    return NetworkFinder(tagger, digest_of(folder, tagger.tokenizer))


class NetworkFinder:
    """A finder of names by a network, sentence by sentence, and of dates by rules.

    Attributes:
        identity: identity of weights, labels and tokenizer.
        uses_devices: JAX's devices belong to one process, so only one process of a machine runs it.
    """

    uses_devices = True

    def __init__(self, tagger: LoadedTagger, identity: str) -> None:
        self.identity = identity
        self._labels, self._tokenizer = tagger.labels, tagger.tokenizer
        devices = jax.local_devices()
        mesh = Mesh(np.array(devices), ("windows",))
        self._batch_size = WINDOWS * len(devices)
        self._by_window = NamedSharding(mesh, PartitionSpec("windows"))
        self._params = jax.device_put(tagger.params, NamedSharding(mesh, PartitionSpec()))
        self._longest = min(tagger.network.config.max_length, WIDTHS[-1])

        @jax.jit
        def best_labels(params: Params, ids: Array, lengths: Array) -> tuple[Array, Array]:
            mask = jnp.arange(ids.shape[1]) < lengths[:, None]  # [rows, width]
            logits: Any = tagger.network.apply({"params": params}, ids.astype(jnp.int32), mask)
            return logits.argmax(axis=-1), jax.nn.softmax(logits).max(axis=-1)  # [rows, width] both

        self._best_labels = best_labels

    def __call__(self, text: str) -> list[Span]:
        return self.find_many([text])[0]

    def find_many(self, texts: Sequence[str]) -> list[list[Span]]:
        """Return the spans of each text. The windows of all texts share batches; no window affects another."""
        tokens_of_texts = self._tokenizer.tokens(texts)
        word_starts = [*map(self._tokenizer.unit_starts, texts, tokens_of_texts)]  # [tokens] bool of each text
        names: list[list[Span]] = [[] for _ in texts]
        windows: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)  # width → (text, first, last token)
        for number, (text, tokens) in enumerate(zip(texts, tokens_of_texts, strict=True)):
            # A sentence is a window: taggers are trained on sentences. A longer one is cut between words.
            parts = sentence_parts(text, tokens, sentences.split(text), self._longest - 2)
            for part in chain.from_iterable(parts):
                width = next((width for width in WIDTHS if part.stop - part.start + 2 <= width), self._longest)
                windows[min(width, self._longest)].append((number, part.start, part.stop))
        pending, special = [], self._tokenizer.special
        for width, of_width in sorted(windows.items()):
            for begin in range(0, len(of_width), self._batch_size):
                batch = of_width[begin : begin + self._batch_size]
                ids = np.full((self._batch_size, width), special.pad, self._tokenizer.dtype)
                lengths = np.ones(self._batch_size, np.int32)  # rows beyond the windows are empty
                for row, (number, first, last) in enumerate(batch):
                    lengths[row] = last - first + 2
                    ids[row, : lengths[row]] = [special.cls, *tokens_of_texts[number].ids[first:last], special.sep]
                # The devices start; nothing waits for them yet.
                results = self._best_labels(self._params, *jax.device_put((ids, lengths), self._by_window))
                pending.append((batch, results))
        for batch, results in pending:
            label_ids, probabilities = (np.asarray(part) for part in results)  # [rows, width] both
            for row, (number, first, last) in enumerate(batch):
                inside = slice(1, last - first + 1)  # without [CLS] and [SEP]
                tags = [self._labels[label] for label in label_ids[row, inside].tolist()]
                window = tokens_of_texts[number].part(first, last), word_starts[number][first:last]
                names[number] += entities(*window, tags, probabilities[row, inside])
        dates = map(find_dates, texts)
        return [
            with_dates(text, without_overlaps(text, of_text), of_rules)
            for text, of_text, of_rules in zip(texts, names, dates, strict=True)
        ]


def entities(
    tokens: Tokens, starts: NDArray[np.bool_], tags: Sequence[str], probabilities: NDArray[np.floating]
) -> list[Span]:
    """Return the names of a window, whatever the scheme of its tags: BIO, IOB1, BIOES, BILOU or plain kinds.

    A word has the tag of its first token, as taggers are trained. A name begins at B, S or U, if the kind changes,
    or after O, E, L, S or U; so a sequence that a scheme forbids is read as CoNLL's scorer reads it.

    Args:
        tokens: tokens of the window, [tokens]; one at least.
        starts: True for tokens that are the first of a word or mark, bool [tokens].
        tags: the label of each token, [tokens].
        probabilities: probabilities of these labels, [tokens].

    Returns:
        Spans of characters, each with the mean probability of its words' tags as its score.
    """
    firsts = np.union1d([0], np.flatnonzero(starts))  # a window may begin within a very long word
    lasts = np.append(firsts[1:], len(tokens.ids)) - 1  # the last token of each word
    spans: list[Span] = []
    words: list[int] = []  # of the name so far
    name_kind = ""
    open_kind: str | None = None  # `name_kind`, or None if the name is at its end
    for word, first in enumerate([*firsts.tolist(), None]):
        tag = OUTSIDE if first is None else tags[first]
        prefixed = PREFIXED.fullmatch(tag)
        prefix, word_kind = prefixed.groups() if prefixed else ("", "" if tag == OUTSIDE else tag)
        if words and (word_kind != open_kind or prefix in [*BEGINS]):
            start, end = int(tokens.starts[firsts[words[0]]]), int(tokens.ends[lasts[words[-1]]])
            spans.append(Span(start, end, name_kind, float(probabilities[firsts[words]].mean())))
            words = []
        if word_kind:
            words.append(word)
            name_kind = word_kind
        open_kind = None if prefix in [*ENDS] else word_kind
    return spans
