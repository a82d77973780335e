"""The vectors of a corpus in files that other programs read.

FOLDER/vectors.npy       float32 [passages, width], in the order of the corpus
FOLDER/vectors.parquet   id, part, title, text, vector of each passage, where pyarrow is installed
FOLDER/index.faiss       an index of faiss for exact search by inner products, where faiss is installed
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.store import PassageStore
from realm_jax.storage import open_atomic

FILES = VECTORS, TABLE, INDEX = "vectors.npy", "vectors.parquet", "index.faiss"


def write_vectors(folder: Path, store: PassageStore, vectors: NDArray[np.floating], anew: bool = False) -> list[str]:
    """Write those of the files that are not there yet, each whole or not at all; returns the names of all that are.

    vectors: [passages, width], rows as in the store. anew: write all of them, as the passages were edited.
    """
    vectors = np.ascontiguousarray(vectors, np.float32)
    files: dict[str, tuple[str, Callable[[ModuleType, IO[bytes]], Any]]] = {
        VECTORS: ("numpy", lambda library, file: library.save(file, vectors)),
        TABLE: ("pyarrow", lambda library, file: _write_table(file, store, vectors)),
        INDEX: ("faiss", lambda library, file: file.write(_faiss_index(library, vectors))),
    }
    for name, (package, write) in files.items():
        library = _library(package)
        if library is not None and (anew or not (folder / name).is_file()):
            with open_atomic(folder / name) as file:
                write(library, file)
    return [name for name in files if (folder / name).is_file()]


def _library(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _write_table(file: IO[bytes], store: PassageStore, vectors: NDArray[np.float32]) -> None:
    import pyarrow  # here, as it is optional
    from pyarrow import parquet

    rows, width, parts = range(len(store)), vectors.shape[1], list[int]()
    ids = [store.document_id(row) for row in rows]
    for name, before in zip(ids, [None, *ids], strict=False):  # rows of a document are adjacent
        parts.append(parts[-1] + 1 if name == before else 0)
    columns = {
        "id": ids,
        "part": parts,
        "title": [store.title(row) for row in rows],
        "text": [store.text(row) for row in rows],
        "vector": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), width),
    }
    parquet.write_table(pyarrow.table(columns), file)


def _faiss_index(faiss: Any, vectors: NDArray[np.float32]) -> bytes:
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return bytes(faiss.serialize_index(index))
