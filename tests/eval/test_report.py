"""The report page: what it says for good, bad and partial results, that it stands alone, and that text is harmless."""

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from realm_jax.eval.format import duration, probability, share
from realm_jax.eval.html import environment, thinned, ticks
from realm_jax.eval.report import headline, render_report, write_report


def sample_data() -> dict[str, Any]:
    """A whole run: every key of the report's data."""
    data = json.loads((Path(__file__).parent / "report.json").read_text(encoding="utf-8"))
    for stage in data["stages"]:
        stage |= {"seconds": stage["steps"] / 8, "metrics": _metrics(stage["name"], stage["steps"])}
    data["recall_history"] = [
        {"stage": "ict", "step": step, "recall@5": 0.03 + step / 1800} for step in range(0, 801, 200)
    ] + [
        {"stage": "realm", "step": step, "recall@5": 0.987 - 0.505 * 0.5 ** (step / 500), "refresh": step > 0}
        for step in range(0, 3001, 250)
    ]
    right, wrong = data["examples"]
    wrong["candidates"] = right["candidates"]
    return data | {"adoptions": [], "questions_by_replaced_words": {"0": 400}}


def empty_data() -> dict[str, Any]:
    """A run that measured and trained nothing yet."""
    lists = dict.fromkeys(("stages", "recall_history", "adoptions", "examples"), ())
    groups = dict.fromkeys(("recall_by_replaced_words", "questions_by_replaced_words", "settings"), {})
    texts = dict.fromkeys(("title", "command", "created", "hardware"), "x")
    other = {"corpus": {"dev_questions": 0}, "results": {"exact_match": {}}}
    return lists | groups | texts | other


def _metrics(name: str, steps: int) -> list[dict[str, float]]:
    rows = []
    for step in range(0, steps + 1, 10):
        decay = 0.5 ** (step / (steps / 5))
        row = {"step": step, "loss": 0.6 + 6 * decay + 0.1 * (step % 7)}
        if name in ("realm", "qa"):
            row |= {"null_probability": 0.04 + 0.3 * decay}
        if name == "realm":
            row |= {"retrieval_utility": 2.4 * (1 - decay), "useful_candidates": 1.4 - decay}
        if name in ("mlm", "ict"):
            row |= {"accuracy": 0.9 - 0.8 * decay}
        rows.append(row)
    return rows


