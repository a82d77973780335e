"""`realm prepare`: a whole folder or none, and every fault named before the slow part."""

import bz2
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from capitals import QUESTIONS, TEXTS, digests, write_lines
from made_news import MadeRecord, make_news

from realm_jax.cli import main as cli
from realm_jax.cli.corpus import edit
from realm_jax.cli.prepare import prepare
from realm_jax.corpora import articles
from realm_jax.corpora import preparation as page
from realm_jax.corpora.preparation import vocabulary_file
from realm_jax.corpora.raw_records import NO_FIELD
from realm_jax.data.questions import read_questions
from realm_jax.data.sources import open_sources
from realm_jax.data.spans import Span
from realm_jax.data.store import PassageStore
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import UserError
from realm_jax.storage import StorageError


def split_questions(folder: Path, split: str) -> list[str]:
    return [question.question for question in read_questions(folder / "questions" / f"{split}.jsonl")]


def test_the_command_makes_a_folder_that_holds_everything(tmp_path, passages, questions, capsys):
    data = tmp_path / "deep" / "data"
    extra = write_lines(tmp_path / "extra.jsonl", [{"question": "is it so", "answers": ["yes"]}])
    command = (
        f"prepare --passages {passages} --questions {questions} train={extra} --vocabulary-size 300 --output {data}"
    )
    assert cli.main(command.split()) == 0
    manifest = json.loads((data / "PREPARED.json").read_text())
    store = PassageStore.open(data / "passages")
    tokenizer = WordPiece.load(data / "tokenizer")
    assert manifest["format_version"] == 2 and manifest["limit"] == store.limit == 288
    assert manifest["tokenizer"] == store.tokenizer_fingerprint == tokenizer.fingerprint
    assert manifest["passages"] == {"rows": 3, "documents": 3, "fingerprint": store.fingerprint}
    assert manifest["pretraining"] is None and not (data / "pretraining").exists()
    assert manifest["questions"] == {"train": 3, "dev": 1}
    assert [store.text(row) for row in range(3)] == list(TEXTS.values())
    (dev,) = read_questions(data / "questions" / "dev.jsonl")
    assert dev.answers == ["1624", "in the year 1624"] and dev.gold == {"oslo": 1}
    assert store.rows_of("oslo") == range(2, 3)
    out = capsys.readouterr().out
    assert "passages: 3 articles -> 3 passages\n" in out and "questions: train 3, dev 1\n" in out
    assert sorted(os.listdir(data.parent)) == ["data"], "no trace of the hidden folder"


def test_pretraining_texts_and_a_given_vocabulary(tmp_path, passages):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "paris", "is", "the", "capital", "news"]))
    news = write_lines(tmp_path / "news.jsonl", [{"id": "paris", "text": "Paris is in the news."}])
    prepare(passages, tmp_path / "data", pretraining=news, vocab=vocab, limit=40)
    store = PassageStore.open(tmp_path / "data" / "pretraining")
    assert len(store) == 1 and store.limit == 40
    assert WordPiece.load(tmp_path / "data" / "tokenizer").size == 10
    manifest = json.loads((tmp_path / "data" / "PREPARED.json").read_text())
    assert manifest["pretraining"]["fingerprint"] == store.fingerprint and manifest["questions"] == {}


def test_questions_are_divided_by_their_field_or_by_the_command(tmp_path, passages, questions):
    prepare(passages, tmp_path / "data", questions=[questions, f"dev={questions}"], vocabulary_size=300)
    everything = [question["question"] for question in QUESTIONS]
    assert split_questions(tmp_path / "data", "train") == [everything[0], everything[2]]
    assert split_questions(tmp_path / "data", "dev") == [everything[1], *everything]


def test_long_answers_and_other_sources_are_left_out_and_counted(tmp_path, passages, questions, capsys):
    prepare(passages, tmp_path / "short", questions=[questions], vocabulary_size=300, max_answer_words=3)
    assert split_questions(tmp_path / "short", "train") == ["what is the capital of france"]
    assert read_questions(tmp_path / "short" / "questions" / "dev.jsonl")[0].answers == ["1624"]
    assert "questions: train 1, dev 1; dropped 1 without an answer of at most 3 words" in capsys.readouterr().out
    prepare(passages, tmp_path / "squad", questions=[questions], vocabulary_size=300, question_sources=["squad"])
    assert os.listdir(tmp_path / "squad" / "questions") == ["train.jsonl"]
    assert "questions: train 1; dropped 2 of other sources" in capsys.readouterr().out
    with pytest.raises(UserError, match="no question is left of 3; check --question-sources"):
        prepare(passages, tmp_path / "none", questions=[questions], question_sources=["absent"])


