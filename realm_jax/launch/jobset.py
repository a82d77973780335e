"""GKE: the trainer and every builder slice is a separate JobSet (jobset.x-k8s.io/v1alpha2).

So the end of one does not restart another, and GKE does not treat independent slices as one multislice program. A slice
is one Job of as many pods as it has machines; all slices of the trainer are one JobSet and restart together. Exit code
2 ends a JobSet, 75 and evictions restart it without counting, every other failure counts. The cluster, its node pools
and JobSet itself must exist already (docs/howto/gke.md).
"""

import json
from collections.abc import Sequence
from typing import Any

import yaml

from realm_jax.errors import USER_ERROR
from realm_jax.host import PREEMPTED
from realm_jax.launch.cloud import CloudTarget, Resource, call_json, render, run_tool, stream
from realm_jax.launch.spec import Launch, choose, job_specs
from realm_jax.launch.status import record_expected_jobs

RUN = "realm-jax/run"  # label: which run a JobSet belongs to
WORKDIR = "realm-jax/workdir"  # annotation: the run directory, because names repeat
CONTAINER = "realm"
MAX_LOG_REQUESTS = 1000  # pods of a job whose logs are followed
POD = "jobset.sigs.k8s.io"  # begins the labels that JobSet gives to pods

Manifest = dict[str, Any]


def manifests(launch: Launch) -> list[Manifest]:
    """Return the JobSets of a launch, the trainer's first."""
    jobsets = []
    for part in job_specs(launch):
        text = render(
            "jobset.yaml.j2",
            launch=launch,
            spec=launch.spec,
            kubernetes=launch.spec.kubernetes,
            part=part,
            name=f"{launch.spec.name}-{part.name}",
            run_label=RUN,
            workdir_annotation=WORKDIR,
            container=CONTAINER,
            user_error=USER_ERROR,
            preempted=PREEMPTED,
        )
        jobsets.append(yaml.safe_load(text))
    return jobsets


def to_yaml(jobsets: Sequence[Manifest]) -> str:
    """Format manifests for `kubectl apply`."""
    return "---\n".join(yaml.safe_dump(manifest, sort_keys=False, width=1000) for manifest in jobsets)


# ---- the target


class JobSets(CloudTarget):
    """The target `jobset`."""

    kind = "JobSet"

    def plan(self) -> str:
        """Return everything that would be sent, as the commands that send it."""
        builders_first = manifests(self._launch)[::-1]  # as `start` does
        return f"# {' '.join(self._kubectl('apply', '--filename=-'))}\n{to_yaml(builders_first)}"

    def start(self) -> None:
        """Create the JobSets.

        Stopped and ended ones are removed first, because almost nothing of a JobSet can be changed, and the run's files
        are in the bucket. Running ones that are no longer needed are removed last, after the others could be applied.
        """
        required = {manifest["metadata"]["name"]: manifest for manifest in manifests(self._launch)}
        states = {name: resource.state for name, resource in self._resources_of_run(required=False).items()}
        # In a queue, suspended JobSets wait for their turn.
        queue = self._launch.spec.kubernetes.queue
        ended_states = ("completed", "failed") if queue else ("completed", "failed", "suspended")
        self._delete([name for name, state in states.items() if state in ended_states])
        for name, manifest in reversed(required.items()):  # builders first: a trainer without them waits
            run_tool(self._kubectl("apply", "--filename=-"), f"JobSet {name}", to_yaml([manifest]))
            print(f"JobSet {name}: applied")
        record_expected_jobs(self._launch.workdir, [part.name for part in job_specs(self._launch)])
        self._delete([name for name, state in states.items() if name not in required and state not in ended_states])

    def _list(self) -> list[Resource]:
        # States: completed, failed, suspended, running, or pending while a Job lacks pods that are ready.
        selected = f"--selector={RUN}={self._launch.spec.name}"
        command = self._kubectl("get", "jobset", selected, "--output=json")
        resources = []
        for item in call_json(command, f"JobSets of {self._launch.spec.name}")["items"]:
            status = item.get("status", {})
            conditions = [condition for condition in status.get("conditions", []) if condition.get("status") == "True"]
            ended = next((condition for condition in conditions if condition["type"] in ("Completed", "Failed")), None)
            ready = sum(job.get("ready", 0) + job.get("succeeded", 0) for job in status.get("replicatedJobsStatus", []))
            replicas = sum(job.get("replicas", 1) for job in item["spec"].get("replicatedJobs", []))
            state = "running" if ready >= replicas else "pending"
            state = "suspended" if item["spec"].get("suspend") else state
            state = ended["type"].lower() if ended else state
            detail = (ended or {}).get("message") or f"{status.get('restarts', 0)} restarts"
            workdir = item["metadata"].get("annotations", {}).get(WORKDIR)
            owner = "" if workdir == self._launch.workdir else f"--workdir={workdir}"
            resources.append(Resource(item["metadata"]["name"], state, detail, owner))
        return resources

    def logs(self, job: str, follow: bool) -> int:
        """Show the output of all pods of a job; each line begins with the name of its pod.

        Args:
            job: 'trainer', 'builder-0', …
            follow: wait for further lines.

        Returns:
            The exit code of kubectl.
        """
        name = self._name(choose(job, [name.removeprefix(self._name("")) for name in self._resources_of_run()]))
        flags = [f"--selector={POD}/jobset-name={name}", f"--container={CONTAINER}", "--tail=200", "--prefix"]
        flags += (
            [f"--max-log-requests={MAX_LOG_REQUESTS}", "--follow"] if follow else []
        )  # kubectl follows five by default
        return stream(self._kubectl("logs", *flags))

    def stop(self) -> None:
        """Suspend the JobSets: their pods get SIGTERM, save, and are not started again until `start`.

        With a queue they are removed, because the queue would start suspended ones again.
        """
        if self._launch.spec.kubernetes.queue:
            self.delete()
            return
        for name in self._resources_of_run():
            patch = json.dumps({"spec": {"suspend": True}})
            run_tool(self._kubectl("patch", "jobset", name, "--type=merge", f"--patch={patch}"), f"JobSet {name}")
            print(f"JobSet {name}: suspended")

    def delete(self) -> None:
        """Remove the JobSets; the run directory stays."""
        self._delete(list(self._resources_of_run()))

    def _delete(self, names: list[str]) -> None:
        """Remove JobSets and wait until their pods have saved and ended."""
        if names:
            run_tool(self._kubectl("delete", "jobset", *names, "--cascade=foreground", "--ignore-not-found"), "JobSets")
        for name in names:
            print(f"JobSet {name}: removed")

    def _kubectl(self, *words: str) -> list[str]:
        kubernetes = self._launch.spec.kubernetes
        context = [f"--context={kubernetes.context}"] if kubernetes.context else []
        return ["kubectl", *context, f"--namespace={kubernetes.namespace}", *words]
