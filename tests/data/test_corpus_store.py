"""The passage store: what is written comes back, in any number of segments, and damage is named."""

import dataclasses
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.data import layouts
from realm_jax.data.examples import salient_rows
from realm_jax.data.store import Passage, PassageStore, append_segment
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import UserError

WORDPIECE = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"])


def passage(
    document_id: str = "d0",
    title: int = 2,
    body: int = 5,
    text: str = "Ein Text – 漢字.",
    kinds: tuple[str, ...] = ("date",),
) -> Passage:
    """A row with `title` and `body` pieces, one sentence and one span."""
    return Passage(
        document_id=document_id,
        title=f"Title of {document_id}",
        text=text,
        title_tokens=np.arange(10, 10 + title),
        body_tokens=np.arange(100, 100 + body),
        sentences=np.array([[0, body]]),
        spans=[(0, 1, kind) for kind in kinds] if body else [],
    )


def write(folder: Path, *passages: Passage, limit: int = 288) -> PassageStore:
    with append_segment(folder, WORDPIECE, limit) as writer:
        writer.write(passages)
    return PassageStore.open(folder)


def test_rows_come_back_as_they_were_written(tmp_path):
    store = write(tmp_path / "store", passage("first", 2, 5), passage("second", 0, 3, text="kurz"))
    assert len(store) == 2 and store.documents == 2 and store.limit == 288
    assert store.tokenizer_fingerprint == WORDPIECE.fingerprint and store.span_kinds == ("date",)
    assert store.title_tokens(0).tolist() == [10, 11] and store.body_tokens(0).tolist() == [100, 101, 102, 103, 104]
    assert store.title_tokens(1).tolist() == [] and store.body_tokens(1).dtype == np.uint16
    assert store.sentences(1).tolist() == [[0, 3]] and store.sentences(1).dtype == np.int32
    assert store.spans(0).tolist() == [[0, 1, 0]] and store.spans(0).dtype == np.int32
    assert store.text(0) == "Ein Text – 漢字." and store.text(1) == "kurz"
    assert store.title(1) == "Title of second" and store.document_id(1) == "second"
    assert store.counts("tokens").tolist() == [7, 3] and store.column("title_lengths").tolist() == [2, 0]
    with pytest.raises(IndexError, match="row 2 is not among the 2 rows"):
        store.text(2)
    store.verify()


def test_a_store_without_rows_opens(tmp_path):
    store = write(tmp_path / "store")
    assert len(store) == 0 and store.documents == 0 and len(store.rows_of("a")) == 0
    assert store.document_matrix(8, WORDPIECE.special)[0].shape == (0, 8)


def test_an_appended_segment_adds_rows_and_leaves_the_old_ones_alone(tmp_path):
    """Kinds of spans have other codes in it, and mean the same."""
    folder = tmp_path / "store"
    before = write(folder, passage("a"), passage("b", kinds=("name", "date")))
    after = write(folder, passage("c", 1, 7, kinds=("place",)), passage("c", 1, 8, kinds=("name",)))
    assert len(before) == 2, "an open store stays as it was"
    assert len(after) == 4 and after.fingerprint != before.fingerprint
    assert [after.document_id(row) for row in range(4)] == ["a", "b", "c", "c"]
    assert after.body_tokens(3).tolist() == list(range(100, 108))
    rows = [after.rows_of(document) for document in ("a", "b", "c", "unknown")]
    assert rows == [range(0, 1), range(1, 2), range(2, 4), range(0)]
    kinds = [[after.span_kinds[code] for code in after.spans(row)[:, 2]] for row in range(4)]
    assert kinds == [["date"], ["name", "date"], ["place"], ["name"]]
    assert after.column("spans").tolist() == [span for row in range(4) for span in after.spans(row).tolist()]
    assert after.counts("tokens").tolist() == [7, 7, 8, 9]
    ids, lengths, _ = after.document_matrix(16, WORDPIECE.special, slice(1, 4))
    assert lengths.tolist() == [10, 11, 12] and ids.shape == (3, 16)
    after.verify()


OUTSIDE = "document 'out' has a salient span outside of its sentences"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([passage("b"), passage("a")], "document 'a' is in .* already"),
        ([passage("b"), passage("c"), passage("b")], "document 'b' was written twice"),
        ([passage("b"), dataclasses.replace(passage("out"), sentences=np.zeros((0, 2), np.int32))], OUTSIDE),
        ([passage("b"), dataclasses.replace(passage("out"), sentences=np.array([[2, 5]]))], OUTSIDE),
        ([passage("b\nc", title=80_000)], r"document 'b\\nc': its title keeps 80,000 tokens, more than 65,535; "),
    ],
)
def test_rows_that_cannot_be_stored_are_refused_and_change_nothing(tmp_path, rows, message):
    folder = tmp_path / "store"
    write(folder, passage("a"))
    with pytest.raises(UserError, match=message):
        write(folder, *rows)
    assert len(PassageStore.open(folder)) == 1 and not (folder / "segment-00001").exists()


def test_a_segment_of_another_tokenizer_or_limit_is_refused(tmp_path):
    folder = tmp_path / "store"
    write(folder, passage("a"))
    with pytest.raises(UserError, match="limit is 288, not 100"):
        write(folder, passage("b"), limit=100)
    other = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "z"])
    with pytest.raises(UserError, match="tokenizer is"), append_segment(folder, other, 288):
        pass


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    folder = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt), append_segment(folder, WORDPIECE, 288) as writer:
        writer.write([passage()])
        raise KeyboardInterrupt
    assert not folder.exists()
    with pytest.raises(UserError, match="holds no finished passage store"):
        PassageStore.open(folder)