def test_preparing_the_same_again_does_nothing(tmp_path, passages, questions, capsys):
    data = tmp_path / "data"
    prepare(passages, data, questions=[questions], vocabulary_size=300)
    before = (data / "PREPARED.json").stat()
    capsys.readouterr()
    prepare(passages, data, questions=[questions], vocabulary_size=300)
    assert "same inputs with the same settings; nothing to do" in capsys.readouterr().out
    assert (data / "PREPARED.json").stat().st_mtime_ns == before.st_mtime_ns
    shutil.rmtree(data / "passages")
    with pytest.raises(UserError, match=r"is damaged \(no passages/STORE.json\); remove the folder"):
        prepare(passages, data, questions=[questions], vocabulary_size=300)


def test_questions_that_went_are_missed(tmp_path, passages, questions):
    data = tmp_path / "data"
    prepare(passages, data, questions=[questions], vocabulary_size=300)
    file = data / "questions" / "train.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    with pytest.raises(UserError, match=r"train.jsonl is damaged \(1 questions, not 2\); prepare the folder again"):
        open_sources(data)


def test_an_existing_folder_is_never_overwritten(tmp_path, passages, questions):
    data = tmp_path / "data"
    prepare(passages, data, questions=[questions], vocabulary_size=300)
    with pytest.raises(UserError, match="prepared with other settings; choose another --output or remove"):
        prepare(passages, data, questions=[questions], vocabulary_size=300, limit=100)
    with pytest.raises(UserError, match="prepared with other questions and settings"):
        prepare(passages, data, vocabulary_size=200)
    write_lines(passages, [{"id": "new", "text": "New text."}])
    with pytest.raises(UserError, match="prepared with other passages"):
        prepare(passages, data, questions=[questions], vocabulary_size=300)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="mine exists and is not a prepared folder; choose another --output"):
        prepare(passages, tmp_path / "mine")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "q", "answers": ["a"], "split": "dev", "gold_passage_id": "atlantis"},
         r"questions\.jsonl:4: gold_passage_id 'atlantis' is not in .*passages\.jsonl"),
        ({"question": "q", "answers": ["a"]}, r'questions\.jsonl:4: the question has no usable "split"'),
        ({"question": "q", "answers": ["a"], "split": "../up"}, r'jsonl:4: the question has no usable "split"'),
    ],
)  # fmt: skip
def test_a_faulty_question_is_named_before_anything_is_made(tmp_path, passages, questions, record, message):
    with questions.open("a") as stream:
        stream.write(json.dumps(record) + "\n")
    with pytest.raises(UserError, match=message):
        prepare(passages, tmp_path / "data", questions=[questions])
    assert sorted(os.listdir(tmp_path)) == ["passages.jsonl", "questions.jsonl"]


def test_a_faulty_passage_at_the_end_is_named_before_anything_is_made(tmp_path, passages, monkeypatch):
    monkeypatch.setattr(page, "pack_shard", lambda *args: pytest.fail("the slow part began"))
    with passages.open("a") as stream:
        stream.write('{"id": "x"}\n')
    with pytest.raises(UserError, match=r'passages\.jsonl:4: without a field "text" or the like: '):
        prepare(passages, tmp_path / "data")


def test_the_vocabulary_of_a_model_is_named_by_its_folder_or_package(tmp_path, passages, monkeypatch):
    model = tmp_path / "site" / "my_encoder" / "model"
    model.mkdir(parents=True)
    (model / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "paris", "is", "the"]))
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name, vocab in (("one", model), ("other", "py:my_encoder")):
        prepare(passages, tmp_path / name, vocab=vocab, limit=40)
    stored = [(tmp_path / name / "tokenizer" / "vocab.txt").read_text() for name in ("one", "other")]
    assert stored[0] == stored[1] and "paris" in stored[0]
    with pytest.raises(UserError, match="^--vocab=py:no_such_package: the package no_such_package is not installed"):
        prepare(passages, tmp_path / "none", vocab="py:no_such_package")


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "paris", "Paris", "is", "the", "##N"]
FAST = {
    "model": {"type": "WordPiece", "vocab": {piece: number for number, piece in enumerate(PIECES)}},
    "normalizer": {"type": "BertNormalizer", "lowercase": False},
}
LOWER = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "Lowercase"}, {"type": "StripAccents"}]}


