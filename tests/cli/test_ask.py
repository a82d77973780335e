"""`realm ask`, and how it opens a run: left as it is, on other devices, or refused in one line."""

import io
import json
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console
from tiny_run import PEOPLE, go_back_to, prepare_people, question

import realm_jax
from realm_jax.cli import ask as job
from realm_jax.cli import main as cli
from realm_jax.data.questions import Question
from realm_jax.eval import prediction
from realm_jax.eval.answer_matching import normalize
from realm_jax.eval.prediction import Answer, Evaluator, merge
from realm_jax.run import Run
from realm_jax.train.trained_run import open_run_for_inference, restore

QUESTION = question(3)["question"]


@pytest.fixture(scope="module")
def opened(trained_run):
    """The run, trained on one device and opened on eight."""
    return restore(open_run_for_inference(trained_run.workdir, {"evaluation.batch_size": 1}))


@pytest.fixture
def quick(opened, monkeypatch):
    """The command without opening and restoring the run again."""
    monkeypatch.setattr(job, "open_run_for_inference", lambda *_, **__: opened.run)
    monkeypatch.setattr(job, "restore", lambda *_, **__: opened)


def ask(run: Run, *arguments: str) -> int:
    return cli.main(["ask", f"--workdir={run.workdir}", *arguments])


