"""Order, batches and prefetch (Grain): the batch at step s is a pure function of (seed, task, s).

Example number `position` of a run is example `permutation(epoch)[position mod count]`; its random generator is seeded
with (seed, task, epoch, example), so a mask depends on nothing else. Any step can be asked for at once, which is how a
run resumes: the input position is one integer.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.examples import Examples

if TYPE_CHECKING:
    import grain  # in functions otherwise: what only answers needs no order of examples, and starts sooner

PURPOSES = {"mlm": 1, "ict": 2, "realm": 3, "qa": 4, "sample": 5, "tagger": 6, "closed_book": 7}
ENDLESS = 1 << 40  # steps; no run has as many
PREFETCH = 4  # batches made ahead, in one thread


def dataset(
    examples: Examples, seed: int, purpose: str, batch_size: int, rows: NDArray[np.int64] | None = None
) -> "grain.MapDataset":
    """Batches without end; element s is the batch of step s, a dictionary of arrays [batch_size, …].

    rows: the examples of each batch that this process makes, in order; None for all.
    """
    import grain

    stream = (seed, PURPOSES[purpose])
    shuffle_seed = int(np.random.SeedSequence(stream).generate_state(1)[0])
    order = grain.MapDataset.range(examples.total).shuffle(seed=shuffle_seed).repeat()
    own = np.arange(batch_size) if rows is None else rows

    def make(position: int) -> dict[str, NDArray]:
        step, place = divmod(position, len(own))
        position = step * batch_size + int(own[place])
        epoch, example = position // examples.total, int(order[position])
        return examples.make(example, np.random.default_rng((*stream, epoch, example)))

    return grain.MapDataset.range(ENDLESS * len(own)).map(make).batch(len(own))


def batches(
    examples: Examples, seed: int, purpose: str, batch_size: int, start: int, stop: int,
    rows: NDArray[np.int64] | None = None,
) -> Iterator[dict]:  # fmt: skip
    """The batches of steps start … stop − 1, made ahead in a thread. rows: as of `dataset`."""
    import grain

    steps = dataset(examples, seed, purpose, batch_size, rows)[start:stop]
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH)
    return iter(steps.to_iter_dataset(options))