def model_folder(folder: Path, place: str = ".", **files: object) -> Path:
    """A model whose tokenizer lies in `place`, with a vocab.txt unless it has a tokenizer.json. files: name → JSON."""
    (folder / place).mkdir(parents=True)
    (folder / place / "model.safetensors").touch()
    if "tokenizer" not in files:
        (folder / place / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    for name, value in files.items():
        (folder / place / f"{name}.json").write_text(json.dumps(value))
    if place == "0_Transformer":
        modules = [{"path": place, "type": "sentence_transformers.models.Transformer"}]
        (folder / "modules.json").write_text(json.dumps(modules))
    return folder


CASED = {"tokenizer_config": {"do_lower_case": False}}


@pytest.mark.parametrize(
    "place, files, piece",
    [
        (".", CASED, "Paris"),
        (".", {"tokenizer_config": {"do_lower_case": True}}, "paris"),
        (".", {"tokenizer": FAST}, "Paris"),
        (".", {"tokenizer": FAST | {"normalizer": LOWER}}, "paris"),
        (".", {"tokenizer": FAST, "tokenizer_config": {"do_lower_case": True}}, "paris"),
        (".", {"settings": {"format_version": 1, "lower_case": False}}, "Paris"),
        (".", {}, "paris"),
        *((place, CASED, "Paris") for place in ("query_embedder", "embedder", "reader", "0_Transformer")),
    ],
)
def test_a_vocabulary_is_found_where_a_model_has_it_and_keeps_its_capitals(tmp_path, place, files, piece):
    tokenizer = vocabulary_file(str(model_folder(tmp_path / "model", place, **files))).read()
    assert tokenizer.pieces(tokenizer.encode("Paris").ids) == [piece]


def test_a_vocabulary_that_is_named_itself_is_read_as_the_tokenizer_beside_it_says(tmp_path, passages, caplog):
    model = model_folder(tmp_path / "model", tokenizer_config={"do_lower_case": False})
    prepare(passages, tmp_path / "data", vocab=model / "vocab.txt")
    assert not WordPiece.load(tmp_path / "data" / "tokenizer").lower_case and "capital" not in caplog.text
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="was prepared with other settings"):
        prepare(passages, tmp_path / "data", vocab=model / "vocab.txt")


@pytest.mark.parametrize(
    "files, message",
    [
        ({"tokenizer": {"model": {"type": "BPE", "vocab": {}}}}, "tokenizer.json: cannot be read as a tokenizer"),
        ({"tokenizer": {"model": {"type": "WordPiece", "vocab": {"a": 7}}}}, "not numbered from 0 to 0; fetch it"),
        ({"tokenizer_config": []}, "tokenizer_config.json: has no JSON object of settings; fetch it again"),
        (None, "^--vocab=.*/model: .* has no vocab.txt and no tokenizer.json; name"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path, files, message):
    model = model_folder(tmp_path / "model", **files or {})
    if files is None:
        (model / "vocab.txt").unlink()
    with pytest.raises(UserError, match=message):
        vocabulary_file(str(model)).read()


def test_missing_files_are_named(tmp_path, passages):
    with pytest.raises(UserError, match=r"cannot read .*absent\.jsonl \(No such file"):
        prepare(tmp_path / "absent.jsonl", tmp_path / "data")
    with pytest.raises(UserError, match=r"cannot read absent\.jsonl"):
        prepare(passages, tmp_path / "data", questions=["train=absent.jsonl"])
    with pytest.raises(UserError, match=r"cannot read absent\.txt"):
        prepare(passages, tmp_path / "data", vocab="absent.txt")


@pytest.mark.parametrize("as_what", ["passages", "pretraining", "questions", "vocab"])
def test_a_pipe_is_refused_since_it_can_be_read_once_only(tmp_path, passages, as_what):
    reader, writer = os.pipe()
    os.close(writer)
    inputs = {"passages": passages} | {as_what: f"/dev/fd/{reader}"}
    if as_what == "questions":
        inputs["questions"] = [f"train=/dev/fd/{reader}"]
    with pytest.raises(
        UserError, match=rf"^/dev/fd/{reader} is not a regular file, .*; save it to a file and name that file$"
    ):
        prepare(output=tmp_path / "data", **inputs)
    os.close(reader)


def no_spans(text: str) -> list[Span]:
    return []


def test_a_finder_that_changed_under_its_name_is_told(tmp_path, passages, monkeypatch):
    monkeypatch.setattr(no_spans, "identity", "one", raising=False)
    given = {"vocabulary_size": 300, "shards": 1, "workers": 1, "spans": f"{__name__}:no_spans"}
    prepare(passages, tmp_path / "data", **given)
    prepare(passages, tmp_path / "data", **given)  # nothing to do
    monkeypatch.setattr(no_spans, "identity", "two")
    with pytest.raises(UserError, match="was prepared with other settings"):
        prepare(passages, tmp_path / "data", **given)


def test_a_finder_that_uses_devices_runs_in_one_process(tmp_path, passages, monkeypatch):
    monkeypatch.setattr(no_spans, "uses_devices", True, raising=False)
    workers, each = [], page.Processes.each
    monkeypatch.setattr(page.Processes, "each", lambda self, *rest: [workers.append(self.workers), each(self, *rest)])
    prepare(passages, tmp_path / "data", vocabulary_size=300, shards=2, workers=2, spans=f"{__name__}:no_spans")
    assert workers == [1]


def test_a_tagged_folder_is_not_what_prepare_would_make(tmp_path, passages):
    prepare(passages, tmp_path / "data", vocabulary_size=300)
    path = tmp_path / "data" / "PREPARED.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tagged": {"spans": "tagger:x"}}))
    with pytest.raises(
        UserError, match="with a tagger that this version cannot run; choose another --output or remove the folder"
    ):
        prepare(passages, tmp_path / "data", vocabulary_size=300)


