"""Generations on disk: built by any number of processes that may die, verified before they are served, retained."""

import dataclasses
import json
import re
import threading

import numpy as np
import pytest

from realm_jax.host import Preempted
from realm_jax.processes import WorkShare
from realm_jax.refresh.builder import Builder, Corpus
from realm_jax.refresh.generations import (
    current_name,
    export_steps,
    generation_names,
    load_parts,
    load_vectors,
    read_export,
    read_manifest,
    read_queries,
    read_towers,
    reject,
    rejection,
    remove_export,
    remove_generation,
    write_export,
)  # fmt: skip
from realm_jax.refresh.status import Status, read_status, write_status
from realm_jax.retrieval.embed import CorpusRows
from realm_jax.storage import Damaged, PosixFolder, digest

WIDTH, ROWS, CHUNK = 4, 23, 5


def read(first, last):
    rows = np.arange(first, last, dtype=np.uint16)
    return CorpusRows(rows[:, None], np.ones_like(rows), np.zeros_like(rows))


def embed(rows):
    """A vector that says of which row it is."""
    return rows.ids.astype(np.float32) * [1, 2, 3, 4] + 1


QUERIES = np.ones((3, WIDTH), np.float32)
CORPUS = Corpus("corpus", "tokenizer", (("one", 13), ("two", 10)), read)
ALL = embed(read(0, ROWS))


@pytest.fixture
def folder(tmp_path):
    return PosixFolder(tmp_path)


@pytest.fixture
def export(folder):
    return make_export(folder, 10)


def make_export(folder, step, scale=1.0):
    record = {"step": step, "tokenizer": "tokenizer", "corpus": "corpus", "towers": {"width": 8}, "index": {}}
    towers = {"document_embedder/kernel": np.full((2, 2), scale, np.float32)}
    return write_export(folder, record, towers, np.ones((3, WIDTH), np.float32))


def builder(folder, process=0, processes=1, **options):
    return Builder(folder, CORPUS, options.pop("dtype", "float32"), CHUNK, WorkShare(process, processes), **options)


class Killed(BaseException):
    """Stands for kill -9."""


def killed_at(call):
    """Embeds until the given call."""
    calls = []

    def embed_until(rows):
        calls.append(len(rows.ids))
        if len(calls) == call:
            raise Killed
        return embed(rows)

    return embed_until


# --- Exports


def test_an_export_is_read_as_it_was_written(folder, export):
    assert read_export(folder, 10) == export
    towers = read_towers(folder, export)
    assert towers.keys() == {"document_embedder/kernel"}
    np.testing.assert_array_equal(towers["document_embedder/kernel"], np.ones((2, 2)))
    np.testing.assert_array_equal(read_queries(folder, export), QUERIES)
    assert export_steps(folder) == [10]


def test_an_export_without_its_record_does_not_exist(folder, export):
    folder.remove("exports/10/EXPORT.json")
    assert read_export(folder, 10) is None


def test_the_same_export_stays_and_another_replaces_it(folder, export):
    assert make_export(folder, 10) == export
    other = make_export(folder, 10, scale=2.0)
    assert other.parameters != export.parameters
    assert read_export(folder, 10) == other


def test_a_damaged_export_is_named(folder, export):
    folder.write(export.file.name, b"x" * export.file.bytes)
    with pytest.raises(Damaged, match=r"exports/10/.*safetensors is damaged"):
        read_towers(folder, export)
    folder.write(export.queries.name, b"x" * export.queries.bytes)
    with pytest.raises(Damaged, match=r"exports/10/.*queries.safetensors is damaged"):
        read_queries(folder, export)
    folder.write("exports/10/EXPORT.json", b'{"format_version": 3, "step"')
    with pytest.raises(Damaged, match="EXPORT.json is not readable JSON"):
        read_export(folder, 10)


def test_removing_an_export_leaves_nothing(folder, export):
    remove_export(folder, 10)
    assert export_steps(folder) == []


# --- Building


