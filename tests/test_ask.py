"""`realm ask`: what it prints for people and for programs, one question or many."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console
from tiny_run import PEOPLE, question

from realm_jax import cli
from realm_jax.jobs import ask as job
from realm_jax.jobs.answering import open_run_to_ask, restore
from realm_jax.run import Run

QUESTION = question(3)["question"]


@pytest.fixture(scope="module")
def opened(trained_run):
    """The run, trained on one device and opened on eight."""
    return restore(open_run_to_ask(trained_run.workdir, overrides={"evaluation.batch_size": 1}))


@pytest.fixture
def quick(opened, monkeypatch):
    """The command without opening and restoring the run again."""
    monkeypatch.setattr(job, "open_run_to_ask", lambda *_, **__: opened.run)
    monkeypatch.setattr(job, "restore", lambda *_, **__: opened)


def test_a_question_imports_only_what_it_needs():
    """Each of these takes between a tenth of a second and two of them."""
    unwanted = {"torch", "tensorboardX", "scipy", "grain", "optax", "tensorflow", "transformers"}
    code = f"import sys, realm_jax.jobs.ask; print(*sorted({unwanted} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def ask(run: Run, *arguments: str) -> int:
    return cli.main(["ask", f"--workdir={run.workdir}", *arguments])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def pipe(data: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")


# ---- answers


def test_an_answer_stands_in_the_passage_that_is_shown_with_it(trained_run, capsys):
    assert ask(trained_run, "--json", QUESTION) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["question"] == QUESTION
    passage = answer["passage"]
    assert passage["text"][slice(*passage["span"])] == answer["answer"]
    assert passage["title"] == PEOPLE[int(passage["id"].removeprefix("p"))]
    likeliest = [candidate["probability"] for candidate in answer["candidates"]]
    assert likeliest == sorted(likeliest, reverse=True) and sum(likeliest) == pytest.approx(1, abs=1e-5)
    assert 0 < answer["probability"] <= 1
    assert {rank for one in answer["candidates"] for rank in one["ranks"].values()} == {1, 2, 3}
    for candidate in answer["candidates"]:
        assert candidate["text"][slice(*candidate["span"])] == candidate["answer"]


def test_people_see_the_answer_its_passage_and_the_passages_read(trained_run, quick, capsys):
    assert ask(trained_run, *QUESTION.split(), "--top=2") == 0
    out, err = capsys.readouterr()
    answer, _, title, passage, _, head, *candidates = out.rstrip("\n").split("\n")
    found = answer.split("  (probability 0.")[0]
    assert f"[[{found}]]" in passage and passage.endswith("stands.")
    assert title.split(" (p")[0] in PEOPLE
    assert head.split() == "p(z|x) found by title passage, its best answer marked".split()
    assert len(candidates) == 2 and all("[[" in line and "]]" in line for line in candidates)
    assert "[[" not in err


def test_passages_are_found_by_words_and_vectors_where_a_question_asks_for_both(trained_run, capsys):
    assert ask(trained_run, "--json", "--search=hybrid", QUESTION) == 0
    ranks = [one["ranks"] for one in json.loads(capsys.readouterr().out)["candidates"]]
    assert {"vectors", "bm25"} == set().union(*ranks)


def test_words_alone_need_a_word(trained_run, capsys):
    assert ask(trained_run, "--search=bm25", "is it of the") == 2
    assert "no word but stop words" in capsys.readouterr().err


def test_a_question_a_line_from_a_pipe_and_a_bad_line_does_not_stop_the_rest(trained_run, quick, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", pipe(QUESTION.encode() + b"\n\n\xff?\n" + b"who " * 40 + b"\nwho is Ada Dahl\n"))
    assert ask(trained_run, "--json") == 2
    out, err = capsys.readouterr()
    assert [json.loads(line)["question"] for line in out.splitlines()] == [QUESTION, "who is Ada Dahl"]
    assert "line 2: the question is empty" in err
    assert "line 3: the question is not valid UTF-8" in err
    assert "at most 14; shorten it" in err and "line 4: the question has" in err


def test_on_a_terminal_questions_are_prompted_for_until_an_empty_line(trained_run, quick, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Terminal(f"{'who ' * 40}\n{QUESTION}\n\n{QUESTION}\n"))
    assert ask(trained_run, "--json") == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 and json.loads(out)["question"] == QUESTION
    assert err.count("question> ") == 3 and "shorten it" in err


def test_the_end_of_input_ends_a_conversation(trained_run, quick, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert ask(trained_run) == 0
    assert capsys.readouterr().out == ""


def test_a_single_question_must_be_one(trained_run, quick, capsys, monkeypatch):
    def refused(*arguments: str) -> str:
        assert ask(trained_run, *arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return err.splitlines()[-1]

    assert "realm: error: the question is empty" in refused(" ")
    assert "word pieces, but this run reads at most 14; shorten it" in refused("why " * 30)
    monkeypatch.setattr(sys, "stdin", pipe(b""))
    assert "no question was given" in refused()


# ---- marks


def marked(text: str, span: tuple[int, int], room: int | None = None, **terminal) -> str:
    to = Console(file=io.StringIO(), width=200, highlight=False, **terminal)
    to.print(job.marked(text, list(span), to, room))
    return to.file.getvalue().rstrip("\n")


def test_the_span_is_reversed_on_a_terminal_and_in_brackets_elsewhere():
    text, span = "Built in 1850 by Ada.", (9, 13)
    terminal = {"force_terminal": True, "color_system": "standard"}
    assert marked(text, span, no_color=False, **terminal) == "Built in \x1b[1;7m1850\x1b[0m by Ada."
    assert marked(text, span, no_color=True, **terminal) == "Built in [[1850]] by Ada."
    assert marked(text, span) == "Built in [[1850]] by Ada."


def test_a_snippet_keeps_the_whole_span_and_what_is_around_it():
    text = "a" * 50 + "1850" + "b" * 50
    assert marked(text, (50, 54), room=10) == "…aaa[[1850]]bbb…"
    assert marked(text, (50, 54), room=2) == "…[[1850]]…"
    assert marked("in 1850", (3, 7), room=60) == "in [[1850]]"
    assert marked(text, (0, 0), room=3) == "aaa…"


def test_a_passage_cannot_steer_the_terminal_or_use_its_markup():
    assert marked("[bold]no\x1b]0;title\x07 1850\x9b", (19, 23)) == "[bold]no ]0;title  [[1850]] "
