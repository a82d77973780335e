"""`realm prepare`: a whole folder or none, and every fault named before the slow part."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from realm_jax import cli
from realm_jax.corpus.jsonl import read_questions
from realm_jax.corpus.store import PassageStore
from realm_jax.errors import UserError
from realm_jax.jobs import prepare as job
from realm_jax.jobs.prepare import prepare
from realm_jax.text.wordpiece import WordPiece

TEXTS = {
    "paris": "Paris is the capital of France. The city has grown since 1850 along the river Seine.",
    "rome": "Rome is the capital of Italy. The city was founded in 753 BC on the river Tiber.",
    "oslo": "Oslo is the capital of Norway. The city burned in 1624 and was built again.",
}
QUESTIONS = [
    {"question": "what is the capital of france", "answers": ["Paris"], "gold_passage_id": "paris", "split": "train"},
    {
        "question": "when did oslo burn",
        "answers": ["1624", "in the year 1624"],
        "gold_passage_id": "oslo",
        "split": "dev",
    },
    {"question": "where is rome", "answers": ["on the river Tiber in Italy"], "split": "train", "source": "squad"},
]


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    records = [{"id": key, "title": key.title(), "text": text} for key, text in TEXTS.items()]
    return write_lines(tmp_path / "passages.jsonl", records)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "questions.jsonl", QUESTIONS)


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
    wordpiece = WordPiece.load(data / "tokenizer")
    assert manifest["format_version"] == 1 and manifest["limit"] == store.limit == 288
    assert manifest["tokenizer"] == store.tokenizer_fingerprint == wordpiece.fingerprint
    assert manifest["passages"] == {"rows": 3, "documents": 3, "fingerprint": store.fingerprint}
    assert manifest["pretraining"] is None and not (data / "pretraining").exists()
    assert manifest["questions"] == {"train": 3, "dev": 1}
    assert [store.text(row) for row in range(3)] == list(TEXTS.values())
    (dev,) = read_questions(data / "questions" / "dev.jsonl")
    assert dev.answers == ["1624", "in the year 1624"] and dev.gold_passage_id == "oslo"
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
    with pytest.raises(UserError, match="mine exists and is no prepared folder; choose another --output"):
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
    monkeypatch.setattr(job, "build_store", lambda *args: pytest.fail("the slow part began"))
    with passages.open("a") as stream:
        stream.write('{"id": "x"}\n')
    with pytest.raises(UserError, match=r'passages\.jsonl:4: the record has no "text"'):
        prepare(passages, tmp_path / "data")


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
    with pytest.raises(UserError, match=rf"^/dev/fd/{reader} is no regular file, .*; save it to one and name that$"):
        prepare(output=tmp_path / "data", **inputs)
    os.close(reader)


def test_a_cased_vocabulary_is_told_since_text_is_lower_cased(tmp_path, passages, caplog):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused1]", "paris", "Paris", "##N"]))
    prepare(passages, tmp_path / "data", vocab=vocab)
    told = f"{vocab}: 2 word pieces have capital letters, such as 'Paris', and are never used: text is lower-cased"
    assert told in caplog.messages


def test_settings_that_cannot_work_are_refused_before_anything_is_made(tmp_path, passages):
    with pytest.raises(UserError, match="there is no such finder"):
        prepare(passages, tmp_path / "data", spans="magic")
    with pytest.raises(UserError, match="a limit of 15 pieces leaves no room for text"):
        prepare(passages, tmp_path / "data", limit=15)
    with pytest.raises(UserError, match="vocabulary size 3"):
        prepare(passages, tmp_path / "data", vocabulary_size=3)
    assert os.listdir(tmp_path) == ["passages.jsonl"]


def test_a_question_whose_gold_passage_has_no_words_is_left_out(tmp_path, passages, questions, capsys):
    with passages.open("a") as stream:
        stream.write('{"id": "blank", "text": "\\u200b"}\n')
    with questions.open("a") as stream:
        stream.write('{"question": "q", "answers": ["a"], "gold_passage_id": "blank", "split": "dev"}\n')
    prepare(passages, tmp_path / "data", questions=[questions], vocabulary_size=300)
    out = capsys.readouterr().out
    assert "dropped 1 no words in the text" in out and "dropped 1 whose gold passage has no words" in out
    assert split_questions(tmp_path / "data", "dev") == ["when did oslo burn"]


def test_a_vocabulary_is_learned_from_a_part_of_large_texts(tmp_path, passages, monkeypatch):
    monkeypatch.setattr(job, "LEARN_FROM", 100)  # the three texts have 240 characters: every third is taken
    prepare(passages, tmp_path / "data", vocabulary_size=400)
    wordpiece = WordPiece.load(tmp_path / "data" / "tokenizer")
    assert wordpiece.pieces(wordpiece.encode("Paris").ids) == ["paris"]
    assert wordpiece.pieces(wordpiece.encode("Norway").ids) != ["norway"]


def test_a_full_disk_is_the_users_error_and_leaves_nothing(tmp_path, passages, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job, "build_store", full)
    with pytest.raises(UserError, match="the disk of .* is full; make room or choose another --output"):
        prepare(passages, tmp_path / "data")
    assert os.listdir(tmp_path) == ["passages.jsonl"]


def test_ctrl_c_in_the_middle_leaves_nothing_and_exits_130(tmp_path):
    text = " ".join(TEXTS.values()) * 20
    passages = write_lines(tmp_path / "p.jsonl", [{"id": str(number), "text": text} for number in range(1500)])
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nparis\n")
    command = f"-m realm_jax.cli prepare --passages {passages} --vocab {tmp_path}/vocab.txt --output {tmp_path}/data"

    def hear_interrupts():  # a test run in the background of a shell hands on that they are ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    arguments = [sys.executable, *command.split()]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts)
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob(".data.partial-*/passages/*/tokens.npy")):
        assert process.poll() is None and time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert sorted(os.listdir(tmp_path)) == ["p.jsonl", "vocab.txt"]


def test_an_interrupted_folder_is_mentioned(tmp_path, passages, caplog):
    (tmp_path / ".data.partial-abc").mkdir()
    prepare(passages, tmp_path / "data", vocabulary_size=300)
    assert ".data.partial-abc is left from an interrupted" in caplog.text
