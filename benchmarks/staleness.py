"""What an old index costs: REALM with the index refreshed every N/4, N, 5N and 30N steps, and never.

The same warmed-up model (reader and inverse cloze task) is trained on by REALM for 60N steps, refreshed inline at fixed
steps, searched with the newest query tower (`current`) or with the one of the index (`generation`). Measured at the end
with an index of the final towers: recall@5 of the gold passage on held-out articles; and, over the last 60 steps, how
much the passages that training found helped it (retrieval utility). Each seed has its own encyclopedia.

    python benchmarks/staleness.py run --workdir=DIR --seed=0      hours; what is done is not done again
    python benchmarks/staleness.py show --workdir=DIR [--plot=FILE.svg]
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from realm_jax.cache import cache_programs
from realm_jax.cli.quickstart import make_data
from realm_jax.config import load_config
from realm_jax.run import Run
from realm_jax.tasks import make_task
from realm_jax.train.loop import train_task
from realm_jax.train.measure import Measure, make_measure
from realm_jax.train.recipe import open_run, starting_params, train
from realm_jax.train.records import read_lines

N = 4  # steps between two refreshes that a builder beside training would manage
STEPS = 60 * N
INTERVALS = {"N/4": N // 4, "N": N, "5N": 5 * N, "30N": 30 * N, "never": 10 * STEPS}
QUERIES = ("current", "generation")
ENTITIES = 1600
LAST = 60  # steps over which training's own measures are averaged
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t, two-sided 95 %, by the number of seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "show"))
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.action == "run":
        run_seed(args.workdir, args.seed)
    else:
        show(args.workdir, args.plot)


def recipe(seed: int, data: Path, tasks: str) -> ConfigDict:
    """The quickstart's with half as many pairs of query and passage a step."""
    config = load_config("quickstart")
    config.seed, config.tasks, config.data.path = seed, tasks, str(data)
    config.realm.update({"steps": STEPS, "batch_size": 16})
    config.realm.candidates = 12
    config.log.every = 10
    return config


def run_seed(workdir: Path, seed: int) -> None:
    """Warm up once, then train with every interval and both kinds of queries."""
    cache_programs()
    base = workdir / f"seed{seed}"
    make_data(base, ENTITIES, seed)
    train(open_run(recipe(seed, base / "data", "mlm,ict"), base / "warm"))
    for queries in QUERIES:
        for name, every in INTERVALS.items():
            place = base / f"{queries}-{every}"
            if (place / "staleness.json").is_file():
                continue
            config = recipe(seed, base / "data", "realm")
            config.init_from = str(base / "warm")
            config.refresh.every, config.retrieval.query_params = every, queries
            run = open_run(config, place)
            train_task(run, "realm", starting_params(run), at_the_end(run))
            found = summary(place) | {"seed": seed, "queries": queries, "interval": name, "every": every}
            (place / "staleness.json").write_text(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)
            jax.clear_caches()


def at_the_end(run: Run) -> Measure:
    """The recipe's measure, but not at every refresh."""
    whole = make_measure(make_task("realm", run))
    assert whole is not None, "the encyclopedia has questions"
    return lambda params, index, final: whole(params, index, True) if final else {}


def summary(place: Path) -> dict[str, Any]:
    """Recall with the final towers, and training's measures over the last steps."""
    final = read_lines(place / "realm" / "evaluations.jsonl")[-1]
    steps = [line for line in read_lines(place / "realm" / "metrics.jsonl") if line["step"] > STEPS - LAST]
    means = {
        name: statistics.fmean(line[name] for line in steps) for name in ("loss", "retrieval_utility", "index_age")
    }
    return {"recall@5": final["recall@5"], "answer_recall@5": final["answer_recall@5"]} | means


def show(workdir: Path, plot: Path | None) -> None:
    """The table, as Markdown, and the plot. Differences are between runs of the same seed."""
    found = [json.loads(path.read_text()) for path in sorted(workdir.glob("seed*/*/staleness.json"))]
    print("| refresh every | queries | recall@5 | less than every N, current | retrieval utility, nats | index age |")
    print("|---|---|---|---|---|---|")
    fresh = {one["seed"]: one["recall@5"] for one in found if (one["interval"], one["queries"]) == ("N", "current")}
    points: dict[str, list[tuple[float, float]]] = {}
    for name in INTERVALS:
        for queries in QUERIES:
            lines = [one for one in found if (one["interval"], one["queries"]) == (name, queries)]
            if not lines:
                continue
            lost = [fresh[one["seed"]] - one["recall@5"] for one in lines]
            columns = [[one["recall@5"] for one in lines], lost, [one["retrieval_utility"] for one in lines]]
            cells = [interval(column) for column in columns]
            texts = [f"{mean:.3f} ± {half:.3f}" for mean, half in cells]
            age = statistics.fmean(one["index_age"] for one in lines)
            print(f"| {name} | {queries} | {' | '.join(texts)} | {age:.0f} |")
            points.setdefault(queries, []).append(cells[0])
    if plot is not None:
        draw(points, plot)


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval (Student's t over the seeds)."""
    if len(values) < 2:
        return values[0], float("nan")
    return statistics.fmean(values), T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5


def draw(points: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Recall by interval with its 95 % interval. Needs matplotlib."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6))
    for shift, (queries, cells) in zip((-0.05, 0.05), points.items(), strict=False):
        means, halves = zip(*cells, strict=True)
        places = [number + shift for number in range(len(cells))]
        axes.errorbar(places, means, yerr=halves, marker="o", capsize=3, label=f"query_params={queries}")
    axes.set_xticks(range(len(INTERVALS)), list(INTERVALS))
    axes.set_xlabel(f"steps between two refreshes (N = {N}; {STEPS} steps in all)")
    axes.set_ylabel("recall@5 after REALM")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
