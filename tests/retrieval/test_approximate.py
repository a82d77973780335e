"""Search on the hosts: exact where shards are small, close to it with trees, never out of order."""

import dataclasses
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

pytest.importorskip("scann", reason="ScaNN runs on Linux alone")

from realm_jax.indexing import build, searchers
from realm_jax.indexing.build import Builder, Corpus, Rejected
from realm_jax.indexing.files import (
    clear_rejections,
    load_vectors,
    read_manifest,
    read_rejection,
    reject,
    remove_generation,
    write_export,
)
from realm_jax.indexing.searchers import load_searcher
from realm_jax.retrieval.embed import CorpusRows
from realm_jax.retrieval.scann import ScannConfig, Searcher, exact_rows, recall, shard_ranges
from realm_jax.storage import Bucket, Damaged, PosixFolder

SETTINGS = ScannConfig(shard_rows=3000, budget=50, tree_from=10_000)
TREES = dataclasses.replace(SETTINGS, tree_from=0, budget=200)


def clustered(rows, width=32, seed=0):
    """Vectors in clusters, as learnt towers give them, and queries near some of them."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(40, width)).astype(np.float32)

    def draw(count):
        return centres[rng.integers(0, 40, count)] + 0.5 * rng.normal(size=(count, width)).astype(np.float32)

    return draw(rows), draw(64)


VECTORS, ASKED = clustered(8000)


def in_full(queries, vectors, k):
    return np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :k]


def test_exact_rows_are_those_of_a_full_sort():
    np.testing.assert_array_equal(exact_rows(ASKED, VECTORS, 8), in_full(ASKED, VECTORS, 8))


def test_shards_cover_all_rows_evenly():
    assert shard_ranges(8000, 3000) == [(0, 2666), (2666, 5333), (5333, 8000)]
    assert shard_ranges(5, 3000) == [(0, 5)]
    assert shard_ranges(8000, 3000, 6000) == [(6000, 8000)] and shard_ranges(8000, 3000, 8000) == []


def test_small_shards_are_scored_whole_so_that_nothing_is_missed():
    found = Searcher.build(VECTORS, SETTINGS).search(ASKED, 8)
    np.testing.assert_array_equal(found, in_full(ASKED, VECTORS, 8))


def test_trees_find_nearly_all_and_in_the_exact_order():
    searcher = Searcher.build(VECTORS, TREES)
    found = searcher.search(ASKED, 8)
    assert recall(found, exact_rows(ASKED, VECTORS, 8)) > 0.9
    scores = np.take_along_axis(ASKED @ VECTORS.T, found, axis=1)
    assert (np.diff(scores, axis=1) <= 0).all()
    assert all(len({*row}) == 8 for row in found.tolist())


def test_ties_go_to_the_lower_row():
    same = np.ones((100, 8), np.float32)
    np.testing.assert_array_equal(Searcher.build(same, SETTINGS).search(same[:2], 3), [[0, 1, 2], [0, 1, 2]])


def test_stored_bfloat16_is_what_is_searched():
    stored = VECTORS.astype(ml_dtypes.bfloat16)
    rounded = stored.astype(np.float32)
    asked = ASKED.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(Searcher.build(stored, SETTINGS).search(ASKED, 8), in_full(asked, rounded, 8))


def test_recall_counts_what_was_found_in_any_order():
    assert recall(np.array([[3, 1], [7, 8]]), np.array([[1, 3], [8, 9]])) == 0.75


# --- As files


@pytest.fixture
def folder(tmp_path):
    return PosixFolder(tmp_path)


@pytest.fixture
def any_recall(monkeypatch):
    """A shard that learns with several threads may lose a little more than is allowed. Then all shards learn again."""
    monkeypatch.setattr(build, "MAX_RECALL_LOSS", 1.0)


def make(folder, settings, min_recall=0.0, step=1, vectors=VECTORS, asked=ASKED, edits=()):
    """A generation. edits: how many rows each added, of the last."""
    segments = [("one", len(vectors) - sum(edits)), *((f"edit {n}", rows) for n, rows in enumerate(edits) if rows)]
    corpus = Corpus(
        f"corpus{edits}", "tokenizer", tuple(segments),
        lambda first, last: CorpusRows(np.arange(first, last)[:, None], *[np.ones(last - first)] * 2),
    )  # fmt: skip
    record = {"step": step, "tokenizer": "tokenizer", "corpus": corpus.fingerprint, "towers": {}, "index": {}}
    export = write_export(folder, record, {"a": np.full(1, step, np.float32)}, asked)
    builder = Builder(folder, corpus, "float32", 3000, searches=settings, min_recall=min_recall)
    return builder.build(export, lambda rows: vectors[rows.ids[:, 0]], asked)


def learnt(folder, manifest):
    """The bytes of every shard's centroids and codebook."""
    names = [name for shard in manifest.searcher["shards"] for name, *_ in shard["files"]]
    return [folder.read(name) for name in names if name.endswith(("serialized_partitioner.pb", "ah_codebook.pb"))]


