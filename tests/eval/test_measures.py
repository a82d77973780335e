"""Records of predictions: what each question counts, what is left out, and TREC's files."""

import json
import math

import pytest
from tiny_run import write_lines

from realm_jax.errors import UserError
from realm_jax.eval.prediction_files import read_predictions, settings_file, trec_qrels, trec_run
from realm_jax.eval.question_metrics import compare, compute_metrics, describe_metric, over_seeds, summarize


def passages(*hits: bool, gold: int | None = None) -> list[dict]:
    names = [f"d{place}" if place != gold else "gold" for place in range(len(hits))]
    return [
        {"id": name, "score": -place, "has_answer": hit}
        for place, (name, hit) in enumerate(zip(names, hits, strict=True))
    ]


RIGHT = {
    "question": "Who sang it?",
    "answers": ["the Beatles", "Beatles band"],
    "prediction": "Beatles!",
    "gold_passage_id": "gold",
    "retrieved": passages(False, True, False, False, True, gold=4),
    "reader_oracle": True,
}
PATTERN = {
    "question": "When?",
    "answers": ["19[67]\\d"],
    "match": "regex",
    "prediction": "1969, in July",
    "retrieved": passages(True, False, False, False, False),
    "reader_oracle": False,
}
WRONG = RIGHT | {"prediction": "a band", "retrieved": passages(*[False] * 5), "reader_oracle": False}
OPEN = {"question": "Why?", "prediction": "1969", "retrieved": [{"id": "d1", "score": 1.0}]}


def means(*records: dict) -> dict[str, float]:
    return {name: one["value"] for name, one in summarize(records).items()}


def test_each_measure_is_over_the_questions_that_have_it():
    records = [RIGHT, PATTERN, WRONG, OPEN]
    found, counted = compute_metrics(records), {name: one["questions"] for name, one in summarize(records).items()}
    assert counted == {
        "exact_match": 3,
        "exact_match_squad": 2,
        "f1": 2,
        "regex_match": 1,
        "regex_full_match": 1,
        "answer_recall@1": 3,
        "answer_recall@5": 3,
        "recall@1": 2,
        "recall@5": 2,
        "reader_oracle": 3,
    }
    assert all(math.isnan(values[3]) for values in found.values()), "without answers there is nothing to measure"
    assert all(describe_metric(name) for name in found)


def test_the_values_by_hand():
    assert means(RIGHT, PATTERN, WRONG) == pytest.approx(
        {
            "exact_match": 2 / 3,
            "exact_match_squad": 1 / 2,
            "f1": (1 + 2 / 3) / 2,
            "regex_match": 1,
            "regex_full_match": 0,
            "answer_recall@1": 1 / 3,
            "answer_recall@5": 2 / 3,
            "recall@1": 0,
            "recall@5": 1 / 2,
            "reader_oracle": 1 / 3,
        }
    )


def test_nothing_hits_beyond_the_passages_that_a_question_has():
    """Recall is told as deep as some question goes: words find few passages for a question of few words."""
    short, long = passages(False, False), passages(False, False, False, False, True)
    found = means(RIGHT | {"retrieved": long}, RIGHT | {"retrieved": short})
    assert found["answer_recall@1"] == 0.0 and found["answer_recall@5"] == 0.5
    assert not {"answer_recall@5", "recall@5"} & means(RIGHT | {"retrieved": short}).keys()


def test_answers_are_enough(tmp_path):
    """A file of another system has no passages."""
    file = write_lines(tmp_path / "theirs.jsonl", [{key: RIGHT[key] for key in ("question", "answers", "prediction")}])
    assert compute_metrics(read_predictions(file)).keys() == {"exact_match", "exact_match_squad", "f1"}


def test_a_run_for_trec_names_every_document_once_and_keeps_the_order():
    retrieved = [("a b", 2.5), ("c", 2.5), ("a b", 2.0), ("50%", 2.5000002)]
    records = [{"id": 7, "retrieved": [{"id": name, "score": score} for name, score in retrieved]}]
    fields = [line.split(" ") for line in trec_run(records, "my run").splitlines()]
    assert [(line[0], line[1], line[2], line[3], line[5]) for line in fields] == [
        ("7", "Q0", "a%20b", "1", "my%20run"),
        ("7", "Q0", "c", "2", "my%20run"),
        ("7", "Q0", "50%25", "3", "my%20run"),
    ]
    scores = [float(line[4]) for line in fields]
    assert scores == sorted(set(scores), reverse=True) and scores == pytest.approx([2.5] * 3, abs=1e-5)


