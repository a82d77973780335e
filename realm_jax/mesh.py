"""The device mesh and the sharding of every array on it.

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

MAX_REPLICATED = 0.1  # share of the parameters with a rule that may be replicated nevertheless
SIZES = ("data", "fsdp", "model")  # axes whose sizes the config sets
AXES = ("slices", *SIZES)
ROWS = SIZES  # corpus passages: vectors and tokens are sharded over all devices of a slice
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
    """Make the mesh of axis sizes (data, fsdp, model).

    Each of several TPU slices has its own part of `data` and its own copy of the corpus, so that only gradients and
    control signals travel between slices.

    Args:
        data: size of the axis, or −1 for the remaining devices; only one of the sizes may be −1.
        fsdp: as `data`.
        model: as `data`.
        devices: devices of the mesh; None for all.

    Raises:
        UserError: the sizes do not multiply to the number of devices, or slices do not divide `data`.
    """
    devices = jax.devices() if devices is None else devices
    slices = len({slice_of(device) for device in devices})
    sizes = mesh_sizes(data, fsdp, model, len(devices), slices)
    device_array = _arrange(sizes, devices, slices)  # [data, fsdp, model]
    device_array = device_array.reshape(slices, sizes[0] // slices, *sizes[1:])
    return Mesh(device_array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def slice_of(device: jax.Device) -> int:
    """Return the number of a device's TPU slice; 0 for other devices, which may use the attribute differently."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def mesh_sizes(data: int, fsdp: int, model: int, devices: int, slices: int = 1) -> list[int]:
    """Return the sizes of the axes (data, fsdp, model) without −1; touches no device.

    Args:
        data: size of the axis, or −1 for the remaining devices; only one of the sizes may be −1.
        fsdp: as `data`.
        model: as `data`.
        devices: number of devices.
        slices: number of their slices.

    Raises:
        UserError: the sizes do not multiply to the number of devices, or slices do not divide `data`.
    """
    sizes = [data, fsdp, model]
    for name, size in zip(SIZES, sizes, strict=True):
        if size < 1 and size != -1:
            raise UserError(f"config.mesh.{name}: must be positive, or -1 for the remaining devices, not {size}")
    if sizes.count(-1) > 1:
        raise UserError("config.mesh: only one of data, fsdp, model may be -1; set the others")
    known = int(np.prod([s for s in sizes if s != -1]))
    sizes = [devices // known if s == -1 else s for s in sizes]
    if int(np.prod(sizes)) != devices:
        requested = " x ".join(f"{name}={size}" for name, size in zip(SIZES, (data, fsdp, model), strict=True))
        advice = "set one axis to -1" if -1 not in (data, fsdp, model) else f"choose sizes that divide {devices}"
        raise UserError(f"config.mesh: {requested} does not fit {devices} devices; {advice}")
    if sizes[0] % slices:
        raise UserError(
            f"config.mesh: leaves {sizes[0]} for data, which {slices} slices share; set sizes that leave a multiple of "
            f"{slices}"
        )
    return sizes


def _arrange(sizes: list[int], devices: list[jax.Device], slices: int) -> NDArray:
    """Return devices [data, fsdp, model] so that neighbors along an axis are near to each other in hardware."""
    if devices[0].platform != "tpu":
        return np.asarray(devices).reshape(sizes)
    within = [sizes[0] // slices, *sizes[1:]]
    parts = []
    for number in sorted({slice_of(device) for device in devices}):
        members = [device for device in devices if slice_of(device) == number]
        rings = _rings(members, sizes[1]) if sizes[2] == 1 else None
        if rings is None:
            rings = mesh_utils.create_device_mesh(within, members, allow_split_physical_axes=True)
        parts.append(rings.reshape(within))
    return np.concatenate(parts)  # [data, fsdp, model]


def _rings(devices: list[jax.Device], size: int) -> NDArray | None:
    """Return the devices of a slice in blocks whose chips form a ring, [blocks, size].

    Links connect the two ends of a row only if it is long. So in a row of eight chips of v5e, a collective has half the
    bandwidth that it has in a block of 2 × 4 chips.

    Args:
        devices: of a slice.
        size: number of chips of a block.

    Returns:
        None if the slice has three dimensions, is not complete, or has no such blocks.
    """
    places = {tuple(device.coords[:2]): device for device in devices}
    columns, rows = (1 + max(axis) for axis in zip(*places, strict=True))
    if len(places) != len(devices) or len(places) != columns * rows:
        return None
    shapes = [(width, size // width) for width in range(2, size // 2 + 1) if size % width == 0]
    fitting = [(w, h) for w, h in shapes if columns % w == 0 and rows % h == 0 and h % 2 == 0]
    if not fitting:
        return None
    width, height = min(fitting, key=sum)
    # Up and down the rows without their first chip, and back along the first column.
    ring = [(x, y) for y in range(height) for x in (range(1, width) if y % 2 == 0 else range(width - 1, 0, -1))]
    ring += [(0, y) for y in reversed(range(height))]
    corners = [(x, y) for y in range(0, rows, height) for x in range(0, columns, width)]
    return np.array([[places[left + x, top + y] for x, y in ring] for left, top in corners])


def batch_parts(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of shards of a batch."""
    return _num_shards(mesh, [dict(RULES)["batch"]])


def corpus_devices(mesh: Mesh) -> int:
    """Return the number of devices that share a copy of the corpus."""
    return _num_shards(mesh, ROWS)


def logical_sharding(mesh: Mesh, *names: str | None) -> NamedSharding:
    """Return the sharding of an array whose dimensions have logical names, such as ('batch',) or ('rows', None)."""
    return NamedSharding(mesh, PartitionSpec(*(nn.logical_to_mesh_axes(names, RULES) or ())))


def addressable_parts(mesh: Mesh, name: str, size: int) -> Iterator[tuple[jax.Device, slice]]:
    """Yield each device of this process and its range of a dimension, with start and stop.

    Args:
        mesh: mesh of the run.
        name: logical name of the dimension.
        size: size of the dimension.
    """
    for device, index in logical_sharding(mesh, name).addressable_devices_indices_map((size,)).items():
        assert index is not None, "devices of this process have a part"
        yield device, slice(*index[0].indices(size)[:2])


def row_major(sharding: Sharding, dimensions: int) -> Format:
    """Return the format of an array from which a step gathers rows: the values of a row are adjacent in memory.

    By default a TPU stores narrow integers column by column, and a step would copy all of them into this order.

    Args:
        sharding: sharding of the array.
        dimensions: dimensions of the array.
    """
    return Format(Layout(tuple(range(dimensions))), sharding)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that is the same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def put_with_sharding(array: NDArray, sharding: NamedSharding) -> jax.Array:
    """Put a host array on devices; no process waits for another.

    Args:
        array: the same in every process.
        sharding: sharding of the result.
    """
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def to_host(array: jax.Array | NDArray) -> NDArray:
    """Return a complete array on the host; if other processes hold parts of it, every process has to call this."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable and not array.is_fully_replicated:
        assert isinstance(array.sharding, NamedSharding), "arrays of several processes live on a mesh"
        array = _replicate(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
    return np.asarray(array)


@partial(jax.jit, static_argnums=1)
def _replicate(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    # A jitted function, so that it is compiled only once for each shape and sharding.
    return jax.lax.with_sharding_constraint(array, sharding)


def parameter_shardings(mesh: Mesh, abstract_boxed: Any) -> Any:
    """Return the shardings of parameters by the logical names of their axes.

    An axis whose size the mesh does not divide is not sharded.

    Args:
        mesh: mesh of the run.
        abstract_boxed: a tree of abstract parameters, boxed with logical axis names.

    Raises:
        UserError: for that reason too many parameters would be replicated although a rule shards them.
    """
    specs = nn.get_partition_spec(abstract_boxed)
    with_rule: list[tuple[int, int, str]] = []  # of parameters that a rule shards: bytes, replicated bytes, name

    def parameter_sharding(path: Any, spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        axes = tuple(nn.logical_to_mesh_axes(tuple(spec), RULES) or ())
        sizes = zip(axes, leaf.shape, strict=False)
        fitting = [None if size % _num_shards(mesh, [axis]) else axis for axis, size in sizes]
        if _num_shards(mesh, axes) > 1:
            nbytes = leaf.size * leaf.dtype.itemsize
            name = f"{jax.tree_util.keystr(path, simple=True, separator='.')} {leaf.shape}"
            with_rule.append((nbytes, nbytes if _num_shards(mesh, fitting) == 1 else 0, name))
        return NamedSharding(mesh, PartitionSpec(*fitting))

    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    unboxed = nn.unbox(abstract_boxed)
    shardings = jax.tree_util.tree_map_with_path(parameter_sharding, specs, unboxed, is_leaf=is_spec)
    total_bytes, replicated_bytes = sum(entry[0] for entry in with_rule), sum(entry[1] for entry in with_rule)
    if replicated_bytes > MAX_REPLICATED * total_bytes:
        largest = max(with_rule, key=lambda entry: entry[1])[2]
        share = replicated_bytes / total_bytes
        raise UserError(
            f"config.mesh: fsdp={mesh.shape['fsdp']}, model={mesh.shape['model']} leaves {share:.0%} of the "
            f"parameters replicated on every device, most of all {largest}; choose sizes that divide it"
        )
    return shardings


def _num_shards(mesh: Mesh | AbstractMesh, axes: Sequence[str | tuple[str, ...] | None]) -> int:
    """Return into how many shards these mesh axes divide an array."""
    names = [name for axis in axes for name in ((axis,) if isinstance(axis, str) else (axis or ()))]
    return int(np.prod([mesh.shape[name] for name in names]))
