"""Taggers of other libraries as finders of salient spans: `hf:NAME`, `spacy:NAME`, `stanza:LANGUAGE`.

A library is imported when its finder is asked for, and none is required. Names come from the model; dates from the
rules of `spans.py`, as in REALM, whatever dates and numbers the model knows. Models of spaCy and Stanza have to be on
this machine already; Hugging Face's library fetches what is not. Next to read: `_Adapter`.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from realm_jax.data import sentences
from realm_jax.data.spans import SalientSpanFinder, Span, find_dates, with_dates
from realm_jax.errors import UserError

# OntoNotes' kinds of dates and numbers: "two", "last year", "40 %" are nothing that a passage is found by.
NO_NAMES = frozenset("DATE TIME CARDINAL ORDINAL QUANTITY PERCENT MONEY".split())
PART = 50_000  # characters that a library gets at a time; spaCy refuses a million, and memory grows with the text
BATCH = 32  # sentences that a Hugging Face pipeline reads at a time


class _Adapter:
    """Names of a library's model in parts of a text, and the rules' dates."""

    def __init__(self, tag: Callable[[Sequence[str]], list[list[Span]]], most: int) -> None:
        """tag: the names of some texts, in their own characters. most: characters of a text; 0: single sentences."""
        self._tag, self._most = tag, most

    def __call__(self, text: str) -> list[Span]:
        parts = list(_parts(text, self._most))
        found = self._tag([text[start:end] for start, end in parts])
        names = [
            Span(span.start + start, span.end + start, span.kind, span.score)
            for (start, _), spans in zip(parts, found, strict=True)
            for span in spans
        ]
        return with_dates(text, list(_apart(text, names)), find_dates(text))


def _parts(text: str, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole sentences, each of at most `most` characters, or of one sentence."""
    first, last = 0, 0
    for start, end in sentences.split(text):
        if last and end - first > most:
            yield first, last
            last = 0
        first, last = (first if last else start), end
    if last:
        yield first, last


def _apart(text: str, names: Sequence[Span]) -> Iterator[Span]:
    """Names in order, without white space at their ends; of two that overlap the first, of kinds that count."""
    reached = 0
    for name in sorted(names):
        own = text[name.start : name.end]
        start = name.start + len(own) - len(own.lstrip())
        end = start + len(own.strip())
        if name.kind not in NO_NAMES and reached <= start < end:
            yield Span(start, end, name.kind, name.score)
            reached = end


def hugging_face(name: str) -> SalientSpanFinder:
    """`hf:NAME`: a token classification model by the name of its repository or by its folder, in safetensors.

    Scores are the mean probabilities that the pipeline gives.
    """
    finder = f"hf:{name}"
    transformers = _library("transformers", finder)
    try:
        pipe = transformers.pipeline(
            "token-classification", model=name, aggregation_strategy="simple", model_kwargs={"use_safetensors": True}
        )
    except Exception as fault:  # of its own kinds, of torch and of the hub
        raise _unusable(finder, fault, "name a model with model.safetensors, or its folder") from None
    if not pipe.tokenizer.is_fast:
        raise UserError(f"span finder {finder!r}: its tokenizer gives no offsets; choose a model with a fast tokenizer")
    positions = getattr(pipe.model.config, "max_position_embeddings", None)
    if positions:  # many tokenizers do not know; what is longer is cut. RoBERTa's first two positions are no places
        pipe.tokenizer.model_max_length = min(pipe.tokenizer.model_max_length, positions - 2)

    def tag(texts: Sequence[str]) -> list[list[Span]]:
        found = pipe(list(texts), batch_size=BATCH) if texts else []
        return [
            [Span(one["start"], one["end"], one["entity_group"], float(one["score"])) for one in names]
            for names in found
        ]

    return _Adapter(tag, most=0)


def spacy_model(name: str) -> SalientSpanFinder:
    """`spacy:NAME`: a spaCy pipeline with named entities, such as en_core_web_trf. It gives no scores: all are 1."""
    finder = f"spacy:{name}"
    spacy = _library("spacy", finder)
    try:
        nlp = spacy.load(name)
    except Exception as fault:
        raise _unusable(finder, fault, f"python -m spacy download {name}") from None
    if "ner" not in nlp.pipe_names:
        raise UserError(f"span finder {finder!r}: the pipeline has no named entities; choose one with `ner`")

    def tag(texts: Sequence[str]) -> list[list[Span]]:
        return [[Span(e.start_char, e.end_char, e.label_, 1.0) for e in doc.ents] for doc in nlp.pipe(texts)]

    return _Adapter(tag, PART)


def stanza_model(language: str) -> SalientSpanFinder:
    """`stanza:LANGUAGE`: Stanza's models of a language, such as en. It gives no scores: all are 1."""
    finder = f"stanza:{language}"
    stanza = _library("stanza", finder)
    try:
        nlp = stanza.Pipeline(language, processors="tokenize,ner", verbose=False, download_method=None)
    except Exception as fault:
        raise _unusable(finder, fault, f"python -c 'import stanza; stanza.download(\"{language}\")'") from None

    def tag(texts: Sequence[str]) -> list[list[Span]]:
        return [[Span(e.start_char, e.end_char, e.type, 1.0) for e in nlp(text).ents] for text in texts]

    return _Adapter(tag, PART)


def _library(name: str, finder: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as fault:
        raise UserError(
            f"span finder {finder!r}: needs {name}, which is not there ({fault}); pip install 'realm_jax[{name}]'"
        ) from None


def _unusable(finder: str, fault: Exception, advice: str) -> UserError:
    reason = " ".join(str(fault).split())[:200]
    return UserError(f"span finder {finder!r}: {type(fault).__name__}: {reason}; {advice}")
