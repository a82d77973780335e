"""One positive passage a question: which it is, how the two are joined, and batches of like lengths."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_run import write_lines

from realm_jax.cli.prepare import prepare
from realm_jax.data.examples import LENGTH_MULTIPLE, WINDOW, Bm25Hits, Examples, Lengths, contains_items, dataset
from realm_jax.data.questions import Question
from realm_jax.data.sources import open_sources
from realm_jax.tasks.qa import Qa
from realm_jax.tasks.qa_examples import NO_ROW, first_row_with_answer, gold_row, positive_examples, with_search

LENGTHS = Lengths(query=24, document=64, predictions=4, answers=2, span_width=4)
FILLER = " It was a quiet life by the sea, and many people of the town remembered it well. "


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Documents of several passages; `long` names the answer in two of them."""
    folder = tmp_path_factory.mktemp("positives")
    texts = {
        "long": "Ada was born in London." + FILLER * 4 + "The engine of Ada stood in London." + FILLER * 3,
        "short": "Karl came from Trier.",
        "other": "Emmy moved to London late." + FILLER,
    }
    records = [{"id": name, "title": name, "text": text} for name, text in texts.items()]
    passages = write_lines(folder / "passages.jsonl", records)
    prepare(passages, folder / "data", vocabulary_size=300, limit=64, workers=1)
    return open_sources(folder / "data")


def rows_of(sources, name):
    return list(sources.passages.rows_of(name))


def test_the_gold_row_holds_an_answer_and_most_of_the_question(sources):
    store, tokenizer = sources.passages, sources.tokenizer
    holding = [row for row in rows_of(sources, "long") if "London" in store.text(row)]
    assert len(holding) >= 2 and len(rows_of(sources, "long")) > len(holding)
    born = Question("where was Ada born", ["London"], {"long": 1})
    engine = Question("where stood the engine", ["Paris", "London"], {"long": 1})
    assert gold_row(store, born, tokenizer, LENGTHS) == next(r for r in holding if "born" in store.text(r))
    assert gold_row(store, engine, tokenizer, LENGTHS) == next(r for r in holding if "engine" in store.text(r))


@pytest.mark.parametrize(
    "question, answers, gold, document",
    [
        # Any of several gold documents may hold the answer.
        ("where did Emmy move late", ["London", "Trier"], {"absent": 2, "short": 1, "other": 1}, "other"),
        ("where did Emmy move late", ["Trier"], {"other": 2, "short": 1}, "short"),
        # There may be none.
        ("where", ["London"], {"short": 1}, None),
        ("where", ["Trier"], {}, None),
        ("where", ["Trier"], {"absent": 1}, None),
    ],
)
def test_the_gold_row_is_one_of_the_gold_documents(sources, question, answers, gold, document):
    row = gold_row(sources.passages, Question(question, answers, gold), sources.tokenizer, LENGTHS)
    assert row == (rows_of(sources, document)[0] if document else NO_ROW)


def test_without_a_gold_document_the_first_retrieved_row_with_an_answer_counts(sources):
    store, tokenizer = sources.passages, sources.tokenizer
    short, other = rows_of(sources, "short")[0], rows_of(sources, "other")[0]
    question = Question("where", ["London"])
    assert first_row_with_answer(store, question, [-1, short, other], tokenizer, LENGTHS) == other
    assert first_row_with_answer(store, question, [short], tokenizer, LENGTHS) == NO_ROW


def test_pieces_are_found_on_their_own_borders_alone():
    text = np.array([0x0102, 0x0201], np.uint16).tobytes()
    assert contains_items(text, np.array([0x0201], np.uint16).tobytes(), 2)
    assert not contains_items(text, text[1:3], 2)


def examples_of(sources, total: int, titles: bool = True) -> Examples:
    """Examples, each with its number, of questions of several lengths and one passage after another."""
    questions = [Question(f"where was it {'again ' * (number % 5)}", ["London"]) for number in range(total)]
    rows = [number % len(sources.passages) for number in range(total)]
    examples = positive_examples(questions, rows, sources.passages, sources.tokenizer, LENGTHS, titles)
    return examples._replace(make=lambda number, rng: examples.make(number, rng) | {"number": np.int32(number)})


@pytest.mark.parametrize("titles", [True, False])
def test_the_joint_has_question_and_passage_and_its_length_is_known_beforehand(sources, titles):
    store, tokenizer = sources.passages, sources.tokenizer
    examples = examples_of(sources, len(store), titles)
    for row in range(len(store)):
        arrays = examples.make(row, np.random.default_rng(0))
        used, start = int(arrays["joint_length"]), int(arrays["body_start"])
        assert used == examples.lengths[row] and not arrays["joint"][used:].any()
        body = store.body_tokens(row)
        np.testing.assert_array_equal(arrays["joint"][start : start + len(body)], body)
        before = tokenizer.decode(arrays["joint"][:start].tolist())
        assert "where was it" in before and (store.title(row) in before) == titles


def test_batches_hold_every_example_once_an_epoch_and_those_of_like_lengths_together(sources):
    examples = examples_of(sources, 2 * WINDOW)
    ordered = dataset(examples, 5, Qa.stream, 2)
    found = [ordered[step] for step in range(2 * WINDOW)]
    orders = [[batch["number"].tolist() for batch in epoch] for epoch in (found[:WINDOW], found[WINDOW:])]
    assert orders[0] != orders[1]
    for order in orders:
        assert sorted(sum(order, [])) == list(range(examples.total))
    assert np.mean([np.ptp(batch["joint_length"]) for batch in found]) < np.ptp(examples.lengths) / 4


def test_examples_with_a_list_of_passages_are_batched_by_length_as_without(sources):
    examples = examples_of(sources, 2 * WINDOW)
    listed = np.arange(2 * examples.total).reshape(examples.total, 2)
    words = Bm25Hits(listed.astype(np.int32), listed.astype(np.float32))
    run: Any = SimpleNamespace(sources=sources, bm25_search=lambda *_: words)
    found = with_search(run, examples, [], 2, uses_bm25=True)
    plain, both = dataset(examples, 5, Qa.stream, 2), dataset(found, 5, Qa.stream, 2)
    for step in range(WINDOW):
        assert both[step]["joint"].shape == plain[step]["joint"].shape
        np.testing.assert_array_equal(both[step]["bm25_rows"], listed[plain[step]["number"]])


def test_a_batch_is_the_same_wherever_a_run_begins_and_however_many_processes_share_it(sources):
    """A process that holds the shorter rows pads them to what the longest row of the others needs."""
    examples, is_wider = examples_of(sources, 4 * WINDOW), False
    whole, shorter = (dataset(examples, 5, Qa.stream, 4, rows) for rows in (None, np.array([0, 1])))
    for step in range(WINDOW):
        batch, part = whole[step], shorter[step]
        needed, needed_by_part = (
            -(-int(one["joint_length"].max()) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE for one in (batch, part)
        )
        assert batch["joint"].shape[1] == min(needed, LENGTHS.query + LENGTHS.document - 1)
        for name, array in batch.items():
            np.testing.assert_array_equal(array[:2], part[name])
        is_wider |= needed_by_part < part["joint"].shape[1]
    assert is_wider
    again = dataset(examples, 5, Qa.stream, 4)[WINDOW - 1]
    np.testing.assert_array_equal(again["number"], batch["number"])
