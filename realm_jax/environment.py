"""The environment of a run: versions, flags, devices and cores, on which its bits depend as well as on its config."""

import os
from importlib import metadata
from typing import Any

import flax
import jax
import numpy as np
import orbax.checkpoint

from realm_jax.host import usable_cores
from realm_jax.version import __version__


def environment() -> dict[str, Any]:
    """Return the versions, flags, devices and cores on which the bits of a run depend."""
    device = jax.devices()[0]
    return {
        "realm_jax": __version__,
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "flax": flax.__version__,
        "orbax": orbax.checkpoint.__version__,
        "numpy": np.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cores": usable_cores(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line `name: before -> now` for each difference between two environments.

    Args:
        before: an earlier environment.
        now: the current one.
    """
    return [f"{key}: {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]
