"""TPU VMs: the trainer and every builder process as a queued resource of its own, whose machines run one container.

A machine's startup script, which runs at every boot, mounts the bucket and starts a service; the service runs the
container again after exit codes 75 and 70 and after crashes, and never after 0 and 2. So a machine that was taken away
and came back goes on by itself. All that is sent is in `create` and `startup_script`.
"""

import json
import shlex
import tempfile
from pathlib import Path

from realm_jax.errors import UserError
from realm_jax.launch.spec import CAPACITIES, MOUNTED, Launch, Role, check_cloud
from realm_jax.launch.tools import call, stream
from realm_jax.training.preemption import PREEMPTED

SERVICE = "realm"
GROUP = ("gcloud", "compute", "tpus")
SCRIPT = """\
#!/bin/bash
# Runs at every boot: the bucket, then the service. Written by `realm launch`.
set -euo pipefail
if ! command -v gcsfuse >/dev/null; then
  release="gcsfuse-$(lsb_release --codename --short)"
  packages=https://packages.cloud.google.com/apt keys=/usr/share/keyrings/gcsfuse.gpg
  curl -fsSL $packages/doc/apt-key.gpg | gpg --dearmor --yes -o $keys
  echo "deb [signed-by=$keys] $packages $release main" \\
    >/etc/apt/sources.list.d/gcsfuse.list
  apt-get update -qq && apt-get install -qq gcsfuse
fi
mkdir -p {mount}
mountpoint -q {mount} || gcsfuse --implicit-dirs --uid=1000 --gid=1000 -o allow_other {bucket} {mount}
gcloud auth configure-docker --quiet {registry}

cat >/usr/local/bin/realm-job <<'END-OF-JOB'
#!/bin/bash
# Again after a preemption or a crash; what ends by itself or by a mistake stays so.
failures=0
stopping=
trap 'stopping=yes; docker stop --time={grace} realm >/dev/null' TERM
while true; do
  began=$SECONDS
  docker run --rm --name=realm --privileged --network=host --volume={mount}:{mount} \\
    {image} \\
    {command} &
  while true; do
    wait $!
    code=$?
    kill -0 $! 2>/dev/null || break
  done
  [ -n "$stopping" ] && exit 0
  case $code in
    0 | 2) exit $code ;;
    {preempted}) continue ;;
  esac
  [ $((SECONDS - began)) -gt 1800 ] && failures=0
  failures=$((failures + 1))
  [ $failures -gt {restarts} ] && exit $code
  sleep $((failures < 6 ? 2 ** failures : 60))
done
END-OF-JOB
chmod +x /usr/local/bin/realm-job

cat >/etc/systemd/system/{service}.service <<'END-OF-SERVICE'
[Unit]
Description=realm_jax
After=docker.service
[Service]
ExecStart=/usr/local/bin/realm-job
KillMode=mixed
TimeoutStopSec={patience}
Restart=no
END-OF-SERVICE
systemctl daemon-reload
systemctl start {service}
"""


def startup_script(launch: Launch, role: Role, process: list[str]) -> str:
    """What a machine does at every boot."""
    words = [*launch.command(role), *process]
    return SCRIPT.format(
        mount=f"{MOUNTED}/{launch.bucket}",
        bucket=launch.bucket,
        registry=launch.image.partition("/")[0],
        image=shlex.quote(launch.image),
        command=" \\\n    ".join(map(shlex.quote, words)),
        grace=launch.grace_seconds,
        patience=launch.grace_seconds + 30,
        restarts=launch.restarts,
        preempted=PREEMPTED,
        service=SERVICE,
    )


def parts(launch: Launch) -> dict[str, tuple[Role, list[str]]]:
    """Name of each queued resource → its job, and the flags of its processes."""
    count = launch.builder.count
    shares = {
        f"{launch.name}-builder-{number}": (launch.builder, [f"--process={number}", f"--processes={count}"])
        for number in range(count)
    }
    return {f"{launch.name}-trainer": (launch.trainer, ["--processes=auto"])} | shares


