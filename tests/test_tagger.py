"""The tagger: labels that make sense, a run that trains, stops and goes on like REALM's, and spans for passages."""

import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import Cut, at_step, cut_at
from test_weights import SETTINGS, random_weights
from tiny import tiny_bert
from tiny_tagger import open_tiny, tiny_config, write_corpus
from weight_folders import save_tensors

from realm_jax.cli import main as cli
from realm_jax.config import default as realm_config
from realm_jax.config import validate
from realm_jax.corpora.build import build_store
from realm_jax.corpora.outcomes import Article
from realm_jax.data.conll import Sentence, open_tagged
from realm_jax.data.spans import DATE, Span, find_dates, with_dates
from realm_jax.data.spans import finder as finder_called
from realm_jax.data.store import PassageStore
from realm_jax.data.tags import IGNORED, Entity, TaggerTokenizer
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import UserError
from realm_jax.eval.entities import entity_scores
from realm_jax.eval.tagging import PassageSpans, TextTagger, tag_passages, tag_program
from realm_jax.models.tagger import Tagger, decode
from realm_jax.storage import read_json
from realm_jax.tasks.tagger import TaggerTask, annotated, default, tagger_examples, tagger_loss
from realm_jax.train.checkpoints import SavedCheckpoint
from realm_jax.train.recipe import open_run
from realm_jax.train.records import read_lines
from realm_jax.train.tagger import finder, open_tagger, run_tagger, train
from realm_jax.train.workdir import recorded_config


@pytest.fixture(scope="module")
def corpus(trained_tagger) -> Path:
    return trained_tagger.parent / "corpus"


# --- labels -----------------------------------------------------------------------------------------------------------


