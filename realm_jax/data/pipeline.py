"""Order, batches and prefetch (Grain): the batch at step s is a pure function of (seed, task, s).

Example number `position` of a run is example `permutation(epoch)[position mod count]`; its random generator is seeded
with (seed, task, epoch, example), so a mask depends on nothing else. Any step can be asked for at once, which is how a
run resumes: the input position is one integer. Examples that have lengths are sorted by them within a window of
batches, so that a batch is padded to what its longest example needs.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from realm_jax.data.examples import Examples

if TYPE_CHECKING:
    import grain  # in functions otherwise: what only answers needs no order of examples, and starts sooner

SAMPLE = (
    5  # the stream of random numbers of sample queries; a task has its own (`Task.stream`), 11 `train/projection.py`
)
ENDLESS = 1 << 40  # steps; no run has as many
PREFETCH = 4  # batches made ahead, in one thread
WINDOW = 32  # batches among which examples are sorted by length
LENGTH_MULTIPLE = 32  # padded lengths are multiples of this: a step is compiled for a handful of them


def dataset(
    examples: Examples, seed: int, stream: int, batch_size: int, rows: NDArray[np.int64] | None = None
) -> "grain.MapDataset":
    """Batches without end; element s is the batch of step s, a dictionary of arrays [batch_size, …].

    rows: the examples of each batch that this process makes, in order; None for all.
    """
    import grain

    source = (seed, stream)
    shuffle_seed = int(np.random.SeedSequence(source).generate_state(1)[0])
    order = grain.MapDataset.range(examples.total).shuffle(seed=shuffle_seed).repeat()
    own = np.arange(batch_size) if rows is None else rows

    def make(position: int) -> dict[str, NDArray]:
        epoch, example = position // examples.total, int(order[position])
        return examples.make(example, np.random.default_rng((*source, epoch, example)))

    def make_in_order(number: int) -> dict[str, NDArray]:
        step, place = divmod(number, len(own))
        return make(step * batch_size + int(own[place]))

    if examples.lengths is None:
        return grain.MapDataset.range(ENDLESS * len(own)).map(make_in_order).batch(len(own))
    positions = lru_cache(4)(partial(_positions, order, examples.lengths, source, batch_size))
    batch = partial(_batch_by_length, make, positions, own)
    return grain.MapDataset.range(ENDLESS).map(batch)


def padded_lengths(examples: Examples) -> int:
    """How many different lengths the batches of examples are padded to at most."""
    return 1 if examples.lengths is None else len(np.unique(-(-examples.lengths // LENGTH_MULTIPLE)))


Window = tuple[NDArray[np.int64], NDArray[np.int64]]


def _batch_by_length(
    make: Callable[[int], dict[str, NDArray]], positions: Callable[[int], Window], own: NDArray[np.int64], step: int
) -> dict[str, NDArray]:
    """The rows `own` of the batch of a step, with `joint` as long as the longest of the whole batch needs."""
    window, longest = positions(step // WINDOW)
    parts = [make(int(position)) for position in window[step % WINDOW][own]]
    batch = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
    width = -(-int(longest[step % WINDOW]) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return batch | {"joint": batch["joint"][:, :width]}


def _positions(
    order: "grain.MapDataset", lengths: NDArray[np.int64], source: tuple[int, int], batch_size: int, window: int
) -> Window:
    """The batches of a window of steps: positions in the order of examples [WINDOW, batch_size], sorted by length, the
    batches in random order, and the longest of each batch [WINDOW]."""
    positions = window * WINDOW * batch_size + np.arange(WINDOW * batch_size)
    known = lengths[[int(order[int(position)]) for position in positions]]
    places = np.argsort(known, kind="stable").reshape(WINDOW, batch_size)
    places = places[np.random.default_rng((*source, window)).permutation(WINDOW)]
    return positions[places], known[places].max(axis=1)


def batches(
    examples: Examples, seed: int, stream: int, batch_size: int, start: int, stop: int,
    rows: NDArray[np.int64] | None = None,
) -> Iterator[dict]:  # fmt: skip
    """The batches of steps start … stop − 1, made ahead in a thread. rows: as of `dataset`."""
    import grain

    steps = dataset(examples, seed, stream, batch_size, rows)[start:stop]
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCH)
    return iter(steps.to_iter_dataset(options))
