"""SkyPilot's own parser accepts every task that `realm launch --target=skypilot --dry-run` prints.

SkyPilot is no dependency: `pip install 'skypilot[gcp]' pytest` in an environment of its own, and there
`python -m pytest --noconftest -c /dev/null tests/launch/test_skypilot_tasks.py`.
"""

from pathlib import Path

import pytest
import yaml

GOLDEN = Path(__file__).resolve().parents[2] / "launch" / "golden"


@pytest.mark.parametrize("version", ["v5e", "v5p", "v6e"])
def test_skypilot_reads_the_tasks_of_a_dry_run(version):
    sky = pytest.importorskip("sky")
    documents = list(yaml.safe_load_all((GOLDEN / f"skypilot-{version}.txt").read_text()))
    tasks = [sky.Task.from_yaml_config(dict(document)) for document in documents]
    assert [task.name for task in tasks] == [document["name"] for document in documents]
    for task, document in zip(tasks, documents, strict=True):
        first, second = task.resources  # a list: tried in order
        assert (first.zone, second.zone, first.use_spot) == ("us-west4-a", "us-east5-b", True)
        assert [*first.accelerators] == [document["resources"]["accelerators"]]
        assert first.job_recovery["recover_on_exit_codes"] == [75]
