"""`realm inspect text`: its numbers are those of the model's parts, and they add up."""

import json

import jax
import numpy as np
import pytest

from realm_jax import cli
from realm_jax.errors import UserError
from realm_jax.evaluation.inspection import (
    Masked,
    inspect_masked,
    inspect_question,
    masked_text,
    parse,
    read_alone,
)
from realm_jax.jobs.answering import restore
from realm_jax.models.inputs import Documents, join, null_documents
from realm_jax.models.realm import flatten_joint

SENTENCE = "Ada Brandt was born in [1801]."


@pytest.fixture(scope="module")
def trained(trained_run):
    return restore(trained_run, "ict", for_answers=False)


@pytest.fixture(scope="module")
def seen(trained):
    return inspect_masked(trained.run, trained.params, trained.index, parse(SENTENCE))


def check_sums(seen, null: bool = True):
    """Priors and posteriors are distributions, the marginal is their sum, and r(z) moves probability about."""
    prior, likelihood, posterior = (
        np.array([getattr(one, name) for one in seen.passages]) for name in ("prior", "likelihood", "posterior")
    )
    assert prior.sum() == pytest.approx(1, abs=1e-5) and posterior.sum() == pytest.approx(1, abs=1e-5)
    assert seen.probability == pytest.approx(float((prior * likelihood).sum()))
    np.testing.assert_allclose(posterior, prior * likelihood / (prior * likelihood).sum(), rtol=1e-4)
    assert sum(one.gain for one in seen.passages) == pytest.approx(0, abs=1e-5)
    assert sum(one.row is None for one in seen.passages) == null
    assert sorted(prior, reverse=True) == prior.tolist()


def test_the_numbers_of_a_sentence_add_up(seen):
    check_sums(seen)
    assert seen.answer == "1801" and 0 < seen.held < 1 and not seen.others


def test_likelihoods_are_what_the_reader_says_beside_each_passage(trained, seen):
    run = trained.run
    example = masked_text(parse(SENTENCE), 1, run.lengths, run.sources.wordpiece)
    count = int(example["weights"].sum())
    for one in seen.passages:
        if one.row is None:
            documents = null_documents(1, (run.setting.cls_id, run.setting.sep_id))
        else:
            documents = Documents(*(part[one.row][None] for part in trained.index.documents))
        joint = join(
            example["query"][None], example["query_length"][None], Documents(*(part[:, None] for part in documents))
        )
        words = run.model.read_words(trained.params, flatten_joint(joint), example["positions"][None])[0]
        log_p = [words[place, example["targets"][place]] for place in range(count)]
        assert one.likelihood == pytest.approx(float(np.exp(np.sum(log_p))), rel=1e-3)
    (alone,) = [one.likelihood for one in seen.passages if one.row is None]
    assert seen.alone == alone == pytest.approx(read_alone(run, trained.params, parse(SENTENCE)), rel=1e-4)


def test_the_share_is_of_the_null_document_and_the_whole_corpus(trained, seen):
    run = trained.run
    example = masked_text(parse(SENTENCE), 1, run.lengths, run.sources.wordpiece)
    query = run.model.embed_queries(trained.params, example["query"][None], example["query_length"][None])[0]
    null = run.model.embed_documents(
        trained.params, null_documents(1, (run.setting.cls_id, run.setting.sep_id))
    )[0]  # fmt: skip
    vectors = np.asarray(trained.index.vectors, np.float64)[: run.setting.rows]
    weights = np.exp(vectors @ np.asarray(query, np.float64))
    nothing = np.exp(float(query @ null))
    held = nothing + sum(weights[one.row] for one in seen.passages if one.row is not None)
    assert seen.held == pytest.approx(held / (nothing + weights.sum()), rel=1e-3)


def test_a_sentence_that_stands_in_a_passage_does_not_retrieve_it(trained):
    text = Masked("Ada Brandt was born in ", "1801", ".")
    rows = [one.row for one in inspect_masked(trained.run, trained.params, trained.index, text).passages]
    (own,) = trained.run.sources.passages.rows_of("p1")
    assert own not in rows


def test_an_unknown_blank_is_filled_with_the_likeliest_answer(trained):
    seen = inspect_masked(trained.run, trained.params, trained.index, parse("Ada Brandt was born in ____."), 2)
    check_sums(seen)
    probabilities = [seen.probability, *(p for _, p in seen.others)]
    assert probabilities == sorted(probabilities, reverse=True)
    assert len({seen.answer, *(answer for answer, _ in seen.others)}) == 1 + len(seen.others) > 1


