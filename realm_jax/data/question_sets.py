"""Published question sets: which files they are, which rows of them count, and how ORQA split them.

Not for preparing them: read `realm_jax.data.open_qa` next, the TFDS builder.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import farmhash

from realm_jax.data.questions import Question
from realm_jax.errors import UserError

PREFIX = "tfds:"  # begins the name of a set, `tfds:open_qa/nq_open`, where a file of questions may stand
SPLITS = ("train", "dev", "test")


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
