"""Multi-process runs: initialization, collective decisions, and work that only process 0 does.

Every process runs every device program, in the same order, with its own part of the data. If one process leaves a
program out, the others wait forever. So all processes must decide alike whether a program runs: by the config, by a
control signal in the step (`indexing/control.py`), by process 0's value (`broadcast_from_process_0`), or by a vote
(`allgather_flags`).
"""

import argparse
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.distributed import global_state
from numpy.typing import NDArray

from realm_jax.errors import TransientFault, UserError

logger = logging.getLogger(__name__)

AUTO = "auto"


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--processes`, `--process` and `--coordinator`."""
    group = parser.add_argument_group("several processes (the same command in each of them)")
    group.add_argument("--processes", default="1", metavar="N", help="number of processes; 'auto' asks the cluster: "
        "TPU VMs, GKE, Slurm (default: 1)")  # fmt: skip
    group.add_argument("--process", type=int, default=0, metavar="I", help="index of this process, from 0 (default: "
        "0)")  # fmt: skip
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0: its machine and a free port")


def connect_processes(args: argparse.Namespace) -> int:
    """Connect to the other processes and return the number of this one; touches no device.

    Raises UserError for invalid flags, and TransientFault if the processes cannot connect.
    """
    distributed: tuple[Any, ...] = ()
    if args.processes != AUTO:
        if not args.processes.isdecimal() or int(args.processes) < 1:
            raise UserError(f"--processes={args.processes}: is not a number of processes; give one, or 'auto'")
        count = int(args.processes)
        check_process(args.process, count)
        if count == 1:
            return 0
        if not args.coordinator:
            raise UserError("--coordinator: name a machine and a free port that every process reaches, host:port")
        distributed = args.coordinator, count, args.process
    try:
        jax.distributed.initialize(*distributed)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise TransientFault(f"the processes cannot connect: {reason}; check --coordinator and --processes") from None
    number = global_state.process_id  # `jax.process_index()` opens the devices
    if number:  # the console of process 0 is enough, but every process keeps its complete log
        for handler in logging.getLogger("realm_jax").handlers:
            handler.setLevel(logging.WARNING)
    return number


class WorkerSlice(NamedTuple):
    """This process among those that share work through files, without a connection.

    Attributes:
        process: its number, from 0.
        processes: number of processes.
    """

    process: int = 0
    processes: int = 1

    def work_order(self, count: int) -> list[int]:
        """Return the numbers of `count` work items in the order in which this process should do them.

        Its own slice comes first, then the items of others from the last to the first, so that a process that is alive
        and one that helps it meet in the middle.
        """
        local_items = list(range(self.process, count, self.processes))
        return local_items + [item for item in reversed(range(count)) if item % self.processes != self.process]


def check_process(process: int, count: int) -> None:
    """Check the number of a process.

    Args:
        process: value of --process.
        count: value of --processes.

    Raises:
        UserError: there is no such process.
    """
    if not 0 <= process < count:
        raise UserError(f"--process={process}: must be at least 0 and below --processes={count}")


def is_process_0() -> bool:
    """Return True if this process writes files that are written once: records, configs, reports."""
    return jax.process_index() == 0


def run_on_process_0(function: Callable[[], int | None]) -> int:
    """Call a function on process 0 and return its result on every process, 0 for None.

    If it raises on process 0, the other processes raise TransientFault.
    """
    value, error = 0, None
    if is_process_0():
        try:
            value = function() or 0
        except Exception as raised:
            error = raised
    failed = broadcast_from_process_0(int(error is not None))
    if error is not None:
        raise error
    if failed:
        raise TransientFault("process 0 failed, so this one stops too; see its log")
    return broadcast_from_process_0(value)


def allgather_flags(*flags: bool) -> NDArray[np.bool_]:
    """Gather flags from all processes: [processes, flags], on every process. Collective: all processes must call it.

    Use it for events that one process may see before another: a signal, a file, a timeout.
    """
    local_flags = np.array([flags])  # [1, flags]
    if jax.process_count() == 1:
        return local_flags
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(local_flags[0], tiled=False)).reshape(-1, len(flags))


def any_process(flag: bool) -> bool:
    """Return True if a flag is set on any process. Collective: all processes must call it."""
    return bool(allgather_flags(flag).any())


def same_on_all_processes(value: int) -> bool:
    """Return True if all processes have the same value, below 2**31. Collective: all processes must call it."""
    return bool(allgather_flags(broadcast_from_process_0(value) == value).all())


def broadcast_from_process_0(value: int) -> int:
    """Return process 0's value on every process. Collective: all processes must call it."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
