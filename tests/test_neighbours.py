"""Groups of passages that are alike, and the inverse cloze task on batches of them."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import open_config, tiny_config

from realm_jax.config import validate
from realm_jax.data.neighbours import GROUP, groups_of_neighbours
from realm_jax.errors import UserError
from realm_jax.storage import read_json
from realm_jax.tasks import make_task
from realm_jax.tasks.groups import grouped_rows
from realm_jax.train.recipe import train
from realm_jax.train.workdir import recorded_config


def groups_of(vectors, documents, allowed, most=1000, seed=0):
    return groups_of_neighbours(vectors, documents, allowed, most, np.random.default_rng(seed))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 90), documents=st.integers(1, 40), most=st.integers(0, 9), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_row_is_in_one_group_and_a_document_once_in_each(rows, documents, most, seed):
    rng = np.random.default_rng(seed)
    owners = [f"d{number}" for number in rng.integers(documents, size=rows)]
    vectors, allowed = rng.normal(size=(rows, 4)).astype(np.float32), rng.random(rows) < 0.8
    found = groups_of(vectors, owners, allowed, most, seed)
    assert found.shape == (len(found), GROUP) and len(found) <= most
    assert len(np.unique(found)) == found.size and allowed[found].all()
    assert all(len({owners[row] for row in group}) == GROUP for group in found)
    left = [row for row in np.flatnonzero(allowed) if row not in found]
    assert len(found) == most or len({owners[row] for row in left}) < GROUP


def test_a_group_is_a_row_and_its_nearest_of_other_documents():
    """Rows on a circle, two of each document side by side: a group is an arc, in which each document has one row."""
    angles = np.arange(64) * 2 * np.pi / 64
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    (group,) = groups_of(vectors, [f"d{row // 2}" for row in range(64)], np.ones(64, bool), most=1)
    steps = (group - group[0] + 32) % 64 - 32
    assert np.abs(steps).max() <= GROUP + 1 and len({row // 2 for row in group}) == GROUP


def config_of(data, **changes):
    config = tiny_config(data)
    config.tasks = "ict"
    config.ict.update({"negatives": "neighbours", "batch_size": 8} | changes)
    return config


def test_both_towers_learn_from_batches_of_neighbours(people, tmp_path):
    run = open_config(config_of(people), tmp_path / "run")
    before = jax.tree.map(np.asarray, run.initial_params())
    after = train(run)
    for tower in run.model.embedder_names:
        moved = jax.tree.map(lambda a, b: float(np.abs(a - np.asarray(b)).max()), before[tower], after[tower])
        assert max(jax.tree.leaves(moved)) > 0
    groups = read_json(tmp_path / "run" / "ict" / "neighbours.json")["groups"]
    assert groups and all(len(group) == GROUP for group in groups)


def test_a_resumed_task_goes_on_with_the_groups_of_its_start(people, tmp_path):
    """Whatever the vectors are by then; and sentences stay in their passages."""
    run = open_config(config_of(people), tmp_path / "run")
    task = make_task("ict", run)
    rows, width = run.context.rows, run.model.vector_size
    vectors = np.random.default_rng(0).normal(size=(2, rows, width)).astype(np.float32)
    first, again = (task.examples({}, lambda one=one: one) for one in vectors)
    assert first.group == again.group == GROUP and first.total == again.total
    for number in range(first.total):
        one, other = (part.make(number, np.random.default_rng(number)) for part in (first, again))
        np.testing.assert_array_equal(one["document"], other["document"])
        assert one["document_length"] == run.corpus.lengths[one["own_row"]]


def test_a_trained_run_is_opened_whatever_the_number_of_devices(people, tmp_path):
    """Where questions are asked on one device, batches have another size than in training."""
    train(open_config(config_of(people), tmp_path / "run"))
    config = recorded_config(tmp_path / "run")
    config.ict.batch_size = 1
    validate(config)


def test_what_gives_no_group_is_refused(people, tmp_path):
    with pytest.raises(UserError, match=r"config\.ict\.batch_size: passages come in groups of 8"):
        make_task("ict", open_config(config_of(people, batch_size=4), tmp_path / "a")).check_data()
    task = make_task("ict", open_config(config_of(people), tmp_path / "b"))
    with pytest.raises(UserError, match="ict needs 8 documents to learn from; leave it out"):
        grouped_rows(task, lambda: np.zeros((task.run.context.rows, 8), np.float32), np.arange(GROUP - 1))
