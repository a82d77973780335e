"""Killed and resumed: the SHA-256 of all parameters is that of a run that never was disturbed.

Every task, every way to an index. Here the power goes off between two steps; `test_loop.py`, `test_processes.py` and
`test_soak.py` kill real processes.
"""

import hashlib
import logging
from contextlib import nullcontext

import jax
import pytest
from runs import builder, cut_off, metrics, open_tiny, train
from tiny_run import prepare_people

pytestmark = pytest.mark.usefixtures("quick_steps")


SCANN = [("realm", mode, "scann", ahead) for mode in ("inline", "async") for ahead in (0, 1, 3)]
TASKS = [(task, "inline", "device", 1) for task in ("mlm", "ict", "realm", "qa")]
QUICK = ("realm", "async", "device", 1)
WAYS = [pytest.param(*way, marks=[] if way == QUICK else pytest.mark.slow) for way in (*TASKS, QUICK, *SCANN)]


def sha256(params) -> str:
    """Of the bits of all parameters, in the order of the tree."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(leaf.tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def spelled_out(tmp_path_factory):
    """People whose names recur, which is what the warm-up hides."""
    return prepare_people(tmp_path_factory.mktemp("people"), house="of {}")


@pytest.mark.parametrize("task, mode, backend, ahead", WAYS)
def test_parameters_after_a_kill_have_the_same_sha256(
    people, tmp_path, monkeypatch, caplog, request, task, mode, backend, ahead
):
    """Cut off before step 8 of 8 and resumed from the checkpoint of step 6, searches under way with it."""
    caplog.set_level(logging.INFO, "realm_jax")
    if backend == "scann":
        pytest.importorskip("scann", reason="ScaNN runs on Linux alone")
    data = request.getfixturevalue("spelled_out") if task == "mlm" else people
    checksums, records = [], []
    for name, cuts in (("straight", []), ("killed", [7])):
        run = open_tiny(data, tmp_path / name, task=task, retrieval={"backend": backend}, ahead=ahead, mode=mode)
        with builder(run) if mode == "async" else nullcontext():
            cut_off(monkeypatch, lambda run=run: train(run), *cuts)
            checksums.append(sha256(train(run)))
        records.append(metrics(run))
        print(f"{task} {mode} {backend} {name}: {checksums[-1]}")
    assert f"{task}: resuming from step 6" in caplog.text
    assert checksums[0] == checksums[1] and records[0] == records[1]
