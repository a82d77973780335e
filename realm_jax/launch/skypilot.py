"""TPU VMs by SkyPilot (docs.skypilot.co): the trainer and every builder process is a separate managed job.

SkyPilot's controller creates the machines of a job in the first zone with free capacity, creates others after a
preemption, and deletes them when the job ends or fails. Each machine runs one container, again after crashes, never
after exit codes 0 and 2. SkyPilot restarts only code 75: it cannot count other failures and exclude code 2, and it
replaces the machines of a TPU at every restart. `templates/skypilot.yaml.j2` contains everything that is sent.
"""

import hashlib
import os
import re
import tempfile
from pathlib import Path

from realm_jax.errors import USER_ERROR, UserError
from realm_jax.host import PREEMPTED
from realm_jax.indexing.heartbeat import TRAINER
from realm_jax.launch.cloud import CloudTarget, Resource, call_json, render, run_tool, stream
from realm_jax.launch.spec import Launch, choose, job_specs
from realm_jax.launch.status import EXPECTED, record_expected_jobs
from realm_jax.storage import open_folder

# Folder of the machine's disk, and its path in containers: staged data and vectors outlive a container.
DISK_CACHE, CACHE = "/var/lib/realm-cache", "/realm-cache"
NO_JOBS = "No in-progress managed jobs"  # SkyPilot's error while it has no controller
ENDED = ("succeeded", "cancelled", "failed", "failed_setup", "failed_prechecks", "failed_no_resource",
         "failed_controller")  # fmt: skip
CANCELLING = "cancelling"


class SkyPilot(CloudTarget):
    """The target `skypilot`."""

    kind = "job"

    def __init__(self, launch: Launch) -> None:
        """Make the target."""
        super().__init__(launch)
        # SkyPilot's queue does not show the run directory, so the names of jobs end in a digest of it.
        self._digest = hashlib.sha256(launch.workdir.encode()).hexdigest()[:6]

    def plan(self) -> str:
        """Return everything that would be sent, as files and the commands that send them."""
        files = [f"# {' '.join(self._launch_command(f'{name}.yaml'))}\n{task}" for name, task in self.tasks().items()]
        return "---\n".join(files)

    def tasks(self) -> dict[str, str]:
        """Return name → SkyPilot task of each job, the builders first, because a trainer waits for its first index."""
        launch, spec, tasks = self._launch, self._launch.spec, {}
        environment = {"REALM_CACHE": CACHE} | launch.environment
        for part in sorted(job_specs(launch), key=lambda part: part.job == TRAINER):
            name = self._name(part.name)
            tasks[name] = render(
                "skypilot.yaml.j2",
                name=name,
                part=part,
                trainer=TRAINER,
                use_spot=spec.skypilot.capacity == "spot",
                zones=spec.skypilot.zone_names,
                environment=environment,
                passed_on=[*environment, *spec.skypilot.secrets],
                expected=f"{launch.workdir}/{EXPECTED}",
                image=spec.image,
                registry=spec.image.partition("/")[0],
                disk_cache=DISK_CACHE,
                cache=CACHE,
                grace=spec.grace_seconds,
                restarts=spec.restarts,
                user_error=USER_ERROR,
                preempted=PREEMPTED,
            )
        return tasks

    def start(self) -> None:
        """Submit the jobs, except those that SkyPilot has already. Raises UserError for a secret that is not set."""
        for name in self._launch.spec.skypilot.secrets:
            if name not in os.environ:
                raise UserError(f"spec.skypilot.secrets: the environment variable {name} is not set here; export it")
        jobs = self._active_jobs()
        for name, job in jobs.items():
            if job.state == CANCELLING:
                raise UserError(
                    f"job {name}: SkyPilot still deletes its machines; start it when `realm launch status` shows that "
                    "it is cancelled"
                )
        # Before the jobs, because a job ends at its start if it is not expected.
        record_expected_jobs(self._launch.workdir, [part.name for part in job_specs(self._launch)])
        print("submitting the jobs; the first one takes minutes while SkyPilot starts its controller", flush=True)
        for name, task in self.tasks().items():
            if name in jobs:
                print(f"job {name}: exists already ({jobs[name].state}); stop it first to change its flags")
                continue
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / f"{name}.yaml"
                file.write_text(task)
                run_tool(self._launch_command(str(file)), f"job {name}")
            print(f"job {name}: submitted")

    def logs(self, job: str, follow: bool) -> int:
        """Show the output of all machines of a job; each line begins with the number of its machine.

        Args:
            job: 'trainer', 'builder-0', …
            follow: wait for further lines.

        Returns:
            The exit code of sky.
        """
        jobs = self._resources_of_run()
        part = choose(job, [name.removeprefix(f"{self._launch.spec.name}-").rpartition("-")[0] for name in jobs])
        return stream(["sky", "jobs", "logs", jobs[self._name(part)].id, "--follow" if follow else "--no-follow"])

    def stop(self) -> None:
        """Let running jobs save and end, and cancel those that have no machines yet.

        SkyPilot deletes the machines of a canceled job before it can save. So running jobs read in the run directory
        that they are no longer expected.
        """
        jobs = self._active_jobs(required=True)
        open_folder(self._launch.workdir).write_json(EXPECTED, {"jobs": []})
        for name, job in jobs.items():
            if job.state == "running":
                print(f"job {name}: saves and ends; then SkyPilot deletes its machines")
        self._cancel({name: job for name, job in jobs.items() if job.state != "running"})

    def delete(self) -> None:
        """Cancel all jobs at once, without a save, and delete their machines; the run directory stays."""
        self._cancel(self._active_jobs(required=True))

    def _cancel(self, jobs: dict[str, Resource]) -> None:
        if jobs:
            run_tool(["sky", "jobs", "cancel", "--yes", *(job.id for job in jobs.values())], "managed jobs")
        for name in jobs:
            print(f"job {name}: canceled; SkyPilot deletes its machines")

    def _active_jobs(self, required: bool = False) -> dict[str, Resource]:
        """Return name → job of the run that has not ended. Raises UserError if one is required and there is none."""
        jobs = {name: job for name, job in self._resources_of_run(required).items() if job.state not in ENDED}
        if required and not jobs:
            raise UserError(
                f"spec.name={self._launch.spec.name}: all jobs of this run have ended, and SkyPilot has deleted their "
                "machines; there is nothing to stop or delete"
            )
        return jobs

    def _list(self) -> list[Resource]:
        try:
            queue = call_json(["sky", "jobs", "queue", "--all", "--verbose", "--output=json"], "managed jobs")
        except UserError as error:
            if NO_JOBS in str(error):
                return []
            raise
        # Names repeat when a run is started again; the last job counts.
        newest = {job["job_name"]: job for job in sorted(queue, key=lambda job: int(job["job_id"]))}
        resources = []
        for name, job in newest.items():
            if re.fullmatch(self._name("(trainer|builder-[0-9]+)"), name):
                recoveries = f"{job.get('recovery_count') or 0} recoveries"
                details = [f"number {job['job_id']}", job.get("infra"), recoveries, job.get("failure_reason")]
                state = str(job["status"]).lower()
                resources.append(Resource(name, state, "; ".join(filter(None, details)), id=str(job["job_id"])))
        return resources

    def _name(self, part: str) -> str:
        return f"{super()._name(part)}-{self._digest}"

    def _launch_command(self, file: str) -> list[str]:
        """Return the command that submits a task and does not wait for its end."""
        secrets = [f"--secret={name}" for name in self._launch.spec.skypilot.secrets]
        return ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, file]