def test_a_generation_carries_its_searcher_and_its_recall(folder):
    manifest = make(folder, TREES, min_recall=0.5)
    assert read_manifest(folder, manifest.generation) == manifest
    assert 0.9 < manifest.recall["recall@8"] <= 1
    assert len(manifest.searcher["shards"]) == 3 and manifest.searcher["shards"][0]["leaves"] > 0
    vectors = load_vectors(folder, manifest)
    found = load_searcher(folder, manifest, vectors).search(ASKED, 8)
    assert recall(found, exact_rows(ASKED, vectors, 8)) == manifest.recall["recall@8"]


MOVED, ASKED_OF_MOVED = (rows + 0.05 * np.sin(40 * rows[:, ::-1]) for rows in (VECTORS, ASKED))


def test_a_generation_takes_what_the_one_before_has_learnt(folder):
    """Codes are of the new vectors, centroids and codebooks of the first generation, also in the third."""
    first = make(folder, TREES)
    second = make(folder, TREES, step=2, vectors=MOVED, asked=ASKED_OF_MOVED)
    third = make(folder, TREES, step=3)
    assert learnt(folder, first) == learnt(folder, second) == learnt(folder, third)
    assert first.searcher["trained"] is None
    assert second.searcher["trained"] == third.searcher["trained"]
    assert third.searcher["trained"] == {"generation": first.generation, "recall": first.recall}
    vectors = load_vectors(folder, second)
    found = load_searcher(folder, second, vectors).search(ASKED_OF_MOVED, 8)
    measured = recall(found, exact_rows(ASKED_OF_MOVED, vectors, 8))
    assert measured == second.recall["recall@8"] >= first.recall["recall@8"] - searchers.MAX_RECALL_LOSS


def test_what_no_longer_suits_is_learnt_anew(folder, caplog):
    """The rows of all clusters change places, and the axes as well."""
    few = dataclasses.replace(TREES, leaves=200, searched=10)
    first = make(folder, few)
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(32, 32)))[0].astype(np.float32)
    with caplog.at_level("INFO"):
        second = make(folder, few, step=2, vectors=VECTORS[::-1] @ turn, asked=ASKED @ turn)
    assert "no longer fit: recall@8" in caplog.text
    assert second.searcher["trained"] is None and learnt(folder, first) != learnt(folder, second)
    assert second.recall["recall@8"] > 0.9


def test_what_cannot_be_taken_is_learnt(folder, caplog, any_recall):
    """Of other settings or another size, refused, or with damaged files."""
    first = make(folder, TREES)
    other = make(folder, dataclasses.replace(TREES, leaves=50), step=2, vectors=MOVED)
    larger = make(folder, TREES, step=3, vectors=np.concatenate([VECTORS, MOVED[:9]]))
    assert other.searcher["trained"] is larger.searcher["trained"] is None
    file = first.searcher["shards"][1]["files"][0][0]
    folder.write(file, folder.read(file)[:-1])
    again = make(folder, TREES, step=4, vectors=MOVED, asked=ASKED_OF_MOVED)
    assert "the shard learns new centroids" in caplog.text
    assert [a == b for a, b in zip(learnt(folder, first), learnt(folder, again), strict=True)].count(False) == 2
    for made in (first, again):
        reject(folder, made.generation, "of this test", retryable=False)
    assert make(folder, TREES, step=5).searcher["trained"] is None


