"""`realm index` in small: sixty made articles and an encoder of one layer, from documents to an adaptation."""

import json
import os
import shutil
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from articles import write_questions
from question_readers import save_question_reader
from tiny_run import write_lines

import realm_jax
from realm_jax import search_index
from realm_jax.adaptation import evaluate, plan
from realm_jax.adaptation import run as adaptation
from realm_jax.adaptation.record import AdaptRequest, Estimate
from realm_jax.assemble import make_run
from realm_jax.cli import main as cli
from realm_jax.cli.prepare import prepare
from realm_jax.corpora.preparation import replace_questions
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.host import PREEMPTED
from realm_jax.launch.status import run_status
from realm_jax.retrieval.bm25 import is_saved
from realm_jax.run import Run
from realm_jax.serving.service import Service
from realm_jax.storage import PosixFolder, open_folder, read_json
from realm_jax.train import recipe, workdir
from realm_jax.train.exported_model import exported_model
from realm_jax.train.init_from import init_from_sources
from realm_jax.train.trained_run import open_run_for_inference, recorded_metrics, restore

SIZES = {"data.query_length": 32, "data.document_length": 64, "model.dtype": "float32"}
TRAINING = {  # the recipe has a stage that trains passages, and one that trains a reader
    "tasks": "evidence_contrast,realm", "realm.marginal": "span", "ict.steps": 3, "ict.batch_size": 8,
    "evidence_contrast.steps": 3, "evidence_contrast.batch_size": 8, "evidence_contrast.learning_rate": 2e-5,
    "realm.steps": 3, "realm.batch_size": 4, "qa.beam": 8, "log.every": 1,
}  # fmt: skip
NEW = {"id": "new", "title": "Life 60", "text": "The bardlo of Ada Moss was beck."}


@pytest.fixture(scope="module", autouse=True)
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        for module in (recipe, workdir, plan, search_index):
            patch.setattr(module, "make_run", partial(make_run, devices=jax.devices()[:1]))
        yield


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch):
    """All steps of an adaptation fit."""
    monkeypatch.setattr(plan, "measure_searches", lambda *_: (Estimate(0.01, 1.0, 0.01, 1.0), 1000))
    monkeypatch.setattr(plan, "measure_steps", lambda run, *_: (1.0, dict.fromkeys(recipe.task_names(run.config), 0.1)))


def index(documents: Path, encoder: Path, output: Path, *arguments: str) -> int:
    sizes = [f"--config.{key}={value}" for key, value in SIZES.items()]
    return cli.main(["index", str(documents), f"--from={encoder}", f"--output={output}", *sizes, *arguments])


def adapt(*arguments: str) -> int:
    return cli.main(["adapt", *arguments, *(f"--config.{key}={value}" for key, value in TRAINING.items())])


@pytest.fixture(scope="module")
def indexed(documents, encoder, tmp_path_factory) -> Path:
    """A finished index, which tests read and leave as it is."""
    output = tmp_path_factory.mktemp("indexed") / "run"
    assert index(documents, encoder, output) == 0
    return output


@pytest.fixture(scope="module")
def questions(documents) -> Path:
    """Judged questions: the words of a passage."""
    return write_questions(documents)


@pytest.fixture
def embedded(monkeypatch) -> list[int]:
    """The numbers of passages of all calls that embed."""
    counts: list[int] = []
    embed = Run.embed

    def counted(self: Run, params: Any, progress: Any = None, rows: Any = None) -> Any:
        counts.append(len((rows or self.corpus).ids))
        return embed(self, params, progress, rows)

    monkeypatch.setattr(Run, "embed", counted)
    return counts


# --- what an index is -------------------------------------------------------------------------------------------------


def test_an_index_has_the_encoder_as_it_is_and_the_vectors_of_all_passages(indexed):
    run = open_run_for_inference(indexed)
    base = init_from_sources(run, run.initial_params())
    exported = exported_model(indexed)
    assert exported.has({name: base[name] for name in run.model.embedder_names})
    vectors = exported.vectors(run.sources.passages.fingerprint)
    np.testing.assert_array_equal(vectors, run.embed(base))
    assert (exported.task, exported.step, run.config.tasks) == ("index", 0, "")
    record = read_json(indexed / "index.json")
    assert (record["passages"], record["documents"], record["skipped"]) == (60, 60, {}) and record["seconds"] > 0
    assert len([*(indexed / "words").iterdir()]) == 1
    status = run_status(open_folder(indexed), [])
    assert (status["state"], status["tasks"]) == ("done", [])


