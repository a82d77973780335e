"""Documents of many formats as articles: a folder with its folders, the files that fit a pattern, or one file.

| ending | articles |
|---|---|
| `.txt` | the file; if it is large, each part of `PIECE` characters |
| `.md` `.rst` `.html` `.docx` `.pdf` and like endings | the file, as plain paragraphs (`markup.py`, `pdf.py`) |
| `.json` `.jsonl` | each object; of SQuAD's each context |
| `.csv` `.tsv` `.parquet` `.arrow` | each row, by the names of the columns |

Any file may be packed (`.gz`, `.xz`, `.bz2`, `.zst`). The id of an article is the path of its file in the folder, with
`#n` for the n-th article of a file (its line, if it has lines), unless the article has its own id. We leave out a
document that cannot be read, and count the reason, because people's folders have such files; a broken record in a file
of records is damage. Read `find` and `read` next.
"""

import glob
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice
from typing import IO, Any, NamedTuple
from urllib.parse import unquote

from realm_jax.corpora import markup, pdf, raw_records
from realm_jax.corpora.articles import Article, Outcome, Skipped
from realm_jax.corpora.encodings import REPLACED, Notes, find_encoding, note_encoding, without_nuls
from realm_jax.data.input_files import (
    PACKED,
    UNPACKING_ERRORS,
    files_below,
    is_folder,
    matching,
    open_unpacked,
    size_of,
    zstd,
)
from realm_jax.data.lines import BATCH_ROWS, OTHER_COLUMNS, BadRecord, json_records, sample, table_rows, text_lines
from realm_jax.data.questions import is_flat_squad
from realm_jax.errors import UserError, install_extra
from realm_jax.storage import StorageError

PIECE = 1 << 20  # characters of a large text file that make an article: about a book
LARGEST = 1 << 27  # bytes of a document that is read at once; text files and files of records may have any size
SMALL = 1 << 24  # bytes of a file of records, as it is stored, whose articles fit into memory many times over
UNKNOWN = "of an unknown format"
BESIDE_ROWS = "metadata of a Hugging Face dataset"
LINKED, DANGLING = "links to files that are read", "links to nothing"
UNNAMED = "with a name that is no text"
EMPTY, WORDLESS, TOO_LARGE = "empty", "without text", "too large"
UNFINISHED = "a file that cannot be read to its end"
_CORPUS, _BESIDE_CORPUS = re.compile(r"corpus\.jsonl(\.\w+)?"), re.compile(r"queries\.jsonl|qrels/")  # of BEIR
# Files that `datasets` writes next to the rows of a dataset.
_BESIDE_ROWS = re.compile(r"(.*/)?(dataset_info\.json|dataset_dict\.json|state\.json|cache-[^/]*\.arrow)")
_QUOTED_TITLE = re.compile(r'"(.*)"\n')


class DocumentFile(NamedTuple):
    """A file of documents.

    Attributes:
        path: path or URL.
        name: path in the source's folder, with `/`.
        ending: tells the format; empty if the file is not read.
        title: words of the name, for documents without a title.
        why_not: why a file is not read, although its name may have a known ending.
    """

    path: str
    name: str
    ending: str
    title: str
    why_not: Skipped | None = None


class Format(NamedTuple):
    """Reader of the files of an ending.

    Attributes:
        read: yields the articles of a file.
        needs: modules of the extra `documents`.
        of_records: True if the files have records, which may be damaged one by one.
        any_size: True if memory does not grow with the file.
    """

    read: Callable[[DocumentFile], Iterator[Outcome]]
    needs: tuple[str, ...] = ()
    of_records: bool = False
    any_size: bool = False


def find(source: str) -> list[DocumentFile]:
    """Return the document files of a source, sorted by name, without hidden files.

    A single file without a known ending is read as JSON objects. Raises UserError if no file has a known ending, or if
    a library is missing.
    """
    files = _without_links(list(_named(source)))
    known = {file.ending for file in files if file.ending}
    if not known:
        held = f"none of its {len(files):,} files (such as {files[0].name})" if files else "no file in it"
        raise UserError(
            f"{source}: {held} has a known ending; name a file or a folder with some of {' '.join(FORMATS)}"
        )
    if zstd is None and any(file.name.lower().endswith(".zst") for file in files):
        raise UserError(f"{source}: .zst needs backports.zstd; {install_extra('documents')}")
    for ending in sorted(known):
        for module in FORMATS[ending].needs:
            if find_spec(module) is None:
                raise UserError(f"{source}: {ending} needs {module}; {install_extra('documents')}")
    return files