def test_a_generation_holds_every_row_and_says_what_it_is(folder, export):
    manifest = builder(folder).build(export, embed, QUERIES)
    np.testing.assert_array_equal(load_vectors(folder, manifest), ALL)
    assert read_manifest(folder, manifest.generation) == manifest
    assert (manifest.rows, manifest.width, manifest.step, manifest.corpus) == (ROWS, WIDTH, 10, "corpus")
    assert [(c.segment, c.first, c.last) for c in manifest.chunks] == [
        ("one", 0, 5), ("one", 5, 10), ("one", 10, 13), ("two", 0, 5), ("two", 5, 10)
    ]  # fmt: skip


def test_chunks_are_read_side_by_side_and_a_damaged_one_is_named(folder, export, monkeypatch):
    manifest = builder(folder).build(export, embed, QUERIES)
    both, read = threading.Barrier(2), PosixFolder.read_verified

    def waiting(self, file):
        if file in [chunk.file for chunk in manifest.chunks[:2]]:
            both.wait(20)  # BrokenBarrierError where one is read after the other
        return read(self, file)

    monkeypatch.setattr(PosixFolder, "read_verified", waiting)
    np.testing.assert_array_equal(load_vectors(folder, manifest), ALL)
    np.testing.assert_array_equal(load_vectors(folder, manifest, 3, 12), ALL[3:12])
    monkeypatch.undo()
    broken = manifest.chunks[3].file
    folder.write(broken.name, b"x" * broken.bytes)
    np.testing.assert_array_equal(load_vectors(folder, manifest, 0, 13), ALL[:13])
    with pytest.raises(Damaged, match=re.escape(broken.name)):
        load_vectors(folder, manifest)


def test_files_are_read_once_and_only_if_a_part_needs_them(folder, export, monkeypatch):
    """A process loads the rows of its own devices, which meet in a file and leave others out."""
    manifest, names, read = builder(folder).build(export, embed, QUERIES), [], PosixFolder.read_verified

    def counted(self, file):
        names.append(file.name)
        return read(self, file)

    monkeypatch.setattr(PosixFolder, "read_verified", counted)
    parts = [slice(2, 6), slice(6, 9), slice(17, 20), slice(20, 20)]
    for part, found in zip(parts, load_parts(folder, manifest, parts), strict=True):
        np.testing.assert_array_equal(found, ALL[part])
    ends = np.cumsum([chunk.last - chunk.first for chunk in manifest.chunks]).tolist()
    needed = [
        chunk.file.name
        for chunk, end in zip(manifest.chunks, ends, strict=True)
        if any(part.start < end and end - (chunk.last - chunk.first) < part.stop for part in parts[:3])
    ]
    assert sorted(names) == sorted(needed) and len(needed) < len(manifest.chunks)


def test_bfloat16_comes_back_as_bfloat16(folder, export):
    manifest = builder(folder, dtype="bfloat16").build(export, embed, QUERIES)
    vectors = load_vectors(folder, manifest)
    assert vectors.dtype.name == "bfloat16"
    np.testing.assert_allclose(vectors.astype(np.float32), ALL, rtol=1e-2)


@pytest.mark.parametrize("call", [1, 3, 5])
@pytest.mark.parametrize("processes", [1, 3])
def test_a_builder_that_is_killed_is_gone_on_from_also_by_others(folder, export, call, processes):
    with pytest.raises(Killed):
        builder(folder).build(export, killed_at(call), QUERIES)
    written = {path: path.stat().st_mtime_ns for path in folder.root.rglob("*.bin")}
    assert read_manifest(folder, current_name(folder, export, "corpus")) is None
    manifest = builder(folder, processes - 1, processes).build(export, embed, QUERIES)
    np.testing.assert_array_equal(load_vectors(folder, manifest), ALL)
    assert {path: path.stat().st_mtime_ns for path in written} == written, "what was done is not done again"


def test_a_builder_that_was_killed_before_the_manifest_has_only_that_to_write(folder, export):
    with pytest.raises(Killed):  # call 6 is the self-check's
        builder(folder).build(export, killed_at(6), QUERIES)
    manifest = builder(folder).build(export, killed_at(6), QUERIES)
    np.testing.assert_array_equal(load_vectors(folder, manifest), ALL)


