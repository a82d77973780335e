"""Taggers of other libraries: stand-ins with the interfaces that they have, and what a user reads without them.

`transformers.pipeline` returns a list of dictionaries a text; spaCy's `Doc.ents` have `start_char`, `end_char` and
`label_`; Stanza's `Document.ents` have `start_char`, `end_char` and `type`.
"""

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from realm_jax.data import span_adapters
from realm_jax.data.spans import Span, finder
from realm_jax.errors import UserError

TEXT = "Ada Lovelace met two men in May 1843. She lived in London last year.\n\nHe knew Turing."
FOUND = [
    ("Ada Lovelace", "PERSON"),
    ("two", "CARDINAL"),
    ("May 1843", "DATE"),
    ("London ", "GPE"),  # some models take the space behind
    ("last year", "DATE"),
    ("Turing", "PERSON"),
]
WANTED = [("Ada Lovelace", "PERSON"), ("May 1843", "date"), ("London", "GPE"), ("Turing", "PERSON")]


def matches(text: str) -> list[tuple[int, int, str]]:
    """Where the names above stand in a text."""
    return [(m.start(), m.end(), kind) for name, kind in FOUND for m in re.finditer(re.escape(name), text)]


class Spacy:
    """`spacy.load(name)` → a pipeline with `pipe_names` and `pipe(texts)`."""

    pipe_names = ("tok2vec", "ner")
    longest = 0

    def pipe(self, texts: Any) -> Any:
        for text in texts:
            Spacy.longest = max(Spacy.longest, len(text))
            yield SimpleNamespace(
                ents=tuple(SimpleNamespace(start_char=a, end_char=b, label_=kind) for a, b, kind in matches(text))
            )


def spacy() -> ModuleType:
    def load(name: str) -> Spacy:
        if name == "en_core_web_sm":
            return Spacy()
        if name == "en_blank":
            blank = Spacy()
            blank.pipe_names = ("tok2vec",)
            return blank
        raise OSError(f"[E050] Can't find model '{name}'. It doesn't seem to be a Python package.")

    module = ModuleType("spacy")
    module.load = load
    return module


def stanza() -> ModuleType:
    class Pipeline:
        def __init__(self, lang: str, processors: str, verbose: bool, download_method: Any) -> None:
            assert processors == "tokenize,ner" and not verbose and download_method is None
            if lang != "en":
                raise FileNotFoundError(f"Could not find the model file {lang}/ner.pt.")

        def __call__(self, text: str) -> SimpleNamespace:
            ents = [SimpleNamespace(start_char=a, end_char=b, type=kind) for a, b, kind in matches(text)]
            return SimpleNamespace(ents=ents)

    module = ModuleType("stanza")
    module.Pipeline = Pipeline
    return module


def transformers(fast: bool = True) -> ModuleType:
    class Pipe:
        def __init__(self) -> None:
            self.tokenizer = SimpleNamespace(is_fast=fast, model_max_length=10**30)
            self.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=512))

        def __call__(self, texts: list[str], batch_size: int) -> list[list[dict]]:
            assert self.tokenizer.model_max_length == 510 and texts and batch_size
            assert "\n" not in "".join(texts)  # a sentence at a time
            return [
                [
                    {"entity_group": kind, "score": 0.75, "word": text[a:b].lower(), "start": a, "end": b}
                    for a, b, kind in matches(text)
                ]
                for text in texts
            ]

    def pipeline(task: str, model: str, aggregation_strategy: str, model_kwargs: dict) -> Pipe:
        assert (task, aggregation_strategy) == ("token-classification", "simple")
        assert model_kwargs == {"use_safetensors": True}  # never a pickle
        if model != "dslim/bert-base-NER":
            raise OSError(f"{model} is not a local folder and is not a valid model identifier")
        return Pipe()

    module = ModuleType("transformers")
    module.pipeline = pipeline
    return module


LIBRARIES = {"spacy": spacy, "stanza": stanza, "transformers": transformers}
NAMES = {"spacy": "spacy:en_core_web_sm", "stanza": "stanza:en", "transformers": "hf:dslim/bert-base-NER"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_names_of_the_model_and_dates_of_the_rules(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, LIBRARIES[library]())
    find = finder(NAMES[library])
    spans = find(TEXT)
    assert [(TEXT[span.start : span.end], span.kind) for span in spans] == WANTED
    score = 0.75 if library == "transformers" else 1.0
    assert [span.score for span in spans] == [score, 1.0, score, score]
    assert find("") == [] and find("\n\n") == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_is_not_there_is_named_with_what_to_install(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=rf"{NAMES[library]}'.*needs {library}.*pip install 'realm_jax\[{library}\]'"):
        finder(NAMES[library])


@pytest.mark.parametrize(
    "name, says",
    [
        ("spacy:xx_none", r"OSError: \[E050\] Can't find model 'xx_none'.*; python -m spacy download xx_none"),
        ("spacy:en_blank", "the pipeline has no named entities"),
        ("stanza:xx", "FileNotFoundError: Could not find the model file xx/ner.pt"),
        ("hf:no/body", "OSError: no/body is not a local folder .*; name a model with model.safetensors"),
    ],
)
def test_a_model_that_is_not_there_is_an_error_of_one_line(monkeypatch, name, says):
    for library, make in LIBRARIES.items():
        monkeypatch.setitem(sys.modules, library, make())
    with pytest.raises(UserError, match=f"^span finder '{name}': {says}") as raised:
        finder(name)
    assert "\n" not in str(raised.value)


def test_a_slow_tokenizer_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", transformers(fast=False))
    with pytest.raises(UserError, match="choose a model with a fast tokenizer"):
        finder(NAMES["transformers"])


def test_long_texts_go_through_in_parts(monkeypatch):
    """Each of whole sentences, and spans count characters of the whole."""
    monkeypatch.setitem(sys.modules, "spacy", spacy())
    monkeypatch.setattr(span_adapters, "PART", 100)
    Spacy.longest = 0
    text = " ".join([TEXT] * 20)
    spans = finder(NAMES["spacy"])(text)
    assert [(text[span.start : span.end], span.kind) for span in spans] == WANTED * 20
    assert 60 < Spacy.longest <= 100


def test_of_two_names_that_overlap_the_first_stays(monkeypatch):
    monkeypatch.setitem(sys.modules, "stanza", stanza())
    monkeypatch.setattr(sys.modules[__name__], "FOUND", [("New York", "GPE"), ("York Times", "ORG"), ("Times", "ORG")])
    assert finder(NAMES["stanza"])("The New York Times") == [Span(4, 12, "GPE", 1.0), Span(13, 18, "ORG", 1.0)]
