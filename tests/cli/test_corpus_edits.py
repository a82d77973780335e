"""Edited corpora: every version can be opened, a run stays with its own, and answers follow the newest text."""

import errno
import json
import os
import shutil
from contextlib import nullcontext

import jax
import numpy as np
import pytest
from tiny_run import PEOPLE, write_lines

from realm_jax.cli import corpus as corpus_command
from realm_jax.cli import main as cli
from realm_jax.data.sources import open_sources
from realm_jax.data.store import PassageStore, Sink
from realm_jax.errors import UserError
from realm_jax.indexing.files import generation_names, load_vectors, read_manifest
from realm_jax.indexing.heartbeat import Status, write_status
from realm_jax.run import Run
from realm_jax.storage import Damaged, PosixFolder, StorageError, exclusive_lock
from realm_jax.train.recipe import open_run
from realm_jax.train.trained_run import is_edited, open_run_for_inference, restore
from realm_jax.train.workdir import recorded_config


@pytest.fixture
def workdir(copied_run):
    return copied_run


def passages(workdir):
    return PassageStore.open(workdir.parent / "data" / "passages")


def article(number, text):
    return {"id": f"p{number}", "title": PEOPLE[number] if number < len(PEOPLE) else f"New {number}", "text": text}


def corpus(workdir, action, *what):
    return cli.main(["corpus", action, *map(str, what), f"--workdir={workdir}"])


def written(workdir, *articles):
    return write_lines(workdir.parent / "new.jsonl", [article(*one) for one in articles])


def test_a_replaced_document_is_in_the_newest_version_alone(workdir, capsys):
    before = passages(workdir)
    new = written(workdir, (3, "Ada Dahl was born in 1999. She sings."))
    assert corpus(workdir, "replace", new, "--json") == 0
    after, told = passages(workdir), json.loads(capsys.readouterr().out)
    assert (told["passages_before"], told["passages"], told["version"]) == (16, 16, after.fingerprint)
    assert [told["generation"]] == generation_names(PosixFolder(workdir)) and told["stored_vectors"] == 17
    assert len(after) == len(before) == 16 and after.stored_rows == 17
    row = after.rows_of("p3").start
    assert "1999" in after.text(row) and row == 15
    assert after.versions == [before.fingerprint, after.fingerprint]
    earlier = PassageStore.open(after.folder, version=before.fingerprint)
    assert earlier.text(earlier.rows_of("p3").start) == before.text(3)
    assert [after.document_id(n) for n in range(16)] == [f"p{n}" for n in range(16) if n != 3] + ["p3"]


