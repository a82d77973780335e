"""`realm build-index`: a job that runs alongside training, re-embeds the corpus and publishes index generations.

It follows the exports of the run in --workdir and needs nothing else of the trainer. Read next:
`realm_jax/indexing/job.py` for its loop, `realm_jax/indexing/files.py` for the files.
"""

import argparse
import math
from pathlib import Path

import jax
from ml_collections import ConfigDict

from realm_jax.assemble import make_run
from realm_jax.cache import cache_programs
from realm_jax.config import add_config_argument, default, load_config, validate
from realm_jax.data.sources import open_sources
from realm_jax.environment import warn_of_other_versions
from realm_jax.errors import UserError
from realm_jax.host import Stop
from realm_jax.indexing.build import for_embedding
from realm_jax.indexing.heartbeat import BUILDER, process_name
from realm_jax.indexing.job import SILENCE, Job
from realm_jax.indexing.provider import shared_folder
from realm_jax.mirror import download, is_url
from realm_jax.processes import WorkerSlice, check_process
from realm_jax.retrieval.scann import load_scann
from realm_jax.run_log import run_log
from realm_jax.storage import make_folder
from realm_jax.train.init_from import fill_from_pretrained
from realm_jax.train.workdir import recorded_config, recorded_corpus

EXAMPLES = """examples:
  realm build-index --config=realm_wiki --config.init_from=runs/ict --config.data.path=data/wiki --workdir=runs/wiki
  realm build-index --workdir=runs/wiki --process=1 --processes=4         the second of four, for an existing run
  realm build-index --workdir=runs/wiki --once                            the newest export only

Use the same config as the trainer. Run the same command again to resume.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `realm build-index`."""
    parser.epilog = EXAMPLES
    add_config_argument(parser, "the config that the run in --workdir recorded, else the paper's sizes")
    parser.add_argument(
        "--workdir", required=True, metavar="DIR", help="run directory of the trainer: a path, or gs://BUCKET/FOLDER"
    )
    parser.add_argument(
        "--process", type=int, default=0, metavar="I", help="index of this process, from 0 (default: 0)"
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="number of processes that share the work (default: 1)"
    )
    parser.add_argument("--wait", action="store_true", help="wait indefinitely for the trainer (default: end after an "
        "hour without its heartbeat)")  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--once", action="store_true", help="build the index version of the newest export, and exit")
    which.add_argument("--step", type=int, metavar="S", help="build the index version of export step S, and exit")


def run(args: argparse.Namespace) -> None:
    """Build generations. Raises Preempted after SIGTERM."""
    check_process(args.process, args.processes)
    process = process_name(BUILDER, args.process)
    with run_log(args.workdir, process):
        worker, workdir = WorkerSlice(args.process, args.processes), Path(args.workdir)
        if is_url(args.workdir):
            workdir = download(args.workdir, process, lambda name: name in ("config.json", "data.json"))
        is_recorded = (workdir / "config.json").is_file()  # then --workdir is enough
        if not is_recorded and not args.config and not args.overrides:
            advice = "start the trainer first, or give the trainer's --config flags too"
            raise UserError(f"--workdir={args.workdir}: has no config yet; {advice}")
        default_config = ConfigDict(recorded_config(workdir).to_dict()) if is_recorded else default()
        config = validate(load_config(args.config, args.overrides, lambda: default_config))
        config = fill_from_pretrained(config, workdir, with_reader=False)
        if config.retrieval.backend == "scann":
            load_scann()
        make_folder(workdir, "--workdir")
        warn_of_other_versions()
        cache_programs()
        sources = open_sources(config.data.path, recorded_corpus(workdir))
        opened = make_run(for_embedding(config, jax.local_device_count()), workdir, sources, jax.local_devices())
        job = Job(opened, shared_folder(opened), worker, math.inf if args.wait else SILENCE)
        with Stop() as stop:
            job.work(stop, args.step, args.once or args.step is not None)
