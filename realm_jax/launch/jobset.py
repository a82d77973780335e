"""GKE: the trainer and every builder slice as a JobSet of its own (jobset.x-k8s.io/v1alpha2), so that no end of one
restarts another, and GKE does not take slices that know nothing of each other for one multislice program.

A slice is one Job of as many pods as it has machines; all slices of the trainer are one JobSet and restart together.
Exit code 2 ends a JobSet, 75 and evictions restart it without counting, all else counts. `check` looks at manifests as
they are sent. Not here: the cluster, its node pools and JobSet itself (docs/launch.md).
"""

import json
from collections.abc import Sequence
from typing import Any

import yaml

from realm_jax.errors import USER_ERROR, UserError
from realm_jax.host import PREEMPTED
from realm_jax.launch.checks import SAVE_SECONDS
from realm_jax.launch.slices import GENERATIONS, Slice, parse
from realm_jax.launch.spec import MOUNTED, Launch, Part, choose, parts
from realm_jax.launch.status import expect
from realm_jax.launch.tools import call, call_json, stream

API = "jobset.x-k8s.io/v1alpha2"
RUN = "realm-jax/run"  # label: which run a JobSet belongs to
WORKDIR = "realm-jax/workdir"  # annotation: the run's folder, since names repeat
CONTAINER, WORK = "realm", "work"
ACCELERATOR, TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
CHIPS = "google.com/tpu"
POD = "jobset.sigs.k8s.io"  # begins the labels that JobSet gives to pods
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"

Manifest = dict[str, Any]


def manifests(launch: Launch) -> list[Manifest]:
    """The JobSets of a launch, the trainer's first. Raises UserError for what cannot be started."""
    found = [_jobset(launch, part) for part in parts(launch)]
    check(found)
    return found


def to_yaml(found: Sequence[Manifest]) -> str:
    """Manifests as `kubectl apply` takes them."""
    return "---\n".join(yaml.dump(manifest, Dumper=_Plain, sort_keys=False, width=1000) for manifest in found)