@pytest.mark.parametrize("fault", [RuntimeError("of another version"), FileNotFoundError("gone")])
def test_what_cannot_be_loaded_is_learnt(tmp_path, monkeypatch, caplog, fault):
    def fail(vectors, trained, folder):
        (folder / "half.npy").write_bytes(b"half")
        raise fault

    monkeypatch.setattr(searchers, "renew_shard", fail)
    folder, one = PosixFolder(tmp_path), dataclasses.replace(TREES, shard_rows=10_000)
    first, second = make(folder, one), make(folder, one, step=2, vectors=MOVED, asked=ASKED_OF_MOVED)
    assert f"{fault}; the shard learns new centroids" in caplog.text
    assert learnt(folder, first) != learnt(folder, second) and not list(tmp_path.rglob("half.npy"))
    load_searcher(folder, second, load_vectors(folder, second))


def test_a_bucket_s_generation_takes_what_the_one_before_has_learnt(monkeypatch, tmp_path):
    monkeypatch.setenv("REALM_STAGING", str(tmp_path / "staged"))
    folder = Bucket(f"file://{tmp_path}/bucket", LocalFileSystem(auto_mkdir=True))
    first, second = make(folder, TREES), make(folder, TREES, step=2, vectors=MOVED, asked=ASKED_OF_MOVED)
    assert learnt(folder, first) == learnt(folder, second)


def test_small_shards_have_nothing_to_take(folder):
    assert make(folder, SETTINGS).searcher["trained"] is make(folder, SETTINGS, step=2).searcher["trained"] is None


SOME_TREES = dataclasses.replace(TREES, tree_from=1000)
ADDED = np.concatenate([VECTORS, 2 * MOVED[:900]])  # longer, so that the searches of all queries end among them
ASKED_OF_ADDED = ADDED[-64:].copy()


def rows_of(manifest):
    return [(shard["first"], shard["last"]) for shard in manifest.searcher["shards"]]


def test_an_edit_builds_a_shard_of_what_it_added_and_shares_the_others(tmp_path, monkeypatch, any_recall):
    folder, built, build = PosixFolder(tmp_path), [], searchers.build_shard
    monkeypatch.setattr(searchers, "build_shard", lambda rows, *rest: built.append(len(rows)) or build(rows, *rest))
    first = make(folder, SOME_TREES)
    once = make(folder, SOME_TREES, vectors=ADDED[:8300], edits=[300])
    twice = make(folder, SOME_TREES, vectors=ADDED, edits=[300, 600], asked=ASKED_OF_ADDED)
    assert built == [2666, 2667, 2667, 300, 900]
    assert once.searcher["shards"][:3] == twice.searcher["shards"][:3] == first.searcher["shards"]
    assert rows_of(twice)[3:] == [(8000, 8900)] and not twice.searcher["shards"][3]["leaves"]
    assert twice.searcher["trained"] == {"generation": first.generation, "recall": first.recall}
    vectors = load_vectors(folder, twice)
    found = load_searcher(folder, twice, vectors).search(ASKED_OF_ADDED, 8)
    np.testing.assert_array_equal(found, exact_rows(ASKED_OF_ADDED, vectors, 8))
    assert found.min() >= 8000 and twice.recall == {"recall@8": 1.0}


def test_many_added_rows_have_a_tree_which_the_next_edit_shares(folder, any_recall):
    few = dataclasses.replace(SOME_TREES, tree_from=500)
    make(folder, few)
    many = make(folder, few, vectors=ADDED[:8800], edits=[800])
    more = make(folder, few, vectors=ADDED, edits=[800, 100])
    assert rows_of(more)[3:] == [(8000, 8800), (8800, 8900)]
    assert more.searcher["shards"][3] == many.searcher["shards"][3]


def test_an_edit_that_adds_nothing_builds_nothing(folder, monkeypatch, any_recall):
    first = make(folder, SOME_TREES)
    monkeypatch.setattr(searchers, "build_shard", None)
    assert make(folder, SOME_TREES, edits=[0]).searcher["shards"] == first.searcher["shards"]


def test_shards_that_are_shared_stay_when_their_generation_is_removed(folder, any_recall):
    first, edited = make(folder, SOME_TREES), make(folder, SOME_TREES, vectors=ADDED[:8300], edits=[300])
    remove_generation(folder, first.generation)
    load_searcher(folder, edited, load_vectors(folder, edited)).search(ASKED, 8)