def test_processes_share_the_chunks_and_bytes_do_not_depend_on_their_number(folder, export, tmp_path):
    alone = builder(folder).build(export, embed, QUERIES)
    other = PosixFolder(tmp_path / "other")
    same = make_export(other, 10)
    embedded = []

    def first(rows):
        embedded.append(("first", rows.ids[0, 0]))
        return embed(rows)

    def second(rows):
        embedded.append(("second", rows.ids[0, 0]))
        return embed(rows)

    def meanwhile():  # the second process works whenever the first is between two chunks
        if len(embedded) == 2:
            with pytest.raises(Killed):
                builder(other, 1, 2).build(
                    same, lambda rows: killed_at(1)(rows) if len(embedded) > 3 else second(rows), QUERIES
                )

    shared = builder(other, 0, 2, check=meanwhile).build(same, first, QUERIES)
    assert {name for name, _ in embedded} == {"first", "second"}
    assert [(c.file.bytes, c.file.sha256) for c in shared.chunks] == [
        (c.file.bytes, c.file.sha256) for c in alone.chunks
    ]


def test_two_builders_at_once_waste_work_and_overwrite_nothing(folder, export):
    manifests = []

    def other():
        if not manifests:
            manifests.append(builder(folder).build(export, embed, QUERIES))

    mine = builder(folder, check=other).build(export, embed, QUERIES)
    assert mine == manifests[0] == read_manifest(folder, mine.generation)
    np.testing.assert_array_equal(load_vectors(folder, mine), ALL)


def test_a_builder_that_is_told_to_stop_stops_between_chunks(folder, export):
    def stop():
        raise Preempted

    with pytest.raises(Preempted):
        builder(folder, check=stop).build(export, embed, QUERIES)
    assert not list(folder.root.rglob("MANIFEST.json"))


def test_the_first_write_that_fails_ends_the_work(folder, export, monkeypatch):
    calls = []

    def full(*_):
        raise OSError("no space left")

    def counted(rows):
        calls.append(rows)
        return embed(rows)

    monkeypatch.setattr(PosixFolder, "write", full)
    with pytest.raises(OSError, match="no space"):
        builder(folder).build(export, counted, QUERIES)
    assert len(calls) <= 2


def test_a_chunk_that_goes_bad_before_publication_is_found_and_embedded_again(folder, export):
    def spoil():
        if len(list(folder.root.rglob("*.bin"))) == 5:
            (chunk,) = folder.root.rglob("000000005-*.bin")
            chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")

    with pytest.raises(Damaged, match="000000005-000000010-.*is damaged"):
        builder(folder, check=spoil).build(export, embed, QUERIES)
    manifest = builder(folder).build(export, embed, QUERIES)
    np.testing.assert_array_equal(load_vectors(folder, manifest), ALL)


def test_towers_that_diverged_are_never_published(folder, export):
    with pytest.raises(Damaged, match="zero or not finite"):
        builder(folder).build(export, lambda rows: embed(rows) * np.nan, QUERIES)
    with pytest.raises(Damaged, match="vectors of 4, not 8"):
        builder(folder).build(export, embed, np.ones((3, 8), np.float32))
    assert not list(folder.root.rglob("MANIFEST.json"))


def test_vectors_of_other_passages_are_found_by_embedding_some_again(folder, export):
    shift = iter([0] * 5 + [1] * 5)
    with pytest.raises(Damaged, match="holds vectors that are not those of its passages"):
        builder(folder).build(export, lambda rows: embed(rows) + 10 * next(shift), QUERIES)


# --- Reading


@pytest.fixture
def published(folder, export):
    return builder(folder).build(export, embed, QUERIES)


