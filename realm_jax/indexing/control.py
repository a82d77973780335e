"""Control signals: what the processes of a trainer tell each other inside of the step, so that all decide alike.

Each puts its signal into a step, the step reduces them, and every process reads the result two steps later. So no host
ever waits for another.
"""

from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class SaveState(IntEnum):
    """State of the newest save. The largest of all processes counts, so that all retry when none is still saving."""

    COMPLETE = 0
    FAILED = 1
    IN_PROGRESS = 2


class ControlSignal(NamedTuple):
    """The announcement of a process in a step; after `reduce_control`, that of all processes together.

    Attributes:
        generation_hash: 28 bits of the digest of the loaded generation's name, −1 for none; reduced: −1 if processes
            differ.
        step: the export step of that generation, −1 for none; reduced: the newest that any process has.
        stop: 1 if the process was asked to stop; reduced: 1 if any was.
        save: a `SaveState`; reduced: the largest.
    """

    generation_hash: int = -1
    step: int = -1
    stop: int = 0
    save: int = SaveState.COMPLETE


def put_control(mesh: Mesh, signal: ControlSignal) -> jax.Array:
    """Put the signal of this process on its devices; the step reduces the signals of all processes.

    Args:
        mesh: mesh of the run.
        signal: signal of this process.

    Returns:
        int32 [devices, 4].
    """
    shape, sharding = (mesh.size, len(signal)), control_sharding(mesh)
    return jax.make_array_from_callback(shape, sharding, lambda part: np.array([signal], np.int32))


def control_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of control signals: a row on every device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names, None))


def reduce_control(control: jax.Array) -> jax.Array:
    """Reduce the signals of all devices, int32 [devices, 4], to one `ControlSignal` as int32 [4]."""
    hashes, steps, stops, saves = control.T  # [devices] each
    same_hash = jnp.where(hashes.min() == hashes.max(), hashes.min(), -1)
    return jnp.stack([same_hash, steps.max(), stops.max(), saves.max()])
