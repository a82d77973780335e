"""Questions as sentences with a blank."""

import numpy as np
import pytest

from realm_jax.data.examples import BLANK, cloze_pieces
from realm_jax.data.sources import open_sources


@pytest.mark.parametrize(
    "question, before, after",
    [
        ("Who wrote Emma?", "", "wrote Emma?"),
        ("In which year was Ada Moss born", "In", "year was Ada Moss born"),
        ("how many people live there?", "", "people live there?"),
        ("Which is larger, and what is it?", "", "is larger, and what is it?"),
        ("the somewhat whole of whatever", "the somewhat whole of whatever", ""),
    ],
)
def test_the_first_question_word_is_a_blank_or_one_stands_at_the_end(people, question, before, after):
    tokenizer = open_sources(people).tokenizer
    wanted = [*tokenizer.encode(before).ids, *[tokenizer.mask_id] * BLANK, *tokenizer.encode(after).ids]
    found = cloze_pieces(question, tokenizer)
    assert found.tolist() == wanted and found.dtype == np.int32


def test_without_a_piece_for_blanks_a_question_stays_as_it_is(people, monkeypatch):
    tokenizer = open_sources(people).tokenizer
    monkeypatch.setattr(tokenizer, "mask_id", -1)
    assert cloze_pieces("Who wrote Emma?", tokenizer).tolist() == tokenizer.encode("Who wrote Emma?").ids
