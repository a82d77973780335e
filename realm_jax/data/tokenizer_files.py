"""Read a tokenizer from the folder of a pretrained encoder, or from that of prepared data.

    vocab.txt               BERT's word pieces, one per line
    tokenizer.json          of the library tokenizers: any tokenizer, and how text is normalized
    tokenizer_config.json   of transformers: how text is normalized, if the tokenizer has a class like BertTokenizer
    settings.json           ours: true if text is put in lower case, in prepared data that have a vocab.txt

Word pieces with the defaults of BERT become a `WordPiece`; every other tokenizer becomes a `Tokenizer`, which keeps the
whole tokenizer.json. The rules are those of transformers, so that both give the same ids.
Next to read: `tokenizer.py`.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.data.tokenizer import TOKENIZER_CONFIG, TOKENIZER_FILE, Tokenizer, lowers
from realm_jax.data.wordpiece import (
    CLS,
    CONTINUATION,
    NORMALIZER,
    SEP,
    SETTINGS_FILE,
    SPECIAL_PIECES,
    UNK,
    VOCABULARY_FILE,
    WordPiece,
    read_bytes,
    read_pieces,
)
from realm_jax.errors import UserError
from realm_jax.storage import read_settings

logger = logging.getLogger(__name__)

MODEL_CONFIG = "config.json"
# Keys of tokenizer_config.json, and their names in a BertNormalizer.
NORMALIZER_KEYS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
# Classes of transformers that normalize as tokenizer_config.json says, whatever is in tokenizer.json.
BERT_CLASSES = frozenset(
    f"{name}Tokenizer{fast}"
    for name in ("Bert", "DistilBert", "Electra", "MobileBert", "MPNet", "Realm")
    for fast in ("", "Fast")
)
# Classes that use tokenizer.json as it is.
PLAIN_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
MODEL_CLASSES = {  # if no file names a class
    "bert": "BertTokenizer",
    "realm": "RealmTokenizer",
    "distilbert": "DistilBertTokenizer",
    "mpnet": "MPNetTokenizer",
}
SPLITTER = {"type": "BertPreTokenizer"}
MODEL = {
    "type": "WordPiece",
    "unk_token": UNK,
    "continuing_subword_prefix": CONTINUATION,
    "max_input_chars_per_word": 100,
}


class TokenizerFile(NamedTuple):
    """A tokenizer in a folder.

    Attributes:
        path: its file.
        lower_case: put text in lower case if that file does not say.
    """

    path: Path
    lower_case: bool

    @classmethod
    def of(cls, path: Path) -> "TokenizerFile":
        """Return the tokenizer of a file. Text is lower-cased unless a file of its folder keeps capitals."""
        stated = lower_case_of(path.parent)
        return cls(path, stated is None or stated.value)

    def read(self) -> Tokenizer:
        """Return the tokenizer, and warn if text in lower case never has some of its word pieces. Raises UserError."""
        tokenizer = read_tokenizer(self.path, self.lower_case)
        if self.lower_case and isinstance(tokenizer, WordPiece) and (cased := tokenizer.cased):
            logger.warning(
                "%s: %d word pieces have capital letters, such as %r, and are never used: text is lower-cased; to keep "
                'capitals, put a tokenizer_config.json with "do_lower_case": false into its folder',
                self.path,
                len(cased),
                cased[0],
            )
        return tokenizer

    def settings(self) -> dict[str, Any]:
        """Return the settings that PREPARED.json records next to the content of `path`. Raises UserError."""
        recorded: dict[str, Any] = {} if self.lower_case else {"lower_case": False}  # true is not recorded
        tokenizer = read_tokenizer(self.path, self.lower_case)
        if isinstance(tokenizer, WordPiece):
            return recorded
        special = {*tokenizer.pieces(tokenizer.special)}
        is_bert = tokenizer.model_type == "WordPiece" and special < {*SPECIAL_PIECES}
        if is_bert or tokenizer.files()[TOKENIZER_FILE] != read_bytes(self.path):
            recorded["tokenizer"] = tokenizer.fingerprint
        return recorded


class LowerCase(NamedTuple):
    """Case of a tokenizer's text.

    Attributes:
        path: the file that says so.
        value: True if the tokenizer puts text in lower case.
    """

    path: Path
    value: bool


def tokenizer_file(folder: Path) -> Path | None:
    """Return the file of the tokenizer in a folder; None if there is none. Raises UserError."""
    vocabulary, json_file = folder / VOCABULARY_FILE, folder / TOKENIZER_FILE
    if not json_file.is_file():
        return vocabulary if vocabulary.is_file() else None
    if vocabulary.is_file() and read_pieces(vocabulary) == _word_pieces(json_file):
        return vocabulary  # which prepared data record
    return json_file


def lower_case_of(folder: Path) -> LowerCase | None:
    """Return the case setting of a folder's tokenizer; None if no file has one.

    Of several files the first counts, as in transformers. Raises UserError for one that cannot be read.
    """
    settings = read_settings(folder / TOKENIZER_FILE)
    for name, value in (
        (TOKENIZER_CONFIG, _stated_normalizer(folder, settings).get("lowercase")),
        (TOKENIZER_FILE, settings.get("normalizer")),
        (SETTINGS_FILE, read_settings(folder / SETTINGS_FILE).get("lower_case")),
    ):
        value = lowers(value)
        if value is not None:
            return LowerCase(folder / name, value)
    return None


def read_tokenizer(path: Path, lower_case: bool) -> Tokenizer:
    """Read the tokenizer of a vocab.txt or of a JSON file of the library tokenizers, as the files of its folder say.

    Args:
        path: the file. A tokenizer.json with the same pieces next to a vocab.txt counts as well.
        lower_case: put text in lower case if no file says.

    Raises:
        UserError: a file cannot be read or is no usable tokenizer; the message names it.
    """
    json_file = path if path.suffix == ".json" else path.parent / TOKENIZER_FILE
    settings, pieces = read_settings(json_file), _word_pieces(json_file)
    if path != json_file and (listed := read_pieces(path)) != pieces:
        settings, pieces = {}, listed
    stated = _stated_normalizer(path.parent, settings)
    if pieces is None:
        return Tokenizer(read_bytes(json_file), str(path))
    if not _has_pre_tokenizer(settings):  # a list of pieces, even if some program wrote it as JSON
        normalizer = NORMALIZER | {"lowercase": lower_case} | stated
        word_pieces = WordPiece(pieces, normalizer["lowercase"], str(path))
        return word_pieces if _is_default(normalizer) else Tokenizer(word_pieces.to_json(normalizer), str(path))
    # Word pieces with the normalizer that the files of the folder state, as transformers reads them.
    as_read, normalizer = settings, _table(settings.get("normalizer"))
    if stated.keys() == NORMALIZER.keys():  # transformers then has all but the pieces from its class
        usual = {key: MODEL[key] for key in ("continuing_subword_prefix", "max_input_chars_per_word")}
        as_read = settings | {"normalizer": stated, "pre_tokenizer": SPLITTER, "model": settings["model"] | usual}
    elif normalizer.get("type") == NORMALIZER["type"]:
        as_read = settings | {"normalizer": normalizer | stated}
    model, added = as_read["model"], as_read.get("added_tokens") or []
    is_plain = (  # a `WordPiece` gives the same ids
        {*SPECIAL_PIECES} <= {*pieces}
        and _frame(settings) <= {CLS, SEP}  # MPNet has all pieces of BERT, and puts <s> and </s> around a text
        and {key: model.get(key) for key in MODEL} == MODEL
        and as_read["pre_tokenizer"] == SPLITTER
        and _is_default(as_read["normalizer"])
        and all(token.get("special") and model["vocab"].get(token["content"]) == token["id"] for token in added)
    )
    if is_plain:
        return WordPiece(pieces, as_read["normalizer"]["lowercase"], str(path))
    return Tokenizer(read_bytes(json_file) if as_read == settings else json.dumps(as_read).encode(), str(path))


def open_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of prepared data from the folder that `Tokenizer.save` wrote. Raises UserError."""
    path = folder / TOKENIZER_FILE
    return Tokenizer(read_bytes(path), str(path)) if path.is_file() else WordPiece.load(folder)


