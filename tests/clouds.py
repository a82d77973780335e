"""A launch to a cloud as tests give it: flags, descriptions, and what was sent."""

from fake_tools import calls

from realm_jax.cli import main as cli
from realm_jax.launch import spec as specs
from realm_jax.launch.spec import describe

IMAGE = "us-docker.pkg.dev/p/realm/realm:1"
WORKDIR = "--workdir=gs://bucket/runs/one"
DATA = ("--config.data.path=gs://bucket/data", "--config.tasks=realm")
SKY = ("--target=skypilot", "--spec.skypilot.zones=us-west4-a,us-east5-b", f"--spec.image={IMAGE}", WORKDIR)
JOBSET = ("--target=jobset", f"--spec.image={IMAGE}", WORKDIR)


def described(overrides=(), workdir="gs://bucket/runs/one", config="configs/realm_wiki.py", **changes):
    """A launch; changes: keys of the spec, with __ for the dots."""
    spec = specs.default()
    spec.image = IMAGE
    spec.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return describe(spec, config, list(overrides), workdir)


def launch(*words: str) -> int:
    """`realm launch …`, with what is trained where that is needed; the exit code."""
    starts = words[0].startswith("-")
    return cli.main(["launch", *(DATA if starts else ()), *words])


def asked(folder, tool: str) -> list[list[str]]:
    """The words of each call of a tool, from its verb on."""
    return [one["words"][1:] for one in calls(folder) if one["words"][0] == tool]
