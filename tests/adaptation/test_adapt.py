"""`realm adapt` in small: sixty made articles and an encoder of one layer, from documents to a folder of weights."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from articles import WORDS, write_questions
from ml_collections import ConfigDict
from pretrained_encoders import TEXTS, sentence_encoder
from runs import largest_change
from tiny_run import write_lines

from realm_jax.adaptation import evaluate, plan
from realm_jax.adaptation import run as adaptation
from realm_jax.adaptation.evaluate import AdaptEvaluator, choose_weight, passes_promotion_test
from realm_jax.adaptation.record import AdaptRecord, AdaptRequest, Change, Decision, Estimate, Measurement, Plan
from realm_jax.adaptation.report import headline
from realm_jax.assemble import make_run
from realm_jax.cli import main as cli
from realm_jax.cli.prepare import prepare
from realm_jax.config import load_config, with_values
from realm_jax.data.evidence import find_evidence
from realm_jax.data.examples import cloze_pieces, query_arrays
from realm_jax.data.questions import Question
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.eval import prediction
from realm_jax.forward import SearchPipeline
from realm_jax.indexing.heartbeat import StatusWriter
from realm_jax.inference.model import Model
from realm_jax.launch.status import Heartbeats, run_status
from realm_jax.models.folders import TOWERS
from realm_jax.models.layers import Params
from realm_jax.retrieval.vector_files import write_vectors
from realm_jax.run import Run
from realm_jax.storage import open_folder, read_json
from realm_jax.train import recipe, workdir
from realm_jax.train.exported_model import exported_model
from realm_jax.train.init_from import init_from_sources
from realm_jax.train.restore import restore_params
from realm_jax.train.trained_run import open_run_for_inference, restore

# The default recipe has no stage that trains passages or a reader, so most tests take one that has both.
SIZES = """
tasks=evidence_contrast,realm realm.marginal=span data.query_length=32 data.document_length=64 model.dtype=float32
ict.steps=3 ict.batch_size=8 evidence_contrast.steps=3 evidence_contrast.batch_size=8
evidence_contrast.learning_rate=2e-5 realm.steps=3 realm.batch_size=4 qa.beam=8 log.every=1
""".split()


@pytest.fixture(scope="module", autouse=True)
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        for module in (recipe, workdir, plan):
            patch.setattr(module, "make_run", partial(make_run, devices=jax.devices()[:1]))
        yield


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch):
    """All steps fit: how fast this machine is is measured in `done` only, before this fixture."""
    monkeypatch.setattr(plan, "measure_searches", lambda *_: (Estimate(0.01, 1.0, 0.01, 1.0), 1000))
    monkeypatch.setattr(plan, "measure_steps", lambda run, *_: (1.0, dict.fromkeys(recipe.task_names(run.config), 0.1)))


def adapt(documents: Path, encoder: Path, output: Path, *arguments: str) -> int:
    overrides = [f"--config.{size}" for size in SIZES]
    return cli.main(["adapt", str(documents), f"--from={encoder}", f"--output={output}", *overrides, *arguments])


@pytest.fixture(scope="module")
def questions(documents) -> Path:
    """Judged questions: the words of a passage."""
    return write_questions(documents)


@pytest.fixture(scope="module")
def done(documents, encoder, questions, tmp_path_factory) -> Path:
    """A finished adaptation, promoted whatever it is worth."""
    output = tmp_path_factory.mktemp("adapted") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "passes_promotion_test", lambda *_: True)
        assert adapt(documents, encoder, output, f"--questions={questions}", "--merge=0.5") == 0
    return output


def files(folder: Path) -> dict[str, bytes]:
    """Name → content of all files of a model but its card, which names its folder."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != "README.md"}


def towers(run: Path) -> Params:
    """What the run answers with."""
    params = restore(open_run_for_inference(run), warn=False, for_answers=False).params
    return {name: params[name] for name in TOWERS}


