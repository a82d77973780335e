"""`realm ablate`: train variants that differ in one setting, with several seeds, and tabulate their results.

A row is a run like any other, `WORKDIR/seed-<n>/<row>`. Its config is the base with the row's changes. It starts from
the final parameters of another row, or as the base does (from fresh parameters, or `init_from`). So finished rows are
skipped and interrupted ones resume. The rows are in the config file; the table is `realm_jax/eval/ablations.py`.
"""

import argparse
import dataclasses
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict
from rich.table import Table
from rich.text import Text

from realm_jax.cache import cache_programs
from realm_jax.cli.argument_types import local_path
from realm_jax.cli.output import stdout
from realm_jax.cli.quickstart import make_data
from realm_jax.config import (
    add_config_argument,
    default,
    load_config,
    task_names,
    training_keys,
    validate,
    with_overrides,
)
from realm_jax.config import check as check_key
from realm_jax.data.encyclopedia import EncyclopediaSettings
from realm_jax.errors import UserError
from realm_jax.eval.ablations import HEADS, Row, SeedResult, cells, html, markdown
from realm_jax.storage import exclusive_lock, make_folder, write_atomic, write_json_atomic
from realm_jax.tasks.answering import ANSWERING_TASKS
from realm_jax.train.recipe import open_run, preemptible, report_status, train
from realm_jax.train.records import read_lines
from realm_jax.train.results import hardware
from realm_jax.train.workdir import recorded_config

logger = logging.getLogger(__name__)

EXAMPLES = """examples:
  realm ablate --config=ablations --workdir=runs/ablations
  realm ablate --config=ablations --workdir=runs/ablations --config.seeds=0 --rows=realm,baseline
  realm ablate --config=ablations --config.base.data.path=data/wiki --workdir=runs/wiki

The table is written to ablations.md, ablations.html and ablations.json of WORKDIR after every row. Commands for
different seeds may share WORKDIR at the same time: `taskset --cpu-list=0 realm ablate … --config.seeds=0 &` …
"""
ROW = ("title", "tasks", "start", "reader", "changes", "paper")  # keys of a row
SET_BY_ROWS = ("tasks", "seed", "init_from", "reader_from")  # keys of the config that follow from a row's other keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm ablate`."""
    parser.epilog = EXAMPLES
    add_config_argument(parser, "ablations, which has the rows of the paper's table 2 and more")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="directory of the runs, created or resumed")
    parser.add_argument(
        "--rows", metavar="NAME,NAME", help="rows to train, with the rows that they start from (default: all rows)"
    )


def run(args: argparse.Namespace) -> None:
    """Train the rows that are not finished. Raises Preempted after SIGTERM, once the state is saved."""
    config = load_config(args.config or "ablations", args.overrides, like=_config_template)
    if any(override.startswith("--config.base.tasks=") for override in args.overrides):
        raise UserError("--config.base.tasks: every row sets its tasks; set --config.rows.NAME.tasks")
    check(config)
    rows = rows_to_train(config, args.rows)
    workdir = local_path(args.workdir, "--workdir=")
    make_folder(workdir, "--workdir")
    if not config.base.data.path:
        with exclusive_lock(workdir, wait=True):
            make_data(workdir, seed=config.base.seed, **config.encyclopedia)
        config.base.data.path = str(workdir / "data")
    cache_programs()
    with preemptible():
        for seed in config.seeds:
            train_seed(config, rows, seed, workdir)
    show(table_rows(config, workdir, warn=True), workdir)


def _config_template(config: ConfigDict) -> ConfigDict:
    """Return the keys of an ablation config with their defaults; `check` validates its rows."""
    rows = config.get("rows", ConfigDict())
    encyclopedia = config.get("encyclopedia", ConfigDict())
    return ConfigDict({"seeds": (0,), "encyclopedia": encyclopedia, "base": default(), "table": ("",), "rows": rows})


