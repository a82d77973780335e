"""The vectors of a corpus in files that other programs read.

FOLDER/vectors.npy       float32 [passages, width], in the order of the corpus
FOLDER/vectors.parquet   id, part, title, text, vector of each passage, if pyarrow is installed
FOLDER/index.faiss       an index of faiss for exact search by inner products, if faiss is installed
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.store import PassageStore
from realm_jax.storage import open_atomic

FILES = VECTORS, TABLE, INDEX = "vectors.npy", "vectors.parquet", "index.faiss"
OPTIONAL_PACKAGES = {TABLE: "pyarrow", INDEX: "faiss"}  # without its package a file is not written


def write_vectors(
    folder: Path, store: PassageStore, vectors: NDArray[np.floating], overwrite: bool = False
) -> list[str]:
    """Write the files that are not there yet, each atomically.

    Args:
        folder: folder of the files.
        store: the passages.
        vectors: [passages, width], rows as in the store.
        overwrite: write all of them, because the passages were edited.

    Returns:
        The names of all files that are there now.
    """
    vectors = np.ascontiguousarray(vectors, np.float32)

    def write_table(file: IO[bytes]) -> None:
        import pyarrow
        from pyarrow import parquet

        rows, parts = range(len(store)), list[int]()
        ids = [store.document_id(row) for row in rows]
        for name, before in zip(ids, [None, *ids], strict=False):  # rows of a document are adjacent
            parts.append(parts[-1] + 1 if name == before else 0)
        columns = {
            "id": ids,
            "part": parts,
            "title": [store.title(row) for row in rows],
            "text": [store.text(row) for row in rows],
            "vector": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), vectors.shape[1]),
        }
        parquet.write_table(pyarrow.table(columns), file)

    def write_index(file: IO[bytes]) -> None:
        faiss = import_module("faiss")  # no extra installs it
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        file.write(bytes(faiss.serialize_index(index)))

    writers: dict[str, Callable[[IO[bytes]], None]] = {
        VECTORS: lambda file: np.save(file, vectors),
        TABLE: write_table,
        INDEX: write_index,
    }
    for name, write in writers.items():
        if overwrite or not (folder / name).is_file():
            if (package := OPTIONAL_PACKAGES.get(name)) and find_spec(package) is None:
                continue
            with open_atomic(folder / name) as file:
                write(file)
    return [name for name in writers if (folder / name).is_file()]
