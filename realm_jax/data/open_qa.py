"""The TFDS datasets `open_qa/nq_open`, `open_qa/web_questions` and `open_qa/curated_trec`, with ORQA's splits.

    import realm_jax.data.open_qa  # registers the names
    builder = tensorflow_datasets.builder("open_qa/web_questions")
    builder.download_and_prepare()
    builder.as_data_source("dev")[0]  # {"question": b"…", "answers": [b"…"], "match": b"string", …}

TensorFlow is not needed, because records are kept in ArrayRecord files. The published files are taken from TFDS's
manual folder if they are in it, and downloaded otherwise. Importing this module takes a second.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import farmhash
import tensorflow_datasets as tfds

from realm_jax.data.questions import PUBLISHED, Question, read_questions
from realm_jax.errors import UserError

logger = logging.getLogger(__name__)

CHECKSUMS = Path(__file__).with_name("question_sets.tsv")  # of downloads: URL, size, SHA-256, name
SPLITS = ("train", "dev", "test")


@dataclass(frozen=True)
class QuestionSet:
    """A question set as others report numbers on it.

    Attributes:
        title: name and reference.
        homepage: page that describes it.
        license: its license.
        url: folder of the files; `question_sets.tsv` has their sizes and checksums.
        files: names in the order of reading, by official split.
        sizes: number of questions of each of our splits.
        member: ids of the questions that belong to the set; those without an id all do.
    """

    title: str
    homepage: str
    license: str
    url: str
    files: Mapping[str, Sequence[str]]
    sizes: Mapping[str, int]
    member: re.Pattern[str]

    @property
    def names(self) -> list[str]:
        """Return the names of all files."""
        return [name for part in self.files.values() for name in part]


_GITHUB, _RAW = "https://github.com/", "https://raw.githubusercontent.com/"
SETS: dict[str, QuestionSet] = {
    "nq_open": QuestionSet(
        title="NQ-open: questions of Natural Questions with answers of at most five tokens (Lee et al. 2019)",
        homepage=f"{_GITHUB}google-research-datasets/natural-questions/tree/master/nq_open",
        license="CC BY-SA 3.0",
        # The commit that is named at tensorflow.org/datasets/catalog/natural_questions_open, with its checksums.
        url=f"{_RAW}google-research-datasets/natural-questions/a7a113c9fdc2d9986d624bd43b8a18d6d5779eaa/nq_open/",
        files={"train": ["NQ-open.train.jsonl"], "test": ["NQ-open.dev.jsonl"]},
        sizes={"train": 79_168, "dev": 8_757, "test": 3_610},
        member=re.compile(""),
    ),
    "web_questions": QuestionSet(
        title="WebQuestions: questions that people typed, answered from Freebase (Berant et al. 2013)",
        homepage=f"{_GITHUB}brmson/dataset-factoid-webquestions",
        license="CC BY 4.0",
        # Before questions about films (ids that begin with mfb and syn) were put into the same files.
        url=f"{_RAW}brmson/dataset-factoid-webquestions/659fe0f50416d9803674562237c58d49aa95665e/main/",
        files={"train": ["devtest.json", "val.json", "trainmodel.json"], "test": ["test.json"]},
        sizes={"train": 3_417, "dev": 361, "test": 2_032},
        member=re.compile("wq"),
    ),
    "curated_trec": QuestionSet(
        title="CuratedTREC: questions of TREC with regular expressions for answers (Baudis and Sedivy 2015)",
        homepage=f"{_GITHUB}brmson/dataset-factoid-curated",
        license="none stated",
        url=f"{_RAW}brmson/dataset-factoid-curated/master/",
        files={"train": ["large2470-train.tsv"], "test": ["large2470-test.tsv"]},
        sizes={"train": 1_353, "dev": 133, "test": 694},
        member=re.compile("(?!lfb)"),  # those were asked on a web page, with answers by its users
    ),
}


def split_of(question: str) -> str:
    """Return the split that ORQA gives to a question of the official training data: one in ten is for development.

    ORQA takes the fingerprint modulo 100,000 before, which changes nothing.
    """
    return "dev" if farmhash.fingerprint64(question.encode("utf-8")) % 10 == 0 else "train"


class OpenQa(tfds.core.GeneratorBasedBuilder):
    """Questions in ORQA's splits and in the order of the files.

    Features: `question` and `answers`, verbatim; `match`, "string" or "regex"; `id`, as published or file and line;
    `source`, the name of the set.
    """

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name, description=each.title) for name, each in SETS.items()]
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "If there is no network, put the files into this folder, or into one in it with the name of the set: "
        + "; ".join(f"{name}: {', '.join(each.names)}" for name, each in SETS.items())
    )
    url_infos = tfds.download.checksums.load_url_infos(CHECKSUMS)

    def __init__(self, *, file_format: Any = "array_record", **kwargs: Any):
        super().__init__(file_format=file_format, **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        published, text = SETS[self.builder_config.name], tfds.features.Text()
        texts, answers = dict.fromkeys(("question", "match", "id", "source"), text), tfds.features.Sequence(text)
        return tfds.core.DatasetInfo(
            builder=self,
            description="Questions of open-domain question answering with the splits of ORQA (Lee et al. 2019).",
            features=tfds.features.FeaturesDict(texts | {"answers": answers}),
            homepage=published.homepage,
            license=published.license,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[tuple[int, Any]]]:
        name, title = self.builder_config.name, self.info.full_name
        published = SETS[name]

        # --- The published files: from the manual folder, or downloaded
        try:
            manual = Path(dl_manager.manual_dir)
            folders, where = [manual / name, manual], str(manual)
        except AssertionError as error:  # there is none, or nothing in it; the first sentence says where it would be
            folders, where = [], f"TFDS's folder ({str(error).partition('. ')[0]})"
        folder = next((each for each in folders if any((each / file).is_file() for file in published.names)), None)
        if folder is not None:
            files = {split: {file: folder / file for file in part} for split, part in published.files.items()}
            if missing := [file for file in published.names if not (folder / file).is_file()]:
                raise UserError(f"{folder} lacks {', '.join(missing)}; add them, or remove the others to download all")
        else:
            advice = f"put {' and '.join(published.names)} into {where}"
            # Logged before, because without a network it takes minutes to fail.
            logger.warning("%s: downloading it from %s; or %s", title, published.homepage, advice)
            urls = {split: {file: published.url + file for file in part} for split, part in published.files.items()}
            try:
                files = dl_manager.download(urls)
            except Exception as error:  # whatever the network library raises
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                raise UserError(f"{title}: cannot download it ({reason}); {advice}") from None

        # --- Their questions, in ORQA's splits
        splits: dict[str, list[Question]] = {split: [] for split in SPLITS}
        num_unpublished = 0
        for official_split, paths in files.items():
            for file, path in paths.items():
                for question in read_questions(path):
                    number = question.fields.get("id")
                    if isinstance(number, str) and not published.member.match(number):
                        num_unpublished += 1
                        continue
                    has_id = isinstance(number, str | int)
                    question.fields["id"] = str(number) if has_id else f"{file}:{question.line}"
                    splits["test" if official_split == "test" else split_of(question.question)].append(question)
        if num_unpublished:
            logger.warning(
                "%s: %d questions are left out that are not part of the published set", title, num_unpublished
            )
        for split, questions in splits.items():
            if not questions:
                raise UserError(f"{title}: no question is left for {split}; check the files")
            if len(questions) != (size := published.sizes[split]):
                logger.warning("%s: %s has %d questions; %d were published", title, split, len(questions), size)
        return {split: self._generate_examples(questions) for split, questions in splits.items()}

    def _generate_examples(self, questions: Sequence[Question]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, question in enumerate(questions):
            fields = {"question": question.question, "answers": question.answers, "id": question.fields["id"]}
            match = "regex" if question.is_regex else "string"
            yield number, fields | {"match": match, "source": self.builder_config.name}


def read(name: str, split: str | None = None) -> list[Question]:
    """Return the questions of a published set, with split, source and id in their `fields`.

    We prepare them first if TFDS's folder does not have them.

    Args:
        name: `tfds:open_qa/NAME`.
        split: "train", "dev" or "test"; None for all.

    Raises:
        UserError: the name or split is unknown, or the questions cannot be prepared or read.
    """
    config = name.removeprefix(f"{PUBLISHED}{OpenQa.name}/")
    if config not in SETS:
        known = ", ".join(f"{PUBLISHED}{OpenQa.name}/{each}" for each in SETS)
        raise UserError(f"{name}: no such question set; choose one of {known}")
    if split not in (None, *SPLITS):
        raise UserError(f"{name} has no split {split}; choose one of {', '.join(SPLITS)}")
    questions = []
    # TFDS prints and logs a lot; we report progress and errors in one line each.
    try:
        builder = OpenQa(config=config, data_dir=os.environ.get("TFDS_DATA_DIR"))  # TFDS itself looks when imported
        if not builder.data_path.exists():
            logger.info("preparing %s in %s", builder.info.full_name, builder.data_dir)
            tfds.disable_progress_bar()
            logging.getLogger("urllib3").setLevel(logging.ERROR)  # it logs each try; the last error is reported
            with contextlib.redirect_stdout(io.StringIO()):  # TFDS announces itself there
                builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        for each in SPLITS if split is None else [split]:
            for line, record in enumerate(builder.as_data_source(each), start=1):
                fields = {"split": each, "source": record["source"].decode(), "id": record["id"].decode()}
                fields |= {"match": "regex"} if record["match"] == b"regex" else {}
                answers = [answer.decode() for answer in record["answers"]]
                questions.append(Question(record["question"].decode(), answers, {}, fields, line))
    except UserError:
        raise
    except Exception as error:  # of the disk, of damaged files, or of another format, as TFDS and ArrayRecord see fit
        reason = " ".join(str(error).split())[:200]
        advice = f"remove {OpenQa.name}/{config} from TFDS's folder, or set TFDS_DATA_DIR to another folder"
        raise UserError(f"{name}: TFDS cannot prepare or read it ({reason}); {advice}") from None
    return questions


def fingerprint(questions: Sequence[Question]) -> str:
    """Return the SHA-256 of the content of questions: two preparations of the same files agree."""
    digest = hashlib.sha256()
    for question in questions:
        content = [question.question, question.answers, question.fields]
        digest.update(json.dumps(content, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
