"""GKE: the trainer and every builder slice as a JobSet of its own (jobset.x-k8s.io/v1alpha2), so that no end of one
restarts another, and GKE does not take slices that know nothing of each other for one multislice program.

A slice is one Job of as many pods as it has machines; all slices of the trainer are one JobSet and restart together.
Exit code 2 ends a JobSet, 75 and evictions restart it without counting, all else counts.
Not here: the cluster, its node pools and JobSet itself (docs/launch.md).
"""

import json
from collections.abc import Sequence
from typing import Any

import yaml

from realm_jax.errors import USER_ERROR
from realm_jax.host import PREEMPTED
from realm_jax.launch.cloud import CloudTarget, Resource
from realm_jax.launch.spec import MOUNTED, JobSpec, Launch, choose, job_specs
from realm_jax.launch.status import record_expected_jobs
from realm_jax.launch.tools import call_json, run_tool, stream

API = "jobset.x-k8s.io/v1alpha2"
RUN = "realm-jax/run"  # label: which run a JobSet belongs to
WORKDIR = "realm-jax/workdir"  # annotation: the run's folder, since names repeat
CONTAINER, WORK = "realm", "work"
ACCELERATOR, TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
CHIPS = "google.com/tpu"
POD = "jobset.sigs.k8s.io"  # begins the labels that JobSet gives to pods
# Of the sidecar that mounts the bucket: by default it gets a quarter of a core and 256 MiB.
UNLIMITED = {f"gke-gcsfuse/{resource}-limit": "0" for resource in ("cpu", "memory", "ephemeral-storage")}
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"

Manifest = dict[str, Any]


def manifests(launch: Launch) -> list[Manifest]:
    """The JobSets of a launch, the trainer's first."""
    return [_jobset(launch, part) for part in job_specs(launch)]


def to_yaml(jobsets: Sequence[Manifest]) -> str:
    """Manifests as `kubectl apply` takes them."""
    return "---\n".join(yaml.dump(manifest, Dumper=_Plain, sort_keys=False, width=1000) for manifest in jobsets)


class _Plain(yaml.SafeDumper):
    """Without anchors: what occurs twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _jobset(launch: Launch, part: JobSpec) -> Manifest:
    name, kubernetes = launch.spec.name, launch.spec.kubernetes
    queue = {"kueue.x-k8s.io/queue-name": kubernetes.queue} if kubernetes.queue else {}
    return {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": {
            "name": f"{name}-{part.name}",
            "namespace": kubernetes.namespace,
            "labels": {RUN: name} | queue,
            "annotations": {EXCLUSIVE: "cloud.google.com/gke-nodepool", WORKDIR: launch.workdir},
        },
        "spec": {
            "failurePolicy": {"maxRestarts": kubernetes.restarts, "rules": _restarts()},
            "replicatedJobs": [
                {"name": part.job, "replicas": part.slices, "template": _job(launch, part)},
            ],
        },
    }


def _restarts() -> list[Manifest]:
    """The failure policy; its patterns match Kubernetes' messages on why a Job failed."""
    policy = {"onJobFailureReasons": ["PodFailurePolicy"]}
    return [
        {"name": "mistake", "action": "FailJobSet", "onJobFailureMessagePatterns": [f"exit code {USER_ERROR} "]}
        | policy,
        {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts"} | policy,
    ]


def _job(launch: Launch, part: JobSpec) -> Manifest:
    hosts, failed = part.slice.hosts, {"containerName": CONTAINER, "operator": "In"}
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
            "template": _pod(launch, part),
        }
    }


def _pod(launch: Launch, part: JobSpec) -> Manifest:
    """Several slices talk over the machines' own network, which is faster than the pods'."""
    spec, multislice = launch.spec, part.slices > 1
    optional = {
        "serviceAccountName": spec.kubernetes.service_account,
        "priorityClassName": spec[part.job].priority,
    }
    network = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if multislice else {}
    words = [word.replace("$", "$$") for word in part.words]  # else Kubernetes puts variables there
    return {
        "metadata": {"labels": {RUN: spec.name}, "annotations": {"gke-gcsfuse/volumes": "true"} | UNLIMITED},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": spec.grace_seconds,
            **network,
            **{key: value for key, value in optional.items() if value},
            "nodeSelector": {ACCELERATOR: part.slice.generation.accelerator, TOPOLOGY: part.slice.topology},
            "tolerations": [{"key": CHIPS, "operator": "Exists", "effect": "NoSchedule"}],
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
            "containers": [
                {
                    "name": CONTAINER,
                    "image": spec.image,
                    "args": words,
                    "env": [{"name": name, "value": value} for name, value in launch.environment.items()],
                    "resources": {"limits": {CHIPS: part.slice.chips_per_host}},
                    "volumeMounts": [{"name": WORK, "mountPath": f"{MOUNTED}/{launch.bucket}"}],
                }
            ],
            "volumes": [{"name": WORK, "csi": _mount(launch, multislice)}],
        },
    }