def check(config: ConfigDict) -> None:
    """Raise UserError, with the key's name, for rows that cannot be trained."""
    are_seeds = all(isinstance(seed, int) and seed >= 0 for seed in config.seeds)
    check_key(bool(config.seeds) and are_seeds, "seeds", "takes at least one whole number, such as (0, 1, 2)")
    check_key(bool(config.table), "table", "name at least one row")
    known = {field.name for field in dataclasses.fields(EncyclopediaSettings)} - {"seed"}
    settings = {*config.encyclopedia}
    check_key(settings <= known, "encyclopedia", f"takes {', '.join(sorted(known))}")
    has_data = bool(config.base.data.path) or "entities" in settings
    check_key(has_data, "encyclopedia", "has no entities; set them, or name a prepared folder in base.data.path")
    for name in config.table:
        check_key(name in config.rows, "table", f"there is no row {name!r}; choose among {', '.join(config.rows)}")
    for name, row in config.rows.items():
        key = f"rows.{name}"
        check_key(isinstance(row, ConfigDict) and {*row} == {*ROW}, key, f"must have the keys {', '.join(ROW)}")
        for other in ("start", "reader"):
            check_key(row[other] in ("", *config.rows), f"{key}.{other}", f"there is no row {row[other]!r}")
        check_key(not row.reader or bool(row.start), f"{key}.reader", "needs a start, the row whose encoders it uses")
        check_key(len(row.paper) in (0, 2), f"{key}.paper", "takes exact match and recall@5, or nothing")
        is_tuple = isinstance(row.changes, tuple) and all(isinstance(change, str) for change in row.changes)
        check_key(is_tuple, f"{key}.changes", "takes a tuple, such as ('realm.masking=uniform',) with its comma")
        for changed in (change.partition("=")[0] for change in row.changes):
            reason = f"{changed} is computed from tasks, start and seeds of the rows; leave it out"
            check_key(changed not in SET_BY_ROWS, f"{key}.changes", reason)
        trial = row_config(config, name, config.seeds[0], Path())
        trial.data.path = trial.data.path or "data"
        validate(trial)
        ends_well = name not in config.table or task_names(trial)[-1] in ANSWERING_TASKS
        reason = "a row of the table has to end with qa or closed_book; take it out of config.table"
        check_key(ends_well, f"{key}.tasks", reason)
    with_starting_rows(config, config.rows)


def rows_to_train(config: ConfigDict, names: str | None) -> list[str]:
    """List the rows to train, each after the rows that it starts from.

    Args:
        config: the ablation config.
        names: rows to train, joined by commas; None for those of the table.

    Raises:
        UserError: there is no such row, or a row starts from itself.
    """
    chosen = [name.strip() for name in names.split(",")] if names else config.table
    for name in chosen:
        if name not in config.rows:
            raise UserError(f"--rows: there is no row {name!r}; choose among {', '.join(config.rows)}")
    return with_starting_rows(config, chosen)


def with_starting_rows(config: ConfigDict, names: Iterable[str]) -> list[str]:
    """List rows, each after the rows that it starts from.

    Args:
        config: the ablation config.
        names: rows of it.

    Raises:
        UserError: a row starts from itself.
    """
    ordered: list[str] = []

    def add(name: str, above: tuple[str, ...]) -> None:
        check_key(name not in above, f"rows.{name}.start", f"it would start from itself, via {', '.join(above)}")
        for other in (config.rows[name].start, config.rows[name].reader):
            if other:
                add(other, (*above, name))
        if name not in ordered:
            ordered.append(name)

    for name in names:
        add(name, ())
    return ordered


def row_config(config: ConfigDict, name: str, seed: int, seed_folder: Path) -> ConfigDict:
    """Return the config of the run of a row.

    Args:
        config: the ablation config.
        name: the row.
        seed: the run's seed.
        seed_folder: the parent of the run directories of that seed.
    """
    row = config.rows[name]
    run_config = with_overrides(ConfigDict(config.base.to_dict()), [f"--config.{change}" for change in row.changes])
    run_config.update(tasks=row.tasks, seed=seed)
    for key, other in (("init_from", row.start), ("reader_from", row.reader)):
        if other:
            run_config[key] = str(seed_folder / other)
    return run_config


def train_seed(config: ConfigDict, rows: Sequence[str], seed: int, workdir: Path) -> None:
    """Train the unfinished rows under a seed. Other commands may train other seeds at the same time.

    Args:
        config: the ablation config.
        rows: rows in the order of `rows_to_train`.
        seed: the seed.
        workdir: directory of all seeds.

    Raises:
        UserError: the prepared folder lacks questions.
        Preempted: after SIGTERM, once the state is saved.
    """
    seed_folder = workdir / f"seed-{seed}"
    make_folder(seed_folder, "--workdir")
    with exclusive_lock(seed_folder):
        for name in rows:
            logger.info("seed %d: %s", seed, config.rows[name].title or name)
            opened = open_run(row_config(config, name, seed, seed_folder), seed_folder / name)
            for split, use in (("dev", "rows are evaluated on"), ("train", "readers are trained on")):
                if not opened.sources.answered(split):
                    raise UserError(
                        f"{config.base.data.path}: no {split} questions with answers, which {use}; prepare some"
                    )
            with exclusive_lock(opened.workdir), report_status(opened) as status:
                train(opened, status)
            jax.clear_caches()  # the next row needs other programs
            write_table(config, workdir)


