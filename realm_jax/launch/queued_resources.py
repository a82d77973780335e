"""TPU VMs: the trainer and every builder process is a separate queued resource, whose machines run one container.

A machine's startup script, which runs at every boot, mounts the bucket and starts a service; the service runs the
container again after exit codes 75 and 70 and after crashes, and never after 0 and 2. So a machine that was rebooted or
repaired goes on by itself. A preempted machine does not come back: its resource becomes SUSPENDED and has to be
deleted. `create` and `templates/startup.sh.j2` contain everything that is sent.
"""

import shlex
import tempfile
from pathlib import Path
from typing import Any

from realm_jax.errors import UserError
from realm_jax.host import PREEMPTED
from realm_jax.launch.cloud import CloudTarget, Resource, call_json, render, run_tool, stream
from realm_jax.launch.spec import MOUNTED, JobSpec, Launch, choose, job_specs
from realm_jax.launch.status import record_expected_jobs

SERVICE = "realm"
UNIT = f"/etc/systemd/system/{SERVICE}.service"
# Folder of the machine's disk, and its mount point in containers.
DISK_CACHE, CACHE = "/var/lib/realm-cache", "/realm-cache"
STOPPED = "/var/lib/realm-stopped"  # while it exists the service does not start, not even at boot
UNITS = (SERVICE, "google-startup-scripts")  # whose logs are shown
GROUP = ("gcloud", "--quiet", "compute", "tpus")
GONE = ("failed", "suspended", "suspending", "deleting")  # states of a resource that will never have machines again


def startup_script(launch: Launch, part: JobSpec) -> str:
    """Return the script that a machine runs at every boot.

    Staged data and vectors stay on its disk from one container to the next.

    Args:
        launch: the description.
        part: the job of the machine.
    """
    environment = {"REALM_CACHE": CACHE} | launch.environment
    return render(
        "startup.sh.j2",
        mount=f"{MOUNTED}/{launch.bucket}",
        bucket=launch.bucket,
        registry=launch.spec.image.partition("/")[0],
        disk_cache=DISK_CACHE,
        cache=CACHE,
        environment=" ".join(f"--env={shlex.quote(f'{name}={value}')}" for name, value in environment.items()),
        image=shlex.quote(launch.spec.image),
        command=" \\\n    ".join(map(shlex.quote, part.words)),
        grace=launch.spec.grace_seconds,
        patience=launch.spec.grace_seconds + 30,
        restarts=launch.spec.restarts,
        preempted=PREEMPTED,
        service=SERVICE,
        unit=UNIT,
        stopped=STOPPED,
    )


def on_machine(verb: str) -> str:
    """Return the command that starts or stops the service of a machine.

    If the startup script has not installed the service yet, it starts it later, unless it is marked as stopped.
    """
    mark = f"sudo touch {STOPPED}" if verb.startswith("stop") else f"sudo rm -f {STOPPED}"
    return f"{mark}; if [ -e {UNIT} ]; then sudo systemctl {verb} {SERVICE}; fi"