def test_a_truncated_chunk_and_a_flipped_byte_are_named(folder, published):
    path = folder.root / published.chunks[1].file.name
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(Damaged, match=r"000000005-000000010-\w+.bin has 76 bytes, not 80"):
        load_vectors(folder, published)
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(Damaged, match=r"000000005-000000010-\w+.bin is damaged"):
        load_vectors(folder, published)


@pytest.mark.parametrize("value", [np.nan, 0.0, np.inf])
def test_bad_vectors_with_a_right_checksum_are_refused(folder, published, value):
    chunk = published.chunks[0]
    data = np.full((5, WIDTH), value, np.float32).tobytes()
    folder.write(chunk.file.name, data)
    lying = dataclasses.replace(
        published, chunks=(chunk._replace(file=chunk.file._replace(sha256=digest(data))), *published.chunks[1:])
    )
    with pytest.raises(Damaged, match="row 0 and 4 others have a vector that is zero or not finite"):
        load_vectors(folder, lying)


def test_a_manifest_that_was_cut_or_is_of_another_version_is_named(folder, published):
    name = f"index/{published.generation}/MANIFEST.json"
    text = folder.read(name)
    folder.write(name, text[: len(text) // 2])
    with pytest.raises(Damaged, match="MANIFEST.json is not readable JSON"):
        read_manifest(folder, published.generation)
    folder.write_json(name, json.loads(text) | {"format_version": 9})
    with pytest.raises(Damaged, match="format version 9, not 3"):
        read_manifest(folder, published.generation)
    folder.write_json(name, {key: value for key, value in json.loads(text).items() if key != "rows"})
    with pytest.raises(Damaged, match="it has no 'rows'"):
        read_manifest(folder, published.generation)


def test_rows_that_are_missing_are_noticed(folder, published):
    with pytest.raises(Damaged, match="other rows than it says"):
        load_vectors(folder, dataclasses.replace(published, chunks=published.chunks[:-1]))


def test_a_damaged_chunk_of_the_corpus_before_an_edit_is_not_shared(folder, export, published):
    """It is found when the edited corpus is built; then the older generation is refused too."""
    edited = dataclasses.replace(CORPUS, fingerprint="edited")
    path = folder.root / published.chunks[1].file.name
    path.write_bytes(path.read_bytes()[:-4])
    again = dataclasses.replace(builder(folder), corpus=edited)
    with pytest.raises(Damaged, match="has 76 bytes, not 80"):
        again.build(export, embed, QUERIES)
    assert rejection(folder, published.generation)["again"]
    np.testing.assert_array_equal(load_vectors(folder, again.build(export, embed, QUERIES)), ALL)


# --- Again, and away


def test_a_published_generation_is_built_once_and_again_only_if_it_was_found_damaged(folder, export, published):
    assert builder(folder).build(export, killed_at(1), QUERIES) == published
    reject(folder, published.generation, "a chunk is damaged", again=True)
    second = builder(folder).build(export, embed, QUERIES)
    assert second.generation != published.generation
    assert current_name(folder, export, "corpus") == second.generation
    reject(folder, second.generation, "its recall is too low", again=False)
    assert current_name(folder, export, "corpus") == second.generation


def test_removing_a_generation_keeps_what_others_share(folder, published):
    kept = dataclasses.replace(published, generation="20-abcd", step=20, chunks=published.chunks[1:], rows=ROWS - 5)
    folder.write_json("index/20-abcd/MANIFEST.json", kept.to_json())
    remove_generation(folder, published.generation)
    assert read_manifest(folder, published.generation) is None
    np.testing.assert_array_equal(load_vectors(folder, kept), ALL[5:])
    assert not (folder.root / published.chunks[0].file.name).exists()
    remove_generation(folder, "20-abcd")
    assert "20-abcd" not in generation_names(folder)


def test_a_status_is_read_as_written_and_damage_is_no_status(folder):
    assert read_status(folder, "trainer") is None
    status = Status("run", "realm", 7, 3, False, True, 5, (5,))
    write_status(folder, "trainer", status)
    assert read_status(folder, "trainer") == status
    folder.write("jobs/trainer.json", b"{")
    assert read_status(folder, "trainer") is None
