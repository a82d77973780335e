"""The environment of a run: versions, flags, devices and cores, on which its bits depend as well as on its config."""

import logging
import os
from importlib import metadata, resources
from typing import Any

import flax
import jax
import numpy as np
import orbax.checkpoint

from realm_jax.host import usable_cores
from realm_jax.version import __version__

logger = logging.getLogger(__name__)


IMAGE_LOCK = "image-lock.txt"  # in realm_jax.launch: versions in the container image, with which we plan
COMPILED_BY = ("jax", "jaxlib", "libtpu", "flax")  # these decide which program runs on a TPU


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


def image_versions() -> dict[str, str]:
    """Return the versions of the packages that compile a program, name → version, in the container image."""
    lines = resources.files("realm_jax.launch").joinpath(IMAGE_LOCK).read_text("utf-8").splitlines()
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    return {name: locked[name] for name in COMPILED_BY}


def differences_from_image() -> list[str]:
    """Return a line `name: version of the image -> installed version` for each difference."""
    installed = {}
    for name in COMPILED_BY:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return differences(image_versions(), installed)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line `name: before -> now` for each difference between two environments.

    Args:
        before: an earlier environment.
        now: the current one.
    """
    return [f"{key}: {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]


def warn_of_other_versions() -> None:
    """Warn if a TPU runs with other versions than those of the image, with which memory and times were planned."""
    if jax.devices()[0].platform == "tpu" and (changed := differences_from_image()):
        logger.warning(
            "versions differ from those of the image (realm_jax/launch/image-lock.txt), so memory and times may differ "
            "from the plan: %s", "; ".join(changed),
        )  # fmt: skip