class _Plain(yaml.SafeDumper):
    """Without anchors: what occurs twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _jobset(launch: Launch, part: Part) -> Manifest:
    kubernetes, role = launch.spec.kubernetes, part.role
    replicas = role.count if role is launch.trainer else 1
    queue = {"kueue.x-k8s.io/queue-name": kubernetes.queue} if kubernetes.queue else {}
    return {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": {
            "name": f"{launch.name}-{part.name}",
            "namespace": kubernetes.namespace,
            "labels": {RUN: launch.name} | queue,
            "annotations": {EXCLUSIVE: "cloud.google.com/gke-nodepool", WORKDIR: launch.workdir},
        },
        "spec": {
            "failurePolicy": {"maxRestarts": kubernetes.restarts, "rules": _restarts()},
            "replicatedJobs": [
                {"name": role.name, "replicas": replicas, "template": _job(launch, part, replicas > 1)},
            ],
        },
    }


def _restarts() -> list[Manifest]:
    """What follows from a Job's end; the words are those with which Kubernetes tells why a Job failed."""
    policy = {"onJobFailureReasons": ["PodFailurePolicy"]}
    return [
        {"name": "mistake", "action": "FailJobSet", "onJobFailureMessagePatterns": [f"exit code {USER_ERROR} "]}
        | policy,
        {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts"} | policy,
    ]


def _job(launch: Launch, part: Part, multislice: bool) -> Manifest:
    hosts, failed = part.role.slice.hosts, {"containerName": CONTAINER, "operator": "In"}
    return {
        "spec": {
            "parallelism": hosts,
            "completions": hosts,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": failed | {"values": [USER_ERROR]}},
                    {"action": "FailJob", "onExitCodes": failed | {"values": [PREEMPTED]}},
                    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": _pod(launch, part, multislice),
        }
    }


def _pod(launch: Launch, part: Part, multislice: bool) -> Manifest:
    """multislice: the slices talk over the machines' own network, which is faster than the pods'."""
    kubernetes, role = launch.spec.kubernetes, part.role
    optional = {"serviceAccountName": kubernetes.service_account, "priorityClassName": role.priority}
    network = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if multislice else {}
    words = [word.replace("$", "$$") for word in part.words]  # else Kubernetes puts variables there
    return {
        "metadata": {"labels": {RUN: launch.name}, "annotations": {"gke-gcsfuse/volumes": "true"}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": launch.grace_seconds,
            **network,
            **{key: value for key, value in optional.items() if value},
            "nodeSelector": {ACCELERATOR: role.slice.generation.accelerator, TOPOLOGY: role.slice.topology},
            "tolerations": [{"key": CHIPS, "operator": "Exists", "effect": "NoSchedule"}],
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
            "containers": [
                {
                    "name": CONTAINER,
                    "image": launch.image,
                    "args": words,
                    "resources": {"limits": {CHIPS: role.slice.chips_per_host}},
                    "volumeMounts": [{"name": WORK, "mountPath": f"{MOUNTED}/{launch.bucket}"}],
                }
            ],
            "volumes": [{"name": WORK, "csi": _mount(launch, multislice)}],
        },
    }


def _mount(launch: Launch, multislice: bool) -> Manifest:
    """The bucket. On a machine's network the driver has to be told to take the pod's account, not the machine's."""
    account = {"hostNetworkPodKSA": "true"} if multislice else {}
    options = {"bucketName": launch.bucket, "mountOptions": "implicit-dirs,uid=1000,gid=1000"}
    return {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": options | account}


# ---- what has to hold of what is sent


def check(found: Sequence[Manifest]) -> None:
    """Raise UserError, with the JobSet's name and the field, for manifests that cannot work together on GKE."""
    places = set()
    for manifest in found:
        name = manifest["metadata"]["name"]
        for job in manifest["spec"]["replicatedJobs"]:
            template = job["template"]["spec"]
            pod = template["template"]["spec"]
            container = pod["containers"][0]
            chips = _slice_of(name, pod["nodeSelector"])
            _same(name, "parallelism", template["parallelism"], chips.hosts)
            _same(name, "completions", template["completions"], chips.hosts)
            _same(name, f"limits of {CHIPS}", container["resources"]["limits"].get(CHIPS), chips.chips_per_host)
            _same(name, "backoffLimit", template["backoffLimit"], 0)
            if pod["terminationGracePeriodSeconds"] < SAVE_SECONDS:
                raise UserError(f"{name}: terminationGracePeriodSeconds: a save may take {SAVE_SECONDS} seconds")
            places |= {word for word in container["args"] if word.startswith("--workdir=")}
    if len(places) != 1:
        raise UserError(
            f"the jobs have different work directories: {', '.join(sorted(places)) or 'none'}; give them one"
        )


def _slice_of(name: str, selector: dict[str, str]) -> Slice:
    known = {generation.accelerator: version for version, generation in GENERATIONS.items()}
    version = known.get(selector.get(ACCELERATOR, ""))
    if version is None:
        raise UserError(f"{name}: nodeSelector: {selector.get(ACCELERATOR)} is no accelerator that is known here")
    return parse(f"{version}:{selector.get(TOPOLOGY)}", f"{name}: nodeSelector")


def _same(name: str, field: str, value: Any, wanted: Any) -> None:
    if value != wanted:
        raise UserError(f"{name}: {field} is {value}, but the topology needs {wanted}")


# ---- what a user does


class JobSets:
    """The target `jobset`."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def plan(self) -> str:
        """All that would be sent, as the commands that send it."""
        return f"# {' '.join(self._kubectl('apply', '--filename=-'))}\n{to_yaml(manifests(self._launch))}"

    def start(self) -> None:
        """Create them. What was stopped or has ended is removed first: almost nothing of a JobSet can be changed, and
        the run lies in the bucket. What runs and is not wanted any more goes last, once the others could be applied."""
        wanted = {manifest["metadata"]["name"]: manifest for manifest in manifests(self._launch)}
        there = self._own()
        expect(self._launch.workdir, [part.name for part in parts(self._launch)])
        over = ("completed", "failed") if self._queued else ("completed", "failed", "suspended")
        self._delete([item["name"] for item in there if item["state"] in over])
        for name, manifest in wanted.items():
            call(self._kubectl("apply", "--filename=-"), f"JobSet {name}", to_yaml([manifest]))
            print(f"JobSet {name}: applied")
        self._delete([one["name"] for one in there if one["name"] not in wanted and one["state"] not in over])

    def items(self) -> list[dict[str, str]]:
        """{"name", "state", "detail"} of each JobSet of the run."""
        return [_told(item) for item in self._get()]

    def _get(self) -> list[Manifest]:
        chosen = f"--selector={RUN}={self._launch.name}"
        told = call_json(self._kubectl("get", "jobset", chosen, "--output=json"), f"JobSets of {self._launch.name}")
        return list(told["items"])

    def _own(self) -> list[dict[str, str]]:
        """`items`. Raises UserError where one of them is another run's that has the same name."""
        found = self._get()
        for item in found:
            place = item["metadata"].get("annotations", {}).get(WORKDIR)
            if place != self._launch.workdir:
                raise UserError(
                    f"JobSet {item['metadata']['name']}: belongs to --workdir={place}; give that one, or set spec.name"
                )
        return [_told(item) for item in found]

    def logs(self, job: str, follow: bool) -> int:
        """What the first pod of a job printed."""
        before = f"{self._launch.name}-"
        name = before + choose(job, [name.removeprefix(before) for name in self._there()])
        labels = f"{POD}/jobset-name={name},{POD}/job-index=0,batch.kubernetes.io/job-completion-index=0"
        more = ["--follow"] if follow else []
        return stream(self._kubectl("logs", f"--selector={labels}", f"--container={CONTAINER}", "--tail=200", *more))

    def stop(self) -> None:
        """Suspend them: their pods get SIGTERM, save, and are not started again until `start`. In a queue suspended
        ones wait for their turn, so there they are removed."""
        if self._queued:
            self.delete()
            return
        for name in self._there():
            patch = json.dumps({"spec": {"suspend": True}})
            call(self._kubectl("patch", "jobset", name, "--type=merge", f"--patch={patch}"), f"JobSet {name}")
            print(f"JobSet {name}: suspended")

    def delete(self) -> None:
        """Remove them; the work directory stays."""
        self._delete(self._there())

    @property
    def _queued(self) -> bool:
        return bool(self._launch.spec.kubernetes.queue)

    def _there(self) -> list[str]:
        """Names of the JobSets of the run. Raises UserError where there are none."""
        found = [item["name"] for item in self._own()]
        if not found:
            raise UserError(f"spec.name={self._launch.name}: no JobSet of this run is there; see `realm launch list`")
        return found

    def _delete(self, names: list[str]) -> None:
        """Remove some and wait until their pods have saved and ended."""
        if names:
            call(self._kubectl("delete", "jobset", *names, "--cascade=foreground", "--ignore-not-found"), "JobSets")
        for name in names:
            print(f"JobSet {name}: removed")

    def _kubectl(self, *words: str) -> list[str]:
        kubernetes = self._launch.spec.kubernetes
        context = [f"--context={kubernetes.context}"] if kubernetes.context else []
        return ["kubectl", *context, f"--namespace={kubernetes.namespace}", *words]


def _told(item: Manifest) -> dict[str, str]:
    """Its state is completed, failed, suspended, running, or pending while a Job of it lacks pods that are ready."""
    status = item.get("status", {})
    conditions = [one for one in status.get("conditions", []) if one.get("status") == "True"]
    ended = next((one for one in conditions if one["type"] in ("Completed", "Failed")), None)
    if ended:
        state = ended["type"].lower()
    elif item["spec"].get("suspend"):
        state = "suspended"
    else:
        ready = sum(job.get("ready", 0) + job.get("succeeded", 0) for job in status.get("replicatedJobsStatus", []))
        wanted = sum(job.get("replicas", 1) for job in item["spec"].get("replicatedJobs", []))
        state = "running" if ready >= wanted else "pending"
    detail = f"{status.get('restarts', 0)} restarts"
    return {"name": item["metadata"]["name"], "state": state, "detail": (ended or {}).get("message") or detail}
