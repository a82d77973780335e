"""The control without passages: how a question and its answer lie in a query, and how predictions are read back."""

import numpy as np
import pytest
from tiny_run import PEOPLE, prepare_people

from realm_jax.corpus.jsonl import Question
from realm_jax.data.closed_book import closed_book_answer, closed_book_examples, closed_book_query
from realm_jax.data.examples import Lengths
from realm_jax.data.sources import Sources, open_sources
from realm_jax.errors import UserError

LENGTHS = Lengths(query=20, document=48, predictions=6, answers=2, span_width=4)
QUESTION = "When was Ada Dahl born?"


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Sources:
    return open_sources(prepare_people(tmp_path_factory.mktemp("people")))


def ids(sources: Sources, text: str) -> list[int]:
    return list(sources.wordpiece.encode(text).ids)


def test_the_answer_s_places_follow_the_question_and_end_with_sep(sources):
    wordpiece = sources.wordpiece
    query = closed_book_query("born?", wordpiece, LENGTHS)
    asked = ids(sources, "born?")
    wanted = [wordpiece.cls_id, *asked, *[wordpiece.mask_id] * 4, wordpiece.sep_id]
    assert query["query_length"] == len(wanted)
    assert query["query"][: len(wanted)].tolist() == wanted
    assert (query["query"][len(wanted) :] == wordpiece.pad_id).all()
    first = 1 + len(asked)
    assert query["positions"].tolist() == [first, first + 1, first + 2, first + 3, 0, 0]


def test_a_long_question_is_cut_so_that_the_places_stay(sources):
    query = closed_book_query(QUESTION * 5, sources.wordpiece, LENGTHS)
    assert query["query_length"] == LENGTHS.query
    assert (query["query"][query["positions"][:4]] == sources.wordpiece.mask_id).all()
    assert query["query"][-1] == sources.wordpiece.sep_id


def question_examples(sources: Sources, answer: str, lengths: Lengths = LENGTHS) -> list[dict]:
    """What forty draws give where a training question is drawn."""
    questions = [Question("born?", [answer, "something else"], None, {}, 1)]
    examples = closed_book_examples(sources.pretraining, questions, sources.wordpiece, lengths)
    drawn = [examples.make(0, np.random.default_rng(seed)) for seed in range(40)]
    wanted = closed_book_query("born?", sources.wordpiece, lengths)["query"]
    return [example for example in drawn if np.array_equal(example["query"], wanted)]


@pytest.mark.parametrize("answer", ["18", "1801 in Adaville", "in 18"])
def test_targets_are_the_first_answer_filled_up_with_sep(sources, answer):
    example, *_ = question_examples(sources, answer)
    pieces = ids(sources, answer)[:4]
    assert example["targets"].tolist() == pieces + [sources.wordpiece.sep_id] * (4 - len(pieces)) + [0, 0]
    assert example["weights"].tolist() == [1, 1, 1, 1, 0, 0]


def test_targets_read_back_are_the_answer_whatever_is_predicted_elsewhere(sources):
    """There are more predictions than places; those at [CLS] mean nothing, even where no [SEP] ends the answer."""
    for answer in ("18", "1800", "in 1800"):
        example, *_ = question_examples(sources, answer)
        guesses = np.where(example["weights"] > 0, example["targets"], ids(sources, "house")[0])
        kept = ids(sources, answer)[:4]
        assert closed_book_answer(guesses, sources.wordpiece, LENGTHS) == sources.wordpiece.decode(kept)


def test_half_the_examples_are_questions_and_half_masked_sentences_all_without_a_passage(sources):
    questions = [Question(QUESTION, ["1803"], None, {}, 1)]
    examples = closed_book_examples(sources.pretraining, questions, sources.wordpiece, LENGTHS)
    assert examples.total >= len(PEOPLE), "one a sentence with a name or a date"
    drawn = [examples.make(number % examples.total, np.random.default_rng(number)) for number in range(200)]
    asked = closed_book_query(QUESTION, sources.wordpiece, LENGTHS)["query"]
    share = np.mean([np.array_equal(example["query"], asked) for example in drawn])
    assert 0.4 < share < 0.6
    keys = {key: value.shape for key, value in drawn[0].items()}
    for example in drawn:
        assert {key: value.shape for key, value in example.items()} == keys, "one shape, so one program"
        assert example["document_length"] == 3 and example["document_title_length"] == 0
        assert example["weights"].sum() >= 1
        masked = example["query"][example["positions"][example["weights"] > 0]]
        assert (masked == sources.wordpiece.mask_id).all()


def test_what_is_missing_is_named(sources):
    with pytest.raises(UserError, match="needs training questions and pre-training text with salient spans"):
        closed_book_examples(sources.pretraining, [], sources.wordpiece, LENGTHS)
    with pytest.raises(UserError, match="config.data.query_length: the closed-book control needs 2 more"):
        closed_book_examples(sources.pretraining, [], sources.wordpiece, LENGTHS._replace(query=5))
