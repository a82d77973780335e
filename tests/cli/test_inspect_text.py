"""`realm inspect text`: its numbers are those of the model's parts, and they add up."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console
from tiny_run import open_config, tiny_config

from realm_jax.cli import inspect as job
from realm_jax.cli import main as cli
from realm_jax.data.examples import query_arrays
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import UserError
from realm_jax.inference.answers import answers
from realm_jax.inference.inspection import Masked, inspect_question, inspect_sentence, masked_text, parse
from realm_jax.models.inputs import PassageBatch, flatten_passages, null_passages, reader_inputs
from realm_jax.train.trained_run import TrainedRun, open_run_for_inference, restore

SENTENCE = "Ada Brandt was born in [1801]."
BORN = "When was Ada Almgren born?"


@pytest.fixture(scope="module")
def trained(trained_run):
    return restore(trained_run, "ict", for_answers=False)


@pytest.fixture(scope="module")
def seen(trained):
    return inspected(trained)


def inspected(trained, text=SENTENCE, pieces=1, bert=None):
    return inspect_sentence(trained, text, parse(text), pieces, bert)


def rows_of(trained, seen) -> list[int | None]:
    """The rows of the passages, None for the null document."""
    store = trained.run.sources.passages
    return [None if one["id"] is None else store.rows_of(one["id"])[one["part"]] for one in seen["passages"]]


def query_vector(run, params, example):
    return np.asarray(run.model.embed_queries(params, example["query"][None], example["query_length"][None])[0], float)


def check_sums(seen, null: bool = True):
    """Priors and posteriors are distributions, the marginal is their sum, and r(z) moves probability about."""
    prior, likelihood, posterior = (
        np.array([one[name] for one in seen["passages"]]) for name in ("prior", "likelihood", "posterior")
    )
    assert prior.sum() == pytest.approx(1, abs=1e-5) and posterior.sum() == pytest.approx(1, abs=1e-5)
    assert seen["probability"] == pytest.approx(float((prior * likelihood).sum()))
    np.testing.assert_allclose(posterior, prior * likelihood / (prior * likelihood).sum(), rtol=1e-4)
    assert sum(one["gain"] for one in seen["passages"]) == pytest.approx(0, abs=1e-5)
    assert sum(one["id"] is None for one in seen["passages"]) == null
    assert sorted(prior, reverse=True) == prior.tolist()


def test_the_numbers_of_a_sentence_add_up(seen):
    check_sums(seen)
    assert seen["answer"] == "1801" and 0 < seen["held"] < 1 and not seen["others"]


def test_likelihoods_are_what_the_reader_says_beside_each_passage(trained, seen):
    run = trained.run
    example = masked_text(run, parse(SENTENCE), 1)
    count = int(example["weights"].sum())
    for row, one in zip(rows_of(trained, seen), seen["passages"], strict=True):
        if row is None:
            documents = null_passages(1, (run.context.cls_id, run.context.sep_id))
        else:
            documents = PassageBatch(*(part[row][None] for part in trained.index.documents))
        joint = reader_inputs(
            example["query"][None], example["query_length"][None], PassageBatch(*(part[:, None] for part in documents))
        )
        words = run.model.reader.read_words(trained.params, flatten_passages(joint), example["positions"][None])[0]
        log_p = [words[place, example["targets"][place]] for place in range(count)]
        assert one["likelihood"] == pytest.approx(float(np.exp(np.sum(log_p))), rel=1e-3)
    (alone,) = [one["likelihood"] for one in seen["passages"] if one["id"] is None]
    again = inspected(trained, bert=(run, trained.params))["bert"]
    assert seen["alone"] == alone == pytest.approx(again, rel=1e-4)


def test_the_share_is_of_the_null_document_and_the_whole_corpus(trained, seen):
    run = trained.run
    query = query_vector(run, trained.params, masked_text(run, parse(SENTENCE), 1))
    empty = null_passages(1, (run.context.cls_id, run.context.sep_id))
    nothing = np.exp(float(query @ run.model.embed_documents(trained.params, empty)[0]))
    weights = np.exp(np.asarray(trained.index.vectors, np.float64)[: run.context.rows] @ query)
    held = nothing + sum(weights[row] for row in rows_of(trained, seen) if row is not None)
    assert seen["held"] == pytest.approx(held / (nothing + weights.sum()), rel=1e-3)


@pytest.mark.parametrize("marginal", ["example", pytest.param("span", marks=pytest.mark.slow)])
def test_where_the_reader_points_the_retriever_is_asked_without_the_blank(people, tmp_path, marginal):
    """Ratios of p(z|x) follow from the vector of what is asked."""
    config = tiny_config(people)
    config.realm.marginal = marginal
    run = open_config(config, tmp_path)
    params = run.initial_params()
    trained = TrainedRun(run, "realm", 0, params, run.index(run.embed(params)))
    seen = inspected(trained)
    check_sums(seen)
    tokenizer = run.sources.tokenizer
    before, after = (tokenizer.encode(part).ids for part in SENTENCE.split("[1801]"))
    blank = [tokenizer.mask_id] * len(tokenizer.encode_behind("in ", "1801")) if marginal == "example" else []
    asked = query_arrays(np.array([*before, *blank, *after]), run.lengths.query, tokenizer)
    scores = np.asarray(trained.index.vectors, np.float64)[: run.context.rows] @ query_vector(run, params, asked)
    (first, p), (second, q) = [
        (row, one["prior"])
        for row, one in zip(rows_of(trained, seen), seen["passages"], strict=True)
        if row is not None
    ][:2]
    assert np.log(p / q) == pytest.approx(scores[first] - scores[second], abs=1e-3)


def test_a_sentence_that_stands_in_a_passage_does_not_retrieve_it(trained, seen):
    assert "p1" not in [one["id"] for one in seen["passages"]]


def test_an_unknown_blank_is_filled_with_the_likeliest_answer(trained):
    seen = inspected(trained, "Ada Brandt was born in ____.", 2)
    check_sums(seen)
    probabilities = [seen["probability"], *(one["probability"] for one in seen["others"])]
    assert probabilities == sorted(probabilities, reverse=True)
    assert len({seen["answer"], *(one["answer"] for one in seen["others"])}) == 1 + len(seen["others"]) > 1


def with_bias(params, tokenizer, pieces: dict[str, float]):
    """The parameters with some pieces made likelier in every place."""
    ids = {tokenizer.pieces([number])[0]: number for number in range(tokenizer.size)}

    def changed(path, leaf):
        if "mlm_bias" not in jax.tree_util.keystr(path):
            return leaf
        for piece, more in pieces.items():
            leaf = leaf.at[ids[piece]].add(more)
        return leaf

    return jax.tree_util.tree_map_with_path(changed, params)


def test_what_is_no_text_fills_no_blank_and_others_are_read_beside_the_very_same_pieces(trained):
    """The likeliest pieces of all are special ones, then the end of a word, which read as text is other pieces."""
    run, tokenizer = trained.run, trained.run.sources.tokenizer
    params = with_bias(trained.params, tokenizer, {"[PAD]": 90, "[UNK]": 80, "##b": 60})
    changed = dataclasses.replace(trained, params=params)
    seen = inspected(changed, "Ada Brandt was born in ____.", bert=(run, params))
    assert seen["answer"] == tokenizer.decode([tokenizer.pieces(range(tokenizer.size)).index("##b")])
    assert not seen["others"] and tokenizer.pieces(tokenizer.encode(seen["answer"]).ids) != ["##b"]
    assert seen["bert"] == pytest.approx(seen["alone"], rel=1e-4)


def test_the_numbers_of_a_question_add_up(trained_run):
    trained = restore(trained_run)
    read = inspect_question(trained, BORN, "1800")["passages"]
    answer = str(1800 + int(read[1]["id"][1:]))  # the year in the second passage
    seen = inspect_question(trained, BORN, answer)
    assert len(seen["passages"]) == trained.run.config.qa.passages and seen["alone"] is None
    check_sums(seen, null=False)
    assert [one["id"] for one in seen["passages"]] == [one["id"] for one in read]
    assert all((one["likelihood"] > 0) == (answer in one["text"]) for one in seen["passages"])


@pytest.mark.parametrize("search", ["bm25", "hybrid"])
def test_a_question_is_explained_with_the_passages_that_it_is_answered_from(trained_run, search):
    trained = restore(trained_run, search=search)
    (answer,) = answers(trained, [BORN])
    seen = inspect_question(trained, BORN)
    by_rank = sorted((one for one in answer["candidates"]), key=lambda one: -one["probability"])
    assert [one["id"] for one in seen["passages"]] == [one["id"] for one in by_rank]
    priors = [one["probability"] for one in by_rank]
    assert [one["prior"] for one in seen["passages"]] == pytest.approx(priors, rel=1e-4)


def test_an_answer_that_no_passage_holds_has_no_posterior(trained_run):
    seen = inspect_question(restore(trained_run), BORN, "dahl ada")
    assert seen["probability"] == 0 and all(one["likelihood"] == 0 for one in seen["passages"])
    assert all(one["posterior"] is None and one["gain"] is None for one in seen["passages"])
    assert sum(one["prior"] for one in seen["passages"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("3 is a [Fermat] prime", Masked("3 is a ", "Fermat", " prime")),
        ("built in ____.", Masked("built in ", None, ".")),
        ("who_built it?", None),
    ],
)
def test_blanks_are_found(text, wanted):
    assert parse(text) == wanted


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[a] and [b]", r"2 blanks, '\[a\]' and '\[b\]'"),
        ("a [ ] b", "holds no token"),
        ("long " * 40 + "[word]", "tokens, but this run reads at most 14"),
        (
            "[one two three four five six seven eight nine ten eleven twelve]",
            "tokens, but this run predicts at most",
        ),
    ],
)
def test_what_cannot_be_masked_is_told(trained_run, text, told):
    with pytest.raises(UserError, match=told):
        masked_text(trained_run, parse(text), 1)


def linked(path):
    """A link to a file that is there already: it is the file that is written."""
    target = path.with_name(f"target-of-{path.name}")
    target.write_text("old")
    path.symlink_to(target)
    return path


def test_the_command_shows_json_and_pages(trained_run, tmp_path, capsys):
    workdir = f"--workdir={trained_run.workdir}"
    page = linked(tmp_path / "page.html")
    command = ["inspect", "text", SENTENCE, workdir, "--task=ict", f"--bert={trained_run.workdir}", f"--html={page}"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "(a) BERT" in out and "(c) marginal" in out and "p(z|x,y)" in out
    assert "r(z)" in page.read_text() and "the empty passage" in page.read_text() and page.is_symlink()
    assert cli.main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["answer"] == "1801" and 0 < told["bert"] < 1
    assert sum(one["prior"] for one in told["passages"]) == pytest.approx(1, abs=1e-5)
    asked = ["inspect", "text", "When was Ada Almgren born?", workdir]
    assert cli.main([*asked, "--answer=1800", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "qa"
    assert cli.main([*asked, f"--answer={'1800 ' * 20}"]) == 2
    assert "has 20 tokens, but this run extracts at most " in capsys.readouterr().err
    assert cli.main([*asked, "--answer=\N{ZERO WIDTH SPACE}"]) == 2
    assert "has no tokens; give a word that a passage may hold" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["who?", "--workdir=x", "--bert=y"], "--bert: needs a sentence with a blank"),
        (["a [b]", "--workdir=x", "--answer=y"], "--answer: applies to questions only"),
        (["a [b]", "--workdir=x", "--pieces=2"], "--pieces: needs a sentence with an empty blank"),
        (["a [b]", "--workdir=x", "--html=no/x.html"], "--html=no/x.html: is not a file in an existing folder"),
        (["x\udcff [b]", "--workdir=x"], "the text: is not valid UTF-8; type or save it as UTF-8 text"),
        (["who?", "--workdir=x", "--answer=\udcff"], "--answer: is not valid UTF-8"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(arguments, told, capsys):
    assert cli.main(["inspect", "text", *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.fixture
def unrestored(monkeypatch):
    """Nothing may be restored or embedded."""

    def fail(*_, **__):
        raise AssertionError("restored")

    monkeypatch.setattr(job, "restore", fail)


def test_the_run_beside_is_checked_before_anything_is_restored(trained_run, unrestored, tmp_path, capsys):
    command = ["inspect", "text", SENTENCE, f"--workdir={trained_run.workdir}"]
    assert cli.main([*command, f"--bert={tmp_path}"]) == 2
    assert f"--bert={tmp_path}: no run there" in capsys.readouterr().err
    (tmp_path / "config.json").write_bytes((trained_run.workdir / "config.json").read_bytes())
    assert cli.main([*command, f"--bert={tmp_path}"]) == 2
    assert f"--bert: {tmp_path}: has no exported model yet" in capsys.readouterr().err


def test_the_run_beside_has_the_same_vocabulary(trained_run, unrestored, monkeypatch, capsys):
    own = trained_run.sources.tokenizer
    cased = WordPiece(own.pieces(range(own.size)), lower_case=False)
    other = dataclasses.replace(trained_run, sources=dataclasses.replace(trained_run.sources, tokenizer=cased))
    runs = [trained_run, other]
    monkeypatch.setattr(job, "open_run_for_inference", lambda *_: runs.pop(0))
    workdir = trained_run.workdir
    assert cli.main(["inspect", "text", SENTENCE, f"--workdir={workdir}", f"--bert={workdir}"]) == 2
    assert f"--bert={workdir}: has another vocabulary than --workdir={workdir}" in capsys.readouterr().err


# ---- what is shown


def told(**passage):
    """What is shown of a sentence with one passage."""
    one = {"id": "p", "part": 0, "title": "Title", "text": "word " * 60, "prior": 1.0, "likelihood": 1.1e-14}
    one |= {"posterior": 1.0, "gain": 0.0} | passage
    numbers = {"probability": 1.1e-14, "alone": 1.1e-14, "held": 0.5}
    return {"text": "a [b]", "task": "realm", "step": 1, "answer": "b", "others": [], "passages": [one]} | numbers


def shown(what, width=80, terminal=False) -> list[str]:
    to = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, highlight=False)
    job.show(what, to)
    return to.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 180])
@pytest.mark.parametrize("terminal", [True, False])
def test_numbers_are_whole_whatever_the_width(width, terminal):
    lines = shown(told(), width, terminal)
    assert len(lines) == 7 and all("1.1 × 10⁻¹⁴  " in line for line in (lines[1], lines[2], lines[3], lines[6]))
    assert lines[-1].startswith(" 1.000  1.1 × 10⁻¹⁴     1.000  +0.000  Title (p, part 0): word word")
    assert (lines[-1].endswith("…") and len(lines[-1]) == width) if terminal else lines[-1].count("word") == 32


def test_passages_and_titles_cannot_steer_the_terminal_or_use_its_markup():
    lines = shown(told(title="[x] :smile: \x1b]0;t\x07", text="a \\[/b] c \x1b[31mred\x9b"))
    assert lines[-1].endswith("[x] :smile:  ]0;t  (p, part 0): a \\[/b] c  [31mred ")
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for line in lines for character in line)


def test_an_answer_that_stands_nowhere_is_said_to():
    nowhere = told(likelihood=0.0, posterior=None, gain=None) | {"probability": 0.0, "alone": None}
    assert any("no passage that was read has the answer" in line for line in shown(nowhere))
    assert shown(nowhere)[-1].split()[:4] == ["1.000", "0.000", "–", "–"]
    assert "no passage that was read has the answer" in job.page(nowhere)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["text", "who?"], "the following arguments are required: --workdir"),
        (["text", "who?", "--workdir=x", "--rows=3"], "unrecognized arguments: --rows=3"),
        (["data", "x", "--pieces=3"], "unrecognized arguments: --pieces=3"),
        (["data", "x", "--html="], "argument --html: is empty; give a value or omit the flag"),
        (["text", "who?", "--workdir=x", "--answer="], "argument --answer: is empty; give a value or omit the flag"),
    ],
)
def test_each_kind_has_flags_of_its_own(arguments, told, capsys):
    with pytest.raises(SystemExit):
        cli.main(["inspect", *arguments])
    assert told in capsys.readouterr().err


def test_the_devices_do_not_matter(trained, seen):
    """The command opens a run on all devices that are here; what it finds is what one finds."""
    other = restore(open_run_for_inference(trained.run.workdir), "ict", for_answers=False)
    assert other.run.mesh.size == jax.device_count()
    again = inspected(other)
    assert [one["id"] for one in again["passages"]] == [one["id"] for one in seen["passages"]]
    assert again["probability"] == pytest.approx(seen["probability"], rel=1e-4)
