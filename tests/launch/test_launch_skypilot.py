"""`realm launch --target=skypilot`: what SkyPilot is asked, and what a machine does with a task's script."""

import json
import subprocess

import pytest
import yaml
from clouds import SKY, asked, described, launch
from fake_tools import calls

from realm_jax.launch.skypilot import SkyPilot
from realm_jax.launch.status import EXPECTED
from realm_jax.storage import open_folder

TRAINER, BUILDER, SECOND = [SkyPilot(described())._name(part) for part in ("trainer", "builder-0", "builder-1")]


def job(number, name, status="RUNNING", **others):
    """A job as SkyPilot's queue tells of it."""
    return {"job_id": number, "job_name": name, "status": status, "recovery_count": 0, "infra": None, **others}


def queue(*jobs):
    """SkyPilot's answer, after the lines that it prints when it starts its server."""
    started = "\x1b[2mFailed to connect to SkyPilot API server. Starting a local server.\x1b[0m\n"
    return {"match": "sky jobs queue", "stdout": started + json.dumps(jobs, indent=2)}


def did(folder, verb):
    """What came behind a verb, call for call."""
    return [words[2:] for words in asked(folder, "sky") if words[:2] == ["jobs", verb]]


def expected_jobs(tmp_path):
    """The jobs that the run directory says should be running."""
    return open_folder(f"memory://{tmp_path.name}/bucket/runs/one").read_json(EXPECTED)["jobs"]


def test_start_submits_the_builders_before_the_trainer(tools, tmp_path):
    folder = tools({"match": "queue", "stderr": "sky.exceptions.ClusterNotUpError: No in-progress managed jobs.\n",
                    "code": 1})  # fmt: skip
    assert launch(*SKY, "--spec.skypilot.capacity=spot") == 0
    tasks = [yaml.safe_load(task) for call in calls(folder) for task in call["tasks"]]
    assert [task["name"] for task in tasks] == [BUILDER, SECOND, TRAINER]
    assert all(words[:2] == ["--yes", "--detach-run"] for words in did(folder, "launch"))
    resources = tasks[-1]["resources"]
    assert (resources["accelerators"], resources["use_spot"]) == ("tpu-v5litepod-64", True)
    assert [place["infra"] for place in resources["ordered"]] == ["gcp/us-west4/us-west4-a", "gcp/us-east5/us-east5-b"]
    assert expected_jobs(tmp_path) == ["trainer", "builder-0", "builder-1"]


def test_secrets_are_read_from_this_machine_and_reach_the_container(tools, capsys, monkeypatch):
    """Only their names are shown."""
    secret = "--spec.skypilot.secrets=('WANDB_API_KEY',)"
    folder = tools(queue())
    assert launch(*SKY, secret) == 2
    assert "spec.skypilot.secrets: the environment variable WANDB_API_KEY is not set here" in capsys.readouterr().err
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    assert launch(*SKY, secret, "--dry-run") == 0
    plan = capsys.readouterr().out
    assert "--env=WANDB_API_KEY" in plan and "s3cret" not in plan
    assert launch(*SKY, secret) == 0
    submitted = did(folder, "launch")
    assert len(submitted) == 3 and all("--secret=WANDB_API_KEY" in words for words in submitted)


def test_start_again_submits_only_jobs_that_have_ended(tools, capsys):
    jobs = [job(1, TRAINER, "CANCELLED"), job(4, TRAINER, "RECOVERING"), job(2, BUILDER, "FAILED")]
    folder = tools(queue(*jobs, job(3, "realm-trainer-of-another-run")))
    assert launch(*SKY) == 0
    assert [task.splitlines()[0] for call in calls(folder) for task in call["tasks"]] == [
        f'name: "{BUILDER}"',
        f'name: "{SECOND}"',
    ]
    assert f"job {TRAINER}: exists already (recovering)" in capsys.readouterr().out


def test_start_waits_for_the_end_of_a_job_that_is_being_cancelled(tools, capsys):
    folder = tools(queue(job(1, TRAINER, "CANCELLING"), job(2, BUILDER)))
    assert launch(*SKY) == 2 and not did(folder, "launch")
    assert f"job {TRAINER}: SkyPilot still deletes its machines; start it when" in capsys.readouterr().err


def test_stop_lets_running_jobs_save_and_cancels_those_without_machines(tools, capsys, tmp_path):
    folder = tools(queue(job(1, TRAINER), job(2, BUILDER, "PENDING"), job(3, SECOND, "SUCCEEDED")))
    assert launch("stop", *SKY) == 0
    assert did(folder, "cancel") == [["--yes", "2"]] and expected_jobs(tmp_path) == []
    out = capsys.readouterr().out
    assert f"job {TRAINER}: saves and ends" in out and f"job {BUILDER}: canceled" in out


