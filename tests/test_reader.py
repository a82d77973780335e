"""A reader that differs from the retriever: in the sizes of its BERT, and in its tokenizer."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from runs import Cut, assert_same, cut_at, open_inline, records
from tiny_run import PEOPLE, open_config, prepare_people, question, tiny_config
from unigram import READER_SIZE, prepare_for_two

from realm_jax.assemble import make_run
from realm_jax.cli import main as cli
from realm_jax.cli.build_index import for_embedding
from realm_jax.config import validate
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.forward.question import read_question
from realm_jax.run import put_batch
from realm_jax.storage import read_json
from realm_jax.tasks import make_task
from realm_jax.tasks.realm import RealmTask
from realm_jax.train.loop import train_task
from realm_jax.train.recipe import open_run, starting_params, train
from realm_jax.train.restore import restore_params

WIDE = "layers=2,width=24,heads=3,feed_forward=40"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_people(tmp_path_factory.mktemp("people"), house="of {}")


def config_of(data, tasks="qa", **changes):
    """A config of the tiny run; changes: dotted keys, with two underscores for the dot."""
    config = tiny_config(data)
    config.tasks = tasks
    for task in tasks.split(","):
        config[task].update({"steps": 2, "batch_size": 8})
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return config


def trained(config, workdir):
    run = open_run(config, workdir)
    train(run)
    return run


def ask(workdir, capsys):
    capsys.readouterr()
    assert cli.main(["ask", f"--workdir={workdir}", "--json", question(3)["question"]]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["answer"] in answer["passage"]["text"]
    return answer


def test_values_that_say_nothing_are_refused():
    for value in ("width", "width=0", "depth=3", "width=3,width=4", "tokenizer=its"):
        with pytest.raises(UserError, match="config.model.reader: must be '' or like"):
            validate(config_of("data", model__reader=value))
    with pytest.raises(UserError, match="model.reader: the reader's 2 heads must divide its width of 9"):
        validate(config_of("data", model__reader="width=9"))


@pytest.fixture(scope="module")
def wide(data, tmp_path_factory):
    return trained(config_of(data, "mlm,ict,realm,qa", model__reader=WIDE), tmp_path_factory.mktemp("wide"))


def test_a_reader_of_other_sizes_is_trained_and_asked(wide, capsys):
    shapes = jax.tree.map(np.shape, restore_params(wide, "qa"))
    assert shapes["reader"]["bert"]["words"]["embedding"][1] == 24 and "layer_1" in shapes["reader"]["bert"]
    assert shapes["query_embedder"]["bert"]["words"]["embedding"][1] == 16
    assert wide.model.reader.bert.heads == 3 and wide.model.bert.heads == 2
    ask(wide.workdir, capsys)


def test_sizes_follow_from_where_the_reader_comes_from(wide, data, tmp_path, capsys):
    """They are recorded, so that the run goes on without its source, or without its name."""
    run = trained(config_of(data, reader_from=str(wide.workdir)), tmp_path / "run")
    assert run.config.model.reader == WIDE == read_json(tmp_path / "run" / "config.json")["model"]["reader"]
    assert open_run(config_of(data), tmp_path / "run").config.model.reader == WIDE
    with pytest.raises(UserError, match="config.model.reader is 'layers=2', but the run in .* has"):
        open_run(config_of(data, model__reader="layers=2"), tmp_path / "run")
    begun = open_run(config_of(data, reader_from=str(wide.workdir)), tmp_path / "begun")
    jax.tree.map(np.testing.assert_array_equal, starting_params(begun)["reader"], restore_params(wide, "qa")["reader"])
    ask(run.workdir, capsys)


def test_exported_weights_have_both_sizes(wide, data, tmp_path):
    assert cli.main(["weights", "export", f"--workdir={wide.workdir}", f"--output={tmp_path / 'weights'}"]) == 0
    config = config_of(data, init_from=str(tmp_path / "weights"))
    with pytest.raises(
        UserError, match=r"its reader differs from its embedders \(layers=2,.*\); set config.reader_from"
    ):
        open_run(config, tmp_path / "run")
    config.reader_from = config.init_from
    run = open_run(config, tmp_path / "run")
    assert run.config.model.reader == WIDE
    jax.tree.map(np.testing.assert_array_equal, starting_params(run), restore_params(wide, "qa"))


def test_a_run_with_one_size_leaves_another_reader_fresh(wide, data, tmp_path):
    """`init_from` is about the embedders alone where the reader has sizes of its own and the source has not."""
    plain = trained(config_of(data), tmp_path / "plain")
    run = open_run(config_of(data, init_from=str(plain.workdir), model__reader=WIDE), tmp_path / "run")
    found, theirs = starting_params(run), restore_params(plain, "qa")
    jax.tree.map(np.testing.assert_array_equal, found["query_embedder"], theirs["query_embedder"])
    jax.tree.map(np.testing.assert_array_equal, found["reader"], run.initial_params()["reader"])


# --- A tokenizer of its own -------------------------------------------------------------------------------------------

OWN = "width=24,heads=3,tokenizer=own"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return prepare_for_two(tmp_path_factory.mktemp("both"))


def letters(tokens, places):
    """Characters of some tokens."""
    return {character for place in places for character in range(tokens.starts[place], tokens.ends[place])}


@pytest.mark.parametrize("masking", ["salient", "random_span", "uniform"])
def test_the_retriever_s_query_hides_the_same_characters(both, tmp_path, masking):
    run = open_config(config_of(both, "realm", model__reader=OWN, realm__masking=masking), tmp_path)
    tokenizer = run.sources.for_reader.tokenizer
    examples, own = RealmTask(run).examples({}, None), run.sources.tokenizer
    for number in range(examples.total):
        example = examples.make(number, np.random.default_rng(number))
        row, read = int(example["own_row"]), example["reader_query"][1 : example["reader_query_length"] - 1]
        sentence = example["sentence"][: example["sentence_length"]]
        body, sentences = run.sources.passages.body_tokens(row), run.sources.passages.sentences(row)
        first = next(place for place in sentences if body[slice(*place)].tolist() == sentence.tolist())
        text, offsets = run.sources.passages.text(row), own.offsets_of(run.sources.passages.text(row), body)
        whole = text[offsets[first[0], 0] : offsets[first[1] - 1, 1]]
        hidden, searched = own.tokens([whole])[0], example["query"][1 : example["query_length"] - 1]
        tokens, places = tokenizer.tokens([whole])[0], example["positions"][example["weights"] > 0] - 1
        assert tokens.ids[places].tolist() == example["targets"][: len(places)].tolist()
        answers = letters(tokens, places)
        seen = letters(hidden, np.flatnonzero(searched != own.mask_id))
        assert seen and not answers & seen
        if masking == "salient":
            assert (read == tokenizer.mask_id).sum() == len(places)
            assert seen == {c for c in range(len(whole)) if not whole[c].isspace()} - answers


def test_words_that_are_left_are_looked_for_in_the_same_rows(both, tmp_path):
    run = open_config(config_of(both, "realm", model__reader=OWN, realm__search="hybrid"), tmp_path)
    example, task = RealmTask(run).examples({}, None).make(0, np.random.default_rng(0)), RealmTask(run)
    assert {name: np.shape(value) for name, value in example.items()} == {
        name: shape for name, (shape, _) in task.array_shapes().items()
    }
    assert int(example["own_row"]) not in example["bm25_rows"] and (example["bm25_rows"] >= 0).any()


def test_a_builder_needs_the_retriever_s_tokens_alone(both, tmp_path):
    config = for_embedding(config_of(both, "realm", model__reader=OWN), 1)
    run = make_run(config, tmp_path, open_sources(both), jax.devices()[:1])
    assert run.reader_documents is None and run.corpus.ids.shape == (len(PEOPLE), 48)


@pytest.fixture(scope="module")
def own(both, tmp_path_factory):
    return trained(config_of(both, "mlm,ict,realm,qa", model__reader=OWN), tmp_path_factory.mktemp("own"))


def test_every_task_learns_and_answers_with_two_tokenizers(own, both, tmp_path, capsys):
    assert own.model.bert.vocabulary_size == own.sources.tokenizer.size != READER_SIZE
    assert own.model.reader.bert.vocabulary_size == READER_SIZE
    assert read_json(own.workdir / "data.json")["reader"] == own.sources.reader.tokenizer.fingerprint
    ask(own.workdir, capsys)
    workdir = f"--workdir={own.workdir}"
    for what in ("[Ada] Almgren was born (1800).", "Ada Almgren was born (___).", question(2)["question"]):
        assert cli.main(["inspect", "text", what, workdir, "--json"]) == 0
        seen = json.loads(capsys.readouterr().out)
        assert seen["answer"] and 0 <= seen["probability"] <= 1
    assert cli.main(["predict", workdir, f"--output={tmp_path / 'predictions.jsonl'}"]) == 0
    assert len((tmp_path / "predictions.jsonl").read_text().splitlines()) == 8


def test_an_answer_is_found_in_the_reader_s_tokens(own):
    """Behind a parenthesis a year has another piece than by itself, and other pieces than for the retriever."""
    batch, index = {}, own.index(own.embed(own.initial_params()))
    examples = make_task("qa", own).examples({}, None)
    made = [examples.make(number, np.random.default_rng(0)) for number in range(8)]
    batch = put_batch(own.mesh, {name: np.stack([one[name] for one in made]) for name in made[0]})
    context = dataclasses.replace(own.context, qa_passages=len(PEOPLE))
    read = read_question(context, own.initial_params(), batch, index, None, len(PEOPLE), len(PEOPLE))
    rows, correct = np.asarray(read.rows), np.asarray(read.correct)
    for number in range(8):
        right = rows[number][correct[number].any(axis=(1, 2))]
        assert [own.sources.passages.document_id(row) for row in right] == [f"p{number}"]
    shapes = {name: (value.shape[1:], value.dtype) for name, value in batch.items()}
    wanted = make_task("qa", own).array_shapes()
    assert shapes == {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in wanted.items()}


def test_weights_name_the_reader_s_tokenizer(own, both, tmp_path):
    """`reader_from` alone says sizes and tokens, of weights and of a run; `init_from` then leaves the reader out."""
    assert cli.main(["weights", "export", f"--workdir={own.workdir}", f"--output={tmp_path / 'weights'}"]) == 0
    for source in (tmp_path / "weights", own.workdir):
        config = config_of(both, init_from=str(source), reader_from=str(source))
        run = open_run(config, tmp_path / f"run-{source.name}")
        assert run.config.model.reader == OWN
        jax.tree.map(np.testing.assert_array_equal, starting_params(run), restore_params(own, "qa"))


def test_a_reader_with_other_tokens_is_refused_where_they_are_not_prepared(own, data, tmp_path):
    with pytest.raises(UserError, match="config.reader_from=.*: its tokenizer is another .* --reader-vocab=` and its"):
        open_run(config_of(data, reader_from=str(own.workdir)), tmp_path / "run")


@pytest.mark.parametrize("task", [pytest.param("realm", marks=pytest.mark.slow), "qa"])
def test_a_run_with_two_tokenizers_that_is_cut_off_ends_as_one_that_never_was(both, tmp_path, monkeypatch, task):
    changes = {"tasks": task, "qa__steps": 6, "checkpoint__every": 2, "model__reader": OWN, "qa__learning_rate": 1e-3}
    straight, cut = (open_inline(both, tmp_path / name, **changes) for name in ("straight", "cut"))
    once = train_task(straight, task, straight.initial_params())
    with monkeypatch.context() as patched:
        cut_at(patched, 3)
        with pytest.raises(Cut):
            train_task(cut, task, cut.initial_params())
    assert_same(train_task(cut, task, cut.initial_params()), once)
    assert records(cut, "metrics") == records(straight, "metrics")


def test_positive_passages_and_closed_books_are_read_in_the_reader_s_tokens(both, tmp_path, capsys):
    run = trained(config_of(both, model__reader=OWN, qa__objective="positive"), tmp_path / "positive")
    assert read_json(run.workdir / "qa" / "positives.json")["rows"] == [*range(8)]
    ask(run.workdir, capsys)
    run = trained(config_of(both, "closed_book", model__reader=OWN), tmp_path / "closed")
    assert cli.main(["predict", f"--workdir={run.workdir}", f"--output={tmp_path / 'predictions.jsonl'}"]) == 0