def test_a_cased_vocabulary_is_told_since_text_is_lower_cased(tmp_path, passages, caplog):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused1]", "paris", "Paris", "##N"]))
    prepare(passages, tmp_path / "data", vocab=vocab)
    told = f"{vocab}: 2 word pieces have capital letters, such as 'Paris', and are never used: text is lower-cased"
    assert caplog.text.count(told) == 1


@pytest.mark.parametrize("known, unknown, percent", [(22, 3, 12), (95, 5, None), (100, 0, None)])
def test_text_that_the_vocabulary_does_not_cover_is_reported(tmp_path, known, unknown, percent, caplog):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the"]))
    texts = write_lines(tmp_path / "texts.jsonl", [{"id": "a", "text": "the " * known + "港" * unknown}])
    prepare(texts, tmp_path / "data", vocab=vocab)
    counts = json.loads((tmp_path / "data" / "PREPARED.json").read_text())["counts"]["passages"]
    assert counts["unknown_token_share"] == unknown / (known + unknown)
    lines = [record.getMessage() for record in caplog.records if "[UNK]" in record.getMessage()]
    line = f"passages: {percent} % of the tokens are [UNK]: the vocabulary does not cover this text; choose a tokenizer"
    assert lines == ([] if percent is None else [f"{line} for its language with --vocab"])


def test_a_question_stays_while_one_of_its_gold_passages_has_words(tmp_path, capsys):
    texts = [{"id": "oslo", "text": "Oslo is a town."}, {"id": "empty", "text": "\u200b"}]
    golds = {"oslo": 1, "empty": 1}, {"empty": 1, "lost": 1}, {"empty": 1, "oslo": 2}, {"empty": 1}
    asked = [{"question": f"q{number}", "gold_passages": gold} for number, gold in enumerate(golds)]
    files = write_lines(tmp_path / "p.jsonl", texts), write_lines(tmp_path / "q.jsonl", asked)
    prepare(files[0], tmp_path / "data", questions=[f"dev={files[1]}"], vocabulary_size=300)
    assert split_questions(tmp_path / "data", "dev") == ["q0", "q2"]
    out = capsys.readouterr().out
    assert "dropped 1 no words in the text" in out and "dropped 2 whose gold passage has no words" in out


def test_questions_with_only_a_gold_passage_are_kept(tmp_path, passages):
    gold = {"question": "where is it", "gold_passage_id": "oslo"}
    questions = write_lines(tmp_path / "q.jsonl", [gold, gold | {"answers": ["a b c d"]}])
    prepare(passages, tmp_path / "data", questions=[f"train={questions}"], vocabulary_size=300, max_answer_words=3)
    (kept,) = open_sources(tmp_path / "data").questions["train"]
    assert (kept.question, kept.answers, kept.gold) == ("where is it", [], {"oslo": 1})
    with pytest.raises(UserError, match="no question is left of 1"):
        lone = write_lines(tmp_path / "lone.jsonl", [gold])
        prepare(passages, tmp_path / "ignored", questions=[f"dev={lone}"], vocabulary_size=300, ignore_gold=True)


