"""Published question sets as TFDS datasets: the published splits, from files at hand or from a server."""

import functools
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import farmhash
import pytest

import realm_jax
from realm_jax.cli import main as cli
from realm_jax.data.questions import Question, read_questions
from realm_jax.errors import UserError

tfds = pytest.importorskip("tensorflow_datasets")
from tensorflow_datasets.core.download.checksums import UrlInfo, load_url_infos  # noqa: E402

from realm_jax.data import open_qa  # noqa: E402  (a second of importing)
from realm_jax.data.open_qa import CHECKSUMS, SETS, OpenQa, split_of  # noqa: E402

TRAIN, DEV = "who is number 0", "who is number 1"  # where FarmHash puts them


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """What TFDS keeps is the test's own."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    tfds.disable_progress_bar()


def lines(*records: dict) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def table(*rows: tuple[str, str, str]) -> str:
    return "".join(f"{row}\tfactoid\t{question}\t{pattern}\n" for row, question, pattern in rows)


def put(folder: Path, files: dict[str, str]) -> Path:
    """Write files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def nq_open(folder: Path) -> Path:
    train = lines(
        {"question": TRAIN, "answer": ["zero", "0"]},
        {"question": DEV, "answer": ["one"]},
        {"question": "who is number 27", "answer": ["a 3rd  power"]},
        {"question": "Who is NUMBER 2 ? é ", "answer": ["two"]},
    )
    test = lines({"question": DEV, "answer": ["one", "the one"]})
    return put(folder, {"NQ-open.train.jsonl": train, "NQ-open.dev.jsonl": test})


def curated_trec(folder: Path, *further: tuple[str, str, str]) -> Path:
    train = table(("1", TRAIN, r"zer\w|0"), ("2", DEV, "one"), ("lfb3", "who is number 2", "two"), *further)
    test = table(("9", 'what "test"', "a"), ("lfb1", "x", "y"))
    return put(folder, {"large2470-train.tsv": train, "large2470-test.tsv": test})


def build(config: str, manual: Path, **kwargs) -> OpenQa:
    kwargs.setdefault("data_dir", os.environ["TFDS_DATA_DIR"])
    builder = tfds.builder("open_qa", config=config, **kwargs)
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(manual_dir=manual))
    return builder


def fetch() -> OpenQa:
    """What a user without files writes."""
    builder = tfds.builder("open_qa/nq_open", data_dir=os.environ["TFDS_DATA_DIR"])
    builder.download_and_prepare()
    return builder


def contents(builder: OpenQa) -> dict[str, list[dict]]:
    return {split: list(source) for split, source in builder.as_data_source().items()}


# --- The rule of the splits -------------------------------------------------------------------------------------------


def test_long_fingerprints_stay_what_they_were():
    recorded = {  # up to 32 bytes, up to 64 and more are different ways; compared with another implementation once
        "what is the name of it?": 12689882524614931559,
        "wann war Häuptling Ōtani?": 3632601885935439496,
        "who was vincent van gogh inspired by?": 17449930176862098000,
        "when is the last time the chicago bulls won a championship?": 2727419237639176089,
        "what are the holydays of obligation in the catholic church 2013, and why?": 1328190635831668249,
    }
    assert {text: farmhash.fingerprint64(text.encode("utf-8")) for text in recorded} == recorded
    assert split_of("who was vincent van gogh inspired by?") == "dev" and split_of("what is the name of it?") == "train"


# --- From files at hand -----------------------------------------------------------------------------------------------


def test_nq_open_is_read_verbatim_and_in_order(tmp_path):
    builder = build("nq_open", nq_open(tmp_path / "manual"))
    source = builder.as_data_source()
    assert [record["question"].decode() for record in source["train"]] == [TRAIN, "Who is NUMBER 2 ? é "]
    assert [record["question"].decode() for record in source["dev"]] == [DEV, "who is number 27"]
    assert source["dev"][1] == {
        "question": b"who is number 27",
        "answers": [b"a 3rd  power"],
        "match": b"string",
        "id": b"NQ-open.train.jsonl:3",
        "source": b"nq_open",
    }
    assert [record["answers"] for record in source["test"]] == [[b"one", b"the one"]]
    assert builder.info.redistribution_info.license == "CC BY-SA 3.0" and builder.info.disable_shuffling
    again = tfds.data_source("open_qa/nq_open", split="train", data_dir=os.environ["TFDS_DATA_DIR"])
    assert again[0]["answers"] == [b"zero", b"0"], "what is prepared is found again"