def is_valid(labels: tuple[int, ...]) -> bool:
    """Whether every I follows a B or an I of its kind."""
    return all(b == 0 or b % 2 == 1 or a in (b, b - 1) for a, b in itertools.pairwise((0, *labels)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_decoding_finds_the_likeliest_valid_labels(seed):
    """Against all sequences of labels over the places that count; the others have any label and change nothing."""
    rng = np.random.default_rng(seed)
    scores = np.log(rng.dirichlet(np.ones(5), (2, 6))).astype(np.float32)
    first = rng.random((2, 6)) < 0.7
    found, probabilities = map(np.asarray, jax.jit(decode)(scores, first))
    for row in range(2):
        places = np.flatnonzero(first[row])
        valid = [labels for labels in itertools.product(range(5), repeat=len(places)) if is_valid(labels)]
        best = max(valid, key=lambda labels: scores[row, places, list(labels)].sum())
        assert tuple(found[row, places]) == best
        np.testing.assert_allclose(probabilities[row, places], np.exp(scores[row, places, list(best)]), rtol=1e-5)


def tiny_network(shapes: bool = True) -> tuple[Tagger, dict]:
    tagger = Tagger(tiny_bert(layers=1), ("LOC", "PER"), shapes)
    return tagger, tagger.init(jax.random.key(0))


def test_imported_weights_start_without_shapes_and_padding_changes_nothing():
    tagger, params = tiny_network()
    ids = np.random.default_rng(0).integers(4, 50, (2, 9))
    shapes = np.random.default_rng(1).integers(0, 216, (2, 9))
    lengths = np.array([9, 5])
    plain = Tagger(tagger.bert, tagger.kinds, shapes=False)
    without = {"tagger": {name: part for name, part in params["tagger"].items() if name != "shapes"}}
    scores = jax.jit(tagger.scores)
    fresh = scores(params, ids, lengths, shapes)
    np.testing.assert_array_equal(fresh, jax.jit(plain.scores)(without, ids, lengths, shapes))
    params["tagger"]["shapes"]["embedding"] = jnp.asarray(np.random.default_rng(2).normal(size=(18, 16)), jnp.float32)
    told = scores(params, ids, lengths, shapes)
    assert np.abs(told - fresh).max() > 0.1
    alone = scores(params, ids[1:, :5], lengths[1:], shapes[1:, :5])
    np.testing.assert_allclose(alone[0], told[1, :5], atol=1e-5)


def test_the_loss_is_the_mean_over_first_pieces():
    tagger, params = tiny_network()
    ids, labels = np.full((1, 6), 7), np.array([[IGNORED, 3, IGNORED, 4, 0, IGNORED]], np.int8)
    batch = {"ids": ids, "length": np.array([6]), "shapes": np.zeros((1, 6), np.uint8), "labels": labels}
    log_p = np.asarray(tagger.scores(params, ids, batch["length"], batch["shapes"]))
    means = tagger_loss(tagger, params, batch, None)
    places = [1, 3, 4], [3, 4, 0]
    np.testing.assert_allclose(means["loss"].value, -log_p[0][places].mean(), rtol=1e-5)
    assert means["loss"].number == 3
    right = (log_p[0][[1, 3, 4]].argmax(axis=-1) == [3, 4, 0]).mean()
    np.testing.assert_allclose(means["accuracy"].value, right, rtol=1e-5)


# --- scores -----------------------------------------------------------------------------------------------------------


def test_scores_count_whole_names():
    gold = [[Entity(0, 3, "PER"), Entity(5, 8, "LOC")], [Entity(0, 2, "ORG"), Entity(4, 6, "LOC")], []]
    found = [[Entity(0, 3, "PER"), Entity(5, 8, "ORG")], [Entity(1, 2, "ORG")], [Entity(7, 9, "PER")]]
    scores = entity_scores(gold, found)
    assert scores["names"] == scores["found"] == 4
    assert (scores["precision"], scores["recall"], scores["f1"]) == (0.25, 0.25, 0.25)
    assert (scores["boundary_precision"], scores["boundary_recall"], scores["boundary_f1"]) == (0.5, 0.5, 0.5)
    assert (scores["touched_precision"], scores["touched_recall"]) == (0.75, 0.75)


def test_nothing_found_and_nothing_to_find_score_nothing():
    nothing = entity_scores([[Entity(0, 1, "PER")]], [[]])
    assert nothing["precision"] == nothing["recall"] == nothing["f1"] == 0
    assert entity_scores([[]], [[]])["f1"] == 0


# --- examples ---------------------------------------------------------------------------------------------------------


def test_a_document_is_one_text_with_its_sentences_and_names():
    names = Entity(0, 2, "PER"), Entity(3, 5, "ORG"), Entity(6, 7, "LOC")
    first = Sentence(tuple("Ada Lovelace met Babbage Ltd in London".split()), names)
    text, sentences, found = annotated([first, Sentence(("Paris", "slept"), (Entity(0, 1, "LOC"),))])
    assert [text[start:end] for start, end in sentences] == ["Ada Lovelace met Babbage Ltd in London", "Paris slept"]
    assert [text[start:end] for start, end, _ in found] == ["Ada Lovelace", "Babbage Ltd", "London", "Paris"]


def test_examples_hold_every_word_of_every_document_once(corpus):
    documents = open_tagged(corpus)["train"]
    cutter = TaggerTokenizer(WordPiece.train([annotated(document).text for document in documents], 200))
    examples = tagger_examples(documents, cutter, ("LOC", "PER"), 24)
    rows = [examples.make(index, np.random.default_rng(0)) for index in range(examples.total)]
    units = sum(int((row["labels"] != IGNORED).sum()) for row in rows)
    assert units == sum(int(pieces.first.sum()) for pieces in cutter([annotated(one).text for one in documents]))
    begins = sum(int(((row["labels"] > 0) & (row["labels"] % 2 == 1)).sum()) for row in rows)
    assert begins == sum(len(sentence.entities) for document in documents for sentence in document)
    for row in rows:
        used = int(row["length"])
        assert (row["labels"][[0, used - 1]] == IGNORED).all() and (row["labels"][used:] == IGNORED).all()
        assert row["ids"][0] == cutter.tokenizer.cls_id and row["ids"][used - 1] == cutter.tokenizer.sep_id


def test_hidden_words_are_whole_and_others_every_time(corpus):
    documents = open_tagged(corpus)["train"]
    tokenizer = WordPiece.train([annotated(document).text for document in documents], 200)
    plain = tagger_examples(documents, TaggerTokenizer(tokenizer), ("LOC", "PER"), 24)
    hiding = tagger_examples(documents, TaggerTokenizer(tokenizer), ("LOC", "PER"), 24, hidden=0.5)
    hidden, total = 0, 0
    for index in range(plain.total):
        whole = plain.make(index, np.random.default_rng(0))
        inside = slice(1, int(whole["length"]) - 1)
        units = np.cumsum(whole["labels"] != IGNORED)[inside]
        seen = set()
        for seed in range(4):
            made = hiding.make(index, np.random.default_rng(seed))
            gone = made["ids"] != whole["ids"]
            assert (made["ids"][gone] == tokenizer.unk_id).all() and gone[inside].sum() == gone.sum()
            assert all(len(set(gone[inside][units == unit])) == 1 for unit in set(units))
            assert all((made[key] == whole[key]).all() for key in ("labels", "shapes", "length"))
            hidden, total = hidden + int(gone.sum()), total + len(units)
            seen.add(gone.tobytes())
        assert len(seen) > 1
    assert 0.45 < hidden / total < 0.55


def test_a_name_that_is_cut_begins_anew_in_its_next_window():
    """As `decode` has it, which starts every window outside of names."""
    text = [Sentence(("Ada",) * 9, (Entity(0, 9, "PER"),))]
    cutter = TaggerTokenizer(WordPiece.train(["Ada ada"], 64))
    examples = tagger_examples([text], cutter, ("PER",), 8)
    rows = [examples.make(index, np.random.default_rng(0))["labels"] for index in range(examples.total)]
    tags = [row[row != IGNORED].tolist() for row in rows]
    assert sum(map(len, tags)) == 9 and len(tags) > 1
    assert all(own == [1] + [2] * (len(own) - 1) for own in tags)


def test_there_is_room_for_many_kinds():
    """Labels go up to twice their number, through the network and through examples."""
    kinds = tuple(f"K{number}" for number in range(70))
    tagger = Tagger(tiny_bert(layers=1), kinds)
    params = tagger.init(jax.random.key(0))
    params["tagger"]["labels"]["bias"] = params["tagger"]["labels"]["bias"].at[139].set(100.0)
    ids, first = np.full((1, 6), 7), np.ones((1, 6), bool)
    found, _ = tag_program(tagger, params, ids, np.array([6]), np.zeros((1, 6), np.uint8), first)
    assert np.asarray(found).tolist() == [[139] * 6]
    cutter = TaggerTokenizer(WordPiece.train(["Ada ada"], 64))
    examples = tagger_examples([[Sentence(("Ada",), (Entity(0, 1, "K69"),))]], cutter, kinds, 8)
    assert examples.make(0, np.random.default_rng(0))["labels"].max() == 139


# --- a run ------------------------------------------------------------------------------------------------------------


def params_of(workdir: Path) -> dict:
    return jax.tree.map(np.asarray, open_tagger(workdir, jax.devices()[:1]).params)


def losses(workdir: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_lines(workdir / "tagger" / "metrics.jsonl")]


def test_a_run_learns_and_leaves_its_results(trained_tagger):
    results = read_json(trained_tagger / "results.json")
    assert results["dev"]["f1"] > 0.8 and results["test"]["f1"] > 0.8 and results["kinds"] == ["LOC", "PER"]
    measured = read_lines(trained_tagger / "tagger" / "evaluations.jsonl")
    assert [line["step"] for line in measured] == [20, 40]
    assert measured[-1]["f1"] == results["dev"]["f1"]
    assert results["rules"]["test"]["names"] == results["test"]["names"] and "boundary_f1" in results["rules"]["dev"]
    assert losses(trained_tagger)[-1][1] < 0.3 * losses(trained_tagger)[0][1]


@pytest.mark.slow
def test_a_run_that_is_cut_off_ends_as_one_that_never_was(corpus, trained_tagger, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        cut_at(patch, 13, 20)
        for _ in range(2):
            with pytest.raises(Cut):
                train(open_tiny(corpus, tmp_path))
    train(open_tiny(corpus, tmp_path))
    (tmp_path / "tagger" / "evaluations.jsonl").unlink()
    train(open_tiny(corpus, tmp_path))  # nothing is left to do but the results
    jax.tree.map(np.testing.assert_array_equal, params_of(tmp_path), params_of(trained_tagger))
    assert losses(tmp_path) == losses(trained_tagger)
    seconds = {"seconds": None}
    assert read_json(tmp_path / "results.json") | seconds == read_json(trained_tagger / "results.json") | seconds


@pytest.mark.slow
def test_sigterm_saves_and_the_next_start_goes_on(corpus, trained_tagger, tmp_path, monkeypatch):
    def stop(step: int) -> None:
        if step == 17:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        at_step(patch, stop)
        assert run_tagger(tiny_config(corpus), tmp_path) == 75
    saved = SavedCheckpoint.newest(tmp_path / "tagger" / "checkpoints")
    assert saved is not None and saved.step == 18
    assert run_tagger(tiny_config(corpus), tmp_path) == 0
    assert read_json(tmp_path / "results.json")["dev"]["f1"] > 0.8


@pytest.mark.slow
def test_eight_devices_and_microbatches_train_the_same(corpus, trained_tagger, tmp_path):
    run = open_tiny(corpus, tmp_path, 8, mesh__fsdp=2, tagger__steps=10)
    assert run.param_shardings["tagger"]["bert"]["layer_0"]["query"]["kernel"].spec[0] == "fsdp"
    train(run)
    np.testing.assert_allclose(losses(tmp_path)[0][1], losses(trained_tagger)[0][1], rtol=1e-4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(open_tiny(corpus, whole, tagger__steps=5))
    train(open_tiny(corpus, parts, tagger__steps=5, optimizer__microbatches=2))
    np.testing.assert_allclose(losses(whole)[0][1], losses(parts)[0][1], rtol=1e-4)


def test_another_config_or_other_text_is_refused_in_its_folder(corpus, trained_tagger, tmp_path):
    with pytest.raises(UserError, match="config.model.shapes is False, but the run in .* has True"):
        open_tiny(corpus, trained_tagger, model__shapes=False)
    write_corpus(tmp_path)
    path = tmp_path / "train.conll"
    path.write_text(path.read_text().replace("1843", "1999"))
    with pytest.raises(UserError, match="not the data of the run: other train than"):
        open_tiny(tmp_path, trained_tagger)
    (write_corpus(tmp_path) / "test.conll").unlink()
    with pytest.raises(UserError, match="not the data of the run: no test, which"):
        open_tiny(tmp_path, trained_tagger)


@pytest.mark.slow
def test_a_run_starts_from_imported_weights(corpus, tmp_path):
    """With their vocabulary; what does not fit is told before anything is recorded."""
    words = WordPiece.train([annotated(document).text for document in open_tagged(corpus)["train"]], 100)
    weights = random_weights()
    rng = np.random.default_rng(0)
    weights["embeddings.word_embeddings.weight"] = rng.normal(size=(words.size, 8)).astype(np.float32)
    weights["embeddings.position_embeddings.weight"] = rng.normal(size=(30, 8)).astype(np.float32)
    folder = save_tensors(tmp_path / "bert", weights, SETTINGS)
    words.save(folder)
    sizes = {"init_from": str(folder), "model__layers": 2, "model__width": 8, "model__feed_forward": 12}
    with pytest.raises(UserError, match="is .*8.*, but the model needs .*16"):
        open_tiny(corpus, tmp_path / "run", **sizes | {"model__width": 16})
    assert not (tmp_path / "run" / "config.json").exists()
    run = open_tiny(corpus, tmp_path / "run", **sizes, tagger__steps=1, tagger__learning_rate=1e-9)
    assert run.sources.tokenizer.fingerprint == words.fingerprint
    train(run)
    (folder / "model.safetensors").unlink()  # of no use any more
    found = params_of(tmp_path / "run")["tagger"]["bert"]["words"]["embedding"]
    np.testing.assert_allclose(found, weights["embeddings.word_embeddings.weight"], atol=1e-5)
    train(open_tiny(corpus, tmp_path / "run", **sizes, tagger__steps=1, tagger__learning_rate=1e-9))


def test_a_vocabulary_of_the_other_case_is_refused(corpus, tmp_path):
    words = WordPiece.train(["ada was born in bergen"], 64)
    words.save(tmp_path / "lower")
    path = tmp_path / "lower" / "vocab.txt"
    with pytest.raises(UserError, match="vocab.txt: has no capital letters; set config.data.lower_case=True"):
        open_tiny(corpus, tmp_path / "run", data__vocabulary=str(path), data__lower_case=False)
    path.write_text(path.read_text() + "\u211d\n")  # ℝ is in BERT's uncased vocabulary
    open_tiny(corpus, tmp_path / "run", data__vocabulary=str(path))
    path.write_text(path.read_text() + "Paris\n")
    with pytest.raises(UserError, match="has a piece with capital letters, 'Paris'; set config.data.lower_case=False"):
        open_tiny(corpus, tmp_path / "other", data__vocabulary=str(path))


def test_a_vocabulary_may_move_but_not_change(corpus, tmp_path):
    for name, text in {"one": "ada was", "same": "ada was", "other": "bergen"}.items():
        WordPiece.train([text], 64).save(tmp_path / name)
    at = {name: str(tmp_path / name / "vocab.txt") for name in ("one", "same", "other", "nowhere")}
    open_tiny(corpus, tmp_path / "run", data__vocabulary=at["one"])
    for name in ("same", "nowhere"):
        open_tiny(corpus, tmp_path / "run", data__vocabulary=at[name])
    with pytest.raises(UserError, match="other tokenizer than .*data.json records"):
        open_tiny(corpus, tmp_path / "run", data__vocabulary=at["other"])


# --- the config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, value",
    [
        ("data.path", ""),
        ("data.length", 7),
        ("data.hidden", 1.0),
        ("data.vocabulary_size", 0),
        ("model.heads", 5),
        ("model.dropout", 1.0),
        ("model.hidden_act", "relu"),
        ("model.dtype", "float16"),
        ("tagger.steps", 0),
        ("tagger.learning_rate", float("nan")),
        ("evaluation.every", -1),
        ("mesh.fsdp", 0),
        ("seed", 2**32),
    ],
)
def test_a_value_that_cannot_work_is_named(key, value):
    config = default()
    config.data.path = "somewhere"
    validate(config, TaggerTask)
    config.update_from_flattened_dict({key: value})
    with pytest.raises(UserError, match=f"^config.{key}: "):
        validate(config, TaggerTask)


def test_jobs_of_realm_refuse_a_tagger_and_its_own_refuse_realm(corpus, trained_tagger, tmp_path, trained_run, capsys):
    with pytest.raises(UserError, match="config.tasks: this is a tagger's config"):
        validate(tiny_config(corpus))
    with pytest.raises(UserError, match="config.tasks: this is REALM's config"):
        validate(realm_config(), TaggerTask)
    for command in (["launch", "plan"], ["quickstart"]):
        assert cli.main([*command, "--config=configs/tagger.py:small"]) == 2
        assert "config.tasks: this is a tagger's config; `realm train` trains it" in capsys.readouterr().err
    for wrong in (["--config.tasks=tagger"], ["--config=configs/tagger.py:small", "--config.tasks=ict"]):
        assert cli.main(["train", *wrong, "--config.data.path=x", f"--workdir={tmp_path / 'run'}"]) == 2
        assert "config.tasks: 'tagger' goes with the config of a tagger and with no other" in capsys.readouterr().err
    assert cli.main(["train", "--config=configs/tagger.py:large", f"--workdir={tmp_path / 'run'}"]) == 2
    assert "configs/tagger.py:large: there is no such size; choose among base" in capsys.readouterr().err
    for command in (["ask", "who?"], ["evaluate"], ["build-index"]):
        assert cli.main([*command, f"--workdir={trained_tagger}"]) == 2
        assert "a tagger was trained there, not REALM" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"tagger={trained_run.workdir}: REALM was trained there, not a tagger"):
        finder(str(trained_run.workdir))
    with pytest.raises(UserError, match=f"--workdir={trained_run.workdir}: REALM was trained there, not a tagger"):
        open_tiny(corpus, trained_run.workdir)
    with pytest.raises(UserError, match=f"--workdir={trained_tagger}: a tagger was trained there, not REALM"):
        open_run(recorded_config(trained_run.workdir), trained_tagger)
    with pytest.raises(UserError, match=f"tagger={tmp_path}: no run there"):
        finder_called(f"tagger:{tmp_path}")
    assert cli.main(["storage", "verify", f"--workdir={trained_tagger}"]) == 0


CONFIG = """
import sys

sys.path.insert(0, {tests!r})
from pathlib import Path
from tiny_tagger import tiny_config

def get_config():
    return tiny_config(Path({corpus!r}), tagger__steps=2)
"""


@pytest.mark.slow
def test_realm_train_takes_a_tagger_s_config(corpus, tmp_path, capsys):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(tests=str(Path(__file__).parent), corpus=str(corpus)))
    command = ["train", f"--config={path}", f"--workdir={tmp_path / 'run'}"]
    assert cli.main([*command, "--controls"]) == 2
    assert "--controls: a tagger has none" in capsys.readouterr().err
    assert cli.main([*command, "--config.realm.steps=3"]) == 2
    assert "realm.steps: there is no such key" in capsys.readouterr().err
    assert cli.main([*command, "--config.tagger.batch_size=8"]) == 0
    assert read_json(tmp_path / "run" / "results.json")["dev"]["names"] == 20


# --- a trained tagger -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tagger(trained_tagger) -> TextTagger:
    return open_tagger(trained_tagger, jax.devices()[:1])


def names_of(tagger: TextTagger, texts: list[str]) -> list[list[Span]]:
    """Names without dates."""
    return tagger.windows(tagger.params, texts)


TEXT = "Ada Dahl was born in Bergen in 1843. In Moss the house of Boris Falk stands."


def test_a_trained_tagger_is_a_finder_by_its_folder(trained_tagger, tagger):
    found = finder_called(f"tagger:{trained_tagger}")(TEXT)
    told = [(TEXT[span.start : span.end], span.kind) for span in found]
    assert ("1843", "date") in told and ("Bergen", "LOC") in told and ("Ada Dahl", "PER") in told
    assert found == sorted(found) and all(0 < span.score <= 1 for span in found)
    assert [(span.start, span.end) for span in found] == [(span.start, span.end) for span in tagger(TEXT)]
    assert tagger("") == [] and tagger(" \n ") == [] and tagger.kinds == ("LOC", "PER", DATE)


def test_a_text_is_tagged_the_same_in_any_company_and_on_any_devices(trained_tagger, tagger):
    """Batches, their padding and the number of devices change nothing but the last bits of scores."""
    texts = [TEXT, "", "In Moss the house of Ada Falk stands.", TEXT + " " + TEXT, "He slept.", "Bergen"]
    together = names_of(tagger, texts)
    spread = names_of(open_tagger(trained_tagger, jax.devices(), batch_size=1), texts)
    for text, one, other in zip(texts, together, spread, strict=True):
        for found in (names_of(tagger, [text])[0], other):
            assert [span[:3] for span in found] == [span[:3] for span in one]
            np.testing.assert_allclose([span.score for span in found], [span.score for span in one], rtol=1e-4)


def test_long_texts_go_through_in_windows_and_little_is_padding(trained_tagger):
    fresh = open_tagger(trained_tagger, jax.devices()[:1], batch_size=4)
    names = names_of(fresh, [" ".join([TEXT] * 40)])[0]
    assert len(names) == 40 * len(names_of(fresh, [TEXT])[0])
    assert 0 < fresh.windows.effort.padding < 0.5


def test_dates_win_over_names():
    text = "The 1998 FIFA World Cup, the Summer of 1969 and 1843 Paris"
    dates = find_dates(text)
    assert [text[date.start : date.end] for date in dates] == ["1998", "1969", "1843"]

    def name(part: str) -> Span:
        return Span(text.index(part), text.index(part) + len(part), "MISC", 0.5)

    found = with_dates(text, [name("1998 FIFA World Cup"), name("Summer of 1969"), name("Paris")], dates)
    assert [text[span.start : span.end] for span in found] == [
        "1998", "FIFA World Cup", "Summer", "1969", "1843", "Paris",
    ]  # fmt: skip
    assert [span.kind for span in found] == [DATE, "MISC", "MISC", DATE, DATE, "MISC"]


@pytest.mark.parametrize(
    "file, change, says",
    [
        ("kinds.json", lambda text: '["PER", "LOC"]', "kinds.json is not what it was trained with"),
        ("kinds.json", lambda text: '["LOC"]', "kinds.json is not what it was trained with"),
        ("kinds.json", lambda text: '["LOC", 3]', "kinds.json is not a list of kinds"),
        ("kinds.json", lambda text: "5", "kinds.json is not a list of kinds"),
        ("tokenizer/vocab.txt", lambda text: text + "zz\n", "tokenizer is not what it was trained with"),
        ("config.json", lambda text: text.replace('"heads": 2', '"heads": 4'), "config.json is not what it was"),
        ("config.json", lambda text: text.replace('"width": 32', '"width": 64'), "config.json is not what it was"),
        ("config.json", lambda text: json.dumps(json.loads(text) | {"model": 3}), "config.json of the run is damaged"),
        ("config.json", lambda text: json.dumps(json.loads(text) | {"foo": 3}), "config.foo: no such key"),
        ("config.json", lambda text: "[]", "config.json there is not the config of a run"),
        ("data.json", lambda text: "[]", "tokenizer is not what it was trained with"),
    ],
)
def test_a_tagger_whose_folder_was_changed_is_refused_before_it_is_loaded(trained_tagger, tmp_path, file, change, says):
    folder = tmp_path / "run"
    shutil.copytree(trained_tagger, folder)
    shutil.rmtree(folder / "tagger")
    path = folder / file
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    with pytest.raises(UserError, match=says):
        open_tagger(folder, jax.devices()[:1])


# --- passages ---------------------------------------------------------------------------------------------------------


ARTICLES = [Article(f"a{number}", f"Town {number}", f"{TEXT} The {number + 1900} fair.") for number in range(12)]
LONG_WORD = Article(
    "long", "A word", "bdnhwr" * 15 + " Ada Dahl was born in Bergen."
)  # cut within, so its pieces differ


def as_built(store: PassageStore) -> list[list[tuple[int, int, str]]]:
    return [[(a, b, store.span_kinds[kind]) for a, b, kind in store.spans(row).tolist()] for row in range(len(store))]


def as_tagged(found: PassageSpans) -> list[list[tuple[int, int, str]]]:
    ends = np.cumsum(found.counts).tolist()
    rows = [found.values[end - count : end].tolist() for end, count in zip(ends, found.counts.tolist(), strict=True)]
    return [[(a, b, found.kinds[kind]) for a, b, kind in row] for row in rows]


@pytest.mark.parametrize("own_vocabulary", [True, False])
def test_passages_are_tagged_as_their_builder_would_with_the_same_finder(
    trained_tagger, tagger, tmp_path, own_vocabulary
):
    """Whether or not tagger and store cut words alike."""
    words = tagger.windows.cutter.tokenizer if own_vocabulary else WordPiece.train([TEXT, "Towns are fair"], 120)
    build_store(ARTICLES, words, tmp_path / "store", 40, f"tagger:{trained_tagger}")
    store = PassageStore.open(tmp_path / "store")
    found = tag_passages(tagger, store, range(len(store)), words, at_a_time=5)
    assert as_tagged(found) == as_built(store) and found.unread == 0
    some = tag_passages(tagger, store, range(3, 6), words)
    assert as_tagged(some) == as_built(store)[3:6]


def test_a_passage_that_was_cut_within_a_word_has_no_spans(tagger, tmp_path):
    words = WordPiece.train([TEXT], 120)
    build_store([*ARTICLES[:1], LONG_WORD], words, tmp_path / "store", 30)
    store = PassageStore.open(tmp_path / "store")
    found = tag_passages(tagger, store, range(len(store)), words)
    text = [store.text(row) for row in range(len(store))]
    cut = [row for row in range(len(store)) if words.encode(text[row]).ids != store.body_tokens(row).tolist()]
    assert found.unread == len(cut) > 0
    assert all(found.counts[row] == 0 for row in cut)
