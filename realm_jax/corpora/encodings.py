"""Decode people's texts: UTF-8 if the bytes are that, otherwise the declared encoding, otherwise a detected one.

The detector is the library chardet of the extra `documents`. Not for records, which are UTF-8 (`realm_jax.data.lines`).
Read `find_encoding` next.
"""

import codecs
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import regex

from realm_jax.data.lines import BadRecord
from realm_jax.errors import install_extra

Notes = Counter[tuple[str, str]]  # how often something was left out or replaced, by kind and name

BINARY, ENCODING = "binary in place of text", "in no known encoding"
OTHER_ENCODINGS = "documents in another encoding than UTF-8"  # kinds of notes
REPLACED = "undecodable bytes (replaced by U+FFFD)"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

SAMPLE_BYTES = 1 << 20  # of lines that are not ASCII, for the detector
_OTHER_SHARE, _LEAST_CONFIDENCE = 0.3, 0.1  # texts in Greek, Thai or Chinese are found with 0.15 to 1
_MOSTLY = 4  # with so many times more valid characters than invalid bytes, UTF-8 beats the declared encoding
_FEW, _UNSURE = 3, 0.05  # too few accents to detect an encoding; browsers take them for Western European
_NULS = 1_000  # a text has fewer than one NUL in so many bytes; text in UTF-16 has hundreds
_MARKS = {  # UTF-32 comes first, because its mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Encodings that browsers use if a page declares the one on the left, by Python's names (WHATWG, Encoding Standard).
_BROWSERS_READ = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
    "utf-16": "utf-8",
    "utf-16-le": "utf-8",
    "utf-16-be": "utf-8",
}
_DECLARED = re.compile(rb"""<(?:meta[^>]+charset|\?xml[^>]+encoding)\s*=\s*["']?([\w-]+)""", re.IGNORECASE)
_ESCAPE = b"\x1b$"  # begins Japanese in ISO-2022-JP, whose bytes are all ASCII
# Words with letters of the Latin alphabet and of another one that comes in one byte a letter.
_MIXED_WORD = regex.compile(
    r"(?=\p{L}*[A-Za-z])(?=\p{L}*[\p{Cyrillic}\p{Greek}\p{Hebrew}\p{Arabic}])\p{L}+", regex.VERSION1
)
_OTHER_WORD = regex.compile(r"\w*[^\x00-\x7f]\w*")


class Encoding(NamedTuple):
    """An encoding of text.

    Attributes:
        name: Python's name of it.
        confidence: how sure it is, 1 unless it was detected.
    """

    name: str
    confidence: float = 1.0


UTF_8 = Encoding("utf-8")


