"""Plan the shipped full-scale configs with the TPU compiler, and write `docs/results/plans.json`.

Every entry holds the keys that decide the program; one that came later has its default. A test compares them with the
config, so that a config and its numbers change together; run this again when it fails.
For the time that a plan takes see docs/howto/plan-tpu.md.

    pip install -e '.[tpu]' -c realm_jax/launch/image-lock.txt        with the Python of the image
    python benchmarks/plans.py [CONFIG …] [--slices v5e:8x8 …]
    python benchmarks/plans.py --page                                  only the table of docs/howto/plan-tpu.md
"""

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from realm_jax.config import TASK_SECTIONS, TaskSection, default, flatten, load_config, task_names, validate
from realm_jax.flops import chip
from realm_jax.launch.plan import between
from realm_jax.storage import read_json, write_json_atomic

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "docs" / "results" / "plans.json"
PAGE = ROOT / "docs" / "howto" / "plan-tpu.md"  # the only page with these numbers
SLICES = {  # name of a plan → flags
    "v5e:4x4": ["--spec=launch/v5e.py", "--spec.trainer.slice=v5e:4x4"],
    "v5e:8x8": ["--spec=launch/v5e.py"],
    "v5p:4x4x4": ["--spec=launch/v5p.py"],
    "v6e:8x8": ["--spec=launch/v6e.py"],
    "v5e:8x8 --num-slices=2": ["--spec=launch/v5e.py", "--spec.trainer.slices=2"],
}
WANTED = {  # config: its plans
    "realm_wiki": ["v5e:8x8", "v5p:4x4x4", "v6e:8x8", "v5e:8x8 --num-slices=2"],
    "realm_wiki_scann": ["v5e:8x8"],
    "realm_ccnews": ["v5e:8x8"],
    "ict_wiki": ["v5e:8x8"],
    "qa_wiki": ["v5e:4x4"],
}
# Sections of a config that decide a program on TPUs, with those of tasks.
PROGRAM_SECTIONS = ("data", "model", "encoder", "retrieval", "scann", "optimizer", "mesh")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", default=list(WANTED), metavar="CONFIG", help=f"of {', '.join(WANTED)}")
    parser.add_argument("--slices", nargs="+", choices=SLICES, help="plan only these slices")
    parser.add_argument("--page", action="store_true", help="plan nothing, and write the table")
    args = parser.parse_args()
    for name in args.configs:
        if name not in WANTED:
            parser.error(f"{name}: is none of {', '.join(WANTED)}")
        if unwanted := {*(args.slices or [])} - {*WANTED[name]}:
            parser.error(f"--slices: {name} has no plan for {', '.join(unwanted)}")
    recorded = read_json(GOLDEN) if GOLDEN.is_file() else {}
    if args.page:
        PAGE.write_text(filled_page(PAGE.read_text("utf-8"), recorded), "utf-8")
        return
    planned: dict[str, Any] = {}  # by program, because configs may share one
    for name in args.configs:
        config = load_config(str(ROOT / "configs" / f"{name}.py"), [], default)
        config.data.path, config.init_from = "-", ""
        validate(config)
        task = task_names(config)[-1]
        if name not in recorded or not is_of(recorded[name], config):
            if args.slices:
                sys.exit(f"{name}: its program is not the recorded one; plan all of it, without --slices")
            recorded[name] = {"task": task, "keys": program_keys(config, task), "plans": {}}
        for slices in args.slices or WANTED[name]:
            program = json.dumps([program_keys(config, task), slices], sort_keys=True)
            planned[program] = planned.get(program) or plan(name, slices)
            recorded[name]["plans"][slices] = planned[program]
            write_json_atomic(GOLDEN, recorded)
    PAGE.write_text(filled_page(PAGE.read_text("utf-8"), recorded), "utf-8")


def filled_page(page: str, plans: dict[str, Any]) -> str:
    """Return a page with the table of plans between its lines `<!-- table: plans -->` and `<!-- end -->`.

    Args:
        page: text of the page.
        plans: config → its entry in `docs/results/plans.json`.
    """
    head = ["config", "trainer", "memory per chip", "ms per step", "hours for all steps", "steps between two indexes"]
    rows = [head, ["---"] * len(head)]
    for name, entry in plans.items():
        for slices, plan in entry["plans"].items():
            accelerator = chip(plan["device"])
            assert accelerator is not None and accelerator.memory is not None
            memory = f"{plan['bytes']['peak'] / 2**30:.2f} of {accelerator.memory / 2**30:.2f} GiB"
            step, hours = between(plan["seconds"], 1e3), between(plan["hours"], 1, "", 1)
            fresh = "–"
            if "steps_per_refresh" in plan:
                fresh = f"{between(plan['steps_per_refresh'])}, {plan['builder_devices']} chips"
            rows.append([f"`{name}`", slices.replace(" --num-slices=2", ", two slices"), memory, step, hours, fresh])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return re.sub(r"(?<=<!-- table: plans -->\n).*?(?=<!-- end -->)", f"\n{table}\n\n", page, flags=re.DOTALL)


def program_keys(config: ConfigDict, task: str) -> dict[str, Any]:
    """Return key → value of the keys that decide a task's program on TPUs."""
    others = {f"{name}.{field.name}" for name in TASK_SECTIONS if name != task for field in fields(TaskSection)}
    sections = {*PROGRAM_SECTIONS, *TASK_SECTIONS}
    values = {key: value for key, value in flatten(config.to_dict()).items() if key.partition(".")[0] in sections}
    return {key: value for key, value in values.items() if key not in others and key != "data.path"}


def is_of(entry: dict[str, Any], config: ConfigDict) -> bool:
    """Return True if an entry of `docs/results/plans.json` has the program of a config."""
    task = entry["task"]
    return program_keys(default(), task) | entry["keys"] == program_keys(config, task)


def plan(name: str, slices: str) -> dict[str, Any]:
    """Plan a config for a slice, in its own process, because the compiler keeps its memory."""
    began = time.monotonic()
    command = [sys.executable, "-m", "realm_jax", "launch", "plan", "--json", *SLICES[slices]]
    command.append(f"--config={name}")
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if not ended.stdout:
        sys.exit(f"{name} {slices}: exit code {ended.returncode}")
    planned: dict[str, Any] = json.loads(ended.stdout)
    if "hours" not in planned:
        sys.exit(f"{name} {slices}: does not fit, or has no time; it is not recorded")
    peak = planned["bytes"]["peak"] / 2**30
    print(f"{name} {slices}: {peak:.2f} GiB per chip, planned in {time.monotonic() - began:.0f} s", flush=True)
    return planned


if __name__ == "__main__":
    main()
