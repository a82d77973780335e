"""`realm doctor`: report installed packages, devices, and what will be slow or fail here.

It changes nothing and starts no training. The version ranges are those of the installed package (`setup.cfg`), read
back through its metadata, so that they are written down once. To go on, read `realm_jax/cli/quickstart.py`.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from rich.console import Console

import realm_jax
from realm_jax.cli.output import print_json
from realm_jax.errors import USER_ERROR
from realm_jax.host import LARGE_PAGES, multiplies_bfloat16, usable_cores, waits_for_large_pages

GIB = 2**30
LOW_MEMORY = 4 * GIB  # rules of thumb for small runs, with room for compiling and for a few checkpoints;
LOW_DISK = 2 * GIB  # what a large run needs follows from its corpus and its towers

# Packages that are used where they are there, with what is not possible without them.
OPTIONAL = {
    "gcsfs": "buckets of Google Cloud (gs://…)",
    "s3fs": "buckets of S3 (s3://…)",
    "apache-beam": "preparing on a cluster (`realm prepare --beam=…`)",
    "datasets": "data sets of the Hugging Face hub (hf:NAME)",
    "spacy": "salient spans by its pipelines (--spans=spacy:NAME)",
    "lxml": "documents that are web pages",
    "markdown-it-py": "documents in Markdown",
    "docutils": "documents in reStructuredText",
    "mammoth": "documents of Word",
    "mwparserfromhell": "dumps of Wikipedia",
    "pypdfium2": "documents in PDF",
    "datasketch": "news without near-duplicates",
    "chardet": "texts in other encodings than UTF-8",
    "backports.zstd": "files that end in .zst",
    "pyarrow": "Parquet and Arrow files; vectors.parquet of `realm adapt`",
    "sentence-transformers": "opening the folders that `realm adapt` and `realm weights export` write",
    "faiss-cpu": "index.faiss of `realm adapt`",
    "libtpu": "`realm launch plan`, which compiles for TPUs",
}

# Where the driver of an accelerator shows, and the extra that brings JAX's side of it.
ACCELERATOR_FILES = {"cuda": ("/dev/nvidia0", "/dev/nvidiactl"), "tpu": ("/dev/accel0", "/dev/vfio/0")}

# Switches of JAX that cost speed or change results, each with what it does.
SWITCHES = {
    "jax_enable_x64": "float64 is on (JAX_ENABLE_X64): slower, and numbers differ from the documented ones",
    "jax_disable_jit": "compilation is off (JAX_DISABLE_JIT): for debugging only",
    "jax_debug_nans": "NaN checks are on (JAX_DEBUG_NANS): every step waits for its results",
    "jax_check_tracer_leaks": "leak checks are on (JAX_CHECK_TRACER_LEAKS): compilation is slow",
}

# A section of the report: {"realm_jax", "location", "python", "packages": [{"name", "wanted", "installed", "fits"}],
# "optional": {name: version}, "devices", "machine" (bytes), "settings", "warnings", "problems", "usable"}.
Section = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    parser.epilog = (
        "exit code: 0 if runs can start here, 2 if something required is missing\n\n"
        "examples:\n  realm doctor\n  realm doctor --json > environment.json"
    )


def run(args: argparse.Namespace) -> int:
    """Print what was found; exit code 2 when something stops every run."""
    report = examine()
    if args.json:
        print_json(report)
    else:
        show(report, Console(soft_wrap=True, highlight=False))
    return 0 if report["usable"] else USER_ERROR


def examine() -> Section:
    """Inspects this process's environment; initialises JAX's backend to list its devices."""
    report: Section = {
        "realm_jax": realm_jax.__version__,
        "location": str(Path(realm_jax.__file__).parent),
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": required_packages(),
        "optional": {name: _version(name) for name in OPTIONAL},
        "devices": find_devices(),
        "machine": inspect_machine(),
        "settings": relevant_settings(),
    }
    found = list(problems(report))
    return report | {"warnings": list(warnings(report)), "problems": found, "usable": not found}


# ---- looking


def required_packages() -> list[Section]:
    """The requirements that hold on this Python; empty where `realm-jax` runs from a folder without being installed."""
    try:
        lines = importlib.metadata.requires("realm-jax") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [package for line in lines if (package := check(Requirement(line)))]


def check(requirement: Requirement) -> Section | None:
    """Compares a requirement with what is installed; None if its marker is for another Python or an extra."""
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        return None
    installed = _version(requirement.name)
    fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
    wanted = str(requirement.specifier)
    return {"name": requirement.name, "wanted": wanted, "installed": installed, "fits": fits}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_devices() -> Section:
    """JAX's devices, or why it does not start; starts its backend. memory: of one device, where it is known."""
    try:
        import jax

        devices = jax.devices()
        memory = (devices[0].memory_stats() or {}).get("bytes_limit")
    except Exception as error:  # reporting whatever stops JAX is the purpose of this command
        reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        return {"platform": "none", "count": 0, "kind": "", "memory": None, "error": reason}
    first = devices[0]
    found = {"platform": first.platform, "count": len(devices), "kind": first.device_kind}
    return found | {"memory": memory, "error": None}


def inspect_machine() -> Section:
    """Cores, memory and disk, within the limits of this process and its control group."""
    memory, limit, folder = psutil.virtual_memory(), _container_memory_limit(), Path.cwd()
    return {
        "cores": usable_cores(),
        "memory_total": min(memory.total, limit),
        "memory_free": min(memory.available, limit),
        "disk_free": shutil.disk_usage(folder).free,
        "folder": str(folder),
    }