def find_encoding(chunks: Iterable[bytes], is_page: bool = False) -> Encoding:
    """Find the encoding of a text.

    A byte order mark decides. Otherwise the text is UTF-8 if at least as many characters are valid as bytes are
    invalid, because a few stray bytes should not change how the rest is decoded. Otherwise a web page may declare its
    encoding; that of other texts is detected.

    Args:
        chunks: all bytes, in order.
        is_page: the text is a web page.

    Raises:
        BadRecord: the bytes are no text, or no known encoding fits.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    size = nuls = valid = invalid = sampled = 0
    head, line, sample = b"", b"", list[bytes]()
    for chunk in chunks:
        head = head or chunk[:4096]
        for mark, name in _MARKS.items():
            if head.startswith(mark):
                return Encoding(name)
        size, nuls = size + len(chunk), nuls + chunk.count(b"\0")
        # Most chunks of most files are ASCII, which needs no decoding.
        if chunk.isascii() and not line and _ESCAPE not in chunk:
            continue
        # Invalid bytes become half surrogate pairs, which we can count.
        text = decoder.decode(chunk)
        stray = len(re.findall("[\udc80-\udcff]", text))
        invalid += stray
        valid += len(text) - len(text.encode("ascii", "ignore")) - stray
        if sampled < SAMPLE_BYTES:
            *lines, line = (line + chunk).split(b"\n")
            if len(line) > SAMPLE_BYTES:
                lines, line = [*lines, line], b""
            sample += filter(None, map(_neighborhood, lines))
            sampled = sum(map(len, sample))
    if nuls * _NULS > size:
        raise BadRecord("it has NUL bytes", "remove it", BINARY)
    invalid += len(decoder.decode(b"", final=True))
    sample.append(_neighborhood(line))
    declared = _declared(head) if is_page else None
    if not invalid and (valid or not any(_ESCAPE in line for line in sample)):
        return UTF_8
    if declared and declared != UTF_8.name and valid < _MOSTLY * invalid:
        return Encoding(declared)
    return UTF_8 if valid >= invalid > 0 else _detected(b"\n".join(sample))


def _neighborhood(line: bytes) -> bytes:
    """Return the words of a line that are not ASCII, with four words on either side.

    Otherwise the detector would see too much English around a name or a sentence in another language.
    """
    words = line.split()
    near = {
        neighbor
        for index, word in enumerate(words)
        if not word.isascii() or _ESCAPE in word
        for neighbor in range(max(0, index - 4), min(len(words), index + 5))
    }
    return b" ".join(words[index] for index in sorted(near))


def _declared(head: bytes) -> str | None:
    """Return the encoding that a page declares in its first bytes, as browsers read it."""
    declared = _DECLARED.search(head)
    try:
        name = codecs.lookup(declared[1].decode()).name if declared else None
        b"a".decode(name or "ascii", "replace")  # codecs such as "hex" are no encodings of text
    except LookupError:
        return None
    return _BROWSERS_READ.get(name, name) if name else None


def _detected(data: bytes) -> Encoding:
    """Return the most probable encoding. Raises BadRecord if none fits.

    The detector takes some short Latin texts for Hebrew or Russian. An encoding is less probable if it mixes alphabets
    within words: "café" is not "cafי".
    """
    try:
        import chardet
    except ImportError:
        missing = "it is not UTF-8, and chardet is not installed"
        raise BadRecord(missing, f"{install_extra('documents')}, or save it as UTF-8", ENCODING) from None
    era, probable = chardet.EncodingEra.MODERN_WEB, list[Encoding]()
    for candidate in chardet.detect_all(data, ignore_threshold=True, encoding_era=era, max_bytes=len(data)):
        name = candidate["encoding"] and codecs.lookup(candidate["encoding"]).name
        if name and name != UTF_8.name:
            name = _BROWSERS_READ.get(name, name)
            text = data.decode(name, "replace")
            mixed = len(_MIXED_WORD.findall(text)) / max(1, len(_OTHER_WORD.findall(text)))
            probable.append(Encoding(name, candidate["confidence"] * (1 - mixed) ** 2))
    if not probable and data.isascii():
        return UTF_8
    best = max(probable, key=lambda encoding: encoding.confidence, default=Encoding("", 0))
    other = len(data.translate(None, bytes(range(128))))  # bytes that are not ASCII
    if best.confidence < _UNSURE and 0 < other <= _FEW:
        return Encoding("cp1252", best.confidence)
    # The detector is less sure of a text the more of it is ASCII, so only of other texts a low number says something.
    if not best.name or (other > _OTHER_SHARE * len(data) and best.confidence < _LEAST_CONFIDENCE):
        raise BadRecord("no known encoding fits", "save it as UTF-8", ENCODING)
    return best


def decode(data: bytes, notes: Notes, is_page: bool = False) -> str:
    """Decode a document by `find_encoding`, with U+FFFD for bytes that are no text.

    Args:
        data: the document.
        notes: counts the encoding if it is not UTF-8, and replaced bytes.
        is_page: the text is a web page.

    Raises:
        BadRecord: the bytes are no text, or no known encoding fits.
    """
    encoding = find_encoding([data], is_page)
    note_encoding(encoding, notes)
    return without_nuls(data.decode(encoding.name, "replace"), notes)


def note_encoding(encoding: Encoding, notes: Notes) -> None:
    """Count a document that is not in UTF-8.

    Args:
        encoding: encoding of the document.
        notes: the counts.
    """
    if not encoding.name.startswith("utf-8"):
        notes[OTHER_ENCODINGS, f"{encoding.name} (confidence {encoding.confidence:.2f})"] += 1


def without_nuls(text: str, notes: Notes) -> str:
    """Replace NULs in a decoded text by U+FFFD, and count all replacements.

    Args:
        text: the text.
        notes: the counts.
    """
    text = text.replace("\0", REPLACEMENT)
    if replaced := text.count(REPLACEMENT):
        notes[REPLACED, ""] += replaced
    return text
