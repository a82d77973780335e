"""The two halves of `realm prepare` as Apache Beam pipelines: for a cluster (Dataflow, Flink), or DirectRunner.

They write what local processes write (`articles.extract`, `build.pack_shards`), byte for byte: places order what
workers send in any order, and every function of a record or a shard is the same one. Both go on where they were cut
off: a whole extraction is the unit of the first, a shard that of the second. Needs `pip install 'realm_jax[beam]'`.
"""

import argparse
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, Self

from realm_jax.corpus.articles import COUNTS, UNREADABLE, Placed, Texts, check, clean, read_part, shard_name
from realm_jax.corpus.build import PassagePacker, pack_shard, packed_name
from realm_jax.corpus.records import Counts, Damage
from realm_jax.corpus.store import segment_folder
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

FAULT = "FAULT.json"  # of a shard that cannot be packed


class Beam(NamedTuple):
    """A `realm_jax.corpus.runners.Runner`: one of Beam's, which tells of progress itself."""

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
        self, texts: Texts, folder: str, shards: int, skip_damage: bool, progress: Callable[[int], None]
    ) -> Counts:
        return extract(texts, folder, shards, skip_damage, self.options)

    def each(self, act: Callable[[str, int], None], folder: str, shards: int) -> None:
        with beam.Pipeline(options=self.options) as pipeline:
            numbers = pipeline | "shards" >> beam.Create(range(shards)) | "spread shards" >> beam.Reshuffle()
            _ = numbers | "each" >> beam.Map(partial(act, folder))

    def pack(
        self, articles: str, shards: int, packer: PassagePacker, store: str, progress: Callable[[int], None]
    ) -> None:
        pack_shards(articles, shards, packer, store, self.options)


def _parser() -> argparse.ArgumentParser:
    """Every option that some runner of Beam knows: Beam itself passes over those that nobody does."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for kind in vars(pipeline_options).values():
        if isinstance(kind, type) and issubclass(kind, PipelineOptions) and "_add_argparse_args" in vars(kind):
            kind._add_argparse_args(parser)  # type: ignore[arg-type]
    return parser


def extract(texts: Texts, folder: str, shards: int, skip_damage: bool, options: Any) -> Counts:
    """`articles.extract` by the workers of a runner. folder: path or URL that all of them reach."""
    target = open_folder(folder)
    if COUNTS not in target.names():
        with beam.Pipeline(options=options) as pipeline:
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
        target.remove(COUNTS)  # what is wrong may be mended, and is to be read again then
        raise
    return found


def pack_shards(articles: str, shards: int, packer: PassagePacker, store: str, options: Any) -> None:
    """`build.pack_shards` by the workers of a runner. articles, store: paths or URLs that all of them reach."""
    marks = set(open_folder(articles).names())
    missing = [shard for shard in range(shards) if packed_name(shard) not in marks]
    if not missing:
        return
    if FAULT in marks:
        open_folder(articles).remove(FAULT)
    with beam.Pipeline(options=options) as pipeline:
        _ = (
            pipeline
            | "shards" >> beam.Create(missing)
            | "spread shards" >> beam.Reshuffle()
            | "pack" >> beam.Map(partial(_pack, articles, packer, store))
        )
    if FAULT in open_folder(articles).names():
        raise UserError(open_folder(articles).read_json(FAULT)["fault"])


def _read(texts: Texts, part: int) -> Iterator[Placed]:
    """`read_part`; a fault that ends the part is counted, since a runner would wrap an exception in its own. One of
    storage may pass: it is the runner's, who tries again."""
    placed = Placed(part, -1, None)
    try:
        for placed in read_part(texts, part):
            yield placed
    except StorageError:
        raise
    except UserError as fault:
        yield Placed(part, placed.number + 1, Damage(texts.name, UNREADABLE, str(fault)))


class _Clean(beam.DoFn):
    """Records to lines of shards; counts once a bundle."""

    def __init__(self, texts: Texts, shards: int):
        self._texts, self._shards = texts, shards

    def start_bundle(self) -> None:
        self._counts = Counts()

    def process(self, placed: Placed) -> Iterator[tuple[int, tuple[int, int, bytes]]]:
        placed = Placed(*placed)
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


def _pack(articles: str, packer: PassagePacker, store: str, shard: int) -> None:
    """Write a segment on this worker's disk, carry it over file by file, then say that it is there."""
    source, target = open_folder(articles), open_folder(store)
    with tempfile.TemporaryDirectory() as scratch:
        segment = segment_folder(Path(scratch), shard)
        try:
            packed = pack_shard(source, shard, packer, segment)
        except StorageError:
            raise
        except UserError as fault:  # a runner would wrap it
            source.write_json(FAULT, {"fault": str(fault)})
            return
        for path in sorted(segment.iterdir()):
            target.write(f"{segment.name}/{path.name}", path.read_bytes())
    source.write_json(packed_name(shard), packed.to_json())
