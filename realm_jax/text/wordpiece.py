"""Word pieces: text to ids and back, with the vocabulary of a BERT or one learned from the user's own text.

The Rust library `tokenizers` does the splitting (BERT's basic tokenizer, then longest match first); this class adds
what a corpus needs around it: reading and checking a vocabulary, character offsets, training that gives the same
vocabulary each time, and a fingerprint that ties corpus, index and checkpoint to one vocabulary.

A vocabulary is read from what lies beside a pretrained encoder's weights, or from the folder of prepared data:

    vocab.txt               one piece a line
    tokenizer.json          of the library tokenizers: the pieces once more, and how text is normalised
    tokenizer_config.json   of transformers: whether text is put in lower case
    settings.json           ours: the same, in prepared data

No special token is ever made from text: "[MASK]" in a passage is three pieces, "[", "mask" and "]".
Next to read: `layouts.py`, which puts the special tokens around ids.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from realm_jax.errors import UserError
from realm_jax.storage import read_settings, write_atomic
from realm_jax.text.layouts import Special

logger = logging.getLogger(__name__)

PAD, UNK, CLS, SEP, MASK = SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY_FILE = "vocab.txt"
SETTINGS_FILE = "settings.json"
TOKENIZER = "tokenizer_config.json"
FAST_TOKENIZER = "tokenizer.json"
SAYING = ((TOKENIZER, "do_lower_case"), (FAST_TOKENIZER, "normalizer"), (SETTINGS_FILE, "lower_case"))  # file, key
FILES = (VOCABULARY_FILE, SETTINGS_FILE)  # in the order in which they are written
FORMAT_VERSION = 1
MAX_SIZE = 65_535  # ids are stored as uint16
MIN_TRAINED_SIZE = 64  # the special tokens and both forms of a few dozen characters
MAX_ALPHABET = 1_000  # distinct characters of a trained vocabulary: enough for any alphabet, not for every ideograph
CONTINUATION = "##"


class Encoding(NamedTuple):
    """Word pieces of one text, without special tokens: ids, and the range of characters in the text of each."""

    ids: list[int]
    offsets: list[tuple[int, int]]


def check_size(size: int) -> None:
    """Raise UserError for a size that no vocabulary can be learned in."""
    if not MIN_TRAINED_SIZE <= size <= MAX_SIZE:
        raise UserError(f"vocabulary size {size}: choose between {MIN_TRAINED_SIZE} and {MAX_SIZE}")


class WordPiece:
    """A vocabulary of word pieces. Made by `from_vocab`, `load` or `train`; never changed afterwards."""

    def __init__(self, vocabulary: Sequence[str], lower_case: bool = True, source: str = "vocabulary") -> None:
        """Check `vocabulary` (the piece of id i stands at place i) and build the tokenizer.

        Raises:
            UserError: empty, too large, a piece twice, or a special token missing; the message names `source`.
        """
        _check(vocabulary, source)
        self.lower_case = lower_case
        self._vocabulary = tuple(vocabulary)
        ids = {piece: number for number, piece in enumerate(vocabulary)}
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (ids[piece] for piece in SPECIAL_PIECES)
        self._tokenizer = _tokenizer(ids, lower_case)

    @classmethod
    def from_vocab(cls, path: str | Path, lower_case: bool = True) -> "WordPiece":
        """Read a BERT `vocab.txt` (UTF-8, one piece a line, the id is the line number from 0) or a `tokenizer.json`.

        Raises:
            UserError: the file cannot be read, is a tokenizer of another type, or is no usable vocabulary; names the
                file and, where one is at fault, the line (from 1).
        """
        path = Path(path)
        vocabulary = _fast_vocabulary(path) if path.name == FAST_TOKENIZER else _lines(_read(path), path)
        return cls(vocabulary, lower_case, str(path))

    @classmethod
    def load(cls, folder: str | Path) -> "WordPiece":
        """Read what `save` wrote.

        Raises:
            UserError: a file is absent, damaged or of another format version.
        """
        return cls.from_files({name: _read(Path(folder) / name) for name in (SETTINGS_FILE, VOCABULARY_FILE)}, folder)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], folder: str | Path) -> "WordPiece":
        """What `files` gave, which was read in `folder`. Raises UserError as `load` does."""
        lower_case = _lower_case_setting(files[SETTINGS_FILE], Path(folder) / SETTINGS_FILE)
        path = Path(folder) / VOCABULARY_FILE
        return cls(_lines(files[VOCABULARY_FILE], path), lower_case, str(path))

    @classmethod
    def train(cls, texts: Iterable[str], size: int, lower_case: bool = True) -> "WordPiece":
        """Learn a vocabulary of at most `size` pieces from `texts` (read once; memory holds its distinct words).

        The same texts give the same vocabulary, pieces and ids alike. A vocabulary is smaller than `size` when the
        text has no more pieces to offer. Characters beyond the most frequent 1,000 are left to [UNK].

        Raises:
            UserError: `size` is out of range, or the texts hold no word.
        """
        check_size(size)
        words = _count_words(texts, lower_case)
        if not words:
            raise UserError("no word to learn a vocabulary from: the texts are empty")
        return cls(_learn(words, size), lower_case, "trained vocabulary")

    def files(self) -> dict[str, bytes]:
        """The content of `vocab.txt` and `settings.json`, in the order in which they are to be written."""
        vocabulary = "".join(f"{piece}\n" for piece in self._vocabulary)
        return {VOCABULARY_FILE: vocabulary.encode(), SETTINGS_FILE: f"{json.dumps(self._settings())}\n".encode()}

    def save(self, folder: str | Path) -> None:
        """Write `files` into `folder` (made if absent), each file whole or not at all."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            write_atomic(Path(folder) / name, content)

    def encode(self, text: str) -> Encoding:
        """Split `text` into pieces without special tokens; offsets are characters of `text` as it was given."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return Encoding(encoded.ids, encoded.offsets)

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """`encode` of many texts, on all cores unless TOKENIZERS_PARALLELISM=false."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [Encoding(one.ids, one.offsets) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Join pieces into readable text: continuations closed up, words apart by one space, [PAD] left out."""
        joined = " ".join(self._vocabulary[number] for number in ids if number != self.pad_id)
        return joined.replace(" " + CONTINUATION, "")

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The piece of each id, as it stands in the vocabulary."""
        return [self._vocabulary[number] for number in ids]

    @property
    def size(self) -> int:
        """Number of pieces, special tokens included."""
        return len(self._vocabulary)

    @property
    def cased(self) -> list[str]:
        """Pieces that text in lower case never has, save those in brackets: `[CLS]` and its like stand for no text."""
        plain = (piece for piece in self._vocabulary if not (piece.startswith("[") and piece.endswith("]")))
        return [piece for piece in plain if piece != piece.lower()]  # not ℝ, which has no other form

    @property
    def special(self) -> Special:
        """Ids of the special tokens that `layouts` and `masking` use."""
        return Special(pad=self.pad_id, cls=self.cls_id, sep=self.sep_id, mask=self.mask_id)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all five special tokens."""
        return frozenset((self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id))

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with any piece, its place, or the settings."""
        content = json.dumps([self._settings(), self._vocabulary], ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _settings(self) -> dict[str, bool | int]:
        return {"lower_case": self.lower_case, "format_version": FORMAT_VERSION}


# --- The tokenizer of a pretrained encoder ----------------------------------------------------------------------------


class VocabularyFile(NamedTuple):
    """A file of word pieces, and whether text is put in lower case for them."""

    path: Path
    lower_case: bool

    def read(self) -> WordPiece:
        """The vocabulary, with a warning where text in lower case never meets some of its pieces. Raises UserError."""
        wordpiece = WordPiece.from_vocab(self.path, self.lower_case)
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


# --- Reading and checking ---------------------------------------------------------------------------------------------


def _tokenizer(ids: dict[str, int], lower_case: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _check(vocabulary: Sequence[str], source: str) -> None:
    if not vocabulary:
        raise UserError(f"{source}: the vocabulary is empty; one word piece a line is expected")
    if len(vocabulary) > MAX_SIZE:
        raise UserError(f"{source}: {len(vocabulary)} word pieces; at most {MAX_SIZE} fit the stored ids")
    line_of: dict[str, int] = {}
    for line, piece in enumerate(vocabulary, start=1):
        if not piece.strip():
            raise UserError(f"{source}, line {line}: an empty word piece; remove the line or name the piece")
        if piece in line_of:
            raise UserError(f"{source}, line {line}: {piece!r} stands on line {line_of[piece]} already")
        line_of[piece] = line
    missing = [piece for piece in SPECIAL_PIECES if piece not in line_of]
    if missing:
        raise UserError(f"{source}: no {' '.join(missing)}; a BERT vocabulary holds {' '.join(SPECIAL_PIECES)}")
    if len(vocabulary) == len(SPECIAL_PIECES):
        raise UserError(f"{source}: special pieces alone; every word would be {UNK}")


def _lines(raw: bytes, path: Path) -> list[str]:
    """The pieces of a vocab.txt."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8; save the vocabulary as UTF-8 text") from None
    # Not splitlines(): a piece may itself be a character that Python takes for a line end.
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