def test_web_questions_are_read_without_questions_about_films(tmp_path):
    def records(**questions: str) -> str:
        return json.dumps([{"qId": row, "answers": ["a"], "qText": text} for row, text in questions.items()])

    train = {"devtest.json": records(wqr0=TRAIN), "val.json": records(wqr1=DEV), "trainmodel.json": records(wqr2="3?")}
    folder = put(tmp_path / "manual" / "web_questions", train | {"test.json": records(wqs7=DEV, mfb1="f")})
    found = contents(build("web_questions", folder.parent))
    assert {split: [record["id"] for record in records] for split, records in found.items()} == {
        "train": [b"wqr0", b"wqr2"],
        "dev": [b"wqr1"],
        "test": [b"wqs7"],
    }


def test_curated_trec_has_patterns_and_not_the_questions_of_users(tmp_path, caplog):
    found = contents(build("curated_trec", curated_trec(tmp_path / "manual")))
    assert found["train"] == [
        {"question": TRAIN.encode(), "answers": [rb"zer\w|0"], "match": b"regex", "id": b"1", "source": b"curated_trec"}
    ]
    assert [record["question"] for record in found["test"]] == [b'what "test"']
    assert "2 questions are left out that are not part of the published set" in caplog.text
    assert "train has 1 questions; 1353 were published" in caplog.text


def test_ids_and_marks_may_be_of_any_kind(tmp_path):
    folder = nq_open(tmp_path / "manual")
    rows = [{"question": DEV, "answer": ["a"], "id": row, "match": None} for row in (17, None, ["x"], "y")]
    (folder / "NQ-open.dev.jsonl").write_text(lines(*rows))
    found = contents(build("nq_open", folder))["test"]
    assert [record["id"] for record in found] == [b"17", b"NQ-open.dev.jsonl:2", b"NQ-open.dev.jsonl:3", b"y"]
    assert {record["match"] for record in found} == {b"string"}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("NQ-open.train.jsonl", None, r"manual lacks NQ-open\.train\.jsonl; add them, or remove the others"),
        ("NQ-open.dev.jsonl", {"question": "x", "answer": []}, r"NQ-open\.dev\.jsonl:1: the question has no answers"),
        ("NQ-open.train.jsonl", {"question": TRAIN, "answer": ["a"]}, "no question is left for dev"),
        ("NQ-open.dev.jsonl", {"question": "x", "answer": ["("], "match": "regex"}, "is not a regular expression"),
    ],
)
def test_faulty_files_are_named_and_nothing_is_prepared(tmp_path, file, content, message):
    path = nq_open(tmp_path / "manual") / file
    path.write_text(lines(content)) if content else path.unlink()
    with pytest.raises(UserError, match=message):
        build("nq_open", tmp_path / "manual")
    assert not (tmp_path / "tfds" / "open_qa" / "nq_open" / "1.0.0").exists()


# --- From a server ----------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path, monkeypatch):
    """NQ-open of this file, on a server of this machine, with the checksums that it should have."""
    folder = nq_open(tmp_path / "served")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    base = f"http://127.0.0.1:{server.server_address[1]}/"
    monkeypatch.setitem(SETS, "nq_open", replace(SETS["nq_open"], url=base))
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    infos = {
        base + name: UrlInfo(size=len(content), checksum=hashlib.sha256(content).hexdigest(), filename=name)
        for name, content in contents.items()
    }
    monkeypatch.setattr(OpenQa, "url_infos", infos)
    yield folder
    server.shutdown()
    server.server_close()


