"""Tokenizers as their files say: the ids of the library tokenizers, whatever the normalizer, in and out."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from made_tokenizers import bert, letters
from tokenizers import normalizers

from realm_jax.cli.prepare import prepare
from realm_jax.corpora.texts import identity
from realm_jax.data.sources import open_sources
from realm_jax.data.tokenizer import Tokenizer
from realm_jax.data.tokenizer_files import lower_case_of, open_tokenizer, read_tokenizer, tokenizer_file
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.errors import UserError

TEXTS = [
    "Le café MANGEAIT des crêpes brûlées, à côté.",
    unicodedata.normalize("NFD", "Cảng đóng cửa vào mùa đông."),
    "東京はJapanの首都です。港口冬天关闭",
    "المِيناءُ مُغلَقٌ بंदरगाह सर्दियों में",
    "zero\u200bwidth con\x07trol soft\u00adhyphen \ufffd abcdefghijklmnop [MASK]",
]
PIECES = sorted({*letters("".join(TEXTS)), *letters(unicodedata.normalize("NFD", "".join(TEXTS).lower()))})


def model_folder(folder: Path, whole: bytes | None, config: dict[str, Any] | None, vocabulary: bool = False) -> Path:
    """A model's folder with its tokenizer.json, its tokenizer_config.json and its vocab.txt."""
    folder.mkdir()
    (folder / "model.safetensors").touch()
    if whole is not None:
        (folder / "tokenizer.json").write_bytes(whole)
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if vocabulary:
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in [*SPECIAL_PIECES, *PIECES]))
    return folder


def read(folder: Path) -> Tokenizer:
    said, path = lower_case_of(folder), tokenizer_file(folder)
    assert path is not None
    return read_tokenizer(path, said is None or said.value)


def ids_of(content: bytes, texts: list[str] = TEXTS) -> list[list[int]]:
    """The ids of the library, without special tokens."""
    library = tokenizers.Tokenizer.from_str(content.decode())
    library.encode_special_tokens = True
    return [library.encode(text, add_special_tokens=False).ids for text in texts]


def assert_same_ids(tokenizer: Tokenizer, content: bytes) -> None:
    assert [encoding.ids for encoding in tokenizer.encode_batch(TEXTS)] == ids_of(content)


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name → changes of the model and of the normalizer
    "defaults": ({}, {}),
    "cased": ({}, {"lowercase": False}),
    "accents in lower case": ({}, {"strip_accents": False}),
    "cased without accents": ({}, {"lowercase": False, "strip_accents": True}),
    "Chinese words": ({}, {"handle_chinese_chars": False}),
    "unclean": ({}, {"clean_text": False}),
    "short words": ({"max_input_chars_per_word": 5}, {}),
    "another prefix": ({"continuing_subword_prefix": "@@"}, {}),
}


@pytest.mark.parametrize("config", [None, {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True}])
@pytest.mark.parametrize("name", CHANGES)
def test_a_tokenizer_json_is_used_as_it_is_and_so_is_its_export(name, config, tmp_path):
    model, normalizer = CHANGES[name]
    content = bert(PIECES, model, **normalizer)
    tokenizer = read(model_folder(tmp_path / "model", content, config))
    assert_same_ids(tokenizer, content)
    assert isinstance(tokenizer, WordPiece) == (name in ("defaults", "cased"))
    assert tokenizer.lower_case == normalizer.get("lowercase", True)
    exported = model_folder(tmp_path / "out", None, None)
    for file, part in tokenizer.pretrained_files(64).items():
        (exported / file).write_bytes(part)
    (exported / "config.json").write_text('{"model_type": "bert"}')
    assert read(exported).fingerprint == tokenizer.fingerprint
    assert_same_ids(read(exported), content)


@pytest.mark.parametrize(
    "stated", [{"lowercase": True, "strip_accents": True}, {"lowercase": False, "strip_accents": False}]
)
def test_a_normalizer_that_states_the_defaults_gives_the_usual_word_pieces(stated, tmp_path):
    tokenizer = read(model_folder(tmp_path / "model", bert(PIECES, **stated), None))
    assert tokenizer.fingerprint == WordPiece([*SPECIAL_PIECES, *PIECES], stated["lowercase"]).fingerprint


