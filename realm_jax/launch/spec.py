"""The description of a launch, from which every target makes its commands and manifests.

A spec is a Python file like a config, `get_spec() -> ConfigDict` over `default()`, and its keys are set with
`--spec.section.key=value`. The sections below declare them; `realm launch --help-spec` lists them.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ml_collections import ConfigDict

from realm_jax.config import NOT_NEGATIVE, Section, check, from_config_dict, help_text, key, one_of
from realm_jax.errors import UserError
from realm_jax.indexing.heartbeat import BUILDER, TRAINER, process_name

BUCKET = "gs://"
PROGRAMS = "programs"  # folder of a run in a bucket: what JAX compiled for it
# A trainer may wait for machines, or measure baselines, for longer than a builder that is started by hand should wait.
WAIT_FOREVER = "--wait"
VARIABLE = re.compile(r"[A-Za-z_]\w*=[^\n]*")
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")  # a pod's name is this, job, numbers and more: 63 at most
IMAGE = re.compile(r"[a-zA-Z0-9][-\w./:@]*")
# TPU slices: how gcloud and GKE call them, and how their chips are spread over machines, by Google's pages on each TPU
# version (cloud.google.com/tpu/docs/v5e, …/v5p, …/v6e) and on TPUs in GKE
# (cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus).
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")


@dataclass(frozen=True)
class Generation:
    """A version of TPUs.

    Attributes:
        accelerator: GKE's name.
        gcloud: gcloud's name; the name of a slice ends in its number of cores.
        cores_per_chip: cores of a chip, which gcloud counts.
        runtime: image of its machines.
    """

    accelerator: str
    gcloud: str
    cores_per_chip: int
    runtime: str


GENERATIONS = {
    "v5e": Generation("tpu-v5-lite-podslice", "v5litepod", 1, "v2-alpha-tpuv5-lite"),
    "v5p": Generation("tpu-v5p-slice", "v5p", 2, "v2-alpha-tpuv5"),
    "v6e": Generation("tpu-v6e-slice", "v6e", 1, "v2-alpha-tpuv6e"),
}


@dataclass(frozen=True)
class Slice:
    """Connected chips, such as v5e:8x8.

    Attributes:
        version: a key of GENERATIONS.
        topology: such as 8x8.
    """

    version: str
    topology: str

    def __str__(self) -> str:
        return f"{self.version}:{self.topology}"

    @property
    def generation(self) -> Generation:
        """Return the properties of its version of TPUs."""
        return GENERATIONS[self.version]

    @property
    def chips(self) -> int:
        """Return the number of chips."""
        return math.prod(map(int, self.topology.split("x")))

    @property
    def chips_per_host(self) -> int:
        """Return the chips of a GKE machine: all of a small slice if the version has such machines, else four."""
        return self.chips if self.version != "v5p" and self.chips <= 8 else 4

    @property
    def hosts(self) -> int:
        """Return the number of GKE machines."""
        return self.chips // self.chips_per_host

    @property
    def gcloud(self) -> str:
        """Return gcloud's accelerator type of a slice of as many chips, with the `default_topology`."""
        return f"{self.generation.gcloud}-{self.chips * self.generation.cores_per_chip}"

    @property
    def default_topology(self) -> "Slice":
        """Return the most compact slice of as many chips, which gcloud creates for an accelerator type."""
        if self.version != "v5p" or self.topology in SMALL_CUBES:
            return self
        sides = range(4, self.chips + 1, 4)
        shapes = [(a, b, self.chips // (a * b)) for a in sides for b in sides if self.chips % (4 * a * b) == 0]
        return Slice(self.version, "x".join(map(str, sorted(min(shapes, key=sum)))))


def parse(name: str, key: str) -> Slice:
    """Return the slice of a name such as 'v5e:8x8'.

    Args:
        name: name of the slice.
        key: key of the spec, for messages.

    Raises:
        UserError: there is no such slice.
    """
    version, colon, topology = name.partition(":")
    if version not in GENERATIONS or not colon:
        known = ", ".join(GENERATIONS)
        raise UserError(f"{key}={name}: write VERSION:TOPOLOGY, such as v5e:8x8; versions are {known}")
    exists, choices = topology in FLAT, ", ".join(FLAT)
    if version == "v5p":  # small ones, and multiples of 4 × 4 × 4 cubes, with sides in order, up to 16x16x24
        choices = f"{', '.join(SMALL_CUBES)}, 4x4x4, 4x4x8, …"
        is_cuboid = re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", topology)
        sides = [int(side) for side in topology.split("x")] if is_cuboid else [1]
        is_large = all(side % 4 == 0 for side in sides) and sides == sorted(sides) and math.prod(sides) <= 16 * 16 * 24
        exists = topology in SMALL_CUBES or is_large
    if not exists:
        raise UserError(f"{key}={name}: {version} has no such topology; choose among {choices}")
    return Slice(version, topology)


@dataclass(frozen=True)
class Trainer(Section):
    """Processes that train together."""

    slice: str = key("v5e:8x8", "TPU slice as VERSION:TOPOLOGY")
    slices: int = key(1, "number of slices that train together", NOT_NEGATIVE)
    processes: int = key(1, "number of processes that train together, with target `local`", NOT_NEGATIVE)
    priority: str = key("", "priority class of the trainer's pods, with target `jobset`; '': none")


@dataclass(frozen=True)
class Builder(Section):
    """Index builders, which are independent of each other."""

    slice: str = key("v5e:2x4", "TPU slice of one machine, as VERSION:TOPOLOGY")
    slices: int = key(2, "number of builders, with one slice each; 0: none", NOT_NEGATIVE)
    processes: int = key(1, "number of builder processes, with target `local`; 0: none", NOT_NEGATIVE)
    priority: str = key(
        "", "priority class of the builders' pods; give a lower one than the trainer's, so that builders make room"
    )


@dataclass(frozen=True)
class Here(Section):
    """This machine."""

    devices: int = key(0, "number of CPU devices that each process emulates; 0: the real devices", NOT_NEGATIVE)
    gpus: tuple[str, ...] = key(
        (), "CUDA_VISIBLE_DEVICES of each process, trainers first, for example ('0,1', '2'); (): unchanged"
    )


@dataclass(frozen=True)
class SkyPilot(Section):
    """Managed jobs of SkyPilot on TPU VMs; project, network and labels are set in `~/.sky/config.yaml`."""

    zones: str = key(
        "",
        "Google Cloud zones in the order in which they are tried, comma-separated, for example us-west4-a,us-west4-b",
    )
    capacity: str = key("on-demand", "kind of capacity", one_of("on-demand", "spot"))
    secrets: tuple[str, ...] = key(
        (), "environment variables of this machine that SkyPilot passes on without showing them, such as WANDB_API_KEY"
    )

    @property
    def zone_names(self) -> list[str]:
        """Return the names of the zones, in order."""
        return [name.strip() for name in self.zones.split(",") if name.strip()]


@dataclass(frozen=True)
class Kubernetes(Section):
    """JobSets of GKE."""

    context: str = key("", "context of kubectl; '': the current context")
    namespace: str = key("default", "namespace of the JobSets")
    queue: str = key("", "local queue of Kueue; '': none")
    restarts: int = key(
        1000, "maximum number of failures of a JobSet, with or without progress between them", NOT_NEGATIVE
    )
    service_account: str = key("", "Kubernetes service account with access to the bucket (Workload Identity)")
    capacity: str = key("on-demand", "kind of nodes", one_of("on-demand", "spot", "flex-start", "reserved"))
    reservation: str = key("", "name of the reservation, with capacity 'reserved'")
    secrets: tuple[str, ...] = key(
        (), "Kubernetes secrets whose entries become environment variables, for example WANDB_API_KEY"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        is_reserved = self.capacity == "reserved"
        check(is_reserved == bool(self.reservation), "reservation", "goes with capacity 'reserved'; set both or none")

    @property
    def node_labels(self) -> dict[str, str]:
        """Return the labels of the nodes of `capacity`."""
        return {
            "on-demand": {},
            "spot": {"cloud.google.com/gke-spot": "true"},
            "flex-start": {"cloud.google.com/gke-flex-start": "true"},
            "reserved": {"cloud.google.com/reservation-name": self.reservation},
        }[self.capacity]


@dataclass(frozen=True)
class Spec(Section):
    """Name, image and restarts of a launch."""

    name: str = key("realm", "name of the run (a DNS label), and prefix of the names of its cloud resources")
    image: str = key("", "container image with this package, built from `launch/Dockerfile`; required in a cloud")
    restarts: int = key(
        10, "maximum number of failures of a job without progress between them; preemptions do not count", NOT_NEGATIVE
    )
    grace_seconds: int = key(120, "seconds from SIGTERM to SIGKILL, in which jobs save their state", NOT_NEGATIVE)
    environment: tuple[str, ...] = key(
        (), "environment variables of every process as 'NAME=VALUE', for example ('LIBTPU_INIT_ARGS=…',)"
    )
    trainer: Trainer = Trainer()
    builder: Builder = Builder()
    local: Here = Here()
    skypilot: SkyPilot = SkyPilot()
    kubernetes: Kubernetes = Kubernetes()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not LABEL.fullmatch(self.name):
            raise UserError(f"name={self.name}: use lower-case letters, digits and '-', at most 30 of them")
        if self.image and not IMAGE.fullmatch(self.image):
            raise UserError(f"image={self.image}: write it like REGION-docker.pkg.dev/PROJECT/realm/realm:1")
        check(min(self.trainer.processes, self.trainer.slices) > 0, "trainer", "needs one process and one slice")
        for variable in self.environment:
            is_variable = VARIABLE.fullmatch(variable) is not None
            check(is_variable, "environment", f"{variable!r} is no 'NAME=VALUE' of one line; write it so")


def default() -> ConfigDict:
    """Return a spec with every key: one process on this machine and no image."""
    return ConfigDict(Spec().to_dict())


def reference() -> str:
    """Return the page that lists all keys."""
    return help_text(Spec())


class Launch(NamedTuple):
    """The complete description of a launch.

    Attributes:
        spec: with all keys.
        config: the value of --config.
        overrides: --config.key=value.
        workdir: a folder of this machine, or gs://BUCKET/FOLDER.
    """

    spec: Spec
    config: str
    overrides: tuple[str, ...]
    workdir: str

    def slice(self, job: str) -> Slice:
        """Return the slice of 'trainer' or 'builder'."""
        return parse(self.spec[job].slice, f"spec.{job}.slice")

    def command(self, job: str, *flags: str) -> list[str]:
        """Return the command of a process.

        Args:
            job: 'trainer' or 'builder'.
            *flags: further flags, such as `process_flags`.
        """
        program, wait = ("train", []) if job == TRAINER else ("build-index", [WAIT_FOREVER])
        config = [f"--config={self.config}"] if self.config else []
        return ["realm", program, *config, *wait, *self.overrides, f"--workdir={self.workdir}", *flags]

    @property
    def is_remote(self) -> bool:
        """Return True if the run directory is in a bucket."""
        return self.workdir.startswith(BUCKET)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables of all processes; in a cloud, compiled programs stay with the run."""
        programs = {"JAX_COMPILATION_CACHE_DIR": f"{self.workdir}/{PROGRAMS}"} if self.is_remote else {}
        variables = (variable.partition("=") for variable in self.spec.environment)
        return programs | {name: value for name, _, value in variables}


class JobSpec(NamedTuple):
    """A part of a launch that a cloud creates, restarts and ends separately.

    Attributes:
        name: name of the part.
        job: 'trainer' or 'builder'.
        slice: its chips.
        slices: how many.
        words: words of its command.
    """

    name: str
    job: str
    slice: Slice
    slices: int
    words: list[str]


def job_specs(launch: Launch) -> list[JobSpec]:
    """Return the parts of a launch in a cloud: the trainer on all its slices, and a builder on each of its slices."""
    slices, count, chips = launch.spec.trainer.slices, launch.spec.builder.slices, launch.slice(BUILDER)
    trainer = JobSpec(TRAINER, TRAINER, launch.slice(TRAINER), slices, launch.command(TRAINER, "--processes=auto"))
    builders = [
        JobSpec(
            process_name(BUILDER, number), BUILDER, chips, 1, launch.command(BUILDER, *process_flags(number, count))
        )
        for number in range(count)
    ]
    return [trainer, *builders]


def process_flags(number: int, count: int) -> list[str]:
    """Return the flags of one of several processes.

    Args:
        number: number of the process.
        count: count of processes.
    """
    return [f"--process={number}", f"--processes={count}"]


def choose(job: str, names: Iterable[str]) -> str:
    """Return the name of the process that --job means: itself, or the first process of a job.

    Args:
        job: the value of --job.
        names: names of the processes.

    Raises:
        UserError: there is no such process; the message lists the choices.
    """
    choices = list(names)
    for name in (job, process_name(job, 0)):
        if name in choices:
            return name
    raise UserError(f"--job={job}: there is no such job; choose among {', '.join(choices) or 'none'}")


def describe(spec: ConfigDict, config: str, overrides: Sequence[str], workdir: str) -> Launch:
    """Return the description of a launch after checking it.

    Args:
        spec: spec of the launch.
        config: the value of --config.
        overrides: --config.key=value.
        workdir: a folder of this machine, or gs://BUCKET/FOLDER.

    Raises:
        UserError: no target can start it; the message names the key.
    """
    for override in overrides:
        if "\n" in override:
            raise UserError(f"{override.partition('=')[0]}: a value of one line is needed; set it in a config file")
    launch = Launch(from_config_dict(Spec(), spec, "spec"), config, tuple(overrides), workdir.rstrip("/") or workdir)
    job_specs(launch)  # raises for a slice that does not exist
    return launch
