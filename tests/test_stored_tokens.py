"""`realm index --store-tokens`: who uses the stored token vectors, and what keeps them up to date."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_run import write_lines

import realm_jax
from realm_jax import forward, search_index
from realm_jax.assemble import make_run
from realm_jax.cli import main as cli
from realm_jax.indexing import token_file
from realm_jax.indexing.token_file import FILES, TokenFile
from realm_jax.serving.service import Service
from realm_jax.train import workdir
from realm_jax.train.exported_model import exported_model, write_exported_model
from realm_jax.train.trained_run import open_run_for_inference, restore

SIZES = {"data.query_length": 32, "data.document_length": 64, "model.dtype": "float32"}
NEW = {"id": "new", "title": "Life 60", "text": "The bardlo of Ada Moss was beck."}
QUESTION = "What was Ada Moss?"


@pytest.fixture(scope="module", autouse=True)
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        for module in (workdir, search_index):
            patch.setattr(module, "make_run", partial(make_run, devices=jax.devices()[:1]))
        yield


def index(documents: Path, encoder: Path, output: Path, *arguments: str) -> int:
    sizes = [f"--config.{key}={value}" for key, value in SIZES.items()]
    return cli.main(["index", str(documents), f"--from={encoder}", f"--output={output}", *sizes, *arguments])


@pytest.fixture(scope="module")
def indexed(documents, encoder, tmp_path_factory) -> Path:
    """A finished index with token vectors, which tests read and leave as it is."""
    output = tmp_path_factory.mktemp("indexed") / "run"
    assert index(documents, encoder, output, "--store-tokens") == 0
    return output


@pytest.fixture
def only_stored(monkeypatch):
    """Token vectors of passages may come only from the index."""

    def encodes_passages(*_: Any) -> Any:
        raise AssertionError("passages are encoded for a question")

    monkeypatch.setattr(forward, "max_sims", encodes_passages)


def embedded_again(copied_index: Path, folder: Path) -> bytes:
    """The token vectors of the run's corpus as it is now, all stored again with the compression that its index has."""
    run = open_run_for_inference(copied_index)
    object.__setattr__(run, "workdir", folder)
    exported = exported_model(copied_index)
    file = TokenFile(run, exported.params(run.model, run.model.embedder_names), "again", exported.token_compression())
    file.embed(np.arange(run.context.rows))
    return (file.folder / FILES[0]).read_bytes()


def test_an_index_has_the_token_vectors_of_all_passages_and_tells_their_size(indexed, documents, encoder, capsys):
    assert index(documents, encoder, indexed, "--store-tokens") == 0
    assert "(60 passages of 60 documents); nothing to do" in (out := capsys.readouterr().out)
    run = open_run_for_inference(indexed)
    tokens = exported_model(indexed).tokens(run.sources.passages.fingerprint)
    assert tokens.shape == (60, int(run.corpus.lengths.max()), run.model.bert.width) and tokens.dtype == np.int8
    assert f"stored token vectors: {tokens[0].nbytes:,} bytes per passage" in out
    assert not [*indexed.glob(".tokens-*")]


def test_token_rerank_takes_stored_vectors_in_every_command(indexed, documents, tmp_path, only_stored, capsys):
    flags = [f"--workdir={indexed}", "--rerank=tokens"]
    assert cli.main(["ask", "--json", *flags, QUESTION]) == 0
    asked = json.loads(capsys.readouterr().out)["candidates"]
    assert [one["ranks"]["tokens"] for one in asked] == [1, 2, 3, 4, 5]
    questions = write_lines(tmp_path / "questions.jsonl", [{"question": QUESTION, "gold_passage_id": "a1"}])
    assert cli.main(["evaluate", *flags, f"--questions={questions}"]) == 0
    assert cli.main(["predict", *flags, f"--questions={questions}", f"--output={tmp_path / 'predictions.jsonl'}"]) == 0
    service = Service(indexed, {"rerank": "tokens"}, 1)
    (reply,) = service.work("search", [QUESTION])
    assert [one["id"] for one in reply["candidates"][:5]] == [one["id"] for one in asked]
    model = realm_jax.Model(indexed, rerank="tokens")
    assert [one["id"] for one in model.ask(QUESTION)["candidates"]] == [one["id"] for one in asked]
    assert "document_embedder" not in model.trained.params
    default = realm_jax.Model(indexed).trained
    assert default.pipeline.reranker == "tokens" and default.index.tokens is not None
    assert realm_jax.Model(indexed, rerank="none").trained.index.tokens is None, "it is loaded only for token rerank"


