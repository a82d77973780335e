"""Articles from elsewhere: JSON Lines with any field names, Hugging Face datasets, TensorFlow Datasets.

A source is cut into *parts*: small picklable descriptions of what to read. Whoever has a part reads it alone, in any
process or on any machine, and all parts together give every record once. What cannot be read is a `Damage` in its
place, for the caller to count or refuse; only what concerns a source as a whole (not found, not installed, storage
fails) is a UserError. Not for files in the project's own format, where every fault ends the reading: see `jsonl.py`.
Read `parts` next.
"""

import glob
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol

from realm_jax.corpus.jsonl import Article
from realm_jax.corpus.lines import PACKED
from realm_jax.corpus.ranges import file_system
from realm_jax.corpus.records import Damage
from realm_jax.errors import UserError

PART_BYTES = 1 << 28  # of a plain JSON Lines file; a packed one, which cannot be entered midway, is one part
PART_RECORDS = 20_000  # of a TensorFlow dataset: about 50 MB of news
LONGEST_LINE = 1 << 26  # bytes; the longest articles have a few million, a file of another kind may be one endless line
SAMPLE = 80  # characters

_SURROGATE = re.compile("[\ud800-\udfff]")  # in a string of Python always half of a pair


@dataclass(frozen=True, slots=True)
class Fields:
    """Names under which a record may hold its text, title and id; of several, the first that holds something counts.
    The defaults fit CC-News as news-please extracts it (maintext, title, url), `cc_news` of Hugging Face (text,
    title, url), Wikipedia of either hub, and the project's own files (id, title, text)."""

    text: tuple[str, ...] = ("maintext", "text")
    title: tuple[str, ...] = ("title",)
    id: tuple[str, ...] = ("id", "url")


DEFAULT_FIELDS = Fields()


class Part(Protocol):
    """A piece of a source: cheap to pickle, and read by itself."""

    def read(self) -> Iterator[Article | Damage]:
        """The records in the order of the source. Raises UserError when the source cannot be reached."""


def parts(source: str, fields: Fields = DEFAULT_FIELDS) -> list[Part]:
    """Cut a source into parts.

    `source` is one of

        news/*.jsonl.gz            files or a pattern, plain or .gz, .xz, .bz2, here or in a bucket (gs://…, s3://…)
        hf:NAME[:CONFIG][@SPLIT]   a dataset of the Hugging Face hub, or a folder of its formats: hf:cc_news
        tfds:NAME[@SPLIT]          a prepared TensorFlow dataset: tfds:wikipedia/20230601.en

    with split "train" unless one is named. Raises UserError when there is nothing to read.
    """
    kind, colon, rest = source.partition(":")
    if colon and kind in ("hf", "tfds"):
        name, _, split = rest.partition("@")
        if not name:
            raise UserError(f"{source} names no dataset; write {kind}:NAME, such as {_EXAMPLES[kind]}")
        return list((_hub_parts if kind == "hf" else _tfds_parts)(name, split or "train", fields))
    return list(_file_parts(source, fields))


_EXAMPLES = {"hf": "hf:cc_news", "tfds": "tfds:wikipedia/20230601.en"}


def article(record: Any, fields: Fields, where: str) -> Article | Damage:
    """The article that a raw record holds. Strings may be UTF-8 bytes; an absent or null title is empty.

    The id is a string or an integer; without one it is made of the content, so that it depends on nothing else.
    """
    if not isinstance(record, dict):
        return Damage(where, "not a record with named fields", sample(record))
    try:
        text = _text(record, fields.text, "text")
        title = _text(record, fields.title, "title") or ""
        identity = _text(record, fields.id, "id")
    except _Unusable as fault:
        return Damage(where, str(fault), sample(record))
    if text is None:
        known = any(name in record for name in fields.text)
        return Damage(where, "the text is null" if known else f"no {' or '.join(fields.text)}", sample(record))
    return Article(identity or _content_id(f"{title}\0{text}"), title, text)


class _Unusable(Exception):
    """A field that holds something else than text."""


def _text(record: dict[str, Any], names: tuple[str, ...], kind: str) -> str | None:
    """The string under the first of `names` that holds something; None if all are absent or null. Raises _Unusable."""
    values = [record[name] for name in names if record.get(name) is not None]
    value = next((value for value in values if value != ""), values[0] if values else None)
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise _Unusable(f"the {kind} is not UTF-8") from None
    if kind == "id" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is not None and not isinstance(value, str):
        raise _Unusable(f"the {kind} is not a string")
    if value is not None and _SURROGATE.search(value):
        raise _Unusable(f"the {kind} has half of a surrogate pair")
    return value


