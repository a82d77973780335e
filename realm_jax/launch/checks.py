"""Checks of a launch before anything is created, since failing machines still cost money."""

import re

from realm_jax.config import Config, flatten, is_name, task_names
from realm_jax.errors import UserError
from realm_jax.index.heartbeat import BUILDER, TRAINER
from realm_jax.launch.spec import BUCKET, MOUNTED, Launch

SAVE_SECONDS = 60  # an upper bound on the time of a save: a grace period below it loses steps
IN_IMAGE = ("configs", "launch", "realm_jax")  # folders of the source that launch/Dockerfile copies


def check_place(workdir: str, target: str) -> None:
    """Raise UserError for a work directory that no run in a cloud can have."""
    folders = workdir.removeprefix(BUCKET).split("/")
    if not re.fullmatch(r"gs://[a-z0-9][-_.a-z0-9]*/.+", workdir) or not {".", ".."}.isdisjoint(folders):
        raise UserError(
            f"--workdir={workdir}: --target={target} needs a folder that all machines see, in a bucket "
            "(lower case), such as gs://my-bucket/runs/one"
        )


def check_cloud(launch: Launch, target: str) -> None:
    """Raise UserError for what no cloud can start."""
    if not launch.spec.image:
        raise UserError(
            f"spec.image: --target={target} needs a container; build launch/Dockerfile, push it, and name it"
        )
    steps = launch.config.split("/")
    named = is_name(launch.config.partition(":")[0])
    if launch.config and not named and (steps[0] not in IN_IMAGE or ".." in steps):
        raise UserError(
            f"--config={launch.config}: has to be a file of the container; put it into configs/ and give its name, "
            "such as realm_wiki, or its path from the folder of the source"
        )
    if launch.spec.grace_seconds < SAVE_SECONDS:
        raise UserError(
            f"spec.grace_seconds={launch.spec.grace_seconds}: a save may take {SAVE_SECONDS} seconds; give it as many"
        )
    trainer, builder = launch.slice(TRAINER), launch.slice(BUILDER)
    if target == "queued_resources" and trainer != trainer.default_topology:
        raise UserError(
            f"spec.trainer.slice={trainer}: not available in gcloud; use {trainer.default_topology}, or --target=jobset"
        )
    if launch.spec.builder.slices and builder.hosts != 1:
        raise UserError(
            f"spec.builder.slice={builder}: spans {builder.hosts} machines, but the builders are independent; name a "
            "slice of one machine, such as v5e:2x4, and how many in spec.builder.slices"
        )


def check_training(launch: Launch, config: Config, builders: int, remote: bool) -> None:
    """Raise UserError for a validated config that cannot be trained as the launch says. builders: processes of it."""
    follows = "realm" in task_names(config)
    if config.refresh.mode == "async" and follows and not builders:
        key = "slices" if remote else "processes"
        raise UserError(f"spec.builder.{key}=0: config.refresh.mode=async needs an index builder; start one at least")
    if not remote:
        return
    values, mounted = flatten(config.to_dict()), f"{MOUNTED}/{launch.bucket}/"
    for key, elsewhere in (("data.path", BUCKET), ("init_from", "hf:"), ("reader_from", "hf:")):
        if values[key] and not values[key].startswith((mounted, elsewhere)):
            raise UserError(f"config.{key}={values[key]}: the machines do not see it; name {elsewhere}… or {mounted}…")
    if config.refresh.shared not in ("", launch.workdir):
        raise UserError("config.refresh.shared: in a cloud the jobs meet in --workdir; leave it out")

    # Whether mesh and batches can be shared out over the trainer's chips, as the trainer itself would say.
    from realm_jax.mesh import mesh_sizes  # here, since listing and stopping need no JAX
    from realm_jax.run import check_batches

    chips, count = launch.slice(TRAINER), launch.spec.trainer.slices
    try:
        data, fsdp, _ = mesh_sizes(-1, config.mesh.fsdp, config.mesh.model, chips.chips * count, count)
        check_batches(config, data * fsdp)
    except UserError as fault:
        raise UserError(f"spec.trainer: {count} × {chips}: {fault}") from None
