"""`realm doctor`: print versions, devices, memory and disk, and say which packages are missing. It changes nothing."""

import argparse
import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

import realm_jax
from realm_jax.cli.output import print_json
from realm_jax.errors import USER_ERROR
from realm_jax.host import usable_cores

DEVELOPMENT = {"browser", "docs", "notebooks", "parity", "test"}  # extras that users do not need
SETTINGS = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_ENABLE_X64", "JAX_DISABLE_JIT", "JAX_DEBUG_NANS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = (
        "exit code: 0 if runs can start here, 2 if something required is missing\n\n"
        "examples:\n  realm doctor\n  realm doctor --json > environment.json"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; return 2 if no run can start here."""
    report = examine()
    if args.json:
        print_json(report)
    else:
        for name, value in report.items():
            lines = [f"{key}  {text}" for key, text in value.items()] if isinstance(value, dict) else value
            text = lines if isinstance(lines, str) else "\n".ljust(16).join(lines)
            print(f"{name:13}  {text or '–'}")
    return USER_ERROR if report["problems"] else 0


def examine() -> dict[str, Any]:
    """Describe this environment; starts JAX's backend to list its devices."""
    packages, absent, problems = dict[str, str](), dict[str, str](), list[str]()
    extras, requirements = set[str](), list[Requirement]()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # it may run from a folder
        extras = {*(importlib.metadata.metadata("realm-jax").get_all("Provides-Extra") or ())} - DEVELOPMENT
        requirements = [Requirement(line) for line in importlib.metadata.requires("realm-jax") or []]
    for requirement in requirements:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        packages[requirement.name] = version or "MISSING"
        if version is None:
            problems.append(f"{requirement.name} is not installed; run `pip install -e .` in your clone of realm_jax")
        elif not requirement.specifier.contains(version, prereleases=True):
            packages[requirement.name] += f", outside of the tested {requirement.specifier}"
    for extra in sorted(extras):
        wanted = [r.name for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
        missing = [name for name in wanted if _version(name) is None]
        absent |= {f"pip install -e '.[{extra}]'": ", ".join(missing)} if missing else {}
    try:
        import jax

        first = jax.devices()[0]
        devices = f"{jax.device_count()} x {first.device_kind} ({first.platform})"
    except Exception as error:  # any reason why JAX does not start is to be reported
        devices = "none"
        problems.append(" ".join(f"JAX does not start: {type(error).__name__}: {error}".split()))
    memory, folder = psutil.virtual_memory(), Path.cwd()
    return {
        "realm_jax": f"{realm_jax.__version__} ({Path(realm_jax.__file__).parent})",
        "python": f"{platform.python_version()} ({sys.executable})",
        "devices": devices,
        "cores": str(usable_cores()),
        "memory": f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}",
        "disk": f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB free in {folder}",
        "settings": {name: os.environ[name] for name in SETTINGS if os.environ.get(name)},
        "packages": packages,
        "not installed": absent,
        "problems": problems,
    }


def _version(name: str) -> str | None:
    """Return the installed version of a package; None if it is missing."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None
