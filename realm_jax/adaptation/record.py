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
from realm_jax.index.heartbeat import StatusWriter
from realm_jax.storage import read_json, write_json_atomic

RECORD, DATA, REPORT = "adapt.json", "data", "report.html"  # in the run folder
OTHER = "other"  # folder of the second corpus, which is measured and never learned from
MINUTES = 60.0  # default of AdaptRequest.minutes


@dataclass(frozen=True)
class AdaptRequest:
    """What to adapt, and in which time."""

    documents: str  # file, pattern or folder
    model: str  # base model of sentence-transformers: a folder, hf:NAME or py:NAME
    workdir: Path  # created or resumed
    config: ConfigDict  # from `load_config("adapt")`; `data.path` and `init_from` are set later
    config_arguments: tuple[str, ...] = ()  # that made the config; others are rejected on resume
    questions: str | None = None  # file of evaluation questions, which are never learned from
    forgetting: str | None = None  # documents of a second corpus, to measure what the encoder lost
    minutes: float = MINUTES  # for everything
    merge: float | None = None  # interpolation weight of the trained encoders; None: one of `evaluate.WEIGHTS`
    command: str = ""  # that made the request, for the report and the model card

    def settings(self) -> dict[str, Any]:
        """Return what may not change on resume, as adapt.json holds it."""
        names = ("documents", "questions", "minutes", "forgetting", "merge")
        settings = {name: getattr(self, name) for name in names}
        return settings | {"from": self.model, "config": [*self.config_arguments]}


# --- entries of adapt.json --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """Seconds on this machine, measured before training."""

    passage: float  # to embed one passage
    embed: float  # to embed all passages that are not in the cache, by every encoder that is measured
    query: float  # to embed one query and search with it
    measure: float  # to compare the encoders
    compile: float = 0.0  # the steps of all tasks
    step: Mapping[str, float] = field(default_factory=dict)  # task → one step, with its share of an index refresh


@dataclass(frozen=True)
class CorpusFacts:
    """Facts about the documents, for the report."""

    passages: int
    documents: int
    read: int  # records
    left_out: Mapping[str, int]  # reason → records, and questions, that were not used
    fingerprint: str  # of the passages
    spans: int  # salient spans
    spans_with_evidence: int  # those of them that another passage has, too


@dataclass(frozen=True)
class Plan:
    """What was decided before training."""

    candidates: int  # K of REALM
    held_out: float  # share of the documents that is not learned from
    tasks: str  # names, joined by commas
    steps: Mapping[str, int]  # task → number of steps
    dtype: str  # compute type of the machine that the plan was made on
    sentences: int  # at most so many held-out sentences are measured
    estimate: Estimate
    corpus: CorpusFacts
    notes: tuple[str, ...]  # sentences for the report

    def to_json(self) -> dict[str, Any]:
        """Return the entry `plan`. The facts about the corpus are keys like the others."""
        entry = asdict(self)
        return entry | entry.pop("corpus") | {"notes": [*self.notes]}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        rest = dict(entry)
        estimate, notes = Estimate(**rest.pop("estimate")), tuple(rest.pop("notes"))
        corpus = CorpusFacts(**{each.name: rest.pop(each.name) for each in fields(CorpusFacts)})
        return cls(**rest, estimate=estimate, corpus=corpus, notes=notes)


@dataclass(frozen=True)
class Change:
    """A metric of the base encoder and of another encoder, over the queries that have it."""

    queries: int = 0  # their number; if it is 0 the other fields say nothing
    start: float = 0.0  # mean of the base encoder
    value: float = 0.0  # mean of the other encoder
    change: float = 0.0  # value − start
    low: float | None = None  # ends of its paired 95 % interval; None if all queries changed alike
    high: float | None = None
    documents: int | None = None  # their number if the interval is over documents, None if it is over queries

    @property
    def is_significant_gain(self) -> bool:
        return self.low is not None and self.low > 0

    @property
    def is_significant_loss(self) -> bool:
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
    """Whether adapted encoders take the place of the base encoder, and why."""

    promoted: bool
    weight: float  # interpolation weight of the trained encoders
    mean_recall: Change  # of held-out sentences: has to rise
    recall_without_sentence: Change  # of passages that lack the sentence: must not fall
    question_metric: str = ""  # '' if there are no evaluation questions
    questions: Change = Change()  # must not fall

    def to_json(self) -> dict[str, Any]:
        """Return the part of the entry `measured` that says what was decided."""
        return {
            "promoted": self.promoted,
            "gain": self.mean_recall.to_json(),
            "removed": self.recall_without_sentence.to_json(),
            "judged": {"measure": self.question_metric} | self.questions.to_json() if self.question_metric else {},
            "weight": self.weight,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        questions = dict(entry["judged"])
        metric = questions.pop("measure", "")
        gain, removed = Change(**entry["gain"]), Change(**entry["removed"])
        return cls(entry["promoted"], entry["weight"], gain, removed, metric, Change(**questions))


@dataclass(frozen=True)
class Measurement:
    """The comparison of encoders on held-out documents."""

    decision: Decision
    table: ChangeTable
    examples: Mapping[str, list[dict[str, str]]]  # "gained" or "lost" → what only one of two encoders finds

    def to_json(self) -> dict[str, Any]:
        """Return the entry `measured`."""
        return self.decision.to_json() | {"table": _table_to_json(self.table), "examples": dict(self.examples)}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        return cls(Decision.from_json(entry), _table_from_json(entry["table"]), entry["examples"])


@dataclass(frozen=True)
class Forgetting:
    """The comparison of encoders on a second corpus, which decides nothing."""

    table: ChangeTable
    documents: int
    passages: int

    def to_json(self) -> dict[str, Any]:
        """Return the entry `forgetting`."""
        return {"table": _table_to_json(self.table), "documents": self.documents, "passages": self.passages}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        return cls(_table_from_json(entry["table"]), entry["documents"], entry["passages"])


# --- the file ---------------------------------------------------------------------------------------------------------


@dataclass
class AdaptRecord:
    """adapt.json of a run; the entry of a stage is None until the stage is done."""

    path: Path
    status: StatusWriter  # says which stage is running
    settings: Mapping[str, Any]  # of the first command
    command: str  # the first one
    seconds: dict[str, float]  # "preparation" or stage → how long it took
    plan: Plan | None = None
    training: Mapping[str, int] | None = None  # task → steps
    measured: Measurement | None = None
    forgetting: Forgetting | None = None
    export: list[str] | None = None  # names of what was written

    @classmethod
    def open(cls, request: AdaptRequest, status: StatusWriter, preparation: float) -> Self:
        """Read the record of a run, or begin one.

        Args:
            request: the request. If there is a record, it has the same settings.
            status: the trainer's status.
            preparation: seconds of the preparation, for a new record.

        Raises:
            UserError: the file is of another version of this package.
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
        """Run a stage in the block, which sets its entry; the file is written when the block ends without an error."""
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
