"""Worker processes: the order of results, and that a fault in the middle of it ends at once."""

import threading

import pytest

from realm_jax.corpus.pool import map_in_order

MANY = 32 << 20  # bytes of a result that takes a while to be sent


def large(number: int) -> bytes:
    return bytes([number % 256]) * MANY


def test_results_come_in_the_order_of_the_batches():
    found = [result[0] for result in map_in_order(large, range(6), 2)]
    assert found == list(range(6))


@pytest.mark.parametrize("results", range(3))
def test_workers_that_are_sending_a_result_do_not_hold_up_the_end(results):
    """Half a result in the pipe of a worker that was killed made the parent wait for the other half for ever."""
    made = map_in_order(large, range(100), 2)
    for _ in range(results + 1):
        next(made)
    closing = threading.Thread(target=made.close, daemon=True)
    closing.start()
    closing.join(timeout=60)
    assert not closing.is_alive()