class QueuedResources(CloudTarget):
    """The target `queued_resources`."""

    kind = "queued resource"

    def __init__(self, launch: Launch) -> None:
        """Make the target. Raises UserError without a project and a zone."""
        super().__init__(launch)
        self._cloud = launch.spec.gcloud
        for key in ("project", "zone"):
            if not self._cloud[key]:
                raise UserError(f"spec.gcloud.{key}: name the one in which the TPUs are")

    def plan(self) -> str:
        """Return everything that would be sent, as the commands that send it."""
        lines = []
        for part in job_specs(self._launch):
            script = f"{self._name(part.name)}.sh"
            lines.append(f"# {script}\n{startup_script(self._launch, part)}")
            lines.append(f"{shlex.join(self.create(part, script))}\n")
        return "\n".join(lines)

    def start(self) -> None:
        """Create missing resources, and restart the service on existing machines.

        Raises UserError, before anything is created, for a resource that lost its machines or was created with other
        settings.
        """
        existing = {resource.name: resource for resource in self._list()}
        parts = {self._name(part.name): part for part in job_specs(self._launch)}
        advice = (
            "wait until `realm launch delete` has removed it, then start again: training resumes from its checkpoint"
        )
        for name, part in parts.items():
            if name not in existing:
                continue
            if existing[name].state in GONE:
                raise UserError(f"queued resource {name}: is {existing[name].state}; {advice}")
            script = existing[name].script
            if script is not None and script.strip() != startup_script(self._launch, part).strip():
                raise UserError(f"queued resource {name}: was created with other settings; {advice}")
        record_expected_jobs(self._launch.workdir, [part.name for part in parts.values()])
        errors = []
        for name, part in parts.items():
            if name not in existing:
                with tempfile.TemporaryDirectory() as folder:
                    file = Path(folder) / "startup.sh"
                    file.write_text(startup_script(self._launch, part))
                    run_tool(self.create(part, str(file)), f"queued resource {name}")
                print(f"queued resource {name}: requested")
            elif existing[name].state == "active":
                failures = self._run_on_all([existing[name]], on_machine("start"))
                print(f"queued resource {name}: {'not reached' if failures else 'restarted'}")
                errors += failures
            else:
                print(f"queued resource {name}: is there already, {existing[name].state}")
        _raise(errors)

    def create(self, part: JobSpec, script: str) -> list[str]:
        """Return the command that creates a resource.

        Args:
            part: the job of its machines.
            script: file of its startup script.
        """
        cloud, chips, name = self._cloud, part.slice, self._name(part.name)
        is_multislice = part.slices > 1
        nodes = [f"--node-count={part.slices}", f"--node-prefix={name}"] if is_multislice else [f"--node-id={name}"]
        capacity = [] if cloud.capacity == "on-demand" else [f"--{cloud.capacity}"]
        account = [f"--service-account={cloud.service_account}"] if cloud.service_account else []
        network = [f"--network={cloud.network}"] if cloud.network else []
        return [
            *GROUP, "queued-resources", "create", name, *self._where(), f"--accelerator-type={chips.gcloud}",
            f"--runtime-version={chips.generation.runtime}", *nodes, *capacity, *account, *network,
            f"--metadata-from-file=startup-script={script}", "--async",
        ]  # fmt: skip

    def logs(self, job: str, follow: bool) -> int:
        """Show the output of the first machine of a job.

        Args:
            job: 'trainer', 'builder-0', …
            follow: wait for further lines.

        Returns:
            The exit code of ssh.
        """
        resources = {name.removeprefix(self._name("")): resource for name, resource in self._resources_of_run().items()}
        node = resources[choose(job, resources)].nodes[0]
        units = " ".join(f"--unit={unit}" for unit in UNITS)
        command = f"sudo journalctl {units} --lines=200 --no-pager{' --follow' if follow else ''}"
        return stream(self._ssh(node, "0", command))

    def stop(self) -> None:
        """Send SIGTERM to every container, which saves; the machines stay.

        All are signaled before any is waited for, so that no slice takes another's exit for a preemption. Raises
        UserError, after all were signaled, if one does not stop.
        """
        resources = self._resources_of_run()
        active = [resource for resource in resources.values() if resource.state == "active"]
        self._run_on_all(active, on_machine("stop --no-block"))
        _raise(self._run_on_all(active, on_machine("stop")))
        for name, resource in resources.items():
            result = "stopped; its machines stay" if resource in active else f"is {resource.state}; it can be deleted"
            print(f"queued resource {name}: {result}")

    def delete(self) -> None:
        """Delete all machines of the run; the run directory stays."""
        for name in self._resources_of_run():
            words = [*GROUP, "queued-resources", "delete", name, *self._where(), "--force", "--async"]
            run_tool(words, f"queued resource {name}")
            print(f"queued resource {name}: is being removed")

    def _list(self) -> list[Resource]:
        # Without quotation marks, the parentheses would group terms.
        selected = f'--filter=name~"/{self._name("(trainer|builder-[0-9]+)")}$"'
        words = [*GROUP, "queued-resources", "list", *self._where(), selected, "--format=json"]
        workdir = f" {shlex.quote(f'--workdir={self._launch.mounted_workdir}')} "
        resources = []
        for item in call_json(words, "queued resources"):
            name, state = item["name"].rpartition("/")[2], item.get("state", {}).get("state", "UNKNOWN").lower()
            spec: dict[str, Any] = next(iter(item.get("tpu", {}).get("nodeSpec", [])), {})
            node = spec.get("node", {})
            script = node.get("metadata", {}).get("startup-script")
            owner = "another --workdir" if script is not None and workdir not in script else ""
            multislice = spec.get("multisliceParams") or spec.get("multiNodeParams")
            count = int(multislice["nodeCount"]) if multislice else 1
            nodes = tuple(f"{name}-{number}" for number in range(count)) if count > 1 else (name,)
            resources.append(Resource(name, state, node.get("acceleratorType", ""), owner, script, nodes))
        return resources

    def _run_on_all(self, resources: list[Resource], command: str) -> list[str]:
        """Run a command on every machine of resources; return the errors."""
        errors = []
        for node in [node for resource in resources for node in resource.nodes]:
            try:
                run_tool(self._ssh(node, "all", command), f"machines of {node}")
            except UserError as error:
                errors.append(str(error))
        return errors

    def _ssh(self, node: str, worker: str, command: str) -> list[str]:
        return [*GROUP, "tpu-vm", "ssh", node, *self._where(), f"--worker={worker}", f"--command={command}"]

    def _where(self) -> list[str]:
        return [f"--project={self._cloud.project}", f"--zone={self._cloud.zone}"]


def _raise(errors: list[str]) -> None:
    """Raise UserError with the first of several errors, if there are any."""
    if errors:
        others = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise UserError(f"{errors[0]}{others}")
