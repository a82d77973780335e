"""Copies in a corpus: which articles to leave out because another one says the same in nearly the same words.

Two rules, in terms of *keys* (128 bits, a hash of id, title and text) and of nothing else:

1. Of the articles with one text, and of those with one id, the one with the smallest key stays.
2. Of what is left, an article is left out if one with a smaller key shares a *band* with it and looks similar. Where
   more than LEADERS articles share a band, the LEADERS smallest keys among them are asked: a notice that a million
   articles repeat costs LEADERS comparisons an article, not a million.

So what stays is a property of the set of articles. It does not depend on their order, on how they are spread over
files and processes, or on who computes it: each rule is a grouping by equal values and a decision inside each group,
which a sort on one machine and a GroupByKey of Apache Beam do alike. An article may be left out for the sake of one
that is left out itself: in a chain of edits a-b-c, where a and c are no longer similar, c may go though b does too.
Connected components, the usual alternative, leave out at least as much and take as many rounds as the longest chain
is long; going through the articles one by one would keep c, but does not fall apart into groups. Of similar articles
it is arbitrary which one stays, and adding articles can change it.

MinHash (Broder 1997): of the shingles, runs of SHINGLE words, of two texts the share J that both have (Jaccard) is the
chance that a hash function takes its minimum at the same shingle. A signature holds the minima of HASHES functions. It
is cut into BANDS bands of ROWS; two articles share a band with a chance of 1 - (1 - J^ROWS)^BANDS. Whether they look
similar is then estimated from their *sketches*, the lowest byte of every minimum (Li and König 2010), which agree in
enough places for THRESHOLD. For independent functions:

    J               0.3     0.5     0.6     0.7     0.75    0.8     0.85    0.9     0.95
    share a band    0.001   0.061   0.237   0.613   0.815   0.947   0.994   0.9999  1.0
    and left out    0.000   0.000   0.000   0.005   0.094   0.505   0.937   0.9995  1.0

Hashes are CRC-32 of words and integer arithmetic modulo 2^32 and 2^64, the same on every machine and in every version
of NumPy; libraries for this change their hashes from version to version. Not for scripts without spaces between words.

In the folder of a source's articles (`realm_jax.corpora.articles`):

    FOLDER/00007.fingerprints   288 bytes for each article of a shard
    FOLDER/00007.copies         one byte for each: 0 for one that stays, else the number of its reason
    FOLDER/COPIES.json          written last: how many are left out, by reason

Fingerprints are made by any number of workers; the decision takes one machine 100 bytes of memory and a few
microseconds an article. Read `fingerprint` and `find_near_duplicates` next, then `drop_near_duplicates`.
"""

import hashlib
import math
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from realm_jax.corpora.articles import duplicates_name, read_lines
from realm_jax.corpora.outcomes import Article
from realm_jax.errors import UserError
from realm_jax.storage import open_folder

COPIES = "COPIES.json"
SHINGLE = 5  # words, as Lee et al. (2021) use to find near-duplicates in news and web text
HASHES = 128
BANDS = 16
ROWS = HASHES // BANDS
THRESHOLD = 0.8
LEADERS = 64

# A byte of two different minima agrees by chance once in 256 times.
_AGREE = math.ceil(HASHES * (THRESHOLD + (1 - THRESHOLD) / 256))
_COMPARED = 1 << 16  # sketches at a time: 8 MB
_WORD = re.compile(r"\w+")


# What the rules need to know of an article: 288 bytes, which are the same everywhere.
FINGERPRINT = np.dtype(
    [
        ("key", ">u8", 2),  # two integers, which are in order as their bytes are
        ("id", "<u8"),  # a hash, like the text's
        ("text", "<u8"),
        ("bands", "<u8", BANDS),  # to group by for rule 2: hashes of number and minima, so that no two bands share one
        ("sketch", np.uint8, HASHES),
    ]
)


def fingerprint(article: Article) -> NDArray[np.void]:
    """One FINGERPRINT, [1]: a pure function of id, title and text."""
    minima = signature(article.text)
    identity, title, text = (
        part.encode("utf-8", "surrogatepass") for part in (article.id, article.title, article.text)
    )
    # Lengths in front, so that no two articles are one string of bytes.
    content = b"%d %d " % (len(identity), len(title)) + identity + title + text
    bands = (
        _digest(bytes([number]) + band.astype("<u4").tobytes(), 8)
        for number, band in enumerate(minima.reshape(BANDS, ROWS))
    )
    parts = _digest(content, 16), _digest(identity, 8), _digest(text, 8), *bands, minima.astype(np.uint8).tobytes()
    return np.frombuffer(b"".join(parts), FINGERPRINT)


def signature(text: str) -> NDArray[np.uint32]:
    """The minimum of each hash function over the shingles of a text [HASHES]; case and punctuation do not count."""
    shingles = _shingles(text)
    if not len(shingles):
        return np.full(HASHES, 0xFFFFFFFF, np.uint32)
    return (_FACTORS[:, None] * shingles + _TERMS[:, None]).min(axis=1)


REASONS = ("", "the text of another article", "the id of another article", "nearly the text of another article")


