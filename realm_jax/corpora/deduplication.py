"""Deduplication of extracted articles: which lines of the shards are dropped.

    FOLDER/00007.fingerprints   288 bytes for each article of a shard
    FOLDER/00007.copies         one byte for each: 0 for one that stays, else the number of its reason
    FOLDER/COPIES.json          written last: how many are left out, by reason

Fingerprints are made by any number of workers; the decision takes one machine 100 bytes of memory and a few
microseconds an article. The rules, and why what stays does not depend on order: `realm_jax.corpora.near_duplicates`.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from realm_jax.corpora.articles import duplicates_name, read_lines
from realm_jax.corpora.near_duplicates import FINGERPRINT, REASONS, find_near_duplicates, fingerprint
from realm_jax.storage import open_folder

COPIES = "COPIES.json"


def fingerprint_shard(url: str, shard: int) -> int:
    """Write the fingerprints of a shard, unless they are there; how many. url: path or URL of the shards."""
    folder = open_folder(url)
    if _name(shard) in folder.names():
        return 0
    found = [fingerprint(article).tobytes() for _, article in read_lines(folder, shard)]
    folder.write(_name(shard), b"".join(found))
    return len(found)


def drop_near_duplicates(url: str, shards: int) -> Counter[str]:
    """Decide which articles are duplicates; returns their number by reason. Every shard has its fingerprints."""
    folder = open_folder(url)
    if COPIES in folder.names():
        return Counter({reason: int(times) for reason, times in folder.read_json(COPIES).items()})
    sizes: list[int] = []

    def every() -> Iterator[NDArray[np.void]]:
        for shard in range(shards):
            found = np.frombuffer(folder.read(_name(shard)), FINGERPRINT)
            sizes.append(len(found))
            yield found

    with tempfile.TemporaryDirectory() as scratch:
        reasons = find_near_duplicates(every(), Path(scratch))
    for shard, of_shard in enumerate(np.split(reasons, np.cumsum(sizes)[:-1])):
        folder.write(duplicates_name(shard), of_shard.tobytes())
    counts = {reason: int((reasons == code).sum()) for code, reason in enumerate(REASONS) if code}
    folder.write_json(COPIES, {reason: times for reason, times in counts.items() if times})
    for shard in range(shards):
        folder.remove(_name(shard))
    return +Counter(counts)


def _name(shard: int) -> str:
    return f"{shard:05d}.fingerprints"