def test_what_is_not_at_hand_is_downloaded(served, tmp_path):
    builder = fetch()
    found = contents(builder)
    assert [record["id"] for record in found["dev"]] == [b"NQ-open.train.jsonl:2", b"NQ-open.train.jsonl:3"]
    assert [path.name for path in (tmp_path / "tfds" / "downloads" / "open_qa").glob("*.jsonl")], "kept"
    questions = open_qa.read("tfds:open_qa/nq_open", "test")
    expected = {"split": "test", "source": "nq_open", "id": "NQ-open.dev.jsonl:1"}
    assert questions == [Question(DEV, ["one", "the one"], {}, expected, 1)]


def test_another_file_than_the_published_one_is_refused(served):
    with open(served / "NQ-open.dev.jsonl", "a") as stream:
        stream.write("\n")
    with pytest.raises(UserError, match=r"cannot download it \(NonMatchingChecksumError: .*NQ-open\.dev"):
        fetch()


def test_what_cannot_be_downloaded_is_told_with_what_to_put_where(served, tmp_path):
    (served / "NQ-open.train.jsonl").unlink()
    with pytest.raises(UserError) as told:
        fetch()
    assert "cannot download it (DownloadError: " in str(told.value) and "\n" not in str(told.value)
    assert str(told.value).endswith(
        "put NQ-open.train.jsonl and NQ-open.dev.jsonl into TFDS's folder "
        f"(Manual directory {tmp_path}/tfds/downloads/manual does not exist or is empty)"
    )
    put(tmp_path / "manual", {"other.txt": ""})
    with pytest.raises(UserError, match=rf"put NQ-open.* and NQ-open.* into {tmp_path}/manual$"):
        build("nq_open", tmp_path / "manual")


# --- In `realm prepare` -----------------------------------------------------------------------------------------------


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    path = tmp_path / "psgs_w100.tsv"
    path.write_text("id\ttext\ttitle\n1\tThe one is number 1. It came before 2.\tOne\n2\tZero is number 0.\tZero\n")
    return path


def prepare(*arguments: str | Path) -> int:
    return cli.main(["prepare", "--vocabulary-size", "200", "--workers", "1", *map(str, arguments)])


def test_a_published_set_is_prepared_by_its_name(tmp_path, passages, capsys):
    nq_open(tmp_path / "tfds" / "downloads" / "manual")
    arguments = ("--passages", passages, "--questions", "tfds:open_qa/nq_open", "--output", tmp_path / "data")
    assert prepare(*arguments) == 0
    assert "questions: train 2, dev 2, test 1\n" in capsys.readouterr().out
    (question,) = read_questions(tmp_path / "data" / "questions" / "test.jsonl")
    assert question.answers == ["one", "the one"] and question.fields["id"] == "NQ-open.dev.jsonl:1"
    assert prepare(*arguments) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert prepare("--passages", passages, "--questions", "dev=tfds:open_qa/nq_open", "--output", tmp_path / "dev") == 0
    assert os.listdir(tmp_path / "dev" / "questions") == ["dev.jsonl"]


def test_patterns_stay_marked_and_whole(tmp_path, passages):
    curated_trec(tmp_path / "tfds" / "downloads" / "manual" / "curated_trec", ("4", "who is number 3", "a b c|d"))
    output = tmp_path / "data"
    published = ("--questions", "tfds:open_qa/curated_trec", "--max-answer-words", "1")
    assert prepare("--passages", passages, *published, "--output", output) == 0
    train = read_questions(output / "questions" / "train.jsonl")
    assert [question.answers for question in train] == [[r"zer\w|0"], ["a b c|d"]]
    assert {question.fields["match"] for question in train} == {"regex"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tfds:open_qa/trivia", "tfds:open_qa/trivia: no such question set; choose one of tfds:open_qa/nq_open, "),
        ("tfds:squad", "tfds:squad: no such question set"),
        ("valid=tfds:open_qa/nq_open", "tfds:open_qa/nq_open has no split valid; choose one of train, dev, test"),
    ],
)
def test_another_name_is_told(tmp_path, passages, capsys, name, message):
    assert prepare("--passages", passages, "--questions", name, "--output", tmp_path / "data") == 2
    assert message in capsys.readouterr().err


