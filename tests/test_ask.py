"""`realm ask`: what it prints for people and for programs, and what it says where it cannot answer."""

import io
import json
import shutil
import sys

import numpy as np
import pytest
from rich.console import Console
from tiny_run import PEOPLE, prepare_people, question

from realm_jax import cli
from realm_jax.jobs import ask as job
from realm_jax.jobs.answering import open_run_to_ask, restore
from realm_jax.run import Run
from realm_jax.training.checkpoints import Saved
from realm_jax.training.loop import restore_index, restore_params

QUESTION = question(3)["question"]


@pytest.fixture(scope="module")
def opened(trained_run):
    """The run, trained on one device and opened on eight."""
    return restore(open_run_to_ask(trained_run.workdir, overrides={"evaluation.batch_size": 1}))


@pytest.fixture
def quick(opened, monkeypatch):
    """The command without opening and restoring the run again."""
    monkeypatch.setattr(job, "open_run_to_ask", lambda *_: opened.run)
    monkeypatch.setattr(job, "restore", lambda _: opened)


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
    for candidate in answer["candidates"]:
        assert candidate["text"][slice(*candidate["span"])] == candidate["answer"]


def test_people_see_the_answer_its_passage_and_the_passages_read(trained_run, quick, capsys):
    assert ask(trained_run, *QUESTION.split(), "--top=2") == 0
    out, err = capsys.readouterr()
    answer, _, title, passage, _, head, *candidates = out.rstrip("\n").split("\n")
    found = answer.split("  (probability 0.")[0]
    assert f"[[{found}]]" in passage and passage.endswith("stands.")
    assert title.split(" (p")[0] in PEOPLE
    assert head.split() == "p(z|x) title passage, its best answer marked".split()
    assert len(candidates) == 2 and all("[[" in line and "]]" in line for line in candidates)
    assert "[[" not in err


def test_an_answer_found_in_several_passages_is_shown_in_the_one_that_adds_most(opened):
    from realm_jax.evaluation.predict import Candidate, Prediction

    spans = [(n, opened.run.sources.passages.text(n).index("The house")) for n in (0, 1, 2)]
    candidates = [
        Candidate(n, p, (start, start + 9), q)
        for (n, start), (p, q) in zip(spans, [(0.5, 0.1), (0.3, 0.9), (0.2, 0.2)], strict=True)
    ]
    assert opened.answered_by(Prediction("The house", 0.36, candidates)).row == 1


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


# ---- the run that is asked


def test_asking_changes_nothing_in_the_run_and_embeds_nothing_anew(trained_run, monkeypatch, capsys):
    monkeypatch.setattr(Run, "embed", lambda *_: pytest.fail("the checkpoint holds the vectors"))
    files = {path: path.stat().st_mtime_ns for path in trained_run.workdir.rglob("*")}
    assert ask(trained_run, QUESTION) == 0
    assert {path: path.stat().st_mtime_ns for path in trained_run.workdir.rglob("*")} == files


def test_the_saved_index_is_taken_only_if_the_parameters_give_it(trained_run, opened, monkeypatch):
    run = opened.run
    for task in ("ict", "qa"):
        params = restore_params(trained_run, run.workdir, task, opened.params)
        saved = np.asarray(restore_index(run, task).vectors)[: run.setting.rows]
        np.testing.assert_allclose(saved, trained_run.embed(params), atol=1e-5)
    monkeypatch.setattr(Saved, "record", {"index_step": 1})  # the embedders went on for a step after that
    assert restore_index(run, "ict") is None
    assert restore_index(run, "qa") is not None, "fine-tuning leaves the document embedder as it was"


def test_a_run_before_fine_tuning_answers_with_a_warning(trained_run, tmp_path, capsys):
    shutil.copytree(trained_run.workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "qa")
    assert cli.main(["ask", f"--workdir={tmp_path}/run", "--json", QUESTION]) == 0
    out, err = capsys.readouterr()
    assert "parameters of task ict: answers come from a span head that qa did not train" in err
    assert json.loads(out)["candidates"]


# ---- mistakes


def refused(capsys, *arguments: str) -> str:
    """The one line of a command that ends with exit code 2."""
    assert cli.main(["ask", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line = err.splitlines()[-1]
    assert line.startswith("realm: error: ")
    return line


def test_a_single_question_must_be_one(trained_run, quick, capsys, monkeypatch):
    at = f"--workdir={trained_run.workdir}"
    assert "the question is empty" in refused(capsys, at, " ")
    assert "word pieces, but this run reads at most 14; shorten it" in refused(capsys, at, "why " * 30)
    monkeypatch.setattr(sys, "stdin", pipe(b""))
    assert "no question was given" in refused(capsys, at)


def test_a_folder_without_a_run_or_without_a_checkpoint_is_named(trained_run, tmp_path, capsys):
    assert "no run there" in refused(capsys, f"--workdir={tmp_path}/none", QUESTION)
    (tmp_path / "fresh").mkdir()
    shutil.copy(trained_run.workdir / "config.json", tmp_path / "fresh")
    assert "no checkpoint yet; go on with `realm train" in refused(capsys, f"--workdir={tmp_path}/fresh", QUESTION)


def test_a_prepared_folder_that_moved_is_named_and_found_with_data(trained_run, tmp_path, capsys):
    shutil.copytree(trained_run.workdir, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    moved = shutil.copytree(config["data"]["path"], tmp_path / "moved")
    config["data"]["path"] = str(tmp_path / "gone")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    at = f"--workdir={tmp_path}/run"
    assert f"{tmp_path}/gone: the prepared folder of the run" in (line := refused(capsys, at, QUESTION))
    assert "--data=DIR" in line
    assert cli.main(["ask", at, f"--data={moved}", QUESTION]) == 0


def test_another_corpus_than_the_run_was_trained_with_is_refused(trained_run, tmp_path, capsys):
    other = prepare_people(tmp_path, PEOPLE[:12])
    capsys.readouterr()
    line = refused(capsys, f"--workdir={trained_run.workdir}", f"--data={other}", QUESTION)
    assert f"{other}: a store and tokenizer that do not match the run" in line
