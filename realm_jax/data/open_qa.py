"""The TFDS datasets `open_qa/nq_open`, `open_qa/web_questions` and `open_qa/curated_trec`, with ORQA's splits.

    import realm_jax.data.open_qa  # makes the names known
    builder = tensorflow_datasets.builder("open_qa/web_questions")
    builder.download_and_prepare()
    builder.as_data_source("dev")[0]  # {"question": b"…", "answers": [b"…"], "match": b"string", …}

Nothing of it needs TensorFlow: records are kept in ArrayRecord files. What was published is taken from TFDS's manual
folder if it lies there, and downloaded otherwise. Importing this takes a second, so nothing imports it that does not
use it. Not for other question files: `realm_jax.data.questions`. Read `OpenQa` next.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import farmhash
import tensorflow_datasets as tfds

from realm_jax.data.questions import PUBLISHED, Question, pattern_fault, read_questions
from realm_jax.errors import UserError

logger = logging.getLogger(__name__)

CHECKSUMS = Path(__file__).with_name("question_sets.tsv")  # of downloads: URL, size, SHA-256, name
SPLITS = ("train", "dev", "test")


# --- Which files they are, and how ORQA split them --------------------------------------------------------------------


Files = Mapping[str, tuple[str, ...]]  # names, by official split, "train" and "test", in the order of reading


@dataclass(frozen=True)
class QuestionSet:
    """A question set as others report numbers on it."""

    title: str
    homepage: str
    license: str
    url: str  # of the folder of the first edition; sizes and checksums of its files: `question_sets.tsv`
    editions: tuple[Files, ...]  # the same questions, published in several forms; the first can be downloaded
    sizes: Mapping[str, int]  # questions in our splits
    member: re.Pattern[str]  # ids of the rows that belong to it; rows without ids all do

    def belongs(self, question: Question) -> bool:
        """Whether a row is of the set, and not one that was put into its files for another purpose."""
        row = question.fields.get("id")
        return not isinstance(row, str) or self.member.match(row) is not None


# The commit that is named at tensorflow.org/datasets/catalog/natural_questions_open, with its checksums.
_NQ_OPEN = (
    "https://raw.githubusercontent.com/google-research-datasets/natural-questions/"
    "a7a113c9fdc2d9986d624bd43b8a18d6d5779eaa/nq_open/"
)
# Before questions about films (ids that begin with mfb and syn) were put into the same files.
_WEB_QUESTIONS = (
    "https://raw.githubusercontent.com/brmson/dataset-factoid-webquestions/"
    "659fe0f50416d9803674562237c58d49aa95665e/main/"
)
_CURATED_TREC = "https://raw.githubusercontent.com/brmson/dataset-factoid-curated/master/"


SETS: dict[str, QuestionSet] = {
    "nq_open": QuestionSet(
        title="NQ-open: questions of Natural Questions with answers of at most five tokens (Lee et al. 2019)",
        homepage="https://github.com/google-research-datasets/natural-questions/tree/master/nq_open",
        license="CC BY-SA 3.0",
        url=_NQ_OPEN,
        editions=({"train": ("NQ-open.train.jsonl",), "test": ("NQ-open.dev.jsonl",)},),
        sizes={"train": 79_168, "dev": 8_757, "test": 3_610},
        member=re.compile(""),
    ),
    "web_questions": QuestionSet(
        title="WebQuestions: questions that people typed, answered from Freebase (Berant et al. 2013)",
        homepage="https://github.com/brmson/dataset-factoid-webquestions",
        license="CC BY 4.0",
        url=_WEB_QUESTIONS,
        editions=(
            {"train": ("devtest.json", "val.json", "trainmodel.json"), "test": ("test.json",)},
            {"train": ("WebQuestions-train.txt",), "test": ("WebQuestions-test.txt",)},
        ),
        sizes={"train": 3_417, "dev": 361, "test": 2_032},
        member=re.compile("wq"),
    ),
    "curated_trec": QuestionSet(
        title="CuratedTREC: questions of TREC with regular expressions for answers (Baudis and Sedivy 2015)",
        homepage="https://github.com/brmson/dataset-factoid-curated",
        license="none stated",
        url=_CURATED_TREC,
        editions=(
            {"train": ("large2470-train.tsv",), "test": ("large2470-test.tsv",)},
            {"train": ("CuratedTrec-train.txt",), "test": ("CuratedTrec-test.txt",)},
        ),
        sizes={"train": 1_353, "dev": 133, "test": 694},
        member=re.compile("(?!lfb)"),  # those were asked on a web page, with answers by its users
    ),
}


OfficialFiles = dict[str, dict[str, Path]]  # where the files of the official splits are, by their published names


def find_files(folders: Sequence[Path], wanted: QuestionSet) -> OfficialFiles | None:
    """The files of the first edition that one of the folders holds; None if there is nothing.

    Raises UserError for a folder that holds some files of an edition, and no edition whole.
    """
    for folder in folders:
        partly = None
        for edition in wanted.editions:
            found = {split: {name: folder / name for name in files} for split, files in edition.items()}
            paths = [path for files in found.values() for path in files.values()]
            missing = [path.name for path in paths if not path.is_file()]
            if not missing:
                return found
            if len(missing) < len(paths):
                there = ", ".join(path.name for path in paths if path.is_file())
                partly = partly or f"{folder} holds {there} but not {', '.join(missing)}"
        if partly:
            raise UserError(f"{partly}; put the missing files there too, or take these out to have all downloaded")
    return None


def instructions(name: str) -> str:
    """Which files to get when they cannot be downloaded: `NQ-open.train.jsonl and NQ-open.dev.jsonl`, …"""
    editions = [[file for files in edition.values() for file in files] for edition in SETS[name].editions]
    return ", or ".join(" and ".join(files) for files in editions)


def split_of(question: str) -> str:
    """The split that ORQA gives to a question of the official training data: one in ten is for development.

    The choice follows from the text alone: FarmHash's Fingerprint64 of its UTF-8 bytes, modulo ten (ORQA takes it
    modulo 100,000 first, which changes nothing).
    """
    return "dev" if farmhash.fingerprint64(question.encode("utf-8")) % 10 == 0 else "train"


def resplit(train: Sequence[Question], test: Sequence[Question]) -> dict[str, list[Question]]:
    """ORQA's splits of official ones: train is divided, test stays. The order of the files is kept."""
    splits: dict[str, list[Question]] = {"train": [], "dev": [], "test": list(test)}
    for question in train:
        splits[split_of(question.question)].append(question)
    return splits