def _named(source: str) -> Iterator[DocumentFile]:
    if is_folder(source):
        names = files_below(source)
        corpus = [name for name in names if _CORPUS.fullmatch(name)]
        # A folder of BEIR has queries and judgments next to the corpus.
        is_beir = corpus and any(_BESIDE_CORPUS.match(name) for name in names)
        yield from (_file(f"{source.rstrip('/')}/{name}", name) for name in (corpus if is_beir else names))
    elif glob.has_magic(source) and not os.path.exists(source):
        # Names begin below the last folder without a wildcard.
        base = re.split(r"[*?\[]", source)[0].rpartition("/")[0]
        yield from (_file(path, path.removeprefix(base).lstrip("/")) for path in matching(source))
    else:
        file = _file(source, source.rpartition("/")[2])
        yield file if file.ending else file._replace(ending=".jsonl")


def _without_links(files: list[DocumentFile]) -> list[DocumentFile]:
    """Leave out links to nothing, and all names of a file but the first that is no link."""
    is_here = {file.path: file.ending and "://" not in file.path for file in files}
    # Files come before links, so that a file keeps its own name.
    names: dict[str, str] = {}  # by real path
    for file in sorted(files, key=lambda file: os.path.islink(file.path)):
        if is_here[file.path] and os.path.exists(file.path):
            names.setdefault(os.path.realpath(file.path), file.name)
    unique_files = []
    for file in files:
        name = names.get(os.path.realpath(file.path)) if is_here[file.path] else file.name
        if os.path.islink(file.path) and not os.path.exists(file.path):
            file = _skipped_file(file, DANGLING)
        elif name not in (None, file.name):
            file = _skipped_file(file, LINKED, f" → {name}")
        unique_files.append(file)
    return unique_files


def _skipped_file(file: DocumentFile, reason: str, target: str = "") -> DocumentFile:
    return file._replace(ending="", why_not=Skipped(reason, f"{file.name}{target}"))


def _file(path: str, name: str) -> DocumentFile:
    match = _ENDING.search(name)
    words = name[: match.start() if match else None].rpartition("/")[2].replace("_", " ").split()
    file = DocumentFile(path, name, match[1].lower() if match else "", " ".join(words))
    readable = name.encode("utf-8", "backslashreplace").decode()
    return file if readable == name else _skipped_file(DocumentFile(readable, readable, "", readable), UNNAMED)


def read(file: DocumentFile) -> Iterator[Outcome]:
    """Yield the articles of a file, and `Skipped` for unreadable ones. Raises only StorageError and MemoryError."""
    if file.why_not is not None:
        yield file.why_not
        return
    if not file.ending or _BESIDE_ROWS.fullmatch(file.name):
        yield Skipped(BESIDE_ROWS if file.ending else UNKNOWN, file.name)
        return
    try:
        yield from FORMATS[file.ending].read(file)
    except (StorageError, MemoryError):
        raise
    except BadRecord as error:
        yield Skipped(error.reason, f"{file.name}: {error.message}")
    except Exception as error:  # each library has its own kinds
        message = " ".join(str(error).split()) or type(error).__name__
        if FORMATS[file.ending].of_records:
            # Messages of our own readers begin with file and line, which belong into `where`.
            located = re.fullmatch(rf"({re.escape(file.path)}(?::\d+)?):? (.*)", message)
            where, message = located.groups() if located else (file.path, message)
            yield Skipped(UNFINISHED, message, where)
        else:
            yield Skipped(f"damaged {file.ending} files", f"{file.name}: {message[:200]}")


# --- Documents --------------------------------------------------------------------------------------------------------


def _plain_text(file: DocumentFile) -> Iterator[Outcome]:
    """Yield a text file as one article, or as several if it is large."""
    with open_unpacked(file.path) as stream:
        encoding, notes = find_encoding(iter(partial(stream.read, PIECE), b"")), Notes()
        note_encoding(encoding, notes)
        stream.seek(0)
        texts = filter(str.strip, _pieces(io.TextIOWrapper(stream, encoding.name, "replace")))
        head = list(islice(texts, 2))  # which tell whether there are several
        for number, text in enumerate(chain(head, texts), 1):
            plain = markup.Plain("", without_nuls(text, notes))
            yield _document(file, plain, notes, f"#{number}" if len(head) > 1 else "")
            notes = Notes()
        if not head:
            raise BadRecord("no words", "remove it", WORDLESS if size_of(file.path) else EMPTY)