def test_ask_shows_passages_of_both_searches_and_says_in_one_line_that_no_reader_was_trained(indexed, capsys):
    assert cli.main(["ask", f"--workdir={indexed}", "What was Ada Moss?"]) == 0
    out, err = capsys.readouterr()
    assert "found by" in out and "probability " not in out
    assert "no reader was trained: showing the retrieved passages" in err and len(err.strip().splitlines()) == 1
    assert cli.main(["ask", "--json", f"--workdir={indexed}", "What was Ada Moss?"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["answer"] is None and answer["measured"] is None and len(answer["candidates"]) == 5
    assert {stage for one in answer["candidates"] for stage in one["ranks"]} == {"vectors", "bm25", "tokens"}


def test_a_model_of_an_index_searches_encodes_and_measures_retrieval(indexed, documents, questions):
    model = realm_jax.Model(indexed)
    assert repr(model).endswith("task index at step 0, 60 passages)") and model.trained.pipeline.search == "hybrid"
    article = json.loads(documents.read_text().splitlines()[7])
    assert model.search(article["text"][:60])["candidates"][0]["id"] == article["id"]
    vector = model.encode([article["text"]], "document", titles=[article["title"]])[0]
    np.testing.assert_allclose(vector, model.trained.index.vectors[7], atol=1e-6)
    measured = model.evaluate(questions)
    assert measured["measures"]["recall@5"]["value"] > 0.9 and measured["bm25"]["recall@5"] > 0.9
    answered = [{"question": article["text"][:60], "answers": ["Ada"], "gold_passage_id": article["id"]}]
    assert "exact_match" not in model.evaluate(answered)["measures"], "no reader was trained"
    assert model.inspect("What was Ada Moss?")["task"] == model.inspect("Ada Moss was ___.")["task"] == "index"
    assert recorded_metrics(model.run, "index") is None
    with pytest.raises(UserError, match="--task=ict: .* has no such task; choose among index"):
        realm_jax.Model(indexed, task="ict")


def test_evaluate_and_predict_take_an_index(indexed, questions, tmp_path, capsys):
    assert cli.main(["evaluate", "--json", f"--workdir={indexed}", f"--questions={questions}"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["task"] == "index" and report["passages_read"] == 1 and "recall@5" in report["measures"]
    assert "span head" not in err
    predictions = tmp_path / "predictions.jsonl"
    flags = [f"--workdir={indexed}", f"--questions={questions}", f"--output={predictions}"]
    assert cli.main(["predict", *flags]) == 0
    assert "no reader was trained: answers come from a span head" in capsys.readouterr().err
    assert len(predictions.read_text().splitlines()) == 12


def test_an_index_answers_with_a_reader_that_was_trained_on_questions(indexed, documents, tmp_path, capsys):
    reader = f"--reader={save_question_reader(tmp_path / 'reader', positions=128)}"
    assert cli.main(["ask", "--json", f"--workdir={indexed}", reader, "What was Ada Moss?"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["answer"] and 0 < answer["no_answer"] < 1 and "no reader" not in err
    asked = [{"question": "What was Ada Moss?", "answers": ["Ada"]}]
    questions = write_lines(tmp_path / "asked.jsonl", asked)
    assert cli.main(["evaluate", "--json", f"--workdir={indexed}", f"--questions={questions}", reader]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passages_read"] == 5 and {"exact_match", "reader_oracle"} <= report["measures"].keys()


def test_networks_of_an_index_are_exported_with_a_card_that_says_so(indexed, tmp_path):
    assert cli.main(["weights", "export", f"--workdir={indexed}", f"--output={tmp_path / 'weights'}"]) == 0
    assert "# The encoder of an index" in (tmp_path / "weights" / "README.md").read_text()


def test_an_index_starts_a_run_as_a_source(indexed, tmp_path):
    config = realm_jax.load_config("adapt", SIZES | TRAINING | {"tasks": "ict", "init_from": str(indexed)})
    config.data.path, config.data.text = str(indexed / "data"), "passages"
    run = recipe.open_run(config, tmp_path / "run")
    params, base = recipe.starting_params(run), restore(open_run_for_inference(indexed), warn=False).params
    jax.tree.map(np.testing.assert_array_equal, params["query_embedder"], base["query_embedder"])


# --- resume and errors ------------------------------------------------------------------------------------------------


def test_the_same_command_on_a_finished_index_does_nothing(copied_index, documents, encoder, monkeypatch, capsys):
    before = {path: path.stat().st_mtime_ns for path in copied_index.rglob("*") if path.is_file()}
    for name in ("prepare_documents", "make_run", "write_index"):
        monkeypatch.setattr(search_index, name, None)
    assert index(documents, encoder, copied_index) == 0
    out = capsys.readouterr().out
    assert "has the index of the same documents (60 passages of 60 documents); nothing to do" in out
    assert f"adapt:  realm adapt {copied_index}" in out
    assert before == {path: path.stat().st_mtime_ns for path in copied_index.rglob("*") if path.is_file()}


def test_a_run_is_continued_from_another_directory(documents, encoder, tmp_path, monkeypatch, capsys):
    """Relative paths of the first command are of its directory, and a link leads to the same documents."""
    monkeypatch.chdir(documents.parent)
    assert index(Path(documents.name), Path(encoder.name), tmp_path / "run") == 0
    monkeypatch.chdir(tmp_path)
    settings = AdaptRequest.of("run", None, None, config=realm_jax.load_config("adapt")).settings()
    assert (settings["documents"], settings["from"]) == (str(documents), str(encoder))
    (tmp_path / "linked").symlink_to(documents.parent)
    assert index(Path("linked") / documents.name, Path("linked") / encoder.name, Path("run")) == 0
    assert "nothing to do" in capsys.readouterr().out
    (tmp_path / documents.name).write_text(documents.read_text())
    assert "was started with documents" in fails(capsys, Path(documents.name), encoder, Path("run"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("docs/", "/here/docs"), ("news:a/*.gz", "news:/here/a/*.gz")]
    + [(name, name) for name in ("hf:NAME", "news:hf:NAME", "gs://bucket/docs", "/docs")],
)
def test_only_paths_of_documents_are_made_absolute(monkeypatch, name, expected):
    monkeypatch.setattr(os, "getcwd", lambda: "/here")
    assert search_index.absolute_source(name) == expected


def breaks_off(work: Any) -> Any:
    """A function that ends badly when it is done."""

    def cut(*arguments: Any, **options: Any) -> Any:
        work(*arguments, **options)
        raise KeyError("power failure")

    return cut


def test_a_cut_after_every_stage_changes_no_bit_and_repeats_nothing(indexed, documents, encoder, tmp_path, monkeypatch):
    monkeypatch.setenv("REALM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("REALM_CACHE_BYTES", "1000000")
    output = tmp_path / "run"
    for name in ("prepare_documents", "check_workdir", "save_bm25_index", "embed_with_cache", "write_exported_model"):
        with monkeypatch.context() as patch, pytest.raises(KeyError, match="power failure"):
            patch.setattr(search_index, name, breaks_off(getattr(search_index, name)))
            index(documents, encoder, output)
        assert not (output / "index.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Run, "embed", None)
        patch.setattr(search_index, "write_exported_model", None)
        assert index(documents, encoder, output) == 0
    assert (output / "model" / "vectors.npy").read_bytes() == (indexed / "model" / "vectors.npy").read_bytes()
    assert exported_model(output).identity == exported_model(indexed).identity


def test_an_index_that_is_stopped_while_it_embeds_resumes_with_the_vectors_that_it_has(
    documents, encoder, tmp_path, monkeypatch, embedded, capsys
):
    monkeypatch.setenv("REALM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("REALM_CACHE_BYTES", "1000000")
    monkeypatch.setattr("realm_jax.indexing.vector_cache.PIECE", 25)
    with monkeypatch.context() as patch:
        embed = Run.embed

        def stopped(self: Run, *arguments: Any) -> Any:
            if len(embedded) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return embed(self, *arguments)

        patch.setattr(Run, "embed", stopped)
        assert index(documents, encoder, tmp_path / "run") == PREEMPTED
    assert "SIGTERM: finished stages and most vectors are saved; run the command again" in capsys.readouterr().err
    assert index(documents, encoder, tmp_path / "run") == 0
    assert embedded == [25, 25, 10]


def test_documents_may_be_added_until_the_index_is_finished(documents, encoder, tmp_path, monkeypatch, capsys):
    own = tmp_path / "articles.jsonl"
    own.write_text("\n".join(documents.read_text().splitlines()[:3]))
    with monkeypatch.context() as patch, pytest.raises(KeyError, match="power failure"):
        patch.setattr(search_index, "check_workdir", breaks_off(search_index.check_workdir))
        index(own, encoder, tmp_path / "run")
    own.write_text("\n".join(documents.read_text().splitlines()[:4]))
    assert index(own, encoder, tmp_path / "run") == 0
    assert realm_jax.Model(tmp_path / "run").passages == 4
    own.write_text("\n".join(documents.read_text().splitlines()[:5]))
    told = fails(capsys, own, encoder, tmp_path / "run")
    assert f"{own}: has changed since it was indexed; add, replace or remove documents with `realm corpus`" in told


def test_a_finished_index_without_its_model_is_rebuilt_with_edits_and_questions(
    copied_index, documents, encoder, questions, tmp_path
):
    assert (
        cli.main(["corpus", "add", str(write_lines(tmp_path / "new.jsonl", [NEW])), f"--workdir={copied_index}"]) == 0
    )
    replace_questions(copied_index / "data", [f"test={questions}"])
    shutil.rmtree(copied_index / "model")
    assert index(documents, encoder, copied_index) == 0
    run = open_run_for_inference(copied_index)
    assert exported_model(copied_index).vectors(run.sources.passages.fingerprint).shape == (61, 16)
    assert len(run.sources.questions["test"]) == 12


def test_a_prepared_folder_that_no_index_made_is_kept(documents, encoder, tmp_path, capsys):
    own = tmp_path / "articles.jsonl"
    own.write_text("\n".join(documents.read_text().splitlines()[:3]))
    prepare(own, tmp_path / "run" / "data", vocab=encoder, limit=64, workers=1)
    before = (tmp_path / "run" / "data" / "PREPARED.json").read_bytes()
    fails(capsys, documents, encoder, tmp_path / "run")
    assert (tmp_path / "run" / "data" / "PREPARED.json").read_bytes() == before


def test_a_corpus_that_grows_from_one_passage_is_read_as_any_other(documents, encoder, tmp_path):
    lines = documents.read_text().splitlines()
    for name, part in (("first", lines[:1]), ("more", lines[1:9])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part))
    run = tmp_path / "run"
    assert index(tmp_path / "first.jsonl", encoder, run) == 0
    question = json.loads(lines[0])["text"].split(".")[0]
    assert len(realm_jax.Model(run).ask(question)["candidates"]) == 1
    assert cli.main(["corpus", "add", str(tmp_path / "more.jsonl"), f"--workdir={run}"]) == 0
    assert len(realm_jax.Model(run).ask(question)["candidates"]) == 5


def fails(capsys: Any, *arguments: Any) -> str:
    """The one line of an index that is refused."""
    assert index(*arguments) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_request_that_cannot_be_met_is_one_line_and_writes_nothing(indexed, documents, encoder, tmp_path, capsys):
    other, own, empty, new = (tmp_path / name for name in ("other", "documents", "empty", "new"))
    own.mkdir()
    shutil.copy(documents, own)
    empty.mkdir()
    other.mkdir()
    trained = read_json(indexed / "config.json") | {"tasks": "ict"}
    (other / "config.json").write_text(json.dumps(trained))
    for source, model, output, option, message in [
        (tmp_path / "nowhere", encoder, new, "", "nowhere"),
        (empty, encoder, new, "", "empty"),
        (documents, tmp_path / "nowhere", new, "", "no such folder; write hf:NAME"),
        (documents, encoder, other, "", f"--output={other}: is the directory of another run; choose another one"),
        (own, encoder, own / "run", "", "the folder of the documents; name a folder outside"),
        (documents, encoder, encoder / "run", "", "the folder of the encoder; name a folder outside"),
        (documents, encoder, new, "--config.tasks=ict", "config.tasks: an index trains nothing; leave it out"),
        (documents, encoder, new, "--config.encoder.pooling=cls", "config.encoder.pooling: the vectors come from"),
        (own, encoder, indexed, "", f"--output={indexed}: was started with documents"),
        (documents, encoder, indexed, "--config.qa.passages=3", "was started with config"),
    ]:
        assert message in fails(capsys, source, model, output, *filter(None, [option]))
    assert (
        not (own / "run").exists() and not (encoder / "run").exists() and [*other.iterdir()] == [other / "config.json"]
    )
    assert not (new / "index.json").exists() and not (new / "data").exists()


def test_unreadable_documents_are_skipped_and_counted(documents, encoder, tmp_path, capsys):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(documents.read_text() + '{"id": "cut", "te\n')
    assert index(broken, encoder, tmp_path / "run") == 0
    assert "indexed 60 passages of 60 documents, 1 skipped, after" in capsys.readouterr().out
    assert read_json(tmp_path / "run" / "index.json")["skipped"] == {"not JSON": 1}


def test_the_language_of_documents_is_detected_or_named(indexed, documents, encoder, tmp_path, capsys):
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(documents.read_text().splitlines()[:8]))
    assert index(few, encoder, tmp_path / "run", "--language=de") == 0
    assert open_run_for_inference(tmp_path / "run").bm25_language == "de"
    assert open_run_for_inference(indexed).bm25_language == "en"
    assert "was started with language 'de', not ''" in fails(capsys, few, encoder, tmp_path / "run")
    assert "--language=xx: is not one of" in fails(capsys, few, encoder, tmp_path / "new", "--language=xx")


# --- edits ------------------------------------------------------------------------------------------------------------


def test_an_added_document_is_found_and_nothing_else_is_embedded(copied_index, tmp_path, embedded, capsys):
    before = exported_model(copied_index)
    first = before.vectors(before.manifest["corpus"]).copy()
    assert (
        cli.main(["corpus", "add", str(write_lines(tmp_path / "new.jsonl", [NEW])), f"--workdir={copied_index}"]) == 0
    )
    assert "embedded 1 of 61 passages" in capsys.readouterr().out and embedded == [1]
    model = realm_jax.Model(copied_index)
    assert model.search(f"{NEW['title']} {NEW['text']}")["candidates"][0]["id"] == "new" and embedded == [1]
    np.testing.assert_array_equal(np.asarray(model.trained.index.vectors)[:60], first)
    assert exported_model(copied_index).identity != before.identity and not (copied_index / "index").exists()
    assert cli.main(["corpus", "remove", "new", "a3", f"--workdir={copied_index}"]) == 0
    assert embedded == [1] and realm_jax.Model(copied_index).passages == 59


@pytest.mark.slow
def test_a_service_answers_from_an_index_and_loads_an_edit_by_itself(copied_index, tmp_path):
    # Token vectors of a random network would put any passage first.
    stop, service = threading.Event(), Service(copied_index, {"config": {"answering.rerank": "none"}}, 1)
    facts = service.facts()
    assert (facts["task"], facts["search"], facts["answers"], facts["reader"]) == ("index", "hybrid", True, None)
    (reply,) = service.work("ask", ["What was Ada Moss?"])
    assert reply["answer"] is None and len(reply["candidates"]) == 5
    assert not service.renew(stop)
    assert (
        cli.main(["corpus", "add", str(write_lines(tmp_path / "new.jsonl", [NEW])), f"--workdir={copied_index}"]) == 0
    )
    assert service.renew(stop) and service.model.passages == 61
    (reply,) = service.work("search", [NEW["text"]])
    assert reply["candidates"][0]["id"] == "new" and reply["candidates"][0]["ranks"]["bm25"] == 1


def test_a_failed_edit_leaves_the_index_as_it_was(copied_index, tmp_path, monkeypatch, capsys):
    identity = exported_model(copied_index).identity
    new = write_lines(tmp_path / "new.jsonl", [NEW])
    with monkeypatch.context() as patch, pytest.raises(KeyError, match="power failure"):
        patch.setattr(search_index, "save_bm25_index", breaks_off(search_index.save_bm25_index))
        cli.main(["corpus", "add", str(new), f"--workdir={copied_index}"])
    assert exported_model(copied_index).identity == identity and realm_jax.Model(copied_index).passages == 60
    assert cli.main(["corpus", "add", str(new), f"--workdir={copied_index}"]) == 0
    assert realm_jax.Model(copied_index).passages == 61


def breaks(*_: Any) -> None:
    raise KeyError("power failure")


@pytest.mark.parametrize(
    ("place", "passages", "repeated"),
    [
        ("realm_jax.retrieval.bm25.publish_folder", 60, 0),
        ("realm_jax.train.exported_model.arrays_digest", 60, 0),  # the vectors are written
        ("pathlib.Path.replace", 60, 0),  # of STORE.json, the last file that is moved
        ("realm_jax.train.exported_model.flush_folder", 61, 2),  # the corpus is new, and the model is as before
        ("realm_jax.train.exported_model.publish_folder", 61, 2),  # the earlier model has another name already
    ],
)
@pytest.mark.parametrize("command", ["corpus", pytest.param("index", marks=pytest.mark.slow)])
def test_an_edit_that_is_cut_off_is_completed_by_the_next_command(
    copied_index, documents, encoder, tmp_path, monkeypatch, embedded, capsys, command, place, passages, repeated
):
    """The index answers meanwhile, and no passage is embedded again."""
    new = write_lines(tmp_path / "new.jsonl", [NEW])
    with monkeypatch.context() as patch, pytest.raises(KeyError, match="power failure"):
        patch.setattr(place, breaks)
        cli.main(["corpus", "add", str(new), f"--workdir={copied_index}"])
    run = open_run_for_inference(copied_index)
    assert len(run.sources.passages) == passages and exported_model(copied_index).task == "index"
    embedded.clear()
    if command == "corpus":
        assert cli.main(["corpus", "add", str(new), f"--workdir={copied_index}"]) == repeated
        passages = 61
        assert ("'new' is in the corpus already" in capsys.readouterr().err) == bool(repeated)
    assert index(documents, encoder, copied_index) == 0
    assert f"{passages} passages of {passages} documents" in capsys.readouterr().out
    run = open_run_for_inference(copied_index)
    vectors = exported_model(copied_index).vectors(run.sources.passages.fingerprint)
    assert len(vectors) == passages and embedded == [1] * (passages > 60)
    assert is_saved(run.sources.passages, run.bm25_language, copied_index)


def test_an_index_takes_edits_of_its_folder_when_it_is_made_again(
    copied_index, documents, encoder, tmp_path, embedded, capsys
):
    new = write_lines(tmp_path / "new.jsonl", [NEW])
    assert cli.main(["corpus", "add", str(new), f"--data={copied_index / 'data'}"]) == 0
    assert index(documents, encoder, copied_index) == 0
    out = capsys.readouterr().out
    assert "indexed 61 passages of 61 documents" in out and embedded == [1]
    assert cli.main(["corpus", "remove", "a7", f"--workdir={copied_index}"]) == 0
    assert index(documents, encoder, copied_index) == 0
    assert "(60 passages of 60 documents); nothing to do" in capsys.readouterr().out and embedded == [1]
    article = json.loads(documents.read_text().splitlines()[8])
    assert realm_jax.Model(copied_index).search(article["text"][:60])["candidates"][0]["id"] == "a8"


# --- adaptation -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_index_is_adapted_with_its_data_vectors_and_words(
    copied_index, questions, tmp_path, monkeypatch, embedded, capsys
):
    """Its corpus was edited since; and the run answers with the index until the adapted model replaces it."""
    monkeypatch.setattr(evaluate, "passes_promotion_test", lambda *_: True)
    monkeypatch.setattr(search_index, "prepare_documents", None)
    monkeypatch.setenv("REALM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("REALM_CACHE_BYTES", "1000000")
    assert (
        cli.main(["corpus", "add", str(write_lines(tmp_path / "new.jsonl", [NEW])), f"--workdir={copied_index}"]) == 0
    )
    words, base = (
        [*(copied_index / "words").iterdir()],
        restore(open_run_for_inference(copied_index), warn=False).params,
    )
    with monkeypatch.context() as patch:
        patch.setattr(adaptation, "measure", breaks_off(lambda *_: None))
        with pytest.raises(KeyError, match="power failure"):
            adapt(str(copied_index), f"--questions={questions}", "--merge=0.5")
    assert realm_jax.Model(copied_index).task == "index"
    capsys.readouterr()
    embedded.clear()
    assert adapt(str(copied_index), f"--questions={questions}", "--merge=0.5") == 0
    out = capsys.readouterr().out
    assert "Adapted: 0.5 × base + 0.5 × trained" in out
    assert "added:  adapted encoders, and the vectors of all passages by them; a reader that learned from hidden" in out
    assert embedded.count(61) == 1, "by the adapted encoder; the vectors of the base encoder are those of the index"
    assert [*(copied_index / "words").iterdir()] == words
    record, model = read_json(copied_index / "adapt.json"), realm_jax.Model(copied_index)
    assert record["settings"]["from"].endswith("encoder") and record["plan"]["passages"] == model.passages == 61
    assert record["measured"]["table"]["start"]["judged questions: recall@5"]["queries"] == 12
    assert model.task == "realm" and model.ask("What was Ada Moss?")["answer"]
    config = read_json(copied_index / "config.json")
    assert config["tasks"] == "evidence_contrast,realm" and config["data"]["document_length"] == 64
    query = model.trained.params["query_embedder"]
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), query, base["query_embedder"])))
    assert adapt(str(copied_index), f"--questions={questions}", "--merge=0.5") == 0, "nothing is done again"


def test_what_is_no_index_is_not_adapted(indexed, documents, encoder, tmp_path, capsys):
    for arguments, message in [
        ([str(documents)], "is not the directory of a finished `realm index`; name one, or add --from and --output"),
        ([str(indexed), f"--from={encoder}"], "leave it out"),
        ([str(documents), f"--output={tmp_path / 'run'}"], "--from: is missing; name the encoder to adapt"),
        ([str(indexed), "--config.data.document_length=32"], "config.data.document_length is 32, but the index in"),
    ]:
        assert adapt(*arguments) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    shutil.copytree(indexed, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "index.json").unlink()
    assert adapt(str(documents), f"--from={encoder}", f"--output={tmp_path / 'unfinished'}") == 2
    assert "its index is not finished; run the same `realm index` command again" in capsys.readouterr().err


def test_another_encoder_under_the_name_of_that_of_the_index_is_refused(
    copied_index, documents, tmp_path, encoder, capsys
):
    start = tmp_path / "encoder"
    shutil.copytree(encoder, start)
    assert index(documents, start, tmp_path / "own") == 0
    content = (start / "model.safetensors").read_bytes()
    (start / "model.safetensors").write_bytes(content[:-4] + np.float32(0.5).tobytes())
    assert adapt(str(tmp_path / "own")) == 2
    assert f"has other weights than when {tmp_path / 'own'} was indexed; restore them" in capsys.readouterr().err


@pytest.mark.slow
def test_documents_are_indexed_and_adapted_in_python(documents, encoder, tmp_path, questions):
    model = realm_jax.index(documents, tmp_path / "run", model=encoder, config=SIZES)
    assert model.task == "index" and model.passages == 60
    arguments = f"{str(documents)!r}, {str(tmp_path / 'run')!r}, model={str(encoder)!r}, config={SIZES!r}"
    assert read_json(tmp_path / "run" / "index.json")["command"] == f"realm_jax.index({arguments})"
    adapted = realm_jax.adapt(tmp_path / "run", minutes=10, questions=questions, config=TRAINING)
    assert adapted.task == "realm" and adapted.workdir == tmp_path / "run"
    assert read_json(tmp_path / "run" / "adapt.json")["settings"]["minutes"] == 10
    with pytest.raises(UserError, match="is not the directory of a finished `realm index`"):
        realm_jax.adapt(documents)
    with pytest.raises(UserError, match="is the directory of another run|was started with documents"):
        realm_jax.index(questions, tmp_path / "run", model=encoder, config=SIZES)


def test_questions_of_a_prepared_folder_are_replaced(copied_index, questions):
    passages = open_sources(copied_index / "data").passages.fingerprint
    replace_questions(copied_index / "data", [f"test={questions}"])
    sources = open_sources(copied_index / "data")
    assert len(sources.questions["test"]) == 12 and sources.passages.fingerprint == passages
    replace_questions(copied_index / "data", [])
    assert open_sources(copied_index / "data").questions == {}


def test_questions_whose_replacement_is_cut_off_are_replaced_by_the_next_command(
    copied_index, questions, tmp_path, monkeypatch
):
    replace_questions(copied_index / "data", [f"test={questions}"])
    few = write_lines(tmp_path / "few.jsonl", [json.loads(line) for line in questions.read_text().splitlines()[:5]])
    write = PosixFolder.write

    def cut(folder: PosixFolder, name: str, data: bytes) -> None:
        write(folder, name, data)
        if name.startswith("questions/"):
            raise KeyError("power failure")

    with monkeypatch.context() as patch, pytest.raises(KeyError, match="power failure"):
        patch.setattr(PosixFolder, "write", cut)
        replace_questions(copied_index / "data", [f"test={few}"])
    assert open_sources(copied_index / "data").questions == {}
    replace_questions(copied_index / "data", [f"test={few}"])
    assert len(open_sources(copied_index / "data").questions["test"]) == 5
