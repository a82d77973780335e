"""The second store of a prepared folder: the same rows in the tokens of a reader with a tokenizer of its own."""

import shutil

import pytest
from tiny_run import PEOPLE
from unigram import READER_SIZE, TEXTS, prepare_for_two, unigram

from realm_jax.cli import main as cli
from realm_jax.cli.prepare import prepare
from realm_jax.corpora.build import build_store
from realm_jax.corpora.outcomes import Article
from realm_jax.data.sources import open_sources
from realm_jax.data.store import PassageStore, remove_documents
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import UserError


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return prepare_for_two(tmp_path_factory.mktemp("both"))


def characters(store, tokenizer, row, ranges):
    """Ranges of tokens of a row's body as strings."""
    offsets, text = tokenizer.offsets_of(store.text(row), store.body_tokens(row)), store.text(row)
    return [text[offsets[start, 0] : offsets[end - 1, 1]] for start, end in ranges]


def test_the_second_store_has_the_same_rows_sentences_and_spans(both):
    sources = open_sources(both, reader=True)
    tokenizer, store, text = sources.for_reader
    assert text is store and sources.pretraining_is_corpus and isinstance(sources.tokenizer, WordPiece)
    assert tokenizer.size == READER_SIZE and store.tokenizer_fingerprint == tokenizer.fingerprint
    assert len(store) == len(sources.passages) == len(PEOPLE)
    for row in range(len(store)):
        own, read = (sources.passages, sources.tokenizer, row), (store, tokenizer, row)
        assert store.text(row) == sources.passages.text(row) and store.title(row) == sources.passages.title(row)
        assert store.body_tokens(row).tolist() == tokenizer.encode(store.text(row)).ids
        assert characters(*read, store.sentences(row)) == characters(*own, sources.passages.sentences(row))
        assert characters(*read, store.spans(row)[:, :2]) == characters(*own, sources.passages.spans(row)[:, :2])
    assert open_sources(both).reader is None and "reader" not in open_sources(both).fingerprints()


def test_what_cannot_be_the_reader_s_tokens_is_refused(both, people, tmp_path, capsys):
    prepare(None, both, reader_vocab=both / "reader" / "tokenizer", workers=1)
    assert "the tokens of the same reader; nothing to do" in capsys.readouterr().out
    with pytest.raises(UserError, match="has the tokens of .*, so reader and retriever share them"):
        prepare(None, both, reader_vocab=both / "tokenizer")
    (tmp_path / "other.json").write_bytes(unigram(READER_SIZE - 1))
    with pytest.raises(UserError, match="has the tokens of another reader; remove the folder"):
        prepare(None, both, reader_vocab=tmp_path / "other.json")
    with pytest.raises(UserError, match="--output=.*: not a prepared folder"):
        prepare(None, tmp_path / "nothing", reader_vocab=tmp_path / "other.json")
    with pytest.raises(UserError, match="--reader-vocab: is the work of processes of this machine"):
        prepare(None, "gs://bucket/data", reader_vocab=tmp_path / "other.json")
    with pytest.raises(UserError, match="--passages: name the texts"):
        prepare(None, tmp_path / "nothing")
    with pytest.raises(UserError, match="no tokens for a reader with a tokenizer of its own; make them with"):
        open_sources(people, reader=True)


def test_a_store_that_was_edited_alone_gets_its_tokens_when_it_is_prepared_again(both, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(both, folder)
    before = open_sources(folder).passages.fingerprint
    remove_documents(folder / "passages", ["p3"])
    news = Article("news", "Ada Dahl", "Ada Dahl was born (1803). The house of Ada Dahl stands.")
    build_store(
        [news], open_sources(folder).tokenizer, folder / "passages", PassageStore.open(folder / "passages").limit
    )
    with pytest.raises(UserError, match="reader: older than .*passages; bring it up to date with"):
        open_sources(folder, reader=True)
    prepare(None, folder, reader_vocab=folder / "reader" / "tokenizer", workers=1)
    sources = open_sources(folder, reader=True)
    texts = [[store.text(row) for row in range(len(store))] for store in (sources.passages, sources.reader.passages)]
    assert texts[0] == texts[1] and len(texts[0]) == len(PEOPLE) and TEXTS[3] not in texts[0]
    earlier = open_sources(folder, before, reader=True)
    assert len(earlier.reader.passages) == len(PEOPLE) and TEXTS[3] in earlier.reader.passages.text(3)


def test_the_command_that_edits_a_corpus_keeps_both_stores_together(both, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(both, folder)
    assert cli.main(["corpus", "remove", "p3", f"--data={folder}"]) == 0
    assert len(open_sources(folder, reader=True).reader.passages) == len(PEOPLE) - 1
