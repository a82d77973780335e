"""Tokenizers: text to ids and back, by any `tokenizer.json` of the Rust library tokenizers, of whatever model.

The library does the splitting. This class adds what a corpus needs around it: ranges of characters without white space,
the same tokens for a line wherever it stands, the special tokens as data, the dtype that ids are stored in, and a
fingerprint that ties corpus, index and checkpoint to one tokenizer. BERT's word pieces are the subclass in
`wordpiece.py`; `tokenizer_files.py` says which files a tokenizer is read from.

No special token is ever made from text: "<mask>" in a passage is some tokens of text.
Next to read: `layouts.py`, which puts the special tokens around ids.
"""

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
    """Tokens of one text, without special ones: ids, and the range of characters in the text of each."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokens(NamedTuple):
    """The same as arrays: ids of the tokenizer's dtype, first characters and ends int64; all [tokens]."""

    ids: NDArray[Any]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def part(self, start: int, stop: int) -> "Tokens":
        """Tokens start … stop − 1."""
        return Tokens(self.ids[start:stop], self.starts[start:stop], self.ends[start:stop])


def id_dtype(size: int) -> np.dtype[Any]:
    """What ids of a vocabulary of `size` tokens are stored in."""
    return np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)


class Tokenizer:
    """A tokenizer and its special tokens; never changed after it is made."""

    CONTEXTS: ClassVar[tuple[str, ...]] = ("", " ", MARK)
    """What may stand before a text and change its tokens: many models write a word behind a space in another way."""

    def __init__(self, content: bytes, source: str = TOKENIZER_FILE) -> None:
        """content: of a `tokenizer.json`; its padding and truncation do not count.

        Raises:
            UserError: it cannot be read, or lacks a token that the layouts need; the message names `source`.
        """
        try:
            tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
            settings = json.loads(content)
        except Exception as error:  # the library has no kind of its own
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{source}: not a tokenizer that can be read ({reason}); fetch it again") from None
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._content, self._settings = content, settings
        unknown_id, unknown = settings["model"].get("unk_id"), settings["model"].get("unk_token")
        if not isinstance(unknown_id, int):  # a model names it by its number or by its token, or knows all characters
            unknown_id = tokenizer.token_to_id(unknown) if unknown else None
        self._set_up(tokenizer, _special_tokens(tokenizer, source), NO_TOKEN if unknown_id is None else unknown_id)
        self.lower_case = bool(lowers(settings.get("normalizer")))

    def _set_up(self, tokenizer: tokenizers.Tokenizer, special: SpecialTokens, unknown: int) -> None:
        tokenizer.encode_special_tokens = True  # as the text that they are
        self._tokenizer, self.special, self.unk_id = tokenizer, special, unknown
        self.pad_id, self.cls_id, self.sep_id, self.mask_id = special
        self.size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())  # special tokens included
        self.dtype = id_dtype(self.size)
        added = tokenizer.get_added_tokens_decoder().items()
        of_added = (number for number, token in added if token.special)
        self.special_ids = frozenset({*special, *of_added, unknown} - {NO_TOKEN})  # also of unknown characters

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._content,))

    def files(self) -> dict[str, bytes]:
        """What prepared data keep of it: file → content."""
        return {TOKENIZER_FILE: self._content}

    def pretrained_files(self, length: int) -> dict[str, bytes]:
        """What transformers needs beside the weights of an encoder of at most `length` tokens: file → content."""
        names = {f"{kind}_token": self.pieces([number])[0] for kind, number in self.special._asdict().items()}
        names |= {} if self.unk_id == NO_TOKEN else {"unk_token": self.pieces([self.unk_id])[0]}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length} | names
        return {TOKENIZER_FILE: self._content, TOKENIZER_CONFIG: f"{json.dumps(config, indent=2)}\n".encode()}

    @property
    def model_type(self) -> str:
        """How text is cut into tokens, such as 'Unigram'."""
        return str(self._tokenizer.model.__class__.__name__)

    def save(self, folder: str | Path) -> None:
        """Write `files` into `folder` (made if absent), each file whole or not at all."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            write_atomic(Path(folder) / name, content)

    def encode(self, text: str) -> Encoding:
        """The tokens of `text` without special ones; offsets are characters of `text` as it was given."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """`encode` of many texts, on all cores unless TOKENIZERS_PARALLELISM=false."""
        return [
            Encoding(ids.tolist(), [*zip(starts.tolist(), ends.tolist(), strict=True)])
            for ids, starts, ends in self.tokens(texts)
        ]

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """`encode_batch` as arrays.

        Each line is encoded by itself: it has the same tokens then wherever it stands, and the library takes up to
        twice as long over many lines in one text.
        """
        lines = [text.split("\n") for text in texts]
        encodings = self._tokenizer.encode_batch([*chain.from_iterable(lines)], add_special_tokens=False)
        counts = np.array([len(encoding.ids) for encoding in encodings], np.int64)
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), self.dtype, counts.sum())
        offsets = chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in encodings))
        places = np.fromiter(offsets, np.int64, 2 * len(ids)).reshape(-1, 2)
        begins = np.fromiter(
            chain.from_iterable(accumulate((len(line) + 1 for line in part[:-1]), initial=0) for part in lines),
            np.int64,
        )  # [lines], in characters of their text
        starts, ends = (places + np.repeat(begins, counts)[:, None]).T.copy()
        bounds = np.concatenate([[0], np.cumsum(counts)])[np.cumsum([0, *map(len, lines)])]
        starts = self._without_space(texts, starts, ends, np.diff(bounds))
        if self.unk_id != NO_TOKEN:  # a model may have its special tokens among the pieces that it looks for
            ids[np.isin(ids, [*self.special])] = self.unk_id
        flat = Tokens(ids, starts, ends)
        return [flat.part(start, stop) for start, stop in pairwise(bounds.tolist())]

    def _without_space(
        self, texts: Sequence[str], starts: NDArray[np.int64], ends: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Where tokens start behind the white space that many models count to the word after it."""
        codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
        base = np.repeat(np.cumsum([0, *map(len, texts)])[:-1], counts)
        behind = np.where(np.isin(codes, _SPACES), len(codes), np.arange(len(codes)))
        following = np.append(np.minimum.accumulate(behind[::-1])[::-1], len(codes))
        return np.minimum(following[starts + base] - base, ends)

    def _after(self, before: str, text: str) -> Tokens | None:
        """The tokens of `text` where `before` stands in front of it; None if one token is of both."""
        tokens = self.tokens([before + text])[0]
        of_text = tokens.starts >= len(before)
        if (tokens.ends[~of_text] > len(before)).any():
            return None
        return Tokens(tokens.ids[of_text], tokens.starts[of_text] - len(before), tokens.ends[of_text] - len(before))

    def offsets_of(self, text: str, ids: NDArray[Any]) -> NDArray[np.int64] | None:
        """The range of characters of each token of a stretch that was encoded within a longer text, int64 [tokens, 2].

        ids: those tokens. None if the text does not give them again: it was cut within a word.
        """
        for before in self.CONTEXTS:
            tokens = self._after(before, text)
            if tokens is not None and np.array_equal(tokens.ids, ids):
                return np.stack([tokens.starts, tokens.ends], axis=1)
        return None

    def forms(self, text: str) -> list[list[int]]:
        """All tokens that a word or a phrase may have within a text, those of the text by itself first."""
        in_contexts = (self._after(before, text) for before in self.CONTEXTS)
        distinct = dict.fromkeys(tuple(tokens.ids.tolist()) for tokens in in_contexts if tokens is not None)
        return [list(ids) for ids in distinct]

    def encode_behind(self, before: str, text: str) -> list[int]:
        """The tokens of a text that goes on where `before` ends, without or with the space that one of them has."""
        is_joined = before and not before[-1].isspace() and not text[:1].isspace()
        tokens = self._after(MARK if is_joined else " " if before else "", text.lstrip())
        return self.encode(text).ids if tokens is None else list(tokens.ids.tolist())

    def unit_starts(self, text: str, tokens: Tokens) -> NDArray[np.bool_]:
        """Which tokens of a text are the first of a unit: a run of letters and digits, or one mark; bool [tokens].

        A token of several units counts as the first of one that has them all.
        """
        units = np.zeros(len(text) + 2, np.int64)  # the last two are before the first token, and behind the text
        for number, unit in enumerate(_UNIT.finditer(text), start=1):
            units[unit.start() : unit.end()] = number
        before = np.concatenate([[NO_TOKEN], np.maximum.accumulate(tokens.ends)[:-1]])
        apart = (tokens.starts > before) | ((tokens.starts == before) & (units[tokens.starts] != units[before - 1]))
        return apart & (tokens.ends > tokens.starts)

    def decode(self, ids: Iterable[int]) -> str:
        """Tokens as readable text, padding left out."""
        return str(self._tokenizer.decode([int(number) for number in ids if number != self.pad_id], False))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The token of each id, as it stands in the vocabulary."""
        return [self._tokenizer.id_to_token(int(number)) or "" for number in ids]

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with any token, its id, and how text is normalised and split."""
        deciding = [self._settings.get(part) for part in ("normalizer", "pre_tokenizer", "model")]
        return hashlib.sha256(json.dumps([*deciding, self.special], sort_keys=True).encode()).hexdigest()[:16]


def lowers(value: Any) -> bool | None:
    """Whether text is put in lower case. value: true or false, or a normalizer of the library tokenizers; None for
    anything else, which does not say."""
    if not isinstance(value, dict):
        return value if isinstance(value, bool) else None
    if value.get("type") == "Sequence":
        return any(lowers(part) for part in value.get("normalizers", []))
    return value.get("type") == "Lowercase" or bool(value.get("lowercase"))


def _special_tokens(tokenizer: tokenizers.Tokenizer, source: str) -> SpecialTokens:
    """Find the special tokens: [CLS] and [SEP] by what stands around an encoded text, padding and mask by name.

    Raises UserError if one is missing.
    """
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    start = next((n for n in range(1, len(whole)) if whole[n : n + len(plain)] == plain), len(whole))
    added = {
        token.content.strip("[]<>|").lower(): number
        for number, token in sorted(tokenizer.get_added_tokens_decoder().items(), reverse=True)
    }
    ids = {
        "cls": whole[0] if start < len(whole) else None,
        "sep": whole[-1] if start + len(plain) < len(whole) else None,
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