def test_damaged_questions_are_counted_with_a_sample_where_damage_is_skipped(tmp_path, passages, capsys):
    questions = tmp_path / "q.jsonl"
    lines = ['{"question": "good", "answers": ["a"]}', "{", '{"question": "why"}', '{"answers": ["b"]}']
    lines += ['{"question": "x", "answers": ["a"], "gold_passage_id": "nowhere"}']
    questions.write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"q\.jsonl:2: not JSON"):
        prepare(passages, tmp_path / "data", questions=[f"dev={questions}"], vocabulary_size=300)
    prepare(passages, tmp_path / "data", questions=[f"dev={questions}"], vocabulary_size=300, skip_damage=True)
    assert split_questions(tmp_path / "data", "dev") == ["good"]
    counts = json.loads((tmp_path / "data" / "PREPARED.json").read_text())["counts"]["questions"]
    assert counts["records"] == 5
    assert counts["damaged"] == {"that cannot be read": 3, "whose gold passage is not there": 1}
    assert counts["samples"]["that cannot be read"][1] == [
        0, 3, 'q.jsonl:3: the question has no answers and no "gold_passage_id"; add one or remove the line'
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "questions: dev 1; dropped 3 that cannot be read, 1 whose gold passage is not there\n" in out
    assert "  that cannot be read, such as: q.jsonl:2: not JSON" in out
    with pytest.raises(UserError, match="skipped 4 damaged records"):
        prepare(passages, tmp_path / "data", questions=[f"dev={questions}"], vocabulary_size=300)


def test_of_several_gold_passages_one_has_to_be_there(tmp_path, passages, capsys):
    golds = {"oslo": 1, "nowhere": 2}, {"oslo": 2, "elsewhere": 1, "nowhere": 1}, {"nowhere": 1, "elsewhere": 1}
    asked = [{"question": f"q{number}", "gold_passages": gold} for number, gold in enumerate(golds)]
    file = write_lines(tmp_path / "q.jsonl", asked)
    with pytest.raises(UserError, match=r"q\.jsonl:3: gold_passage_id 'nowhere' is not in"):
        prepare(passages, tmp_path / "data", questions=[f"dev={file}"], vocabulary_size=300)
    capsys.readouterr()
    prepare(passages, tmp_path / "data", questions=[f"dev={file}"], vocabulary_size=300, skip_damage=True)
    assert [one.gold for one in open_sources(tmp_path / "data").questions["dev"]] == list(golds[:2]), "as judged"
    out = capsys.readouterr().out
    assert "3 × gold passage that is not there, of questions that have others, such as nowhere, elsewhere\n" in out
    counts = json.loads((tmp_path / "data" / "PREPARED.json").read_text())["counts"]["questions"]
    assert counts["damaged"] == {"whose gold passage is not there": 1}
    (note,) = counts["notes"].values()
    assert note == {"times": 3, "names": {"nowhere": 2, "elsewhere": 1}}


def test_a_run_knows_the_questions_of_a_folder_again(tmp_path, passages, questions):
    """Runs have recorded this digest."""
    prepare(passages, tmp_path / "data", questions=[questions], vocabulary_size=300)
    assert (
        open_sources(tmp_path / "data").fingerprints()["questions"]
        == "6796a6c2880fa6a2834d10c4f77d9563baf80151dfcd263e4d737f6bc6009227"
    )


def test_samples_of_questions_come_in_the_order_of_their_files(tmp_path, passages):
    good, lost = ({"question": "q", "answers": ["a"], "gold_passage_id": name} for name in ("oslo", "nowhere"))
    files = [write_lines(tmp_path / "one.jsonl", [good, good, lost]), write_lines(tmp_path / "two.jsonl", [lost])]
    prepare(
        passages, tmp_path / "data", questions=[f"dev={file}" for file in files], vocabulary_size=300, skip_damage=True
    )
    counts = json.loads((tmp_path / "data" / "PREPARED.json").read_text())["counts"]["questions"]
    places = [sample[:2] for sample in counts["samples"]["whose gold passage is not there"]]
    assert places == [[0, 3], [1, 1]]


def test_a_vocabulary_is_learned_from_a_part_of_large_texts(tmp_path, passages, monkeypatch):
    monkeypatch.setattr(page, "LEARN_FROM", 100)  # the three texts have 240 characters: every third is taken
    prepare(passages, tmp_path / "data", vocabulary_size=400)
    tokenizer = WordPiece.load(tmp_path / "data" / "tokenizer")
    assert tokenizer.pieces(tokenizer.encode("Paris").ids) == ["paris"]
    assert tokenizer.pieces(tokenizer.encode("Norway").ids) != ["norway"]


@pytest.mark.parametrize(
    "fault, message",
    [
        (
            OSError(28, "No space left on device"),
            "No space left on device; make room there, then run the command again",
        ),
        (StorageError("the storage is out of reach"), "out of reach"),
    ],
)
def test_what_is_finished_stays_after_a_late_fault(tmp_path, passages, monkeypatch, fault, message):
    def fail(*_: object) -> None:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(page, "pack_shard", fail)
        with pytest.raises(UserError, match=message):
            prepare(passages, tmp_path / "data", vocabulary_size=300)
    assert sorted(os.listdir(tmp_path)) == [".data.partial", "passages.jsonl"]
    monkeypatch.setattr(articles, "read_part", lambda *_: pytest.fail("articles were read again"))
    prepare(passages, tmp_path / "data", vocabulary_size=300)
    assert sorted(os.listdir(tmp_path)) == ["data", "passages.jsonl"]


def test_what_was_begun_with_other_inputs_is_removed(tmp_path, passages, monkeypatch, caplog):
    def power_cut(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(page, "pack_shard", power_cut)
        prepare(passages, tmp_path / "data", vocabulary_size=300)
    write_lines(passages, [{"id": "new", "text": "New text."}])
    prepare(passages, tmp_path / "data", vocabulary_size=300)
    assert "removing partial output of other inputs" in caplog.text
    assert PassageStore.open(tmp_path / "data" / "passages").text(0) == "New text."


@pytest.mark.parametrize("killed", ["articles/passages/00000.jsonl", "articles/passages/00003.packed.json"])
def test_a_preparation_that_is_killed_goes_on_to_the_same_bytes(tmp_path, killed):
    """Ctrl-C while articles are read, and while shards are packed; then the same command."""
    records = [{"id": f"a{n}", "title": f"Article {n}", "text": " ".join(TEXTS.values())} for n in range(2000)]
    passages = write_lines(tmp_path / "p.jsonl", records)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nparis\n")
    flags = f"--passages {passages} --vocab {tmp_path}/vocab.txt --shards 8 --workers 1"
    command = [sys.executable, *f"-m realm_jax prepare {flags} --output {tmp_path}/data".split()]

    def hear_interrupts():  # a test run in the background of a shell hands on that they are ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts)
    deadline = time.monotonic() + 120
    while not (tmp_path / ".data.partial" / killed).exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert sorted(os.listdir(tmp_path)) == [".data.partial", "p.jsonl", "vocab.txt"]
    assert subprocess.run(command).returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["data", "p.jsonl", "vocab.txt"]
    prepare(passages, tmp_path / "straight", vocab=tmp_path / "vocab.txt", shards=8, workers=2)
    assert digests(tmp_path / "data") == digests(tmp_path / "straight")


def test_beam_s_workers_write_what_processes_write(tmp_path, questions):
    """DirectRunner with two workers; bundles come in any order."""
    pytest.importorskip("apache_beam")
    records = [{"id": key, "title": key.title(), "text": text} for key, text in TEXTS.items()]
    records += [{"id": f"a{n}", "title": f"Article {n}", "text": " ".join(TEXTS.values())} for n in range(300)]
    records += [{"id": "long", "title": "word " * 400, "text": "and so on " * 400}]  # both are cut, which is counted
    passages = write_lines(tmp_path / "p.jsonl", records)
    options = {"questions": [questions], "vocabulary_size": 300, "shards": 4}
    prepare(passages, tmp_path / "processes", **options)
    beam = "--runner=DirectRunner --direct_num_workers=2 --direct_running_mode=multi_threading"
    prepare(passages, tmp_path / "beam", **options, beam=beam)
    assert digests(tmp_path / "processes") == digests(tmp_path / "beam")


def test_beam_knows_every_option_that_the_document_names():
    pytest.importorskip("apache_beam")
    from realm_jax.corpora.pipelines import _parser

    text = (Path(__file__).parents[2] / "docs" / "preparing.md").read_text(encoding="utf-8")
    commands = re.findall(r"--beam='(.*?)'", text, re.S)
    assert re.findall(r"--runner=(\w+)", " ".join(commands)) == ["DataflowRunner", "FlinkRunner", "DirectRunner"]
    for command in commands:
        _parser().parse_args(shlex.split(command))


@pytest.fixture
def news(tmp_path) -> tuple[str, list[MadeRecord]]:
    """Near-duplicates, other languages, stubs and damage among 200 records, and these records."""
    made = make_news(200)
    (tmp_path / "news.jsonl").write_bytes(b"".join(record.line + b"\n" for record in made))
    return f"news:{tmp_path}/news.jsonl", made


def test_news_is_filtered_and_every_record_is_accounted_for(tmp_path, passages, news, capsys):
    source, made = news
    options = {"pretraining": source, "vocabulary_size": 400, "shards": 3}
    with pytest.raises(UserError, match="news.jsonl: .*first at .*; correct it, or give --skip-damage"):
        prepare(passages, tmp_path / "strict", **options)
    prepare(passages, tmp_path / "data", **options, skip_damage=True)
    with pytest.raises(
        UserError, match="prepared with --skip-damage, which skipped [0-9]+ damaged records; pass the flag"
    ):
        prepare(passages, tmp_path / "data", **options)
    prepare(passages, tmp_path / "data", **options, skip_damage=True)
    told = capsys.readouterr().out
    assert "nearly the text of another article" in told and "nothing to do" in told.splitlines()[-1]
    counts = json.loads((tmp_path / "data" / "PREPARED.json").read_text())["counts"]["pretraining"]
    reasons = Counter(record.reason for record in made)
    stay = reasons.pop("")
    assert counts["records"] == len(made) and counts["articles"] == stay
    assert Counter(counts["dropped"]) + Counter(counts["damaged"]) == reasons
    store = PassageStore.open(tmp_path / "data" / "pretraining")
    assert store.documents == stay


def test_beam_filters_news_as_processes_do(tmp_path, passages, news):
    pytest.importorskip("apache_beam")
    options = {"pretraining": news[0], "vocabulary_size": 400, "shards": 3, "skip_damage": True}
    prepare(passages, tmp_path / "processes", **options)
    prepare(passages, tmp_path / "beam", **options, beam="--runner=DirectRunner --direct_num_workers=2")
    assert digests(tmp_path / "processes") == digests(tmp_path / "beam")


def dump_parts(folder: Path) -> list[str]:
    """Two files of a dump, one page each."""
    names = []
    for number in (1, 2):
        page = f"<page><title>City {number}</title><ns>0</ns><id>{number}</id><revision><model>wikitext</model><text>"
        page += f"{TEXTS['paris']} {number}</text></revision></page>"
        path = folder / f"enwiki-1-pages-articles{number}.xml-p{number}p{number}.bz2"
        path.write_bytes(bz2.compress(f'<mediawiki version="0.11">{page}</mediawiki>'.encode()))
        names.append(path.name)
    return names


@pytest.mark.parametrize("name", ["*.xml*.bz2", "", "enwiki-1-pages-articles?.xml-p*.bz2"])
def test_a_dump_is_named_by_a_pattern_or_its_folder(tmp_path, name):
    folder = tmp_path / "dump"
    folder.mkdir()
    dump_parts(folder)
    prepare(folder / name, tmp_path / "data", vocabulary_size=100)
    assert PassageStore.open(tmp_path / "data" / "passages").documents == 2


def test_a_bucket_with_other_things_in_it_is_left_alone(tmp_path, passages):
    pytest.importorskip("apache_beam")
    bucket = tmp_path / "bucket"
    (bucket / "articles").mkdir(parents=True)
    (bucket / "articles" / "precious.jsonl").write_bytes(passages.read_bytes())
    before = digests(bucket)
    with pytest.raises(UserError, match="exists and is not a prepared folder"):
        prepare(
            bucket / "articles" / "precious.jsonl",
            f"file://{bucket}",
            vocabulary_size=100,
            beam="--runner=DirectRunner",
        )
    assert digests(bucket) == before


def test_a_broken_line_of_ones_own_is_named_or_counted(tmp_path, passages):
    lines = passages.read_text().splitlines()
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join([lines[0], lines[1][:-5], lines[2], '{"id": "x"}']))
    with pytest.raises(UserError, match=r"broken.jsonl:2: not JSON \(.*\); correct it, or give --skip-damage$"):
        prepare(broken, tmp_path / "data", vocabulary_size=100)
    prepare(broken, tmp_path / "left out", vocabulary_size=100, skip_damage=True)
    counts = json.loads((tmp_path / "left out" / "PREPARED.json").read_text())["counts"]["passages"]
    assert counts["articles"] == 2 and counts["damaged"] == {"not JSON": 1, NO_FIELD: 1}
    assert counts["samples"]["not JSON"][0][2].startswith(f"{broken}:2: not JSON (")
    broken.write_text("\n".join(lines))  # corrected: read anew
    prepare(broken, tmp_path / "data", vocabulary_size=100, skip_damage=True)
    assert PassageStore.open(tmp_path / "data" / "passages").documents == 3


def test_a_command_that_lost_its_bucket_to_another_says_so(tmp_path, passages, monkeypatch):
    pytest.importorskip("apache_beam")
    url, options = f"file://{tmp_path}/bucket", {"vocabulary_size": 100, "beam": "--runner=DirectRunner"}
    check, calls = page.check_owner, []

    def other_first(root: str, claim: str) -> None:
        if not calls:
            calls.append(root)
            prepare(passages, url, **options)
        check(root, claim)

    monkeypatch.setattr(page, "check_owner", other_first)
    with pytest.raises(UserError, match="another command is writing there"):
        prepare(passages, url, **options)
    assert PassageStore.open(tmp_path / "bucket" / "passages").documents == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"vocabulary_size": 3}, "vocabulary size 3"),
        ({"limit": 15}, "a limit of 15 tokens leaves no room for text"),
        ({"spans": "magic"}, "span finder 'magic'.*there is no such finder"),
        ({"beam": "--runner=NoSuch"}, "NoSuch"),
        ({"beam": "--runer=DirectRunner"}, "there is no option --runer=DirectRunner"),
        ({"beam": "--runner=DirectRunner", "workers": 2}, "--workers"),
        ({"shards": 10**9}, "--shards=1000000000"),
        ({"max_answer_words": 5}, "need --questions"),
        ({"output": ""}, "^--output: is empty; name a folder to create$"),
    ],
)
def test_arguments_are_checked_before_a_text_is_read(tmp_path, passages, monkeypatch, options, message):
    if "beam" in options:
        pytest.importorskip("apache_beam")
    monkeypatch.setattr(articles.Processes, "extract", lambda *_: pytest.fail("too late"))
    with pytest.raises(UserError, match=message):
        prepare(passages, **{"output": tmp_path / "data"} | options)
    assert [path.name for path in tmp_path.iterdir()] == ["passages.jsonl"]


