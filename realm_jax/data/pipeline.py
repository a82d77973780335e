"""Order, batches and prefetch (Grain): the batch at step s is a pure function of (seed, task, s).

Example number `position` of a run is example `permutation(epoch)[position mod count]`; its random generator is seeded
with (seed, task, epoch, example), so a mask depends on nothing else. Any step can be asked for at once, which is how a
run resumes: the input position is one integer.
"""

from collections.abc import Iterator

import grain
import numpy as np
from numpy.typing import NDArray

from realm_jax.data.examples import Examples

PURPOSES = {"mlm": 1, "ict": 2, "realm": 3, "qa": 4, "sample": 5}
PREFETCH = 4  # batches made ahead, in one thread


def dataset(examples: Examples, seed: int, purpose: str, batch_size: int) -> grain.MapDataset:
    """Batches without end; element s is the batch of step s, a dictionary of arrays [batch_size, …]."""
    stream = (seed, PURPOSES[purpose])
    shuffle_seed = int(np.random.SeedSequence(stream).generate_state(1)[0])
    order = grain.MapDataset.range(examples.total).shuffle(seed=shuffle_seed).repeat()

    def make(position: int, example: int) -> dict[str, NDArray]:
        epoch = position // examples.total
        return examples.make(int(example), np.random.default_rng((*stream, epoch, int(example))))

    return order.map_with_index(make).batch(batch_size)


def batches(examples: Examples, seed: int, purpose: str, batch_size: int, start: int, stop: int) -> Iterator[dict]:
    """The batches of steps start … stop − 1, made ahead in a thread."""
    steps = dataset(examples, seed, purpose, batch_size)[start:stop]
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH)
    return iter(steps.to_iter_dataset(options))
