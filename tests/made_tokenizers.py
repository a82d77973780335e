"""Small tokenizers of every kind, made by code: word pieces with each normalizer, bytes, and a Unigram model."""

import json
from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from realm_jax.data.wordpiece import SPECIAL_PIECES


def ended(tokenizer: tokenizers.Tokenizer, special: Iterable[str] = SPECIAL_PIECES) -> bytes:
    """The JSON of a tokenizer with special tokens around a text."""
    special = [*special]
    tokenizer.add_special_tokens(special)
    cls, sep = special[2:4]
    ends = [(token, tokenizer.token_to_id(token)) for token in (cls, sep)]
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{cls} $A {sep}", f"{cls} $A {sep} $B:1 {sep}:1", ends
    )  # fmt: skip
    return tokenizer.to_str().encode()


def bert(pieces: Iterable[str], model: dict[str, Any] | None = None, **normalizer: bool | None) -> bytes:
    """The tokenizer.json of BERT's word pieces with its special pieces first; changes of its model and normalizer."""
    ids = {piece: number for number, piece in enumerate([*SPECIAL_PIECES, *pieces])}
    made = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(**{"lowercase": True} | normalizer)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    settings = json.loads(ended(made))
    settings["model"] |= model or {}
    return json.dumps(settings).encode()


def letters(text: str) -> list[str]:
    """Word pieces for every character of a text, as a word and as its continuation."""
    characters = sorted({*text} - {" ", "\n"})
    return [*characters, *(f"##{character}" for character in characters)]


def byte_level(add_prefix_space: bool = False) -> bytes:
    """A BPE model like that of RoBERTa without a merge: every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {piece: number for number, piece in enumerate([*SPECIAL_PIECES, *alphabet])}
    made = tokenizers.Tokenizer(models.BPE(ids, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    made.decoder = decoders.ByteLevel()
    return ended(made)


def unigram(text: str, normalizer: normalizers.Normalizer | None = None) -> bytes:
    """A model like XLM-R's that knows the characters of a text."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = [*((piece, 0.0) for piece in special[:4]), *((c, -5.0) for c in sorted({*text, "▁"} - {" ", "\n"}))]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=False))
    made.normalizer = normalizer or normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return ended(made, ["<pad>", "<unk>", "<s>", "</s>", "<mask>"])
