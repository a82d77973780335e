"""A reader without passages: how a question and its answer lie in a query, how predictions are read back, and a run."""

import json

import jax
import numpy as np
import pytest
from tiny_run import PEOPLE, open_config, tiny_config

from realm_jax.cli import main as cli
from realm_jax.data.examples import Lengths, document_arrays
from realm_jax.data.questions import Question
from realm_jax.data.sources import Sources, open_sources
from realm_jax.errors import UserError
from realm_jax.models.inputs import PassageBatch, flatten_passages, reader_inputs
from realm_jax.tasks.closed_book import (
    answer_length,
    closed_book_answer,
    closed_book_examples,
    closed_book_query,
    predict_closed_book,
)
from realm_jax.train.recipe import train

LENGTHS = Lengths(query=20, document=48, predictions=6, answers=2, span_width=4)
QUESTION = "When was Ada Dahl born?"


@pytest.fixture(scope="module")
def sources(people) -> Sources:
    return open_sources(people)


def ids(sources: Sources, text: str) -> list[int]:
    return list(sources.tokenizer.encode(text).ids)


def test_the_answer_s_places_follow_the_question_and_end_with_sep(sources):
    """A long question is cut so that the places stay."""
    tokenizer = sources.tokenizer
    query = closed_book_query("born?", tokenizer, LENGTHS)
    asked = ids(sources, "born?")
    wanted = [tokenizer.cls_id, *asked, *[tokenizer.mask_id] * 4, tokenizer.sep_id]
    assert query["query_length"] == len(wanted)
    assert query["query"].tolist() == wanted + [tokenizer.pad_id] * (LENGTHS.query - len(wanted))
    assert query["positions"].tolist() == [*range(1 + len(asked), 5 + len(asked)), 0, 0]
    long = closed_book_query(QUESTION * 5, tokenizer, LENGTHS)
    assert long["query_length"] == LENGTHS.query and long["query"][-1] == tokenizer.sep_id
    assert (long["query"][long["positions"][:4]] == tokenizer.mask_id).all()


def question_examples(sources: Sources, answer: str) -> list[dict]:
    """The examples of a training question among forty draws."""
    questions = [Question("born?", [answer, "something else"], {}, {}, 1)]
    examples = closed_book_examples(sources.pretraining, questions, sources.tokenizer, LENGTHS)
    drawn = [examples.make(0, np.random.default_rng(seed)) for seed in range(40)]
    wanted = closed_book_query("born?", sources.tokenizer, LENGTHS)["query"]
    return [example for example in drawn if np.array_equal(example["query"], wanted)]


@pytest.mark.parametrize("answer", ["18", "1800", "in 18", "1801 in Adaville"])
def test_targets_are_the_first_answer_filled_up_with_sep_and_read_back_as_the_answer(sources, answer):
    """There are more predictions than places; those at [CLS] mean nothing, even if no [SEP] ends the answer."""
    example, *_ = question_examples(sources, answer)
    pieces = ids(sources, answer)[:4]
    assert example["targets"].tolist() == pieces + [sources.tokenizer.sep_id] * (4 - len(pieces)) + [0, 0]
    assert example["weights"].tolist() == [1, 1, 1, 1, 0, 0]
    guesses = np.where(example["weights"] > 0, example["targets"], ids(sources, "house")[0])
    assert closed_book_answer(guesses, sources.tokenizer, LENGTHS) == sources.tokenizer.decode(pieces)