def refused(capsys, *arguments: str) -> str:
    """The one line of a command that ends with exit code 2."""
    assert cli.main(["ask", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line = err.splitlines()[-1]
    assert line.startswith("realm: error: ")
    return line


# ---- a run that is opened


ONE = Answer("The house", 0.05, 0, (4, 13))
TWO = Answer("house", 0.27, 1, (2, 7))
OTHER = Answer("1803", 0.29, 2, (0, 4))


def test_occurrences_of_one_answer_are_added_and_it_is_shown_where_it_is_likeliest():
    first, second = merge([ONE, OTHER, TWO], "marginal")
    assert first == TWO._replace(probability=pytest.approx(0.32)) and second == OTHER
    assert merge([ONE, OTHER, TWO], "max") == [OTHER, TWO]


def test_marks_and_articles_are_no_common_answer():
    lone = [Answer(text, 0.2, 0, (0, 1)) for text in (".", "a", ",", "a")]
    merged = [(answer.text, answer.probability) for answer in merge(lone, "marginal")]
    assert merged == [("a", 0.4), (".", 0.2), (",", 0.2)]


def test_the_answers_are_those_of_a_walk_over_all_spans(opened, monkeypatch):
    """With every span kept, an answer's probability is Σ_z p(z|x) Σ p(span|z,x) over all of them: 1 in all."""
    monkeypatch.setattr(prediction, "SPANS", 10_000)
    evaluator = Evaluator(opened.run, [Question(QUESTION, ["1803"])])
    (found,) = evaluator.predict(opened.params, opened.index)
    assert sum(answer.probability for answer in found.nbest) == pytest.approx(1, abs=1e-5)
    assert len({normalize(answer.text) or answer.text for answer in found.nbest}) == len(found.nbest)
    likeliest = [answer.probability for answer in found.nbest]
    assert likeliest == sorted(likeliest, reverse=True)
    for answer in found.nbest:
        assert opened.run.sources.passages.text(answer.row)[slice(*answer.span)] == answer.text != ""
    read = [candidate.row for candidate in found.candidates]
    assert found.retrieved[: len(read)].tolist() == read
    assert sorted(found.scores.tolist(), reverse=True) == found.scores.tolist()
    texts = [opened.run.sources.passages.text(row) for row in read]
    for asked in ("1803", "1815", "house"):
        assert evaluator.reader_oracle(Question(QUESTION, [asked]), found) == any(asked in text for text in texts)
        pattern = Question(QUESTION, [asked], fields={"match": "regex"})
        assert evaluator.reader_oracle(pattern, found) == any(asked in text for text in texts)


def test_asking_changes_nothing_in_the_run_and_embeds_nothing_anew(trained_run, monkeypatch, capsys):
    monkeypatch.setattr(Run, "embed", lambda *_: pytest.fail("the checkpoint holds the vectors"))
    files = {path: path.stat().st_mtime_ns for path in trained_run.workdir.rglob("*")}
    assert ask(trained_run, QUESTION) == 0
    assert {path: path.stat().st_mtime_ns for path in trained_run.workdir.rglob("*")} == files


def test_a_run_that_records_a_key_of_an_earlier_version_is_opened(copied_run):
    path = copied_run / "config.json"
    config = json.loads(path.read_text())
    config["checkpoint"]["keep_every"] = 100
    path.write_text(json.dumps(config))
    assert "keep_every" not in open_run_for_inference(copied_run).config.checkpoint.to_dict()


def test_a_run_before_fine_tuning_shows_passages_and_claims_no_answer(trained_run, tmp_path, capsys):
    shutil.copytree(trained_run.workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "qa")
    go_back_to(tmp_path / "run", "ict")
    assert cli.main(["ask", f"--workdir={tmp_path}/run", "--json", QUESTION]) == 0
    out, err = capsys.readouterr()
    assert "no reader was trained (task ict): showing the retrieved passages" in err
    answer = json.loads(out)
    assert (answer["answer"], answer["probability"], answer["passage"], answer["nbest"]) == (None, None, None, [])
    assert answer["candidates"] and all("text" in one and "span" not in one for one in answer["candidates"])
    assert cli.main(["ask", f"--workdir={tmp_path}/run", QUESTION]) == 0
    out = capsys.readouterr().out
    first = answer["candidates"][0]
    assert out.startswith(f"{first['title']} ({first['id']})\n{first['text']}\n\np(z|x)  found by")
    assert "[[" not in out and "probability" not in out


def test_a_folder_without_a_run_or_without_a_model_is_named(trained_run, tmp_path, capsys):
    assert "no run there" in refused(capsys, f"--workdir={tmp_path}/none", QUESTION)
    (tmp_path / "fresh").mkdir()
    shutil.copy(trained_run.workdir / "config.json", tmp_path / "fresh")
    assert (
        "has no exported model yet (no task has ended, or an earlier version trained it); repeat the command"
        in refused(capsys, f"--workdir={tmp_path}/fresh", QUESTION)
    )


def test_a_prepared_folder_that_moved_is_named_and_found_with_data(trained_run, tmp_path, capsys):
    shutil.copytree(trained_run.workdir, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    moved = shutil.copytree(config["data"]["path"], tmp_path / "moved")
    config["data"]["path"] = str(tmp_path / "gone")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    at = f"--workdir={tmp_path}/run"
    assert f"{tmp_path}/gone: the prepared folder of the run" in (line := refused(capsys, at, QUESTION))
    assert "--config.data.path=DIR" in line
    assert cli.main(["ask", at, f"--config.data.path={moved}", QUESTION]) == 0


def test_a_run_keeps_what_it_was_trained_with(trained_run, capsys):
    line = refused(capsys, f"--workdir={trained_run.workdir}", "--config.qa.search=bm25", QUESTION)
    assert "--config.qa.search: fixed by the run; only runtime and evaluation keys" in line
    line = refused(capsys, f"--workdir={trained_run.workdir}", "--config.answering.reed=5", QUESTION)
    assert "there is no such key in the config; did you mean answering.read" in line


def test_another_corpus_than_the_run_was_trained_with_is_refused(trained_run, tmp_path, capsys):
    other = prepare_people(tmp_path, PEOPLE[:12])
    capsys.readouterr()
    line = refused(capsys, f"--workdir={trained_run.workdir}", f"--config.data.path={other}", QUESTION)
    assert f"{other}: not the data of the run" in line


@pytest.mark.parametrize(
    "file", ["query_embedder/model.safetensors", "reader/config.json", "vectors.npy", "manifest.json"]
)
@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: b""])
def test_a_damaged_model_is_named(trained_run, tmp_path, capsys, file, damage):
    path = shutil.copytree(trained_run.workdir, tmp_path / "run") / "model" / file
    path.write_bytes(damage(path.read_bytes()))
    assert f"{tmp_path}/run/model" in refused(capsys, f"--workdir={tmp_path}/run", QUESTION)


@pytest.mark.parametrize("file", ["reader/model.safetensors", "vectors.npy"])
def test_a_flipped_bit_in_a_model_is_found(trained_run, tmp_path, capsys, file):
    path = shutil.copytree(trained_run.workdir, tmp_path / "run") / "model" / file
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    line = refused(capsys, f"--workdir={tmp_path}/run", QUESTION)
    assert "does not match its checksum; remove the folder, and repeat the command that trained the run" in line


@pytest.mark.parametrize("content", ["[]", "", "{"])
def test_results_that_cannot_be_read_keep_nobody_from_an_answer(trained_run, tmp_path, capsys, content):
    shutil.copytree(trained_run.workdir, tmp_path / "run")
    (tmp_path / "run" / "results.json").write_text(content)
    assert cli.main(["ask", f"--workdir={tmp_path}/run", "--json", QUESTION]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["candidates"]
    assert "results.json cannot be read as results; answers come without metrics of the run" in said.err


def test_a_folder_with_another_config_is_no_run(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    line = refused(capsys, f"--workdir={tmp_path}", QUESTION)
    assert "config.json there is not the config of a run" in line


def test_a_question_imports_only_what_it_needs():
    """Each of these takes between a tenth of a second and two of them."""
    unwanted = {"torch", "tensorboardX", "scipy", "grain", "optax", "tensorflow", "transformers"}
    code = f"import sys, realm_jax.cli.ask; print(*sorted({unwanted} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


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


def test_a_reranker_puts_passages_into_its_order_and_says_so(trained_run, capsys):
    found = []
    for rerank in ("none", "tokens"):
        assert ask(trained_run, "--json", f"--rerank={rerank}", QUESTION) == 0
        found.append([one["ranks"] for one in json.loads(capsys.readouterr().out)["candidates"]])
    assert all([*ranks] == ["vectors"] for ranks in found[0])
    assert sorted(ranks["tokens"] for ranks in found[1]) == [1, 2, 3], "it placed all that are read"
    assert ask(trained_run, "--rerank=tokens", QUESTION) == 0
    assert re.search(r" v\d+ t[123] ", capsys.readouterr().out)
    line = refused(capsys, f"--workdir={trained_run.workdir}", "--rerank=cross-encoder", QUESTION)
    assert "--rerank=cross-encoder: no cross-encoder was trained by the end of task qa" in line
    line = refused(capsys, f"--workdir={trained_run.workdir}", "--rerank=tokens", "--generation=newest", QUESTION)
    assert "--rerank=tokens: cannot be combined with --generation" in line


def test_words_alone_need_a_word(trained_run, capsys):
    line = refused(capsys, f"--workdir={trained_run.workdir}", "--search=bm25", "is it of the")
    assert "no word but stop words" in line


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
    monkeypatch.setattr(sys, "stdin", Terminal(""))  # or until the end of input
    assert ask(trained_run) == 0 and capsys.readouterr().out == ""


def test_a_single_question_must_be_one(trained_run, quick, capsys, monkeypatch):
    workdir = f"--workdir={trained_run.workdir}"
    assert "realm: error: the question is empty" in refused(capsys, workdir, " ")
    assert "tokens, but this run reads at most 14; shorten it" in refused(capsys, workdir, "why " * 30)
    monkeypatch.setattr(sys, "stdin", pipe(b""))
    assert "there is no question" in refused(capsys, workdir)


def test_an_answer_that_may_be_bad_is_shown_after_the_passages(capsys):
    passage = {"id": "p1", "part": 0, "title": "Ada", "span": [9, 13], "text": "Built in 1850 by Ada."}
    candidate = passage | {"id": "p2", "title": "Eve", "ranks": {"vectors": 1}, "probability": 0.9}
    answer = {"answer": "1850", "probability": 0.5, "passage": passage, "candidates": [candidate]}
    lines: dict[bool, list[str]] = {}
    for passages_first in (False, True):
        to = Console(file=io.StringIO(), width=200, highlight=False)
        job.show(answer, to, passages_first)
        lines[passages_first] = [line for line in to.file.getvalue().splitlines() if line]
    assert lines[False][:2] == ["1850  (probability 0.5)", "Ada (p1)"]
    assert lines[True][0] == "Eve (p2)" and lines[True][-1] == "1850  (probability 0.5)"
    assert sorted(lines[True][2:-1]) == sorted(lines[False][3:])


# ---- marks


def marked(text: str, span: tuple[int, int], room: int | None = None, **terminal) -> str:
    to = Console(file=io.StringIO(), width=200, highlight=False, **terminal)
    to.print(job.highlight_span(text, list(span), to, room))
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


def test_fewer_questions_use_the_program_of_the_next_power_of_two(trained_run):
    """A service compiles powers of two before it is ready; no other number may compile while people wait."""
    model = realm_jax.Model(trained_run.workdir)
    questions = [question.question for question in trained_run.sources.questions["dev"]] * 32
    many = model.ask(questions[:32], batch_size=32)
    programs = prediction._read._cache_size()
    fewer = model.ask(questions[:17], batch_size=32)
    assert prediction._read._cache_size() == programs
    assert [answer["answer"] for answer in fewer] == [answer["answer"] for answer in many[:17]]
