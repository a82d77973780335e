"""A tokenizer like XLM-R's, made by code: a Unigram model with marks for spaces, for the texts of sixteen people."""

import random
import re

import tokenizers
from tiny_run import PEOPLE
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
TEXTS = [
    f"{name} was born ({1800 + n}). The house of {name} in {name[:3]}ville stands since May {1900 + n}."
    for n, name in enumerate(PEOPLE)
]


def unigram(size: int) -> bytes:
    """The JSON of a tokenizer like XLM-R's: words of the texts with and without a mark, characters, random filler."""
    rng, text = random.Random(0), " ".join([*TEXTS, "When was the query: title: text: |"])
    words = dict.fromkeys(re.findall(r"\w+|[^\w\s]", text))
    likely = dict.fromkeys([*(f"▁{word}" for word in words), *words, "▁", *sorted({*text})])
    filler: dict[str, None] = {}
    while len(filler) < size - len(SPECIAL) - len(likely):
        filler["▁" + "".join(rng.choices("bcdfghjklmnpqrstvwxz", k=6))] = None  # not a word of the texts: no vowel
    pieces = [*((piece, 0.0) for piece in SPECIAL[:4]), *((piece, -5.0 - len(piece) / 99) for piece in likely)]
    pieces += [(piece, -30.0) for piece in filler]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B </s>", ends)
    return tokenizer.to_str().encode()
