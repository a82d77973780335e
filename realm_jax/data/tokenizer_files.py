"""Where a tokenizer is read from: the folder of a pretrained encoder, or that of prepared data.

    vocab.txt               BERT's word pieces, one a line
    tokenizer.json          of the library tokenizers: any tokenizer, and how text is normalised
    tokenizer_config.json   of transformers: whether text is put in lower case
    settings.json           ours: the same, in prepared data that have a vocab.txt

A `tokenizer.json` of BERT's word pieces is read as their list. Next to read: `tokenizer.py`.
"""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.data.tokenizer import TOKENIZER_CONFIG, TOKENIZER_FILE, Tokenizer, lowers
from realm_jax.data.wordpiece import SETTINGS_FILE, SPECIAL_PIECES, VOCABULARY_FILE, WordPiece, read_bytes
from realm_jax.errors import UserError
from realm_jax.storage import read_settings

logger = logging.getLogger(__name__)

# The files that say whether text is put in lower case, and the key in each.
SAYING = ((TOKENIZER_CONFIG, "do_lower_case"), (TOKENIZER_FILE, "normalizer"), (SETTINGS_FILE, "lower_case"))


class FoundTokenizer(NamedTuple):
    """The file of a tokenizer, and whether text is put in lower case where that file does not say."""

    path: Path
    lower_case: bool

    def read(self) -> Tokenizer:
        """The tokenizer, with a warning where text in lower case never meets some word pieces. Raises UserError."""
        tokenizer = read_tokenizer(self.path, self.lower_case)
        if self.lower_case and isinstance(tokenizer, WordPiece) and (cased := tokenizer.cased):
            logger.warning(
                "%s: %d word pieces have capital letters, such as %r, and are never used: text is lower-cased; to keep "
                'capitals, put a tokenizer_config.json with "do_lower_case": false beside it',
                self.path,
                len(cased),
                cased[0],
            )
        return tokenizer


class LowerCase(NamedTuple):
    """Whether a tokenizer puts text in lower case, and the file that says so."""

    path: Path
    value: bool


def tokenizer_file(folder: Path) -> Path | None:
    """The file of the tokenizer in a folder; None if there is none."""
    return next((folder / name for name in (VOCABULARY_FILE, TOKENIZER_FILE) if (folder / name).is_file()), None)


def lower_case_of(folder: Path) -> LowerCase | None:
    """Whether the tokenizer in a folder puts text in lower case; None if no file says.

    Of several files the first counts, as in transformers. Raises UserError for one that cannot be read.
    """
    for name, key in SAYING:
        value = lowers(read_settings(folder / name).get(key))
        if value is not None:
            return LowerCase(folder / name, value)
    return None


def read_tokenizer(path: Path, lower_case: bool) -> Tokenizer:
    """The tokenizer of a vocab.txt or of a JSON file of the library tokenizers.

    lower_case: whether text is put in lower case for a list of word pieces. Raises UserError, naming the file.
    """
    if path.suffix != ".json":
        return WordPiece.from_vocab(path, lower_case)
    pieces = _word_pieces(path)
    return Tokenizer(read_bytes(path), str(path)) if pieces is None else WordPiece(pieces, lower_case, str(path))


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of prepared data, from the folder that `Tokenizer.save` wrote. Raises UserError."""
    path = folder / TOKENIZER_FILE
    return Tokenizer(read_bytes(path), str(path)) if path.is_file() else WordPiece.load(folder)


def are_complete(names: Collection[str]) -> bool:
    """Whether files of these names are all that `Tokenizer.save` writes."""
    return TOKENIZER_FILE in names or {VOCABULARY_FILE, SETTINGS_FILE} <= {*names}


def tokenizer_of(files: Mapping[str, bytes], folder: str) -> Tokenizer:
    """The tokenizer of `Tokenizer.files`, which were read in `folder`. Raises UserError."""
    if TOKENIZER_FILE in files:
        return Tokenizer(files[TOKENIZER_FILE], f"{folder}/{TOKENIZER_FILE}")
    return WordPiece.from_files(files, folder)


def _word_pieces(path: Path) -> list[str] | None:
    """The pieces of a JSON file that has those of a BERT; None for another tokenizer. Raises UserError."""
    model = _table(read_settings(path).get("model"))
    pieces = _table(model.get("vocab"))
    if model.get("type") != "WordPiece":
        return None
    if {*pieces.values()} != {*range(len(pieces))}:
        raise UserError(f"{path}: its word pieces are not numbered from 0 to {len(pieces) - 1}; fetch it again")
    return sorted(pieces, key=pieces.__getitem__) if {*SPECIAL_PIECES} <= {*pieces} else None


def _table(value: Any) -> dict[str, Any]:
    """A value that should be a table of JSON; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}