def test_rows_of_an_edited_store_are_laid_out_as_those_of_one_made_anew(workdir):
    special = open_sources(workdir.parent / "data").tokenizer.special
    assert corpus(workdir, "remove", "p2", "p7") == 0
    after = passages(workdir)
    ids, lengths, titles = after.document_matrix(48, special)
    whole = after.stored_matrix(48, special, 0, 16)
    left = [n for n in range(16) if n not in (2, 7)]
    for found, stored in zip((ids, lengths, titles), whole, strict=True):
        np.testing.assert_array_equal(found, stored[left])
    np.testing.assert_array_equal(after.document_matrix(48, special, slice(1, 4))[0], ids[1:4])
    np.testing.assert_array_equal(after.counts("tokens") + 3, lengths)
    assert after.documents == 14 and not after.rows_of("p2") and after.rows_of("p8") == range(6, 7)
    assert after.stored_to_row.tolist() == [0, 1, -1, 2, 3, 4, 5, -1, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_steps")
def test_only_what_changed_is_embedded(workdir, monkeypatch, capsys):
    """The first edit embeds everything once, because no generation was there; later ones share it."""
    embedded = []
    embed = Run.embed

    def counted(self, params, progress=None, rows=None):
        embedded.append(16 if rows is None else len(rows.ids))
        return embed(self, params, progress, rows)

    monkeypatch.setattr(Run, "embed", counted)
    folder = PosixFolder(workdir)
    assert corpus(workdir, "remove", "p2") == 0
    first = read_manifest(folder, generation_names(folder)[0])
    embedded.clear()
    new = written(workdir, (16, "New 16 is a house."), (17, "It was built."))
    assert corpus(workdir, "add", new) == 0
    assert embedded[0] == 2, "the new segment; then the rows of the self-check"
    second = read_manifest(folder, [n for n in generation_names(folder) if n != first.generation][0])
    assert [chunk.file for chunk in second.chunks[:3]] == [chunk.file for chunk in first.chunks]
    assert read_manifest(folder, first.generation) is None, "a version in between is forgotten, not what it shares"
    assert load_vectors(folder, second).shape == (18, 8)
    capsys.readouterr()
    by_newest = ["ask", "New 16", f"--workdir={workdir}", "--generation=newest", "--top=15"]
    assert cli.main([*by_newest, "--json"]) == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    found, scores = {one["id"] for one in candidates}, [one["score"] for one in candidates]
    assert "p16" in found and "p2" not in found and len(found) == 15 and scores == sorted(scores, reverse=True)
    assert cli.main(by_newest) == 0
    whole, table = capsys.readouterr().out.strip().split("\n\n")
    head, *lines = table.strip().splitlines()
    assert whole.startswith(f"{candidates[0]['title']} ({candidates[0]['id']})\n")
    assert head.split() == ["score", "found", "by", "title", "passage"] and len(lines) == 15
    assert cli.main(["ask", "New 16", f"--workdir={workdir}", "--generation=7-none"]) == 2
    assert "there is no generation 7-none; `realm storage ls` lists them" in capsys.readouterr().err


def test_what_is_served_is_every_row_of_the_newest_version(workdir, monkeypatch, capsys):
    """Its text is read without embedding anything."""
    new = written(workdir, (3, "Zebra zebra zebra."))
    assert corpus(workdir, "replace", new) == 0
    run = open_run_for_inference(workdir)
    assert is_edited(run)
    opened = restore(run)
    served = np.asarray(opened.index.vectors)[:16]
    np.testing.assert_allclose(served, run.embed(opened.params), atol=1e-5)
    manifest = read_manifest(PosixFolder(workdir), generation_names(PosixFolder(workdir))[0])
    assert load_vectors(PosixFolder(workdir), manifest).shape == (17, 8)
    monkeypatch.setattr(Run, "embed", lambda *_, **__: pytest.fail("the generation holds the vectors"))
    capsys.readouterr()
    assert cli.main(["ask", f"--workdir={workdir}", "--json", f"When was {PEOPLE[3]} born?"]) == 0
    found = {c["id"]: c["text"] for c in json.loads(capsys.readouterr().out)["candidates"]}
    assert found.get("p3", "Zebra zebra zebra.") == "Zebra zebra zebra."


@pytest.mark.slow
def test_a_generation_whose_vectors_a_newer_one_needs_is_superseded_and_stays(workdir, capsys):
    for number in (16, 17):
        new = written(workdir, (number, "Ada Dahl was born in 1999."))
        assert corpus(workdir, "add", new) == 0
    folder = PosixFolder(workdir)
    capsys.readouterr()
    assert cli.main(["storage", "ls", "--json", f"--workdir={workdir}"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    states = {line["state"]: line["generation"] for line in lines if "generation" in line and "checkpoint" not in line}
    assert {*states} == {"superseded", "published"}
    older, newer = states["superseded"], states["published"]
    assert cli.main(["storage", "rm", older, f"--workdir={workdir}"]) == 0
    assert capsys.readouterr().out == f"{older}: {newer} needs its vectors, which stay\n"
    assert {older, newer} == {*generation_names(folder)}
    assert load_vectors(folder, read_manifest(folder, newer)).shape == (18, 8)
    assert cli.main(["storage", "verify", f"--workdir={workdir}"]) == 0
    assert f"{older}: superseded" in capsys.readouterr().out
    assert cli.main(["storage", "rm", newer, f"--workdir={workdir}"]) == 0
    assert capsys.readouterr().out == f"{newer}: removed\n"


def test_a_removed_gold_passage_is_a_miss_beside_one_that_stays(workdir, capsys):
    asked = {"question": f"When was {PEOPLE[3]} born?", "gold_passages": {"p3": 1, "p9": 1}}
    file, output = write_lines(workdir.parent / "asked.jsonl", [asked]), workdir.parent / "p.jsonl"
    assert corpus(workdir, "remove", "p9") == 0
    assert cli.main(["predict", f"--workdir={workdir}", f"--questions={file}", f"--output={output}"]) == 0
    assert "1 gold passages, such as 'p9', are not in the corpus and count as misses" in capsys.readouterr().err
    assert cli.main(["evaluate", str(output), "--json"]) == 0
    measures = json.loads(capsys.readouterr().out)["measures"]
    rank = 1 + [one["id"] for one in json.loads(output.read_text())["retrieved"]].index("p3")
    assert measures["recall@5"]["value"] == (rank <= 5)
    gain = 1 / np.log2(1 + rank) if rank <= 10 else 0
    assert measures["ndcg@10"]["value"] == pytest.approx(gain / (1 + 1 / np.log2(3)))


def test_a_run_stays_with_the_corpus_it_began_with(workdir):
    before = passages(workdir)
    assert corpus(workdir, "remove", "p9") == 0
    config = recorded_config(workdir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("realm_jax.mesh.jax.devices", lambda: jax.local_devices()[:1])
        run = open_run(config, workdir)
    assert run.sources.passages.fingerprint == before.fingerprint and run.context.rows == 16


@pytest.mark.parametrize(
    ("action", "what", "message"),
    [
        ("add", [article(3, "Again.")], "document 'p3' is in the corpus already; use `realm corpus replace`"),
        ("replace", [article(17, "Never seen.")], "document 'p17' is not in the corpus; use `realm corpus add`"),
        (
            "replace",
            [article(3, "\u200b"), article(4, "Again.")],
            "new.jsonl: document 'p3' has no words to store; correct its text, or remove it with `realm corpus remove`",
        ),
        ("remove", ["p99"], "has no document 'p99'; its first ones are called 'p0', 'p1', 'p2'"),
        ("remove", [f"p{n}" for n in range(16)], "nothing would be left"),
    ],
)
def test_edits_that_cannot_be_are_refused_and_change_nothing(workdir, capsys, action, what, message):
    before = passages(workdir).fingerprint
    if action != "remove":
        what = [write_lines(workdir.parent / "new.jsonl", what)]
    assert corpus(workdir, action, *what) == 2
    assert message in capsys.readouterr().err
    assert passages(workdir).versions == [before]


def test_documents_without_words_are_named_when_others_are_added(workdir, capsys):
    new, data = written(workdir, (16, "New 16 is a house."), (17, "\u200b")), workdir.parent / "data"
    assert cli.main(["corpus", "add", str(new), f"--data={data}"]) == 0
    assert "skipped 1 without words to store, such as 'p17'" in capsys.readouterr().out
    assert passages(workdir).rows_of("p16") and not passages(workdir).rows_of("p17")


# --- Commands that fail -----------------------------------------------------------------------------------------------


def content(folder):
    """Everything in a folder, by path; None for a folder in it."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def remove_model(workdir):
    shutil.rmtree(workdir / "model")


def damage_model(workdir):
    for path in (workdir / "model").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_span_finder(workdir):
    path = workdir.parent / "data" / "PREPARED.json"
    manifest = json.loads(path.read_text())
    manifest["inputs"]["settings"]["spans_identity"] = "x"
    path.write_text(json.dumps(manifest))


def tag_with_what_is_gone(workdir):
    path = workdir.parent / "data" / "PREPARED.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tagged": {"spans": "tagger:x"}}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_model, "no exported model yet"),
        (damage_model, "remove the folder, and repeat the command that trained the run"),
        (change_span_finder, "rules is not the span finder that prepared the folder"),
        (tag_with_what_is_gone, "was prepared with a tagger that this version cannot run"),
        (lambda workdir: (workdir / "config.json").write_text("{"), "config.json is not readable JSON"),
        (lambda workdir: (workdir / "config.json").unlink(), "no run there"),
        (lambda workdir: (workdir / "data.json").write_text('{"passages": "another"}'), "not the data of the run"),
    ],
)
def test_an_edit_for_a_run_that_cannot_take_it_changes_nothing(workdir, capsys, damage, message):
    new = written(workdir, (17, "New 17 is a house."))
    damage(workdir)
    before = content(workdir.parent / "data")
    assert corpus(workdir, "add", new) == 2
    assert message in capsys.readouterr().err
    assert content(workdir.parent / "data") == before


@pytest.mark.parametrize(("mode", "lives"), [("inline", True), ("async", True), ("async", False)])
def test_the_corpus_of_a_run_that_trains_is_not_edited(workdir, capsys, mode, lives):
    """A live trainer holds the run folder, whether it makes its index itself or a builder does. A builder would take
    the export of the edited corpus for one of its own."""
    before = content(workdir.parent / "data")
    write_status(PosixFolder(workdir), "trainer", Status("one", stage="realm", step=5, index_done=mode == "inline"))
    with exclusive_lock(workdir) if lives else nullcontext():
        assert corpus(workdir, "remove", "p3") == 2
    assert "the run is at step 5 of realm and cannot change its corpus; edit with --data" in capsys.readouterr().err
    assert content(workdir.parent / "data") == before
    write_status(PosixFolder(workdir), "trainer", Status("one", stage="realm", step=8, done=True))
    assert corpus(workdir, "remove", "p3") == 0


@pytest.mark.parametrize("fault", [StorageError("runs/x: No space left on device"), Damaged("x"), KeyboardInterrupt()])
def test_an_edit_that_cannot_be_published_changes_nothing(workdir, capsys, monkeypatch, fault):
    def fail(*_):
        raise fault

    monkeypatch.setattr(corpus_command, "write_export", fail)
    before = content(workdir.parent / "data")
    assert corpus(workdir, "remove", "p3") == (130 if isinstance(fault, KeyboardInterrupt) else 2)
    assert isinstance(fault, KeyboardInterrupt) or "; the corpus is unchanged" in capsys.readouterr().err
    assert content(workdir.parent / "data") == before


def test_an_edit_on_a_full_disk_changes_nothing(workdir, capsys, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    new = written(workdir, (17, "New 17 is a house."))
    before = content(workdir.parent / "data")
    with monkeypatch.context() as patch:
        patch.setattr(Sink, "write", fail)
        assert cli.main(["corpus", "add", str(new), f"--data={workdir.parent / 'data'}"]) != 0
    assert "No space left on device" in capsys.readouterr().err
    assert content(workdir.parent / "data") == before


def test_what_a_killed_edit_left_is_removed_by_the_next(workdir):
    data = workdir.parent / "data"
    (data / ".edit" / "passages").mkdir(parents=True)
    (data / ".edit" / "passages" / "STORE.json").write_text("{}")
    before = content(data / "passages")
    assert cli.main(["corpus", "remove", "p3", f"--data={data}"]) == 0
    assert not (data / ".edit").exists() and not any(path.is_symlink() for path in data.rglob("*"))
    assert content(data / "passages").keys() == before.keys()


def test_a_version_that_never_was_is_named(workdir):
    with pytest.raises(UserError, match="has no version abc"):
        PassageStore.open(workdir.parent / "data" / "passages", version="abc")
