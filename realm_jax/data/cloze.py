"""Questions as sentences with a blank, for a reader that learned to point at what stands in a blank.

REALM by pointing (`realm.marginal=span`) teaches a reader with hidden names and no question. A question in English
becomes such a sentence where [MASK] takes the place of its question word: "[MASK] wrote Emma?".
"""

import re

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.tokenizer import NO_TOKEN, Tokenizer

BLANK = 2  # pieces of a blank; one answers as many questions: `docs/results/adaptation.md`
WORDS = re.compile(r"\b(how (many|much|long|old|far)|whom?|whose|what|which|when|where)\b", re.IGNORECASE)


def cloze_pieces(question: str, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """The pieces of a question with BLANK times [MASK] for its first question word; at the end where it has none. As
    they are where the tokenizer has no [MASK]."""
    if tokenizer.mask_id == NO_TOKEN:
        return np.asarray(tokenizer.encode(question).ids, np.int32)
    word = WORDS.search(question)
    before, after = (question, "") if word is None else (question[: word.start()], question[word.end() :])
    parts = tokenizer.encode(before).ids, [tokenizer.mask_id] * BLANK, tokenizer.encode(after).ids
    return np.asarray([piece for part in parts for piece in part], np.int32)
