"""Meshes of eight emulated devices, and which axis of a parameter goes where."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny import tiny_realm
from tiny_run import tiny_config

import realm_jax.run
from realm_jax.assemble import abstract_run
from realm_jax.errors import UserError
from realm_jax.mesh import (
    _arrange,
    batch_parts,
    corpus_devices,
    logical_sharding,
    make_mesh,
    parameter_shardings,
    replicated,
)


@pytest.mark.parametrize(
    "sizes, wanted", [((-1, 1, 1), (8, 1, 1)), ((2, -1, 2), (2, 2, 2)), ((1, 1, -1), (1, 1, 8)), ((2, 4, 1), (2, 4, 1))]
)
def test_one_axis_takes_the_devices_that_are_left(sizes, wanted):
    mesh = make_mesh(*sizes)
    assert mesh.axis_names == ("slices", "data", "fsdp", "model")
    assert mesh.devices.shape == (1, *wanted)


@pytest.mark.parametrize(
    "sizes, named",
    [
        ((-1, -1, 1), "config.mesh: only one of data, fsdp, model may be -1; set the others"),
        ((3, 1, 1), "config.mesh: data=3 x fsdp=1 x model=1 does not fit 8 devices"),
        ((-1, 3, 1), "config.mesh: data=-1 x fsdp=3 x model=1 does not fit 8 devices"),
        ((-1, 16, 1), "does not fit 8 devices"),
        ((-1, 0, 1), "config.mesh.fsdp: must be positive, or -1"),
        ((-4, -2, 1), "config.mesh.data: must be positive, or -1"),
    ],
)
def test_sizes_that_cannot_be_are_named(sizes, named):
    with pytest.raises(UserError, match=named):
        make_mesh(*sizes)


def test_batches_go_over_data_and_fsdp_and_corpus_rows_over_everything():
    mesh = make_mesh(2, 2, 2)
    assert logical_sharding(mesh, "batch").spec == PartitionSpec(("slices", "data", "fsdp"))
    assert logical_sharding(mesh, "rows", None).spec == PartitionSpec(("data", "fsdp", "model"), None)
    batch = jax.device_put(np.arange(8), logical_sharding(mesh, "batch"))
    assert {shard.data.shape for shard in batch.addressable_shards} == {(2,)}
    rows = jax.device_put(np.zeros((16, 3)), logical_sharding(mesh, "rows", None))
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 3)}
    assert jax.device_put(np.arange(3), replicated(mesh)).sharding.is_fully_replicated


def parameter_specs(mesh) -> dict[str, tuple]:
    boxed = jax.eval_shape(tiny_realm().init_boxed, jax.random.key(0))
    shardings = parameter_shardings(mesh, boxed)
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(x.spec) for path, x in leaves}


def test_parameters_are_spread_by_their_logical_axes():
    specs = parameter_specs(make_mesh(2, 2, 2))
    reader = {name.removeprefix("reader."): spec for name, spec in specs.items() if name.startswith("reader.")}
    assert reader["bert.words.embedding"] == ("model", "fsdp")
    assert reader["bert.positions.embedding"] == (None, "fsdp")
    assert reader["bert.layer_0.query.kernel"] == ("fsdp", "model")
    assert reader["bert.layer_0.attention_output.kernel"] == ("model", "fsdp")
    assert reader["bert.layer_1.intermediate.kernel"] == ("fsdp", "model")
    assert reader["bert.layer_1.intermediate.bias"] == ("model",)
    assert reader["bert.layer_1.output.kernel"] == ("model", "fsdp")
    assert reader["bert.layer_1.output_norm.scale"] == (None,)
    assert reader["mlm_bias"] == ("model",)
    assert reader["span_score.kernel"] == (None, None)
    assert specs["query_embedder.projection.kernel"] == ("fsdp", None)


def test_an_axis_that_the_mesh_does_not_divide_stays_whole():
    """Fifty tokens over four devices; the other axis of the same table is still spread."""
    specs = parameter_specs(make_mesh(1, 2, 4))
    assert specs["reader.bert.words.embedding"] == (None, "fsdp")
    assert specs["reader.mlm_bias"] == (None,)
    assert specs["reader.bert.layer_0.query.kernel"] == ("fsdp", "model")


def test_too_much_that_stays_whole_is_an_error():
    """Fifty tokens over four devices, and nothing else to spread the table by."""
    with pytest.raises(
        UserError, match=r"fsdp=1, model=4 leaves 16% of .* replicated on every device, .*bert.words.embedding"
    ):
        parameter_specs(make_mesh(2, 1, 4))


class Chip:
    """A device of a TPU slice."""

    platform, device_kind = "tpu", "TPU v5 lite"

    def __init__(self, number, slice_index):
        self.id, self.slice_index, self.process_index = number, slice_index, number // 4
        self.coords, self.core_on_chip = (number % 4 % 2, number % 4 // 2, 0), 0


def test_slices_share_the_data_axis():
    chips = [Chip(number, slice_index=number // 4) for number in range(8)]
    assert [[chip.slice_index for chip in row] for row in _arrange([4, 2, 1], chips, 2)[:, :, 0]] == [[0, 0]] * 2 + [
        [1, 1]
    ] * 2
    mesh = make_mesh(4, 2, 1, chips)
    assert mesh.devices.shape == (2, 2, 2, 1) and (batch_parts(mesh), corpus_devices(mesh)) == (8, 4)
    assert [{chip.slice_index for chip in part.flat} for part in mesh.devices] == [{0}, {1}]
    with pytest.raises(UserError, match="config.mesh: leaves 1 for data, which 2 slices share"):
        make_mesh(1, 8, 1, chips)


@pytest.mark.parametrize(("columns", "rows", "size"), [(8, 8, 8), (4, 4, 4), (4, 2, 8), (4, 4, 16), (8, 16, 32)])
def test_chips_that_share_parameters_form_a_ring_of_neighbors(columns, rows, size):
    chips = [Chip(number, 0) for number in range(columns * rows)]
    for number, chip in enumerate(chips):
        chip.coords = (number % columns, number // columns, 0)
    mesh = make_mesh(-1, size, 1, chips)
    assert {*mesh.devices.flat} == {*chips}
    for group in mesh.devices.reshape(-1, size):
        for chip, neighbor in zip(group, np.roll(group, -1), strict=True):
            assert sum(abs(a - b) for a, b in zip(chip.coords, neighbor.coords, strict=True)) == 1


def test_parameters_for_gpus_are_made_on_their_host_and_are_the_same(monkeypatch):
    run = abstract_run(tiny_config(Path("data")), Path("run"), 16, 300, jax.devices()[:4])
    here = run.initial_params()
    used = []
    made = realm_jax.run._init_program(run.model, None)
    monkeypatch.setattr(realm_jax.run, "cpu_of_gpu_mesh", lambda mesh: jax.devices()[7])
    monkeypatch.setattr(
        realm_jax.run, "_init_program", lambda model, mesh: lambda key: used.append(made(key)) or used[0]
    )
    by_host = run.initial_params()
    assert {leaf.devices() == {jax.devices()[7]} for leaf in jax.tree.leaves(used)} == {True}
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding and np.array_equal(a, b), here, by_host))