def _fast_vocabulary(path: Path) -> list[str]:
    """The pieces of a tokenizer.json. Raises UserError for a tokenizer of another type, which it names."""
    model = _table(read_settings(path).get("model"))
    if (kind := model.get("type")) != "WordPiece":
        raise UserError(f"{path}: a tokenizer of type {kind}, not WordPiece; choose an encoder with BERT's tokenizer")
    pieces = _table(model.get("vocab"))
    if {*pieces.values()} != {*range(len(pieces))}:
        raise UserError(f"{path}: its word pieces are not numbered from 0 to {len(pieces) - 1}; fetch it again")
    return sorted(pieces, key=pieces.__getitem__)


def _table(value: Any) -> dict[str, Any]:
    """A value that should be a table of JSON; an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def _lower_case_setting(raw: bytes, path: Path) -> bool:
    """What our settings.json says."""
    try:
        settings = json.loads(raw)
        version, lower_case = settings["format_version"], settings["lower_case"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not the settings of a tokenizer; save it again") from None
    if version != FORMAT_VERSION or not isinstance(lower_case, bool):
        raise UserError(
            f"{path}: format_version {version!r}, lower_case {lower_case!r}; this program reads "
            f"format_version {FORMAT_VERSION} and lower_case true or false"
        )
    return lower_case


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a tokenizer's file") from None


# --- Learning ---------------------------------------------------------------------------------------------------------


def _count_words(texts: Iterable[str], lower_case: bool) -> Counter[str]:
    normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    splitter = pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for text in texts:
        words.update([word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))])
    return words


def _learn(words: Counter[str], size: int) -> list[str]:
    """Learn the pieces of a vocabulary from counted words.

    The library's trainer numbers the continuations ("##a") in the order of a hash table and breaks ties between merges
    by those numbers, so its result changes from run to run. Naming every character, in both forms, as a special token
    fixes the numbers before it starts.
    """
    room = (size - len(SPECIAL_PIECES)) // 2
    alphabet = _alphabet(words)[: min(room, MAX_ALPHABET)]
    continuations = [CONTINUATION + character for character in alphabet]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL_PIECES, *alphabet, *continuations],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token=UNK))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    learner.train_from_iterator(_repeated(words), trainer)
    vocabulary = learner.get_vocab(with_added_tokens=False)
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _alphabet(words: Counter[str]) -> list[str]:
    """All characters of the words, the most frequent first, ties in code point order."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    return sorted(counts, key=lambda character: (-counts[character], character))


def _repeated(words: Counter[str], at_once: int = 10_000) -> Iterator[str]:
    """Yield each word as often as it was counted, in lines of at most `at_once` words: the trainer counts itself."""
    stream = (word for word, count in words.items() for _ in range(count))
    while line := list(islice(stream, at_once)):
        yield " ".join(line)
