"""Word pieces: equal to the reference BERT's, trained the same way twice, and clear about a bad vocabulary."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.errors import UserError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
VOCABULARY = DATA / "bert_vocab" / "vocab.txt"
needs_data = pytest.mark.skipif(not VOCABULARY.exists(), reason="the reference word pieces are not on this machine")

SMALL = [*SPECIAL_PIECES, "cafe", "the", "un", "##able", "##s", ",", "[", "]", "mask", "a", "##b", "i"]


def lines_of(name: str) -> Iterator[dict]:
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


@pytest.fixture(scope="module")
def reference() -> WordPiece:
    return WordPiece.from_vocab(VOCABULARY)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "vocab.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@needs_data
def test_questions_equal_the_reference_word_pieces(reference: WordPiece) -> None:
    questions = list(lines_of("gold/wordpiece_questions.jsonl.gz"))
    encodings = reference.encode_batch([question["text"] for question in questions])
    assert [reference.pieces(ours.ids) for ours in encodings] == [question["wordpieces"] for question in questions]
    assert len(questions) == 2_643


@needs_data
def test_passages_equal_the_reference_ids(reference: WordPiece) -> None:
    gold = list(lines_of("gold/wordpiece_passages.jsonl.gz"))
    texts = {passage["id"]: passage["text"] for passage in lines_of("wiki_qa/passages.jsonl.gz")}
    assert all(reference.encode(texts[line["passage_id"]]).ids == line["ids"] for line in gold) and len(gold) == 528


def test_offsets_are_characters_of_the_text_as_given() -> None:
    text = "  Café, the UNABLES"
    encoding = WordPiece(SMALL).encode(text)
    assert [text[start:end] for start, end in encoding.offsets] == ["Café", ",", "the", "UN", "ABLE", "S"]
    assert WordPiece(SMALL).pieces(encoding.ids) == ["cafe", ",", "the", "un", "##able", "##s"]


@given(st.text())
def test_offsets_are_in_order_and_within_any_text(text: str) -> None:
    last = 0
    for start, end in WordPiece(SMALL).encode(text).offsets:
        assert last <= start <= end <= len(text)
        last = start


def test_special_tokens_in_text_are_text() -> None:
    tokenizer = WordPiece(SMALL)
    assert tokenizer.pieces(tokenizer.encode("the [MASK]").ids) == ["the", "[", "mask", "]"]


def test_encode_batch_gives_what_encode_gives() -> None:
    tokenizer = WordPiece(SMALL)
    assert tokenizer.encode_batch(["the cafe", ""]) == [tokenizer.encode("the cafe"), tokenizer.encode("")]


def test_decode_closes_up_continuations_and_leaves_padding_out() -> None:
    tokenizer = WordPiece(SMALL)
    ids = [tokenizer.mask_id, *tokenizer.encode("unables, the").ids, tokenizer.pad_id]
    assert tokenizer.decode(ids) == "[MASK] unables , the"


def test_save_and_load_keep_everything(tmp_path: Path) -> None:
    tokenizer = WordPiece(SMALL, lower_case=False)
    tokenizer.save(tmp_path / "tokenizer")
    again = WordPiece.load(tmp_path / "tokenizer")
    assert again.fingerprint == tokenizer.fingerprint
    assert again.special == tokenizer.special == (0, 2, 3, 4)
    assert again.encode("Cafe").ids == [again.unk_id]
    assert sorted(path.name for path in (tmp_path / "tokenizer").iterdir()) == ["settings.json", "vocab.txt"]


def test_fingerprint_changes_with_vocabulary_order_and_case() -> None:
    others = [*SMALL[:-2], SMALL[-1], SMALL[-2]], SMALL[:-1]
    tokenizers = WordPiece(SMALL), WordPiece(SMALL, lower_case=False), *map(WordPiece, others)
    assert len({tokenizer.fingerprint for tokenizer in tokenizers}) == 4


TEXTS = ["The lion of Kavad sleeps in Kavad, the lioness does not.", "Ströme fließen; lions roar 1843 times."] * 3


def test_a_trained_vocabulary_splits_and_rebuilds_its_own_text() -> None:
    tokenizer = WordPiece.train(TEXTS, size=120)
    assert tokenizer.size <= 120
    assert tokenizer.pieces(range(5)) == list(SPECIAL_PIECES)
    for text in TEXTS:
        encoding = tokenizer.encode(text)
        assert tokenizer.unk_id not in encoding.ids
        assert tokenizer.decode(encoding.ids).replace(" ", "") == text.lower().replace("ö", "o").replace(" ", "")
    assert len(tokenizer.encode("lion").ids) == 1


def test_training_gives_the_same_vocabulary_in_another_process() -> None:
    program = (
        "import sys, json; from realm_jax.data.wordpiece import WordPiece; "
        "print(WordPiece.train(json.loads(sys.argv[1]), 120).fingerprint)"
    )
    command = [sys.executable, "-c", program, json.dumps(TEXTS)]
    outputs = {subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)}
    assert outputs == {f"{WordPiece.train(iter(TEXTS), size=120).fingerprint}\n"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n", r"vocab\.txt: no \[MASK\]"),
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\nother\nword\n", r"vocab\.txt, line 8: 'word' repeats line 6"),
        ("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n", r"vocab\.txt: has only special tokens; choose a full vocabulary"),
        (b"[PAD]\n[UNK]\nM\xfcnchen\n", r"vocab\.txt, line 3: not UTF-8"),
        ("[PAD]\n\n[UNK]\n", r"vocab\.txt, line 2: an empty word piece"),
    ],
)
def test_a_bad_vocabulary_is_named_with_its_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        WordPiece.from_vocab(write(tmp_path, content))


@pytest.mark.parametrize("text", ["\r\n".join(SMALL) + "\r\n", "\ufeff" + "\n".join(SMALL)])
def test_windows_line_ends_and_a_byte_order_mark_are_no_part_of_a_piece(tmp_path: Path, text: str) -> None:
    assert WordPiece.from_vocab(write(tmp_path, text)).fingerprint == WordPiece(SMALL).fingerprint


def test_an_absent_or_foreign_tokenizer_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.settings\.json: cannot be read"):
        WordPiece.load(tmp_path / "nowhere")
    WordPiece(SMALL).save(tmp_path)
    (tmp_path / "settings.json").write_text('{"lower_case": true, "format_version": 2}')
    with pytest.raises(UserError, match="format_version 2"):
        WordPiece.load(tmp_path)
    (tmp_path / "settings.json").write_text("[]")
    with pytest.raises(UserError, match="not the settings of a tokenizer"):
        WordPiece.load(tmp_path)


def test_training_refuses_what_cannot_work() -> None:
    with pytest.raises(UserError, match="vocabulary size 70000"):
        WordPiece.train(TEXTS, size=70_000)
    with pytest.raises(UserError, match="no word"):
        WordPiece.train(["", "  "], size=100)
