"""Tokenizers: text to ids and back, by any `tokenizer.json` of the Rust library tokenizers, of whatever model.

The library splits text. This class adds ranges of characters without white space, the same tokens for a line in every
text, the special tokens as data, the dtype of stored ids, and a fingerprint that ties corpus, index and checkpoint to
one tokenizer. BERT's word pieces are the subclass in `wordpiece.py`; `tokenizer_files.py` says which files a tokenizer
is read from.

No special token is ever made from text: "<mask>" in a passage is some tokens of text.
Next to read: `layouts.py`, which puts the special tokens around ids.
"""

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import processors

from realm_jax.data.layouts import SpecialTokens
from realm_jax.errors import UserError
from realm_jax.storage import write_atomic

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
NO_TOKEN = -1  # in place of an id
MARK = "("  # behind it text goes on without a space, and no tokenizer makes it part of a word
_SPACES = np.array([code for code in range(0x3001) if chr(code).isspace()], np.uint32)
_UNIT = re.compile(r"\w+|[^\w\s]")


class Encoding(NamedTuple):
    """Tokens of one text, without special ones.

    Attributes:
        ids: ids of the tokens.
        offsets: range of characters of each token.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokens(NamedTuple):
    """Tokens of one text, without special ones, as arrays.

    Attributes:
        ids: ids of the tokens, of the tokenizer's dtype [tokens].
        starts: first character of each, int64 [tokens].
        ends: character behind each, int64 [tokens].
    """

    ids: NDArray[Any]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def part(self, start: int, stop: int) -> "Tokens":
        """Return some adjacent tokens.

        Args:
            start: first token.
            stop: token behind the last one.
        """
        return Tokens(self.ids[start:stop], self.starts[start:stop], self.ends[start:stop])


def id_dtype(size: int) -> np.dtype[Any]:
    """Return the dtype in which ids of a vocabulary of `size` tokens are stored."""
    return np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)


class Tokenizer:
    """A tokenizer and its special tokens; never changed after it is made."""

    CONTEXTS: ClassVar[tuple[str, ...]] = ("", " ", MARK)
    """Prefixes of a text that may change its tokens: many models write a word behind a space in another way."""

    def __init__(self, content: bytes, source: str = TOKENIZER_FILE) -> None:
        """Read a tokenizer.

        Args:
            content: content of a `tokenizer.json`; we ignore its padding and truncation.
            source: its name in messages.

        Raises:
            UserError: it cannot be read, or lacks a token that the layouts need; the message names `source`.
        """
        try:
            tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
            settings = json.loads(content)
        except Exception as error:  # the library has no kind of its own
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{source}: cannot be read as a tokenizer ({reason}); fetch it again") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._content, self._settings = content, settings
        unknown_id, unknown = settings["model"].get("unk_id"), settings["model"].get("unk_token")
        # A model names the unknown token by its number or by its text, or knows all characters.
        if not isinstance(unknown_id, int):
            unknown_id = tokenizer.token_to_id(unknown) if unknown else None
        self._set_up(tokenizer, _special_tokens(tokenizer, source), NO_TOKEN if unknown_id is None else unknown_id)
        self.lower_case = bool(lowers(settings.get("normalizer")))

    def _set_up(self, tokenizer: tokenizers.Tokenizer, special: SpecialTokens, unknown: int) -> None:
        tokenizer.encode_special_tokens = True  # as the text that they are
        at_start, behind = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", " a"))
        self.counts_space = len(at_start) == len(behind) and at_start != behind
        self._is_behind_space = False
        self._tokenizer, self.special, self.unk_id = tokenizer, special, unknown
        self.pad_id, self.cls_id, self.sep_id, self.mask_id = special
        self.size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())  # special tokens included
        self.dtype = id_dtype(self.size)
        added = tokenizer.get_added_tokens_decoder().items()
        of_added = (number for number, token in added if token.special)
        self.special_ids = frozenset({*special, *of_added, unknown} - {NO_TOKEN})  # also of unknown characters

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._content,))

    def placed(self, behind_space: bool) -> "Tokenizer":
        """Return the tokenizer for texts that follow a space, such as a prompt's, or that do not.

        It is another one only if the first word of a line has other tokens there (`counts_space`), as with RoBERTa.
        """
        if not self.counts_space or behind_space == self._is_behind_space:
            return self
        other = copy.copy(self)
        other._is_behind_space = behind_space
        return other

    def files(self) -> dict[str, bytes]:
        """Return the files of the tokenizer in prepared data: name → content."""
        return {TOKENIZER_FILE: self._content}

    def pretrained_files(self, length: int) -> dict[str, bytes]:
        """Return the files of the tokenizer for transformers and an encoder of `length` tokens: name → content."""
        names = {f"{kind}_token": self.pieces([number])[0] for kind, number in self.special._asdict().items()}
        names |= {} if self.unk_id == NO_TOKEN else {"unk_token": self.pieces([self.unk_id])[0]}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length} | names
        return {TOKENIZER_FILE: self._content, TOKENIZER_CONFIG: f"{json.dumps(config, indent=2)}\n".encode()}

    @property
    def model_type(self) -> str:
        """Return the algorithm that splits text into tokens, such as 'Unigram'."""
        return str(self._tokenizer.model.__class__.__name__)

    def save(self, folder: str | Path) -> None:
        """Write `files` into `folder`, which is made if it does not exist, each file atomically."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            write_atomic(Path(folder) / name, content)

    def encode(self, text: str) -> Encoding:
        """Return the tokens of `text` without special ones; offsets are characters of the original `text`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Return the `encode` of many texts, computed on all cores unless TOKENIZERS_PARALLELISM=false."""
        return [
            Encoding(ids.tolist(), [*zip(starts.tolist(), ends.tolist(), strict=True)])
            for ids, starts, ends in self.tokens(texts)
        ]

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the `encode_batch` as arrays.

        We encode each line by itself, so that it has the same tokens in every text, and because the library takes up to
        twice as long for many lines in one text.
        """
        # --- Encode all lines of all texts at once
        lines = [text.split("\n") for text in texts]
        flat_lines = [*chain.from_iterable(lines)]
        spaces = [int(self._is_behind_space and bool(line) and not line[0].isspace()) for line in flat_lines]
        spaced = [" " * space + line for line, space in zip(flat_lines, spaces, strict=True)]
        encodings = self._tokenizer.encode_batch(spaced, add_special_tokens=False)
        counts = np.array([len(encoding.ids) for encoding in encodings], np.int64)  # [lines]: tokens of each
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), self.dtype, counts.sum())
        offsets = chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in encodings))
        ranges = np.fromiter(offsets, np.int64, 2 * len(ids)).reshape(-1, 2)  # [tokens, 2], in characters of the line
        ranges = np.maximum(ranges - np.repeat(np.array(spaces, np.int64), counts)[:, None], 0)
        # --- Ranges in characters of the texts: add where each line begins
        begins = np.fromiter(
            chain.from_iterable(accumulate((len(line) + 1 for line in part[:-1]), initial=0) for part in lines),
            np.int64,
        )  # [lines], in characters of their text
        starts, ends = (ranges + np.repeat(begins, counts)[:, None]).T.copy()  # [tokens] each
        bounds = np.concatenate([[0], np.cumsum(counts)])[np.cumsum([0, *map(len, lines)])]  # [texts + 1], in tokens
        starts = self._without_space(texts, starts, ends, np.diff(bounds))
        # --- Divide the tokens by text
        if self.unk_id != NO_TOKEN:  # a model may find its special tokens in a text
            ids[np.isin(ids, [*self.special])] = self.unk_id
        flat = Tokens(ids, starts, ends)
        return [flat.part(start, stop) for start, stop in pairwise(bounds.tolist())]

    def _without_space(
        self, texts: Sequence[str], starts: NDArray[np.int64], ends: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Move starts of tokens behind white space, which many models count to the word after it, [tokens]."""
        # For each character the next one that is no white space, from the end to the beginning.
        codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
        base = np.repeat(np.cumsum([0, *map(len, texts)])[:-1], counts)  # [tokens]: first character of their text
        behind = np.where(np.isin(codes, _SPACES), len(codes), np.arange(len(codes)))  # [characters]
        following = np.append(np.minimum.accumulate(behind[::-1])[::-1], len(codes))  # [characters + 1]
        return np.minimum(following[starts + base] - base, ends)

    def _after(self, before: str, text: str) -> Tokens | None:
        """Return the tokens of `text` behind `before`; None if one token belongs to both."""
        tokens = self.tokens([before + text])[0]
        of_text = tokens.starts >= len(before)
        if (tokens.ends[~of_text] > len(before)).any():
            return None
        return Tokens(tokens.ids[of_text], tokens.starts[of_text] - len(before), tokens.ends[of_text] - len(before))

    def pair_tokenizer(self, longest: int, overlap: int) -> tokenizers.Tokenizer:
        """Return the library's tokenizer for pairs of texts, joined with the special tokens of the model.

        Args:
            longest: tokens of a pair; a longer one is cut into windows of the second text, each with the whole first.
            overlap: tokens that two adjacent windows have in common.
        """
        pairs = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        if not pairs.num_special_tokens_to_add(is_pair=True):  # files of word pieces do not say how texts are joined
            cls, sep = self.pieces([self.cls_id, self.sep_id])
            pairs.post_processor = processors.TemplateProcessing(
                f"{cls} $A {sep}", f"{cls} $A {sep} $B:1 {sep}:1", [(cls, self.cls_id), (sep, self.sep_id)]
            )
        pairs.encode_special_tokens = True  # as the text that they are
        pairs.enable_truncation(longest, stride=overlap, strategy="only_second")
        return pairs

    def offsets_of(self, text: str, ids: NDArray[Any]) -> NDArray[np.int64] | None:
        """Find the characters of tokens of a text that was encoded within a longer one.

        Args:
            text: the part of the longer text.
            ids: its tokens [tokens].

        Returns:
            Range of characters of each token, int64 [tokens, 2]; None if the text does not give these tokens again,
            because it was cut within a word.
        """
        for before in self.CONTEXTS:
            tokens = self._after(before, text)
            if tokens is not None and np.array_equal(tokens.ids, ids):
                return np.stack([tokens.starts, tokens.ends], axis=1)
        return None

    def forms(self, text: str) -> list[list[int]]:
        """Return all token sequences of a word or a phrase within texts; the first is that of the word by itself."""
        in_contexts = (self._after(before, text) for before in self.CONTEXTS)
        distinct = dict.fromkeys(tuple(tokens.ids.tolist()) for tokens in in_contexts if tokens is not None)
        return [list(ids) for ids in distinct]

    def encode_behind(self, before: str, text: str) -> list[int]:
        """Return the tokens of a text that continues another one.

        Args:
            before: the other text.
            text: its continuation; both tell whether there is a space between them.
        """
        is_joined = before and not before[-1].isspace() and not text[:1].isspace()
        tokens = self._after(MARK if is_joined else " " if before else "", text.lstrip())
        return self.encode(text).ids if tokens is None else list(tokens.ids.tolist())

    def unit_starts(self, text: str, tokens: Tokens) -> NDArray[np.bool_]:
        """Find the tokens that begin a unit: a run of letters and digits, or one punctuation mark.

        A token of several units counts as the beginning of one.

        Args:
            text: the text.
            tokens: its tokens.

        Returns:
            True for the first token of each unit, bool [tokens].
        """
        units = np.zeros(len(text) + 2, np.int64)  # the last two are before the first token, and behind the text
        for number, unit in enumerate(_UNIT.finditer(text), start=1):
            units[unit.start() : unit.end()] = number
        before = np.concatenate([[NO_TOKEN], np.maximum.accumulate(tokens.ends)[:-1]])
        apart = (tokens.starts > before) | ((tokens.starts == before) & (units[tokens.starts] != units[before - 1]))
        return apart & (tokens.ends > tokens.starts)

    def decode(self, ids: Iterable[int]) -> str:
        """Return tokens as readable text, without padding."""
        return str(self._tokenizer.decode([int(number) for number in ids if number != self.pad_id], False))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return the token of each id as the vocabulary spells it."""
        return [self._tokenizer.id_to_token(int(number)) or "" for number in ids]

    @cached_property
    def is_word(self) -> NDArray[np.bool_]:
        """Return True for tokens with a letter or a digit, or a part of a character, special ones excluded, [size]."""
        texts = self._tokenizer.decode_batch([[token] for token in range(self.size)], skip_special_tokens=False)
        is_word = np.array([any(map(str.isalnum, text)) or "\N{REPLACEMENT CHARACTER}" in text for text in texts])
        is_word[[*self.special_ids]] = False
        return is_word

    @cached_property
    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that change with any token, its id, and how text is normalized and split."""
        deciding = [self._settings.get(part) for part in ("normalizer", "pre_tokenizer", "model")]
        return hashlib.sha256(json.dumps([*deciding, self.special], sort_keys=True).encode()).hexdigest()[:16]