def _mount(launch: Launch, multislice: bool) -> Manifest:
    """The bucket. On the host network the driver must be configured to use the pod's account, not the machine's."""
    account = {"hostNetworkPodKSA": "true"} if multislice else {}
    options = {"bucketName": launch.bucket, "mountOptions": "implicit-dirs,uid=1000,gid=1000"}
    return {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": options | account}


# ---- the target


class JobSets(CloudTarget):
    """The target `jobset`."""

    kind = "JobSet"

    def plan(self) -> str:
        """All that would be sent, as the commands that send it."""
        return f"# {' '.join(self._kubectl('apply', '--filename=-'))}\n{to_yaml(manifests(self._launch))}"

    def start(self) -> None:
        """Create them. What was stopped or has ended is removed first: almost nothing of a JobSet can be changed, and
        the run lies in the bucket. What runs and is not wanted any more goes last, once the others could be applied."""
        wanted = {manifest["metadata"]["name"]: manifest for manifest in manifests(self._launch)}
        there = {name: self._describe(item)["state"] for name, item in self._own(required=False).items()}
        record_expected_jobs(self._launch.workdir, [part.name for part in job_specs(self._launch)])
        over = ("completed", "failed") if self._queued else ("completed", "failed", "suspended")
        self._delete([name for name, state in there.items() if state in over])
        for name, manifest in wanted.items():
            run_tool(self._kubectl("apply", "--filename=-"), f"JobSet {name}", to_yaml([manifest]))
            print(f"JobSet {name}: applied")
        self._delete([name for name, state in there.items() if name not in wanted and state not in over])

    def _list(self) -> list[Resource]:
        selected = f"--selector={RUN}={self._launch.spec.name}"
        command = self._kubectl("get", "jobset", selected, "--output=json")
        return list(call_json(command, f"JobSets of {self._launch.spec.name}")["items"])

    def _owner(self, item: Resource) -> str:
        workdir = item["metadata"].get("annotations", {}).get(WORKDIR)
        return "" if workdir == self._launch.workdir else f"--workdir={workdir}"

    def logs(self, job: str, follow: bool) -> int:
        """What the first pod of a job printed."""
        name = self._name(choose(job, [name.removeprefix(self._name("")) for name in self._own()]))
        labels = f"{POD}/jobset-name={name},{POD}/job-index=0,batch.kubernetes.io/job-completion-index=0"
        more = ["--follow"] if follow else []
        return stream(self._kubectl("logs", f"--selector={labels}", f"--container={CONTAINER}", "--tail=200", *more))

    def stop(self) -> None:
        """Suspend them: their pods get SIGTERM, save, and are not started again until `start`. In a queue suspended
        ones wait for their turn, so there they are removed."""
        if self._queued:
            self.delete()
            return
        for name in self._own():
            patch = json.dumps({"spec": {"suspend": True}})
            run_tool(self._kubectl("patch", "jobset", name, "--type=merge", f"--patch={patch}"), f"JobSet {name}")
            print(f"JobSet {name}: suspended")

    def delete(self) -> None:
        """Remove them; the work directory stays."""
        self._delete(list(self._own()))

    @property
    def _queued(self) -> bool:
        return bool(self._launch.spec.kubernetes.queue)

    def _delete(self, names: list[str]) -> None:
        """Remove some and wait until their pods have saved and ended."""
        if names:
            run_tool(self._kubectl("delete", "jobset", *names, "--cascade=foreground", "--ignore-not-found"), "JobSets")
        for name in names:
            print(f"JobSet {name}: removed")

    def _kubectl(self, *words: str) -> list[str]:
        kubernetes = self._launch.spec.kubernetes
        context = [f"--context={kubernetes.context}"] if kubernetes.context else []
        return ["kubectl", *context, f"--namespace={kubernetes.namespace}", *words]

    def _describe(self, item: Resource) -> dict[str, str]:
        """Its state: completed, failed, suspended, running, or pending while a Job of it lacks pods that are ready."""
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
