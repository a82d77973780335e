"""Checks of a launch before anything is created, since failing machines still cost money."""

import re

from realm_jax.config import Config, flatten, is_name, task_names
from realm_jax.errors import UserError
from realm_jax.indexing.heartbeat import BUILDER, TRAINER
from realm_jax.launch.spec import BUCKET, Launch

SAVE_SECONDS = 60  # an upper bound of the time of a save: a shorter grace period loses steps
IN_IMAGE = ("configs", "launch", "realm_jax")  # folders of the source that launch/Dockerfile copies


def check_remote_workdir(workdir: str, target: str) -> None:
    """Check a run directory for a run in a cloud.

    Args:
        workdir: the run directory.
        target: target of the launch, for the message.

    Raises:
        UserError: it is not in a bucket.
    """
    folders = workdir.removeprefix(BUCKET).split("/")
    if not re.fullmatch(r"gs://[a-z0-9][-_.a-z0-9]*/.+", workdir) or not {".", ".."}.isdisjoint(folders):
        raise UserError(
            f"--workdir={workdir}: --target={target} needs a folder that all machines see, in a bucket "
            "(lower case), such as gs://my-bucket/runs/one"
        )


def check_cloud(launch: Launch, target: str) -> None:
    """Check a launch for settings that no cloud, or not this one, can start.

    Args:
        launch: the description.
        target: target of the launch.

    Raises:
        UserError: a key of the spec, or --config, does not suit it.
    """
    if not launch.spec.image:
        raise UserError(
            f"spec.image: --target={target} needs a container; build launch/Dockerfile, push it, and name it"
        )
    parts = launch.config.split("/")
    is_shipped = is_name(launch.config.partition(":")[0])
    if launch.config and not is_shipped and (parts[0] not in IN_IMAGE or ".." in parts):
        raise UserError(
            f"--config={launch.config}: has to be a file of the container; put it into configs/ and give its name, "
            "such as realm_wiki, or its path from the folder of the source"
        )
    if launch.spec.grace_seconds < SAVE_SECONDS:
        raise UserError(
            f"spec.grace_seconds={launch.spec.grace_seconds}: a save may take {SAVE_SECONDS} seconds; give it as many"
        )
    trainer, builder = launch.slice(TRAINER), launch.slice(BUILDER)
    if target == "skypilot":
        zones = launch.spec.skypilot.zone_names
        if not zones or not all(re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]", zone) for zone in zones):
            raise UserError(
                f"spec.skypilot.zones={launch.spec.skypilot.zones}: name the zones of your TPU quota, such as "
                "us-west4-a,us-west4-b"
            )
        if trainer != trainer.default_topology:
            raise UserError(
                f"spec.trainer.slice={trainer}: TPU VMs of this size have another topology; use "
                f"{trainer.default_topology}, or --target=jobset"
            )
        if launch.spec.trainer.slices > 1:
            raise UserError(
                f"spec.trainer.slices={launch.spec.trainer.slices}: SkyPilot cannot connect slices; use a larger "
                "spec.trainer.slice, or --target=jobset"
            )
    if launch.spec.builder.slices and builder.hosts != 1:
        raise UserError(
            f"spec.builder.slice={builder}: spans {builder.hosts} machines, but the builders are independent; name a "
            "slice of one machine, such as v5e:2x4, and how many in spec.builder.slices"
        )


def check_training(launch: Launch, config: Config, builders: int, remote: bool) -> None:
    """Check that a config can be trained as a launch describes.

    Args:
        launch: the description.
        config: validated.
        builders: number of builder processes.
        remote: it runs in a cloud.

    Raises:
        UserError: no builder is started though the config needs one, machines do not see a path, or the batches cannot
            be sharded over the chips.
    """
    follows = "realm" in task_names(config)
    if config.refresh.mode == "async" and follows and not builders:
        key = "slices" if remote else "processes"
        raise UserError(f"spec.builder.{key}=0: config.refresh.mode=async needs an index builder; start at least one")
    if not remote:
        return
    values = flatten(config.to_dict())
    for key, prefixes in (("data.path", (BUCKET,)), ("init_from", (BUCKET, "hf:")), ("reader_from", (BUCKET, "hf:"))):
        if values[key] and not values[key].startswith(prefixes):
            allowed = " or ".join(f"{prefix}…" for prefix in prefixes)
            raise UserError(f"config.{key}={values[key]}: the machines cannot read it; name {allowed}")
    if config.refresh.shared not in ("", launch.workdir):
        raise UserError("config.refresh.shared: in a cloud all jobs share --workdir; leave it out")

    # Mesh and batches must be divisible over the trainer's chips, or the trainer itself would raise.
    from realm_jax.mesh import mesh_sizes  # imported here because listing and stopping need no JAX
    from realm_jax.run import check_batches

    chips, count = launch.slice(TRAINER), launch.spec.trainer.slices
    try:
        data, fsdp, _ = mesh_sizes(-1, config.mesh.fsdp, config.mesh.model, chips.chips * count, count)
        check_batches(config, data * fsdp)
    except UserError as error:
        raise UserError(f"spec.trainer: {count} × {chips}: {error}") from None
