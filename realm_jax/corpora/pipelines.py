"""The two halves of `realm prepare` as Apache Beam pipelines: for a cluster (Dataflow, Flink), or DirectRunner.

They write what local processes write (`articles.Processes`), byte for byte: places order what workers send in any
order, and every function of a record or a shard is the same one. Both go on where they were cut off: a whole extraction
is the unit of the first, a shard that of the second. Needs `pip install 'realm_jax[beam]'`.
"""

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Self

from realm_jax.corpora.articles import (
    COUNTS,
    UNREADABLE,
    ArticleSource,
    LocatedRecord,
    check,
    clean,
    read_part,
    shard_name,
)
from realm_jax.corpora.outcomes import CorruptRecord, Counts
from realm_jax.errors import UserError
from realm_jax.storage import StorageError, open_folder

try:
    import apache_beam as beam
    from apache_beam.options import pipeline_options
    from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
    from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
    from apache_beam.runners.runner import create_runner
    from apache_beam.transforms.window import GlobalWindow
    from apache_beam.utils.timestamp import MIN_TIMESTAMP
    from apache_beam.utils.windowed_value import WindowedValue
except ImportError as fault:
    raise UserError(f"--beam: {fault}; pip install 'realm_jax[beam]'") from None

FAULT = "FAULT.json"  # of a shard that cannot be worked on


class Beam(NamedTuple):
    """A `realm_jax.corpora.articles.Runner`: one of Beam's, which tells of progress itself."""

    options: Any

    @classmethod
    def of(cls, text: str) -> Self:
        """By options as they stand on a command line: "--runner=DataflowRunner --project=…". Raises UserError."""
        try:
            words = shlex.split(text)
            unknown = _parser().parse_known_args(words)[1]
            options = PipelineOptions(words)
            runner = create_runner(options.view_as(StandardOptions).runner or "DirectRunner")
            faults = [f"there is no option {word}" for word in unknown]
            faults += PipelineOptionsValidator(options, runner).validate()
        except (ValueError, ImportError, SystemExit) as fault:
            faults = [str(fault) or "not understood"]
        if faults:
            raise UserError(f"--beam={text!r}: {faults[0]}; give options as Beam's runners know them")
        return cls(options)

    def check(self, shards: int) -> None:
        pass

    def extract(
        self, texts: ArticleSource, folder: str, shards: int, skip_damage: bool, progress: Callable[[int], None]
    ) -> Counts:
        target = open_folder(folder)
        if COUNTS not in target.names():
            with beam.Pipeline(options=self.options) as pipeline:
                outputs = (
                    pipeline
                    | "parts" >> beam.Create(range(len(texts.parts)))
                    | "spread parts" >> beam.Reshuffle()
                    | "read" >> beam.FlatMap(partial(_read, texts))
                    | "spread records" >> beam.Reshuffle()
                    | "clean" >> beam.ParDo(_Clean(texts, shards)).with_outputs("counts", main="lines")
                )
                every = pipeline | "shards" >> beam.Create([(shard, None) for shard in range(shards)])
                written = (
                    (outputs.lines, every)
                    | "with empty shards" >> beam.Flatten()
                    | "by shard" >> beam.GroupByKey()
                    | "write" >> beam.MapTuple(partial(_write_shard, folder))
                )
                counts = outputs.counts | "sum" >> beam.CombineGlobally(_sum).without_defaults()
                _ = counts | "counts" >> beam.Map(_write_counts, folder, beam.pvalue.AsList(written))
        found = Counts.from_json(target.read_json(COUNTS))
        try:
            check(texts, found, skip_damage)
        except UserError:
            target.remove(COUNTS)  # the fault may be fixed, and the source read again
            raise
        return found

    def each(
        self, act: Callable[[str, int], int], folder: str, shards: Sequence[int], progress: Callable[[int], None]
    ) -> None:
        target = open_folder(folder)
        if FAULT in target.names():
            target.remove(FAULT)
        with beam.Pipeline(options=self.options) as pipeline:
            numbers = pipeline | "shards" >> beam.Create(shards) | "spread shards" >> beam.Reshuffle()
            _ = numbers | "each" >> beam.Map(partial(_act, act, folder))
        if FAULT in target.names():
            raise UserError(target.read_json(FAULT)["fault"])


def _parser() -> argparse.ArgumentParser:
    """Every option that some runner of Beam knows: Beam itself passes over those that nobody does."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for kind in vars(pipeline_options).values():
        if isinstance(kind, type) and issubclass(kind, PipelineOptions) and "_add_argparse_args" in vars(kind):
            kind._add_argparse_args(parser)  # type: ignore[arg-type]
    return parser


def _read(texts: ArticleSource, part: int) -> Iterator[LocatedRecord]:
    """`read_part`; a fault that ends the part is counted, since a runner would wrap an exception in its own. One of
    storage may pass: it is the runner's, who tries again."""
    placed = LocatedRecord(part, -1, None)
    try:
        for placed in read_part(texts, part):
            yield placed
    except StorageError:
        raise
    except UserError as fault:
        yield LocatedRecord(part, placed.number + 1, CorruptRecord(texts.name, UNREADABLE, str(fault)))


class _Clean(beam.DoFn):
    """Records to lines of shards; counts once a bundle."""

    def __init__(self, texts: ArticleSource, shards: int):
        self._texts, self._shards = texts, shards

    def start_bundle(self) -> None:
        self._counts = Counts()

    def process(self, placed: LocatedRecord) -> Iterator[tuple[int, tuple[int, int, bytes]]]:
        placed = LocatedRecord(*placed)
        found, counts = clean(self._texts, self._shards, [placed])
        self._counts.add(counts)
        for shard, line in found.items():
            yield shard, (placed.part, placed.number, line)

    def finish_bundle(self) -> Iterator[Any]:
        value = WindowedValue(self._counts.to_json(), MIN_TIMESTAMP, (GlobalWindow(),))
        yield beam.pvalue.TaggedOutput("counts", value)


def _sum(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return reduce(Counts.add, map(Counts.from_json, found), Counts()).to_json()


def _write_shard(folder: str, shard: int, lines: Iterable[tuple[int, int, bytes] | None]) -> int:
    ordered = sorted(line for line in lines if line is not None)
    open_folder(folder).write(shard_name(shard), b"".join(line for _, _, line in ordered))
    return shard


def _write_counts(found: dict[str, Any], folder: str, _: list[int]) -> None:
    """After all shards, which are an argument so that they come first."""
    open_folder(folder).write_json(COUNTS, found)


def _act(act: Callable[[str, int], int], folder: str, shard: int) -> None:
    """`act`; a UserError is recorded in a file, since a runner would wrap it in its own exception."""
    try:
        act(folder, shard)
    except StorageError:
        raise
    except UserError as fault:
        open_folder(folder).write_json(FAULT, {"fault": str(fault)})
