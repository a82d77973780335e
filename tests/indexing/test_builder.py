"""Generations on disk: built by any number of processes that may die, verified before they are served, retained."""

import dataclasses
import json
import re

import numpy as np
import pytest

from realm_jax.host import Preempted
from realm_jax.indexing import files as generations
from realm_jax.indexing.build import Builder, Corpus
from realm_jax.indexing.heartbeat import Status, read_status, write_status
from realm_jax.processes import WorkerSlice
from realm_jax.retrieval.embed import CorpusRows
from realm_jax.storage import Damaged, PosixFolder, sha256_hex

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
    return generations.write_export(folder, record, towers, np.ones((3, WIDTH), np.float32))


def builder(folder, process=0, processes=1, **options):
    return Builder(folder, CORPUS, options.pop("dtype", "float32"), CHUNK, WorkerSlice(process, processes), **options)


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


def build(folder, export, embed=embed, queries=QUERIES, **options):
    return builder(folder, **options).build(export, embed, queries)


def holds_all(folder, manifest):
    np.testing.assert_array_equal(generations.load_vectors(folder, manifest), ALL)
    return True


@pytest.fixture
def published(folder, export):
    return build(folder, export)


# --- Exports


def test_an_export_is_read_as_it_was_written_and_removed(folder, export):
    assert generations.read_export(folder, 10) == export
    towers = generations.read_encoders(folder, export)
    assert towers.keys() == {"document_embedder/kernel"}
    np.testing.assert_array_equal(towers["document_embedder/kernel"], np.ones((2, 2)))
    np.testing.assert_array_equal(generations.read_queries(folder, export), QUERIES)
    assert generations.export_steps(folder) == [10]
    folder.remove("exports/10/EXPORT.json")
    assert generations.read_export(folder, 10) is None, "without its record it does not exist"
    generations.remove_export(folder, 10)
    assert generations.export_steps(folder) == []


def test_the_same_export_stays_and_another_replaces_it(folder, export):
    assert make_export(folder, 10) == export
    other = make_export(folder, 10, scale=2.0)
    assert other.parameters != export.parameters
    assert generations.read_export(folder, 10) == other


def test_a_damaged_export_is_named(folder, export):
    for file, read in ((export.file, generations.read_encoders), (export.queries, generations.read_queries)):
        folder.write(file.name, b"x" * file.bytes)
        with pytest.raises(Damaged, match=f"{re.escape(file.name)} is damaged"):
            read(folder, export)
    folder.write("exports/10/EXPORT.json", b'{"format_version": 3, "step"')
    with pytest.raises(Damaged, match="EXPORT.json is not readable JSON"):
        generations.read_export(folder, 10)


# --- Building


def test_a_generation_holds_every_row_and_says_what_it_is(folder, export):
    manifest = build(folder, export)
    assert holds_all(folder, manifest) and generations.read_manifest(folder, manifest.generation) == manifest
    assert (manifest.rows, manifest.width, manifest.step, manifest.corpus) == (ROWS, WIDTH, 10, "corpus")
    rows = [("one", 0, 5), ("one", 5, 10), ("one", 10, 13), ("two", 0, 5), ("two", 5, 10)]
    assert [(chunk.segment, chunk.first, chunk.last) for chunk in manifest.chunks] == rows


def test_files_are_read_once_and_only_if_a_part_needs_them(folder, published, monkeypatch):
    """A process loads the rows of its own devices, which meet in a file and leave others out."""
    names, read = [], PosixFolder.read_verified
    monkeypatch.setattr(PosixFolder, "read_verified", lambda self, file: names.append(file.name) or read(self, file))
    parts = [slice(2, 4), slice(4, 9), slice(17, 18), slice(20, 20)]
    for part, vectors in zip(parts, generations.load_parts(folder, published, parts), strict=True):
        np.testing.assert_array_equal(vectors, ALL[part])
    assert sorted(names) == sorted(published.chunks[number].file.name for number in (0, 1, 3))