def test_a_segment_that_a_killed_writer_left_is_replaced(tmp_path):
    folder = tmp_path / "store"
    write(folder, passage("a"))
    (folder / "segment-00001").mkdir()
    (folder / "segment-00001" / "tokens.npy").write_bytes(b"half a file")
    assert len(PassageStore.open(folder)) == 1
    assert len(write(folder, passage("b"))) == 2


def test_the_fingerprint_covers_content_and_tokenizer(tmp_path):
    one = write(tmp_path / "one", passage("a"), passage("b"))
    with append_segment(tmp_path / "two", WORDPIECE, 288) as writer:
        writer.write([passage("a")])
        writer.write([])
        writer.write([passage("b")])
    assert PassageStore.open(tmp_path / "two").fingerprint == one.fingerprint, "batches do not matter"
    assert write(tmp_path / "three", passage("a"), passage("c")).fingerprint != one.fingerprint
    other = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "z"])
    with append_segment(tmp_path / "four", other, 288) as writer:
        writer.write([passage("a"), passage("b")])
    assert PassageStore.open(tmp_path / "four").fingerprint != one.fingerprint


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("segment-00000/texts.utf8", lambda content: content[:-1], r"segment-00000/texts\.utf8 has 39 bytes, not 40"),
        ("segment-00000/texts.utf8", lambda content: None, r"texts\.utf8 is missing"),
        ("segment-00000/texts.utf8", lambda content: content[:-1] + b"\xff",
         r"texts\.utf8 is damaged \(row 1: invalid start byte\); prepare the data again"),
        *(
            (f"segment-00000/{name}", flipped, f"{name} is damaged")
            for name in ("texts.utf8", "tokens.npy", "tokens.offsets.npy", "document_keys.npy", "salient_reach.npy")
        ),
        ("segment-00000/tokens.npy", lambda content: b"x" * len(content), r"tokens\.npy is damaged \("),
        ("segment-00000/tokens.npy", lambda content: content.replace(b"'<u2'", b"'<i2'"), "tokens.npy holds int16"),
        ("STORE.json", lambda content: None, "holds no finished passage store"),
        ("STORE.json", lambda content: content.replace(b'_version": 2', b'_version": 9'), "has format version 9"),
        ("STORE.json", lambda content: content.replace(b'"limit"', b'"other"'), "STORE.json is damaged"),
        ("STORE.json", lambda content: b"{", "STORE.json is not readable JSON"),
    ],
)  # fmt: skip
def test_damage_names_the_file(tmp_path, name, change, message):
    """Sizes and types are looked at when a store is opened, text when it is read, and everything by `verify`."""
    folder = tmp_path / "store"
    write(folder, passage("a"), passage("b"))
    content = change((folder / name).read_bytes())
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        store = PassageStore.open(folder)
        assert store.text(0) == "Ein Text – 漢字." and store.text(1)
        store.verify()


def test_a_token_beyond_the_vocabulary_is_damage(tmp_path):
    write(tmp_path / "store", passage("a", body=5))  # tokens 100 … 104
    assert PassageStore.open(tmp_path / "store", 105).document_matrix(16, WORDPIECE.special)[0].max() == 104
    damaged = pickle.loads(pickle.dumps(PassageStore.open(tmp_path / "store", 104)))
    with pytest.raises(UserError, match="store is damaged: it holds token 104, but the vocabulary ends before 104"):
        damaged.document_matrix(16, WORDPIECE.special)


def test_a_store_travels_to_another_process_as_its_path(tmp_path):
    store = write(tmp_path / "store", *(passage(f"d{number}", 5, 250) for number in range(200)))
    packed = pickle.dumps(store)
    assert len(packed) < 1000 and pickle.loads(packed).text(0) == store.text(0)


def test_a_store_of_more_files_than_may_be_open_says_so(tmp_path):
    write(tmp_path / "store", passage("one"))
    free = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # the lowest free descriptors; the last is the limit
    for descriptor in free:
        os.close(descriptor)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], limits[1]))  # leaves seven of them
    try:
        with pytest.raises(UserError, match=r"too many open files \(1 segment\(s\) of 15 each\); raise"):
            PassageStore.open(tmp_path / "store")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_how_far_a_span_reaches_has_a_limit(tmp_path):
    """A row without spans is none with a salient span, however long a query is."""
    without = dataclasses.replace(passage("none"), spans=[])
    store = write(tmp_path / "store", passage("short"), without, dataclasses.replace(
        passage("long", body=70_000), spans=[(69_998, 70_000, "date")]
    ))  # fmt: skip
    assert [salient_rows(store, room).tolist() for room in (0, 1, 65_533, 65_534, 100_000)] == [
        [], [0], [0], [0, 2], [0, 2]
    ]  # fmt: skip


lengths_of_rows = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20)), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(rows=lengths_of_rows, length=st.integers(3, 24), cut=st.integers(0, 12), seed=st.integers(0, 9))
def test_the_matrix_is_the_document_layout_row_by_row(tmp_path_factory, rows, length, cut, seed):
    folder = tmp_path_factory.mktemp("matrix") / "store"
    passages = [passage(f"d{number}", title, body) for number, (title, body) in enumerate(rows)]
    cut = min(cut, len(rows))
    write(folder, *passages[:cut])
    store = write(folder, *passages[cut:])
    first = seed % len(rows)
    ids, lengths, titles = store.document_matrix(length, WORDPIECE.special, slice(first, None))
    assert ids.dtype == lengths.dtype == titles.dtype == np.uint16
    for row in range(first, len(rows)):
        expected = layouts.document(store.title_tokens(row), store.body_tokens(row), length, WORDPIECE.special)
        np.testing.assert_array_equal(ids[row - first], expected.ids)
        assert lengths[row - first] == expected.used
        assert titles[row - first] == min(len(store.title_tokens(row)), length - 3)
