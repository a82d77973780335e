"""A run opened to answer questions: left as it is, on other devices, and refused in one line where that cannot be."""

import json
import shutil

import numpy as np
import pytest
from tiny_run import PEOPLE, prepare_people, question

from realm_jax import cli
from realm_jax.corpus.jsonl import Question
from realm_jax.evaluation.answers import normalise
from realm_jax.evaluation.predict import Answer, Evaluator, merge
from realm_jax.jobs.answering import open_run_to_ask, restore
from realm_jax.run import Run
from realm_jax.training.checkpoints import Gone, Saved
from realm_jax.training.restore import restore_params, saved_index

pytestmark = pytest.mark.usefixtures("quick_programs")

QUESTION = question(3)["question"]


@pytest.fixture(scope="module")
def opened(trained_run):
    """The run, trained on one device and opened on eight."""
    return restore(open_run_to_ask(trained_run.workdir, overrides={"evaluation.batch_size": 1}))


ONE = Answer("The house", 0.05, 0, (4, 13))
TWO = Answer("house", 0.27, 1, (2, 7))
OTHER = Answer("1803", 0.29, 2, (0, 4))


def test_occurrences_of_one_answer_are_added_and_it_is_shown_where_it_is_likeliest():
    first, second = merge([ONE, OTHER, TWO], "marginal")
    assert first == TWO._replace(probability=pytest.approx(0.32)) and second == OTHER


def test_or_the_likeliest_occurrence_speaks_for_all():
    assert merge([ONE, OTHER, TWO], "max") == [OTHER, TWO]


def test_marks_and_articles_are_no_common_answer():
    lone = [Answer(text, 0.2, 0, (0, 1)) for text in (".", "a", ",", "a")]
    assert [(answer.text, answer.probability) for answer in merge(lone, "marginal")] == [
        ("a", 0.4),
        (".", 0.2),
        (",", 0.2),
    ]


def test_the_answers_are_those_of_a_walk_over_all_spans(opened):
    """With every span kept, an answer's probability is Σ_z p(z|x) Σ p(span|z,x) over all of them: 1 in all."""
    run = opened.run.with_config(opened.run.config.copy_and_resolve_references())
    run.config.evaluation.spans = 10_000
    evaluator = Evaluator(run, [Question(QUESTION, ["1803"])])
    (found,) = evaluator.predict(opened.params, opened.index)
    assert sum(answer.probability for answer in found.nbest) == pytest.approx(1, abs=1e-5)
    assert len({normalise(answer.text) or answer.text for answer in found.nbest}) == len(found.nbest)
    likeliest = [answer.probability for answer in found.nbest]
    assert likeliest == sorted(likeliest, reverse=True)
    for answer in found.nbest:
        assert opened.run.sources.passages.text(answer.row)[slice(*answer.span)] == answer.text != ""
    read = [candidate.row for candidate in found.candidates]
    assert found.retrieved[: len(read)].tolist() == read
    assert sorted(found.scores.tolist(), reverse=True) == found.scores.tolist()
    texts = [run.sources.passages.text(row) for row in read]
    for asked in ("1803", "1815", "house"):
        assert evaluator.reader_oracle(Question(QUESTION, [asked]), found) == any(asked in text for text in texts)
        pattern = Question(QUESTION, [asked], fields={"match": "regex"})
        assert evaluator.reader_oracle(pattern, found) == any(asked in text for text in texts)


def test_asking_changes_nothing_in_the_run_and_embeds_nothing_anew(trained_run, monkeypatch, capsys):
    monkeypatch.setattr(Run, "embed", lambda *_: pytest.fail("the checkpoint holds the vectors"))
    files = {path: path.stat().st_mtime_ns for path in trained_run.workdir.rglob("*")}
    assert cli.main(["ask", f"--workdir={trained_run.workdir}", QUESTION]) == 0
    assert {path: path.stat().st_mtime_ns for path in trained_run.workdir.rglob("*")} == files


def newest(run, task):
    return Saved.newest(run.workdir / task / "checkpoints")


def test_the_saved_index_is_taken_only_if_the_parameters_give_it(trained_run, opened, monkeypatch):
    run = opened.run
    for task in ("ict", "qa"):
        params = restore_params(trained_run, task, newest(run, task))
        saved = np.asarray(saved_index(run, task, newest(run, task)).vectors)[: run.setting.rows]
        np.testing.assert_allclose(saved, trained_run.embed(params), atol=1e-5)
    for task, fits in (("ict", False), ("qa", True)):  # fine-tuning leaves the document embedder as it was
        saved = newest(run, task)
        with monkeypatch.context() as patch:
            patch.setattr(Saved, "record", saved.record | {"index_step": 1})  # training went on for a step after that
            assert (saved_index(run, task, saved) is not None) == fits


def test_a_run_before_fine_tuning_shows_passages_and_claims_no_answer(trained_run, tmp_path, capsys):
    shutil.copytree(trained_run.workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "qa")
    assert cli.main(["ask", f"--workdir={tmp_path}/run", "--json", QUESTION]) == 0
    out, err = capsys.readouterr()
    assert "no reader was trained (task ict): these are the passages that were found" in err
    answer = json.loads(out)
    assert (answer["answer"], answer["probability"], answer["passage"], answer["nbest"]) == (None, None, None, [])
    assert answer["candidates"] and all("text" in one and "span" not in one for one in answer["candidates"])
    assert cli.main(["ask", f"--workdir={tmp_path}/run", QUESTION]) == 0
    out = capsys.readouterr().out
    assert out.startswith("p(z|x)  found by") and "[[" not in out and "probability" not in out


def refused(capsys, *arguments: str) -> str:
    """The one line of a command that ends with exit code 2."""
    assert cli.main(["ask", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line = err.splitlines()[-1]
    assert line.startswith("realm: error: ")
    return line


def test_a_folder_without_a_run_or_without_a_checkpoint_is_named(trained_run, tmp_path, capsys):
    assert "no run there" in refused(capsys, f"--workdir={tmp_path}/none", QUESTION)
    (tmp_path / "fresh").mkdir()
    shutil.copy(trained_run.workdir / "config.json", tmp_path / "fresh")
    assert "no checkpoint yet; give the `realm train`" in refused(capsys, f"--workdir={tmp_path}/fresh", QUESTION)


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
    assert f"{other}: not the data of the run" in line


def test_a_checkpoint_that_the_run_removes_meanwhile_is_looked_for_again(opened, monkeypatch):
    params, asked = Saved.params, []

    def once_gone(saved, *where):
        asked.append(saved.step)
        if len(asked) == 1:
            raise Gone("removed")
        return params(saved, *where)

    monkeypatch.setattr(Saved, "params", once_gone)
    assert restore(opened.run).step == 2
    assert asked == [2, 2]


def test_a_damaged_checkpoint_is_named(trained_run, tmp_path, capsys):
    shutil.copytree(trained_run.workdir, tmp_path / "run")
    for path in (tmp_path / "run" / "qa" / "checkpoints" / "2").rglob("*"):
        if path.is_file() and path.name != "_CHECKPOINT_METADATA":
            path.write_bytes(path.read_bytes()[:20])
    assert cli.main(["ask", f"--workdir={tmp_path}/run", QUESTION]) == 2
    error = capsys.readouterr().err
    assert "qa/checkpoints/2 is damaged" in error and "see `realm checkpoints verify`" in error


def test_a_folder_with_another_config_is_no_run(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert cli.main(["ask", f"--workdir={tmp_path}", QUESTION]) == 2
    assert "config.json there is not the config of a run" in capsys.readouterr().err