def test_damaged_and_unwritable_folders_are_told(tmp_path, passages, capsys, monkeypatch):
    nq_open(tmp_path / "tfds" / "downloads" / "manual")
    open_qa.read("tfds:open_qa/nq_open")
    for path in (tmp_path / "tfds" / "open_qa" / "nq_open" / "1.0.0").glob("*test.array_record*"):
        path.write_bytes(b"damaged")
    arguments = ("--passages", passages, "--questions", "tfds:open_qa/nq_open", "--output", tmp_path / "data")
    assert prepare(*arguments) == 2
    assert re.search(
        r"TFDS cannot prepare or read it \(.*\); remove open_qa/nq_open from TFDS's folder", capsys.readouterr().err
    )
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "file"))
    assert prepare(*arguments) == 2
    assert re.search(r"/file.*, or set TFDS_DATA_DIR to another folder", capsys.readouterr().err)


# --- What is imported -------------------------------------------------------------------------------------------------

TRAP = """
import importlib.machinery, sys
class Trap:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] == "tensorflow" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        sys.exit(f"{module.__name__} was imported")
sys.meta_path.insert(0, Trap())
"""


def python(program: str) -> str:
    """Runs a program where importing TensorFlow ends it; returns stdout."""
    done = subprocess.run([sys.executable, "-c", TRAP + program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_needs_tensorflow(tmp_path):
    manual = nq_open(tmp_path / "manual")
    program = f"""
import realm_jax.data.open_qa, tensorflow_datasets as tfds
builder = tfds.builder("open_qa/nq_open")
builder.download_and_prepare(download_config=tfds.download.DownloadConfig(manual_dir={str(manual)!r}))
print([len(source) for source in builder.as_data_source().values()])
print(len(realm_jax.data.open_qa.read("tfds:open_qa/nq_open")))
"""
    assert python(program).splitlines()[-2:] == ["[2, 2, 1]", "5"]


def test_only_published_sets_import_tfds():
    package = Path(realm_jax.__file__).parent
    files = [path.relative_to(package.parent).with_suffix("") for path in package.rglob("*.py")]
    modules = sorted({".".join(file.parts).removesuffix(".__init__") for file in files} - {"realm_jax.data.open_qa"})
    program = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    assert python(program + "print('tensorflow_datasets' in sys.modules)") == "False\n"


# --- Real files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "folder"), [("web_questions", "webquestions"), ("curated_trec", "curatedtrec")])
def test_real_sets_have_the_published_sizes(shared_data, name, folder, caplog):
    builder = build(name, shared_data / folder)
    sizes = {split: len(source) for split, source in builder.as_data_source().items()}
    assert sizes == SETS[name].sizes == {split: info.num_examples for split, info in builder.info.splits.items()}
    assert "were published" not in caplog.text
    for question in open_qa.read(f"tfds:open_qa/{name}", "dev"):
        assert split_of(question.question) == "dev"


def test_checksums_are_those_of_the_real_files(shared_data):
    folders, infos = {"nq_open": "nq_open", "web_questions": "webquestions", "curated_trec": "curatedtrec"}, {}
    for name, published in SETS.items():
        for file in published.names:
            infos[file] = OpenQa.url_infos[published.url + file]
            path = shared_data / folders[name] / file
            if path.exists():  # all but the training questions of NQ-open
                content = path.read_bytes()
                found = infos[file].size, infos[file].checksum
                assert (len(content), hashlib.sha256(content).hexdigest()) == found
    assert len(infos) == len(load_url_infos(CHECKSUMS)) == 8


def test_checksums_of_nq_open_are_those_that_tfds_has_itself():
    known = load_url_infos(tfds.core.tfds_path("datasets/natural_questions_open/checksums.tsv"))
    assert {(url, info.size, info.checksum) for url, info in known.items()} == {
        (url, info.size, info.checksum) for url, info in OpenQa.url_infos.items() if url.startswith(SETS["nq_open"].url)
    }
