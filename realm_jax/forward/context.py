"""What every forward pass is given: the index, the static context of a step, and what stands in a batch.

Nothing here runs a network. Read next: `search.py`, then `masked.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from realm_jax.mesh import batch_parts
from realm_jax.models.inputs import Documents
from realm_jax.models.realm import Params, Realm
from realm_jax.retrieval.scann import Searcher

Array = jax.Array
Batch = dict[str, Array]


class Index(NamedTuple):
    """The corpus on the device: vectors [padded rows, projection] and the document rows they stand for.

    vectors: None if hosts search. tower: parameters of the query embedder that searches; None for the current one.
    held_out: which rows no masked sentence may learn from, bool [padded rows]; None for none.
    """

    vectors: Any
    documents: Documents
    tower: Params | None = None
    held_out: Array | None = None


@dataclasses.dataclass(frozen=True)
class LoadedIndex:
    """An index that a task can use.

    vectors: on the host, [rows, width]; None for a generation that the devices search, and where words find passages.
    step: of its parameters. generation: its name, '' for one that the trainer made. searcher: where hosts search.
    queries: the sample of its export [count, width], if it is there. facts: what to record when it is adopted.
    """

    index: Index
    vectors: NDArray | None
    step: int
    generation: str = ""
    searcher: Searcher | None = None
    queries: NDArray[np.float32] | None = None
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


class Rerank(NamedTuple):
    """What orders the first passages of a search anew before they are read.

    passages: how many. network: the key of its parameters. added(context, params, batch, documents [batch, k, d]) →
    what it adds to the score of each passage, [batch, k] float32.
    """

    passages: int
    network: str
    added: Callable[["StepContext", Params, Batch, Documents], Array]


class PackedPlaces(NamedTuple):
    """Into how many places a part of a batch packs its tokens; 0: it pads them.

    examples: of the part. queries: what is searched with; nulls: the reader's texts with the null document, joints:
    those with passages; documents: passages that are embedded.
    """

    examples: int
    queries: int = 0
    nulls: int = 0
    joints: int = 0
    documents: int = 0


@dataclasses.dataclass(frozen=True)
class StepContext:
    """The static context of a step: everything a loss needs besides arrays. It is fixed for a run and compiled in."""

    model: Realm
    mesh: Mesh
    cls_id: int
    sep_id: int
    rows: int  # passages in the corpus, padding not counted
    candidates: int = 8  # the null document counted
    null_document: bool = True  # whether it takes part
    exclude_own: bool = True  # whether a sentence's own passage does not
    marginal: str = "example"
    ict_null_weight: float = 0.0  # weight of the null document in the inverse cloze task
    ict_from_index: bool = False  # its negatives are what the query retrieves, not the passages of the batch
    qa_objective: str = "marginal"
    qa_beam: int = 64  # passages that the retriever's term of fine-tuning, and the inverse cloze task, rank
    qa_passages: int = 5  # passages that are read
    qa_titles: bool = False  # with their titles
    qa_search: str = "vectors"  # what finds them, one of `sections.SEARCHES`
    search: str = "vectors"  # what finds REALM's candidates
    frozen_documents: bool = False  # whether REALM's candidates keep the vectors of the index
    qa_documents: bool = False  # whether fine-tuning trains the document embedder as well
    rerank: Rerank | None = None  # what orders them anew; nothing does while a task is trained
    packed: PackedPlaces | None = None  # how texts and passages are packed; None: they are padded

    def places(self, examples: int) -> PackedPlaces:
        """How a batch of so many texts is packed: as was worked out for it, another is padded."""
        packed = self.packed
        fits = packed is not None and examples == packed.examples * batch_parts(self.mesh)
        return packed if packed is not None and fits else PackedPlaces(examples)

    @property
    def qa_words(self) -> bool:
        """Whether words alone find the passages of a question."""
        return self.qa_search == "bm25"

    @property
    def points(self) -> bool:
        """Whether the reader points at what is hidden. The retriever then never sees [MASK]: an encoder of sentences
        does not know it, and no question has it."""
        return self.marginal == "span"


def reader_query(batch: Batch) -> tuple[Array, Array]:
    """What the reader reads of a batch's texts, ids [batch, q] and lengths [batch]: `reader_query`, or what searches if
    there is none."""
    name = "reader_query" if "reader_query" in batch else "query"
    return batch[name], batch[f"{name}_length"]


def batch_passages(batch: Batch, prefix: str = "") -> Documents:
    """The passages that came with a batch, [batch, …]. prefix: of their arrays' names."""
    return Documents(*(batch[f"{prefix}document{part}"] for part in ("", "_length", "_title_length")))


def batch_candidates(batch: Batch) -> Documents:
    """The passages that came with a batch, each the one candidate of its text: [batch, 1, …]."""
    return Documents(*(part[:, None] for part in batch_passages(batch)))


def dropout_keys(key: Array | None, count: int) -> list[Array | None]:
    """`count` keys from one; None stays None, which means no dropout."""
    return [None] * count if key is None else list(jax.random.split(key, count))