JUDGED = {key: value for key, value in RIGHT.items() if key != "gold_passage_id"}


def test_one_of_several_gold_passages_is_enough_for_recall():
    found = compute_metrics([JUDGED | {"gold_passages": gold} for gold in ({"far": 3, "d1": 1}, {"far": 1, "gold": 0})])
    assert found["recall@1"].tolist() == [0, 0] and found["recall@5"].tolist() == [1, 0]


def test_ranks_are_measured_of_judged_questions_and_compared():
    first, second = ([{"id": name, "score": 0} for name in names] for names in ("abcdefghijkl", "bacdefghijkl"))
    asked = [JUDGED | {"gold_passages": {"b": 1, "c": 2}}, OPEN, JUDGED | {"gold_passages": {"zz": 1}}]
    left, right = ([one | {"retrieved": retrieved} for one in asked] for retrieved in (first, second))
    found = compute_metrics(left)
    assert found["mrr@10"].tolist()[::2] == [1 / 2, 0] and math.isnan(found["mrr@10"][1])
    assert all(describe_metric(name) for name in found)
    compared = compare(left, right, "b.jsonl")["measures"]
    assert compared["mrr@10"]["difference"] == 1 / 4 and compared["mrr@10"]["mcnemar"] is None
    assert compared["ndcg@10"]["only_b"] == 1 and compared["ndcg@10"]["questions"] == 2


def test_over_seeds_intervals_are_students_t_and_differences_paired():
    """Two questions; one, two and no right answers, then one more by the other system, but under the last seed."""
    ours, theirs = ([[[WRONG, RIGHT][n > k] for k in range(2)] for n in counts] for counts in ((1, 2, 0), (2, 2, 0)))
    exact = over_seeds(ours)["measures"]["exact_match"]
    assert exact["value"] == 1 / 2 and exact["seeds"] == 3
    assert exact["high"] - exact["value"] == pytest.approx(4.302653 * 0.5 / 3**0.5, rel=1e-6)
    compared = over_seeds(ours, theirs)["measures"]["exact_match"]
    assert [compared[key] for key in ("a", "b", "difference")] == pytest.approx([1 / 2, 2 / 3, 1 / 6])
    assert compared["low"] < 0 < compared["high"]


def test_judgments_for_trec_are_the_gold_passages():
    several = {"id": "q3", "gold_passages": {"a": 2, "b c": 1}}
    assert trec_qrels([{"id": "q2", "gold_passages": {}}, several]) == "q3 0 a 2\nq3 0 b%20c 1\n"
    assert trec_qrels([{"id": "q1", "gold_passage_id": "p 4"}, {"id": "q2"}]) == "q1 0 p%204 1\n"
    with pytest.raises(UserError, match="two questions have the id q1"):
        trec_qrels([{"id": "q1"}, {"id": "q1"}])


UNLOOKED = {"id": "d", "score": 0}


@pytest.mark.parametrize(
    "record, message",
    [
        ({"question": "Who?"}, '"question" and "prediction" must be texts'),
        (RIGHT | {"answers": "Rome"}, '"answers" must be a list of texts'),
        (RIGHT | {"retrieved": [{"id": "d1"}]}, '"retrieved" must be a list of passages'),
        (RIGHT | {"retrieved": ["d1"]}, '"retrieved" must be a list of passages'),
        (RIGHT | {"retrieved": [{"id": ["d1"], "score": 1}]}, 'every "id" of "retrieved" must be a text'),
        (RIGHT | {"retrieved": [{"id": "d1", "score": math.nan}]}, 'every "score" of "retrieved" must be a finite'),
        (RIGHT | {"retrieved": [{"id": "d1", "score": 10**400}]}, 'every "score" of "retrieved" must be a finite'),
        (RIGHT | {"retrieved": [{"id": "d1", "score": True}]}, 'every "score" of "retrieved" must be a finite'),
        (RIGHT | {"retrieved": passages(True) + [UNLOOKED | {"has_answer": "false"}]}, 'every "has_answer"'),
        (RIGHT | {"retrieved": passages(True) + [UNLOOKED]}, 'either every passage of "retrieved" or none has'),
        (RIGHT | {"id": {"a": 1}}, '"id" must be a text or a whole number'),
        (RIGHT | {"gold_passage_id": 1.5}, '"gold_passage_id" must be a text or a whole number'),
        (RIGHT | {"gold_passages": ["gold"]}, '"gold_passages" must be an object of ids and grades'),
        (RIGHT | {"reader_oracle": 7}, '"reader_oracle" must be true or false'),
        (RIGHT | {"match": "regexp"}, '"match" is "regexp"; write "regex" for answers that are patterns'),
        (RIGHT | {"match": ["regex"]}, '"match" is .*; write "regex"'),
    ],
)
def test_what_cannot_be_scored_is_named(tmp_path, record, message):
    file = write_lines(tmp_path / "p.jsonl", [RIGHT, record])
    with pytest.raises(UserError, match="p.jsonl:2: " + message):
        read_predictions(file)


