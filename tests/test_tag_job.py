"""`realm tag`: a prepared folder with a tagger's spans, made by several processes that may be killed."""

import argparse
import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import jax
import pytest
from runs import Cut
from tiny_run import prepare_people

from realm_jax.cli import tag as job
from realm_jax.cli.corpus import edit
from realm_jax.cli.prepare import prepare
from realm_jax.cli.tag import tag
from realm_jax.data.sources import open_sources
from realm_jax.data.store import PassageStore
from realm_jax.errors import UserError
from realm_jax.eval.tagging import TextTagger, tag_passages
from realm_jax.host import Preempted, Stop
from realm_jax.processes import WorkShare
from realm_jax.train.tagger import open_tagger

SEGMENTS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    files = prepare_people(tmp_path_factory.mktemp("people")).parent
    data = tmp_path_factory.mktemp("prepared") / "data"
    given = {"questions": [files / "questions.jsonl"], "vocabulary_size": 300, "workers": 1, "shards": SEGMENTS}
    prepare(files / "passages.jsonl", data, **given)
    return data


@pytest.fixture(scope="module")
def tagger(trained_tagger) -> TextTagger:
    return open_tagger(trained_tagger, jax.devices()[:1])


def go(tagger: TextTagger, data: Path, output: Path, process: int = 0, processes: int = 1) -> None:
    with Stop() as stop:
        tag(tagger, data, output, WorkShare(process, processes), stop)


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


def test_a_tagged_folder_has_other_spans_and_nothing_else(tagger, trained_tagger, data, tagged):
    before, after = open_sources(data), open_sources(tagged)
    assert rows_of(after.passages) == rows_of(before.passages)
    assert after.questions == before.questions and after.pretraining_is_corpus
    assert after.passages.fingerprint != before.passages.fingerprint
    assert set(after.passages.span_kinds) <= {"LOC", "PER", "date"} and "date" in after.passages.span_kinds
    after.passages.verify()
    store = after.passages
    found = tag_passages(tagger, before.passages, range(len(store)), before.tokenizer)
    stored = [span for row in range(len(store)) for span in store.spans(row).tolist()]
    spans = [[start, end, found.kinds.index(store.span_kinds[kind])] for start, end, kind in stored]
    assert spans == found.values.tolist() and len(spans) > len(store)
    assert [len(store.spans(row)) for row in range(len(store))] == found.counts.tolist()
    said, inputs = (json.loads((folder / "PREPARED.json").read_text()) for folder in (tagged, data))
    assert said["tagged"] == {"spans": f"tagger:{trained_tagger}", "spans_identity": tagger.identity}
    assert said["inputs"] == inputs["inputs"] and "tagged" not in inputs
    assert sorted(path.name for path in tagged.parent.iterdir()) == ["data"]


def same(one: Path, other: Path) -> bool:
    return open_sources(one).passages.fingerprint == open_sources(other).passages.fingerprint


@pytest.fixture
def before_segment(monkeypatch):
    """Call it with what is to happen before a segment, given how many came before; returns the rows of those begun."""
    whole = job.tag_passages

    def patch(act):
        done: list[range] = []

        def tag_passages(*given, **check):
            act(len(done))
            done.append(given[2])
            return whole(*given, **check)

        monkeypatch.setattr(job, "tag_passages", tag_passages)
        return done

    return patch


def cut_after(segments: int):
    """What raises `Cut` once so many segments are done."""

    def act(done: int) -> None:
        if done == segments:
            raise Cut

    return act


