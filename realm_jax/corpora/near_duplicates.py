"""Leave out copies in a corpus: articles that say the same as another one in nearly the same words.

The library datasketch compares texts by MinHash: of the runs of five words of two texts, the estimated share that both
have decides (Jaccard similarity, at least 0.8). Articles are taken in the order of their *keys*, hashes of id, title
and text, and an article is left out if one that stays has its text, its id or nearly its text. So what stays depends on
the set of articles, not on their order, files or processes.

The decision is made by one process: about 1.5 kB of memory an article, so 7 million news articles take 10 GB. Texts of
scripts without spaces between words are compared as single words, so of these only exact copies are found.

    FOLDER/00007.fingerprints   an array of FINGERPRINT, one row for each article of a shard
    FOLDER/00007.copies         one byte for each: 0 for one that stays, else the number of its reason
    FOLDER/COPIES.json          written last: how many are left out, by reason
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realm_jax.corpora.articles import Article, read_lines, shard_file
from realm_jax.storage import open_folder

COPIES = "COPIES.json"
REASONS = ("", "the text of another article", "the id of another article", "nearly the text of another article")
SHINGLE = 5  # words, as Lee et al. (2021) use to find near-duplicates in news and web text
HASHES = 128
THRESHOLD = 0.8
_WORD = re.compile(r"\w+")
FINGERPRINT = np.dtype([("key", "S32"), ("id", "S16"), ("text", "S16"), ("minima", "<u8", HASHES)])


def fingerprint(article: Article) -> NDArray[np.void]:
    """Return the FINGERPRINT of an article [1]: hexadecimal hashes, and the minima of its runs of words."""
    from datasketch import MinHash

    # A text with fewer words than a shingle is one shingle.
    words = _WORD.findall(article.text.lower())
    starts = range(max(1, len(words) - SHINGLE + 1))
    minhash = MinHash(HASHES, scheme="affine32")  # named, since the default changes with versions of the library
    minhash.update_batch(
        [" ".join(words[start : start + SHINGLE]).encode("utf-8", "surrogatepass") for start in starts]
    )
    content = "\0".join((article.id, article.title, article.text))
    hashes = [
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest().encode()
        for text, size in ((content, 16), (article.id, 8), (article.text, 8))
    ]
    return np.array([(*hashes, minhash.hashvalues)], FINGERPRINT)


def find_near_duplicates(fingerprints: Sequence[NDArray[np.void]]) -> NDArray[np.uint8]:
    """Return for each article 0 if it stays, or the number of its reason in REASONS [articles].

    Args:
        fingerprints: arrays of FINGERPRINT, of one article or many.
    """
    from datasketch import MinHash, MinHashLSH

    articles = np.concatenate([np.zeros(0, FINGERPRINT), *fingerprints])  # [articles]
    reasons = np.zeros(len(articles), np.uint8)  # [articles]
    texts, ids, similar = set[bytes](), set[bytes](), MinHashLSH(THRESHOLD, HASHES)
    for row in np.argsort(articles["key"], kind="stable").tolist():
        article = articles[row]
        minhash = MinHash(HASHES, scheme="affine32", hashvalues=article["minima"])
        if article["text"] in texts:
            reasons[row] = 1
        elif article["id"] in ids:
            reasons[row] = 2
        # minima: [HASHES]; the share that two articles have in common estimates how similar they are
        elif any(
            np.mean(article["minima"] == articles["minima"][other]) >= THRESHOLD for other in similar.query(minhash)
        ):
            reasons[row] = 3
        else:
            texts.add(article["text"])
            ids.add(article["id"])
            similar.insert(row, minhash)
    return reasons


def fingerprint_shard(url: str, shard: int) -> int:
    """Write the fingerprints of a shard, unless they exist.

    Args:
        url: URL of the folder of the shards.
        shard: its number.

    Returns:
        Number of fingerprints that were written.
    """
    folder, name = open_folder(url), shard_file(shard, "fingerprints")
    if name in folder.names():
        return 0
    fingerprints = [fingerprint(article).tobytes() for _, article in read_lines(folder, shard)]
    folder.write(name, b"".join(fingerprints))
    return len(fingerprints)


def drop_near_duplicates(url: str, shards: int) -> Counter[str]:
    """Decide which articles are copies, once all shards have fingerprints.

    Args:
        url: URL of the folder of the shards.
        shards: their number.

    Returns:
        Number of copies by reason.
    """
    folder = open_folder(url)
    if COPIES not in folder.names():
        names = [shard_file(shard, "fingerprints") for shard in range(shards)]
        fingerprints = [np.frombuffer(folder.read(name), FINGERPRINT) for name in names]
        reasons = find_near_duplicates(fingerprints)
        ends = np.cumsum([len(shard_fingerprints) for shard_fingerprints in fingerprints])  # [shards]
        for shard, shard_reasons in enumerate(np.split(reasons, ends[:-1])):
            folder.write(shard_file(shard, "copies"), shard_reasons.tobytes())
        counts = {reason: int((reasons == code).sum()) for code, reason in enumerate(REASONS) if code}
        folder.write_json(COPIES, {reason: times for reason, times in counts.items() if times})
        for name in names:
            folder.remove(name)
    return Counter({reason: int(times) for reason, times in folder.read_json(COPIES).items()})
