"""`realm launch`: start a run on this machine, on TPU VMs or on GKE; see it, stop it, remove it.

One description (`realm_jax/launch/spec.py`) serves every target; a target is a class with the methods of `Target`, and
`status` needs none: it reads the work directory. Everything is checked before anything is created, and `--dry-run`
prints all that would be sent.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any, Protocol

from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from realm_jax.config import default, task_names, validate
from realm_jax.errors import UserError
from realm_jax.jobs.flags import add_config_argument, load_config
from realm_jax.launch import spec as specs
from realm_jax.launch.jobset import JobSets
from realm_jax.launch.local import Local
from realm_jax.launch.queued_resources import QueuedResources
from realm_jax.launch.spec import Launch, describe
from realm_jax.launch.status import RunState, look, one_line, told
from realm_jax.storage import open_folder

ACTIONS = ("start", "list", "logs", "status", "stop", "delete")
LATE = 1  # exit code of `status`
EXAMPLES = """examples:
  realm launch --target=local --config=configs/wiki_small.py --config.data.path=data --workdir=runs/wiki \\
      --spec.trainer.processes=2
  realm launch --target=jobset --spec=launch/v5e.py --config=configs/realm_wiki.py \\
      --config.data.path=gs://bucket/wiki --workdir=gs://bucket/runs/realm --spec.image=IMAGE --dry-run
  realm launch status --workdir=gs://bucket/runs/realm
  realm launch logs --target=jobset --spec=launch/v5e.py --workdir=gs://bucket/runs/realm --job=builder --follow
  realm launch stop --target=jobset --spec=launch/v5e.py --workdir=gs://bucket/runs/realm

The same command starts what was stopped; training goes on from its newest checkpoint. From an empty project to a pod:
docs/launch.md. `status` exits with 1 when a job that should live gave no sign of life for two beats (ten seconds).
"""


class Target(Protocol):
    """Where a run can be started."""

    def plan(self) -> str: ...
    def start(self) -> int | None: ...
    def items(self) -> list[dict[str, str]]: ...
    def logs(self, job: str, follow: bool) -> int: ...
    def stop(self) -> None: ...
    def delete(self) -> None: ...


TARGETS: dict[str, Callable[[Launch], Target]] = {
    "local": Local,
    "queued_resources": QueuedResources,
    "jobset": JobSets,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm launch`."""
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("action", nargs="?", choices=ACTIONS, default="start", help="(default: %(default)s)")
    add("--target", choices=TARGETS, help="where")
    add_config_argument(parser, "the paper's sizes")
    add(
        "--spec",
        metavar="FILE",
        help="Python file with get_spec() (default: the built-in one); its keys are set with --spec.section.key=value",
    )
    add("--workdir", required=True, metavar="DIR", help="folder of the run: a path, or gs://BUCKET/FOLDER for a cloud")
    add("--dry-run", action="store_true", help="print all that would be sent, and do nothing")
    add("--job", default="trainer", metavar="NAME", help="logs: of this job (default: %(default)s)")
    add("--follow", action="store_true", help="logs: go on until Ctrl-C")
    add("--json", action="store_true", help="list, status: print JSON")


def run(args: argparse.Namespace) -> int:
    """Do what is asked; see EXAMPLES for exit codes."""
    _check(args)
    if args.action == "status":
        return status(args)
    target = TARGETS[args.target](_launch(args))
    if args.action == "start":
        if args.dry_run:
            print(target.plan(), end="")
            return 0
        return target.start() or 0
    if args.action == "list":
        show_list(target.items(), args.json)
    if args.action == "logs":
        return target.logs(args.job, args.follow)
    if args.action in ("stop", "delete"):
        getattr(target, args.action)()
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise UserError for flags that are missing, or would do nothing."""
    if args.action != "status" and not args.target:
        raise UserError(f"--target: name one of {', '.join(TARGETS)}")
    for flag, actions in {"dry_run": ("start",), "follow": ("logs",), "json": ("list", "status")}.items():
        if getattr(args, flag) and args.action not in actions:
            raise UserError(f"--{flag.replace('_', '-')}: goes with {' and '.join(actions)}")


def _launch(args: argparse.Namespace) -> Launch:
    """The checked description. Raises UserError for a config or a spec that cannot work."""
    spec = load_config(args.spec, args.spec_overrides, specs.default, kind="spec")
    config = load_config(args.config, args.overrides, default)
    if args.action == "start":
        config.data.path = config.data.path or "-"
        validate(config)
    if args.action == "start" and "realm" not in task_names(config):
        spec.builder.update(processes=0, slices=0)  # no other task follows an index
    mode = _beside(config, args.overrides, spec, args.target == "local") if args.action == "start" else []
    return describe(spec, args.config or "", [*args.overrides, *mode], args.workdir)


def _beside(config: ConfigDict, overrides: list[str], spec: ConfigDict, local: bool) -> list[str]:
    """What a builder beside the trainer means in the config. Raises UserError where an override says otherwise."""
    beside = spec.builder.processes if local else spec.builder.slices
    if not beside or config.refresh.mode == "async":
        return []
    given = next((override for override in overrides if override.startswith("--config.refresh.mode=")), None)
    if given:
        raise UserError(
            f"{given}: the spec has index builders; leave it out, or set spec.builder.processes and slices to 0"
        )
    return ["--config.refresh.mode=async"]


# ---- showing


def show_list(found: list[dict[str, str]], as_json: bool) -> None:
    """What is there, a line each."""
    if as_json:
        print(json.dumps(found))
        return
    table = Table(box=None, pad_edge=False)
    for head in ("name", "state", "detail"):
        table.add_column(head, no_wrap=head != "detail")
    for one in found:
        table.add_row(one["name"], one["state"], one["detail"])
    Console(highlight=False).print(table if found else "nothing is there")


def status(args: argparse.Namespace) -> int:
    """Look at the work directory; 1 when a job is late."""
    folder = open_folder(args.workdir)
    if not folder.names():
        raise UserError(f"--workdir={args.workdir}: nothing is there yet; start the run with `realm launch`")
    state = look(folder)
    if args.json:
        print(json.dumps(record(state)))
    else:
        print(one_line(state.progress, []))
        for job in state.jobs:
            sign = {None: "done", False: "alive", True: "LATE: no sign of life for two beats"}[job.late]
            used = f", index of step {job.status.index}" if job.status.index >= 0 else ""
            print(f"{job.name}: {sign}; {told(job.status)}{used}")
        if state.generation >= 0:
            print(f"newest index: of step {state.generation}")
    return LATE if state.late else 0


def record(state: RunState) -> dict[str, Any]:
    """A state as JSON: {"task", "checkpoint", "metrics", "generation", "jobs": [{"name", "stage", "step", "late"}]}."""
    jobs = [
        {"name": job.name, "stage": job.status.stage, "step": job.status.step, "index": job.status.index}
        | {"done": job.status.done, "late": job.late}
        for job in state.jobs
    ]
    saved = state.progress.checkpoint
    return {
        "task": state.progress.task,
        "checkpoint": None if saved is None else {"task": saved[0], "step": saved[1]},
        "metrics": state.progress.metrics,
        "generation": state.generation,
        "jobs": jobs,
    }