def test_a_job_that_is_cut_off_goes_on_with_the_next_segment(tagger, data, tagged, tmp_path, before_segment):
    done = before_segment(cut_after(2))
    with pytest.raises(Cut):
        go(tagger, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    rest = before_segment(cut_after(SEGMENTS))
    go(tagger, data, tmp_path / "out")
    store, done = open_sources(data).passages, [*done, *rest]
    assert done == [store.rows_in(number)[0] for number in range(SEGMENTS)] and sum(map(len, done)) == len(store) == 16
    assert same(tmp_path / "out", tagged)


def test_rows_that_the_corpus_leaves_out_stay_out(tagger, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    edit(tmp_path / "data", "remove", ["p3"])
    go(tagger, tmp_path / "data", tmp_path / "out")
    store = open_sources(tmp_path / "out").passages
    assert (
        len(store) == 15
        and not store.rows_of("p3")
        and rows_of(store) == rows_of(open_sources(tmp_path / "data").passages)
    )


def test_processes_share_the_segments_and_the_first_one_publishes(tagger, data, tagged, tmp_path, before_segment):
    """The second one finds the first one's segment done and, alone, does all others; the first has nothing left."""
    before_segment(cut_after(1))
    with pytest.raises(Cut):
        go(tagger, data, tmp_path / "out", 0, 2)
    before_segment(cut_after(SEGMENTS - 1))
    go(tagger, data, tmp_path / "out", 1, 2)
    assert not (tmp_path / "out").exists()
    before_segment(cut_after(0))
    go(tagger, data, tmp_path / "out", 0, 2)
    assert same(tmp_path / "out", tagged)


def test_sigterm_ends_within_a_segment_and_keeps_those_before(tagger, data, tmp_path, before_segment):
    done = before_segment(lambda done: done and os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted, match="finished segments stay"):
        go(tagger, data, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out.tagging" / "passages").glob("segment*"))
    assert len(done) == 2 and names == ["segment-00000", "segment-00000.json"]


def test_a_process_that_is_overtaken_ends_well(tagger, data, tagged, tmp_path, before_segment):
    """The first one does what is left, publishes and removes what led to it while the second is at its segment."""

    def overtake(_: int) -> None:
        before_segment(cut_after(SEGMENTS))
        go(tagger, data, tmp_path / "out", 0, 2)
        before_segment(cut_after(0))

    before_segment(overtake)
    go(tagger, data, tmp_path / "out", 1, 2)
    assert same(tmp_path / "out", tagged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_of_two_equal_commands_one_works(tagger, data, tagged, tmp_path, before_segment):
    def again(_: int) -> None:
        with pytest.raises(UserError, match="another process is using it"):
            go(tagger, data, tmp_path / "out")

    before_segment(again)
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


def test_what_was_half_written_is_written_again(tagger, data, tagged, tmp_path, begun, before_segment):
    (begun / "whole" / "passages" / "STORE.json").write_text("half")
    before_segment(cut_after(0))
    go(tagger, data, tmp_path / "out")
    assert same(tmp_path / "out", tagged) and not begun.exists()


def test_sigterm_ends_while_the_folder_is_written(tagger, data, tmp_path, begun, monkeypatch):
    verify = job.Segment.verify
    monkeypatch.setattr(job.Segment, "verify", lambda self: os.kill(os.getpid(), signal.SIGTERM) or verify(self))
    with pytest.raises(Preempted, match="finished segments stay"):
        go(tagger, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_was_begun_otherwise_is_refused(tagger, data, tmp_path, begun):
    other = dataclasses.replace(tagger, identity="another")
    with pytest.raises(UserError, match="was started with other tagger"):
        go(other, data, tmp_path / "out")
    record = begun / "TAGS.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"more": 1}))
    with pytest.raises(UserError, match="was started with other settings"):
        go(tagger, data, tmp_path / "out")


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "moved"])
def test_a_damaged_segment_is_named(tagger, data, tmp_path, begun, harm):
    segment, other = (begun / "passages" / f"segment-0000{number}" for number in (1, 2))
    content = bytearray((segment / "spans.npy").read_bytes())
    content[-1] ^= 1  # in the last span
    damaged = {"flipped": content, "cut": content[:70], "empty": b"", "moved": (other / "spans.npy").read_bytes()}[harm]
    shutil.rmtree(begun / "whole")
    (segment / "spans.npy").write_bytes(damaged)
    with pytest.raises(UserError, match="segment-00001 is damaged; remove it and run the command again"):
        go(tagger, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(segment)
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


def test_the_command(trained_tagger, data, tagged, tmp_path):
    parser = argparse.ArgumentParser()
    job.add_arguments(parser)
    given = [f"--workdir={trained_tagger}", f"--data={data}", f"--output={tmp_path / 'out'}"]
    job.run(parser.parse_args([*given, "--batch-size=2"]))
    assert same(tmp_path / "out", tagged)
    for wrong in ("--process=1", "--batch-size=0"):
        with pytest.raises(UserError, match=wrong):
            job.run(parser.parse_args([*given, wrong]))