def test_a_shared_shard_that_is_damaged_is_built_anew(folder):
    first = make(folder, SOME_TREES)
    file = first.searcher["shards"][1]["files"][0][0]
    folder.write(file, folder.read(file)[:-1])
    with pytest.raises(Damaged, match="searcher of rows 2666 to 5333"):
        make(folder, SOME_TREES, vectors=ADDED[:8300], edits=[300])
    edited = make(folder, SOME_TREES, vectors=ADDED[:8300], edits=[300])
    assert rows_of(edited) == shard_ranges(8300, 3000)
    assert {name.split("/")[1] for name, *_ in map(tuple, edited.files)} == {edited.generation}


@pytest.mark.parametrize("change", [{"leaves": 50}, {"budget": 100}])
def test_settings_that_changed_share_nothing(folder, change):
    make(folder, SOME_TREES)
    edited = make(folder, dataclasses.replace(SOME_TREES, **change), vectors=ADDED[:8300], edits=[300])
    assert rows_of(edited) == shard_ranges(8300, 3000)


def test_the_next_generation_has_the_whole_corpus_in_equal_shards(folder):
    make(folder, SOME_TREES)
    make(folder, SOME_TREES, vectors=ADDED, edits=[900])
    after = make(folder, SOME_TREES, vectors=ADDED, edits=[900], step=2)
    assert rows_of(after) == shard_ranges(8900, 3000) and after.searcher["trained"] is None


def test_too_low_a_recall_is_refused(folder, tmp_path):
    poor = dataclasses.replace(TREES, leaves=500, searched=1, budget=8)
    with pytest.raises(Rejected, match=r"recall@8 of its searcher is 0\.\d+, below config.scann.min_recall=0.99"):
        make(folder, poor, min_recall=0.99)
    names = folder.names("index")
    assert read_manifest(folder, names[0]) is None and not read_rejection(folder, names[0]).retryable
    chunks = {path: path.stat().st_mtime_ns for path in tmp_path.glob("index/*/*.bin")}
    clear_rejections(folder)  # as a builder does when it starts
    manifest = make(folder, TREES, min_recall=0.5)
    assert {shard["leaves_searched"] for shard in manifest.searcher["shards"]} != {1}, "built with the settings of now"
    assert {path: path.stat().st_mtime_ns for path in chunks} == chunks, "nothing is embedded again"


def test_a_damaged_searcher_is_named(folder):
    manifest = make(folder, TREES)
    file = manifest.searcher["shards"][1]["files"][0]
    folder.write(file[0], folder.read(file[0])[:-1])
    with pytest.raises(Damaged, match="searcher of rows 2666 to 5333: .* bytes, not"):
        load_searcher(folder, manifest, VECTORS)


def test_a_shard_that_goes_bad_before_publication_is_built_again(folder, tmp_path, monkeypatch):
    build, spoiled = searchers._build, []

    def spoil(folder, manifest, settings, work):
        build(folder, manifest, settings, work)
        if not spoiled:
            spoiled.append(next((tmp_path / work.name).glob("scann_config.pb")))
            spoiled[0].write_bytes(spoiled[0].read_bytes()[:-1])

    monkeypatch.setattr(searchers, "_build", spoil)
    with pytest.raises(Damaged, match="scann_config.pb has"):
        make(folder, TREES)
    good = {path: path.stat().st_mtime_ns for path in tmp_path.glob("index/*/scann-*/*.done")}
    assert len(good) == 2
    manifest = make(folder, TREES)
    assert len(manifest.searcher["shards"]) == 3
    assert {path: path.stat().st_mtime_ns for path in good} == good, "the others stay"


def test_a_pickle_beside_the_files_is_never_read(folder, tmp_path):
    manifest = make(folder, SETTINGS)
    home = (tmp_path / manifest.searcher["shards"][0]["files"][0][0]).parent
    (home / "scann_docids.pkl").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    load_searcher(folder, manifest, VECTORS).search(ASKED, 8)
    assert not (tmp_path / "owned").exists()


def test_an_installed_tensorflow_stays_out(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise RuntimeError('TensorFlow was imported')")
    load = "from realm_jax.retrieval.scann import load_scann; load_scann()"
    code = f"{load}; import sys; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"})