def test_the_numbers_of_a_question_add_up(trained_run):
    trained = restore(trained_run)
    question, store = "When was Ada Almgren born?", trained.run.sources.passages
    read = inspect_question(trained.run, trained.params, trained.index, question, "1800").passages
    answer = str(1800 + int(store.document_id(read[1].row)[1:]))  # the year in the second passage
    seen = inspect_question(trained.run, trained.params, trained.index, question, answer)
    assert len(seen.passages) == trained.run.config.retrieval.qa_passages and seen.alone is None
    check_sums(seen, null=False)
    assert [one.row for one in seen.passages] == [one.row for one in read]
    assert all((one.likelihood > 0) == (answer in store.text(one.row)) for one in seen.passages)


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
        ("a [ ] b", "holds no word piece"),
        ("long " * 40 + "[word]", "word pieces, but this run reads at most 14"),
        (
            "[one two three four five six seven eight nine ten eleven twelve]",
            "word pieces, but this run predicts at most",
        ),
    ],
)
def test_what_cannot_be_masked_is_told(trained_run, text, told):
    with pytest.raises(UserError, match=told):
        masked_text(parse(text), 1, trained_run.lengths, trained_run.sources.wordpiece)


def test_the_command_shows_json_pages_and_alignments(trained_run, tmp_path, capsys):
    workdir = f"--workdir={trained_run.workdir}"
    page = tmp_path / "page.html"
    command = ["inspect", "text", SENTENCE, workdir, "--task=ict", f"--bert={trained_run.workdir}", f"--html={page}"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "(a) BERT" in out and "(c) marginal" in out and "p(z|x,y)" in out
    assert "r(z)" in page.read_text() and "the empty passage" in page.read_text()
    assert cli.main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["answer"] == "1801" and 0 < told["bert"] < 1
    assert sum(one["prior"] for one in told["passages"]) == pytest.approx(1, abs=1e-5)
    assert cli.main(["inspect", "text", "When was Ada Almgren born?", workdir, "--answer=1800", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "qa"
    file = tmp_path / "alignment.jsonl"
    long = "Clara " * 30 + "was born in 1809."
    text = f"Ada Almgren was born in 1800. {long} Boris Dahl was born in 1807."
    assert cli.main(["inspect", "text", text, workdir, "--task=ict", f"--alignment={file}"]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {line["text"][slice(*line["span"])] for line in lines} >= {"1800", "1807"}
    for line in lines:
        posteriors = [one["posterior"] for one in line["passages"]]
        assert posteriors == sorted(posteriors, reverse=True) and sum(posteriors) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["who?", "--workdir=x", "--bert=y"], "--bert: goes with a sentence that has a blank"),
        (["a [b]", "--workdir=x", "--answer=y"], "--answer: goes with a question"),
        (["a [b]", "--workdir=x", "--pieces=2"], "--pieces: goes with a blank that is to be filled"),
        (["a [b]", "--workdir=x", "--spans=rules"], "--spans: goes with --alignment"),
        (["a b.", "--workdir=x", "--alignment=y", "--json"], "--json: does nothing with --alignment"),
        (["a [b]", "--workdir=x", "--html=no/x.html"], "--html=no/x.html: name a file in a folder that exists"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(arguments, told, capsys):
    assert cli.main(["inspect", "text", *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["text", "who?"], "the following arguments are required: --workdir"),
        (["text", "who?", "--workdir=x", "--rows=3"], "unrecognized arguments: --rows=3"),
        (["data", "x", "--pieces=3"], "unrecognized arguments: --pieces=3"),
    ],
)
def test_each_kind_has_flags_of_its_own(arguments, told, capsys):
    with pytest.raises(SystemExit):
        cli.main(["inspect", *arguments])
    assert told in capsys.readouterr().err


def test_the_devices_do_not_matter(trained, seen):
    """The command opens a run on all devices that are here; what it finds is what one finds."""
    from realm_jax.jobs.answering import open_run_to_ask

    other = restore(open_run_to_ask(trained.run.workdir), "ict", for_answers=False)
    assert other.run.mesh.size == jax.device_count()
    again = inspect_masked(other.run, other.params, other.index, parse(SENTENCE))
    assert [one.row for one in again.passages] == [one.row for one in seen.passages]
    assert again.probability == pytest.approx(seen.probability, rel=1e-4)