def find_near_duplicates(fingerprints: Iterable[NDArray[np.void]]) -> NDArray[np.uint8]:
    """For each article 0 if it stays, or the number of its reason in REASONS [articles].

    fingerprints: arrays of FINGERPRINT, of one article or many. Takes about 100 bytes of memory an article, and 288 of
    disk where temporary files go. Raises UserError when that disk is full.
    """
    with _on_disk(fingerprints) as articles:
        if not len(articles):
            return np.zeros(0, np.uint8)
        keys = articles["key"].astype(np.uint64)
        order = np.lexsort((keys[:, 1], keys[:, 0]))  # from here on rows are in the order of keys
        reasons = np.zeros(len(articles), np.uint8)
        for code, name in ((2, "id"), (1, "text")):
            rows, starts = _grouped(articles[name].copy()[order])
            rest = np.ones(len(articles), bool)
            rest[starts] = False
            reasons[rows[rest]] = code
        left = np.flatnonzero(reasons == 0)
        for band in range(BANDS):
            bands = articles["bands"][:, band].copy()  # read from the first to the last, unlike what is looked up in it
            reasons[left[_near_rows(bands[order[left]], articles["sketch"], order[left])]] = 3
        result = np.empty_like(reasons)
        result[order] = reasons
        return result


# --- Shards -----------------------------------------------------------------------------------------------------------


def fingerprint_shard(url: str, shard: int) -> int:
    """Write the fingerprints of a shard, unless they are there; how many. url: path or URL of the shards."""
    folder = open_folder(url)
    if _fingerprints_name(shard) in folder.names():
        return 0
    found = [fingerprint(article).tobytes() for _, article in read_lines(folder, shard)]
    folder.write(_fingerprints_name(shard), b"".join(found))
    return len(found)


def drop_near_duplicates(url: str, shards: int) -> Counter[str]:
    """Decide which articles are duplicates; returns their number by reason. Every shard has its fingerprints."""
    folder = open_folder(url)
    if COPIES in folder.names():
        return Counter({reason: int(times) for reason, times in folder.read_json(COPIES).items()})
    sizes: list[int] = []

    def every() -> Iterator[NDArray[np.void]]:
        for shard in range(shards):
            found = np.frombuffer(folder.read(_fingerprints_name(shard)), FINGERPRINT)
            sizes.append(len(found))
            yield found

    reasons = find_near_duplicates(every())
    for shard, of_shard in enumerate(np.split(reasons, np.cumsum(sizes)[:-1])):
        folder.write(duplicates_name(shard), of_shard.tobytes())
    counts = {reason: int((reasons == code).sum()) for code, reason in enumerate(REASONS) if code}
    folder.write_json(COPIES, {reason: times for reason, times in counts.items() if times})
    for shard in range(shards):
        folder.remove(_fingerprints_name(shard))
    return +Counter(counts)


def _fingerprints_name(shard: int) -> str:
    return f"{shard:05d}.fingerprints"


# --- Hashing ----------------------------------------------------------------------------------------------------------


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit integers in which every bit of the result depends on all (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_NUMBERS = _mixed(np.arange(1, 2 * HASHES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
_FACTORS = _NUMBERS[:HASHES].astype(np.uint32) | np.uint32(1)  # odd: a permutation modulo 2^32
_TERMS = _NUMBERS[HASHES:].astype(np.uint32)
_BASE = np.uint64(0x9E3779B97F4A7C15)


def _shingles(text: str) -> NDArray[np.uint32]:
    """Hashes of all runs of SHINGLE words, or of all words when there are fewer."""
    words = [word.encode("utf-8", "surrogatepass") for word in _WORD.findall(text.lower())]
    hashes = np.fromiter(map(zlib.crc32, words), np.uint32, len(words)).astype(np.uint64)
    width = min(SHINGLE, len(words))
    count = len(words) - width + 1 if words else 0
    shingles = np.zeros(count, np.uint64)
    for at in range(width):
        shingles = shingles * _BASE + hashes[at : at + count]
    return (_mixed(shingles) >> np.uint64(32)).astype(np.uint32)


def _digest(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()


# --- Groups -----------------------------------------------------------------------------------------------------------


def _near_rows(bands: NDArray[np.uint64], sketches: NDArray[np.uint8], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rule 2 for all groups of one band. `bands` [rows] is in the order of keys; sketches of row r lie at places[r]."""
    rows, starts = _grouped(bands)
    first = np.repeat(starts, np.diff(starts, append=len(rows)))  # of the group that each place in `rows` belongs to
    left_out = np.zeros(len(rows), bool)
    asking = np.flatnonzero(np.arange(len(rows)) > first)
    for leader in range(LEADERS):
        asking = asking[(asking - first[asking] > leader) & ~left_out[asking]]
        if not len(asking):
            break
        for chunk in np.array_split(asking, len(asking) // _COMPARED + 1):
            mine, others = places[rows[chunk]], places[rows[first[chunk] + leader]]
            left_out[chunk] = (sketches[mine] == sketches[others]).sum(axis=1, dtype=np.int16) >= _AGREE
    return rows[left_out]


def _grouped(values: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows by value, in their order where values are equal, and where in this list each value begins."""
    rows = np.argsort(values, kind="stable")
    ordered = values[rows]
    return rows, np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))


@contextmanager
def _on_disk(fingerprints: Iterable[NDArray[np.void]]) -> Iterator[NDArray[np.void]]:
    """All fingerprints as one array [articles] that is mapped from a file."""
    try:
        with tempfile.TemporaryFile() as file:
            for rows in fingerprints:
                file.write(rows.tobytes())
            file.flush()
            yield np.memmap(file, FINGERPRINT, "r").view(np.ndarray) if file.tell() else np.zeros(0, FINGERPRINT)
    except OSError as fault:
        where = tempfile.gettempdir()
        raise UserError(f"cannot keep 288 bytes per article in {where} ({fault.strerror}); make room there") from None
