"""Articles to passages: nothing is lost, nothing is too long, spans are whole pieces inside one sentence."""

import re
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from realm_jax.corpora import packer
from realm_jax.corpora.articles import Article
from realm_jax.corpora.packer import PackingSummary, build_store
from realm_jax.corpora.texts import read_passages
from realm_jax.data import spans
from realm_jax.data.store import PassageStore
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import UserError

WORDS = "the cat sat on a mat in paris before dawn and left 1990 ##s un ##believ ##able".split()
WORDPIECE = WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *".,:!?-/", "東", "京"])
SENTENCE = "The cat sat on a mat in Paris before dawn and left."  # 12 words and a full stop: 13 pieces


def built(tmp_path, *articles: Article, limit: int = 32) -> tuple[PassageStore, PackingSummary]:
    folder = tmp_path / f"store{len(list(tmp_path.iterdir()))}"
    summary = build_store(articles, WORDPIECE, folder, limit)
    return PassageStore.open(folder), summary


def finds(monkeypatch, span: str, kind: str) -> None:
    """Let each occurrence of a text be a salient span."""

    def find(text):
        return [spans.Span(m.start(), m.end(), kind, 1.0) for m in re.finditer(re.escape(span), text)]

    monkeypatch.setattr(spans, "finder", lambda name: spans.SpanFinder(name, find))


def pieces(store: PassageStore, row: int) -> str:
    return " ".join(WORDPIECE.pieces(store.body_tokens(row)))


def test_a_passage_takes_as_many_whole_sentences_as_fit_beside_the_title(tmp_path):
    text = " ".join([SENTENCE] * 5)
    store, summary = built(tmp_path, Article("a", "Paris", text), limit=3 + 1 + 2 * 13)
    assert [store.text(row) for row in range(len(store))] == [f"{SENTENCE} {SENTENCE}"] * 2 + [SENTENCE]
    assert store.sentences(0).tolist() == [[0, 13], [13, 26]]
    assert [WORDPIECE.decode(store.title_tokens(row)) for row in range(3)] == ["paris"] * 3
    assert store.rows_of("a") == range(0, 3)
    assert (summary.articles, summary.documents, summary.passages) == (1, 1, 3)
    store, _ = built(tmp_path, Article("a", "Paris", text), limit=3 + 1 + 2 * 13 - 1)
    assert len(store) == 5, "one piece less leaves room for one sentence only"


def test_a_sentence_longer_than_the_limit_is_split_between_words(tmp_path):
    text = "unbelievable cat " * 20 + "sat."
    store, summary = built(tmp_path, Article("a", "", text), limit=20)
    assert summary.notes["long sentences split"] == 1
    assert re.sub(r"\s+", "", "".join(store.text(row) for row in range(len(store)))) == text.replace(" ", "")
    for row in range(len(store)):
        assert len(store.body_tokens(row)) <= 17
        assert not pieces(store, row).startswith("##")


def test_a_long_title_keeps_its_text_but_leaves_room_for_the_body(tmp_path):
    title = "the cat " * 30
    store, summary = built(tmp_path, Article("a", title, SENTENCE), limit=40)
    assert store.title(0) == title and len(store.title_tokens(0)) == 20
    assert store.text(0) == SENTENCE and summary.notes["long titles shortened"] == 1


def test_a_first_line_that_repeats_the_title_is_left_out(tmp_path):
    articles = [
        Article("a", "The cat", "The cat\n\nIt sat on a mat."),
        Article("b", "The cat", "The cat sat on a mat."),
        Article("c", "The cat", "The cat\n"),
        Article("d", "", "\n\nIn Paris."),
    ]
    store, _ = built(tmp_path, *articles)
    assert [store.text(row) for row in range(4)] == [
        "It sat on a mat.",
        "The cat sat on a mat.",
        "The cat",
        "In Paris.",
    ]


def test_articles_without_words_are_dropped_and_counted(tmp_path):
    store, summary = built(tmp_path, Article("a", "Paris", "\u200b\u200b"), Article("b", "Paris", SENTENCE))
    assert [store.document_id(row) for row in range(len(store))] == ["b"]
    assert summary.wordless == ["a"] and summary.documents == 1


