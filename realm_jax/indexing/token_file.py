"""Store the token vectors of a corpus, so that token rerank need not encode passages at query time.

    tokens.npy                int8 [passages, tokens, dimensions]; a zero vector for no token
    token_projection.npy      float32 [width, dimensions], see `Compression`
    token_frequencies.npy     int32 [vocabulary]

While we compute them, they are in a hidden folder of the run directory. Then the exported model gets them, with
checksums in its manifest. If a command is killed, the same command continues. `retrieval/token_rerank.py` has the
equations; `train/exported_model.py` reads the files.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from numpy.typing import NDArray

from realm_jax.data.held_out import evenly_spaced
from realm_jax.models.inputs import PassageBatch
from realm_jax.models.layers import Params
from realm_jax.models.networks import Realm
from realm_jax.models.retriever import TokenVectors
from realm_jax.retrieval.embed import EMBED_BATCH, CorpusRows, checked_vectors, embedded_batches
from realm_jax.retrieval.token_rerank import (
    STORED_BYTES,
    Compression,
    compressed_tokens,
    principal_axes,
    stored_dimensions,
)
from realm_jax.run import Run
from realm_jax.storage import make_folder, open_atomic

TOKENS, PROJECTION, FREQUENCIES = FILES = ("tokens.npy", "token_projection.npy", "token_frequencies.npy")
SAMPLE = 512  # passages to which the projection is fitted
SAMPLE_BATCH = 32  # of them at a time, because their token vectors are in memory
COPY_BATCH = 1 << 12  # passages whose token vectors are copied at a time
_FOLDER = ".tokens-"


class TokenFile:
    """The token vectors of a run's corpus while they are made."""

    def __init__(self, run: Run, params: Params, key: str, compression: Compression | None = None) -> None:
        """Open the unfinished files of an earlier command with the same key, or begin new ones.

        Args:
            run: has the corpus.
            params: with the encoders.
            key: a digest of everything on which the token vectors depend.
            compression: compression of the token vectors; None to fit it to the corpus.
        """
        self.folder = run.workdir / f"{_FOLDER}{key[:16]}"
        for other in run.workdir.glob(f"{_FOLDER}*"):
            if other != self.folder:
                shutil.rmtree(other)
        make_folder(self.folder, "--output")
        self._run, self._encoders = run, {name: params[name] for name in run.model.embedder_names}
        files = [self.folder / name for name in (PROJECTION, FREQUENCIES)]
        if not files[-1].is_file():
            compression = compression or fit_compression(run, self._encoders)
            for file, array in zip(files, compression, strict=True):
                with open_atomic(file) as stream:
                    np.save(stream, array, allow_pickle=False)
        self._compression = Compression(*(np.load(file, allow_pickle=False) for file in files))
        dimensions = self._compression.projection.shape[1]
        shape = run.context.rows, min(STORED_BYTES // dimensions, int(run.corpus.lengths.max())), dimensions
        if not (path := self.folder / TOKENS).is_file():
            with open_atomic(path) as stream:  # with its zeros: a full disk kills a process that maps a sparse file
                np.lib.format.write_array_header_2_0(stream, {"descr": "|i1", "fortran_order": False, "shape": shape})
                for _ in range(shape[0]):
                    stream.write(bytes(shape[1] * shape[2]))
        self._vectors = np.load(path, mmap_mode="r+", allow_pickle=False)  # [rows, tokens, dimensions]

    @property
    def is_stored(self) -> NDArray[np.bool_]:
        """Return True for passages whose token vectors are stored, [rows]."""
        return np.asarray(self._vectors[:, 0].any(axis=1))

    def embed(self, rows: NDArray[np.integer], progress: Callable[[int], None] | None = None) -> NDArray[np.float32]:
        """Store the token vectors of passages, and return the passages' vectors, bitwise those of `Run.embed`.

        Args:
            rows: rows of the corpus.
            progress: called with the number of embedded passages.

        Returns:
            [rows, projection].

        Raises:
            UserError: if a vector is not finite.
        """
        run = self._run
        vectors = np.empty((len(rows), run.model.vector_size), np.float32)
        embed = run.embedder((self._encoders, self._compression), vectors_and_tokens)
        batches = embedded_batches(embed, run.corpus.take(rows), EMBED_BATCH * run.mesh.size, progress)
        for numbers, (batch_vectors, tokens) in batches:
            vectors[numbers] = checked_vectors(batch_vectors)
            self._write(rows[numbers], tokens)
        return vectors

    def copy(self, known: NDArray[np.int8], source: NDArray[np.integer]) -> None:
        """Copy token vectors that were stored for another version of the corpus with the same compression.

        Args:
            known: [rows before, tokens before, dimensions].
            source: row of each passage in `known`, −1 for none, [rows].
        """
        rows = np.flatnonzero(source >= 0)
        for start in range(0, len(rows), COPY_BATCH):
            part = rows[start : start + COPY_BATCH]
            self._write(part, known[source[part]])

    def _write(self, rows: NDArray[np.integer], tokens: NDArray[np.int8]) -> None:
        """Write token vectors [rows, tokens, dimensions]; slots that a passage does not need are zero."""
        count = min(tokens.shape[1], self._vectors.shape[1])
        self._vectors[rows, 1:count] = tokens[:, 1:count]
        self._vectors.flush()  # the first token last, because it says that the passage is complete
        self._vectors[rows, 0] = tokens[:, 0]
        self._vectors.flush()


def remove_unfinished(workdir: Path) -> None:
    """Remove the files that `TokenFile` leaves in a run directory, when the exported model has them."""
    for folder in workdir.glob(f"{_FOLDER}*"):
        shutil.rmtree(folder)


def vectors_and_tokens(
    model: Realm, inputs: tuple[Params, Compression], passages: PassageBatch
) -> tuple[jax.Array, jax.Array]:
    """Return vectors [n, projection] and stored token vectors. The compiler shares the layers that both need.

    `Run.embedder` compiles once for each function of a module.
    """
    params, compression = inputs
    return model.embed_documents(params, passages), compressed_tokens(model, params, passages, compression)


def _token_vectors(model: Realm, params: Params, passages: PassageBatch) -> TokenVectors:
    """Return token vectors [n, length, width], like `vectors_and_tokens` for `Run.embedder`."""
    return model.document_tokens(params, passages)


# --- Compression ------------------------------------------------------------------------------------------------------


def fit_compression(run: Run, encoders: Params) -> Compression:
    """Fit the compression of token vectors to a corpus: the principal axes of those of SAMPLE passages.

    Args:
        run: has the corpus.
        encoders: parameters of the encoders.
    """
    width, corpus = run.model.bert.width, run.corpus
    sample = corpus.take(np.array(evenly_spaced(range(run.context.rows), SAMPLE)))
    second_moment = np.zeros((width, width))
    embed = run.embedder(encoders, _token_vectors)
    for _, (vectors, mask) in embedded_batches(embed, sample, SAMPLE_BATCH * run.mesh.size):
        states = checked_vectors(vectors[mask])  # [tokens, width]
        second_moment += states.T @ states
    projection = principal_axes(second_moment, min(stored_dimensions(int(corpus.lengths.max())), width))
    return Compression(projection, document_frequencies(corpus, run.sources.tokenizer.size))


def document_frequencies(corpus: CorpusRows, vocabulary_size: int) -> NDArray[np.int32]:
    """Return the number of passages that have each token, [vocabulary].

    Args:
        corpus: the passages.
        vocabulary_size: number of ids.
    """
    frequencies = np.zeros(vocabulary_size, np.int32)
    for row, length in zip(corpus.ids, corpus.lengths.tolist(), strict=True):
        frequencies[np.unique(row[:length])] += 1
    return frequencies


def can_stay(compression: Compression, passages: int, longest: int) -> bool:
    """Return True if a compression can stay after an edit: its sample was large enough, and no token would be lost.

    Args:
        compression: [CLS] is in every passage that it was fitted to, so its largest frequency is their number.
        passages: number of passages of the corpus now.
        longest: tokens of the longest passage now.
    """
    fitted = int(compression.frequencies.max())
    return (fitted >= SAMPLE or passages < 2 * fitted) and compression.projection.shape[1] <= stored_dimensions(longest)