def test_bfloat16_comes_back_as_bfloat16(folder, export):
    vectors = generations.load_vectors(folder, build(folder, export, dtype="bfloat16"))
    assert vectors.dtype.name == "bfloat16"
    np.testing.assert_allclose(vectors.astype(np.float32), ALL, rtol=1e-2)


@pytest.mark.parametrize("call", [1, 3, 5, 6])  # the last is the self-check's: then only the manifest is to be written
@pytest.mark.parametrize("processes", [1, 3])
def test_a_builder_that_is_killed_is_gone_on_from_also_by_others(folder, export, call, processes):
    with pytest.raises(Killed):
        build(folder, export, killed_at(call))
    written = {path: path.stat().st_mtime_ns for path in folder.root.rglob("*.bin")}
    assert generations.read_manifest(folder, generations.current_name(folder, export, "corpus")) is None
    assert holds_all(folder, build(folder, export, process=processes - 1, processes=processes))
    assert {path: path.stat().st_mtime_ns for path in written} == written, "what was done is not done again"


def test_processes_share_the_chunks_and_bytes_do_not_depend_on_their_number(folder, export, tmp_path):
    alone = build(folder, export)
    other = PosixFolder(tmp_path / "other")
    same, embedded = make_export(other, 10), []

    def by(name):
        return lambda rows: embedded.append(name) or embed(rows)

    def meanwhile():  # the second process works whenever the first is between two chunks
        if len(embedded) == 2:
            with pytest.raises(Killed):
                second = by("second")
                build(other, same, lambda rows: (killed_at(1) if len(embedded) > 3 else second)(rows), **two)

    two = {"process": 1, "processes": 2}
    shared = build(other, same, by("first"), processes=2, check=meanwhile)
    assert {*embedded} == {"first", "second"}
    assert [chunk.file.sha256 for chunk in shared.chunks] == [chunk.file.sha256 for chunk in alone.chunks]


def test_two_builders_at_once_waste_work_and_overwrite_nothing(folder, export):
    manifests, written = [], {}

    def other():
        if not manifests:
            manifests.append(build(folder, export))
            written.update({path: path.stat().st_mtime_ns for path in folder.root.rglob("*.bin")})

    mine = build(folder, export, check=other)
    assert mine == manifests[0] == generations.read_manifest(folder, mine.generation) and holds_all(folder, mine)
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_a_builder_that_is_told_to_stop_stops_between_chunks(folder, export):
    def stop():
        raise Preempted

    with pytest.raises(Preempted):
        build(folder, export, check=stop)
    assert not list(folder.root.rglob("MANIFEST.json"))


def test_the_first_write_that_fails_ends_the_work(folder, export, monkeypatch):
    calls = []

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(PosixFolder, "write", full)
    with pytest.raises(OSError, match="no space"):
        build(folder, export, lambda rows: calls.append(rows) or embed(rows))
    assert len(calls) <= 2


def test_a_chunk_that_goes_bad_before_publication_is_found_and_embedded_again(folder, export):
    def spoil():
        if len(list(folder.root.rglob("*.bin"))) == 5:
            (chunk,) = folder.root.rglob("000000005-*.bin")
            chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")

    with pytest.raises(Damaged, match="000000005-000000010-.*is damaged"):
        build(folder, export, check=spoil)
    assert holds_all(folder, build(folder, export))


def test_vectors_that_are_not_those_of_the_passages_are_never_published(folder, export):
    shift = iter([0] * 5 + [1] * 5)  # some are embedded again, which shows it
    for message, tower, queries in (
        ("zero or not finite", lambda rows: embed(rows) * np.nan, QUERIES),
        ("vectors of size 4, not 8", embed, np.ones((3, 8), np.float32)),
        ("holds vectors of other passages", lambda rows: embed(rows) + 10 * next(shift), QUERIES),
    ):
        with pytest.raises(Damaged, match=message):
            build(folder, make_export(folder, 10, scale=len(message)), tower, queries)
    assert not list(folder.root.rglob("MANIFEST.json"))


# --- Reading


