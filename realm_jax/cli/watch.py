"""`realm watch`: show a live view of a run on the terminal, from its records.

`run_status` of `realm_jax/launch/status.py` collects the status and documents its entries; this file renders it.
"""

import argparse
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from realm_jax.cli.argument_types import nonempty, positive
from realm_jax.cli.output import print_json, stdout, table
from realm_jax.errors import UserError
from realm_jax.eval.format import duration, share
from realm_jax.indexing.heartbeat import HEARTBEAT_SECONDS, Status
from realm_jax.launch.status import (
    DONE,
    NOT_BEGUN,
    RUNNING,
    SILENT,
    STOPPED,
    Heartbeats,
    describe_status,
    poll_jobs,
    run_status,
)  # fmt: skip
from realm_jax.storage import StorageError, open_folder

MAX_CURVE, MIN_CURVE = 40, 6  # characters
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-~=+*#"
GAP = 2  # characters between columns
STYLES = {RUNNING: "green", "alive": "green", SILENT: "bold red", "late": "bold red", STOPPED: "yellow"}
EXAMPLES = """examples:
  realm watch --workdir=runs/wiki
  realm watch --workdir=gs://bucket/runs/realm --every=60
  realm watch --workdir=runs/wiki --json

The command ends with the run, or with Ctrl-C. It never changes the run.
"""
JSON = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm watch`."""
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add("--workdir", type=nonempty, required=True, metavar="DIR", help="run directory: a path, or a URL such as "
        "gs://BUCKET/FOLDER")  # fmt: skip
    add("--every", type=positive, default=int(HEARTBEAT_SECONDS), metavar="SECONDS", help="seconds between "
        f"two updates (default: {HEARTBEAT_SECONDS:g})")  # fmt: skip
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print the view once, after at most ten seconds; the default "
        "if stdout is not a terminal")  # fmt: skip
    how.add_argument("--json", action="store_true", help="print the view once, as a JSON object")


def run(args: argparse.Namespace) -> None:
    """Show the run until it is done or you press Ctrl-C, or once."""
    folder, console = open_folder(args.workdir), stdout()
    if not folder.names():
        raise UserError(f"--workdir={args.workdir}: nothing is there yet; name a run directory")
    heartbeats = Heartbeats(folder, needs_trainer=False)
    if args.json or args.once or not console.is_terminal:
        status = run_status(folder, poll_jobs(heartbeats))
        if args.json:
            print_json(status)
        else:
            console.print(view(status, args.workdir, console))
        return
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while True:
            try:
                status = run_status(folder, heartbeats.poll(time.monotonic()))
            except StorageError as error:  # may be transient
                live.update(Text(f"{error}; trying again"), refresh=True)
            else:
                live.update(view(status, args.workdir, console), refresh=True)
                if status["state"] == DONE:
                    return
            time.sleep(args.every)


# ---- the view


def view(status: JSON, name: str, console: Console) -> RenderableType:
    """Render the status of a run, as wide as the console.

    Args:
        status: result of `run_status`.
        name: path or URL of the run directory.
        console: console that will print it.
    """
    blocks, width = ASCII if console.options.ascii_only else BLOCKS, console.width
    tables = (
        tasks(status["tasks"], width, blocks),
        facts(status, width, blocks),
        generations(status["index"], width),
        jobs(status["jobs"]),
    )
    parts: list[RenderableType] = [headline(status, name)]
    for part in (*tables, *(Text(warning, "yellow") for warning in status["warnings"])):
        if part is not None:
            parts += ["", part]
    return Group(*parts)


def headline(status: JSON, name: str) -> Text:
    """Render the run directory, the state and stage of the run, and its past and remaining time.

    Args:
        status: result of `run_status`.
        name: path or URL of the run directory.
    """
    state, stage, remaining = status["state"], status["stage"], status["seconds_left"]
    now = next((task for task in status["tasks"] if task["name"] == stage), None)
    parts = [state if state in (DONE, NOT_BEGUN) or not stage else f"{state}, {stage}"]
    if status["seconds"]:
        parts.append(f"{duration(round(status['seconds']))} of training")
    if remaining is not None:
        parts.append(f"about {duration(round(remaining))} left")
    elif now is not None and now["seconds_left"] is not None:
        parts.append(f"about {duration(round(now['seconds_left']))} of {stage} left")
    return Text.assemble((name, "bold"), ": ", ("; ".join(parts), STYLES.get(state, "")))


def tasks(task_records: Sequence[JSON], width: int, blocks: str) -> RenderableType | None:
    """Render a line per task: steps, time, loss and its curve.

    Args:
        task_records: `tasks` of the status.
        width: characters of a line.
        blocks: characters of a curve, the lowest first.
    """
    heads, rows = ["task", "", "step", "time", "loss"], []
    for task in task_records:
        step = f"{task['step']:,}" + (f"/{task['steps']:,}" if task["steps"] is not None else "")
        loss = f"{task['loss'][-1][1]:.3g}" if task["loss"] and task["loss"][-1][1] is not None else ""
        taken = duration(round(task["seconds"])) if task["seconds"] is not None else ""
        rows.append([task["name"], task["state"], step, taken, loss])
    if not rows:
        return None
    room = width - sum(max(map(len, column)) + GAP for column in zip(heads, *rows, strict=True))
    if room >= MIN_CURVE:
        heads.append("")
        for row, task in zip(rows, task_records, strict=True):
            row.append(sparkline([value for _, value in task["loss"]], min(room, MAX_CURVE), blocks))
    return table(heads, rows)


def facts(status: JSON, width: int, blocks: str) -> RenderableType | None:
    """Render a line each for recall, utility, goodput, index, newest checkpoint, exact match and decision.

    Args:
        status: result of `run_status`.
        width: characters of a line.
        blocks: characters of a curve, the lowest first.
    """
    rows, room = [], min(MAX_CURVE, width // 4)
    if recall := status["recall"]:
        values = [point["value"] for point in recall["points"]]
        by_task = {point["task"]: point["value"] for point in recall["points"]}
        ends = ", ".join(f"{task} {share(value)}" for task, value in by_task.items())
        rows.append([recall["measure"], f"{sparkline(values, room, blocks)} {share(values[0])} at first; {ends}"])
    if utility := status["retrieval_utility"]:
        curve = sparkline([value for _, value in utility["curve"]], room, blocks)
        rows.append(["utility", f"{curve} {utility['value']:+.3f} nats of retrieval"])
    if status["goodput"] is not None:
        waits = ", ".join(f"{name} {value:.0%}" for name, value in status["waits"].items() if (value or 0) >= 0.005)
        goodput = f"{status['goodput']:.0%} of the time of {status['task']} went into steps"
        rows.append(["goodput", f"{goodput}; waits: {waits}" if waits else goodput])
    if index := status["index"]:
        text = "none is in use yet"
        if index["step"] is not None:
            text = f"of step {index['step']:,} of {index['task']}"
            text += "" if index["age"] is None else f", {index['age']:,} steps old"
            text += "" if index["drift"] is None else f", the last change kept {index['drift']:.0%} of the first ranks"
        rows.append(["index", text])
    if saved := status["checkpoint"]:
        rows.append(["checkpoint", f"{saved['task']}/{saved['step']}"])
    if exact := status["results"].get("exact_match"):
        rows.append(["exact match", ", ".join(f"{name} {share(value)}" for name, value in exact.items())])
    if status["adapted"] is not None:
        rows.append(["decision", "adapted encoder promoted" if status["adapted"] else "base encoder kept"])
    grid = Table.grid(padding=(0, GAP))
    for row in rows:
        grid.add_row(*row)
    return grid if rows else None


def generations(index: JSON | None, width: int) -> RenderableType | None:
    """Render a line per generation of the index builder, with as many columns as fit.

    Args:
        index: `index` of the status; None if there is none.
        width: characters of a line.
    """
    if not index or not index["generations"]:
        return None
    adopted = {line["generation"]: line for line in index["adoptions"]}
    heads = ["generation", "age", "state", "drift", "adopted at", "built in", "waited"]
    rows = []
    for generation in index["generations"]:
        name, age, seconds = generation["generation"], generation["age"], generation.get("seconds")
        adoption = adopted.get(name, {})
        drift, step = adoption.get("drift"), adoption.get("step")
        row = [name, f"{age:,}", generation["state"], "–" if drift is None else f"{drift:.2f}"]
        row += ["–" if step is None else f"{step:,}", duration(seconds), duration(adoption.get("waited"))]
        rows.append(row)
    while sum(max(map(len, column)) + GAP for column in zip(heads, *rows, strict=True)) > width + GAP:
        heads.pop()
        rows = [row[:-1] for row in rows]
    return table(heads, rows)


def jobs(job_records: Sequence[JSON]) -> RenderableType | None:
    """Render a line per job, from `jobs` of the status."""
    rows = []
    for job in job_records:
        status = Status("", stage=job["stage"], step=job["step"], done=job["state"] == "done")
        state = "late: no heartbeat" if job["state"] == "late" else job["state"]
        rows.append([job["name"], state, "" if status.done else describe_status(job["name"], status)])
    return table(["job", "", "at"], rows) if rows else None


def sparkline(values: Sequence[float | None], width: int, blocks: str = BLOCKS) -> str:
    """Draw values as a curve from the lowest to the highest; each character is the mean of a part of them.

    Args:
        values: in order; None is skipped.
        width: characters at most.
        blocks: characters of the curve, the lowest first.
    """
    known = [value for value in values if value is not None]
    if not known:
        return ""
    count = min(width, len(known))
    ends = [len(known) * part // count for part in range(count + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in zip(ends, ends[1:], strict=False)]
    low, high = min(means), max(means)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in means)