def test_an_edit_stores_new_passages_only_and_gives_the_file_of_a_new_index(
    copied_index, tmp_path, monkeypatch, only_stored
):
    monkeypatch.setattr(token_file, "SAMPLE", 60)
    embedded: list[int] = []
    embed = TokenFile.embed

    def counted(self: TokenFile, rows: Any, *arguments: Any) -> Any:
        embedded.append(len(rows))
        return embed(self, rows, *arguments)

    monkeypatch.setattr(TokenFile, "embed", counted)
    tokens, compression = copied_index / "model" / FILES[0], exported_model(copied_index).token_compression()
    assert (
        cli.main(["corpus", "add", str(write_lines(tmp_path / "new.jsonl", [NEW])), f"--workdir={copied_index}"]) == 0
    )
    changed = write_lines(tmp_path / "changed.jsonl", [NEW | {"id": "a5", "text": "Short."}])
    assert cli.main(["corpus", "replace", str(changed), f"--workdir={copied_index}"]) == 0
    assert cli.main(["corpus", "remove", "a3", "a59", f"--workdir={copied_index}"]) == 0
    assert embedded == [1, 1, 0]
    for file, wanted in zip(FILES[1:], compression, strict=True):
        np.testing.assert_array_equal(np.load(copied_index / "model" / file), wanted)
    assert tokens.read_bytes() == embedded_again(copied_index, tmp_path)
    assert len(np.load(tokens)) == 59 and not [*copied_index.glob(".tokens-*")]
    candidates = realm_jax.Model(copied_index, rerank="tokens").search(NEW["text"], top=10)["candidates"]
    assert "new" in [one["id"] for one in candidates]


@pytest.mark.slow
def test_a_corpus_that_grows_from_one_passage_gets_another_projection(documents, encoder, tmp_path):
    lines = documents.read_text().splitlines()
    for name, part in (("first", lines[:1]), ("more", lines[1:9])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part))
    run = tmp_path / "run"
    assert index(tmp_path / "first.jsonl", encoder, run, "--store-tokens") == 0
    before = exported_model(run).token_compression().frequencies.max()
    assert cli.main(["corpus", "add", str(tmp_path / "more.jsonl"), f"--workdir={run}"]) == 0
    assert (before, exported_model(run).token_compression().frequencies.max()) == (1, 9)
    assert (run / "model" / FILES[0]).read_bytes() == embedded_again(run, tmp_path)


@pytest.mark.slow
def test_an_index_that_was_killed_before_its_export_does_not_embed_again(
    indexed, documents, encoder, tmp_path, monkeypatch
):
    monkeypatch.setenv("REALM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("REALM_CACHE_BYTES", "1000000")
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(search_index, "write_exported_model", lambda *_, **__: {}["power failure"])
        index(documents, encoder, tmp_path / "run", "--store-tokens")
    monkeypatch.setattr(TokenFile, "embed", None)
    assert index(documents, encoder, tmp_path / "run", "--store-tokens") == 0
    for name in ("vectors.npy", *FILES):
        assert (tmp_path / "run" / "model" / name).read_bytes() == (indexed / "model" / name).read_bytes()


def test_the_model_of_other_encoders_has_no_token_vectors(copied_index):
    """As `realm adapt` replaces that of an index."""
    run = open_run_for_inference(copied_index)
    params = {**restore(run, for_answers=False).params}
    assert exported_model(copied_index).has_tokens_of(run, params)
    changed = jax.tree.map(lambda array: array + 1, params)
    assert exported_model(copied_index).has_tokens_of(run, params | {"query_embedder": changed["query_embedder"]})
    assert not exported_model(copied_index).has_tokens_of(run, changed)
    write_exported_model(copied_index / "model", run, "index", 1, params, run.embed(params), trained_reader=False)
    assert not exported_model(copied_index).stores_tokens and not any(
        (copied_index / "model" / name).exists() for name in FILES
    )
    model = realm_jax.Model(copied_index, rerank="tokens")
    assert model.trained.index.tokens is None and model.search(QUESTION)["candidates"][0]["ranks"]["tokens"] == 1


@pytest.mark.parametrize("name", FILES)
def test_damaged_token_files_are_rejected_in_one_line_if_they_are_used(copied_index, name, capsys):
    content = (copied_index / "model" / name).read_bytes()
    (copied_index / "model" / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert cli.main(["ask", f"--workdir={copied_index}", "--rerank=tokens", QUESTION]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(
        f"realm: error: {copied_index / 'model'}: {name} does not match its checksum; remove the folder"
    )
    assert cli.main(["ask", f"--workdir={copied_index}", "--rerank=none", QUESTION]) == 0
