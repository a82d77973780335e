"""The device mesh and where every array lives on it.

Axes `slices`, `data`, `fsdp`, `model`; their type is always Auto, because Linen's sharding constraints are requests
there. `RULES` is the one table from logical axis names (models, batches, corpus rows) to mesh axes.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from realm_jax.errors import UserError

MAX_REPLICATED = 0.1  # share of what the rules spread that may stay whole on every device
SIZES = ("data", "fsdp", "model")  # what a mesh is made of
AXES = ("slices", *SIZES)
ROWS = SIZES  # corpus passages: vectors and tokens are spread over every device of a slice
RULES = (
    ("batch", ("slices", "data", "fsdp")),
    ("rows", ROWS),
    ("vocab", "model"),
    ("heads", "model"),
    ("mlp", "model"),
    ("embed", "fsdp"),
    ("embed_out", None),
    ("projection", None),
    ("span", None),
    ("norm", None),
)


def make_mesh(data: int = -1, fsdp: int = 1, model: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh of axis sizes (data, fsdp, model); one of them may be −1 and takes the devices that are left.

    Of several TPU slices each gets its own part of `data`, and a corpus of its own, so that only gradients, and words
    that control the run, travel between them. Raises UserError when the sizes do not multiply to the number of devices,
    or slices do not divide `data`.
    """
    devices = jax.devices() if devices is None else devices
    slices = len({slice_of(device) for device in devices})
    sizes = mesh_sizes(data, fsdp, model, len(devices), slices)
    arranged = _arrange(sizes, devices, slices).reshape(slices, sizes[0] // slices, *sizes[1:])
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def slice_of(device: jax.Device) -> int:
    """The number of its TPU slice; 0 for other devices, whatever they call one."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def mesh_sizes(data: int, fsdp: int, model: int, devices: int, slices: int = 1) -> list[int]:
    """Sizes of the axes on so many devices of so many slices. Raises UserError as `make_mesh`; touches no device."""
    sizes = [data, fsdp, model]
    for name, size in zip(SIZES, sizes, strict=True):
        if size < 1 and size != -1:
            raise UserError(f"config.mesh.{name}: must be positive, or -1 for the devices that are left, not {size}")
    if sizes.count(-1) > 1:
        raise UserError("config.mesh: only one of data, fsdp, model may be -1")
    known = int(np.prod([s for s in sizes if s != -1]))
    sizes = [devices // known if s == -1 else s for s in sizes]
    if int(np.prod(sizes)) != devices:
        wanted = " x ".join(f"{name}={size}" for name, size in zip(SIZES, (data, fsdp, model), strict=True))
        advice = "set one axis to -1" if -1 not in (data, fsdp, model) else f"choose sizes that divide {devices}"
        raise UserError(f"config.mesh: {wanted} does not fit {devices} devices; {advice}")
    if sizes[0] % slices:
        raise UserError(
            f"config.mesh: leaves {sizes[0]} for data, which {slices} slices share; it has to be a multiple of them"
        )
    return sizes


def _arrange(sizes: list[int], devices: list[jax.Device], slices: int) -> NDArray:
    """Devices in the shape of a mesh, neighbours along its axes near to each other in hardware."""
    if slices > 1:
        within = [sizes[0] // slices, *sizes[1:]]
        return mesh_utils.create_hybrid_device_mesh(within, [slices, 1, 1], devices, allow_split_physical_axes=True)
    if devices[0].platform == "tpu":
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return np.asarray(devices).reshape(sizes)


def batch_parts(mesh: Mesh | AbstractMesh) -> int:
    """Into how many parts a batch is cut."""
    return _ways(mesh, [dict(RULES)["batch"]])


def corpus_devices(mesh: Mesh) -> int:
    """How many devices share a copy of the corpus."""
    return _ways(mesh, ROWS)


def logical_sharding(mesh: Mesh, *names: str | None) -> NamedSharding:
    """Sharding of an array whose dimensions have these logical names, e.g. ('batch',) or ('rows', None)."""
    return NamedSharding(mesh, PartitionSpec(*(nn.logical_to_mesh_axes(names, RULES) or ())))


def addressable_parts(mesh: Mesh, name: str, size: int) -> Iterator[tuple[jax.Device, slice]]:
    """Each device of this process, and what it holds of a dimension of `size` with a logical name: start and stop."""
    for device, index in logical_sharding(mesh, name).addressable_devices_indices_map((size,)).items():
        assert index is not None, "devices of this process have a part"
        yield device, slice(*index[0].indices(size)[:2])


def row_major(sharding: Sharding, dimensions: int) -> Format:
    """`sharding` for an array from which a step gathers rows: what is of a row lies together. A TPU would put columns
    of narrow integers one after another, and copy all of them into this order in every step."""
    return Format(Layout(tuple(range(dimensions))), sharding)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def put_with_sharding(array: NDArray, sharding: NamedSharding) -> jax.Array:
    """A host array that every process has, spread as `sharding` says; no process waits for another."""
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def to_host(array: jax.Array | NDArray) -> NDArray:
    """A whole array on the host, also where other processes hold parts of it; then every process has to call this."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
        assert isinstance(array.sharding, NamedSharding), "arrays of several processes live on a mesh"
        array = _gathered(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
    return np.asarray(array)


@partial(jax.jit, static_argnums=1)
def _gathered(array: jax.Array, everywhere: NamedSharding) -> jax.Array:
    """The same array on every device; compiled once for each shape and place."""
    return jax.lax.with_sharding_constraint(array, everywhere)


def parameter_shardings(mesh: Mesh, abstract_boxed: Any) -> Any:
    """Shardings of a tree of abstract parameters that still carry their logical axis names.

    An axis whose size the mesh does not divide stays whole. Raises UserError when for that reason too many parameters
    would be whole on every device although a rule spreads them.
    """
    specs = nn.get_partition_spec(abstract_boxed)
    spread: list[tuple[int, int, str]] = []  # of what a rule spreads: bytes, bytes that stay whole, name

    def place(path: Any, spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        axes = tuple(nn.logical_to_mesh_axes(tuple(spec), RULES) or ())
        fitting = [None if size % _ways(mesh, [axis]) else axis for axis, size in zip(axes, leaf.shape, strict=False)]
        if _ways(mesh, axes) > 1:
            size = leaf.size * leaf.dtype.itemsize
            where = f"{jax.tree_util.keystr(path, simple=True, separator='.')} {leaf.shape}"
            spread.append((size, size if _ways(mesh, fitting) == 1 else 0, where))
        return NamedSharding(mesh, PartitionSpec(*fitting))

    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    found = jax.tree_util.tree_map_with_path(place, specs, nn.unbox(abstract_boxed), is_leaf=is_spec)
    total, whole = sum(entry[0] for entry in spread), sum(entry[1] for entry in spread)
    if whole > MAX_REPLICATED * total:
        largest = max(spread, key=lambda entry: entry[1])[2]
        raise UserError(
            f"config.mesh: fsdp={mesh.shape['fsdp']}, model={mesh.shape['model']} leaves {whole / total:.0%} of the "
            f"parameters whole on every device, most of all {largest}; choose sizes that divide it"
        )
    return found


def _ways(mesh: Mesh | AbstractMesh, axes: Sequence[str | tuple[str, ...] | None]) -> int:
    """Into how many parts these mesh axes cut an array."""
    names = [name for axis in axes for name in ((axis,) if isinstance(axis, str) else (axis or ()))]
    return int(np.prod([mesh.shape[name] for name in names]))
