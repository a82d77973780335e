"""A tokenizer like XLM-R's: a Unigram model of 70,000 pieces with marks for spaces, from texts to an answer."""

import json
import pickle
import random
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import ended
from ml_collections import ConfigDict
from pretrained_encoders import byte_pairs
from tiny_run import PEOPLE, question, tiny_config, write_lines
from tokenizers import decoders, models, normalizers, pre_tokenizers

from realm_jax.assemble import make_run
from realm_jax.cli import main as cli
from realm_jax.cli.inspect import spans_in_text
from realm_jax.cli.prepare import prepare
from realm_jax.config import validate
from realm_jax.data.examples import Lengths
from realm_jax.data.sources import Sources, open_sources
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.errors import UserError
from realm_jax.models.prompts import compiled
from realm_jax.tasks.qa_examples import gold_row
from realm_jax.train.recipe import train
from realm_jax.train.workdir import check_workdir

SIZE = 70_000  # more than uint16 has numbers for
TEXTS = [
    f"{name} was born ({1800 + n}). The house of {name} in {name[:3]}ville stands since May {1900 + n}."
    for n, name in enumerate(PEOPLE)
]


def unigram(size: int) -> bytes:
    """The JSON of a tokenizer like XLM-R's: words of the texts with and without a mark, characters, random filler."""
    rng, text = random.Random(0), " ".join([*TEXTS, "When was the query: title: text: |"])
    words = dict.fromkeys(re.findall(r"\w+|[^\w\s]", text))
    likely = dict.fromkeys([*(f"▁{word}" for word in words), *words, "▁", *sorted({*text})])
    filler: dict[str, None] = {}
    while len(filler) < size - 5 - len(likely):
        filler["▁" + "".join(rng.choices("bcdfghjklmnpqrstvwxz", k=6))] = None  # not a word of the texts: no vowel
    pieces = [(piece, 0.0) for piece in ("<s>", "<pad>", "</s>", "<unk>")]
    pieces += [*((piece, -5.0 - len(piece) / 99) for piece in likely), *((piece, -30.0) for piece in filler)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return ended(tokenizer, ["<pad>", "<unk>", "<s>", "</s>", "<mask>"])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(unigram(SIZE))


@pytest.fixture(scope="module")
def data(tokenizer, tmp_path_factory) -> Path:
    """A prepared folder of sixteen people."""
    folder = tmp_path_factory.mktemp("unigram")
    tokenizer.save(folder)
    passages = [{"id": f"p{n}", "title": name, "text": TEXTS[n]} for n, name in enumerate(PEOPLE)]
    asked = [question(n, gold_passage_id=f"p{n}", split=split) for n in range(8) for split in ("train", "dev")]
    files = write_lines(folder / "passages.jsonl", passages), write_lines(folder / "questions.jsonl", asked)
    prepare(files[0], folder / "data", questions=[files[1]], vocab=folder / "tokenizer.json", workers=1)
    return folder / "data"


@pytest.fixture(scope="module")
def sources(data) -> Sources:
    return open_sources(data)


def test_special_tokens_and_the_size_of_ids_are_the_tokenizer_s(tokenizer):
    assert tokenizer.size == SIZE and tokenizer.dtype == np.uint32
    assert tokenizer.pieces(tokenizer.special) == ["<pad>", "<s>", "</s>", "<mask>"]
    assert tokenizer.pieces([tokenizer.unk_id]) == ["<unk>"] and len(tokenizer.special_ids) == 5
    assert not {*tokenizer.encode("<mask></s> </s>").ids} & {*tokenizer.special}
    assert not tokenizer.lower_case


def test_words_are_tokens_with_a_letter_or_a_digit(tokenizer):
    ids = [*tokenizer.encode("was born (1801) .").ids, *tokenizer.special, tokenizer.unk_id]
    words = [piece for piece, is_word in zip(tokenizer.pieces(ids), tokenizer.is_word[ids], strict=True) if is_word]
    assert words == ["▁was", "▁born", "1801"] and len(tokenizer.is_word) == tokenizer.size
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    byte_level = Tokenizer(ended(byte_pairs((*special,), 400, ["born – “in” ’", "in – born “"] * 9), special))
    ids = byte_level.encode("born – “in” 日").ids
    words = [byte_level.decode([number]).strip() for number in ids if byte_level.is_word[number]]
    assert "".join(words).replace("\N{REPLACEMENT CHARACTER}", "") == "bornin"
    pieces = WordPiece([*SPECIAL_PIECES, "18", "##a", "?", "##.", "日"])
    assert pieces.is_word.tolist() == [False] * 5 + [True, True, False, False, True]


def test_a_saved_or_sent_tokenizer_is_the_same(tokenizer, tmp_path):
    assert pickle.loads(pickle.dumps(tokenizer)).fingerprint == tokenizer.fingerprint
    cut = {"max_length": 8, "direction": "Right", "strategy": "LongestFirst", "stride": 0}
    padded = json.loads(unigram(SIZE)) | {"truncation": cut}
    assert Tokenizer(json.dumps(padded).encode()).fingerprint == tokenizer.fingerprint
    assert Tokenizer(unigram(SIZE - 1)).fingerprint != tokenizer.fingerprint


def test_what_lacks_a_token_is_refused(tmp_path):
    plain = json.loads(unigram(1000))
    with pytest.raises(UserError, match=r"tokenizer.json: has no token for \[CLS\] \[SEP\]; choose"):
        Tokenizer(json.dumps(plain | {"post_processor": None}).encode())
    with pytest.raises(UserError, match="model.json: cannot be read as a tokenizer"):
        Tokenizer(b"{}", "model.json")


def test_offsets_are_words_without_the_space_before_them(tokenizer):
    text = "  Ada   Almgren\nwas born (1801). "
    found = [text[start:end] for start, end in tokenizer.encode(text).offsets]
    assert [word for word in found if word] == ["Ada", "Almgren", "was", "born", "(", "1801", ")", "."]


@settings(max_examples=60)
@given(st.lists(st.text(alphabet="ab 1(日\n.", max_size=12), max_size=4))
def test_any_text_is_the_same_in_any_company(tokenizer, texts):
    for text, alone in zip(texts, tokenizer.tokens(texts), strict=True):
        assert alone.ids.tolist() == tokenizer.encode(text).ids
        assert len(tokenizer.unit_starts(text, alone)) == len(alone.ids)
        assert (alone.starts <= alone.ends).all() and (np.diff(alone.starts) >= 0).all()
        assert not len(alone.ids) or alone.ends[-1] <= len(text)
        parts = [tokenizer.encode(line).ids for line in text.split("\n")]
        assert alone.ids.tolist() == [number for part in parts for number in part]


def test_a_word_has_a_form_behind_a_space_and_one_behind_a_mark(tokenizer):
    assert [tokenizer.pieces(form) for form in tokenizer.forms("1801")] == [["▁1801"], ["1801"]]
    assert WordPiece([*SPECIAL_PIECES, "18"]).forms("18") == [[5]]


def test_tokens_of_a_stretch_are_found_in_its_text(tokenizer):
    whole = tokenizer.encode("born (1801) in Adaville")
    place = tokenizer.pieces(whole.ids).index("1801")
    offsets = tokenizer.offsets_of("1801) in Adaville", np.array(whole.ids[place:]))
    assert offsets.tolist()[:3] == [[0, 4], [4, 5], [6, 8]]
    assert tokenizer.offsets_of("801) in Adaville", np.array(whole.ids[place:])) is None


def test_prompts_are_laid_around_tokens(tokenizer):
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    template = compiled("title: {title} | text: {text}", "key", True, encode)
    whole = encode("title: Ada Dahl | text: was born")
    assert [*template.before, *encode("Ada Dahl"), *template.between, *encode("was born")] == whole
    with pytest.raises(UserError, match="cannot be laid around texts with this tokenizer"):
        compiled("{title}, text: {text}", "key", True, encode)


def test_a_store_holds_its_tokens_sentences_and_spans(data, sources):
    store, tokenizer = sources.passages, sources.tokenizer
    assert store.dtype == np.uint32 and store.body_tokens(0).dtype == np.uint32
    assert store.tokenizer_fingerprint == tokenizer.fingerprint
    assert sorted(path.name for path in (data / "tokenizer").iterdir()) == ["tokenizer.json"]
    rows = range(len(store))
    spans = [[store.text(row)[start:end] for start, end, _ in spans_in_text(store, row, tokenizer)] for row in rows]
    assert len(store) == len(PEOPLE) and all(any("ville" in span for span in found) for found in spans)
    assert {"May 1903"} <= {*spans[store.rows_of("p3")[0]]}
    ids, lengths, titles = store.document_matrix(48, tokenizer.special)
    assert ids.dtype == np.uint32 and (ids[:, 0] == tokenizer.cls_id).all()
    row = ids[0][: lengths[0]].tolist()
    assert row[titles[0] + 1] == row[-1] == tokenizer.sep_id
    assert row[1 : titles[0] + 1] == store.title_tokens(0).tolist()


def test_an_answer_is_found_behind_a_mark(sources):
    """The years of birth stand behind a parenthesis alone, where they have no mark for a space."""
    lengths = Lengths(query=16, document=48, predictions=4, answers=2, span_width=3)
    rows = [gold_row(sources.passages, one, sources.tokenizer, lengths) for one in sources.questions["dev"]]
    assert rows == [*range(8)]


def config_of(data: Path, tasks: str) -> ConfigDict:
    config = tiny_config(data)
    config.tasks, config.model.width = tasks, 8  # each table has 70,000 rows
    for task in tasks.split(","):
        config[task].update({"steps": 2, "batch_size": 4})
    return config


@pytest.mark.slow
@pytest.mark.parametrize("tasks", ["mlm,ict,realm,qa", "closed_book"])
def test_every_task_learns_and_answers(tasks, data, sources, tmp_path, capsys):
    config = config_of(data, tasks)
    validate(config)
    run = make_run(config, tmp_path / "run", sources, jax.devices()[:1])
    check_workdir(run)
    train(run)
    workdir = f"--workdir={tmp_path / 'run'}"
    if tasks == "closed_book":
        assert cli.main(["predict", workdir, f"--output={tmp_path / 'predictions.jsonl'}"]) == 0
        lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
        assert [type(line["prediction"]) for line in lines] == [str] * 8
        assert all(0 <= line["probability"] <= 1 for line in lines)  # 70,000 ** -10 is 0 in float32
    else:
        assert cli.main(["ask", workdir, "--json", question(3)["question"]]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["answer"] in answer["passage"]["text"]
