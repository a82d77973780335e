"""Write what `realm launch --dry-run` prints for every spec here and every target into `golden/`.

    python launch/update_goldens.py

Run it after a change that is meant to change what is sent, and read the difference before it is committed.
"""

from pathlib import Path

from ml_collections import ConfigDict

from realm_jax.cli.launch import TARGETS
from realm_jax.config import load_config
from realm_jax.launch import spec as specs
from realm_jax.launch.spec import describe

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden"
CLOUDS = ("jobset", "skypilot")
SET = (
    "--spec.image=us-docker.pkg.dev/my-project/realm/realm:1",
    "--spec.skypilot.zones=us-west4-a,us-east5-b",
    "--spec.skypilot.capacity=spot",
    "--spec.kubernetes.service_account=realm",
)
OVERRIDES = ("--config.data.path=gs://my-bucket/data", "--config.realm.steps=200000", "--config.refresh.mode=async")


def goldens() -> dict[str, str]:
    """File name → content."""
    found = {}
    for file in sorted(HERE.glob("v*.py")):
        spec = load_config(str(file), SET, specs.default, kind="spec")
        launch = describe(spec, "configs/realm_wiki.py", OVERRIDES, "gs://my-bucket/runs/realm")
        for target in CLOUDS:
            found[f"{target}-{file.stem}.txt"] = TARGETS[target](launch).plan()
    found["local.txt"] = TARGETS["local"](describe(here(), "configs/quickstart.py", OVERRIDES[2:], "runs/try")).plan()
    return found


def here() -> ConfigDict:
    """Two processes that train together and two that build indexes, each on a GPU of its own."""
    spec = specs.default()
    spec.trainer.processes, spec.builder.processes = 2, 2
    spec.local.gpus = ("0", "1", "2", "3")
    return spec


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, text in goldens().items():
        (GOLDEN / name).write_text(text)