STATED = {  # tokenizer_config.json → the normalizer that transformers makes of it
    "defaults": ({}, {}),
    "cased": ({"do_lower_case": False}, {"lowercase": False}),
    "accents": ({"strip_accents": False}, {"strip_accents": False}),
    "Chinese": ({"tokenize_chinese_chars": False}, {"handle_chinese_chars": False}),
    "all": (
        {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
        {"lowercase": False, "strip_accents": True, "handle_chinese_chars": False},
    ),
}


@pytest.mark.parametrize("files", ["vocab.txt", "tokenizer.json", "both"])
@pytest.mark.parametrize("name", STATED)
def test_the_normalizer_of_bert_tokenizer_is_what_its_config_says(name, files, tmp_path):
    config, normalizer = STATED[name]
    other = bert(PIECES, {"max_input_chars_per_word": 5}, clean_text=False, lowercase=False)
    whole = None if files == "vocab.txt" else other
    config = config | {"tokenizer_class": "BertTokenizer"}
    folder = model_folder(tmp_path / "model", whole, config, vocabulary=files != "tokenizer.json")
    assert_same_ids(read(folder), bert(PIECES, **normalizer))


def test_the_class_of_a_bert_is_known_from_its_model(tmp_path):
    folder = model_folder(tmp_path / "model", bert(PIECES, strip_accents=False), None)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    assert_same_ids(read(folder), bert(PIECES))


def test_a_tokenizer_json_with_other_pieces_counts_before_the_vocabulary(tmp_path):
    content = bert([*PIECES, "zero", "##width"], strip_accents=False)
    folder = model_folder(tmp_path / "model", content, None, vocabulary=True)
    assert_same_ids(read(folder), content)
    named = read_tokenizer(folder / "vocab.txt", True)
    assert_same_ids(named, bert(PIECES))


def test_tokens_that_were_added_are_found(tmp_path):
    library = tokenizers.Tokenizer.from_str(bert(PIECES).decode())
    library.add_tokens(["café MANGEAIT"])
    library.add_special_tokens(["[Q]"])
    tokenizer = read(model_folder(tmp_path / "model", library.to_str().encode(), None))
    assert_same_ids(tokenizer, library.to_str().encode())
    assert tokenizer.size == len(SPECIAL_PIECES) + len(PIECES) + 2


def test_special_tokens_are_known_by_name_without_a_post_processor(tmp_path):
    settings = json.loads(bert(PIECES, strip_accents=False)) | {"post_processor": None, "added_tokens": []}
    tokenizer = read(model_folder(tmp_path / "model", json.dumps(settings).encode(), None))
    assert tokenizer.special == (0, 2, 3, 4) and tokenizer.unk_id == 1


def test_an_exported_tokenizer_is_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    for number, (config, _) in enumerate(STATED.values()):
        folder = model_folder(tmp_path / f"model{number}", None, config | {"tokenizer_class": "BertTokenizer"}, True)
        out = tmp_path / f"out{number}"
        out.mkdir()
        for file, content in read(folder).pretrained_files(64).items():
            (out / file).write_bytes(content)
        for place in (folder, out):
            (place / "config.json").write_text('{"model_type": "bert"}')
            theirs = transformers.AutoTokenizer.from_pretrained(str(place))
            ours = [encoding.ids for encoding in read(folder).encode_batch(TEXTS[:-1])]
            assert theirs(TEXTS[:-1], add_special_tokens=False)["input_ids"] == ours


def test_the_fingerprints_of_usual_word_pieces_stay():
    small = [*SPECIAL_PIECES, "cafe", "the", "un", "##able", "##s"]
    assert WordPiece(small).fingerprint == "a6f5ba18a6afa067"
    assert WordPiece(small, lower_case=False).fingerprint == "f0660d0328d20569"


def test_prepared_data_keep_the_whole_tokenizer(tmp_path, passages):
    content = bert(PIECES, strip_accents=False)
    folder = model_folder(tmp_path / "model", content, None)
    prepare(passages, tmp_path / "data", vocab=folder, workers=1)
    tokenizer = open_tokenizer(tmp_path / "data" / "tokenizer")
    assert_same_ids(tokenizer, content)
    assert open_sources(tmp_path / "data").tokenizer.fingerprint == tokenizer.fingerprint == read(folder).fingerprint
    prepare(passages, tmp_path / "data", vocab=folder, workers=1)  # nothing to do


def test_a_config_that_changed_beside_the_same_vocabulary_is_another_tokenizer(tmp_path, passages, capsys):
    folder = model_folder(tmp_path / "model", None, {"strip_accents": False}, vocabulary=True)
    prepare(passages, tmp_path / "data", vocab=folder, workers=1)
    (folder / "tokenizer_config.json").write_text('{"strip_accents": true}')
    with pytest.raises(UserError, match="was prepared with other settings"):
        prepare(passages, tmp_path / "data", vocab=folder, workers=1)


@pytest.mark.parametrize("files", ["vocab.txt", "both"])
def test_prepared_data_with_usual_word_pieces_record_the_vocabulary_alone(files, tmp_path, passages):
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "tokenize_chinese_chars": True}
    whole = None if files == "vocab.txt" else bert(PIECES)
    folder = model_folder(tmp_path / "model", whole, config | {"strip_accents": None}, vocabulary=True)
    prepare(passages, tmp_path / "data", vocab=folder, workers=1)
    inputs = json.loads((tmp_path / "data" / "PREPARED.json").read_text())["inputs"]
    assert inputs["vocab"] == identity(folder / "vocab.txt") and not {"tokenizer", "lower_case"} & {*inputs["settings"]}
    assert sorted(path.name for path in (tmp_path / "data" / "tokenizer").iterdir()) == ["settings.json", "vocab.txt"]


def test_word_pieces_of_other_special_tokens_are_read_with_their_normalizer(tmp_path):
    settings = json.loads(
        bert(PIECES).decode().replace("[CLS]", "<s>").replace("[SEP]", "</s>").replace("[PAD]", "<pad>")
    )
    content = json.dumps(settings).replace("[MASK]", "<mask>").encode()
    folder = model_folder(tmp_path / "model", content, {"tokenizer_class": "MPNetTokenizer", "strip_accents": False})
    tokenizer = read(folder)
    library = tokenizers.Tokenizer.from_str(content.decode())
    library.normalizer = normalizers.BertNormalizer(strip_accents=False)
    assert_same_ids(tokenizer, library.to_str().encode())
    assert tokenizer.pieces(tokenizer.special) == ["<pad>", "<s>", "</s>", "<mask>"]


def test_a_tokenizer_that_does_not_name_its_model_is_read(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    settings = json.loads(library.to_str())
    del settings["model"]["type"]
    names = ["[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    settings["added_tokens"] = [
        {"id": 2 + n, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for n, name in enumerate(names)
    ]
    settings["post_processor"] = {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    assert read_tokenizer(tmp_path / "tokenizer.json", lower_case=True).model_type == "WordPiece"
