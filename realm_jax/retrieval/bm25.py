"""Search by words: BM25 over the passages of a corpus, with the analyzer of its language (`analyzers.py`).

The search that needs no training, the baseline for trained retrieval, and one half of hybrid search (`fusion.py`). An
index is stored in the run directory (`save_index`) and memory-mapped from there.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.languages import BIGRAMS, PLAIN, most_common_language
from realm_jax.data.store import PassageStore
from realm_jax.errors import UserError
from realm_jax.retrieval.analyzers import available, library_versions, terms
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

NUM_SAMPLED_PASSAGES = 100  # from which the language of a corpus is detected
FORMAT = 3
MAX_CHECKED_BYTES = 1 << 28  # whose checksums a question waits for: a fraction of a second. The trainer waits for all.
FOLDER, ABOUT = "words", "WORDS.json"
_TERMS = {PLAIN: "plain words", BIGRAMS: "pairs of characters"}


def searchable_texts(store: PassageStore) -> Iterable[str]:
    """Return title and text of each passage, as BM25 reads them."""
    return (f"{store.title(row)} {store.text(row)}" for row in range(len(store)))


def language_of(store: PassageStore) -> str:
    """Detect the language of most of NUM_SAMPLED_PASSAGES passages: one of `languages.CHOICES` that is available."""
    rows = np.unique(np.linspace(0, len(store) - 1, min(NUM_SAMPLED_PASSAGES, len(store))).astype(int)).tolist()
    choice, code = most_common_language(store.text(row) for row in rows)
    if choice == PLAIN and code:
        logger.info(
            "words: the corpus seems to be in %r, for which BM25 has no stems or stop words; matching plain words", code
        )
    return available(choice)


class Bm25:
    """A BM25 index over texts (Lucene's variant with k1 = 1.5 and b = 0.75)."""

    def __init__(self, texts: Iterable[str], language: str = PLAIN) -> None:
        """Index texts; language: one of `languages.CHOICES`."""
        tokens = [terms(text, language) for text in texts]
        self.size, self.language, self.libraries = len(tokens), language, library_versions(language)
        self._index = _bm25s().BM25() if any(tokens) else None  # the library fails on texts without any word
        if self._index is not None:
            self._index.index(tokens, show_progress=False)

    @property
    def is_empty(self) -> bool:
        """Return True if no text has any word that is not a stop word."""
        return self._index is None

    def has_terms(self, question: str) -> bool:
        """Return True if a question has any word that is not a stop word."""
        return bool(terms(question, self.language))

    def search(self, questions: Sequence[str], k: int) -> NDArray[np.int64]:
        """Return the rows of `scored`.

        Args:
            questions: to search for.
            k: rows of each question.

        Returns:
            int64 [questions, min(k, texts)].
        """
        return self.scored(questions, k)[0].astype(np.int64)

    def scored(self, questions: Sequence[str], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return rows and scores of the best texts for each question, the best first.

        Of texts with equal scores the lower row comes first. Texts that share no word with the question are not
        candidates: their rows are −1 and their scores 0.

        Args:
            questions: to search for.
            k: rows of each question.

        Returns:
            Rows int32 and scores float32, [questions, min(k, texts)].
        """
        k = min(k, self.size)
        rows, scores = np.full((len(questions), k), -1, np.int32), np.zeros((len(questions), k), np.float32)
        for number, question in enumerate(questions):
            tokens = terms(question, self.language)
            if tokens and self._index is not None:
                all_scores = self._index.get_scores(tokens)  # [texts]
                # Of equal scores at the cut the lower rows stay; the library's choice among them depends on k.
                cut = np.partition(all_scores, -k)[-k]
                best = np.flatnonzero(all_scores > max(cut, 0))
                if cut > 0:
                    best = np.concatenate([best, np.flatnonzero(all_scores == cut)[: k - len(best)]])
                best = best[np.lexsort((best, -all_scores[best]))]
                rows[number, : len(best)], scores[number, : len(best)] = best, all_scores[best]
        return rows, scores

    def save(self, folder: Path) -> None:
        """Write the index into an empty folder, without pickle, and a record to check its files with."""
        if self._index is not None:
            self._index.save(str(folder), allow_pickle=False, show_progress=False)
        about = {"size": self.size, "language": self.language, "empty": self.is_empty, "files": list_files(folder)}
        about |= {"libraries": self.libraries} if self.libraries else {}
        write_json_atomic(folder / ABOUT, {"digest": record_digest(about), **about})

    @classmethod
    def load(cls, folder: Path, max_checked_bytes: int | None = None) -> Self:
        """Load an index that was saved, memory-mapped.

        Args:
            folder: folder of the index.
            max_checked_bytes: files of more bytes are only compared by size, not by checksum; None: all checksums are.

        Raises:
            OSError, ValueError, KeyError, TypeError, UserError: if it is damaged.
        """
        about, loaded = dict(read_json(folder / ABOUT)), cls.__new__(cls)
        if about["digest"] != record_digest(about):
            raise Damaged(f"{folder / ABOUT}: its checksum is different")
        size = sum(entry[1] for entry in about["files"])
        check_files(folder, about["files"], max_checked_bytes is None or size <= max_checked_bytes)
        loaded.size, loaded.language, loaded.libraries = about["size"], about["language"], about.get("libraries", "")
        loaded._index = None
        if not about["empty"]:
            loaded._index = _bm25s().BM25.load(str(folder), mmap=True, allow_pickle=False, show_progress=False)
        return loaded


@lru_cache(2)  # a service opens an edited corpus while the one before it still answers
def load_or_build(store: PassageStore, language: str, workdir: Path) -> Bm25:
    """Load BM25 over a corpus from the run directory, or build it in memory; nothing is written.

    It is cached, because a process searches for many sets of questions.

    Args:
        store: the corpus.
        language: one of `languages.CHOICES`; '' to detect it.
        workdir: the run directory.

    Raises:
        UserError: the library of the language is not installed.
    """
    saved = _load_saved(store, language, workdir, MAX_CHECKED_BYTES)
    return Bm25(searchable_texts(store), language or language_of(store)) if saved is None else saved


def save_index(store: PassageStore, language: str, workdir: Path) -> None:
    """Write the index of `load_or_build` into the run directory, unless it is there; remove any other index.

    Args:
        store: the corpus.
        language: see `load_or_build`.
        workdir: the run directory.
    """
    folder = _index_folder(store, language, workdir)
    if _load_saved(store, language, workdir) is not None:
        return
    if folder.is_dir():
        load_or_build.cache_clear()  # it may have read the damaged files
    make_folder(folder.parent, "--workdir")
    others = PosixFolder(folder.parent)
    for name in others.names():
        others.remove(name)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        load_or_build(store, language, workdir).save(partial)
        publish_folder(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def is_saved(store: PassageStore, language: str, workdir: Path) -> bool:
    """Return True if the run directory has the index of a corpus. Arguments: see `load_or_build`."""
    return (_index_folder(store, language, workdir) / ABOUT).is_file()


def check_has_terms(bm25: Bm25, where: str) -> None:
    """Check that an index has words to search by.

    Args:
        bm25: the index.
        where: the key or flag that needs it, for messages.

    Raises:
        UserError: it has none.
    """
    if bm25.is_empty:
        raise UserError(
            f"{where}: no passage has a word that is no stop word (language {bm25.language!r}), so there is nothing "
            "to match; search by vectors, or set config.retrieval.language=none"
        )


def _load_saved(store: PassageStore, language: str, workdir: Path, max_checked_bytes: int | None = None) -> Bm25 | None:
    """Load the index that was saved (`Bm25.load`); None if there is none, a damaged one, or one by another analyzer."""
    if not is_saved(store, language, workdir):
        return None
    folder = _index_folder(store, language, workdir)
    try:
        saved = Bm25.load(folder, max_checked_bytes)
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        logger.warning("%s is damaged (%s); rebuilding the index", folder, error)
        return None
    if saved.libraries != library_versions(saved.language):
        installed = library_versions(saved.language) or "no such library"
        logger.warning(
            "%s was built with %s, but %s is installed; rebuilding the index", folder, saved.libraries, installed
        )
        return None
    # A corpus without a recorded language: an earlier version of this program, or a missing library, may have decided.
    if not language and saved.language in (PLAIN, BIGRAMS) and language_of(store) != saved.language:
        logger.warning("%s was built from %s; rebuilding the index", folder, _TERMS[saved.language])
        return None
    return saved


def _index_folder(store: PassageStore, language: str, workdir: Path) -> Path:
    """Return the folder of an index; its name follows from everything that decides the bytes."""
    import Stemmer

    origin = [FORMAT, store.fingerprint, language, Stemmer.version(), _bm25s().__version__]
    return workdir / FOLDER / sha256_hex(json.dumps(origin).encode())[:16]


def _bm25s() -> Any:
    """Import the library. That starts JAX's devices, which several processes have to do together, and later."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)  # the library sets DEBUG, and absl prints what it says
    return bm25s
