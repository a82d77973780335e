"""`realm launch` to clouds: what is sent, what is refused before anything is sent, and what the tools complain of."""

import gzip
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from fake_tools import calls, install

from realm_jax import cli
from realm_jax.errors import UserError
from realm_jax.launch import spec as specs
from realm_jax.launch.jobset import check, manifests, to_yaml
from realm_jax.launch.queued_resources import startup_script
from realm_jax.launch.slices import parse
from realm_jax.launch.spec import describe
from realm_jax.launch.tools import explain

ROOT = Path(__file__).resolve().parents[1]
IMAGE = "us-docker.pkg.dev/p/realm/realm:1"
WORKDIR = "--workdir=gs://bucket/runs/one"
GCLOUD = ("--target=queued_resources", "--spec.gcloud.project=p", "--spec.gcloud.zone=z", f"--spec.image={IMAGE}")
JOBSET = ("--target=jobset", f"--spec.image={IMAGE}")
AWKWARD = 'it\'s $HOME, "two" words'


def described(overrides=(), workdir="gs://bucket/runs/one", config="configs/realm_wiki.py", **changes):
    spec = specs.default()
    spec.image = IMAGE
    spec.update_from_flattened_dict({key.replace("__", "."): value for key, value in changes.items()})
    return describe(spec, config, list(overrides), workdir)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Fakes on PATH; call it with their answers."""

    def put(*answers: dict) -> Path:
        install(tmp_path / "bin", list(answers))
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        return tmp_path / "bin"

    return put


# ---- goldens


def test_what_is_sent_is_what_was_read_and_committed():
    sys.path.insert(0, str(ROOT / "launch"))
    try:
        from update_goldens import GOLDEN, goldens
    finally:
        sys.path.pop(0)
    kept = {file.name: file.read_text() for file in GOLDEN.glob("*.txt")}
    assert goldens() == kept, "python launch/update_goldens.py writes them; read the difference"
    assert len(kept) == 7


def test_manifests_are_what_jobset_s_own_definition_allows(shared_data):
    jsonschema = pytest.importorskip("jsonschema")
    definition = yaml.safe_load(gzip.open(shared_data / "schemas" / "jobset_v1alpha2_crd.yaml.gz"))
    version = next(one for one in definition["spec"]["versions"] if one["name"] == "v1alpha2")
    schema = strict(version["schema"]["openAPIV3Schema"])
    for manifest in yaml.safe_load_all(to_yaml(manifests(described(trainer__slices=2, builder__priority="low")))):
        jsonschema.validate(manifest, schema)
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelsim"] = 1
    with pytest.raises(jsonschema.ValidationError, match="parallelsim"):
        jsonschema.validate(manifest, schema)


def strict(schema):
    """The same, with fields that it does not name forbidden."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    named = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    open_ended = (
        schema.get("x-kubernetes-preserve-unknown-fields") or set(schema["properties"]) <= {"metadata"}
        if named
        else True
    )
    return found if open_ended else found | {"additionalProperties": False}


# ---- slices


@pytest.mark.parametrize(
    ("name", "hosts", "chips", "gcloud", "machine"),
    [
        ("v5e:8x8", 16, 4, "v5litepod-64", "ct5lp-hightpu-4t"),
        ("v5e:2x4", 1, 8, "v5litepod-8", "ct5lp-hightpu-8t"),
        ("v5p:4x4x4", 16, 4, "v5p-128", "ct5p-hightpu-4t"),
        ("v5p:2x2x1", 1, 4, "v5p-8", "ct5p-hightpu-4t"),
        ("v6e:1x1", 1, 1, "v6e-1", "ct6e-standard-1t"),
        ("v6e:16x16", 64, 4, "v6e-256", "ct6e-standard-4t"),
    ],
)
def test_a_slice_has_its_names_and_machines(name, hosts, chips, gcloud, machine):
    found = parse(name, "spec.trainer.slice")
    assert (found.hosts, found.chips_per_host, found.hosts * found.chips_per_host) == (hosts, chips, found.chips)
    assert (found.accelerator_type, found.machine_type, str(found)) == (gcloud, machine, name)


@pytest.mark.parametrize(
    "name", ["v5e", "v4:2x2x1", "v5e:3x3", "v5e:4x4x4", "v5p:8x8", "v5p:8x4x4", "v5p:4x4x6", "v5p:16x16x32"]
)
def test_a_slice_that_does_not_exist_is_refused(name):
    with pytest.raises(UserError, match=f"spec.trainer.slice={name}: "):
        parse(name, "spec.trainer.slice")