def test_what_gives_no_passage_is_refused(tmp_path):
    with pytest.raises(UserError, match="none of 1 articles has words"):
        built(tmp_path, Article("a", "", "\u200b"))
    with pytest.raises(UserError, match="a limit of 8 tokens leaves no room"):
        built(tmp_path, Article("a", "", SENTENCE), limit=8)


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ("Paris", "paris"),
        ("unbelievable", "un ##believ ##able"),
        ("1990", "1990"),  # "1990s" is two pieces: the span is the first
        ("believ", "##believ"),
        ("cat", "cat"),
        ("nbelievabl", None),  # its ends fall inside pieces
        ("left. Unbelievable", None),  # reaches over two sentences
        (" Paris ", "paris"),  # white space around it belongs to no piece
    ],
)
def test_a_span_covers_whole_pieces_inside_one_sentence(tmp_path, monkeypatch, span, expected):
    finds(monkeypatch, span, "name")
    text = "The cat sat in Paris before dawn and left. Unbelievable in the 1990s: an unbelievable mat."
    store, _ = built(tmp_path, Article("a", "", text), limit=64)
    found = {" ".join(WORDPIECE.pieces(store.body_tokens(0)[start:end])) for start, end, _ in store.spans(0)}
    assert found == (set() if expected is None else {expected})
    assert {store.span_kinds[kind] for kind in store.spans(0)[:, 2]} <= {"name"}


def test_spans_count_from_the_first_piece_of_their_own_passage(tmp_path, monkeypatch):
    finds(monkeypatch, "Paris", "date")
    store, _ = built(tmp_path, Article("a", "", " ".join([SENTENCE] * 3)), limit=3 + 13)
    assert [store.spans(row).tolist() for row in range(3)] == [[[7, 8, 0]]] * 3


pool_text = st.lists(
    st.sampled_from(
        ["The cat", "sat.", "1990s", "Unbelievable!", "\n\n", "東京", "\u200b", "a/b-c", "é", "In", "x" * 120]
    ),
    min_size=1,
    max_size=60,
).map(" ".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(pool_text, min_size=1, max_size=3), title=pool_text, limit=st.integers(16, 40))
def test_every_word_is_in_exactly_one_passage(tmp_path_factory, texts, title, limit):
    assume(all(text.lstrip().partition("\n")[0].strip() != title.strip() for text in texts))  # such a line is left out
    folder = tmp_path_factory.mktemp("build") / "store"
    articles = [Article(str(number), title, text) for number, text in enumerate([*texts, "Paris."])]
    build_store(articles, WORDPIECE, folder, limit)
    store = PassageStore.open(folder)
    for article in articles:
        rows = store.rows_of(article.id)
        body = np.concatenate([store.body_tokens(row) for row in rows]) if rows else []
        assert list(body) == WORDPIECE.encode(article.text).ids
        for row in rows:
            assert 3 + len(store.title_tokens(row)) + len(store.body_tokens(row)) <= limit
            assert store.text(row) in article.text
            assert WORDPIECE.encode(store.text(row)).ids == store.body_tokens(row).tolist()
            ranges = store.sentences(row)
            assert ranges[0, 0] == 0 and ranges[-1, 1] == len(store.body_tokens(row))
            assert (ranges[1:, 0] == ranges[:-1, 1]).all() and (ranges[:, 0] < ranges[:, 1]).all()
            for start, end, _ in store.spans(row):
                assert ((ranges[:, 0] <= start) & (start < end) & (end <= ranges[:, 1])).any()


def test_the_bytes_do_not_depend_on_batches(tmp_path, monkeypatch):
    articles = [Article(f"a{number}", "Paris", " ".join([SENTENCE] * (number % 7 + 1))) for number in range(60)]
    summaries = {}
    for name, batch in (("one", 512), ("two", 10), ("three", 7)):
        monkeypatch.setattr(packer, "_BATCH_ARTICLES", batch)
        summaries[name] = build_store(articles, WORDPIECE, tmp_path / name, 32)
        assert summaries[name].articles == 60 and summaries[name] == summaries["one"]
        for file in (tmp_path / "one").rglob("*.*"):
            assert file.read_bytes() == (tmp_path / name / file.relative_to(tmp_path / "one")).read_bytes(), file


def test_a_fault_in_the_articles_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(packer, "_BATCH_ARTICLES", 5)

    def articles():
        for number in range(40):
            yield Article(f"a{number}", "", SENTENCE)
        raise UserError("file.jsonl:41: broken")

    with pytest.raises(UserError, match="file.jsonl:41"):
        build_store(articles(), WORDPIECE, tmp_path / "store", 32)
    assert list(tmp_path.iterdir()) == []


def test_real_passages_keep_their_text(tmp_path, shared_data):
    articles = list(islice(read_passages(shared_data / "wiki_qa" / "passages.jsonl.gz"), 300))
    tokenizer = WordPiece.from_vocab(shared_data / "bert_vocab" / "vocab.txt")
    summary = build_store(articles, tokenizer, tmp_path / "store")
    store = PassageStore.open(tmp_path / "store")
    assert summary.documents == 300 and not summary.wordless
    for article in articles:
        tokens = np.concatenate([store.body_tokens(row) for row in store.rows_of(article.id)])
        assert tokens.tolist() == tokenizer.encode(article.text).ids
    lengths = store.counts("tokens")
    assert lengths.max() <= 285 and (lengths - store.column("title_lengths")).mean() > 100
