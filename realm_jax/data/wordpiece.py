"""Word pieces: a vocabulary of a BERT's vocab.txt, or one learned from the user's own text.

The Rust library `tokenizers` splits text (BERT's basic tokenizer, then longest match first). This module adds reading
and checking of a list of pieces, and training that always gives the same vocabulary. Prepared data have two files:

    vocab.txt        one piece per line
    settings.json    lower_case: true if text is put in lower case

"[MASK]" in a passage is three pieces, "[", "mask" and "]". Next to read: `tokenizer_files.py`.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from realm_jax.data.layouts import SpecialTokens
from realm_jax.data.tokenizer import TOKENIZER_CONFIG, Tokenizer, Tokens
from realm_jax.errors import UserError

PAD, UNK, CLS, SEP, MASK = SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
VOCABULARY_FILE = "vocab.txt"
SETTINGS_FILE = "settings.json"
FORMAT_VERSION = 1
MAX_SIZE = 65_535  # of a vocabulary that we learn
MIN_TRAINED_SIZE = 64  # the special tokens and both forms of a few dozen characters
MAX_ALPHABET = 1_000  # distinct characters of a trained vocabulary: enough for any alphabet, not for every ideograph
CONTINUATION = "##"
NORMALIZER: dict[str, Any] = {  # BERT's defaults, as a tokenizer.json has them
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,  # if text is put in lower case
    "lowercase": True,
}


def check_size(size: int) -> None:
    """Raise UserError for a vocabulary size that is out of range."""
    if not MIN_TRAINED_SIZE <= size <= MAX_SIZE:
        raise UserError(f"vocabulary size {size}: choose between {MIN_TRAINED_SIZE} and {MAX_SIZE}")


class WordPiece(Tokenizer):
    """A vocabulary of word pieces. Made by `from_vocab`, `load` or `train`."""

    CONTEXTS: ClassVar[tuple[str, ...]] = ("",)  # a word has the same pieces in every context

    def __init__(self, vocabulary: Sequence[str], lower_case: bool = True, source: str = "vocabulary") -> None:
        """Check a vocabulary and build the tokenizer.

        Args:
            vocabulary: pieces in the order of their ids.
            lower_case: put text in lower case.
            source: name of the vocabulary in messages.

        Raises:
            UserError: empty, too large, a piece twice, or a special token missing; the message names `source`.
        """
        if not vocabulary:
            raise UserError(f"{source}: the vocabulary is empty; one word piece per line is expected")
        ids: dict[str, int] = {}
        for number, piece in enumerate(vocabulary):
            line = f"{source}, line {number + 1}"
            if not piece.strip():
                raise UserError(f"{line}: an empty word piece; remove the line or name the piece")
            if piece in ids:
                raise UserError(f"{line}: {piece!r} repeats line {ids[piece] + 1}; remove one of them")
            ids[piece] = number
        missing = [piece for piece in SPECIAL_PIECES if piece not in ids]
        if missing:
            raise UserError(f"{source}: no {' '.join(missing)}; a BERT vocabulary holds {' '.join(SPECIAL_PIECES)}")
        if len(vocabulary) == len(SPECIAL_PIECES):
            raise UserError(f"{source}: has only special tokens; choose a full vocabulary")
        tokenizer = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=UNK))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(CONTINUATION, cleanup=False)  # words stay apart by one space
        self.lower_case = lower_case
        self._settings = {"lower_case": lower_case, "format_version": FORMAT_VERSION}
        self._vocabulary = tuple(vocabulary)
        self._begins_unit = np.array(
            [not piece.startswith(CONTINUATION) or piece == CONTINUATION for piece in vocabulary]
        )  # bool [vocabulary]
        pad, unknown, cls, sep, mask = (ids[piece] for piece in SPECIAL_PIECES)
        self._set_up(tokenizer, SpecialTokens(pad, cls, sep, mask), unknown)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._vocabulary, self.lower_case))

    @classmethod
    def from_vocab(cls, path: str | Path, lower_case: bool = True) -> "WordPiece":
        """Read a BERT `vocab.txt` (UTF-8, one piece per line, the id is the line number from 0).

        Args:
            path: the file.
            lower_case: put text in lower case.

        Raises:
            UserError: it cannot be read or is no usable vocabulary, with file and line.
        """
        return cls(read_pieces(Path(path)), lower_case, str(path))

    @classmethod
    def load(cls, folder: str | Path) -> "WordPiece":
        """Read the files of `save`. Raises UserError if a file is missing, damaged or of another format version."""
        names = (SETTINGS_FILE, VOCABULARY_FILE)
        return cls.from_files({name: read_bytes(Path(folder) / name) for name in names}, folder)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], folder: str | Path) -> "WordPiece":
        """Make the tokenizer of `files`.

        Args:
            files: name → content.
            folder: folder of the files, for messages.

        Raises:
            UserError: a file is damaged or of another format version.
        """
        path, vocabulary = Path(folder) / SETTINGS_FILE, Path(folder) / VOCABULARY_FILE
        try:
            settings = json.loads(files[SETTINGS_FILE])
            version, lower_case = settings["format_version"], settings["lower_case"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: not the settings of a tokenizer; save it again") from None
        if version != FORMAT_VERSION or not isinstance(lower_case, bool):
            raise UserError(
                f"{path}: format_version {version!r}, lower_case {lower_case!r}; this program reads "
                f"format_version {FORMAT_VERSION} and lower_case true or false"
            )
        return cls(_pieces(files[VOCABULARY_FILE], vocabulary), lower_case, str(vocabulary))

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> "WordPiece":
        """Learn a vocabulary of lower-case pieces from texts.

        The same texts always give the same vocabulary, pieces and ids. It is smaller than `size` if the texts have no
        more pieces. Characters beyond the most frequent 1,000 become [UNK].

        Args:
            texts: read once; their distinct words must fit into memory.
            size: most pieces.

        Raises:
            UserError: `size` is out of range, or the texts hold no word.
        """
        check_size(size)
        normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
        words: Counter[str] = Counter()
        for text in texts:
            words.update([word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))])
        if not words:
            raise UserError("no word to learn a vocabulary from: the texts are empty")
        counts: Counter[str] = Counter()  # of characters
        for word, count in words.items():
            for character in word:
                counts[character] += count
        most_frequent = sorted(counts, key=lambda character: (-counts[character], character))
        alphabet = most_frequent[: min((size - len(SPECIAL_PIECES)) // 2, MAX_ALPHABET)]
        # The library's trainer numbers the continuations ("##a") in the order of a hash table and breaks ties between
        # merges by those numbers, so its result changes from run to run. Naming every character, in both forms, as a
        # special token fixes the numbers before it starts.
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
        # The trainer counts itself, so it gets each word as often as we counted it, in lines of 10,000 words.
        repeated = (word for word, count in words.items() for _ in range(count))
        learner.train_from_iterator(iter(lambda: " ".join(islice(repeated, 10_000)), ""), trainer)
        vocabulary = learner.get_vocab(with_added_tokens=False)
        return cls(sorted(vocabulary, key=vocabulary.__getitem__), True, "trained vocabulary")

    def files(self) -> dict[str, bytes]:
        """Return the content of `vocab.txt` and `settings.json`, in the order in which they must be written."""
        vocabulary = "".join(f"{piece}\n" for piece in self._vocabulary)
        return {VOCABULARY_FILE: vocabulary.encode(), SETTINGS_FILE: f"{json.dumps(self._settings)}\n".encode()}

    def pretrained_files(self, length: int) -> dict[str, bytes]:
        """Return the files of BertTokenizer of transformers: name → content."""
        config = {"tokenizer_class": "BertTokenizer", "do_lower_case": self.lower_case, "model_max_length": length}
        return {
            VOCABULARY_FILE: self.files()[VOCABULARY_FILE],
            TOKENIZER_CONFIG: f"{json.dumps(config, indent=2)}\n".encode(),
        }

    def to_json(self, normalizer: dict[str, Any]) -> bytes:
        """Return a tokenizer.json of the same pieces with another normalizer."""
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.decoder = decoders.WordPiece(CONTINUATION)
        tokenizer.add_special_tokens([*SPECIAL_PIECES])
        ends = [(piece, tokenizer.token_to_id(piece)) for piece in (CLS, SEP)]
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{CLS} $A {SEP}", f"{CLS} $A {SEP} $B:1 {SEP}:1", ends
        )
        return json.dumps(json.loads(tokenizer.to_str()) | {"normalizer": normalizer}).encode()

    def _without_space(
        self, texts: Sequence[str], starts: NDArray[np.int64], ends: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return starts  # BERT's tokenizer removes white space

    def unit_starts(self, text: str, tokens: Tokens) -> NDArray[np.bool_]:
        """Find the tokens that begin a unit by the names of pieces, because BERT splits text into units first.

        Args:
            text: the text.
            tokens: its tokens.

        Returns:
            True for the first token of each unit, bool [tokens].
        """
        return self._begins_unit[tokens.ids]

    @property
    def cased(self) -> list[str]:
        """Return the pieces that text in lower case never has, without those like `[CLS]`, which are no text."""
        plain = (piece for piece in self._vocabulary if not (piece.startswith("[") and piece.endswith("]")))
        return [piece for piece in plain if piece != piece.lower()]  # not ℝ, which has no other form

    @cached_property
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change with any piece, its id, or the settings."""
        content = json.dumps([self._settings, self._vocabulary], ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


# --- Reading ----------------------------------------------------------------------------------------------------------


def read_pieces(path: Path) -> list[str]:
    """Read the pieces of a vocab.txt. Raises UserError."""
    return _pieces(read_bytes(path), path)


def _pieces(raw: bytes, path: Path) -> list[str]:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not UTF-8; save the vocabulary as UTF-8 text") from None
    # Not splitlines(): a piece may itself be a character that Python takes for a line end.
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


def read_bytes(path: Path) -> bytes:
    """Read a tokenizer's file. Raises UserError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a tokenizer's file") from None