def _container_memory_limit() -> int:
    """Bytes that this control group may use, or a number above any machine's where it has no limit."""
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no control groups, or the word "max"
        return sys.maxsize


def relevant_settings() -> dict[str, str]:
    """Settings that change speed or results, where they are on: environment variables and JAX's switches."""
    settings = {name: os.environ[name] for name in ("JAX_PLATFORMS", "XLA_FLAGS") if os.environ.get(name)}
    jax = sys.modules.get("jax")
    if jax is None:  # it could not be imported; `find_devices` reports this
        return settings
    return settings | {name: "True" for name in SWITCHES if getattr(jax.config, name)}


# ---- judging


def problems(report: Section) -> Iterable[str]:
    """Problems that stop every run, each with a remedy."""
    missing = [package["name"] for package in report["packages"] if package["installed"] is None]
    if missing:
        yield f"not installed: {', '.join(missing)}; run `pip install -e .` in the folder of the source"
    if error := report["devices"]["error"]:
        wish = report["settings"].get("JAX_PLATFORMS")
        yield f"JAX does not start{f' with JAX_PLATFORMS={wish}' if wish else ''}: {error}"


def warnings(report: Section) -> Iterable[str]:
    """What makes runs slow, unusual or untested here."""
    yield from _package_warnings(report)
    yield from _device_warnings(report)
    machine = report["machine"]
    if machine["cores"] == 1:
        yield "one core: input, compilation and training share it"
    if machine["memory_free"] < LOW_MEMORY:
        yield f"only {_gib(machine['memory_free'])} of memory free: large batches or corpora may end the process"
    if machine["disk_free"] < LOW_DISK:
        yield f"only {_gib(machine['disk_free'])} of disk free in {machine['folder']}: keep --workdir on another disk"
    yield from (SWITCHES[name] for name in report["settings"] if name in SWITCHES)


def _package_warnings(report: Section) -> Iterable[str]:
    if not report["packages"]:
        yield "realm-jax runs from a folder and is not installed: versions were not checked; run `pip install -e .`"
    for package in report["packages"]:
        if package["installed"] and not package["fits"]:
            yield "{name} {installed} is outside the tested range {wanted}".format(**package)


def _device_warnings(report: Section) -> Iterable[str]:
    devices = report["devices"]
    if devices["platform"] != "cpu":
        return
    yield "no accelerator: fine for the quickstart and small corpora, too slow for BERT-base towers"
    if multiplies_bfloat16():
        yield "this CPU multiplies bfloat16 faster than float32: set --config.model.dtype=bfloat16 (realm adapt does)"
    else:
        yield "this CPU has no instructions for bfloat16, which is slower than float32: keep float32"
    if waits_for_large_pages():
        yield f"memory comes in pages of 4 KB: with GLIBC_TUNABLES={LARGE_PAGES} in the environment training is faster"
    for extra, files in ACCELERATOR_FILES.items():
        if any(os.path.exists(file) for file in files):
            hidden = "cpu" in report["settings"].get("JAX_PLATFORMS", "")
            advice = "JAX_PLATFORMS hides it" if hidden else f"run `pip install -e '.[{extra}]'`"
            yield f"a {extra.upper()} device is there, but JAX runs on the CPU: {advice}"
    if devices["count"] > 1:
        cores = report["machine"]["cores"]
        yield f"{devices['count']} emulated devices share {cores} cores (XLA_FLAGS or JAX_NUM_CPU_DEVICES): for tests"


# ---- telling


def show(report: Section, console: Console) -> None:
    """Prints the report for people: aligned lines, without colour or wrapping where there is no terminal."""
    machine, devices = report["machine"], report["devices"]
    memory = f", {_gib(devices['memory'])} each" if devices["memory"] else ""
    facts = {
        "realm_jax": "{realm_jax} ({location})".format(**report),
        "python": report["python"],
        "devices": "{count} x {kind} ({platform}".format(**devices) + f"{memory})" if devices["count"] else "none",
        "cores": machine["cores"],
        "memory": f"{_gib(machine['memory_free'])} free of {_gib(machine['memory_total'])}",
        "disk": f"{_gib(machine['disk_free'])} free in {machine['folder']}",
    }
    _table(console, "here", facts | report["settings"])
    _table(console, "required", {package["name"]: _state(package) for package in report["packages"]})
    optional = {name: version or f"absent: no {OPTIONAL[name]}" for name, version in report["optional"].items()}
    _table(console, "optional", optional)
    for title, style, name in (("slow", "yellow", "warnings"), ("problems", "bold red", "problems")):
        if report[name]:
            console.print(f"\n{title}", style="bold")
        for line in report[name]:
            console.print(f"  - {line}", style=style, markup=False)
    verdict, style = ("can", "bold green") if report["usable"] else ("cannot", "bold red")
    console.print(f"\nruns {verdict} start here", style=style)


def _table(console: Console, title: str, rows: dict[str, Any]) -> None:
    if rows:
        console.print(title if title == "here" else f"\n{title}", style="bold")
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        console.print(f"  {name:<{width}}  {value}", markup=False)


def _state(package: Section) -> str:
    if package["installed"] is None:
        return f"MISSING, wanted {package['wanted']}"
    return package["installed"] if package["fits"] else "{installed}, outside {wanted}".format(**package)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
