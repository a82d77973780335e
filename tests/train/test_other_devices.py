"""A run that goes on with fewer devices: sums may round differently, but everything else is as on eight."""

import shutil

import jax
import numpy as np
import pytest
from runs import Cut, assert_same, cut_at, final_params, open_inline, train
from tiny_run import PEOPLE, write_lines

from realm_jax.cli.prepare import prepare
from realm_jax.tasks.realm import RealmTask
from realm_jax.train.records import read_lines

STEPS, CUT = 6, 5  # the run is cut off before step 6, and goes on from the checkpoint of step 4
WAYS = [("padded", 0.0), ("padded", 0.1), ("packed", 0.0), ("packed", 0.1)]


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """Passages of very different lengths, so that packing pays and gives every device other sequences."""
    folder = tmp_path_factory.mktemp("stories")
    houses = [f"The house {number} in {name[:3]}ville stands." for number, name in enumerate(PEOPLE)]
    passages = [
        {"id": f"p{n}", "title": name, "text": " ".join([f"{name} was born in {1800 + n}.", *houses[: n % 5]])}
        for n, name in enumerate(PEOPLE)
    ]
    prepare(write_lines(folder / "passages.jsonl", passages), folder / "data", vocabulary_size=300, workers=1)
    return folder / "data"


def distance(params, others) -> float:
    """Norm of the difference relative to the norm of the first."""
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True)
    differences = [(np.square(a).sum(), np.square(a.astype(np.float64) - b).sum()) for a, b in leaves]
    return float(np.sqrt(sum(d for _, d in differences) / sum(n for n, _ in differences)))


def unplaced(run) -> list[float]:
    """Share of the tokens of each step that had no slot; other tokens on other devices would be no rounding."""
    return [line["unplaced"] for line in read_lines(run.workdir / "realm" / "metrics.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("way, dropout", WAYS)
def test_fewer_devices_change_only_the_rounding_of_sums(stories, tmp_path, monkeypatch, way, dropout):
    if way == "padded":
        monkeypatch.setattr(RealmTask, "packing", lambda self: None)
    changes = {"realm__steps": STEPS, "realm__batch_size": 16, "model__dropout": dropout, "data__document_length": 96}
    straight = open_inline(stories, tmp_path / "straight", 8, **changes)
    train(straight)
    expected = final_params(straight)
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_at(patch, CUT)
        train(open_inline(stories, tmp_path / "cut", 8, **changes))
    for devices in (8, 4, 1):
        workdir = shutil.copytree(tmp_path / "cut", tmp_path / f"on {devices}")
        run = open_inline(stories, workdir, devices, **changes)
        train(run)
        found = distance(expected, final_params(run))
        print(f"{way}, dropout {dropout}, 8 → {devices} devices: parameters differ by {found:.1e}")
        if devices == 8:
            assert_same(final_params(run), expected)
        assert found < 1e-6
        assert unplaced(run) == unplaced(straight)
