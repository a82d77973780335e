"""GKE: trainer and builder as two JobSets (jobset.x-k8s.io/v1alpha2), so that neither's end restarts the other.

A slice is one Job of as many pods as it has machines; all slices of the trainer are one JobSet and restart together.
Exit code 2 ends a JobSet, 75 and evictions restart it without counting, all else counts. `check` looks at manifests as
they are sent. Not here: the cluster, its node pools and JobSet itself (docs/launch.md).
"""

import json
from collections.abc import Sequence
from typing import Any

import yaml

from realm_jax.errors import UserError
from realm_jax.launch.slices import Slice, parse
from realm_jax.launch.spec import MOUNTED, SAVE_SECONDS, Launch, Role, check_cloud
from realm_jax.launch.tools import call, stream
from realm_jax.training.preemption import PREEMPTED

API = "jobset.x-k8s.io/v1alpha2"
RUN = "realm-jax/run"  # label: which run a JobSet belongs to
CONTAINER, WORK = "realm", "work"
ACCELERATOR, TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
CHIPS = "google.com/tpu"
INDEX = "jobset.sigs.k8s.io/job-index"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
USER_ERROR = 2

Manifest = dict[str, Any]


def manifests(launch: Launch) -> list[Manifest]:
    """The JobSets of a launch, the trainer's first. Raises UserError for what cannot be started."""
    check_cloud(launch, "jobset")
    found = [_jobset(launch, launch.trainer, ["--processes=auto"])]
    if launch.builder.count:
        share = ["--process=$(JOB_INDEX)", f"--processes={launch.builder.count}"]
        found.append(_jobset(launch, launch.builder, share))
    check(found)
    return found


def to_yaml(found: Sequence[Manifest]) -> str:
    """Manifests as `kubectl apply` takes them."""
    return "---\n".join(yaml.dump(manifest, Dumper=_Plain, sort_keys=False, width=1000) for manifest in found)


class _Plain(yaml.SafeDumper):
    """Without anchors: what occurs twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _jobset(launch: Launch, role: Role, process: list[str]) -> Manifest:
    kubernetes = launch.spec.kubernetes
    queue = {"kueue.x-k8s.io/queue-name": kubernetes.queue} if kubernetes.queue else {}
    return {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": {
            "name": f"{launch.name}-{role.name}",
            "namespace": kubernetes.namespace,
            "labels": {RUN: launch.name} | queue,
            "annotations": {EXCLUSIVE: "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {"maxRestarts": launch.restarts, "rules": _restarts()},
            "replicatedJobs": [{"name": role.name, "replicas": role.count, "template": _job(launch, role, process)}],
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


def _job(launch: Launch, role: Role, process: list[str]) -> Manifest:
    failed = {"containerName": CONTAINER, "operator": "In"}
    return {
        "spec": {
            "parallelism": role.slice.hosts,
            "completions": role.slice.hosts,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": failed | {"values": [USER_ERROR]}},
                    {"action": "FailJob", "onExitCodes": failed | {"values": [PREEMPTED]}},
                    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": _pod(launch, role, process),
        }
    }


def _pod(launch: Launch, role: Role, process: list[str]) -> Manifest:
    kubernetes = launch.spec.kubernetes
    optional = {"serviceAccountName": kubernetes.service_account, "priorityClassName": role.priority}
    words = [word.replace("$", "$$") for word in launch.command(role)]  # else Kubernetes puts variables there
    return {
        "metadata": {"labels": {RUN: launch.name}, "annotations": {"gke-gcsfuse/volumes": "true"}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": launch.grace_seconds,
            "hostNetwork": True,
            "dnsPolicy": "ClusterFirstWithHostNet",
            **{key: value for key, value in optional.items() if value},
            "nodeSelector": {ACCELERATOR: role.slice.generation.accelerator, TOPOLOGY: role.slice.topology},
            "tolerations": [{"key": CHIPS, "operator": "Exists", "effect": "NoSchedule"}],
            "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
            "containers": [
                {
                    "name": CONTAINER,
                    "image": launch.image,
                    "args": [*words, *process],
                    "env": [
                        {"name": "JOB_INDEX", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}}
                    ],
                    "resources": {"limits": {CHIPS: role.slice.chips_per_host}},
                    "volumeMounts": [{"name": WORK, "mountPath": f"{MOUNTED}/{launch.bucket}"}],
                }
            ],
            "volumes": [
                {
                    "name": WORK,
                    "csi": {
                        "driver": "gcsfuse.csi.storage.gke.io",
                        "volumeAttributes": {
                            "bucketName": launch.bucket,
                            "mountOptions": "implicit-dirs,uid=1000,gid=1000",
                        },
                    },
                }
            ],
        },
    }


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
    version = {"tpu-v5-lite-podslice": "v5e", "tpu-v5p-slice": "v5p", "tpu-v6e-slice": "v6e"}.get(
        selector.get(ACCELERATOR, "")
    )
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
        """Create both, or start again what was stopped."""
        found = manifests(self._launch)
        stopped = {item["metadata"]["name"] for item in self._get() if item["spec"].get("suspend")}
        for manifest in found:
            name = manifest["metadata"]["name"]
            if name in stopped:
                self._suspend(name, False)
            else:
                call(self._kubectl("apply", "--filename=-"), f"JobSet {name}", to_yaml([manifest]))

    def items(self) -> list[dict[str, str]]:
        """{"name", "state", "detail"} of each JobSet of the run."""
        return [_told(item) for item in self._get()]

    def logs(self, job: str, follow: bool) -> int:
        """What the first pod of a job printed."""
        labels = f"jobset.sigs.k8s.io/jobset-name={self._launch.name}-{job},batch.kubernetes.io/job-completion-index=0"
        more = ["--follow"] if follow else []
        return stream(self._kubectl("logs", f"--selector={labels}", f"--container={CONTAINER}", "--tail=200", *more))

    def stop(self) -> None:
        """Suspend both: their pods get SIGTERM, save, and are not started again until `start`."""
        for item in self._get():
            self._suspend(item["metadata"]["name"], True)

    def delete(self) -> None:
        """Remove both; the work directory stays."""
        chosen = f"--selector={RUN}={self._launch.name}"
        call(self._kubectl("delete", "jobset", chosen, "--ignore-not-found"), f"JobSets of {self._launch.name}")

    def _suspend(self, name: str, value: bool) -> None:
        patch = json.dumps({"spec": {"suspend": value}})
        call(self._kubectl("patch", "jobset", name, "--type=merge", f"--patch={patch}"), f"JobSet {name}")

    def _get(self) -> list[Manifest]:
        chosen = f"--selector={RUN}={self._launch.name}"
        told = call(self._kubectl("get", "jobset", chosen, "--output=json"), f"JobSets of {self._launch.name}")
        items: list[Manifest] = json.loads(told)["items"]
        return items

    def _kubectl(self, *words: str) -> list[str]:
        kubernetes = self._launch.spec.kubernetes
        context = [f"--context={kubernetes.context}"] if kubernetes.context else []
        return ["kubectl", *context, f"--namespace={kubernetes.namespace}", *words]


def _told(item: Manifest) -> dict[str, str]:
    status = item.get("status", {})
    conditions = [one for one in status.get("conditions", []) if one.get("status") == "True"]
    ended = next((one for one in conditions if one["type"] in ("Completed", "Failed", "Suspended")), None)
    state = ended["type"].lower() if ended else "running"
    detail = f"{status.get('restarts', 0)} restarts"
    return {"name": item["metadata"]["name"], "state": state, "detail": (ended or {}).get("message") or detail}
