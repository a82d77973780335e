"""Search by words: BM25 over the passages of a corpus, with the stems and stop words of its language.

The search that needs no training, the yardstick beside which learnt retrieval is reported, and one half of hybrid
search (`fusion.py`). An index is kept in the run folder (`save_index`) and memory-mapped from there; nobody else writes
one.
"""

import json
import logging
import shutil
import tempfile
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import regex
from numpy.typing import NDArray

from realm_jax.data.languages import LANGUAGES, PLAIN, language
from realm_jax.data.store import PassageStore
from realm_jax.errors import UserError
from realm_jax.storage import (
    Damaged,
    PosixFolder,
    check_files,
    list_files,
    make_folder,
    publish_folder,
    read_json,
    record_digest,
    sha256_hex,
    write_json_atomic,
)

logger = logging.getLogger(__name__)

# One-letter words are kept: how little a word says is for BM25's own weights to judge. Marks, such as the
# vowel signs of Hindi, belong to the letter before them; Python's own \w has none of them.
_WORD = regex.compile(r"[\p{L}\p{N}_][\p{L}\p{M}\p{N}_]*")
_DOT_ABOVE = "\N{COMBINING DOT ABOVE}"  # what lower() leaves of the Turkish capital İ, beside an i
SAMPLED = 100  # passages whose language is looked at
FORMAT = 3
COMPARED = 1 << 28  # bytes whose checksums a question waits for: a fraction of a second. The trainer waits for all.
FOLDER, ABOUT = "words", "WORDS.json"
_ONE_AT_A_TIME = threading.Lock()  # a stemmer has a memory that threads must not share: batches are made in another


def searchable_texts(store: PassageStore) -> Iterable[str]:
    """Title and text of each passage, as BM25 reads them."""
    return (f"{store.title(row)} {store.text(row)}" for row in range(len(store)))


def language_of(store: PassageStore) -> str:
    """The language of most of SAMPLED passages, evenly spaced: a key of LANGUAGES, or PLAIN for any other."""
    rows = np.unique(np.linspace(0, len(store) - 1, min(SAMPLED, len(store))).astype(int)).tolist()
    counts = Counter(language(store.text(row)) for row in rows)
    code = counts.most_common(1)[0][0] if counts else PLAIN
    code = {"nb": "no", "nn": "no"}.get(code, code)
    if code not in LANGUAGES:
        logger.info("words: the corpus seems to be in %r, without stems or stop words here; using plain words", code)
        return PLAIN
    return code


