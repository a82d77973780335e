"""Pipelines of spaCy as finders of salient spans, `spacy:NAME`, and what all finders with a model share.

Names come from the model; dates from the rules of `spans.py`, as in REALM, whatever dates and numbers the model knows.
spaCy is imported when its finder is asked for, and the pipeline has to be on this machine. Its finder of BERTs is
`realm_jax/models/tagger.py`.
"""

import importlib
from collections.abc import Iterator, Sequence

from realm_jax.data import sentences
from realm_jax.data.spans import SalientSpanFinder, Span, find_dates, with_dates
from realm_jax.errors import UserError

# OntoNotes' kinds of dates and numbers: "two", "last year", "40 %" are nothing that a passage is found by.
NO_NAMES = frozenset("DATE TIME CARDINAL ORDINAL QUANTITY PERCENT MONEY".split())
PART = 50_000  # characters that spaCy gets at a time; it refuses a million, and memory grows with the text


def without_overlaps(text: str, names: Sequence[Span]) -> list[Span]:
    """Return the names in order, without white space at their ends; of two that overlap the first, and none of the
    kinds in `NO_NAMES`."""
    kept: list[Span] = []
    for name in sorted(names):
        characters = text[name.start : name.end]
        start = name.start + len(characters) - len(characters.lstrip())
        end = start + len(characters.strip())
        if name.kind not in NO_NAMES and (kept[-1].end if kept else 0) <= start < end:
            kept.append(Span(start, end, name.kind, name.score))
    return kept


def spacy_model(name: str) -> SalientSpanFinder:
    """Return the finder of `spacy:NAME`: a pipeline with named entities, such as en_core_web_trf. Its scores are all 1.

    Raises UserError if spaCy or the pipeline is not there, or if the pipeline has no named entities.
    """
    finder = f"span finder 'spacy:{name}'"
    try:
        spacy = importlib.import_module("spacy")
    except ImportError as fault:
        raise UserError(
            f"{finder}: needs spacy, which is not there ({fault}); pip install 'realm_jax[spacy]'"
        ) from None
    try:
        nlp = spacy.load(name)
    except Exception as fault:
        reason = " ".join(str(fault).split())[:200]
        raise UserError(f"{finder}: {type(fault).__name__}: {reason}; python -m spacy download {name}") from None
    if "ner" not in nlp.pipe_names:
        raise UserError(f"{finder}: the pipeline has no named entities; choose one with `ner`")

    def find(text: str) -> list[Span]:
        parts = [*_parts(text)]
        docs = nlp.pipe([text[start:end] for start, end in parts])
        names = [
            Span(entity.start_char + start, entity.end_char + start, entity.label_, 1.0)
            for (start, _), doc in zip(parts, docs, strict=True)
            for entity in doc.ents
        ]
        return with_dates(text, without_overlaps(text, names), find_dates(text))

    return find


def _parts(text: str) -> Iterator[tuple[int, int]]:
    """Ranges of whole sentences, each of at most `PART` characters, or of one sentence."""
    first, last = 0, 0
    for start, end in sentences.split(text):
        if last and end - first > PART:
            yield first, last
            last = 0
        first, last = (first if last else start), end
    if last:
        yield first, last