def test_a_truncated_chunk_and_a_flipped_byte_are_named(folder, published):
    path = folder.root / published.chunks[1].file.name
    whole = path.read_bytes()
    for spoiled, message in ((whole[:-4], "has 76 bytes, not 80"), (bytes([whole[0] ^ 1]) + whole[1:], "is damaged")):
        path.write_bytes(spoiled)
        with pytest.raises(Damaged, match=rf"000000005-000000010-\w+.bin {message}"):
            generations.load_vectors(folder, published)
    np.testing.assert_array_equal(generations.load_vectors(folder, published, 10, ROWS), ALL[10:])


@pytest.mark.parametrize("value", [np.nan, 0.0, np.inf])
def test_bad_vectors_with_a_right_checksum_are_refused(folder, published, value):
    first, *others = published.chunks
    data = np.full((5, WIDTH), value, np.float32).tobytes()
    folder.write(first.file.name, data)
    lying = first._replace(file=first.file._replace(sha256=sha256_hex(data)))
    with pytest.raises(Damaged, match="row 0 and 4 others have a vector that is zero or not finite"):
        generations.load_vectors(folder, dataclasses.replace(published, chunks=(lying, *others)))


def test_a_manifest_that_was_cut_or_is_of_another_version_is_named(folder, published):
    name = f"index/{published.generation}/MANIFEST.json"
    text, fields = folder.read(name), folder.read_json(name)
    for content, message in (
        (text[: len(text) // 2], "MANIFEST.json is not readable JSON"),
        (json.dumps(fields | {"format_version": 9}).encode(), "format version 9, not 3"),
        (json.dumps({key: fields[key] for key in fields.keys() - {"rows"}}).encode(), "it has no 'rows'"),
    ):
        folder.write(name, content)
        with pytest.raises(Damaged, match=message):
            generations.read_manifest(folder, published.generation)


def test_rows_that_are_missing_are_noticed(folder, published):
    with pytest.raises(Damaged, match="other rows than its manifest lists"):
        generations.load_vectors(folder, dataclasses.replace(published, chunks=published.chunks[:-1]))


def test_a_damaged_chunk_of_the_corpus_before_an_edit_is_not_shared(folder, export, published):
    """It is found when the edited corpus is built; then the older generation is refused too."""
    path = folder.root / published.chunks[1].file.name
    path.write_bytes(path.read_bytes()[:-4])
    again = dataclasses.replace(builder(folder), corpus=dataclasses.replace(CORPUS, fingerprint="edited"))
    with pytest.raises(Damaged, match="has 76 bytes, not 80"):
        again.build(export, embed, QUERIES)
    assert generations.read_rejection(folder, published.generation).retryable
    assert holds_all(folder, again.build(export, embed, QUERIES))


# --- Again, and away


def test_a_published_generation_is_built_once_and_again_only_if_it_was_found_damaged(folder, export, published):
    assert build(folder, export, killed_at(1)) == published
    generations.reject(folder, published.generation, "a chunk is damaged", retryable=True)
    second = build(folder, export)
    assert second.generation != published.generation
    assert generations.current_name(folder, export, "corpus") == second.generation
    generations.reject(folder, second.generation, "its recall is too low", retryable=False)
    assert generations.current_name(folder, export, "corpus") == second.generation


def test_removing_a_generation_keeps_what_others_share(folder, published):
    kept = dataclasses.replace(published, generation="20-abcd", step=20, chunks=published.chunks[1:], rows=ROWS - 5)
    folder.write_json("index/20-abcd/MANIFEST.json", kept.to_json())
    generations.remove_generation(folder, published.generation)
    assert generations.read_manifest(folder, published.generation) is None
    np.testing.assert_array_equal(generations.load_vectors(folder, kept), ALL[5:])
    assert not (folder.root / published.chunks[0].file.name).exists()
    generations.remove_generation(folder, "20-abcd")
    assert "20-abcd" not in generations.generation_names(folder)


def test_a_status_is_read_as_written_and_damage_is_no_status(folder):
    assert read_status(folder, "trainer") is None
    status = Status("run", "realm", 7, 3, False, True, 5, (5,))
    write_status(folder, "trainer", status)
    assert read_status(folder, "trainer") == status
    folder.write("jobs/trainer.json", b"{")
    assert read_status(folder, "trainer") is None