def _pieces(lines: io.TextIOWrapper) -> Iterator[str]:
    """Cut text at the first blank line after `PIECE` characters, or anywhere after twice as many."""
    piece_lines, length = list[str](), 0
    while line := lines.readline(PIECE):
        piece_lines.append(line)
        length += len(line)
        if length >= 2 * PIECE or (length >= PIECE and not line.strip()):
            yield "".join(piece_lines)
            piece_lines, length = [], 0
    if piece_lines:
        yield "".join(piece_lines)


def _converted(convert: Callable[[bytes, Notes], markup.Plain], file: DocumentFile) -> Iterator[Outcome]:
    """Yield the article that a function makes from the bytes of a file."""
    with open_unpacked(file.path) as stream:
        data = stream.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise BadRecord(f"more than {LARGEST:,} bytes", "split it", TOO_LARGE)
    if not data:
        raise BadRecord("no bytes", "remove it", EMPTY)
    notes = Notes()
    yield _document(file, convert(data, notes), notes)


def _document(file: DocumentFile, plain: markup.Plain, notes: Notes, number: str = "") -> Outcome:
    if not plain.text.strip():
        raise BadRecord("no words", "remove it", WORDLESS)
    if replaced := notes.pop((REPLACED, ""), 0):
        notes[REPLACED, file.name] = replaced
    return Article(file.name + number, plain.title or file.title, plain.text, notes=notes)


# --- Records ----------------------------------------------------------------------------------------------------------


def _article(file: DocumentFile, number: int, where: str, record: dict[str, Any], record_id: str = "") -> Outcome:
    """Return the article of a row or an object, with our field names or those of Atlas, BEIR or Pyserini."""
    fields = {str(name).strip().lower(): value for name, value in record.items()}
    # Pyserini writes the title into the first line of the text, in quotes.
    contents = fields.get("contents")
    if isinstance(contents, str) and (match := _QUOTED_TITLE.match(contents)) and not fields.get("title"):
        fields |= {"title": match[1], "contents": contents[match.end() :]}
    title, section = fields.get("title"), fields.get("section")
    if isinstance(title, str) and isinstance(section, str) and title.strip() and section.strip():
        fields["title"] = f"{title}: {section}"  # of Atlas, because sections of one article have the same title
    fields |= {name: "" for name in raw_records.TEXT if name in fields and fields[name] is None}
    outcome = raw_records.article(fields, where, record_id or f"{file.name}#{number}")
    if isinstance(outcome, Skipped):
        return replace(outcome, sample=f"{outcome.reason}: {outcome.sample}")
    if not outcome.text.strip():
        return Skipped(WORDLESS, f"{where}: {sample(record)}")
    return replace(outcome, line=number, file=file.name)


def _json_objects(file: DocumentFile) -> Iterator[Outcome]:
    """Yield the articles of objects, one per line or in one array."""
    number = 0
    for number, record in json_records(file.path):
        where = f"{file.path}:{number}"
        if isinstance(record, BadRecord):
            yield Skipped(record.reason, record.message, where)
        else:
            yield _article(file, number, where, record)
    if not number:
        raise BadRecord("no records", "give one object per line", EMPTY)


def _json(file: DocumentFile) -> Iterator[Outcome]:
    """Yield the articles of a single object, which may have records in "data" as SQuAD's does, or of several."""
    # A file that begins with an array has several objects, so it streams.
    with open_unpacked(file.path) as stream:
        head = stream.read(LARGEST) if stream.peek(1)[:1] != b"[" else b""
    try:
        document = json.loads(head)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        yield from _json_objects(file)
        return
    data = document.get("data")
    if isinstance(data, list) and data and all(isinstance(entry, dict) for entry in data):
        for number, record in enumerate(_contexts(data), 1):
            yield _article(file, number, f"{file.path}, record {number:,}", record)
        return
    outcome = _article(file, 1, file.path, document, file.name)
    is_other = isinstance(outcome, Skipped) and outcome.is_damage  # settings of a program, for example
    yield Skipped(raw_records.NO_FIELD, f"{file.name}: {sample(document)}") if is_other else outcome