def test_half_the_examples_are_questions_and_half_masked_sentences_all_without_a_passage(sources):
    questions = [Question(QUESTION, ["1803"], {}, {}, 1)]
    examples = closed_book_examples(sources.pretraining, questions, sources.tokenizer, LENGTHS)
    assert examples.total >= len(PEOPLE), "one a sentence with a name or a date"
    drawn = [examples.make(number % examples.total, np.random.default_rng(number)) for number in range(200)]
    asked = closed_book_query(QUESTION, sources.tokenizer, LENGTHS)["query"]
    share = np.mean([np.array_equal(example["query"], asked) for example in drawn])
    assert 0.4 < share < 0.6
    keys = {key: value.shape for key, value in drawn[0].items()}
    for example in drawn:
        assert {key: value.shape for key, value in example.items()} == keys, "one shape, so one program"
        assert example["document_length"] == 3 and example["document_title_length"] == 0
        assert example["weights"].sum() >= 1
        masked = example["query"][example["positions"][example["weights"] > 0]]
        assert (masked == sources.tokenizer.mask_id).all()


def test_what_is_missing_is_named(sources):
    with pytest.raises(UserError, match="the task closed_book needs training questions"):
        closed_book_examples(sources.pretraining, [], sources.tokenizer, LENGTHS)
    with pytest.raises(UserError, match="config.data.query_length: the task closed_book needs 2 more"):
        closed_book_examples(sources.pretraining, [], sources.tokenizer, LENGTHS._replace(query=5))


@pytest.fixture(scope="module")
def alone(people, tmp_path_factory, quick_steps):
    """A run of this task only."""
    config = tiny_config(people)
    config.tasks = "closed_book"
    config.closed_book.update(steps=2, batch_size=4)
    run = open_config(config, tmp_path_factory.mktemp("alone"))
    train(run)
    return run


def test_answers_from_nowhere_are_predicted_and_measured(alone, tmp_path, capsys):
    output = tmp_path / "predictions.jsonl"
    assert cli.main(["predict", f"--workdir={alone.workdir}", f"--output={output}"]) == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) == 8 and all(0 < line["probability"] <= 1 and "retrieved" not in line for line in lines)
    assert cli.main(["evaluate", str(output), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {*found["measures"]} == {"exact_match", "exact_match_squad", "f1"} and found["passages_read"] == 0
    last = [json.loads(line) for line in (alone.workdir / "closed_book" / "evaluations.jsonl").open()][-1]
    assert found["measures"]["exact_match"]["value"] == last["exact_match"]


def test_the_probability_is_of_the_pieces_up_to_the_end(alone):
    params = alone.initial_params()
    (answers,) = predict_closed_book(alone, [Question("When was Ada Dahl born?", ["1803"], {}, {}, 1)], params)
    query = closed_book_query("When was Ada Dahl born?", alone.sources.tokenizer, alone.lengths)
    nothing = np.zeros(0, np.uint16)
    row = query | document_arrays(nothing, nothing, alone.lengths.document, alone.sources.tokenizer)
    documents = PassageBatch(*(row[f"document{part}"][None, None] for part in ("", "_length", "_title_length")))
    joint = flatten_passages(reader_inputs(row["query"][None], row["query_length"][None], documents))
    log_p = np.asarray(jax.nn.log_softmax(alone.model.reader.read_words(params, joint, row["positions"][None])))[0]
    pieces = log_p.argmax(axis=-1)
    assert answers[0].text == closed_book_answer(pieces, alone.sources.tokenizer, alone.lengths)
    ends = np.flatnonzero(pieces == alone.sources.tokenizer.sep_id)
    last = min([*ends, answer_length(alone.lengths) - 1])
    assert answers[0].probability == pytest.approx(np.exp(log_p.max(axis=-1)[: last + 1].sum()), rel=1e-4)


@pytest.mark.parametrize(
    "words, message",
    [
        (["ask", QUESTION], "its task closed_book answers without passages; use `realm predict`"),
        (["inspect", "text", "Ada was born in [1803]."], "does not search by vectors"),
        (["inspect", "text", QUESTION], "does not search by vectors"),
    ],
)
def test_there_is_nothing_to_show_beside_its_answers(alone, capsys, words, message):
    assert cli.main([*words, f"--workdir={alone.workdir}"]) == 2
    assert message in capsys.readouterr().err