class Bm25:
    """A BM25 index over texts (Lucene's variant with k1 = 1.5 and b = 0.75). language: a key of LANGUAGES, or PLAIN."""

    def __init__(self, texts: Iterable[str], language: str = PLAIN) -> None:
        tokens = [_tokens(text, language) for text in texts]
        self.size, self.language = len(tokens), language
        self._index = _bm25s().BM25() if any(tokens) else None  # the library fails on texts without any word
        if self._index is not None:
            self._index.index(tokens, show_progress=False)

    @property
    def is_empty(self) -> bool:
        """Whether no text has any word, stop words aside."""
        return self._index is None

    def has_terms(self, question: str) -> bool:
        """Whether any word of a question is left without the stop words."""
        return bool(_tokens(question, self.language))

    def search(self, questions: Sequence[str], k: int) -> NDArray[np.int64]:
        """The rows of `scored`, int64 [questions, min(k, texts)]."""
        return self.scored(questions, k)[0].astype(np.int64)

    def scored(self, questions: Sequence[str], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Rows and scores of the k best texts for each question, best first: [questions, min(k, texts)].

        Of texts with equal scores the lower row comes first. Texts that share no word with the question are no
        candidates: row −1 and score 0 stand in their places.
        """
        k = min(k, self.size)
        rows, scores = np.full((len(questions), k), -1, np.int32), np.zeros((len(questions), k), np.float32)
        for number, question in enumerate(questions):
            tokens = _tokens(question, self.language)
            if tokens and self._index is not None:
                all_scores = self._index.get_scores(tokens)  # [texts]
                # Of equals at the cut the lower rows stay; the library's own choice among them depends on k.
                least = np.partition(all_scores, -k)[-k]
                best = np.flatnonzero(all_scores > max(least, 0))
                if least > 0:
                    best = np.concatenate([best, np.flatnonzero(all_scores == least)[: k - len(best)]])
                best = best[np.lexsort((best, -all_scores[best]))]
                rows[number, : len(best)], scores[number, : len(best)] = best, all_scores[best]
        return rows, scores

    def save(self, folder: Path) -> None:
        """Write the index into an empty folder, without anything pickled, and what `load` compares the files with."""
        if self._index is not None:
            self._index.save(str(folder), allow_pickle=False, show_progress=False)
        about = {"size": self.size, "language": self.language, "empty": self.is_empty, "files": list_files(folder)}
        write_json_atomic(folder / ABOUT, {"digest": record_digest(about), **about})

    @classmethod
    def load(cls, folder: Path, compared: int | None = None) -> Self:
        """An index that was saved, memory-mapped.

        compared: bytes of files at most whose content is compared with its checksum; beyond them sizes alone are
        (None: all content is). Raises OSError, ValueError, KeyError, TypeError or UserError where it is damaged.
        """
        about, loaded = dict(read_json(folder / ABOUT)), cls.__new__(cls)
        if about["digest"] != record_digest(about):
            raise Damaged(f"{folder / ABOUT}: its checksum is another")
        check_files(folder, about["files"], compared is None or sum(entry[1] for entry in about["files"]) <= compared)
        loaded.size, loaded.language = about["size"], about["language"]
        loaded._index = None
        if not about["empty"]:
            loaded._index = _bm25s().BM25.load(str(folder), mmap=True, allow_pickle=False, show_progress=False)
        return loaded


@lru_cache(1)
def load_or_build(store: PassageStore, language: str, workdir: Path) -> Bm25:
    """BM25 over a corpus: as a run keeps it, or else made in memory. Questions come one by one, or set after set.

    language: `retrieval.language` of a config. Nothing is written.
    """
    saved = _load_saved(_index_folder(store, language, workdir), COMPARED)
    return Bm25(searchable_texts(store), language or language_of(store)) if saved is None else saved


def save_index(store: PassageStore, language: str, workdir: Path) -> None:
    """Write the index of `load_or_build` into the run folder, unless it is there whole; any other index goes."""
    final = _index_folder(store, language, workdir)
    if _load_saved(final) is not None:
        return
    if final.is_dir():
        load_or_build.cache_clear()  # it may have read what is damaged
    make_folder(final.parent, "--workdir")
    others = PosixFolder(final.parent)
    for name in others.names():
        others.remove(name)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=final.parent))
    try:
        load_or_build(store, language, workdir).save(partial)
        publish_folder(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_has_terms(words: Bm25, where: str) -> None:
    """Raise UserError if there is nothing to search by. where: the key or flag that asks for it."""
    if words.is_empty:
        raise UserError(
            f"{where}: no passage has a word that is no stop word (language {words.language!r}), so there is nothing "
            "to match; search by vectors, or set config.retrieval.language=none"
        )


def _load_saved(folder: Path, compared: int | None = None) -> Bm25 | None:
    """The index in a folder; None if there is none, or a damaged one. compared: as for `Bm25.load`."""
    if not (folder / ABOUT).is_file():
        return None
    try:
        return Bm25.load(folder, compared)
    except (OSError, ValueError, KeyError, TypeError, UserError) as fault:
        logger.warning("%s is damaged (%s); rebuilding the index", folder, fault)
        return None


def _index_folder(store: PassageStore, language: str, workdir: Path) -> Path:
    """The folder of an index: its name follows from everything that its bytes do."""
    import Stemmer

    made_of = [FORMAT, store.fingerprint, language, Stemmer.version(), _bm25s().__version__]
    return workdir / FOLDER / sha256_hex(json.dumps(made_of).encode())[:16]


def _bm25s() -> Any:
    """The library. Importing it starts JAX's devices, which several processes have to do together, and later."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # the library sets DEBUG, and absl prints what it says
    return bm25s


@cache
def _rules(language: str) -> tuple[frozenset[str], Any]:
    """Stop words and stemmer of a language."""
    if language == PLAIN:
        return frozenset(), None
    import Stemmer
    from bm25s import stopwords

    name = LANGUAGES[language]
    listed = getattr(stopwords, f"STOPWORDS_{'EN' if language == 'en' else name.upper()}")
    return frozenset(listed), Stemmer.Stemmer(name)


def _tokens(text: str, language: str) -> list[str]:
    """The words of a text in lower case, without stop words, as stems."""
    stop_words, stemmer = _rules(language)
    lowered = text.lower()
    if not text.isascii():  # a letter with a mark is the same whether it came as one character or as two
        lowered = unicodedata.normalize("NFC", text).lower().replace(_DOT_ABOVE, "")
    words = [word for word in _WORD.findall(lowered) if word not in stop_words]
    if stemmer is None:
        return words
    with _ONE_AT_A_TIME:
        return list(stemmer.stemWords(words))
