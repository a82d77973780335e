"""What is to be started: one description, from which every target makes its own commands and manifests.

A spec is a Python file like a config, `get_spec() -> ConfigDict` over `default()`, and its keys are set with
`--spec.section.key=value`. Keys:

  name                     of the run, a DNS label: what clouds call its parts begins with it
  image                    container with this package (`launch/Dockerfile`); clouds need one
  restarts                 failures without progress after which a job is given up; preemptions do not count
  grace_seconds            from SIGTERM to SIGKILL: long enough to save
  trainer.slice, slices    TPU slice, such as v5e:8x8, and how many of them train together
  trainer.processes        local: processes that train together
  trainer.priority         JobSet: priority class of its pods; '' for none
  builder.slice, slices    a slice of one machine, and how many; the index builder's processes are independent; 0: none
  builder.processes        local: builder processes; 0: none
  builder.priority         as the trainer's; lower, so that the builder makes room
  local.devices            CPU devices that each process emulates; 0: those that are there
  local.gpus               CUDA_VISIBLE_DEVICES of each process, trainers first, such as ('0,1', '2'); (): as they are
  gcloud.project, zone     where queued resources are asked for
  gcloud.capacity          'on-demand', 'spot' or 'reserved'
  gcloud.service_account   of the machines; '' for the project's own
  gcloud.network           '' for the default one
  kubernetes.context       kubectl's; '' for the current one
  kubernetes.namespace     of the JobSets
  kubernetes.queue         Kueue's local queue; '' where there is none
  kubernetes.restarts      failures in a JobSet's whole life, with progress or without, after which it is given up
  kubernetes.service_account   with access to the bucket (Workload Identity)
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from realm_jax.errors import UserError
from realm_jax.index.status import BUILDER, TRAINER, process_name
from realm_jax.launch.slices import Slice, parse

BUCKET = "gs://"
MOUNTED = "/realm"  # where the containers see buckets
# A trainer may wait for machines, or measure baselines, for longer than a builder that is started by hand should wait.
PATIENT = "--config.refresh.idle_exit=1e9"  # seconds
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")  # a pod's name is this, job, numbers and more: 63 at most
IMAGE = re.compile(r"[a-zA-Z0-9][-\w./:@]*")


def default() -> ConfigDict:
    """A spec with every key: one process on this machine and no image."""
    return ConfigDict(
        {
            "name": "realm",
            "image": "",
            "restarts": 10,
            "grace_seconds": 120,
            "trainer": {"slice": "v5e:8x8", "slices": 1, "processes": 1, "priority": ""},
            "builder": {"slice": "v5e:2x4", "slices": 2, "processes": 1, "priority": ""},
            "local": {"devices": 0, "gpus": ()},
            "gcloud": {"project": "", "zone": "", "capacity": "on-demand", "service_account": "", "network": ""},
            "kubernetes": {
                "context": "",
                "namespace": "default",
                "queue": "",
                "restarts": 1000,
                "service_account": "",
            },
        }
    )


@dataclasses.dataclass(frozen=True)
class Role:
    """One of the two jobs. count: slices in a cloud; processes: on this machine."""

    name: str
    slice: Slice
    count: int
    processes: int
    priority: str


@dataclasses.dataclass(frozen=True)
class Launch:
    """What is to be started, whole. workdir: a folder of this machine, or gs://BUCKET/FOLDER."""

    name: str
    image: str
    restarts: int
    grace_seconds: int
    trainer: Role
    builder: Role
    spec: ConfigDict
    config: str
    overrides: tuple[str, ...]
    workdir: str

    def command(self, role: Role, *process: str) -> list[str]:
        """The words of a job's command. process: its flags of processes."""
        job, patient = ("train", []) if role is self.trainer else ("build-index", [PATIENT])
        config = [f"--config={self.config}"] if self.config else []
        place = [*self._shared(), f"--workdir={self.place}"]
        return ["realm", job, *config, *patient, *self.overrides, *place, *process]

    def _shared(self) -> list[str]:
        """Trainer and builder meet in the bucket itself; what they say of that comes last, so that it counts."""
        return [f"--config.refresh.shared={self.workdir}"] if self.is_remote else []

    @property
    def is_remote(self) -> bool:
        """Whether the work directory is in a bucket."""
        return self.workdir.startswith(BUCKET)

    @property
    def bucket(self) -> str:
        """The name of the bucket of a remote work directory."""
        return self.workdir.removeprefix(BUCKET).partition("/")[0]

    @property
    def place(self) -> str:
        """The work directory as the programs see it."""
        return self.workdir.replace(BUCKET, f"{MOUNTED}/", 1) if self.is_remote else self.workdir


class Part(NamedTuple):
    """A job of a launch: what a cloud creates, restarts and ends by itself. words: of its command."""

    name: str
    role: Role
    words: list[str]


def parts(launch: Launch) -> list[Part]:
    """The jobs of a launch in a cloud: the trainer on all its slices, and a builder on each of its own."""
    count = launch.builder.count
    trainer = Part(TRAINER, launch.trainer, launch.command(launch.trainer, "--processes=auto"))
    builders = [
        Part(process_name(BUILDER, number), launch.builder, launch.command(launch.builder, *share(number, count)))
        for number in range(count)
    ]
    return [trainer, *builders]


def share(number: int, count: int) -> list[str]:
    """The flags of one of several processes."""
    return [f"--process={number}", f"--processes={count}"]


def choose(job: str, names: Iterable[str]) -> str:
    """The name that --job means: itself, or the first process of a job. Raises UserError with the choices."""
    known = list(names)
    found = next((name for name in (job, process_name(job, 0)) if name in known), None)
    if found is None:
        raise UserError(f"--job={job}: there is no such job; choose among {', '.join(known) or 'none'}")
    return found


def describe(spec: ConfigDict, config: str, overrides: Sequence[str], workdir: str) -> Launch:
    """A checked description. Raises UserError, with the key's name, for what cannot be started anywhere."""
    if not LABEL.fullmatch(spec.name):
        raise UserError(f"spec.name={spec.name}: use lower-case letters, digits and '-', at most 30 of them")
    if spec.image and not IMAGE.fullmatch(spec.image):
        raise UserError(f"spec.image={spec.image}: write it like REGION-docker.pkg.dev/PROJECT/realm/realm:1")
    for value, key in ((spec.restarts, "restarts"), (spec.grace_seconds, "grace_seconds"),
                       (spec.kubernetes.restarts, "kubernetes.restarts")):  # fmt: skip
        if value < 0:
            raise UserError(f"spec.{key}: must not be negative")
    for override in overrides:
        if "\n" in override:
            raise UserError(f"{override.partition('=')[0]}: a value of one line is needed; set it in a config file")
    trainer, builder = (_role(spec, name) for name in (TRAINER, BUILDER))
    if trainer.processes < 1 or trainer.count < 1:
        raise UserError("spec.trainer: needs one process and one slice at least")
    return Launch(
        spec.name, spec.image, spec.restarts, spec.grace_seconds, trainer, builder, spec, config, tuple(overrides),
        workdir.rstrip("/") or workdir,
    )  # fmt: skip


def _role(spec: ConfigDict, name: str) -> Role:
    section = spec[name]
    for key in ("slices", "processes"):
        if section[key] < 0:
            raise UserError(f"spec.{name}.{key}: must not be negative")
    found = parse(section.slice, f"spec.{name}.slice")
    return Role(name, found, section.slices, section.processes, section.priority)
