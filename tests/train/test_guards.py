"""What watches over a run: each guard sees what it is there for, and nothing else."""

import logging
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler

from realm_jax.train import guards
from realm_jax.train.guards import EXIT_HUNG, TRACED_STEPS, CompileGuard, Profiler, Watchdog
from realm_jax.train.metrics import MetricLogger, StepCost
from realm_jax.train.records import read_lines

HANGS = """
import time
from realm_jax.train.guards import Watchdog
with Watchdog(0.2, 60.0, "realm") as watchdog:
    watchdog.is_warm = True
    time.sleep(60)
"""


def test_a_hang_ends_the_process_and_shows_where_it_was():
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == EXIT_HUNG
    assert "realm: no progress for" in ended.stderr and "line 6 in <module>" in ended.stderr


def test_who_moves_is_left_alone():
    ended = []
    with Watchdog(1.5, 1.5, "realm", ended.append) as watchdog:
        for _ in range(20):
            time.sleep(0.1)
            watchdog.heartbeat()
    with Watchdog(0.0, 0.0, "realm", ended.append):
        time.sleep(0.1)
    assert not ended


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_program_that_compiles_for_long_is_no_hang(monkeypatch, is_warm):
    """Later programs compile too, such as that of the last evaluation."""
    ended = []
    monkeypatch.setattr(guards, "COMPILER", __file__)  # this test stands for the module that compiles
    with Watchdog(0.2, 60.0, "realm", ended.append) as watchdog:
        watchdog.is_warm = is_warm
        time.sleep(1.0)
    assert not ended
    with Watchdog(0.2, 0.4, "realm", ended.append) as watchdog:
        watchdog.is_warm = is_warm
        time.sleep(1.5)
    assert ended == [EXIT_HUNG]


def test_the_module_that_compiles_is_found_in_the_stack():
    """JAX may move it."""
    assert compiler.__file__.endswith(guards.COMPILER) and callable(compiler.compile_or_get_cached)


@pytest.mark.parametrize("steps", [range(3, 12), range(3, 3 + TRACED_STEPS - 1)])
def test_sigusr1_traces_the_next_steps(tmp_path, steps):
    """Also if the end cuts it off."""
    with Profiler(tmp_path) as profiler:
        for step in steps:
            profiler.at(step)
            if step == 3:
                signal.raise_signal(signal.SIGUSR1)
            jnp.ones(3).sum().block_until_ready()
    assert [folder.name for folder in tmp_path.iterdir()] == ["4"]
    assert list(tmp_path.rglob("*.xplane.pb")) and signal.getsignal(signal.SIGUSR1) != profiler._request


def test_another_program_is_told_once(caplog):
    step = jax.jit(lambda x: x + 1)
    guard = CompileGuard(step)
    with caplog.at_level(logging.WARNING):
        for number, size in enumerate((2, 2, 3, 3)):
            step(np.ones(size))
            guard.check(number)
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: its program was compiled again (2 programs now): shape, dtype or sharding of an argument changed"
    ]


def test_records_say_where_the_time_went(tmp_path):
    """Four steps of 20 ms with 60 ms of waiting, by a task that was first started ten seconds ago."""
    values = {"loss": jnp.float32(1.0), "gradient_norm": jnp.float32(1.0)}
    with MetricLogger(tmp_path, "mlm", 0, 4, StepCost(4e6, 2, 1e9), {"first_started": time.time() - 10}) as metrics:
        for step in range(4):
            with metrics.step():
                with metrics.waiting("index"):
                    time.sleep(0.06)
                time.sleep(0.02)
                metrics.log_step(step + 1, values, {})
        metrics.flush()
    last = read_lines(tmp_path / "metrics.jsonl")[-1]
    assert 0.02 <= last["step_seconds"] < 0.5
    assert last["tflops_per_device"] == pytest.approx(2e-6 / last["step_seconds"])
    assert last["mfu"] == pytest.approx(2e6 / last["step_seconds"] / 1e9)
    assert last["wait_index"] > 0.3 and last["wait_data"] == last["wait_checkpoint"] == 0
    assert 4 * last["step_seconds"] / 20 < last["goodput"] < 4 * last["step_seconds"] / 10