def test_from_documents_to_a_model_and_a_report(done, capsys, monkeypatch):
    record = read_json(done / "adapt.json")
    assert record["plan"]["steps"] == {"evidence_contrast": 3, "realm": 3}
    estimate = record["plan"]["estimate"]
    assert estimate["embed"] > 0 and all(seconds > 0 for seconds in estimate["step"].values())
    for name, entry in (("plan", Plan), ("measured", Measurement)):
        assert entry.from_json(record[name]).to_json() == record[name]
    start = record["measured"]["table"]["start"]
    assert start["mean_ndcg@10"]["queries"] >= 8 and start["evidence_ndcg@10"]["queries"] > 0
    assert start["judged questions: recall@5"]["queries"] == 12
    page, card = (done / "report.html").read_text(), (done / "model" / "README.md").read_text()
    assert "Adapted: 0.5 × base + 0.5 × trained" in page and "Adapted: 0.5 ×" in card
    assert "http:" not in page and "https:" not in page and record["plan"]["fingerprint"] in card
    assert np.load(done / "vectors.npy").shape == (60, 16)
    folder = open_folder(done)
    watched = run_status(folder, Heartbeats(folder).poll(0.0))
    assert [watched[key] for key in ("state", "stage", "adapted", "seconds_left")] == ["done", "ended", True, None]
    assert all(task["state"] == "done" and task["step"] == task["steps"] for task in watched["tasks"])


def test_an_adapted_model_answers_and_explains_its_answers(done, capsys, monkeypatch):
    """It reads questions with a blank and takes answers from a passage."""
    asked = "What was Ada Moss?"
    assert cli.main(["ask", f"--workdir={done}", asked]) == 0
    out, err = capsys.readouterr()
    assert "found by" in out and "never saw a question" in err
    monkeypatch.setattr(prediction, "SPANS", 10_000)  # all, as what explains an answer adds up
    model = Model(done)
    answer, seen = model.ask(asked), model.inspect(asked)
    assert seen["answer"] == answer["answer"]  # both read it with a blank
    assert seen["probability"] == pytest.approx(answer["probability"], rel=1e-3)
    trained = restore(open_run_for_inference(done))
    tokenizer, evaluator = trained.run.sources.tokenizer, trained.evaluator([Question(asked, [])])
    (batch,) = evaluator._batches
    pieces = batch["reader_query"][0, 1 : int(batch["reader_query_length"][0]) - 1]
    assert pieces.tolist() == cloze_pieces(asked, tokenizer).tolist()
    assert tokenizer.mask_id not in batch["query"][0].tolist()
    (found,) = evaluator.predict(trained.params, trained.index)
    assert found.answer and found.answer in trained.run.sources.passages.text(found.nbest[0].row)


def test_what_answers_is_half_of_the_start_and_half_of_what_was_trained(done):
    """And the vectors are those of the promoted document tower."""
    run, found = open_run_for_inference(done), towers(done)
    start = init_from_sources(run, run.initial_params())
    trained = restore_params(run, *evaluate.last_checkpoint(run))
    parts = (jax.tree.leaves({name: params[name] for name in TOWERS}) for params in (start, trained, found))
    for before, last, after in zip(*parts, strict=True):
        np.testing.assert_allclose(after, (before + last) / 2, atol=1e-6)
    assert all(largest_change(start[name], found[name]) > 0 for name in TOWERS)
    vectors = exported_model(done).vectors(run.sources.passages.fingerprint)
    np.testing.assert_array_equal(vectors, np.load(done / "vectors.npy"))
    np.testing.assert_allclose(vectors, run.embed(found), atol=1e-6)
    assert np.abs(vectors - run.embed(start)).max() > 1e-5


def test_the_recipe_trains_only_the_query_encoder(documents, encoder, tmp_path, monkeypatch, capsys):
    """Passages keep their vectors, and there is no reader, so the run shows passages."""
    run = tmp_path / "run"
    monkeypatch.setattr(evaluate, "passes_promotion_test", lambda *_: True)
    assert adapt(documents, encoder, run, "--config.tasks=realm", "--config.realm.marginal=holds") == 0
    assert load_config("adapt").tasks == "realm" and load_config("adapt").realm.marginal == "holds"
    assert read_json(run / "adapt.json")["plan"]["steps"] == {"realm": 3}
    opened, found = open_run_for_inference(run), towers(run)
    start = init_from_sources(opened, opened.initial_params())
    jax.tree.map(np.testing.assert_array_equal, start["document_embedder"], found["document_embedder"])
    assert largest_change(start["query_embedder"], found["query_embedder"]) > 0
    np.testing.assert_allclose(np.load(run / "vectors.npy"), opened.embed(start), atol=1e-6)
    capsys.readouterr()
    assert cli.main(["ask", f"--workdir={run}", "What was Ada Moss?"]) == 0
    assert "found by" in capsys.readouterr().out