def lowers(value: Any) -> bool | None:
    """Return True if a setting puts text in lower case: true or false, or a normalizer of the library tokenizers.

    None for anything else, which does not say.
    """
    if not isinstance(value, dict):
        return value if isinstance(value, bool) else None
    if value.get("type") == "Sequence":
        return any(lowers(part) for part in value.get("normalizers", []))
    return value.get("type") == "Lowercase" or bool(value.get("lowercase"))


def _special_tokens(tokenizer: tokenizers.Tokenizer, source: str) -> SpecialTokens:
    """Find the special tokens: [CLS] and [SEP] around an encoded text, padding and mask by name.

    Raises UserError if one is missing.
    """
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a").ids  # with special tokens
    start = next((n for n in range(1, len(framed)) if framed[n : n + len(plain)] == plain), len(framed))
    added = {
        token.content.strip("[]<>|").lower(): number
        for number, token in sorted(tokenizer.get_added_tokens_decoder().items(), reverse=True)
    }
    # The names of the first and last token differ between models, those of padding and mask only in their brackets.
    ids = {
        "cls": framed[0] if start < len(framed) else None,
        "sep": framed[-1] if start + len(plain) < len(framed) else None,
        "pad": added.get("pad"),
        "mask": added.get("mask"),
    }
    for kind, number in ids.items():
        if number is None:  # files of word pieces do not always say which tokens are special
            ids[kind] = tokenizer.token_to_id(f"[{kind.upper()}]")
    missing = [f"[{kind.upper()}]" for kind, number in ids.items() if number is None]
    if missing:
        raise UserError(f"{source}: has no token for {' '.join(missing)}; choose the tokenizer of an encoder")
    return SpecialTokens(**{kind: int(number) for kind, number in ids.items() if number is not None})