def _content_id(content: str) -> str:
    return hashlib.blake2b(content.encode("utf-8"), digest_size=16).hexdigest()


def sample(value: Any) -> str:
    """The beginning of a record, as one line that any file or terminal takes."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    # Few characters of each field: a record may hold millions.
    if isinstance(value, dict):
        value = {str(key)[:SAMPLE]: str(field)[:SAMPLE] for key, field in list(value.items())[:8]}
    line = " ".join(str(value)[: 4 * SAMPLE].split())[:SAMPLE]
    return line.encode("utf-8", "replace").decode("utf-8")


# --- JSON Lines -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FilePart:
    """The lines of a file that begin in [start, stop); all, when `stop` is None. Counted in unpacked bytes."""

    path: str
    start: int
    stop: int | None
    fields: Fields

    def read(self) -> Iterator[Article | Damage]:
        """Records, and a last `Damage` where a packed file is cut off or damaged: what follows is lost."""
        place = self.start
        with _open(self.path) as stream:
            try:
                if self.start:  # the line that holds the byte before `start` belongs to the part before this one
                    stream.seek(self.start - 1)
                    place = self.start - 1 + _rest_of_line(stream, self.path)
                while self.stop is None or place < self.stop:
                    line = _line(stream, self.path)
                    if not line:
                        return
                    if line.strip():
                        yield self._record(line, f"{self.path} at byte {place:,}")
                    place += len(line)
                    if _is_cut(line):
                        place += _rest_of_line(stream, self.path)
            except _Broken as fault:
                where = f"{self.path} at byte {place:,}"
                yield Damage(where, "the rest of the file is truncated or damaged", str(fault)[:SAMPLE])

    def _record(self, line: bytes, where: str) -> Article | Damage:
        if _is_cut(line):
            return Damage(where, f"a line of more than {LONGEST_LINE:,} bytes", sample(line[: 4 * SAMPLE]))
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            return Damage(where, "not UTF-8", sample(line))
        except (ValueError, RecursionError):
            return Damage(where, "not JSON", sample(line))
        return article(record, self.fields, where)


class _Broken(Exception):
    """A packed stream that ends or makes no sense in the middle."""


def _file_parts(pattern: str, fields: Fields) -> Iterator[Part]:
    for path, size in files(pattern):
        if Path(path).suffix in PACKED:
            yield FilePart(path, 0, None, fields)
        else:
            for start in range(0, size, PART_BYTES):
                yield FilePart(path, start, min(start + PART_BYTES, size), fields)


def files(pattern: str) -> list[tuple[str, int]]:
    """Paths that fit a pattern, in order, with their sizes."""
    try:
        if "://" in pattern:
            system, root = file_system(pattern)
            protocol = pattern.partition("://")[0]
            found = [(f"{protocol}://{path}", system.size(path)) for path in sorted(system.glob(root))]
        else:
            names = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
            found = [(name, Path(name).stat().st_size) for name in names if not Path(name).is_dir()]
    except UserError:
        raise
    except Exception as fault:  # every file system has errors of its own
        raise UserError(f"cannot look for {pattern} ({fault}); check the path and your access") from None
    if not found:
        raise UserError(f"no file fits {pattern}; name a JSON Lines file or a pattern such as news/*.jsonl.gz")
    return found


@contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    """Open for reading; the ending of the name says how the file is packed."""
    with ExitStack() as stack:
        try:
            if "://" in path:
                files, name = file_system(path)
                raw: Any = stack.enter_context(files.open(name, "rb"))
                # Files of fsspec look for the end of a line in small steps.
                raw = io.BufferedReader(raw, 1 << 20)
            else:
                raw = stack.enter_context(open(path, "rb"))
        except UserError:
            raise
        except Exception as fault:
            raise UserError(f"cannot read {path} ({fault}); check the path and its permissions") from None
        unpack = PACKED.get(Path(path).suffix)
        yield stack.enter_context(unpack(raw, "rb")) if unpack else raw


def _line(stream: IO[bytes], path: str) -> bytes:
    """The next line, or its first LONGEST_LINE bytes. Raises _Broken, and UserError when storage fails."""
    try:
        return stream.readline(LONGEST_LINE)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as fault:
        raise _Broken(fault) from None
    except OSError as fault:
        if fault.errno is None:  # so bz2 speaks of data that is not bz2
            raise _Broken(fault) from None
        raise UserError(f"cannot read {path} ({fault.strerror}); try again") from None
    except Exception as fault:
        raise UserError(f"cannot read {path} ({fault}); try again") from None


def _is_cut(line: bytes) -> bool:
    return len(line) == LONGEST_LINE and not line.endswith(b"\n")


def _rest_of_line(stream: IO[bytes], path: str) -> int:
    """Go to the beginning of the next line; the number of bytes passed over."""
    passed = 0
    while chunk := _line(stream, path):
        passed += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return passed


# --- Hubs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HubPart:
    """Shard `number` of `of` of a Hugging Face dataset."""

    name: str
    split: str
    number: int
    of: int
    fields: Fields

    def read(self) -> Iterator[Article | Damage]:
        with _told(f"hf:{self.name}@{self.split}", _HUB_ADVICE):
            dataset = _hub_dataset(self.name, self.split).shard(num_shards=self.of, index=self.number)
            for row, record in enumerate(dataset):
                yield article(record, self.fields, f"hf:{self.name}@{self.split}, shard {self.number}, row {row:,}")


def _hub_parts(name: str, split: str, fields: Fields) -> Iterator[Part]:
    with _told(f"hf:{name}@{split}", _HUB_ADVICE):
        shards = _hub_dataset(name, split).num_shards
    yield from (HubPart(name, split, number, shards, fields) for number in range(shards))


def _hub_dataset(name: str, split: str) -> Any:
    """The dataset as a stream: nothing is downloaded before it is read, and shards are read apart."""
    datasets = _imported("datasets", f"hf:{name}", "run `pip install 'realm_jax[huggingface]'`")
    path, _, config = name.partition(":")
    return datasets.load_dataset(path, config or None, split=split, streaming=True)


@dataclass(frozen=True, slots=True)
class TfdsPart:
    """Records [start, stop) of a split of a TensorFlow dataset."""

    name: str
    split: str
    start: int
    stop: int
    fields: Fields

    def read(self) -> Iterator[Article | Damage]:
        with _told(f"tfds:{self.name}@{self.split}", _TFDS_ADVICE):
            records = _tfds_records(_tfds_builder(self.name), f"{self.split}[{self.start}:{self.stop}]")
            for row, record in enumerate(records, self.start):
                yield article(record, self.fields, f"tfds:{self.name}@{self.split}, row {row:,}")


def _tfds_parts(name: str, split: str, fields: Fields) -> Iterator[Part]:
    with _told(f"tfds:{name}@{split}", _TFDS_ADVICE):
        splits = _tfds_builder(name).info.splits
        if split not in splits:
            raise UserError(f"tfds:{name} has no split {split!r}; it has {', '.join(splits) or 'none'}")
        records = splits[split].num_examples
    for start in range(0, records, PART_RECORDS):
        yield TfdsPart(name, split, start, min(start + PART_RECORDS, records), fields)


def _tfds_builder(name: str) -> Any:
    tfds = _imported("tensorflow_datasets", f"tfds:{name}", "install tensorflow-datasets again")
    builder = tfds.builder(name)
    if not builder.is_prepared():
        raise UserError(
            f"tfds:{name} is not prepared in {builder.data_dir}; run `tfds build {name} --file_format=array_record`, "
            "or set TFDS_DATA_DIR to where it is"
        )
    return builder


def _tfds_records(builder: Any, split: str) -> Any:
    """The records of a split or slice. ArrayRecord files are read without TensorFlow, all others with it."""
    if builder.info.file_format.value == "array_record":
        return builder.as_data_source(split)
    _imported("tensorflow", f"tfds:{builder.name}", "run `pip install tensorflow`, or prepare it as array_record")
    tfds = import_module("tensorflow_datasets")
    return tfds.as_numpy(builder.as_dataset(split=split, shuffle_files=False))


def _imported(module: str, source: str, remedy: str) -> Any:
    try:
        return import_module(module)
    except ImportError as fault:
        raise UserError(f"{source} needs {module} ({fault}); {remedy}") from None


_HUB_ADVICE = "check its name and your access"
_TFDS_ADVICE = "check its name, and that `tfds build` prepared it where TFDS_DATA_DIR says"


@contextmanager
def _told(source: str, advice: str) -> Iterator[None]:
    """Whatever a hub raises becomes a UserError that names the dataset."""
    try:
        yield
    except UserError:
        raise
    except Exception as fault:
        reason = " ".join(str(fault).split())[:100] or type(fault).__name__
        raise UserError(f"{source} cannot be read ({reason}); {advice}") from None
