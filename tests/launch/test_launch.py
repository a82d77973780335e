"""`realm launch` to clouds: what is sent, what is refused before anything is sent, and what the tools complain of."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from clouds import IMAGE, JOBSET, SKY, WORKDIR, described, launch
from fake_tools import calls

from realm_jax.config import load_config
from realm_jax.errors import UserError
from realm_jax.launch import spec as specs
from realm_jax.launch.cloud import explain_error
from realm_jax.launch.jobset import manifests
from realm_jax.launch.skypilot import SkyPilot
from realm_jax.launch.spec import choose, job_specs, parse

ROOT = Path(__file__).resolve().parents[2]
AWKWARD = 'it\'s $HOME, "two" words: {{ x }} # é 😀'


# ---- goldens


def test_dry_runs_are_the_golden_files():
    sys.path.insert(0, str(ROOT / "launch"))
    try:
        from update_goldens import GOLDEN, goldens
    finally:
        sys.path.pop(0)
    kept = {file.name: file.read_text() for file in GOLDEN.glob("*.txt")}
    assert goldens() == kept, "python launch/update_goldens.py writes them; read the difference"
    assert len(kept) == 7


# ---- slices


@pytest.mark.parametrize(
    ("name", "hosts", "chips", "gcloud"),
    [
        ("v5e:8x8", 16, 4, "v5litepod-64"),
        ("v5e:2x4", 1, 8, "v5litepod-8"),
        ("v5p:4x4x16", 64, 4, "v5p-512"),
        ("v5p:4x8x8", 64, 4, "v5p-512"),
        ("v5p:2x2x1", 1, 4, "v5p-8"),
        ("v6e:1x1", 1, 1, "v6e-1"),
        ("v6e:16x16", 64, 4, "v6e-256"),
    ],
)
def test_a_slice_has_its_names_and_machines(name, hosts, chips, gcloud):
    found = parse(name, "spec.trainer.slice")
    assert (found.hosts, found.chips_per_host, found.hosts * found.chips_per_host) == (hosts, chips, found.chips)
    assert (found.gcloud, str(found)) == (gcloud, name)


@pytest.mark.parametrize(
    ("name", "default_topology"),
    [
        ("v5e:4x8", "v5e:4x8"),
        ("v5p:2x4x4", "v5p:2x4x4"),
        ("v5p:4x4x4", "v5p:4x4x4"),
        ("v5p:4x4x16", "v5p:4x8x8"),
        ("v5p:4x16x16", "v5p:8x8x16"),
        ("v5p:4x4x28", "v5p:4x4x28"),
        ("v5p:4x12x32", "v5p:8x12x16"),
        ("v5p:16x16x24", "v5p:16x16x24"),
    ],
)
def test_the_usual_shape_of_a_size_is_the_most_compact_one(name, default_topology):
    assert str(parse(name, "spec.trainer.slice").default_topology) == default_topology


@pytest.mark.parametrize(
    "name",
    ["v5e", "v4:2x2x1", "v5e:3x3", "v5e:4x4x4", "v5p:8x8", "v5p:8x4x4", "v5p:4x4x6", "v5p:16x16x32", "v5p:04x04x04"],
)
def test_a_slice_that_does_not_exist_is_refused(name):
    with pytest.raises(UserError, match=f"spec.trainer.slice={name}: "):
        parse(name, "spec.trainer.slice")


# ---- before anything is created


NOWHERE = ("--target=jobset", f"--spec.image={IMAGE}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*NOWHERE, "--workdir=runs/one"], "--workdir=runs/one: --target=jobset needs a folder that all machines see"),
        (["stop", "--target=jobset", "--workdir=runs/one"], "--workdir=runs/one: --target=jobset needs a folder"),
        (["delete", *SKY, "--workdir=runs/one"], "--workdir=runs/one: --target=skypilot needs a folder"),
        ([*NOWHERE, "--workdir=gs://BUCKET/one"], "gs://BUCKET/one: --target=jobset needs a folder that all machines"),
        ([*NOWHERE, "--workdir=gs://bucket/../x"], "--workdir=gs://bucket/../x: --target=jobset needs a folder"),
        (["--target=jobset", WORKDIR], "spec.image: --target=jobset needs a container"),
        ([*JOBSET, "--spec.image=a b;c"], "spec.image=a b;c: write it like"),
        ([*JOBSET, "--spec.trainer.slice=v5e:7x7"], "spec.trainer.slice=v5e:7x7: v5e has no such topology"),
        ([*JOBSET, "--spec.builder.slice=v5e:4x4"], "spec.builder.slice=v5e:4x4: spans 4 machines"),
        ([*SKY, "--spec.trainer.slice=v5p:4x4x16"],
         "spec.trainer.slice=v5p:4x4x16: TPU VMs of this size have another topology; use v5p:4x8x8, or"),
        ([*SKY, "--spec.trainer.slices=2"], "spec.trainer.slices=2: SkyPilot cannot connect slices; use a larger"),
        ([*JOBSET, "--spec.grace_seconds=10"], "spec.grace_seconds=10: a save may take 60 seconds"),
        ([*JOBSET, "--spec.name=My_Run"], "spec.name=My_Run: use lower-case letters"),
        ([*JOBSET, f"--spec.name={'a' * 31}"], "at most 30 of them"),
        ([*JOBSET, "--config=configs/nothing.py"], "there is no file configs/nothing.py"),
        ([*JOBSET, "--config=tests/made.py"], "--config=tests/made.py: has to be a file of the container"),
        ([*JOBSET, "--config.realm.stesp=1"], "there is no such key in the config"),
        ([*JOBSET, "--spec.trainer.slcie=v5e:8x8"], "there is no such key in the spec"),
        ([*JOBSET, "--config.refresh.mode=inline"], "the spec has index builders"),
        ([*JOBSET, "--config.refresh.mode=async", "--config.refresh.mode=inline"],
         "--config.refresh.mode=inline: the spec has index builders"),
        ([*JOBSET, "--config.retrieval.backend=scann", "--config.realm.search=bm25", "--dry-run"],
         "config.realm.search: "),
        ([*JOBSET, "--spec.name", "foo"], "--spec.name: no value; write --spec.name=VALUE"),
        ([*JOBSET, "--config.refresh.shared=gs://other/x"], "in a cloud all jobs share --workdir"),
        ([*JOBSET, "--config.refresh.mode=async", "--spec.builder.slices=0"], "spec.builder.slices=0: config.refresh"),
        ([*JOBSET, "--config.data.path="], "config.data.path: set it to a folder written by"),
        ([*JOBSET, "--config.data.path=data/wiki"], "config.data.path=data/wiki: the machines cannot read it"),
        ([*JOBSET, "--config.init_from=runs/ict"], "config.init_from=runs/ict: the machines cannot read it"),
        ([*JOBSET, "--config=realm_wiki"], "config.init_from: this config continues a finished run; set"),
        ([*JOBSET, "--config=qa_wiki"], "config.init_from: this config continues a finished run; set"),
        ([*JOBSET, "--config.mesh.model=7"], "spec.trainer: 1 × v5e:8x8: config.mesh"),
        ([*JOBSET, "--config.realm.batch_size=72"], "spec.trainer: 1 × v5e:8x8: config.realm.batch_size: is 72"),
        ([*JOBSET, "--config.data.path=gs://b/a\nEND-OF-JOB"], "--config.data.path: a value of one line is needed"),
        ([*SKY, "--spec.skypilot.zones="], "spec.skypilot.zones=: name the zones of your TPU quota"),
        ([*SKY, "--spec.skypilot.zones=us-west4"], "spec.skypilot.zones=us-west4: name the zones of your TPU quota"),
        ([*SKY, "--spec.skypilot.capacity=cheap"], "spec.skypilot.capacity: must be one of 'on-demand'"),
        (["--target=local", WORKDIR], "--target=local needs a folder of this machine"),
        (["--target=local", "--workdir=s3://b/x"], "--target=local needs a folder of this machine"),
        (["--target=local", "--workdir=x", "--config.refresh.mode=async", "--spec.builder.processes=0"],
         "spec.builder.processes=0: config.refresh.mode=async needs an index builder"),
        ([WORKDIR], "--target: name one of local, skypilot, jobset"),
        (["--dry-run", "stop", *JOBSET], "--dry-run: applies only to start"),
        (["--target=local"], "--workdir: name the run directory"),
        (["stop", WORKDIR], "--target: name one of local, skypilot, jobset"),
        (["status", WORKDIR, "--spec.name=x"], "--target: name one of local, skypilot, jobset"),
    ],
)  # fmt: skip
def test_a_mistake_stops_before_anything_is_created(tools, capsys, monkeypatch, tmp_path, arguments, message):
    folder = tools()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "made.py").write_text("from realm_jax.config import default as get_config")
    monkeypatch.chdir(tmp_path)
    assert launch(*arguments) == 2
    assert message in capsys.readouterr().err
    assert calls(folder) == [] and sorted(path.name for path in tmp_path.iterdir()) == ["bin", "tests"]


@pytest.mark.parametrize("flag", ["--dry-run", "--job=trainer", "--json"])
def test_an_action_refuses_the_flags_of_others(tools, capsys, flag):
    folder = tools()
    with pytest.raises(SystemExit) as end:
        launch("stop", *JOBSET, flag)
    assert end.value.code == 2 and calls(folder) == []
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


def test_flags_before_the_action_count(tools):
    folder = tools({"match": "kubectl get", "stdout": '{"items": []}'})
    assert launch(*JOBSET, "status") == 0
    assert "--selector=realm-jax/run=realm" in calls(folder)[0]["words"]


def test_the_keys_of_specs_are_listed_without_any_other_argument(capsys):
    with pytest.raises(SystemExit) as end:
        launch("status", "--help-spec")
    assert end.value.code == 0 and "* `skypilot.capacity` (`'on-demand'`; one of" in capsys.readouterr().out


def test_an_error_in_a_spec_file_names_the_spec(tmp_path):
    file = tmp_path / "spec.py"
    file.write_text(
        "from realm_jax.launch.spec import default\ndef get_spec():\n  s = default(); s.typo = 1; return s\n"
    )
    with pytest.raises(UserError, match="^spec.typo: no such key"):
        load_config(str(file), [], specs.default, kind="spec")


def test_a_value_with_a_space_in_it_is_one_value(tmp_path, capsys):
    words = ["--target=local", f"--workdir={tmp_path}", "--config.tasks=qa", "--dry-run"]
    assert launch(*words, "--spec.local.gpus=('0, 1',)") == 0
    assert capsys.readouterr().out.startswith("trainer-0: CUDA_VISIBLE_DEVICES='0, 1' realm train ")


def test_a_job_is_called_by_its_name_or_means_its_first_process():
    names = [part.name for part in job_specs(described(builder__slices=2))]
    assert names == ["trainer", "builder-0", "builder-1"]
    assert [choose(job, names) for job in ("trainer", "builder", "builder-1")] == ["trainer", "builder-0", "builder-1"]
    assert choose("trainer", ["trainer-0", "trainer-1"]) == "trainer-0"
    with pytest.raises(UserError, match="--job=bilder: there is no such job; choose among trainer, builder-0"):
        choose("bilder", names)


# ---- quoting


def test_special_characters_reach_the_program_unchanged():
    launch = described([f"--config.data.path={AWKWARD}"])
    *_, trainer = SkyPilot(launch).tasks().values()
    script = yaml.safe_load(trainer)["run"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0
    command = script.partition("docker run")[2].partition(" &\n")[0].replace("\\\n", " ")
    assert f"--config.data.path={AWKWARD}" in shlex.split(command)
    trainer, *_ = manifests(launch)
    words = trainer["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--config.data.path={AWKWARD.replace('$', '$$')}" in words, "Kubernetes makes one $ of two"


# ---- what they complain of


@pytest.mark.parametrize(
    ("tool", "complaint", "advice"),
    [
        ("sky", "NotSupportedError: file_mounts are specified, but no cloud storage is available.", "run `gcloud auth"),
        ("sky", "Quota limit 'TPUV5sLitepodPerProject' has been exceeded.", "over the project's quota"),
        ("sky", "PERMISSION_DENIED: tpu.nodes.create", "not allowed"),
        ("sky", "PERMISSION_DENIED: Quota exceeded for quota metric", "over the project's quota"),
        ("sky", "PERMISSION_DENIED: Cloud TPU API has not been used in project 1 before", "services enable"),
        ("sky", "ValueError: Invalid region 'us-west9'\nDid you mean 'us-west4'?", "set spec.skypilot.zones"),
        ("sky", "ResourcesUnavailableError: Catalog does not contain any instances satisfying", "knows no such slice"),
        ("kubectl", "exec: executable gke-gcloud-auth-plugin not found", "components install gke-gcloud-auth-plugin"),
        ("kubectl", 'error: context "gke" does not exist', "set spec.kubernetes.context"),
        ("kubectl", 'error: the server doesn\'t have a resource type "jobset"', "the cluster has no JobSet"),
        ("kubectl", 'Error from server (NotFound): namespaces "x" not found', "set spec.kubernetes.namespace"),
        ("kubectl", "The connection to the server 1.2.3.4 was refused - did you specify", "cannot be reached"),
        ("kubectl", 'error: resource mapping not found: no matches for kind "JobSet" in version', "has no JobSet"),
        ("kubectl", "error: You must be logged in to the server (Unauthorized)", "kubectl is not logged in"),
        ("kubectl", "Unable to connect to the server: dial tcp: lookup x: no such host", "cannot be reached"),
        ("kubectl", "The JobSet is invalid: spec.replicatedJobs: Invalid value: field is immutable", "other settings"),
        (
            "kubectl",
            'E1130 02:07:46.1 9 a.go:265] "Unhandled"\nerror: quite new',
            "kubectl failed: error: quite new",
        ),
        ("sky", "ERROR: something\nquite new", "sky failed: something quite new"),
    ],
)
def test_an_error_of_a_tool_becomes_one_line_with_advice(tool, complaint, advice):
    message = explain_error(tool, "job one", complaint)
    assert advice in message and "\n" not in message and message.startswith("job one: ")


def test_an_error_of_a_tool_ends_the_command_with_exit_code_2(tools, capsys):
    listed = {"match": "queue", "stdout": "[]"}
    tools(listed, {"match": "jobs launch", "stderr": "ERROR: Quota limit exceeded\n", "code": 1})
    assert launch(*SKY) == 2
    assert "over the project's quota" in capsys.readouterr().err


def test_a_tool_that_is_not_installed_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch("status", *JOBSET) == 2
    assert "kubectl is not installed; install it" in capsys.readouterr().err


@pytest.mark.parametrize("target", [SKY, JOBSET])
def test_status_rejects_an_answer_that_is_not_json(tools, capsys, target):
    tools({"match": "get", "stdout": "Welcome!"}, {"match": "queue", "stdout": "Welcome!"})
    assert launch("status", *target) == 2
    assert "did not answer with JSON: 'Welcome!'" in capsys.readouterr().err


def test_a_recipe_without_realm_has_no_builder(capsys, tmp_path):
    for target in (["--target=local", f"--workdir={tmp_path}"], JOBSET, SKY):
        assert launch(*target, "--config.tasks=qa", "--spec.trainer.slice=v5e:4x4", "--dry-run") == 0
        out = capsys.readouterr().out
        assert "train" in out and "build-index" not in out and "refresh.mode" not in out


def test_a_dry_run_prints_and_asks_for_nothing(tools, capsys):
    folder = tools()
    assert launch(*SKY, "--dry-run") == 0
    assert "sky jobs launch --yes --detach-run realm-trainer-" in capsys.readouterr().out
    assert launch(*JOBSET, "start", "--dry-run") == 0
    assert "kind: JobSet" in capsys.readouterr().out and calls(folder) == []
