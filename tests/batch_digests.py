"""Digests of the examples of the first batches of a run, as one process of several makes them; for `test_processes.py`.

python tests/batch_digests.py DATA OUTPUT STEPS [--processes=2 --process=0 --coordinator=localhost:1234]
"""

import argparse
import hashlib
import json
from pathlib import Path

import jax
import numpy as np
from tiny_run import tiny_config

from realm_jax import processes
from realm_jax.assemble import make_run
from realm_jax.data.examples import batches
from realm_jax.data.sources import open_sources
from realm_jax.run import local_rows
from realm_jax.tasks import make_task


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("data", Path), ("output", Path), ("steps", int)):
        parser.add_argument(name, type=kind)
    processes.add_arguments(parser)
    args = parser.parse_args()
    processes.start(args)
    config = tiny_config(args.data)
    for task in ("mlm", "ict", "realm", "qa"):
        config[task].batch_size = 16
    run = make_run(config, args.output.parent, open_sources(args.data))
    found = {}
    for task in (make_task(name, run) for name in ("ict", "realm", "qa")):
        rows = local_rows(run.mesh, 16)
        made = batches(task.examples({}, None), config.seed, task.stream, 16, 0, args.steps, rows)
        for step, batch in enumerate(made):
            for place, row in enumerate(rows.tolist()):
                example = jax.tree.map(lambda array, place=place: np.ascontiguousarray(array[place]), batch)
                data = b"".join(example[name].tobytes() for name in sorted(example))
                found[f"{task.name} {step} {row}"] = hashlib.sha256(data).hexdigest()
    args.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
