"""Articles from elsewhere: JSON Lines as crawls have them, Hugging Face datasets, TensorFlow Datasets.

A source is cut into *parts*: small picklable functions, each of which reads its records. Any process on any machine can
read a part without the others, and all parts together give every record once. An unreadable record becomes a `Skipped`,
which the caller counts or refuses; only errors of a complete source (not found, not installed, storage fails) are
UserErrors. Not for files of passages in the project's own format: see `texts.py`. Read `parts` next.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from realm_jax.corpora.articles import Article, Outcome, Skipped
from realm_jax.data.input_files import PACKED, matching, size_of
from realm_jax.data.lines import BadRecord, applied, parse_json, read_lines, sample
from realm_jax.errors import UserError, install_extra

PART_BYTES = 1 << 28  # of a plain JSON Lines file; a packed one is one part, because we can only read it from its start
PART_RECORDS = 20_000  # of a TensorFlow dataset: about 50 MB of news

_SURROGATE = re.compile("[\ud800-\udfff]")  # in a string of Python always half of a pair


# Names of the fields for text, title and id; the first that is not empty counts. CC-News as news-please extracts it has
# maintext, title, url; `cc_news` of Hugging Face has text, title, url; Wikipedia of either hub, and our own files, id,
# title, text; BEIR _id, title, text; Pyserini id, contents.
TEXT = ("maintext", "text", "contents", "content", "body", "document", "passage", "article", "page_content")
_TITLE, _ID, _ADDRESS = ("title", "headline"), ("id", "_id", "docid", "doc_id", "pid"), ("url",)
NULL_TEXT, NO_FIELD = "the text is null", 'without a field "text" or the like'  # reasons
FIELDS = frozenset((*TEXT, *_TITLE, *_ID, "section"))

# Gives the records in the order of the source; raises UserError if it cannot be reached.
Part = partial[Iterator[Outcome]]


def parts(source: str) -> list[Part]:
    """Cut a source into parts.

    `source` is one of

        news/*.jsonl.gz            files or a pattern, plain or .gz, .xz, .bz2, here or in a bucket (gs://…, s3://…)
        hf:NAME[:CONFIG][@SPLIT]   a dataset of the Hugging Face hub, or a folder of its formats: hf:cc_news
        tfds:NAME[@SPLIT]          a prepared TensorFlow dataset: tfds:wikipedia/20230601.en

    with split "train" unless one is named. Raises UserError when there is nothing to read.
    """
    kind, colon, rest = source.partition(":")
    if not colon or kind not in _EXAMPLES:
        # --- Files: large plain ones are several parts
        parts: list[Part] = []
        for path in matching(source):
            if Path(path).suffix.lower() in PACKED:  # we read a packed file from its start to its end
                parts.append(partial(_read_lines, path, 0, None))
                continue
            size = size_of(path)
            starts = range(0, size, PART_BYTES)
            parts += [partial(_read_lines, path, start, min(start + PART_BYTES, size)) for start in starts]
        return parts
    # --- A hub: a shard is a part, and so are some records of a TensorFlow dataset
    name, _, split = rest.partition("@")
    split = split or "train"
    if not name:
        raise UserError(f"{source} names no dataset; write {kind}:NAME, such as {_EXAMPLES[kind]}")
    with _hub_errors(kind, name, split):
        if kind == "hf":
            shards = _hub_dataset(name, split).num_shards
            return [partial(_read_hub, name, split, number, shards) for number in range(shards)]
        splits = _tfds_builder(name).info.splits
        if split not in splits:
            raise UserError(f"tfds:{name} has no split {split!r}; it has {', '.join(splits) or 'none'}")
        records = splits[split].num_examples
        ranges = [(start, min(start + PART_RECORDS, records)) for start in range(0, records, PART_RECORDS)]
        return [partial(_read_tfds, name, split, start, stop) for start, stop in ranges]


_EXAMPLES = {"hf": "hf:cc_news", "tfds": "tfds:wikipedia/20230601.en"}
_ADVICE = {
    "hf": "check its name and your access",
    "tfds": "check its name, and that `tfds build` prepared it where TFDS_DATA_DIR says",
}


def article(record: Any, where: str, otherwise: str = "") -> Outcome:
    """Make the article of a raw record. Strings may be UTF-8 bytes; an absent or null title is empty.

    The id is a string or an integer. Without one it is `otherwise`; without that the address, or a hash of the content,
    so that it depends on nothing else. If the text is empty, the title becomes the text: BEIR joins the two, so such
    documents can be found, and a title that stayed would be read twice.

    Args:
        record: the record.
        where: its location.
        otherwise: its id if it has none.
    """
    if not isinstance(record, dict):
        return Skipped("not a record with named fields", sample(record), where)
    try:
        text = _text(record, TEXT, "text")
        title = _text(record, _TITLE, "title") or ""
        identity = _text(record, _ID, "id") or otherwise or _text(record, _ADDRESS, "id")
    except BadRecord as error:
        return Skipped(error.reason, sample(record), where)
    if text is None:
        known = any(name in record for name in TEXT)
        return Skipped(NULL_TEXT if known else NO_FIELD, sample(record), where)
    if title.strip() and not text.strip():
        title, text = "", title
    content = f"{title}\0{text}".encode()
    return Article(identity or hashlib.blake2b(content, digest_size=16).hexdigest(), title, text)


def _text(record: dict[str, Any], names: tuple[str, ...], kind: str) -> str | None:
    """Return the first of some fields that is not empty; None if all are absent or null. Raises BadRecord."""
    # An empty field counts only if all of them are empty.
    values = [record[name] for name in names if record.get(name) is not None]
    value = next((value for value in values if value != ""), values[0] if values else None)
    problem = ""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            problem = "is not UTF-8"
    elif kind == "id" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    elif value is not None and not isinstance(value, str):
        problem = "is not a string"
    elif value is not None and _SURROGATE.search(value):
        problem = "has half of a surrogate pair"
    if problem:
        raise BadRecord(f"the {kind} {problem}", "correct it")
    return value


# --- Reading a part --------------------------------------------------------------------------------------------------


def _read_lines(path: str, start: int, stop: int | None) -> Iterator[Outcome]:
    """Yield the articles of the lines that begin in the unpacked bytes [start, stop); None: to the end of the file.

    If a packed file is truncated or damaged, the last one is damage, and the rest is lost.
    """
    lines = read_lines(path, start, stop)
    known = ((line.byte, line.data) for line in lines if isinstance(line.data, BadRecord) or line.data.strip())
    for byte, record in applied(parse_json, known):
        where = f"{path} at byte {byte:,}"
        if isinstance(record, BadRecord):
            yield Skipped(record.reason, record.sample, where)
        else:
            yield article(record, where)


def _read_hub(name: str, split: str, number: int, shards: int) -> Iterator[Outcome]:
    """Yield the articles of shard `number` of `shards` of a Hugging Face dataset."""
    with _hub_errors("hf", name, split):
        for row, record in enumerate(_hub_dataset(name, split).shard(num_shards=shards, index=number)):
            yield article(record, f"hf:{name}@{split}, shard {number}, row {row:,}")


def _hub_dataset(name: str, split: str) -> Any:
    """Open a dataset as a stream, which downloads a shard only when it is read."""
    datasets = _imported("datasets", f"hf:{name}", install_extra("huggingface"))
    path, _, config = name.partition(":")
    return datasets.load_dataset(path, config or None, split=split, streaming=True)


def _read_tfds(name: str, split: str, start: int, stop: int) -> Iterator[Outcome]:
    """Yield the articles of records [start, stop) of a split of a TensorFlow dataset."""
    with _hub_errors("tfds", name, split):
        builder, rows = _tfds_builder(name), f"{split}[{start}:{stop}]"
        if builder.info.file_format.value == "array_record":  # only this format needs no TensorFlow
            records = builder.as_data_source(rows)
        else:
            advice = "run `pip install tensorflow`, or prepare it as array_record"
            _imported("tensorflow", f"tfds:{builder.name}", advice)
            tfds = import_module("tensorflow_datasets")
            records = tfds.as_numpy(builder.as_dataset(split=rows, shuffle_files=False))
        for row, record in enumerate(records, start):
            yield article(record, f"tfds:{name}@{split}, row {row:,}")


def _tfds_builder(name: str) -> Any:
    tfds = _imported("tensorflow_datasets", f"tfds:{name}", "run `pip install tensorflow-datasets` again")
    builder = tfds.builder(name)
    if not builder.is_prepared():
        raise UserError(
            f"tfds:{name} is not prepared in {builder.data_dir}; run `tfds build {name} --file_format=array_record`, "
            "or set TFDS_DATA_DIR to the folder that has it"
        )
    return builder


def _imported(module: str, source: str, remedy: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(f"{source} needs {module} ({error}); {remedy}") from None


@contextmanager
def _hub_errors(kind: str, name: str, split: str) -> Iterator[None]:
    """Turn any exception of a hub into a UserError that names the dataset."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        raise UserError(f"{kind}:{name}@{split} cannot be read ({reason}); {_ADVICE[kind]}") from None