class Balance(HTMLParser):
    """Checks that tags close in order, and collects the text and the attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_the_page_begins_with_what_the_retriever_learned():
    page = Balance(render_report(sample_data()))
    sentence = "Training on masked words taught the retriever to find the right passage, without any question."
    assert page.text.index(f"{sentence} recall@5 0.48 → 0.99") < 100


def test_the_page_of_a_run_has_all_parts():
    page = Balance(render_report(sample_data()))
    for expected in (
        "no_retriever_gradient 0.47",
        "This run 0.91",
        "Masked words alone; passages are retrieved and never named",
        "0 (400 questions) 1 2 BM25 (matching words) 0.99 0.62 0.05",
        "✓ torvald espel",
        "✗ may 1790 right: Brenna Aldous",
        "6 min 15 s",
        "At the end of REALM: +2.41 nats.",
        "realm quickstart --workdir runs/first",
    ):
        assert expected in page.text
    assert page.tags.count("svg") == 3
    assert page.tags.count("mark") == 2


def test_a_part_without_data_is_left_out():
    text = Balance(render_report(empty_data())).text
    assert "cannot say whether the retriever learned" in text and "Settings" in text
    for heading in ("Stages of training", "A triangle marks", "by replaced words", "p(z|x)", "Answers"):
        assert heading not in text


def test_the_page_warns_of_a_stage_that_ended_below_its_start():
    data = sample_data()
    data["results"]["stages"] = {"qa": {"warning": "qa: recall@5 fell"}, "ict": {}}
    assert "qa: recall@5 fell." in Balance(render_report(data)).text


def test_real_data_without_gold_passages_is_judged_by_the_answer_in_the_passage():
    data = sample_data()
    data["results"]["answer_recall@5"] = data["results"].pop("recall@5")
    for point in data["recall_history"]:
        point["answer_recall@5"] = point.pop("recall@5")
    assert "taught the retriever to find a passage with the answer," in headline(data).sentence
    assert headline(data).figures == "answer recall@5 0.48 → 0.99"
    assert "answer recall@5 during training, from 0.03 to 0.98" in Balance(render_report(data)).text


@pytest.mark.parametrize(
    ("realm", "expected"),
    [(0.987, "taught the retriever to find"), (0.49, "did not teach"), (0.30, "made the retriever worse")],
)
def test_the_headline_does_not_claim_more_than_the_numbers(realm: float, expected: str):
    data = sample_data()
    data["results"]["recall@5"]["realm"] = realm
    assert expected in headline(data).sentence
    assert headline(data).figures == f"recall@5 0.48 → {realm:.2f}"


def test_few_questions_make_a_difference_uncertain():
    data = sample_data()
    data["results"]["recall@5"] = {"ict": 0.5, "realm": 0.6}
    assert "taught the retriever to find" in headline(data).sentence
    data["corpus"]["dev_questions"] = 50
    assert "did not teach" in headline(data).sentence


def poisoned(value: Any, poison: str) -> Any:
    """The data with the poison added to every text and every free key."""
    if isinstance(value, dict):
        return {key: poisoned(item, poison) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, poison) for item in value]
    return value + poison if isinstance(value, str) and value not in ("mlm", "ict", "realm", "qa") else value


def test_markup_in_any_text_is_shown_and_not_obeyed():
    poison = "</p></svg></title></style><script>alert(1)</script><img src=x onerror='alert(1)'>\" onload=\"alert(1)"
    data = poisoned(sample_data(), poison)
    data["settings"][poison] = poison
    data["results"]["seconds"][poison] = 1.0
    data["recall_by_replaced_words"]["realm"][poison] = 0.5
    data["stages"][0]["name"] = poison
    data["recall_history"][0]["stage"] = poison
    page, clean = Balance(render_report(data)), Balance(render_report(sample_data()))
    assert set(page.tags) <= set(clean.tags) and "script" not in clean.tags and "img" not in clean.tags
    assert {name for name, _ in page.attributes} <= {name for name, _ in clean.attributes}
    assert "<script>alert(1)</script>" in page.text


@given(st.text(max_size=40), st.integers(-5, 50), st.integers(-5, 50))
def test_any_passage_and_any_span_give_a_sound_page(passage: str, start: int, end: int):
    candidate = {"title": "t", "text": passage, "probability": 0.5, "is_gold": False, "answer_span": [start, end]}
    example = {"question": passage, "answers": [], "prediction": passage, "correct": True, "candidates": [candidate]}
    Balance(render_report(empty_data() | {"examples": [example]}))


def test_the_answer_far_into_a_passage_is_in_the_snippet():
    passage = "before " * 300 + "the ANSWER here" + " after" * 300
    start = passage.index("ANSWER")
    candidate = {"title": "t", "text": passage, "probability": 1.0, "answer_span": [start, start + 6], "is_gold": True}
    example = {"question": "q", "answers": [], "prediction": "p", "candidates": [candidate]}
    page = render_report(empty_data() | {"examples": [example]})
    shown = re.search(r"<td>(…[^\n]*mark.*?)</td>", page)
    assert shown is not None and "before the <mark>ANSWER</mark> here after" in shown.group(1)
    assert len(shown.group(1)) < 400


def test_the_page_stands_alone(tmp_path: Path):
    write_report(sample_data(), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "://" not in page and "@import" not in page and "url(" not in page
    assert not {"script", "link", "img", "iframe"} & set(Balance(page).tags)
    assert "default-src 'none'" in page
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_broken_character_does_not_stop_the_report(tmp_path: Path):
    write_report(empty_data() | {"title": "half a pair: \ud83d"}, tmp_path / "report.html")
    assert "half a pair: ?" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_page_without_a_value_that_it_shows_is_an_error():
    with pytest.raises(UndefinedError, match="'title' is undefined"):
        environment().get_template("page.html.j2").render(headline="x")


def test_every_curve_says_what_it_shows_without_being_seen():
    page = Balance(render_report(sample_data()))
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert len(labels) == page.tags.count("svg") and all(labels)
    assert "recall@5 during training, from 0.03 to 0.98" in labels


def test_the_data_are_not_changed():
    data = sample_data()
    before = copy.deepcopy(data)
    render_report(data)
    assert data == before


def test_curves_leave_out_what_is_not_finite():
    def page(*losses: float) -> str:
        stage = sample_data()["stages"][2]
        stage["metrics"] = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
        return render_report(empty_data() | {"stages": [stage]}).partition("<svg")[2]

    curve = page(1.0, float("nan"), float("inf"), 2.0)
    assert curve.count("<circle") == 2 and "nan" not in curve and "inf" not in curve
    assert page(float("nan")) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=1000))
def test_thinning_keeps_the_mean_level_and_the_order(values: list[float]):
    points = thinned(list(enumerate(values)))
    assert len(points) <= 160
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert min(values) - 1e-3 <= min(y for _, y in points) and max(y for _, y in points) <= max(values) + 1e-3


@given(st.floats(-1e5, 1e5), st.floats(1e-3, 1e5), st.integers(2, 8))
def test_ticks_are_few_and_inside(low: float, width: float, most: int):
    marks = ticks(low, low + width, most)
    assert len(marks) <= most + 1
    assert all(low - 1e-6 * width <= mark <= low + width * (1 + 1e-6) for mark in marks)


def test_numbers_are_written_as_people_write_them():
    assert [probability(value) for value in (0.129, 1.0, 0.99999, 0.0, 1.1e-14)] == [
        "0.129",
        "1.000",
        "> 0.999",
        "0.000",
        "1.1 × 10⁻¹⁴",
    ]
    assert [share(value) for value in (0.5, 0.996, 1.0, 0.0, 0.001)] == ["0.50", "0.996", "1.00", "0.00", "0.001"]
    assert [duration(value) for value in (3.21, 61.0, 3725, None)] == ["3.21 s", "1 min 1 s", "1 h 2 min", "–"]