def _contexts(data: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield SQuAD's contexts as records with the titles of their articles, and other records unchanged.

    If a record is a question with its context, as on Hugging Face, the questions of one context follow one another.
    """
    before = None
    for entry in data:
        title, paragraphs = unquote(str(entry.get("title") or "")).replace("_", " "), entry.get("paragraphs")
        if isinstance(paragraphs, list):
            yield from ({"title": title, "text": paragraph.get("context")} for paragraph in paragraphs)
        elif not is_flat_squad(entry):
            yield entry
        elif entry["context"] != before:
            before = entry["context"]
            yield {"title": title, "text": before}


def _table(file: DocumentFile) -> Iterator[Outcome]:
    """Yield the articles of a table; its first line names the columns, and shows the delimiter."""
    with open_unpacked(file.path) as stream:
        encoding, notes = find_encoding(_readable_chunks(stream)), Notes()
    note_encoding(encoding, notes)
    codec = encoding.name.removesuffix("-sig")
    _, first = next(text_lines(file.path, codec), (1, ""))
    if not first.strip():
        raise BadRecord("no bytes", "remove it", EMPTY)
    rows = table_rows(file.path, max("\t,;|", key=first.count), codec)
    _, names = next(rows, (1, []))
    _check_columns(names)
    for line, row in rows:
        where = f"{file.path}:{line}"
        if len(row) == len(names):
            # The first article carries the notes on the file's encoding.
            outcome = _article(file, line, where, dict(zip(names, row, strict=True)))
            if isinstance(outcome, Article) and notes:
                outcome, notes = replace(outcome, notes=notes), Notes()
            yield outcome
        else:
            message = f"the row has {len(row)} columns, the first line names {len(names)}"
            yield Skipped(OTHER_COLUMNS, message, where)


def _readable_chunks(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes before an error of unpacking, if there is one."""
    with suppress(*UNPACKING_ERRORS):
        while chunk := stream.read(PIECE):
            yield chunk


def _arrow(file: DocumentFile) -> Iterator[Outcome]:
    """Yield the articles of a Parquet file, or of a file of a Hugging Face dataset, which is an Arrow stream."""
    from pyarrow import ipc, parquet

    with open_unpacked(file.path) as stream:
        if file.ending == ".parquet":
            table = parquet.ParquetFile(stream)
            batches = table.iter_batches(BATCH_ROWS, columns=_check_columns(table.schema_arrow.names))
        else:
            table = ipc.open_stream(stream)
            columns = _check_columns(table.schema.names)
            batches = (batch.select(columns) for batch in table)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows, 1):
            yield _article(file, number, f"{file.path}, row {number:,}", row)


def _check_columns(names: list[str]) -> list[str]:
    """Return the columns that are fields of an article. Raises BadRecord if none of them has text."""
    known = [name for name in names if name.strip().lower() in raw_records.FIELDS]
    if not any(name.strip().lower() in raw_records.TEXT for name in known):
        raise BadRecord(
            f"its columns are {sample(', '.join(names))}", f'call one "{raw_records.TEXT[1]}"', raw_records.NO_FIELD
        )
    return known


_PAGE = Format(partial(_converted, markup.web_page), ("lxml",))
_MARKDOWN = Format(partial(_converted, markup.markdown), ("markdown_it", "lxml"))
_TABLE = Format(_table, (), of_records=True, any_size=True)
FORMATS = {
    ".txt": Format(_plain_text, any_size=True),
    ".md": _MARKDOWN,
    ".markdown": _MARKDOWN,
    ".rst": Format(partial(_converted, markup.restructured_text), ("docutils", "lxml")),
    ".html": _PAGE,
    ".htm": _PAGE,
    ".xhtml": _PAGE,
    ".docx": Format(partial(_converted, markup.word_document), ("mammoth", "lxml")),
    ".pdf": Format(partial(_converted, pdf.pdf_document), ("pypdfium2",)),
    ".json": Format(_json, (), of_records=True, any_size=True),
    ".jsonl": Format(_json_objects, (), of_records=True, any_size=True),
    ".csv": _TABLE,
    ".tsv": _TABLE,
    ".parquet": Format(_arrow, ("pyarrow",), of_records=True, any_size=True),
    ".arrow": Format(_arrow, ("pyarrow",), of_records=True, any_size=True),
}
_ENDING = re.compile(rf"({'|'.join(map(re.escape, FORMATS))})({'|'.join(map(re.escape, PACKED))})?$", re.IGNORECASE)