def breaks_off(work: Any, calls: int = 1) -> Any:
    """A function that ends badly when it is done, at a call of several."""
    numbers = iter(range(1, calls + 1))

    def cut(*arguments: Any, **options: Any) -> Any:
        result = work(*arguments, **options)
        if next(numbers) == calls:
            raise KeyError("power failure")
        return result

    return cut


@pytest.mark.slow
def test_a_cut_after_every_stage_changes_no_bit(done, documents, encoder, questions, monkeypatch):
    """A second run in the place of the first breaks off again and again; it then has the same files."""
    wanted, vectors = files(done / "model"), (done / "vectors.npy").read_bytes()
    kept = done.rename(done.with_name("kept"))
    monkeypatch.setattr(evaluate, "passes_promotion_test", lambda *_: True)
    arguments = documents, encoder, done, f"--questions={questions}", "--merge=0.5"
    try:
        cuts = ["make_plan", "train_task", "train_task", "measure", "write_exported_model", "write_vectors"]
        for number, name in enumerate(cuts):
            with monkeypatch.context() as patch, pytest.raises(KeyError, match="power failure"):
                patch.setattr(adaptation, name, breaks_off(getattr(adaptation, name), cuts[: number + 1].count(name)))
                adapt(*arguments)
            assert not (done / "report.html").exists()
        assert adapt(*arguments) == 0
        assert files(done / "model") == wanted and (done / "vectors.npy").read_bytes() == vectors
        for name in ("make_plan", "train_task", "measure", "write_exported_model"):
            monkeypatch.setattr(adaptation, name, None)
        assert adapt(*arguments) == 0, "nothing is done again"
    finally:
        shutil.rmtree(done)
        kept.rename(done)


def test_the_start_is_kept_where_adaptation_is_worse(documents, encoder, questions, tmp_path, monkeypatch, capsys):
    """Judged as if what was trained found nothing. The start may be read and not written; what cannot be read of
    documents and questions is left out and counted."""
    start, run = tmp_path / "encoder", tmp_path / "run"
    shutil.copytree(encoder, start)
    for path in (*start.rglob("*"), start):
        path.chmod(0o555 if path.is_dir() else 0o444)
    broken, asked = tmp_path / "broken.jsonl", tmp_path / "questions.jsonl"
    broken.write_text(documents.read_text() + '{"id": "cut", "te\n')
    lost = {"question": "Who?", "answers": [], "gold_passage_id": "nowhere"}
    asked.write_text(questions.read_text() + json.dumps(lost) + "\n")
    compare = evaluate.compare
    monkeypatch.setattr(evaluate, "compare", lambda before, after, *clusters: compare(before, after * 0, *clusters))
    assert adapt(broken, start, run, f"--questions={asked}") == 0
    out, page, record = capsys.readouterr().out, (run / "report.html").read_text(), read_json(run / "adapt.json")
    assert out.splitlines()[-4].startswith("Base encoder kept: ") and "Base encoder kept: " in page
    assert "\n# An encoder that is not adapted to" in (run / "model" / "README.md").read_text()
    opened = open_run_for_inference(run)
    first, found = init_from_sources(opened, opened.initial_params()), towers(run)
    jax.tree.map(np.testing.assert_array_equal, {name: first[name] for name in found}, found)
    assert record["plan"]["read"] == 61 and record["measured"]["judged"]["queries"] == 12
    assert record["plan"]["left_out"] == {"not JSON": 1, "questions whose gold passage is not there": 1}
    assert "skipped: " in page and "whose gold passage is not there" in out


def test_only_a_significant_gain_without_a_significant_loss_is_promoted():
    better, unsure, worse = (
        Change(9, low=low, high=high) for low, high in ((0.01, 0.03), (-0.01, 0.03), (-0.03, -0.01))
    )
    assert passes_promotion_test(better, Change()) and passes_promotion_test(better, unsure)
    assert not passes_promotion_test(unsure, Change()) and not passes_promotion_test(Change(9), Change())
    assert not passes_promotion_test(better, worse) and not passes_promotion_test(better, unsure, worse)
    assert "not significantly better" in headline(Decision(False, 1.0, unsure, unsure))
    lost = headline(Decision(False, 1.0, better, worse))
    assert "Base encoder kept: the adapted encoder is better at held-out sentences, but significantly worse" in lost


