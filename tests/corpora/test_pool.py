"""Worker processes: the order of results, and how they end before all batches are done."""

import subprocess
import sys
import threading
import time

import pytest

from realm_jax.corpora.pool import SENDING_SECONDS, ordered_parallel_map

MANY = 32 << 20  # bytes of a result that takes a while to be sent


def large(number: int) -> bytes:
    return bytes([number % 256]) * MANY


def test_results_come_in_the_order_of_the_batches():
    found = [result[0] for result in ordered_parallel_map(large, range(6), 2)]
    assert found == list(range(6))


def long_after_three(number: int) -> int:
    if number == 3:
        raise ValueError("three is damaged")
    if number > 3:
        time.sleep(600)
    return number


def test_a_fault_does_not_wait_for_the_batches_that_other_workers_are_at():
    began = None
    with pytest.raises(ValueError, match="three is damaged"):
        for _ in ordered_parallel_map(long_after_three, range(100), 3):
            began = began or time.monotonic()  # workers are up
    assert began is not None and time.monotonic() - began < 0.8 * SENDING_SECONDS


def test_a_script_without_its_guard_is_named(tmp_path):
    script = tmp_path / "script.py"
    code = "from realm_jax.corpora.pool import ordered_parallel_map\nprint([*ordered_parallel_map(abs, range(9), 2)])\n"
    script.write_text(code)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True)
    # Python's tracker of semaphores, a process of its own, may have the last word
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("realm_jax.errors.UserError:")]
    assert ended.returncode == 1 and 'put the call under `if __name__ == "__main__":`' in error
    script.write_text(code.replace("print", "if __name__ == '__main__': print"))
    assert subprocess.run([sys.executable, script], capture_output=True, text=True).stdout == f"{[*range(9)]}\n"


@pytest.mark.parametrize("results", [0, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2))])
def test_workers_that_are_sending_a_result_do_not_hold_up_the_end(results):
    """Half a result in the pipe of a worker that was killed made the parent wait for the other half for ever."""
    made = ordered_parallel_map(large, range(100), 2)
    for _ in range(results + 1):
        next(made)
    closing = threading.Thread(target=made.close, daemon=True)
    closing.start()
    closing.join(timeout=60)
    assert not closing.is_alive()
