"""Search in several languages at once: one tokenizer of XLM-R's kind, a tiny encoder with it, vectors and words.

Multilingual encoders are XLM-Rs, such as bge-m3, or BERTs with its tokenizer, such as multilingual-e5-small.
"""

import json

import numpy as np
import pytest
from made_tokenizers import unigram
from runs import open_inline
from tiny_run import write_lines

from realm_jax.cli.prepare import prepare
from realm_jax.data.sources import open_sources
from realm_jax.eval.prediction import Evaluator
from realm_jax.forward import SearchPipeline

# A passage in each language, with the words of a question in another form.
PASSAGES = {
    "de": ("Die Häfen sind im Winter geschlossen. Die Schiffe warten bis April.", "Hafen Schiff"),
    "en": ("The bridges were painted red. Nobody knows why.", "painting bridge"),
    "fr": ("Les musées ouvrent le matin. L'entrée est gratuite.", "musée gratuit"),
    "ru": ("Порты закрыты зимой. Корабли ждут апреля.", "порт корабль"),
    "ar": ("المكتبة مغلقة في الشتاء. أين الكتب؟", "مكتبة"),
    "hi": ("बंदरगाहों में जहाज़ रुके हुए हैं। वे अप्रैल में चलेंगे।", "बंदरगाह"),
    "zh": ("北京大学图书馆冬天不开门。学生在家读书。", "大学图书馆"),
    "ja": ("港は冬に閉じられています。船は待っている。", "冬の港"),
    "ko": ("항구는 겨울에 닫힌다. 배들은 기다린다.", "겨울 항구"),
    "th": ("ท่าเรือปิดในฤดูหนาว ชาวประมงรออยู่ที่บ้าน", "ฤดูหนาว"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("multilingual")
    texts = "".join(text for pair in PASSAGES.values() for text in pair)
    (folder / "tokenizer.json").write_bytes(unigram(texts + texts.lower() + "abcdefghijklmnopqrstuvwxyz"))
    passages = [{"id": code, "title": code, "text": text} for code, (text, _) in PASSAGES.items()]
    questions = [
        {"question": question, "answers": [], "gold_passage_id": code, "split": "dev"}
        for code, (_, question) in PASSAGES.items()
    ]
    files = write_lines(folder / "passages.jsonl", passages), write_lines(folder / "questions.jsonl", questions)
    prepare(
        files[0],
        folder / "data",
        questions=[files[1]],
        vocab=folder / "tokenizer.json",
        language="bigrams",
        limit=128,
        workers=1,
    )
    return folder / "data"


def test_no_token_is_unknown_and_every_language_has_its_sentences(data):
    sources = open_sources(data)
    assert json.loads((data / "PREPARED.json").read_text())["counts"]["passages"]["unknown_token_share"] == 0
    store = sources.passages
    sentences = {store.document_id(row): len(store.sentences(row)) for row in range(len(store))}
    assert {code: count for code, count in sentences.items() if count != 2} == {"th": 1}  # a space is all that Thai has
    for row in range(len(store)):
        assert sources.tokenizer.decode(store.body_tokens(row)).strip() == store.text(row)


@pytest.mark.parametrize("architecture", ["bert", "xlm-roberta"])
def test_words_vectors_and_hybrid_search_all_languages_with_one_index(data, tmp_path, architecture):
    changes = {"model__architecture": architecture, "encoder__passage_prompt": "{title} {text}"}
    run = open_inline(data, tmp_path, tasks="qa", **changes)
    assert run.bm25_language == "bigrams"
    store, questions = run.sources.passages, run.sources.questions["dev"]
    rows = run.bm25_search([question.question for question in questions], 1).rows[:, 0]
    by_language = {
        store.document_id(int(row)): question.gold for row, question in zip(rows, questions, strict=True) if row >= 0
    }
    found = {code for code, gold in by_language.items() if code in gold}
    assert found >= {"zh", "ja", "ko", "th"}  # words without spaces; the other languages need their stems
    params = run.initial_params()
    vectors = np.asarray(run.embed(params))
    assert vectors.shape[0] == len(PASSAGES) and np.isfinite(vectors).all()
    assert len({tuple(vector) for vector in vectors.round(4).tolist()}) == len(PASSAGES)
    rows = Evaluator(run, questions, SearchPipeline("hybrid")).retrieve(params, run.index(vectors))
    assert (np.sort(rows, axis=1) == np.arange(len(PASSAGES))).all()  # vectors find the languages whose words differ
    first = {code: store.document_id(int(row)) for code, row in zip(PASSAGES, rows[:, 0], strict=True)}
    assert {code for code, found_code in first.items() if code == found_code} >= {"zh", "ja", "ko", "th"}