@pytest.mark.parametrize(
    ("gains", "losses", "weight"),
    [
        ((0.1, 0.1), (0.0, 0.0), 1.0),
        ((0.1, 0.1), (-0.1, 0.0), 0.5),
        ((0.1, 0.1), (-0.1, -0.1), 0.5),
        ((-0.1, 0.1), (0.0, 0.0), 1.0),  # a second look is no second chance to gain
        ((-0.1, 0.1), (-0.1, 0.0), 1.0),
    ],
)
def test_half_of_what_was_trained_is_tried_where_all_of_it_gains_and_loses(gains, losses, weight):
    """gains: lower ends of the interval at the weights 1 and ½; losses: upper ends of passages without sentences.
    Judged questions veto, and choose nothing."""
    for promoted in (True, False):
        values = zip(evaluate.WEIGHTS, gains, losses, strict=True)
        decisions = [Decision(promoted, each, Change(9, low=low), Change(9, high=high)) for each, low, high in values]
        remaining = iter(decisions)
        assert choose_weight(remaining).weight == weight
        assert len([*remaining]) == (weight == 1.0), "no weight is measured that is not tried"
        assert choose_weight(decisions[:1]) == decisions[0]


def test_a_passage_without_its_sentence_is_searched_in_its_place(done):
    """By the sentence, with every search; it lacks that only, and the passages that do not ask are as they are."""
    run = open_run_for_inference(done)
    store = run.sources.passages
    sentences = evaluate.find_sentences(run, find_evidence(store, *run.lengths.hidden), 1.0, max_sentences=40)
    evaluator = AdaptEvaluator(run, sentences)
    numbers, rows, passages, texts = evaluator.shortened_passages
    assert len(set(rows.tolist())) == len(numbers) == len(passages.title_lengths) > 8
    for number, row, ids, length in zip(numbers, rows.tolist(), passages.ids, passages.lengths, strict=True):
        sentence = sentences[number]
        start, end = store.sentences(row)[sentence.number]
        body, title = store.body_tokens(row).tolist(), store.title_tokens(row).tolist()
        assert ids[1 : length - 1].tolist() == [*title, run.sources.tokenizer.sep_id, *body[:start], *body[end:]]
        assert run.sources.tokenizer.encode(texts[row]).ids == [*body[:start], *body[end:]]
    other = next(row for row in range(len(store)) if row not in texts)
    words = evaluator.shortened_bm25
    assert words.search([store.text(other)], 1)[0, 0] == run.bm25().search([store.text(other)], 1)[0, 0] == other
    params, vectors = restore(run, warn=False, for_answers=False).params, np.load(done / "vectors.npy")
    by_search = {}
    for search in ("vectors", "bm25", "hybrid"):
        metrics = evaluator.metrics(params, vectors, SearchPipeline(search))
        found, complete = metrics[evaluate.WITHOUT_SENTENCE], metrics[evaluate.SENTENCE]
        assert np.flatnonzero(~np.isnan(found)).tolist() == sorted(numbers)
        by_search[search] = found[sorted(numbers)].mean(), complete[sorted(numbers)].mean()
    assert by_search["bm25"][0] < 0.95 < by_search["bm25"][1], "the words of the sentence are missed"


def test_ndcg_of_the_first_hit():
    hits = np.array([[1, 0, 1], [0, 0, 1], [0, 0, 0]], bool)
    np.testing.assert_allclose(evaluate.first_hit_ndcg(hits), [1.0, 0.5, 0.0])


