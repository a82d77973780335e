"""The two halves of `realm prepare` as Apache Beam pipelines: for a cluster (Dataflow, Flink), or DirectRunner.

They write the same bytes as local processes (`articles.Processes`), because they call the same functions of records and
shards, and sort results by their position in the source. An interrupted command resumes after the extraction of a
source, and after a shard that is packed. Needs the extra `beam`.
"""

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any, NamedTuple, Self

from realm_jax.corpora.articles import (
    COUNTS,
    ArticleSource,
    Counts,
    Extracted,
    LocatedRecord,
    check_counts,
    extract,
    read_part,
    shard_file,
)
from realm_jax.errors import UserError, install_extra
from realm_jax.storage import StorageError, open_folder

try:
    import apache_beam as beam
    from apache_beam.options import pipeline_options
    from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
    from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
    from apache_beam.runners.runner import create_runner
except ImportError as error:
    raise UserError(f"--beam: {error}; {install_extra('beam')}") from None

ERROR = "FAULT.json"  # error of a worker
_Line = tuple[int, int, bytes]  # with its position: part and number


class Beam(NamedTuple):
    """A runner of Beam that does the work and reports progress itself. Its methods are those of `Processes`."""

    options: Any

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse options of a command line: "--runner=DataflowRunner --project=…". Raises UserError."""
        try:
            words = shlex.split(text)
            unknown = _parser().parse_known_args(words)[1]
            options = PipelineOptions(words)
            runner = create_runner(options.view_as(StandardOptions).runner or "DirectRunner")
            faults = [f"there is no option {word}" for word in unknown]
            faults += PipelineOptionsValidator(options, runner).validate()
        except (ValueError, ImportError, SystemExit) as error:
            faults = [str(error) or "not understood"]
        if faults:
            raise UserError(f"--beam={text!r}: {faults[0]}; give options as Beam's runners know them")
        return cls(options)

    def extract(
        self, source: ArticleSource, folder: str, shards: int, skip_damage: bool, progress: Callable[[int], None]
    ) -> Counts:
        """Write the shards of a source, unless an earlier call did.

        Args:
            source: the source.
            folder: URL of the shards.
            shards: their number.
            skip_damage: accept damage.
            progress: not called.

        Returns:
            Counts of the records.

        Raises:
            UserError: a record is damaged, or there is no article.
        """
        target = open_folder(folder)
        if COUNTS not in target.names():
            with self._pipeline(folder) as pipeline:
                # Reshuffle stops Beam from fusing two steps, so that all workers get parts, and then records.
                extracted = (
                    pipeline
                    | "parts" >> beam.Create(range(len(source.parts)))
                    | "spread parts" >> beam.Reshuffle()
                    | "read" >> beam.FlatMap(partial(_read, source, folder))
                    | "spread records" >> beam.Reshuffle()
                    | "extract" >> beam.Map(partial(_extract, source, shards))
                )
                lines = extracted | "lines" >> beam.FlatMap(_lines)
                # A shard without articles must be written too.
                every = pipeline | "shards" >> beam.Create([(shard, None) for shard in range(shards)])
                written = (
                    (lines, every)
                    | "with empty shards" >> beam.Flatten()
                    | "by shard" >> beam.GroupByKey()
                    | "write" >> beam.MapTuple(partial(_write_shard, folder))
                )
                counts = extracted | "count" >> beam.Map(_counts) | "sum" >> beam.CombineGlobally(_sum)
                _ = counts | "counts" >> beam.Map(_write_counts, folder, beam.pvalue.AsList(written))
        counts = Counts.from_json(target.read_json(COUNTS))
        try:
            check_counts(source, counts, skip_damage)
        except UserError:
            target.remove(COUNTS)  # the user may correct the source, and we read it again
            raise
        return counts

    def each(
        self, process: Callable[[str, int], int], folder: str, shards: Sequence[int], progress: Callable[[int], None]
    ) -> None:
        """Process shards of a folder.

        Args:
            process: takes the folder and the number of a shard, and returns the number of its articles.
            folder: URL of the shards.
            shards: their numbers.
            progress: not called.

        Raises:
            UserError: a worker raised it.
        """
        with self._pipeline(folder) as pipeline:
            numbers = pipeline | "shards" >> beam.Create(shards) | "spread shards" >> beam.Reshuffle()
            _ = numbers | "each" >> beam.Map(partial(_process_shard, process, folder))

    @contextmanager
    def _pipeline(self, folder: str) -> Iterator[Any]:
        """Run a pipeline, and raise the UserError that one of its workers recorded in the folder."""
        target = open_folder(folder)
        if ERROR in target.names():
            target.remove(ERROR)
        with beam.Pipeline(options=self.options) as pipeline:
            yield pipeline
        if ERROR in target.names():
            raise UserError(target.read_json(ERROR)["fault"])


def _parser() -> argparse.ArgumentParser:
    """Return a parser of the options that any runner of Beam knows, because Beam itself ignores unknown ones."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for kind in vars(pipeline_options).values():
        if isinstance(kind, type) and issubclass(kind, PipelineOptions) and "_add_argparse_args" in vars(kind):
            kind._add_argparse_args(parser)  # type: ignore[arg-type]
    return parser


@contextmanager
def _recorded_error(folder: str) -> Iterator[None]:
    """Record a UserError in a file, because a runner would wrap it in its own exception.

    An error of storage may pass, so the runner gets it and tries again.
    """
    try:
        yield
    except StorageError:
        raise
    except UserError as error:
        open_folder(folder).write_json(ERROR, {"fault": str(error)})


def _read(source: ArticleSource, folder: str, part: int) -> Iterator[LocatedRecord]:
    with _recorded_error(folder):
        yield from read_part(source, part)


def _extract(source: ArticleSource, shards: int, record: Any) -> tuple[int, Extracted]:
    """Return the number of a record, and its `extract`."""
    located = LocatedRecord(*record)
    return located.number, extract(source, shards, [located])


def _lines(numbered: tuple[int, Extracted]) -> Iterator[tuple[int, _Line]]:
    number, (part, lines, _) = numbered
    return ((shard, (part, number, line)) for shard, line in lines.items())


def _counts(numbered: tuple[int, Extracted]) -> dict[str, Any]:
    return numbered[1].counts.to_json()


def _sum(counts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return reduce(Counts.add, map(Counts.from_json, counts), Counts()).to_json()


def _write_shard(folder: str, shard: int, lines: Iterable[_Line | None]) -> int:
    ordered = sorted(line for line in lines if line is not None)
    open_folder(folder).write(shard_file(shard, "jsonl"), b"".join(line for _, _, line in ordered))
    return shard


def _write_counts(counts: dict[str, Any], folder: str, _: list[int]) -> None:
    """Write the counts unless some records were not read. The last argument makes Beam write the shards first."""
    if ERROR not in open_folder(folder).names():
        open_folder(folder).write_json(COUNTS, counts)


def _process_shard(process: Callable[[str, int], int], folder: str, shard: int) -> None:
    with _recorded_error(folder):
        process(folder, shard)
