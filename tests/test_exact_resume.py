"""Killed and resumed: the SHA-256 of all parameters is that of a run that never was disturbed.

Every task, every way to an index. Here the power goes off between two steps; `test_loop.py`, `test_processes.py` and
`test_soak.py` kill real processes.
"""

import hashlib
import logging
from contextlib import nullcontext
from typing import NamedTuple

import jax
import pytest
from runs import Cut, builder, cut_at, metrics, open_tiny, train
from tiny_run import prepare_people

pytestmark = pytest.mark.usefixtures("quick_steps")


class Way(NamedTuple):
    """A task and how it retrieves."""

    task: str
    mode: str = "inline"
    backend: str = "device"
    ahead: int = 1

    @property
    def name(self) -> str:
        return "-".join(map(str, self if self.backend == "scann" else self[:3]))


SCANN = [Way("realm", mode, "scann", ahead) for mode in ("inline", "async") for ahead in (0, 1, 3)]
WAYS = [Way("mlm"), Way("ict"), Way("realm"), Way("realm", "async"), Way("qa"), *SCANN]
QUICK = Way("realm", "async")


def sha256(params) -> str:
    """Of the bits of all parameters, in the order of the tree."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(leaf.tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare_people(tmp_path_factory.mktemp("people"), house="of {}")


@pytest.mark.parametrize(
    "way", [pytest.param(way, id=way.name, marks=[] if way == QUICK else pytest.mark.slow) for way in WAYS]
)
def test_parameters_after_a_kill_have_the_same_sha256(data, tmp_path, monkeypatch, caplog, way):
    """Cut off before step 8 of 8 and resumed from the checkpoint of step 6, searches under way with it."""
    caplog.set_level(logging.INFO, "realm_jax")
    if way.backend == "scann":
        pytest.importorskip("scann", reason="ScaNN runs on Linux alone")
    found, records = [], []
    for name, cut in (("straight", None), ("killed", 7)):
        retrieval, ahead = {"backend": way.backend}, way.ahead
        run = open_tiny(data, tmp_path / name, task=way.task, retrieval=retrieval, ahead=ahead, mode=way.mode)
        with builder(run) if way.mode == "async" else nullcontext(), monkeypatch.context() as patch:
            if cut is not None:
                cut_at(patch, cut)
                with pytest.raises(Cut):
                    train(run)
            found.append(sha256(train(run)))
        records.append(metrics(run))
        print(f"{way.name} {name}: {found[-1]}")
    assert f"{way.task}: resuming from step 6" in caplog.text
    assert found[0] == found[1] and records[0] == records[1]
