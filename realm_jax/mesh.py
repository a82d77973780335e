"""The device mesh and where every array lives on it.

Axes `data`, `fsdp`, `model`; their type is always Auto, because Linen's sharding constraints are requests there.
`RULES` is the one table from logical axis names (models, batches, corpus rows) to mesh axes.
"""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from realm_jax.errors import UserError

AXES = ("data", "fsdp", "model")
RULES = (
    ("batch", ("data", "fsdp")),
    ("rows", AXES),  # corpus passages: vectors and tokens are spread over every device
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

    Raises UserError when the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [data, fsdp, model]
    for name, size in zip(AXES, sizes, strict=True):
        if size < 1 and size != -1:
            raise UserError(f"config.mesh.{name}: must be positive, or -1 for the devices that are left, not {size}")
    if sizes.count(-1) > 1:
        raise UserError("config.mesh: only one of data, fsdp, model may be -1")
    known = int(np.prod([s for s in sizes if s != -1]))
    sizes = [len(devices) // known if s == -1 else s for s in sizes]
    if int(np.prod(sizes)) != len(devices):
        wanted = " x ".join(f"{name}={size}" for name, size in zip(AXES, (data, fsdp, model), strict=True))
        raise UserError(f"config.mesh: {wanted} does not fit {len(devices)} devices; set one axis to -1")
    return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3)


def logical_sharding(mesh: Mesh, *names: str | None) -> NamedSharding:
    """Sharding of an array whose dimensions have these logical names, e.g. ('batch',) or ('rows', None)."""
    return NamedSharding(mesh, PartitionSpec(*(nn.logical_to_mesh_axes(names, RULES) or ())))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def parameter_shardings(mesh: Mesh, abstract_boxed: Any) -> Any:
    """Shardings of a tree of abstract parameters that still carry their logical axis names.

    An axis whose size the mesh does not divide stays whole.
    """
    specs = nn.get_partition_spec(abstract_boxed)

    def place(spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        axes = nn.logical_to_mesh_axes(tuple(spec), RULES) or ()
        fitting = [axis if _divides(mesh, axis, size) else None for axis, size in zip(axes, leaf.shape, strict=False)]
        return NamedSharding(mesh, PartitionSpec(*fitting))

    return jax.tree.map(place, specs, nn.unbox(abstract_boxed), is_leaf=lambda x: isinstance(x, PartitionSpec))


def _divides(mesh: Mesh, axis: str | tuple[str, ...] | None, size: int) -> bool:
    names = (axis,) if isinstance(axis, str) else (axis or ())
    return size % int(np.prod([mesh.shape[name] for name in names])) == 0
