"""What is to be started: one description, from which every target makes its own commands and manifests.

A spec is a Python file like a config, `get_spec() -> ConfigDict` over `default()`, and its keys are set with
`--spec.section.key=value`. Keys:

  name                     of the run, a DNS label: what clouds call its parts begins with it
  image                    container with this package (`launch/Dockerfile`); clouds need one
  restarts                 failures of a job without progress after which it is given up; preemptions do not count
  grace_seconds            from SIGTERM to SIGKILL: long enough to save
  trainer.slice, slices    TPU slice, such as v5e:8x8, and how many of them train together
  trainer.processes        local: processes that train together
  trainer.priority         JobSet: priority class of its pods; '' for none
  builder.slice, slices    a slice of one machine, and how many; the index builder's processes are independent; 0: none
  builder.processes        local: builder processes; 0: none
  builder.priority         as the trainer's; lower, so that the builder makes room
  local.devices            CPU devices that each process emulates; 0: those that are there
  local.gpus               CUDA_VISIBLE_DEVICES of each process, trainers first; () leaves them alone
  gcloud.project, zone     where queued resources are asked for
  gcloud.capacity          'on-demand', 'spot' or 'reserved'
  gcloud.service_account   of the machines; '' for the project's own
  gcloud.network           '' for the default one
  kubernetes.context       kubectl's; '' for the current one
  kubernetes.namespace     of the JobSets
  kubernetes.queue         Kueue's local queue; '' where there is none
  kubernetes.service_account   with access to the bucket (Workload Identity)
"""

import dataclasses
import re
from collections.abc import Sequence

from ml_collections import ConfigDict

from realm_jax.errors import UserError
from realm_jax.launch.slices import Slice, parse

BUCKET = "gs://"
MOUNTED = "/realm"  # where the containers see buckets
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # room is left for what is put behind it
SAVE_SECONDS = 60  # what a save takes at most, measured generously: a grace period below it loses steps
CAPACITIES = ("on-demand", "spot", "reserved")


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
            "kubernetes": {"context": "", "namespace": "default", "queue": "", "service_account": ""},
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
        job = "train" if role is self.trainer else "build-index"
        config = [f"--config={self.config}"] if self.config else []
        return ["realm", job, *config, *self.overrides, *self._shared(), f"--workdir={self.place}", *process]

    def _shared(self) -> list[str]:
        """Trainer and builder meet in the bucket itself; what they say of that comes last, so that it counts."""
        return [f"--config.refresh.shared={self.workdir}"] if self.is_remote else []

    @property
    def is_remote(self) -> bool:
        return self.workdir.startswith(BUCKET)

    @property
    def bucket(self) -> str:
        """The name of the bucket of a remote work directory."""
        return self.workdir.removeprefix(BUCKET).partition("/")[0]

    @property
    def place(self) -> str:
        """The work directory as the programs see it."""
        return self.workdir.replace(BUCKET, f"{MOUNTED}/", 1) if self.is_remote else self.workdir


def describe(spec: ConfigDict, config: str, overrides: Sequence[str], workdir: str) -> Launch:
    """A checked description. Raises UserError, with the key's name, for what cannot be started anywhere."""
    if not LABEL.fullmatch(spec.name):
        raise UserError(f"spec.name={spec.name}: use lower-case letters, digits and '-', at most 40 of them")
    for key in ("restarts", "grace_seconds"):
        if spec[key] < 0:
            raise UserError(f"spec.{key}: must not be negative")
    trainer, builder = (_role(spec, name) for name in ("trainer", "builder"))
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


def check_cloud(launch: Launch, target: str) -> None:
    """Raise UserError for what no cloud can start: before anything is created."""
    if not launch.is_remote or not re.fullmatch(r"gs://[a-z0-9][-_.a-z0-9]*/.+", launch.workdir):
        raise UserError(
            f"--workdir={launch.workdir}: --target={target} needs a folder that all machines see; name gs://BUCKET/FOLDER"
        )
    if not launch.image:
        raise UserError(
            f"spec.image: --target={target} needs a container; build launch/Dockerfile, push it, and name it"
        )
    if launch.config.startswith("/") or ".." in launch.config.split("/"):
        raise UserError(
            f"--config={launch.config}: has to be a file of the container; name it from the folder of the source, "
            "such as configs/realm_wiki.py"
        )
    if launch.grace_seconds < SAVE_SECONDS:
        raise UserError(
            f"spec.grace_seconds={launch.grace_seconds}: a save may take {SAVE_SECONDS} seconds; give it as many"
        )
    if launch.builder.count and launch.builder.slice.hosts != 1:
        raise UserError(
            f"spec.builder.slice={launch.builder.slice}: spans {launch.builder.slice.hosts} machines, but the builders "
            "are independent; name a slice of one machine, such as v5e:2x4, and how many in spec.builder.slices"
        )