# ---- before anything is created


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*JOBSET, "--workdir=runs/one"], "--workdir=runs/one: --target=jobset needs a folder that all machines see"),
        (["--target=jobset", WORKDIR], "spec.image: --target=jobset needs a container"),
        ([*JOBSET, WORKDIR, "--spec.trainer.slice=v5e:7x7"], "spec.trainer.slice=v5e:7x7: v5e has no such topology"),
        ([*JOBSET, WORKDIR, "--spec.builder.slice=v5e:4x4"], "spec.builder.slice=v5e:4x4: spans 4 machines"),
        ([*JOBSET, WORKDIR, "--spec.grace_seconds=10"], "spec.grace_seconds=10: a save may take 60 seconds"),
        ([*JOBSET, WORKDIR, "--spec.name=My_Run"], "spec.name=My_Run: use lower-case letters"),
        ([*JOBSET, WORKDIR, "--config=configs/nothing.py"], "there is no file configs/nothing.py"),
        ([*JOBSET, WORKDIR, "--config.realm.stesp=1"], "there is no such key in the config"),
        ([*JOBSET, WORKDIR, "--spec.trainer.slcie=v5e:8x8"], "there is no such key in the spec"),
        ([*JOBSET, WORKDIR, "--config.refresh.mode=inline"], "the spec has index builders"),
        ([*GCLOUD, WORKDIR, "--spec.gcloud.zone="], "spec.gcloud.zone: name the one"),
        ([*GCLOUD, WORKDIR, "--spec.gcloud.capacity=cheap"], "spec.gcloud.capacity=cheap: choose among on-demand"),
        (["--target=local", WORKDIR], "--target=local needs a folder of this machine"),
        ([WORKDIR], "--target: name one of local, queued_resources, jobset"),
        (["stop", *JOBSET, WORKDIR, "--dry-run"], "--dry-run: goes with start"),
    ],
)
def test_a_mistake_stops_before_anything_is_created(tools, capsys, arguments, told):
    folder = tools()
    assert cli.main(["launch", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert calls(folder) == []


def test_jobs_that_do_not_fit_are_refused():
    found = manifests(described())
    found[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] = 8
    with pytest.raises(UserError, match="realm-trainer: parallelism is 8, but the topology needs 16"):
        check(found)
    found = manifests(described())
    pod = found[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["containers"][0]["args"][-3] = "--workdir=/elsewhere"
    with pytest.raises(UserError, match="different work directories"):
        check(found)
    pod["containers"][0]["resources"]["limits"]["google.com/tpu"] = 4
    with pytest.raises(UserError, match="realm-builder: limits of google.com/tpu is 4, but the topology needs 8"):
        check(found)
    pod["terminationGracePeriodSeconds"] = 30
    pod["containers"][0]["resources"]["limits"]["google.com/tpu"] = 8
    with pytest.raises(UserError, match="realm-builder: terminationGracePeriodSeconds"):
        check(found)


# ---- quoting


def test_awkward_words_arrive_as_they_were_given(tmp_path):
    launch = described([f"--config.data.path={AWKWARD}"])
    script = startup_script(launch, launch.trainer, ["--processes=auto"])
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0
    command = script.partition("docker run")[2].partition(" &\n")[0].replace("\\\n", " ")
    assert f"--config.data.path={AWKWARD}" in shlex.split(command)
    (trainer, _) = manifests(launch)
    words = trainer["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--config.data.path={AWKWARD.replace('$', '$$')}" in words, "Kubernetes makes one $ of two"


def test_a_service_starts_again_after_crashes_and_preemptions_and_not_after_mistakes(tmp_path):
    """The job's own script, with a docker that ends as it is told."""
    launch = described(restarts=2)
    script = startup_script(launch, launch.trainer, []).partition("<<'END-OF-JOB'\n")[2].partition("END-OF-JOB")[0]
    job = tmp_path / "job"
    job.write_text(script.replace("2 ** failures", "0").replace(": 60", ": 0"))
    docker = tmp_path / "docker"
    docker.write_text(
        f"#!/bin/bash\ncd {tmp_path}\ncode=$(head -n1 codes)\nsed -i 1d codes\necho run >>runs\nexit $code\n"
    )
    docker.chmod(0o755)
    for codes, wanted, runs in (("75 75 0", 0, 3), ("2", 2, 1), ("1 70 1", 1, 3), ("1 1 0", 0, 3)):
        (tmp_path / "codes").write_text(codes.replace(" ", "\n") + "\n")
        (tmp_path / "runs").write_text("")
        done = subprocess.run(["bash", str(job)], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, timeout=60)
        assert (done.returncode, (tmp_path / "runs").read_text().count("run")) == (wanted, runs), codes


# ---- what the tools are asked


def test_jobsets_are_applied_listed_stopped_started_again_and_deleted(tools, capsys):
    running = {"metadata": {"name": "realm-trainer"}, "spec": {}, "status": {"restarts": 3}}
    ended = {"type": "Failed", "status": "True", "message": "jobset failed"}
    stopped = {"metadata": {"name": "realm-builder"}, "spec": {"suspend": True}, "status": {"conditions": [ended]}}
    folder = tools({"match": "kubectl get", "stdout": json.dumps({"items": [running, stopped]})})
    assert cli.main(["launch", *JOBSET, WORKDIR]) == 0
    asked = calls(folder)
    assert [one["words"][2] for one in asked] == ["get", "apply", "patch"], "the builder was stopped"
    assert yaml.safe_load(asked[1]["stdin"])["metadata"]["name"] == "realm-trainer"
    assert '--patch={"spec": {"suspend": false}}' in asked[2]["words"]
    assert cli.main(["launch", "list", *JOBSET, WORKDIR]) == 0
    out = capsys.readouterr().out
    assert "3 restarts" in out and "failed" in out and "jobset failed" in out
    assert cli.main(["launch", "stop", *JOBSET, WORKDIR]) == 0
    assert cli.main(["launch", "delete", *JOBSET, WORKDIR]) == 0
    assert cli.main(["launch", "logs", *JOBSET, WORKDIR, "--job=builder", "--follow"]) == 0
    last = [one["words"] for one in calls(folder)][-1]
    assert "--selector=jobset.sigs.k8s.io/jobset-name=realm-builder,batch.kubernetes.io/job-completion-index=0" in last
    patched = [one["words"][4] for one in calls(folder) if '--patch={"spec": {"suspend": true}}' in one["words"]]
    assert patched == ["realm-trainer", "realm-builder"]


def test_queued_resources_are_created_listed_stopped_and_deleted(tools, capsys):
    item = {"name": "projects/p/locations/z/queuedResources/realm-trainer", "state": {"state": "ACTIVE"}}
    folder = tools({"match": "gcloud list", "stdout": json.dumps([item])})
    more = ("--spec.trainer.slices=2", "--spec.gcloud.capacity=spot", "--spec.builder.slices=1")
    assert cli.main(["launch", *GCLOUD, WORKDIR, *more]) == 0
    trainer, builder = calls(folder)
    assert {"--node-count=2", "--node-prefix=realm-trainer", "--spot"} <= {*trainer["words"]}
    assert "--node-id=realm-builder-0" in builder["words"] and "--process=0" in builder["scripts"][0]
    assert cli.main(["launch", "list", *GCLOUD, WORKDIR, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "active"
    assert cli.main(["launch", "stop", *GCLOUD, WORKDIR, *more]) == 0
    assert cli.main(["launch", "delete", *GCLOUD, WORKDIR, *more]) == 0
    words = [one["words"] for one in calls(folder)]
    nodes = [one[5] for one in words if "ssh" in one]
    assert nodes == ["realm-trainer-0", "realm-trainer-1"], "the builder is not there"
    assert [one[5] for one in words if "delete" in one] == ["realm-trainer"]


# ---- what they complain of


@pytest.mark.parametrize(
    ("tool", "complaint", "advice"),
    [
        ("gcloud", "ERROR: (gcloud) You do not currently have an active account selected.", "run `gcloud auth login`"),
        (
            "gcloud",
            "ERROR: Quota limit 'TPUV5sLitepodPerProjectPerZone' has been exceeded.",
            "over the project's quota",
        ),
        ("gcloud", "ERROR: ALREADY_EXISTS: Resource 'realm-trainer' already exists", "is there already"),
        ("gcloud", "ERROR: FAILED_PRECONDITION: queued resource is in state SUSPENDED", "lost its machines"),
        ("gcloud", "ERROR: PERMISSION_DENIED: tpu.nodes.create", "not allowed"),
        ("kubectl", 'error: resource mapping not found: no matches for kind "JobSet" in version', "has no JobSet"),
        ("kubectl", "error: You must be logged in to the server (Unauthorized)", "kubectl is not logged in"),
        ("kubectl", "Unable to connect to the server: dial tcp: lookup x: no such host", "cannot be reached"),
        ("kubectl", "The JobSet is invalid: spec.replicatedJobs: Invalid value: field is immutable", "other settings"),
        ("gcloud", "ERROR: something\nquite new", "gcloud failed: something quite new"),
    ],
)
def test_what_a_tool_complains_of_is_one_line_that_says_what_to_do(tool, complaint, advice):
    told = explain(tool, "queued resource one", complaint)
    assert advice in told and "\n" not in told and told.startswith("queued resource one: ")


def test_the_complaint_of_a_tool_ends_the_command_with_2(tools, capsys):
    tools({"match": "create", "stderr": "ERROR: Quota limit exceeded\n", "code": 1})
    assert cli.main(["launch", *GCLOUD, WORKDIR]) == 2
    assert "queued resource realm-trainer: over the project's quota" in capsys.readouterr().err


def test_a_tool_that_is_not_installed_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["launch", "list", *JOBSET, WORKDIR]) == 2
    assert "kubectl is not installed; install it" in capsys.readouterr().err


def test_a_recipe_without_realm_has_no_builder(capsys, tmp_path):
    for target in (["--target=local", f"--workdir={tmp_path}"], [*JOBSET, WORKDIR], [*GCLOUD, WORKDIR]):
        assert cli.main(["launch", *target, "--config.tasks=qa", "--dry-run"]) == 0
        out = capsys.readouterr().out
        assert "train" in out and "build-index" not in out and "refresh.mode" not in out


def test_a_dry_run_prints_and_asks_for_nothing(tools, capsys):
    folder = tools()
    assert cli.main(["launch", *GCLOUD, WORKDIR, "--dry-run"]) == 0
    assert "queued-resources create realm-trainer" in capsys.readouterr().out
    assert cli.main(["launch", *JOBSET, WORKDIR, "--dry-run"]) == 0
    assert "kind: JobSet" in capsys.readouterr().out and calls(folder) == []
