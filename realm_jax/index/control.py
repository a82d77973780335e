"""Control signals: what the processes of a trainer tell each other inside of the step, so that all decide alike.

Each puts its signal into a step, the step reduces them, and every process reads the result two steps later. So no host
ever waits for another.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class ControlSignal(NamedTuple):
    """The control words that processes exchange in every step, and receive two steps later.

    word: for the generation that is loaded, −1 for none; consensus: that of all processes, −1 where they differ.
    step: its export step, −1 for none; consensus: the newest that any of them has.
    stop: 1 if the process was asked to stop; consensus: 1 if any was.
    """

    word: int = -1
    step: int = -1
    stop: int = 0


def put_control(mesh: Mesh, said: ControlSignal) -> jax.Array:
    """The control words of this process, int32 [devices, 3]. The step reduces them.

    Decisions that all processes must take at the same step travel this way, inside the step, so that no host ever waits
    for another.
    """
    places = control_sharding(mesh)
    return jax.make_array_from_callback((mesh.size, len(said)), places, lambda part: np.array([said], np.int32))


def control_sharding(mesh: Mesh) -> NamedSharding:
    """A row on every device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names, None))


def reduce_control(control: jax.Array) -> jax.Array:
    """The reduced control words: a `ControlSignal` as int32 [3]."""
    words, steps, stops = control.T
    return jnp.stack([jnp.where(words.min() == words.max(), words.min(), -1), steps.max(), stops.max()])
