"""`realm launch --target=jobset`: manifests that GKE takes, and what becomes of JobSets that are there already."""

import gzip
import json
from pathlib import Path

import pytest
import yaml
from clouds import JOBSET, asked, described, launch
from fake_tools import calls

from realm_jax.errors import UserError
from realm_jax.launch import status
from realm_jax.launch.checks import SAVE_SECONDS
from realm_jax.launch.jobset import manifests, to_yaml
from realm_jax.launch.spec import GENERATIONS, parse

GOLDEN = Path(__file__).resolve().parents[2] / "launch" / "golden"


def item(name, suspended=False, condition="", ready=1, restarts=0, workdir="gs://bucket/runs/one"):
    """A JobSet as the cluster tells of it."""
    conditions = [{"type": condition, "status": "True", "message": f"jobset {condition.lower()}"}] if condition else []
    status = {"restarts": restarts, "conditions": conditions, "replicatedJobsStatus": [{"ready": ready}]}
    spec = {"suspend": suspended, "replicatedJobs": [{"replicas": 1}]}
    metadata = {"name": name, "annotations": {"realm-jax/workdir": workdir}}
    return {"metadata": metadata, "spec": spec, "status": status}


def there(*items):
    """kubectl's answer."""
    return {"match": "kubectl get", "stdout": json.dumps({"items": items})}


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
    inner = {key: strict(value) for key, value in schema.items()}
    names = schema.get("properties")
    if not isinstance(names, dict) or schema.get("type") != "object" or {*names} <= {"metadata"}:
        return inner
    return inner if schema.get("x-kubernetes-preserve-unknown-fields") else inner | {"additionalProperties": False}


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("jobset-*.txt")), ids=lambda file: file.stem)
def test_pods_and_chips_are_those_of_the_topology_and_all_have_one_folder(file):
    found = list(yaml.safe_load_all(file.read_text()))
    versions = {generation.accelerator: version for version, generation in GENERATIONS.items()}
    for manifest in found:
        job, pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"], pod_of(manifest)
        accelerator, topology = list(pod["nodeSelector"].values())[:2]
        wanted = parse(f"{versions[accelerator]}:{topology}", file.name)
        assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (wanted.hosts, wanted.hosts, 0)
        assert pod["terminationGracePeriodSeconds"] >= SAVE_SECONDS
        assert container(manifest)["resources"]["limits"] == {"google.com/tpu": wanted.chips_per_host}
    folders = {word for manifest in found for word in container(manifest)["args"] if word.startswith("--workdir=")}
    assert folders == {"--workdir=gs://my-bucket/runs/realm"} and len(found) > 2


def test_every_builder_is_a_jobset_of_its_own_on_the_pods_network():
    """Slices of one JobSet are one multislice program to GKE, and on a machine's network pods have its account."""
    trainer, first, second = manifests(described(builder__slices=2))
    assert [one["metadata"]["name"] for one in (first, second)] == ["realm-builder-0", "realm-builder-1"]
    for number, one in enumerate((first, second)):
        assert one["spec"]["replicatedJobs"][0]["replicas"] == 1
        assert f"--process={number}" in container(one)["args"] and "--processes=2" in container(one)["args"]
    assert "hostNetwork" not in to_yaml([trainer, first, second])


def test_several_slices_talk_over_the_machines_network():
    trainer, builder = manifests(described(trainer__slices=2, builder__slices=1))
    assert pod_of(trainer)["hostNetwork"]
    assert "hostNetwork" not in to_yaml([builder])


def test_a_container_may_lock_the_memory_that_the_driver_of_a_tpu_needs():
    for manifest in manifests(described()):
        assert container(manifest)["securityContext"] == {"privileged": True, "runAsUser": 0}