HARBOR = "Der Hafen wurde am 3. Oktober 1901 von Dr. Müller eröffnet. Die Schiffe warten z. B. Montag."
MOUNTAIN = "Der Berg ist sehr hoch. Im Winter liegt dort viel Schnee, und niemand steigt hinauf."
GERMAN = [{"id": "hafen", "text": HARBOR}, {"id": "berg", "text": MOUNTAIN}]


def test_the_language_is_detected_recorded_and_splits_sentences(tmp_path, capsys):
    passages = write_lines(tmp_path / "passages.jsonl", GERMAN)
    prepare(passages, tmp_path / "data", vocabulary_size=300)
    assert "; language: de\n" in capsys.readouterr().out
    sources = open_sources(tmp_path / "data")
    assert sources.language == "de" and "language" not in settings_of(tmp_path / "data")
    assert [len(sources.passages.sentences(row)) for row in range(2)] == [2, 2]
    prepare(passages, tmp_path / "plain", vocabulary_size=300, language="none")
    plain = open_sources(tmp_path / "plain")
    assert plain.language == "none" == settings_of(tmp_path / "plain")["language"]
    assert [len(plain.passages.sentences(row)) for row in range(2)] == [4, 2]
    with pytest.raises(UserError, match=r"was prepared with other settings"):
        prepare(passages, tmp_path / "plain", vocabulary_size=300, language="de")


