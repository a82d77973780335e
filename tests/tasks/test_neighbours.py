"""Groups of passages that are alike, and tasks on batches of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import open_config, tiny_config

from realm_jax.errors import UserError
from realm_jax.storage import read_json
from realm_jax.tasks import make_task
from realm_jax.tasks.evidence_contrast import GROUP, group_neighbors, grouped_rows
from realm_jax.train.recipe import check_data


def groups_of(vectors, documents, allowed, most=1000, seed=0):
    return group_neighbors(vectors, documents, allowed, most, np.random.default_rng(seed))


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


def task_of(data, workdir, batch_size=GROUP):
    config = tiny_config(data)
    config.tasks = "evidence_contrast"
    config.evidence_contrast.update(steps=4, batch_size=batch_size)
    return make_task("evidence_contrast", open_config(config, workdir))


def test_a_resumed_task_goes_on_with_the_groups_of_its_start(people, tmp_path):
    """Whatever the vectors are by then."""
    task = task_of(people, tmp_path / "run")
    rows = np.arange(task.run.context.rows)
    vectors = np.random.default_rng(0).normal(size=(2, len(rows), 8)).astype(np.float32)
    first, again = (grouped_rows(task, lambda of_start=of_start: of_start, rows) for of_start in vectors)
    np.testing.assert_array_equal(first, again)
    assert first.tolist() == sum(read_json(tmp_path / "run" / "evidence_contrast" / "neighbours.json")["groups"], [])
    assert len(first) and len(first) % GROUP == 0


def test_a_batch_or_data_without_whole_groups_are_rejected(people, tmp_path):
    with pytest.raises(UserError, match=r"config\.evidence_contrast\.batch_size: passages come in groups of 8"):
        check_data(task_of(people, tmp_path / "a", batch_size=4).run)
    task = task_of(people, tmp_path / "b")
    with pytest.raises(UserError, match="evidence_contrast needs 8 documents to learn from; leave it out"):
        grouped_rows(task, lambda: np.zeros((task.run.context.rows, 8), np.float32), np.arange(GROUP - 1))