def test_the_mean_has_the_searches_that_a_sentence_has(done):
    """Without a name and without a shortened passage it is that of the complete sentence."""
    run = open_run_for_inference(done)
    evidence = find_evidence(run.sources.passages, *run.lengths.hidden)
    found = evaluate.find_sentences(run, evidence, 1.0, max_sentences=120)
    sentences = [sentence._replace(masked="", evidence=()) for sentence in found]
    params, vectors = restore(run, warn=False, for_answers=False).params, np.load(done / "vectors.npy")
    metrics = AdaptEvaluator(run, sentences).metrics(params, vectors, SearchPipeline("bm25"))
    mean, without = metrics[evaluate.MEAN_NDCG], metrics[evaluate.WITHOUT_SENTENCE]
    np.testing.assert_array_equal(mean, np.where(np.isnan(without), metrics[evaluate.SENTENCE], without))
    assert np.isnan(without).any() and np.isnan(metrics[evaluate.MASKED]).all()


def test_encoders_are_compared_by_the_search_that_users_get(done):
    """Hybrid search with token rerank, as the adapted index answers."""
    run = open_run_for_inference(done)
    pipeline = evaluate.users_pipeline(run)
    assert (pipeline.search, pipeline.reranker) == ("hybrid", "tokens")
    assert pipeline == Model(done).trained.pipeline
    chosen = with_values(run.config, {"qa.search": "vectors", "answering.rerank": "none"})
    assert evaluate.users_pipeline(replace(run, config=chosen)) == SearchPipeline("vectors")
    table = read_json(done / "adapt.json")["measured"]["table"]
    assert {"start", "adapted", "start_vectors", "vectors", "bm25"} <= {*table}
    adapted, vectors = (table[name][evaluate.MEAN_NDCG]["value"] for name in ("adapted", "vectors"))
    assert adapted != vectors


def test_steps_fit_the_time_and_keep_their_proportion():
    most, each = {"ict": 1000, "realm": 500}, {"ict": 0.1, "realm": 0.4}
    assert plan.steps_that_fit(most, each, 150.0, 20) == {"ict": 500, "realm": 250}
    assert plan.steps_that_fit(most, each, 1e6, 20) == most
    assert plan.steps_that_fit(most, each, -5.0, 20) == {"ict": 20, "realm": 20}
    assert plan.steps_that_fit({"ict": 3}, {"ict": 1.0}, 0.0, 20) == {"ict": 3}


def test_a_corpus_that_takes_too_long_is_told_or_refused():
    def check(embed: float, step: float = 0.1) -> list[str]:
        return plan.check_time(1.0, 3.0, Estimate(0.01, embed, 0.01, 5.0, 2.0, {"ict": step}), 1000)

    assert check(40.0) == []
    (note,) = check(100.0)
    parts = "1 min 40 s to embed 1,000 passages, 5 s to compare encoders"
    needed = f"--minutes=1: is too short: this machine needs 1 min 52 s ({parts})"
    assert note == f"{needed}; training takes the fewest steps."
    for embed, step in ((110.0, 0.1), (40.0, 4.0)):
        with pytest.raises(UserError, match="this machine needs .*; increase it, or use fewer documents"):
            check(embed, step)


def fails(capsys, *arguments: Any) -> str:
    """The one line of an adaptation that is refused."""
    assert adapt(*arguments) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_what_cannot_be_adapted_is_reported_before_training(documents, encoder, tmp_path, capsys):
    first, rng = json.loads(documents.read_text().splitlines()[0]), np.random.default_rng(1)
    texts = [{"title": "", "text": f"The {' '.join(rng.choice(WORDS, 8))}."} for _ in range(60)]
    records = {
        "one": [first],
        "alike": [first | {"id": f"a{number}"} for number in range(60)],
        "short": [first | text | {"id": f"a{number}"} for number, text in enumerate(texts)],
        "asked": [{"question": "Who?", "answers": [], "gold_passage_id": "nowhere"}],
    }
    made = {name: write_lines(tmp_path / f"{name}.jsonl", lines) for name, lines in records.items()}
    shutil.copytree(encoder, tmp_path / "plain")
    (tmp_path / "plain" / "modules.json").unlink()
    (tmp_path / "empty").mkdir()
    few = "sentences that no other has"
    for number, (source, start, options, *messages) in enumerate([
        (tmp_path / "empty", encoder, [], "empty"),
        (made["one"], encoder, [], "the corpus has 1 passages"),
        (made["alike"], encoder, [], f"20% of the documents have 0 {few}"),
        (made["short"], encoder, [], "short.jsonl: 0 documents to learn from have a name",
         "and there is no passage of two or more sentences; add documents"),
        (documents, encoder, [f"--forgetting={made['alike']}"], f"{made['alike']}: 100% of the documents have 0 {few}"),
        (documents, encoder, [f"--questions={made['asked']}"],
         "asked.jsonl: no question can be evaluated (1 whose gold passage is not there)"),
        (documents, tmp_path / "plain", [], "has no modules.json with a pooling"),
    ]):  # fmt: skip
        output = tmp_path / f"run{number}"
        told = fails(capsys, source, start, output, *options)
        assert all(message in told for message in messages) and not (output / "evidence_contrast").exists()