def test_delete_cancels_every_job_of_this_run_directory_only(tools, capsys):
    other = SkyPilot(described(workdir="gs://bucket/runs/two"))._name("trainer")
    folder = tools(queue(job(1, TRAINER), job(2, BUILDER, "STARTING"), job(5, other)))
    assert launch("delete", *SKY) == 0
    assert did(folder, "cancel") == [["--yes", "1", "2"]]
    tools(queue(job(1, TRAINER, "SUCCEEDED")))
    assert launch("delete", *SKY) == 2
    assert "spec.name=realm: all jobs of this run have ended" in capsys.readouterr().err
    tools(queue())
    assert launch("delete", *SKY, "--spec.name=typo") == 2
    assert "spec.name=typo: no job of this run is there" in capsys.readouterr().err


def test_logs_are_those_of_the_newest_job_of_that_name(tools, capsys):
    folder = tools(queue(job(7, TRAINER), job(1, TRAINER, "CANCELLED"), job(8, BUILDER)))
    assert launch("logs", *SKY) == 0 and launch("logs", *SKY, "--job=builder", "--follow") == 0
    assert did(folder, "logs") == [["7", "--no-follow"], ["8", "--follow"]]
    assert launch("logs", *SKY, "--job=builder-1") == 2
    assert "--job=builder-1: there is no such job; choose among trainer, builder-0" in capsys.readouterr().err


def test_status_shows_recoveries_and_the_reason_of_a_failure(tools, capsys):
    tools(queue(job(7, TRAINER, "FAILED", infra="GCP (us-west4-a)", recovery_count=3, failure_reason="exit code 2")))
    assert launch("status", *SKY, "--json") == 0
    (shown,) = json.loads(capsys.readouterr().out)["resources"]
    assert (shown["name"], shown["state"]) == (TRAINER, "failed")
    assert shown["detail"] == "number 7; GCP (us-west4-a); 3 recoveries; exit code 2"


# ---- the script of a machine


def run_script(tmp_path, part, docker, codes="", stopped=False):
    """Run a task's script with a stand-in for docker that writes down its calls; return (exit code, calls)."""
    tasks = SkyPilot(described(restarts=2)).tasks()
    script = yaml.safe_load(tasks[part])["run"]
    (tmp_path / "jobs").mkdir(exist_ok=True)
    jobs = [] if stopped else ["trainer", "builder-0", "builder-1"]
    (tmp_path / EXPECTED).write_text(json.dumps({"jobs": jobs}))
    (tmp_path / "codes").write_text(codes.replace(" ", "\n") + "\n")
    (tmp_path / "calls").write_text("")
    stand_ins = {
        "docker": f"echo $1 >>calls\n{docker}",
        "sleep": "exec /usr/bin/sleep 0.01",
        "sudo": "",
        "gcloud": GCLOUD,
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(["bash", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60)
    return done.returncode, (tmp_path / "calls").read_text().split()


GCLOUD = f"""case "$2 $3" in
"cat gs://bucket/runs/one/{EXPECTED}") cat {EXPECTED} ;;
"cp -") cat >{EXPECTED} ;;
esac"""
NEXT_CODE = "[ $1 = run ] || exit 0\ncode=$(head -n1 codes)\nsed -i 1d codes\nexit $code"


@pytest.mark.parametrize(
    ("codes", "ends_with", "runs"),
    [("0", 0, 1), ("2", 2, 1), ("75", 75, 1), ("1 70 74", 74, 3), ("1 70 0", 0, 3), ("134 75", 75, 2)],
)
def test_a_machine_counts_failures_and_leaves_preemptions_to_skypilot(tmp_path, codes, ends_with, runs):
    code, made = run_script(tmp_path, TRAINER, NEXT_CODE, codes)
    assert (code, made.count("run")) == (ends_with, runs)
    assert made[:2] == ["rm", "run"], "a container that was left over would have its name"


@pytest.mark.parametrize(("part", "expected"), [(TRAINER, []), (BUILDER, ["trainer", "builder-0", "builder-1"])])
def test_a_trainer_that_gives_up_ends_its_builders(tmp_path, part, expected):
    assert run_script(tmp_path, part, NEXT_CODE, "2")[0] == 2
    assert json.loads((tmp_path / EXPECTED).read_text())["jobs"] == expected


def test_a_machine_of_a_stopped_run_saves_and_ends_without_a_restart(tmp_path):
    docker = """case $1 in
run) touch runs; while [ ! -e stopped ]; do /usr/bin/sleep 0.05; done; exit 75 ;;
stop) [ -e runs ] && touch stopped ;;
esac"""
    code, made = run_script(tmp_path, BUILDER, docker, stopped=True)
    assert code == 0 and made.count("run") == 1 and "stop" in made


def test_a_run_directory_that_cannot_be_read_stops_nothing(tmp_path):
    code, made = run_script(tmp_path, TRAINER, f"rm -f {EXPECTED}\n{NEXT_CODE}", "1 0")
    assert code == 0 and "stop" not in made