@pytest.mark.parametrize(
    ("capacity", "reservation", "label"),
    [
        ("on-demand", "", None),
        ("spot", "", ("cloud.google.com/gke-spot", "true")),
        ("flex-start", "", ("cloud.google.com/gke-flex-start", "true")),
        ("reserved", "mine", ("cloud.google.com/reservation-name", "mine")),
    ],
)
def test_pods_run_on_nodes_of_the_chosen_capacity(capacity, reservation, label):
    launch = described(kubernetes__capacity=capacity, kubernetes__reservation=reservation)
    for manifest in manifests(launch):
        others = list(pod_of(manifest)["nodeSelector"].items())[2:]
        assert others == ([] if label is None else [label])


def test_a_reservation_needs_its_name():
    for changes in ({"kubernetes__capacity": "reserved"}, {"kubernetes__reservation": "mine"}):
        with pytest.raises(UserError, match=r"spec\.kubernetes\.reservation: goes with capacity 'reserved'"):
            described(**changes)


def test_environment_variables_and_secrets_reach_every_container():
    variables = ("LIBTPU_INIT_ARGS=--a=1 --b='$x'", "EMPTY=")
    for manifest in manifests(described(environment=variables, kubernetes__secrets=("wandb",))):
        values = {each["name"]: each["value"] for each in container(manifest)["env"]}
        assert values["LIBTPU_INIT_ARGS"] == "--a=1 --b='$$x'" and values["EMPTY"] == ""  # Kubernetes reads $$ as $
        assert values["JAX_COMPILATION_CACHE_DIR"] == "gs://bucket/runs/one/programs"
        assert container(manifest)["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    with pytest.raises(UserError, match=r"spec\.environment: 'A B=1' is no 'NAME=VALUE' of one line; write it so"):
        described(environment=("A B=1",))


def pod_of(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def container(manifest):
    return pod_of(manifest)["containers"][0]


def test_names_leave_room_for_those_of_pods():
    found = manifests(described(name="a" * 30, builder__slices=100))
    for manifest in found:
        name, job = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"][0]
        pod = f"{name}-{job['name']}-{job['replicas']}-{job['template']['spec']['completions']}-abcde"
        assert len(pod) <= 63


# ---- what kubectl is asked


def verbs(folder) -> list[str]:
    return [words[1] for words in asked(folder, "kubectl")]


def expected():
    """Who should live, as the work directory says."""
    return status.open_folder("gs://bucket/runs/one").read_json(status.EXPECTED)["jobs"]


def test_start_applies_missing_jobsets_and_prints_their_names(tools, capsys):
    folder = tools(there())
    assert launch(*JOBSET, "--spec.builder.slices=1") == 0
    assert verbs(folder) == ["get", "apply", "apply"]
    assert yaml.safe_load(calls(folder)[1]["stdin"])["metadata"]["name"] == "realm-builder-0"
    assert capsys.readouterr().out == "JobSet realm-builder-0: applied\nJobSet realm-trainer: applied\n"
    assert expected() == ["trainer", "builder-0"]
    assert launch("stop", *JOBSET) == 2 and expected() == ["trainer", "builder-0"], "nothing was there to stop"


def test_start_replaces_stopped_and_ended_jobsets(tools):
    """Almost nothing of a JobSet can be changed, so the old one goes first; a running one is only applied."""
    ended = item("realm-trainer", suspended=True), item("realm-builder-0", condition="Failed")
    folder = tools(there(*ended, item("realm-builder-1")))
    assert launch(*JOBSET, "--spec.trainer.slice=v5e:4x8", "--spec.builder.slices=2") == 0
    _, deleted, *applied = asked(folder, "kubectl")
    assert deleted[2:] == ["jobset", "realm-trainer", "realm-builder-0", "--cascade=foreground", "--ignore-not-found"]
    assert "4x8" in calls(folder)[-1]["stdin"] and len(applied) == 3


def test_start_removes_builders_that_the_spec_no_longer_has(tools):
    folder = tools(there(item("realm-trainer"), item("realm-builder-0"), item("realm-builder-1")))
    assert launch(*JOBSET, "--spec.builder.slices=1") == 0
    assert verbs(folder) == ["get", "apply", "apply", "delete"]
    assert asked(folder, "kubectl")[-1][2:4] == ["jobset", "realm-builder-1"]


def test_a_rejected_start_changes_no_running_jobset(tools, capsys):
    refused = {"match": "kubectl apply", "stderr": "spec.replicatedJobs: field is immutable", "code": 1}
    folder = tools(there(item("realm-trainer"), item("realm-builder-0"), item("realm-builder-1")), refused)
    assert launch(*JOBSET, "--spec.builder.slices=1") == 2
    assert "runs already with other settings" in capsys.readouterr().err
    assert verbs(folder) == ["get", "apply"]


@pytest.mark.parametrize("action", ["start", "stop", "delete", "logs"])
def test_jobsets_of_another_run_of_the_same_name_are_left_alone(tools, capsys, action):
    folder = tools(there(item("realm-trainer", suspended=True, workdir="gs://bucket/runs/two")))
    assert launch(*([] if action == "start" else [action]), *JOBSET) == 2
    told = "JobSet realm-trainer: belongs to --workdir=gs://bucket/runs/two; give that one, or set spec.name"
    assert told in capsys.readouterr().err
    assert verbs(folder) == ["get"]
    with pytest.raises(FileNotFoundError):
        expected()


def test_a_cluster_out_of_reach_leaves_no_record(tools):
    tools({"match": "kubectl get", "stderr": "Unable to connect to the server", "code": 1})
    assert launch(*JOBSET) == 2
    with pytest.raises(FileNotFoundError):
        expected()


def test_in_a_queue_suspended_means_waiting(tools):
    folder = tools(there(item("realm-trainer", suspended=True)))
    queue = "--spec.kubernetes.queue=q"
    assert launch(*JOBSET, queue) == 0
    assert "delete" not in verbs(folder)
    assert launch("stop", *JOBSET, queue) == 0
    assert asked(folder, "kubectl")[-1][1:4] == ["delete", "jobset", "realm-trainer"]


def test_status_prints_the_state_of_each_jobset(tools, capsys):
    found = [item("a", restarts=3), item("b", ready=0), item("c", suspended=True), item("d", condition="Failed")]
    tools(there(*found))
    assert launch("status", *JOBSET, "--json") == 0
    told = json.loads(capsys.readouterr().out)["resources"]
    assert [one["state"] for one in told] == ["running", "pending", "suspended", "failed"]
    assert (told[0]["detail"], told[3]["detail"]) == ("3 restarts", "jobset failed")


def test_stop_and_delete_say_what_they_did_and_that_nothing_is_there(tools, capsys):
    folder = tools(there(item("realm-trainer"), item("realm-builder-0")))
    assert launch("stop", *JOBSET) == 0
    assert launch("delete", *JOBSET) == 0
    told = [f"JobSet realm-{job}: {word}" for word in ("suspended", "removed") for job in ("trainer", "builder-0")]
    assert capsys.readouterr().out.splitlines() == told
    patched = [words[3] for words in asked(folder, "kubectl") if '--patch={"spec": {"suspend": true}}' in words]
    assert patched == ["realm-trainer", "realm-builder-0"]
    assert expected() == []
    tools(there())
    for action in ("stop", "delete"):
        assert launch(action, *JOBSET, "--spec.name=typo") == 2
        assert "spec.name=typo: no JobSet of this run is there" in capsys.readouterr().err


def test_logs_are_those_of_all_pods_of_a_job(tools, capsys):
    folder = tools(there(item("realm-trainer"), item("realm-builder-0")))
    assert launch("logs", *JOBSET, "--job=builder", "--follow") == 0
    words = asked(folder, "kubectl")[-1]
    assert "--selector=jobset.sigs.k8s.io/jobset-name=realm-builder-0" in words
    assert {"--prefix", "--follow", "--max-log-requests=1000"} <= {*words}
    assert launch("logs", *JOBSET, "--job=builder-7") == 2
    assert "choose among trainer, builder-0" in capsys.readouterr().err