# --- As datasets ------------------------------------------------------------------------------------------------------


class OpenQa(tfds.core.GeneratorBasedBuilder):
    """Questions with answer strings, or with regular expressions, in ORQA's splits train, dev and test.

    Features: `question` and `answers`, verbatim; `match`, "string" or "regex", for how answers are meant; `id` of the
    row, as published or its file and line; `source`, the name of the set. The order is that of the files.
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name=name, description=published.title) for name, published in SETS.items()
    ]
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Where there is no network, put into this folder, or into one in it with the name "
    MANUAL_DOWNLOAD_INSTRUCTIONS += "of the set: " + "; ".join(f"{name}: {instructions(name)}" for name in SETS)
    url_infos = tfds.download.checksums.load_url_infos(CHECKSUMS)

    def __init__(self, *, file_format: Any = "array_record", **kwargs: Any):
        super().__init__(file_format=file_format, **kwargs)

    @property
    def published(self) -> QuestionSet:
        """What the config's questions are."""
        return SETS[self.builder_config.name]

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        return tfds.core.DatasetInfo(
            builder=self,
            description="Questions of open-domain question answering with the splits of ORQA (Lee et al. 2019).",
            features=tfds.features.FeaturesDict(
                {
                    "question": text(),
                    "answers": tfds.features.Sequence(text()),
                    "match": text(),
                    "id": text(),
                    "source": text(),
                }
            ),
            homepage=self.published.homepage,
            license=self.published.license,
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[tuple[int, Any]]]:
        folders, advice = _manual_folders(dl_manager, self.builder_config.name)
        found = find_files(folders, self.published) or self._download(dl_manager, advice)
        left_out: Counter[str] = Counter()
        official = {split: self._read(files, left_out) for split, files in found.items()}
        splits = resplit(official["train"], official["test"])
        self._report(splits, left_out)
        return {split: self._generate_examples(questions) for split, questions in splits.items()}

    def _generate_examples(self, questions: Sequence[Question]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, question in enumerate(questions):
            fields = {"question": question.question, "answers": question.answers, "id": question.fields["id"]}
            match = "regex" if question.is_regex else "string"
            yield number, fields | {"match": match, "source": self.builder_config.name}

    def _download(self, dl_manager: tfds.download.DownloadManager, advice: str) -> OfficialFiles:
        """Fetch the edition that can be fetched; checksums are compared."""
        urls = {
            split: {name: self.published.url + name for name in files}
            for split, files in self.published.editions[0].items()
        }
        # At once, since without a network it takes minutes to fail.
        logger.warning("%s: downloading it from %s; or %s", self.info.full_name, self.published.homepage, advice)
        try:
            fetched = dl_manager.download(urls)
        except Exception as fault:  # whatever the network library raises
            reason = " ".join(str(fault).split())[:300]
            name = type(fault).__name__
            raise UserError(f"{self.info.full_name}: cannot download it ({name}: {reason}); {advice}") from None
        return {split: {name: Path(path) for name, path in files.items()} for split, files in fetched.items()}

    def _read(self, files: Mapping[str, Path], left_out: Counter[str]) -> list[Question]:
        """The questions of an official split; what is left out is counted by reason."""
        questions = []
        for name, path in files.items():
            for question in read_questions(path, check_patterns=False):
                if not self.published.belongs(question):
                    left_out["that were added to the files for another purpose"] += 1
                    continue
                if (fault := pattern_fault(question)) is not None:
                    raise UserError(f"{path}:{question.line}: {fault}; correct the pattern")
                row = question.fields.get("id")
                question.fields["id"] = str(row) if isinstance(row, str | int) else f"{name}:{question.line}"
                questions.append(question)
        return questions

    def _report(self, splits: Mapping[str, Sequence[Question]], left_out: Counter[str]) -> None:
        """Say what was left out, and whether the numbers are those that were published."""
        self.info.metadata["left_out"] = dict(left_out)
        for reason, count in left_out.items():
            logger.warning("%s: %d questions %s are left out", self.info.full_name, count, reason)
        for split, questions in splits.items():
            if not questions:
                raise UserError(f"{self.info.full_name}: no question is left for {split}; check the files")
            expected = self.published.sizes[split]
            if len(questions) != expected:
                logger.warning(
                    "%s: %s has %d questions; %d were published", self.info.full_name, split, len(questions), expected
                )


def read(name: str, split: str | None = None) -> list[Question]:
    """Questions of `tfds:open_qa/NAME`, of one split or all, each with its split, source and id in `fields`.

    They are prepared first where they are not yet, in TFDS's folder (`TFDS_DATA_DIR`). Raises UserError for another
    name or split, and for whatever keeps them from being prepared or read.
    """
    questions = name.removeprefix(f"{PUBLISHED}{OpenQa.name}/")
    if questions not in SETS:
        known = ", ".join(f"{PUBLISHED}{OpenQa.name}/{each}" for each in SETS)
        raise UserError(f"{name}: no such question set; choose one of {known}")
    if split not in (None, *SPLITS):
        raise UserError(f"{name} has no split {split}; choose one of {', '.join(SPLITS)}")
    try:
        builder = _prepared(questions)
        sources = {each: builder.as_data_source(each) for each in SPLITS if split in (None, each)}
        return [
            _question(record, each, line)
            for each, source in sources.items()
            for line, record in enumerate(source, start=1)
        ]
    except UserError:
        raise
    except OSError as fault:
        place = fault.filename or "TFDS's folder"
        raise UserError(f"{name}: {fault.strerror or fault}: {place}; set TFDS_DATA_DIR to another folder") from None
    except Exception as fault:  # of damaged files, or of another format, as TFDS and ArrayRecord see fit
        reason = " ".join(str(fault).split())[:200]
        raise UserError(
            f"{name}: what lies in TFDS's folder cannot be read ({reason}); remove its {OpenQa.name}/{questions}"
        ) from None


def fingerprint(questions: Sequence[Question]) -> str:
    """SHA-256 of the content of questions: two preparations of the same files agree."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(
            json.dumps([question.question, question.answers, question.fields], sort_keys=True).encode() + b"\n"
        )
    return digest.hexdigest()


def _prepared(questions: str) -> OpenQa:
    """The builder of a set whose files are there."""
    data_dir = os.environ.get("TFDS_DATA_DIR")  # as it is now; TFDS looks when it is imported
    builder = OpenQa(config=questions, data_dir=data_dir)
    if not builder.data_path.exists():
        logger.info("preparing %s in %s", builder.info.full_name, builder.data_dir)
        tfds.disable_progress_bar()
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # it logs each try; the last error is reported below
        with contextlib.redirect_stdout(io.StringIO()):  # where it would announce itself
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
    return builder


def _question(record: Mapping[str, Any], split: str, line: int) -> Question:
    """A record of the data source."""
    texts = {key: record[key].decode("utf-8") for key in ("question", "match", "id", "source")}
    fields = {"split": split, "source": texts["source"], "id": texts["id"]}
    if texts["match"] == "regex":
        fields["match"] = "regex"
    return Question(texts["question"], [answer.decode("utf-8") for answer in record["answers"]], {}, fields, line)


def _manual_folders(dl_manager: tfds.download.DownloadManager, questions: str) -> tuple[list[Path], str]:
    """Where files may have been put, and what to say to somebody who has to put them there."""
    try:
        folder = Path(dl_manager.manual_dir)
    except AssertionError as fault:  # there is none, or nothing in it; the first line says where it would be
        return [], f"put {instructions(questions)} into TFDS's folder ({str(fault).partition('. ')[0]})"
    return [folder / questions, folder], f"put {instructions(questions)} into {folder}"