@pytest.mark.parametrize("pattern", ["*.md", "docs/*.md", "docs/*/*.md", "other/**/*.md"])
def test_a_pattern_that_finds_nothing_in_the_output_may_stand_above_it(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    adaptation.check_outside(Path("docs/run/1"), pattern, "the folder of the documents")


@pytest.mark.slow
def test_documents_that_do_not_suffice_may_be_completed(documents, encoder, tmp_path, capsys):
    """The same --output; and of fewer passages than REALM has candidates all are."""
    some = documents.read_text().splitlines()[:24]
    own = tmp_path / "articles.jsonl"
    own.write_text("\n".join(some[:3]))
    assert "the corpus has 3 passages" in fails(capsys, own, encoder, tmp_path / "run")
    own.write_text("\n".join(some))
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(documents.read_text().splitlines()[30:45]))
    assert adapt(own, encoder, tmp_path / "run", f"--forgetting={few}") == 0
    record, config = (read_json(tmp_path / "run" / f"{name}.json") for name in ("adapt", "config"))
    assert config["realm"]["candidates"] == record["plan"]["passages"] == 24
    assert record["forgetting"]["passages"] == 15


def test_another_run_or_other_settings_are_refused(done, documents, encoder, tmp_path, capsys):
    other, new, own, nowhere = (tmp_path / name for name in ("other", "new", "documents", "nowhere"))
    (other / "vectors").mkdir(parents=True)
    (other / "config.json").write_text("{}")
    (other / "vectors" / "vectors.npy").write_bytes(b"mine")
    shutil.copytree(documents.parent, own, ignore=shutil.ignore_patterns("encoder", "vocabulary"))
    decided = ("evaluation.held_out=0.5", "refresh.mode=async", "data.path=data", "model.shared_tower=True")
    for source, start, output, option, message in [
        (documents, encoder, done, "--merge=0.25", "was started with questions"),
        (documents, encoder, done, "--merge=0.25", "use the same, or another --output"),
        (documents, encoder, other, "", "is the directory of another run"),
        (documents, encoder, other / "vectors", "", "contains a vectors.npy of another run"),
        (documents, encoder, new, "--merge=2", "--merge=2: give a weight"),
        *[(documents, encoder, new, f"--minutes={x}", f"={x}: give a number above 0") for x in ("0", "inf", "nan")],
        *[
            (documents, encoder, new, f"--config.{key}", f"error: config.{key.partition('=')[0]}: ")
            for key in (*decided, "encoder.projection=8")
        ],
        (documents, encoder, new, "--config.data.path=data", "leave it out"),
        (own, encoder, own / "deep" / "run", "", "the folder of the documents"),
        (own / "**" / "*.jsonl", encoder, own / "deep" / "run", "", "the folder of the documents"),
        (own / "*" / "*" / "*.json*", encoder, own / "deep" / "run", "", "the folder of the documents"),
        (documents, encoder, encoder / "run", "", "the folder of the base encoder"),
        (nowhere, encoder, new, "", "nowhere"),
        (documents, encoder, new, f"--forgetting={nowhere}", "nowhere"),
        (documents, nowhere, new, "", "no such folder; write hf:NAME"),
    ]:
        assert message in fails(capsys, source, start, output, *filter(None, [option]))
    assert not new.exists() and not (own / "deep").exists()