def tokenizer_of(files: Mapping[str, bytes], folder: str) -> Tokenizer | None:
    """Make the tokenizer of `Tokenizer.files`.

    Args:
        files: name → content.
        folder: folder of the files, for messages.

    Returns:
        The tokenizer; None if not all of its files are there.

    Raises:
        UserError: a file is damaged.
    """
    if TOKENIZER_FILE in files:
        return Tokenizer(files[TOKENIZER_FILE], f"{folder}/{TOKENIZER_FILE}")
    return WordPiece.from_files(files, folder) if {VOCABULARY_FILE, SETTINGS_FILE} <= {*files} else None


def _stated_normalizer(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of BERT's normalizer in the files next to a tokenizer.json or a vocab.txt.

    Args:
        folder: folder of the files.
        settings: the tokenizer.json; {} if there is none.

    Returns:
        Keys of a BertNormalizer: all of them if they count instead of those in tokenizer.json, and none if only
        tokenizer.json counts.
    """
    config, model = read_settings(folder / TOKENIZER_CONFIG), read_settings(folder / MODEL_CONFIG)
    stated = {
        key: config[name]
        for name, key in NORMALIZER_KEYS.items()
        if isinstance(config.get(name), bool) or (key == "strip_accents" and name in config)
    }
    names = config.get("tokenizer_class"), model.get("tokenizer_class"), MODEL_CLASSES.get(str(model.get("model_type")))
    class_name = next((name for name in names if isinstance(name, str) and name), None)
    if settings and class_name in PLAIN_CLASSES:
        return {}
    return NORMALIZER | stated if _has_pre_tokenizer(settings) and class_name in BERT_CLASSES else stated


def _has_pre_tokenizer(settings: dict[str, Any]) -> bool:
    """Return True for a tokenizer.json of word pieces that says how text is normalized and split."""
    return _table(settings.get("model")).get("type") == "WordPiece" and "pre_tokenizer" in settings


def _frame(settings: dict[str, Any]) -> set[str]:
    """Return the tokens that a tokenizer.json puts around a text."""
    processor = _table(settings.get("post_processor"))
    ends = [processor.get("cls"), processor.get("sep")]  # each with its id
    return {*_table(processor.get("special_tokens")), *(end[0] for end in ends if isinstance(end, list) and end)}


def _is_default(normalizer: Any) -> bool:
    """Return True for BERT's default normalizer, with or without lower case: accents go with capitals."""
    lower_case = _table(normalizer).get("lowercase")
    usual = NORMALIZER | {"lowercase": lower_case}
    return isinstance(lower_case, bool) and normalizer in (usual, usual | {"strip_accents": lower_case})


def _word_pieces(path: Path) -> list[str] | None:
    """Return the word pieces of a JSON file, in the order of ids; None for another tokenizer. Raises UserError."""
    model = _table(read_settings(path).get("model"))
    pieces = _table(model.get("vocab"))
    if model.get("type") != "WordPiece":
        return None
    if {*pieces.values()} != {*range(len(pieces))}:
        raise UserError(f"{path}: its word pieces are not numbered from 0 to {len(pieces) - 1}; fetch it again")
    return sorted(pieces, key=pieces.__getitem__)


def _table(value: Any) -> dict[str, Any]:
    """Return a value that should be a JSON object; an empty object for anything else."""
    return value if isinstance(value, dict) else {}
