"""What does the work of `realm prepare`: processes of this machine, or Apache Beam."""

import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from realm_jax.corpora.articles import ArticleSource, extract
from realm_jax.corpora.pool import ordered_parallel_map
from realm_jax.data.records import Counts
from realm_jax.errors import UserError

OTHER_FILES = 100  # that a process has open beside the shards


class Runner(Protocol):
    """Works on shards in folders, which are paths or URLs."""

    def check(self, shards: int) -> None:
        """Raise UserError for more shards than it can write."""

    def extract(
        self, texts: ArticleSource, folder: str, shards: int, skip_damage: bool, progress: Callable[[int], None]
    ) -> Counts:
        """Write the shards of a source, or what is missing of them."""

    def each(
        self, act: Callable[[str, int], int], folder: str, shards: Sequence[int], progress: Callable[[int], None]
    ) -> None:
        """Do `act(folder, shard)` for each shard; it gives the number of articles of the shard.

        progress: called with the sum of these, if the runner does not report progress itself.
        """


@dataclass(frozen=True)
class Processes:
    """A `Runner` of so many processes of this machine."""

    workers: int

    def check(self, shards: int) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES
        if shards > most:
            raise UserError(f"--shards={shards}: this machine may open {most} files; give fewer, or raise `ulimit -n`")

    def extract(
        self, texts: ArticleSource, folder: str, shards: int, skip_damage: bool, progress: Callable[[int], None]
    ) -> Counts:
        return extract(texts, Path(folder), shards, self.workers, skip_damage, progress)

    def each(
        self, act: Callable[[str, int], int], folder: str, shards: Sequence[int], progress: Callable[[int], None]
    ) -> None:
        done = 0
        for articles in ordered_parallel_map(partial(act, folder), shards, self.workers, few=2):
            done += articles
            progress(done)


def runner(workers: int | None, beam: str | None) -> Runner:
    """By the arguments of the command: --workers, or the options of --beam. Raises UserError for both at once."""
    if beam is None:
        return Processes(workers or os.cpu_count() or 1)
    if workers is not None:
        raise UserError("--workers: Beam's runners have options of their own for it; leave it out, or leave --beam out")
    from realm_jax.corpora.pipelines import Beam  # here, since few have Apache Beam

    return Beam.of(beam)
