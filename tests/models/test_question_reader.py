"""Readers with a question-answering head: the numbers of transformers, windows, spans in the text, and errors."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy_bert import gelu_erf, hidden_states, linear
from pretrained_encoders import BODIES, KINDS, QUESTIONS, TITLES, save_encoder
from question_readers import save_question_reader
from safetensors.numpy import load_file, save_file
from weight_folders import edit_settings

from realm_jax.errors import UserError
from realm_jax.mesh import make_mesh
from realm_jax.models.question_reader import (
    PassageReading,
    QuestionReader,
    ReaderText,
    best_spans,
    open_question_reader,
)

QUESTION = "When was Ada born?"
TEXTS = [
    "Ada was born in 1803.",
    "Léa Møller-Ñu\n\n  was born in 東京都\tin 1803.",
    "",
    "a house in the north, " * 12,
    "[SEP] is no mark in a text. [CLS]",
]
ANSWER_TOKENS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_question_reader(tmp_path_factory.mktemp("reader") / "model")


@pytest.fixture(scope="module")
def reader(folder) -> QuestionReader:
    return open_question_reader(str(folder), make_mesh(devices=jax.devices()[:1]))


def texts(title: str = "") -> list[ReaderText]:
    return [ReaderText(QUESTION, title, text) for text in TEXTS]


def pointing_at(reader: QuestionReader, part: ReaderText, answer: str) -> PassageReading:
    """What is read if the scores are high at the first and the last token of an answer, in all windows."""
    (windows,) = reader.windows([part])
    place = part.context.rindex(answer)
    scores = []
    for window in windows:
        scored = np.zeros((len(window.encoding.ids), 2), np.float32)
        for number in range(window.body.start, window.body.stop):
            start, end = window.encoding.offsets[number]
            scored[number] = 10 * (start == place), 10 * (end == place + len(answer))
        scores.append(scored)
    return best_spans(part, windows, scores, ANSWER_TOKENS, top=3)


# --- the same numbers


def test_scores_are_those_of_numpy(folder, reader):
    tensors = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("bert."): array.astype(np.float64) for name, array in tensors.items()}
    (windows,) = reader.windows([ReaderText(QUESTION, "Ada", TEXTS[1])])
    for window, scores in zip(windows, reader.scores(windows), strict=True):
        ids, segments = np.array(window.encoding.ids), np.array(window.encoding.type_ids)
        assert segments[window.body].all() and not segments[: window.body.start].any()
        wanted = linear(hidden_states(weights, ids, segments, gelu_erf), weights, "qa_outputs")
        np.testing.assert_allclose(scores, wanted, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", *KINDS])
def test_scores_and_windows_are_those_of_transformers(kind, folder, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if kind == "bert":
        network = transformers.BertForQuestionAnswering.from_pretrained(folder).eval()
        tokenizer = transformers.BertTokenizerFast.from_pretrained(folder)
        plain = [part for part in texts("Ada") if "[" not in part.text]  # theirs makes special tokens of a text
    else:
        folder = tmp_path / "model"
        network = save_encoder(folder, kind, "ForQuestionAnswering")
        if kind in ("distilbert", "modernbert"):  # which join two texts as BERT does
            processor = json.loads((folder / "tokenizer.json").read_text())["post_processor"]
            processor["pair"] = [processor["pair"][place] for place in (0, 1, 2, 4, 5)]
            edit_settings(folder, "tokenizer.json", post_processor=processor)
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        titled = zip(["", *TITLES, ""], [*BODIES, " ".join(BODIES), "\n ".join(BODIES * 8)], strict=True)
        plain = [ReaderText(QUESTIONS[0], title, body) for title, body in titled]
    reader = open_question_reader(str(folder), make_mesh(devices=jax.devices()[:1]))
    counts = []
    for part, windows in zip(plain, reader.windows(plain), strict=True):
        theirs = tokenizer(
            part.question, part.context, truncation="only_second", max_length=reader.longest, stride=reader.overlap,
            return_overflowing_tokens=True, padding=True, return_tensors="pt",
        )  # fmt: skip
        names = ["input_ids", "attention_mask", *(["token_type_ids"] if kind == "bert" else [])]
        with torch.no_grad():
            logits = network(**{name: theirs[name] for name in names})
        assert len(windows) == len(theirs["input_ids"])
        for number, (window, scores) in enumerate(zip(windows, reader.scores(windows), strict=True)):
            used = slice(0, int(theirs["attention_mask"][number].sum()))
            assert window.encoding.ids == theirs["input_ids"][number, used].tolist()
            np.testing.assert_allclose(scores[:, 0], logits.start_logits[number, used].numpy(), atol=1e-4)
            np.testing.assert_allclose(scores[:, 1], logits.end_logits[number, used].numpy(), atol=1e-4)
        counts.append(len(windows))
    assert counts[0] == 1 and max(counts) > 3


@pytest.mark.slow
def test_the_best_span_is_that_of_transformers_pipeline(folder, reader):
    """It takes the best span of each window, normalizes each window by itself, and adds up equal texts.

    Transformers 5 has no such pipeline.
    """
    transformers = pytest.importorskip("transformers")
    pipelines = pytest.importorskip("transformers.pipelines.question_answering")
    network = transformers.BertForQuestionAnswering.from_pretrained(folder)
    answer = pipelines.QuestionAnsweringPipeline(network, transformers.BertTokenizerFast.from_pretrained(folder))
    options = {"max_seq_len": 64, "doc_stride": 32, "max_answer_len": ANSWER_TOKENS, "align_to_words": False}
    for text in (TEXTS[0], TEXTS[1], TEXTS[3]):
        part = ReaderText(QUESTION, "", text)
        (windows,) = reader.windows([part])
        best: dict[str, float] = {}  # answer → score
        for window, scores in zip(windows, reader.scores(windows), strict=True):
            reading = best_spans(part, [window._replace(first=0)], [scores], ANSWER_TOKENS, top=1)
            one = np.log(reading.probabilities[0] / reading.no_answer) + scores[0].sum()  # start + end
            kept = np.concatenate([scores[:1], scores[window.body]])  # of [CLS] and the passage
            found = text[slice(*reading.spans[0])].lower()
            best[found] = best.get(found, 0) + float(np.exp(one - np.logaddexp.reduce(kept, axis=0).sum()))
        theirs = answer(question=QUESTION, context=text, **options)
        assert theirs["answer"].lower() == max(best, key=best.__getitem__)
        assert theirs["score"] == pytest.approx(max(best.values()), rel=1e-3)


def test_a_long_passage_is_normalized_over_the_spans_of_all_windows(reader):
    """A walk over all windows: a span has its best score, no answer its worst, and everything adds up to 1."""
    part = ReaderText(QUESTION, "Ada", TEXTS[3])
    (windows,) = reader.windows([part])
    assert len(windows) > 3
    scores = reader.scores(windows)
    best: dict[tuple[int, int], float] = {}
    for window, scored in zip(windows, scores, strict=True):
        for first in range(window.body.start, window.body.stop):
            for last in range(first, min(first + ANSWER_TOKENS, window.body.stop)):
                span = window.encoding.offsets[first][0] - 4, window.encoding.offsets[last][1] - 4
                if span[0] >= 0:
                    best[span] = max(best.get(span, -np.inf), float(scored[first, 0]) + float(scored[last, 1]))
    no_answer = min(float(scored[0].sum()) for scored in scores)
    total = np.logaddexp.reduce([*best.values(), no_answer])
    reading = best_spans(part, windows, scores, ANSWER_TOKENS, top=10_000)
    assert reading.no_answer == pytest.approx(np.exp(no_answer - total), rel=1e-5)
    assert dict(zip(reading.spans, reading.probabilities, strict=True)) == {
        span: pytest.approx(np.exp(score - total), rel=1e-5) for span, score in best.items()
    }
    assert sum(reading.probabilities) + reading.no_answer == pytest.approx(1)
    assert reading.probabilities == sorted(reading.probabilities, reverse=True)
    few = best_spans(part, windows, scores, ANSWER_TOKENS, top=2)
    assert (few.spans, few.no_answer) == (reading.spans[:2], reading.no_answer)


# --- spans in the text


@pytest.mark.parametrize("title", ["", "Léa 東"])
@pytest.mark.parametrize("answer", ["Léa", "Møll", "Ñu\n\n  was", "東京都", "都\tin", "1803"])
def test_a_span_has_the_characters_of_its_tokens(reader, title, answer):
    part = ReaderText(QUESTION, title, TEXTS[1])
    reading = pointing_at(reader, part, answer)
    assert part.text[slice(*reading.spans[0])] == answer


def test_an_answer_that_two_windows_share_is_found_once(reader):
    part = ReaderText(QUESTION, "", TEXTS[3] + "Ada" + TEXTS[3])
    reading = pointing_at(reader, part, "Ada")
    assert part.text[slice(*reading.spans[0])] == "Ada" and len({*reading.spans}) == 3


def test_the_title_is_read_but_holds_no_answer(reader):
    part = ReaderText(QUESTION, "1803", "Ada was born.")
    with_title, without = reader.read([part, part._replace(title="")], ANSWER_TOKENS, 10_000)
    assert with_title.spans and {*with_title.spans} == {*without.spans}
    assert with_title.probabilities != without.probabilities


def test_no_span_is_empty_and_readings_do_not_depend_on_the_batch(reader):
    readings = reader.read(texts(), ANSWER_TOKENS, 10_000)
    for part, reading in zip(texts(), readings, strict=True):
        assert all(part.text[slice(*span)].strip() for span in reading.spans)
        assert sum(reading.probabilities) + reading.no_answer == pytest.approx(1)
        (alone,) = reader.read([part], ANSWER_TOKENS, 10_000)
        assert alone.spans == reading.spans or part.text == TEXTS[3]  # whose parts repeat
        np.testing.assert_allclose(alone.probabilities, reading.probabilities, rtol=1e-4)
    assert readings[2] == PassageReading([], [], 1.0)


def test_several_devices_read_the_same(folder, reader):
    (windows,) = reader.windows([ReaderText(QUESTION, "", TEXTS[3])])
    several = open_question_reader(str(folder), make_mesh())
    for one, other in zip(reader.scores(windows), several.scores(windows), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_question_that_is_too_long_is_cut(reader):
    (windows,) = reader.windows([ReaderText("who " * 100, "", TEXTS[3])])
    assert all(len(window.encoding.ids) <= 64 for window in windows)
    assert windows[0].body.start == 64 // 4 + 2  # [CLS] and [SEP] around the question


# --- errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "xlnet"}, "model_type is 'xlnet'"),
        (
            {"architectures": ["BertModel"]},
            "names the class BertModel, which has no question-answering head; choose",
        ),
        ({"hidden_size": None}, "hidden_size is None, which is no size"),
        ({"num_hidden_layers": 3}, "set config.model to the sizes"),
    ],
)
def test_a_model_that_cannot_be_run_is_named_with_its_flag(tmp_path, settings, message):
    folder = save_question_reader(tmp_path / "model", **settings)
    with pytest.raises(UserError, match=f"^--reader={folder}: .*{message}") as raised:
        open_question_reader(str(folder), make_mesh(devices=jax.devices()[:1]))
    assert "\n" not in str(raised.value)


def test_a_missing_folder_head_or_tokenizer_is_named(tmp_path):
    mesh = make_mesh(devices=jax.devices()[:1])
    with pytest.raises(UserError, match="--reader=nowhere: there is no such folder; name a folder, hf:NAME or py:NAME"):
        open_question_reader("nowhere", mesh)
    headless = save_question_reader(tmp_path / "headless")
    tensors = load_file(headless / "model.safetensors")
    save_file({name: tensors[name] for name in tensors if "qa_" not in name}, headless / "model.safetensors")
    with pytest.raises(UserError, match=r"has no question-answering head \(qa_outputs\); choose a model for question"):
        open_question_reader(str(headless), mesh)
    bare = save_question_reader(tmp_path / "bare")
    (bare / "vocab.txt").unlink()
    with pytest.raises(UserError, match=r"has no vocab\.txt and no tokenizer\.json"):
        open_question_reader(str(bare), mesh)


def test_other_weights_are_another_reader(reader, tmp_path):
    """Also under the name of the earlier ones, whose reader keeps its identity."""
    folder = save_question_reader(tmp_path / "model", seed=2)
    other = open_question_reader(str(folder), reader._mesh)
    assert open_question_reader(f"{folder}/../model", reader._mesh) is other
    shutil.rmtree(folder)
    newest = open_question_reader(str(save_question_reader(folder, seed=3)), reader._mesh)
    assert len({reader.identity, other.identity, newest.identity}) == 3
    shutil.rmtree(folder)
    assert open_question_reader(str(save_question_reader(folder, seed=2)), reader._mesh).identity == other.identity