def test_no_answers_at_all_and_no_predictions_at_all(tmp_path):
    with pytest.raises(UserError, match="no question has answers"):
        compute_metrics([OPEN])
    with pytest.raises(UserError, match="holds no predictions"):
        read_predictions(write_lines(tmp_path / "p.jsonl", []))
    (tmp_path / "p.jsonl").write_text(json.dumps(OPEN) + "\n" + json.dumps(OPEN)[:20])
    with pytest.raises(UserError, match="p.jsonl:2"):
        read_predictions(tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        (
            lambda text: text[: text.index("\n") + 1],
            "1 of 2 questions are answered; repeat the `realm predict` command",
        ),
        (lambda text: text[:-9], "1 of 2 questions are answered; repeat the `realm predict` command"),
        (lambda _: "", "0 of 2 questions are answered; repeat the `realm predict` command"),
    ],
)
def test_a_file_that_is_not_all_that_was_asked_is_refused(tmp_path, cut, told):
    file = write_lines(tmp_path / "p.jsonl", [RIGHT, WRONG])
    settings_file(file).write_text('{"lines": 2}')
    assert len(read_predictions(file)) == 2
    file.write_text(cut(file.read_text()))
    with pytest.raises(UserError, match=told):
        read_predictions(file)


def test_an_id_that_is_null_is_none(tmp_path):
    file = write_lines(tmp_path / "p.jsonl", [RIGHT, RIGHT | {"id": None}])
    assert [record["id"] for record in read_predictions(file)][1] == "2"


@pytest.mark.parametrize("step", ["NaN", '"one"', "1.5"])
def test_settings_that_are_no_numbers_are_refused(tmp_path, step):
    file = write_lines(tmp_path / "p.jsonl", [RIGHT])
    settings_file(file).write_text(f'{{"lines": 1, "step": {step}}}')
    with pytest.raises(UserError, match='p.jsonl.settings.json: "step" must be a whole number'):
        read_predictions(file)


def test_a_question_for_which_nothing_was_retrieved_is_a_miss(tmp_path):
    first = RIGHT | {"retrieved": passages(True, gold=0)}
    found = compute_metrics([first, RIGHT | {"retrieved": []}])
    assert found["recall@1"].tolist() == found["answer_recall@1"].tolist() == [1, 0]
    assert means(RIGHT | {"retrieved": []})["recall@1"] == 0
    unlooked = [RIGHT | {"retrieved": [{"id": "gold", "score": 1}]}, RIGHT | {"retrieved": []}]
    found = compute_metrics(unlooked)
    assert found["recall@1"].tolist() == [1, 0] and "answer_recall@1" not in found
    unknown = {key: value for key, value in RIGHT.items() if key != "retrieved"}
    with pytest.raises(UserError, match='p.jsonl:2: some lines have "retrieved" and some not'):
        read_predictions(write_lines(tmp_path / "p.jsonl", [RIGHT, unknown]))


@pytest.mark.parametrize(("gold", "found"), [("12", 12), (12, "12"), (12, 12)])
def test_ids_that_are_numbers_are_compared_as_text(tmp_path, gold, found):
    record = RIGHT | {"gold_passage_id": gold, "retrieved": [{"id": found, "score": 1}]}
    assert means(*read_predictions(write_lines(tmp_path / "p.jsonl", [record])))["recall@1"] == 1


def test_questions_with_other_gold_passages_are_not_compared():
    assert compare([RIGHT], [RIGHT | {"gold_passage_id": None}], "b.jsonl")["questions"] == 1
    with pytest.raises(
        UserError, match='b.jsonl: question 2 has {"gold_passage_id": "other"}, in the other file {"gold_p'
    ):
        compare([RIGHT, WRONG], [RIGHT, WRONG | {"gold_passage_id": "other"}], "b.jsonl")
    graded, other = (JUDGED | {"gold_passages": {"gold": 1, "d": grade}} for grade in (1, 2))
    assert compare([graded], [graded], "b.jsonl")["questions"] == 1
    with pytest.raises(
        UserError, match='b.jsonl: question 1 has {"gold_passages": {"gold": 1, "d": 2}}, in the other file'
    ):
        compare([graded], [other], "b.jsonl")