def settings_of(data: Path) -> dict:
    return json.loads((data / "PREPARED.json").read_text())["inputs"]["settings"]


@pytest.mark.parametrize("shards", [1, 3])
def test_the_language_does_not_depend_on_shards_and_an_unknown_one_is_none(tmp_path, shards):
    vietnamese = [{"id": str(n), "text": "Cảng đóng cửa vào mùa đông, và tàu phải chờ ở đó."} for n in range(5)]
    prepare(write_lines(tmp_path / "vi.jsonl", vietnamese), tmp_path / "vi", vocabulary_size=300, shards=shards)
    assert open_sources(tmp_path / "vi").language == "none"
    prepare(write_lines(tmp_path / "de.jsonl", GERMAN), tmp_path / "de", vocabulary_size=300, shards=shards)
    assert open_sources(tmp_path / "de").language == "de"


def test_a_language_that_no_one_knows_is_an_error(tmp_path, passages):
    with pytest.raises(UserError, match=r"^--language=xx: is not one of none, bigrams, ar, .*, zh; choose one$"):
        prepare(passages, tmp_path / "data", language="xx")
    prepare(passages, tmp_path / "data", vocabulary_size=300)
    manifest = json.loads((tmp_path / "data" / "PREPARED.json").read_text())
    del manifest["language"]  # of an earlier version
    (tmp_path / "data" / "PREPARED.json").write_text(json.dumps(manifest))
    assert open_sources(tmp_path / "data").language == ""
    (tmp_path / "data" / "PREPARED.json").write_text(json.dumps(manifest | {"language": "xx"}))
    with pytest.raises(UserError, match=r"PREPARED\.json: unknown language 'xx'; prepare the folder again"):
        open_sources(tmp_path / "data")


def test_an_edit_of_the_corpus_splits_sentences_by_the_recorded_language(tmp_path):
    prepare(write_lines(tmp_path / "passages.jsonl", GERMAN), tmp_path / "data", vocabulary_size=300)
    new = write_lines(tmp_path / "new.jsonl", [{"id": "neu", "text": HARBOR}])
    store, _ = edit(tmp_path / "data", "add", [str(new)])
    (row,) = store.rows_of("neu")
    assert len(store.sentences(row)) == 2  # 4 without the abbreviations of German
