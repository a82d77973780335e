"""`realm tag`: a prepared folder with a tagger's spans, made by several processes that may be killed."""

import argparse
import dataclasses
import json
import os
import signal
from pathlib import Path

import jax
import pytest
from runs import Cut
from tiny_run import prepare_people
from tiny_tagger import open_tiny, write_corpus

from realm_jax.corpus.store import PassageStore
from realm_jax.data.sources import open_sources
from realm_jax.errors import UserError
from realm_jax.evaluation.tagging import TextTagger, tag_passages
from realm_jax.host import Preempted, Stop
from realm_jax.index.builder import WorkShare
from realm_jax.jobs import tag as job
from realm_jax.jobs.tag import tag
from realm_jax.jobs.tagger import open_tagger, train

pytestmark = pytest.mark.usefixtures("quick_programs")
SIZE = 3  # rows of a chunk; there are 16


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return prepare_people(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def workdir(quick_programs, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tagger")
    train(open_tiny(write_corpus(folder / "corpus"), folder / "run", tagger__steps=20))
    return folder / "run"


@pytest.fixture(scope="module")
def tagger(workdir) -> TextTagger:
    return open_tagger(workdir, jax.devices()[:1])


def go(tagger: TextTagger, data: Path, output: Path, process: int = 0, processes: int = 1) -> None:
    with Stop() as stop:
        tag(tagger, data, output, WorkShare(process, processes), stop, SIZE)


def rows_of(store: PassageStore) -> list[tuple]:
    """Everything of every row but its spans."""
    return [
        (
            store.document_id(row), store.title(row), store.text(row), store.title_tokens(row).tolist(),
            store.body_tokens(row).tolist(), store.sentences(row).tolist(),
        )
        for row in range(len(store))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tagged(tagger, data, tmp_path_factory) -> Path:
    """Made in one go; tests read it and leave it as it is."""
    output = tmp_path_factory.mktemp("tagged") / "data"
    go(tagger, data, output)
    return output


def test_a_tagged_folder_has_other_spans_and_nothing_else(tagger, workdir, data, tagged):
    before, after = open_sources(data), open_sources(tagged)
    assert rows_of(after.passages) == rows_of(before.passages)
    assert after.questions == before.questions and after.own_text
    assert after.passages.fingerprint != before.passages.fingerprint
    assert set(after.passages.span_kinds) <= {"LOC", "PER", "date"} and "date" in after.passages.span_kinds
    after.passages.verify()
    store = after.passages
    found = tag_passages(tagger, before.passages, range(len(store)), before.wordpiece)
    stored = [span for row in range(len(store)) for span in store.spans(row).tolist()]
    spans = [[start, end, found.kinds.index(store.span_kinds[kind])] for start, end, kind in stored]
    assert spans == found.values.tolist() and len(spans) > len(store)
    assert [len(store.spans(row)) for row in range(len(store))] == found.counts.tolist()
    said, inputs = (json.loads((folder / "PREPARED.json").read_text()) for folder in (tagged, data))
    assert said["tagged"] == {"spans": f"tagger:{workdir}", "spans_identity": tagger.identity}
    assert said["inputs"] == inputs["inputs"] and "tagged" not in inputs
    assert sorted(path.name for path in tagged.parent.iterdir()) == ["data"]


def same(one: Path, other: Path) -> bool:
    return open_sources(one).passages.fingerprint == open_sources(other).passages.fingerprint


def test_a_job_that_is_cut_off_goes_on_with_the_next_chunk(tagger, data, tagged, tmp_path, monkeypatch):
    done: list[range] = []
    whole = job.tag_passages

    def cut(tagger, store, rows, wordpiece):
        if len(done) == 2:
            raise Cut
        done.append(rows)
        return whole(tagger, store, rows, wordpiece)

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(job, "tag_passages", cut)
        go(tagger, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setattr(job, "tag_passages", lambda *given: done.append(given[2]) or whole(*given))
        go(tagger, data, tmp_path / "out")
    assert [rows.start for rows in done] == [0, 3, 6, 9, 12, 15]
    assert same(tmp_path / "out", tagged)


def test_processes_share_the_chunks_and_the_first_one_publishes(tagger, data, tagged, tmp_path, monkeypatch):
    """The second one finds the first one's first chunk done and, alone, does all others; the first has nothing left."""
    whole, done = job.tag_passages, []

    def first_chunk_only(*given):
        if done:
            raise Cut
        done.append(given[2])
        return whole(*given)

    with monkeypatch.context() as patch, pytest.raises(Cut):
        patch.setattr(job, "tag_passages", first_chunk_only)
        go(tagger, data, tmp_path / "out", 0, 2)
    go(tagger, data, tmp_path / "out", 1, 2)
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setattr(job, "tag_passages", None)
        go(tagger, data, tmp_path / "out", 0, 2)
    assert same(tmp_path / "out", tagged)


def test_sigterm_ends_between_chunks(tagger, data, tmp_path, monkeypatch):
    whole = job.tag_passages

    def stop(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        return whole(*given)

    monkeypatch.setattr(job, "tag_passages", stop)
    with pytest.raises(Preempted, match="finished chunks stay"):
        go(tagger, data, tmp_path / "out")
    assert len([*(tmp_path / "out.tagging" / "passages").iterdir()]) == 1


def test_a_process_that_is_overtaken_ends_well(tagger, data, tagged, tmp_path, monkeypatch):
    """The first one does what is left, publishes and removes what led to it while the second is at its chunk."""
    whole = job.tag_passages

    def overtaken(*given):
        monkeypatch.setattr(job, "tag_passages", whole)
        go(tagger, data, tmp_path / "out", 0, 2)
        monkeypatch.setattr(job, "tag_passages", None)
        return whole(*given)

    monkeypatch.setattr(job, "tag_passages", overtaken)
    go(tagger, data, tmp_path / "out", 1, 2)
    assert same(tmp_path / "out", tagged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_of_two_equal_commands_one_works(tagger, data, tagged, tmp_path, monkeypatch):
    whole = job.tag_passages

    def again(*given):
        with pytest.raises(UserError, match="another process works there"):
            go(tagger, data, tmp_path / "out")
        return whole(*given)

    monkeypatch.setattr(job, "tag_passages", again)
    go(tagger, data, tmp_path / "out")
    assert same(tmp_path / "out", tagged)


@pytest.fixture
def begun(tagger, data, tmp_path, monkeypatch) -> Path:
    """Work that is done but for the folder itself, of which there is a part."""
    with monkeypatch.context() as patch:
        patch.setattr(job, "publish_folder", lambda *_: (_ for _ in ()).throw(Cut))
        with pytest.raises(Cut):
            go(tagger, data, tmp_path / "out")
    return tmp_path / "out.tagging"


def test_what_was_half_written_is_written_again(tagger, data, tagged, tmp_path, begun, monkeypatch):
    (begun / "whole" / "passages" / "STORE.json").write_text("half")
    monkeypatch.setattr(job, "tag_passages", None)
    go(tagger, data, tmp_path / "out")
    assert same(tmp_path / "out", tagged) and not begun.exists()


def test_sigterm_ends_while_the_folder_is_written(tagger, data, tmp_path, begun, monkeypatch):
    read = job._read_chunk
    monkeypatch.setattr(job, "_read_chunk", lambda chunk: os.kill(os.getpid(), signal.SIGTERM) or read(chunk))
    with pytest.raises(Preempted, match="finished chunks stay"):
        go(tagger, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_was_begun_otherwise_is_refused(tagger, data, tmp_path, begun, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("test_tag_job.SIZE", 5)
        with pytest.raises(UserError, match="was begun with other chunk_rows"):
            go(tagger, data, tmp_path / "out")
    other = dataclasses.replace(tagger, identity="another")
    with pytest.raises(UserError, match="was begun with other tagger"):
        go(other, data, tmp_path / "out")
    record = begun / "TAGS.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"more": 1}))
    with pytest.raises(UserError, match="was begun with other settings"):
        go(tagger, data, tmp_path / "out")
    record.unlink()
    with monkeypatch.context() as patch, pytest.raises(UserError, match="npy is damaged; remove it and repeat"):
        patch.setattr("test_tag_job.SIZE", 6)  # the chunks that are there are of three rows
        go(tagger, data, tmp_path / "out")


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "moved"])
def test_a_damaged_chunk_is_named(tagger, data, tmp_path, begun, harm):
    chunk = begun / "passages" / "000000003.npy"
    content = bytearray(chunk.read_bytes())
    content[-40] ^= 1  # in the last span
    other = (begun / "passages" / "000000006.npy").read_bytes()
    chunk.write_bytes({"flipped": content, "cut": content[:70], "empty": b"", "moved": other}[harm])
    with pytest.raises(UserError, match="000000003.npy is damaged; remove it and repeat"):
        go(tagger, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    chunk.unlink()
    go(tagger, data, tmp_path / "out")


def test_where_nothing_can_be_made_is_told_first(data, tagged, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--output=.* exists; choose another folder"):
        job.folders(str(data), str(tagged))
    with pytest.raises(UserError, match="--output=.*/x/y lies inside --data=.*; choose a folder beside it"):
        job.folders(str(data), str(data / "x" / "y"))
    with pytest.raises(UserError, match="--output=gs://bucket/x: it is written to a disk"):
        job.folders(str(data), "gs://bucket/x")
    monkeypatch.setattr(job, "staged", lambda url: tmp_path / url.rpartition("/")[2])
    assert job.folders("gs://bucket/data", str(tmp_path / "out")) == (tmp_path / "data", tmp_path / "out")


def test_the_command(workdir, data, tagged, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    parser = argparse.ArgumentParser()
    job.add_arguments(parser)
    given = [f"--workdir={workdir}", f"--data={data}", f"--output={tmp_path / 'out'}"]
    job.run(parser.parse_args([*given, "--batch-size=2"]))
    assert same(tmp_path / "out", tagged)
    for wrong in ("--process=1", "--batch-size=0"):
        with pytest.raises(UserError, match=wrong):
            job.run(parser.parse_args([*given, wrong]))