def seed_result(folder: Path, origins: Iterable[Path] = ()) -> SeedResult | None:
    """Return the results of a row's run; None until it is done.

    Args:
        folder: its run directory.
        origins: run directories of the rows that it starts from, whose training time counts too.
    """
    lines = next(filter(None, (read_lines(folder / task / "evaluations.jsonl") for task in ANSWERING_TASKS)), [])
    if not lines or "exact_match" not in lines[-1] or "seconds" not in lines[-1]:
        return None
    seconds = 0.0
    for task in (task for run in (folder, *origins) for task in run.glob("*/")):
        recorded = read_lines(task / "metrics.jsonl") + read_lines(task / "evaluations.jsonl")
        seconds += max((line.get("seconds", 0.0) for line in recorded), default=0.0)
    return SeedResult(lines[-1]["exact_match"], lines[0].get("answer_recall@5"), lines[0].get("recall@5"), seconds)


def table_rows(config: ConfigDict, workdir: Path, warn: bool = False) -> list[Row]:
    """Return the rows of the table, with the results of all seeds that were trained with this config.

    Args:
        config: the ablation config.
        workdir: directory of all seeds.
        warn: log a warning for each run that was trained with another config.
    """
    seeds = sorted(int(folder.name[5:]) for folder in workdir.glob("seed-*") if folder.name[5:].isdecimal())
    rows = []
    for name in config.table:
        results, parts = {}, with_starting_rows(config, [name])
        for seed in seeds:
            seed_folder = workdir / f"seed-{seed}"
            result = seed_result(seed_folder / name, [seed_folder / origin for origin in parts[:-1]])
            if result is None:
                continue
            differences = []
            for part in parts:
                if not (seed_folder / part / "config.json").is_file():  # the run was removed
                    continue
                recorded = training_keys(recorded_config(seed_folder / part))
                now = training_keys(row_config(config, part, seed, seed_folder))
                for key in sorted({*recorded, *now}):
                    if recorded.get(key) != now.get(key):
                        differences.append(f"{part} has {key}={recorded.get(key)!r}, the config {now.get(key)!r}")
            if not differences:
                results[seed] = result
            elif warn:
                logger.warning("skipping %s in the table: %s", seed_folder / name, differences[0])
        rows.append(Row(config.rows[name].title or name, tuple(config.rows[name].paper), results))
    return rows


def write_table(config: ConfigDict, workdir: Path) -> None:
    """Write the table of the finished rows to ablations.md, ablations.html and ablations.json; nothing without any.

    Args:
        config: the ablation config.
        workdir: directory of all seeds.
    """
    rows = table_rows(config, workdir)
    if not any(row.seeds for row in rows):
        return
    data = config.base.data.path
    if Path(data) == workdir / "data":
        settings = ", ".join(f"{key}={value}" for key, value in config.encyclopedia.items())
        data = f"The encyclopedia with {settings}"
    note = f"{data}; {hardware()}."
    write_atomic(workdir / "ablations.md", markdown(rows, note))
    write_atomic(workdir / "ablations.html", html(rows, note))
    records = [
        dataclasses.asdict(row) | {"seeds": {str(seed): result._asdict() for seed, result in row.seeds.items()}}
        for row in rows
    ]
    write_json_atomic(workdir / "ablations.json", records)


def show(rows: Sequence[Row], workdir: Path) -> None:
    """Print the table and the paths of its files.

    Args:
        rows: rows of the table.
        workdir: directory that holds the files.
    """
    screen = stdout()
    if not any(row.seeds for row in rows):
        screen.print("no row of the table is trained yet", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(HEADS):
        table.add_column(head, justify="left" if number == 0 else "right")
    for line in cells(rows):
        table.add_row(*map(Text, line))
    screen.print(table)
    screen.print(f"{workdir / 'ablations.md'} and ablations.html are written", soft_wrap=True, markup=False)
