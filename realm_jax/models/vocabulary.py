"""The word pieces of a pretrained encoder, from the files of its tokenizer, which lie beside its weights.

    vocab.txt               one piece a line
    tokenizer.json          of the library tokenizers: the pieces once more, and how text is normalised
    tokenizer_config.json   of transformers: whether text is put in lower case

Not for the vocabulary of prepared data, which `WordPiece.load` reads; a folder of that kind is understood all the same.
Read next: `realm_jax/text/wordpiece.py`.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

from realm_jax.errors import UserError
from realm_jax.models.sentence_folder import read_settings
from realm_jax.text.wordpiece import SETTINGS_FILE, VOCABULARY_FILE, WordPiece

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer_config.json"
FAST_TOKENIZER = "tokenizer.json"
SAYING = ((TOKENIZER, "do_lower_case"), (FAST_TOKENIZER, "normalizer"), (SETTINGS_FILE, "lower_case"))  # file, key


class VocabularyFile(NamedTuple):
    """A file of word pieces, and whether text is put in lower case for them."""

    path: Path
    lower_case: bool

    def read(self) -> WordPiece:
        """The vocabulary, with a warning where text in lower case never meets some of its pieces. Raises UserError."""
        wordpiece = read_vocabulary(self.path, self.lower_case)
        if self.lower_case and (cased := wordpiece.cased):
            logger.warning(
                "%s: %d word pieces have capital letters, such as %r, and are never used: text is lower-cased; to keep "
                'capitals, put a tokenizer_config.json with "do_lower_case": false beside it',
                self.path,
                len(cased),
                cased[0],
            )
        return wordpiece


class LowerCase(NamedTuple):
    """Whether a tokenizer puts text in lower case, and the file that says so."""

    path: Path
    value: bool


def vocabulary_file(folder: Path) -> Path | None:
    """The file with the word pieces of the tokenizer in a folder; None where there is none."""
    return next((folder / name for name in (VOCABULARY_FILE, FAST_TOKENIZER) if (folder / name).is_file()), None)


def read_vocabulary(path: Path, lower_case: bool) -> WordPiece:
    """The word pieces in a tokenizer.json, or in any other file one a line.

    Raises UserError for a tokenizer of another type than WordPiece, which it names, and for a damaged file.
    """
    if path.name != FAST_TOKENIZER:
        return WordPiece.from_vocab(path, lower_case)
    model = _table(read_settings(path).get("model"))
    if (kind := model.get("type")) != "WordPiece":
        raise UserError(f"{path}: a tokenizer of type {kind}, not WordPiece; choose an encoder with BERT's tokenizer")
    pieces = _table(model.get("vocab"))
    if {*pieces.values()} != {*range(len(pieces))}:
        raise UserError(f"{path}: its word pieces are not numbered from 0 to {len(pieces) - 1}; fetch it again")
    return WordPiece(sorted(pieces, key=pieces.__getitem__), lower_case, str(path))


def _table(value: Any) -> dict[str, Any]:
    """A value that should be a table of JSON; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def lower_case_of(folder: Path) -> LowerCase | None:
    """Whether the tokenizer in a folder puts text in lower case; None where no file says.

    Of several files the first counts, as in transformers. Raises UserError for one that cannot be read.
    """
    for name, key in SAYING:
        value = _lowers(read_settings(folder / name).get(key))
        if value is not None:
            return LowerCase(folder / name, value)
    return None


def _lowers(value: Any) -> bool | None:
    """Whether text is put in lower case. value: true or false, or a normalizer of the library tokenizers; None for
    anything else, which does not say."""
    if not isinstance(value, dict):
        return value if isinstance(value, bool) else None
    if value.get("type") == "Sequence":
        return any(_lowers(part) for part in value.get("normalizers", []))
    return value.get("type") == "Lowercase" or bool(value.get("lowercase"))