class QueuedResources:
    """The target `queued_resources`."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def plan(self) -> str:
        """All that would be sent, as the commands that send it."""
        self._check()
        told = []
        for name, (role, process) in parts(self._launch).items():
            told.append(f"# {name}.sh\n{startup_script(self._launch, role, process)}")
            told.append(f"{shlex.join(self.create(name, role, f'{name}.sh'))}\n")
        return "\n".join(told)

    def start(self) -> None:
        """Ask for all of them."""
        self._check()
        with tempfile.TemporaryDirectory() as folder:
            for name, (role, process) in parts(self._launch).items():
                script = Path(folder) / f"{name}.sh"
                script.write_text(startup_script(self._launch, role, process))
                call(self.create(name, role, str(script)), f"queued resource {name}")

    def create(self, name: str, role: Role, script: str) -> list[str]:
        """The command that asks for one. script: file of its startup script."""
        cloud = self._launch.spec.gcloud
        several = role is self._launch.trainer and role.count > 1
        nodes = [f"--node-count={role.count}", f"--node-prefix={name}"] if several else [f"--node-id={name}"]
        capacity = [] if cloud.capacity == "on-demand" else [f"--{cloud.capacity}"]
        account = [f"--service-account={cloud.service_account}"] if cloud.service_account else []
        network = [f"--network={cloud.network}"] if cloud.network else []
        kind = role.slice
        return [
            *GROUP, "queued-resources", "create", name, *self._where(), f"--accelerator-type={kind.accelerator_type}",
            f"--runtime-version={kind.generation.runtime}", *nodes, *capacity, *account, *network,
            f"--metadata-from-file=startup-script={script}", "--async",
        ]  # fmt: skip

    def items(self) -> list[dict[str, str]]:
        """{"name", "state", "detail"} of each queued resource of the run."""
        chosen = f"--filter=name~/{self._launch.name}-(trainer|builder-[0-9]+)$"
        words = [*GROUP, "queued-resources", "list", *self._where(), chosen, "--format=json"]
        return [_told(item) for item in json.loads(call(words, "queued resources"))]

    def logs(self, job: str, follow: bool) -> int:
        """What the first machine of a job printed. job: 'trainer', 'builder-0', …"""
        command = f"sudo journalctl --unit={SERVICE} --lines=200 --no-pager{' --follow' if follow else ''}"
        return stream(self._ssh(self._nodes(job)[0], "0", command))

    def stop(self) -> None:
        """SIGTERM to every container, which saves; the machines stay."""
        there = {item["name"] for item in self.items()}
        for name in there & {*parts(self._launch)}:
            for node in self._nodes(name.removeprefix(f"{self._launch.name}-")):
                call(self._ssh(node, "all", f"sudo systemctl stop {SERVICE}"), f"machines of {node}")

    def delete(self) -> None:
        """Give the machines back; the work directory stays."""
        there = {item["name"] for item in self.items()}
        for name in parts(self._launch):
            if name in there:
                words = [*GROUP, "queued-resources", "delete", name, *self._where(), "--force", "--quiet", "--async"]
                call(words, f"queued resource {name}")

    def _check(self) -> None:
        check_cloud(self._launch, "queued_resources")
        cloud = self._launch.spec.gcloud
        for key in ("project", "zone"):
            if not cloud[key]:
                raise UserError(f"spec.gcloud.{key}: name the one in which the TPUs are")
        if cloud.capacity not in CAPACITIES:
            raise UserError(f"spec.gcloud.capacity={cloud.capacity}: choose among {', '.join(CAPACITIES)}")

    def _nodes(self, job: str) -> list[str]:
        name, count = f"{self._launch.name}-{job}", self._launch.trainer.count
        return [f"{name}-{number}" for number in range(count)] if job == "trainer" and count > 1 else [name]

    def _ssh(self, node: str, worker: str, command: str) -> list[str]:
        return [*GROUP, "tpu-vm", "ssh", node, *self._where(), f"--worker={worker}", f"--command={command}"]

    def _where(self) -> list[str]:
        cloud = self._launch.spec.gcloud
        return [f"--project={cloud.project}", f"--zone={cloud.zone}"]


def _told(item: dict) -> dict[str, str]:
    state = item.get("state", {})
    kind = item.get("tpu", {}).get("nodeSpec", [{}])[0].get("node", {}).get("acceleratorType", "")
    return {"name": item["name"].rpartition("/")[2], "state": state.get("state", "unknown").lower(), "detail": kind}