def test_a_record_of_another_version_is_refused(tmp_path):
    record = {"settings": {}, "command": "", "seconds": {}, "plan": {"tasks": "realm"}}
    (tmp_path / "adapt.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="adapt.json: another version of realm_jax wrote it; continue"):
        AdaptRecord.open(AdaptRequest("docs", "model", tmp_path, ConfigDict()), StatusWriter(None, "", None), 0.0)


@pytest.mark.slow
def test_other_weights_under_the_name_of_the_start_are_refused(documents, encoder, tmp_path, monkeypatch, capsys):
    start, weights = tmp_path / "encoder", tmp_path / "encoder" / "model.safetensors"
    shutil.copytree(encoder, start)
    with monkeypatch.context() as patch, pytest.raises(KeyError, match="power failure"):
        patch.setattr(adaptation, "measure", breaks_off(lambda *_: None))
        adapt(documents, start, tmp_path / "run")
    content = weights.read_bytes()
    weights.write_bytes(content[:-4] + np.float32(0.5).tobytes())
    told = fails(capsys, documents, start, tmp_path / "run")
    assert f"has other weights than when {tmp_path / 'run'} was started" in told
    weights.write_bytes(content)
    assert adapt(documents, start, tmp_path / "run") == 0


def test_a_document_that_is_added_is_found_and_nothing_else_is_embedded(
    documents, encoder, tmp_path, monkeypatch, capsys
):
    """And what other documents lost is measured, here of the same documents, so that all of them ask."""
    run = tmp_path / "run"
    monkeypatch.setenv("REALM_CACHE_BYTES", "1000000")
    monkeypatch.setattr(evaluate, "passes_promotion_test", lambda *_: True)
    assert adapt(documents, encoder, run, "--merge=1", f"--forgetting={documents}") == 0
    record = read_json(run / "adapt.json")
    table = record["forgetting"]["table"]
    assert record["forgetting"]["documents"] == 60 and {*table} == {"start", "adapted"}
    assert (
        table["start"][evaluate.MEAN_NDCG]["queries"]
        > record["measured"]["table"]["start"][evaluate.MEAN_NDCG]["queries"]
    )
    assert f"On other documents: {documents}" in (run / "report.html").read_text()
    before = np.load(run / "vectors.npy")
    new = {"id": "new", "title": "Life 60", "text": "The bardlo of Ada Moss was beck."}
    counts, embed = [], Run.embed

    def counted(self, params, progress=None, rows=None):
        counts.append(len((rows or self.corpus).ids))
        return embed(self, params, progress, rows)

    monkeypatch.setattr(Run, "embed", counted)
    added = write_lines(tmp_path / "new.jsonl", [new])
    assert cli.main(["corpus", "add", str(added), f"--workdir={run}"]) == 0
    assert "rewritten: vectors.npy" in capsys.readouterr().out
    vectors = np.load(run / "vectors.npy")
    assert vectors.shape == (61, 16) and np.isfinite(vectors).all() and vectors.any(axis=1).all()
    np.testing.assert_array_equal(vectors[:60], before)
    assert counts and counts[0] == 1, "the new one; then rows of the self-check"
    capsys.readouterr()
    assert cli.main(["ask", "--json", f"--workdir={run}", f"{new['title']} {new['text']}"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["candidates"][0]["id"] == "new" and out["answer"]


@pytest.mark.parametrize("named", [0, 3])
def test_with_hardly_any_names_sentences_alone_are_learned_from(encoder, tmp_path, named):
    rng = np.random.default_rng(1)
    texts = [[f"The {' '.join(rng.choice(WORDS, size=8, replace=False))}." for _ in range(3)] for _ in range(60)]
    for number, text in enumerate(texts[:named]):
        text.append(f"The {' '.join(WORDS[:6])} of Ada Moss was {WORDS[6 + number]}.")
    articles = [{"id": f"a{n}", "title": "", "text": " ".join(text)} for n, text in enumerate(texts)]
    assert adapt(write_lines(tmp_path / "plain.jsonl", articles), encoder, tmp_path / "run", "--merge=0.5") == 0
    record = read_json(tmp_path / "run" / "adapt.json")
    plan, start = record["plan"], record["measured"]["table"]["start"]
    assert named or start["evidence_ndcg@10"] == {"queries": 0}
    assert plan["steps"] == {"ict": 3} and bool(plan["spans_with_evidence"]) == bool(named)
    assert re.match(f"[0-{named}] documents to learn from have a name", plan["notes"][0])
    # The passage encoder is not trained, so every weight has the vectors of the start.
    run = open_run_for_inference(tmp_path / "run")
    base = init_from_sources(run, run.initial_params())
    np.testing.assert_allclose(np.load(tmp_path / "run" / "vectors.npy"), run.embed(base), atol=1e-6)


def test_the_exported_folder_gives_our_vectors_in_sentence_transformers(done):
    pytest.importorskip("torch")
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(done / "model"), device="cpu")
    run = open_run_for_inference(done)
    trained = restore(run, warn=False)
    store = run.sources.passages
    texts = [f"{store.title(row)} {store.text(row)}" for row in range(len(store))]
    np.testing.assert_allclose(model.encode_document(texts), np.load(done / "vectors.npy"), atol=1e-4)
    np.testing.assert_array_equal(model.encode(texts[:4]), model.encode_document(texts[:4]))
    asked = [store.text(row)[:40] for row in range(8)]
    queries = [query_arrays(run.sources.tokenizer.encode(text).ids, 32, run.sources.tokenizer) for text in asked]
    ids, lengths = np.stack([one["query"] for one in queries]), np.array([one["query_length"] for one in queries])
    ours = run.model.query_vectors(trained.params, ids, lengths)
    np.testing.assert_allclose(model.encode_query(asked), ours, atol=1e-4)
    assert abs(model.encode_query(asked) - model.encode_document(asked)).max() > 1e-5


def test_the_index_of_faiss_and_the_table_of_vectors_have_the_passages(done):
    faiss, parquet = pytest.importorskip("faiss"), pytest.importorskip("pyarrow.parquet")
    index, vectors = faiss.read_index(str(done / "index.faiss")), np.load(done / "vectors.npy")
    np.testing.assert_array_equal(index.search(vectors, 1)[1][:, 0], np.arange(60))
    rows = parquet.read_table(done / "vectors.parquet").to_pylist()
    assert {row["id"] for row in rows} == {f"a{number}" for number in range(60)}
    assert {row["part"] for row in rows} == {0}
    np.testing.assert_array_equal(np.float32([row["vector"] for row in rows]), vectors)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mpnet", "modernbert"])
def test_an_encoder_of_another_architecture_is_adapted(kind, documents, tmp_path, monkeypatch):
    library = pytest.importorskip("sentence_transformers")
    corpus = [*TEXTS, *(json.loads(line)["text"] for line in documents.read_text().splitlines())]
    prompts = {"query": "query: ", "document": "passage: "}
    base = sentence_encoder(tmp_path, kind, prompts=prompts, sizes={"vocabulary": 1500, "corpus": corpus})
    monkeypatch.setattr(evaluate, "passes_promotion_test", lambda *_: True)
    rate = "--config.realm.learning_rate=1e-3"  # so that three steps change the vectors by more than rounding
    assert adapt(documents, tmp_path / "model", tmp_path / "run", "--merge=0.5", rate) == 0
    assert read_json(tmp_path / "run" / "adapt.json")["plan"]["steps"] == {"evidence_contrast": 3, "realm": 3}
    model = Model(tmp_path / "run")
    theirs = library.SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")
    texts = ["What was Ada Moss?", "Once Karl Reed had a house."]
    np.testing.assert_allclose(model.encode(texts), theirs.encode_query(texts), atol=1e-4)
    np.testing.assert_allclose(model.encode(texts, "document"), theirs.encode_document(texts), atol=1e-4)
    assert np.abs(theirs.encode_query(texts) - base.encode_query(texts)).max() > 1e-4, "adapted"
    assert model.ask(texts[0])["candidates"]


def test_passages_of_a_document_are_numbered_in_the_table_of_vectors(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = {name: f"{' '.join(WORDS[:count])}. " * 9 for name, count in {"a": 9, "b": 2, "c": 7}.items()}
    long = [{"id": name, "title": name, "text": text} for name, text in texts.items()]
    prepare(write_lines(tmp_path / "long.jsonl", long), tmp_path / "data", vocabulary_size=300, limit=32, workers=1)
    store = open_sources(tmp_path / "data").passages
    write_vectors(tmp_path, store, np.zeros((len(store), 2), np.float32))
    rows = parquet.read_table(tmp_path / "vectors.parquet").to_pylist()
    wanted = [(store.document_id(row), row - store.rows_of(store.document_id(row)).start) for row in range(len(store))]
    assert [(row["id"], row["part"]) for row in rows] == wanted and max(part for _, part in wanted) > 1
