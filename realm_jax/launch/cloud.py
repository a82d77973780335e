"""What the targets in a cloud have in common: the parts of a run are resources that bear its name, templates say what
is sent, and gcloud and kubectl send it. Their errors become one line that says what to do."""

import abc
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from realm_jax.errors import UserError
from realm_jax.launch.spec import Launch

INSTALL = {
    "gcloud": "install the Google Cloud CLI (cloud.google.com/sdk) and run `gcloud auth login`",
    "kubectl": "install it (`gcloud components install kubectl`) and run `gcloud container clusters get-credentials`",
}
# What their messages have in common over versions, and what a user does about it; the first that is found counts.
ERROR_HINTS = (
    (r"gke-gcloud-auth-plugin.*(not found|not installed|executable)|executable gke-gcloud-auth-plugin",
     "kubectl cannot log in; run `gcloud components install gke-gcloud-auth-plugin`, then run the command again"),
    (r"do not currently have an active account|[Rr]eauthentication|invalid_grant|credentials.*(expired|not found)",
     "not logged in; run `gcloud auth login`, then run the command again"),
    (r"must be logged in to the server|Unauthorized",
     "kubectl is not logged in; run `gcloud container clusters get-credentials CLUSTER`, then run the command again"),
    (r"context.*does not exist|no context exists|current-context is not set",
     "kubectl has no such context; see `kubectl config get-contexts`, and set spec.kubernetes.context"),
    (r"API has not been used|SERVICE_DISABLED|API.*is (disabled|not enabled)",
     "the project does not use this API yet; run `gcloud services enable tpu.googleapis.com`, then try again"),
    (r"[Qq]uota|RESOURCE_EXHAUSTED",
     "over the project's quota; ask for more (console: IAM > Quotas), or name another zone, capacity or slice"),
    (r"Permission '?locations/|Permission denied on 'locations/|[Ii]nvalid.*zone|location.*(not found|NOT_FOUND)|"
     r"Unknown zone|does not have.*location",
     "there is no such zone for TPUs; see `gcloud compute tpus locations list`, and set spec.gcloud.zone"),
    (r"PERMISSION_DENIED|Forbidden|does not have permission",
     "not allowed; ask for the roles in docs/launch.md, or name another project"),
    (r"ALREADY_EXISTS|AlreadyExists|already exists",
     "is there already; see `realm launch status`, and remove it with `realm launch delete`, or set spec.name"),
    (r"SUSPENDED|SUSPENDING|state FAILED",
     "lost its machines; remove it with `realm launch delete`, then start again: training resumes from its checkpoint"),
    (r'no matches for kind "JobSet"|have a resource type "jobset',
     "the cluster has no JobSet; install it as docs/launch.md says"),
    (r"namespaces? .*not found", "there is no such namespace; make it, or set spec.kubernetes.namespace"),
    (r"field is immutable|Value is immutable",
     "runs already with other settings; remove it with `realm launch delete`, then start again"),
    (r"[Uu]nable to connect|connection.*refused|no such host|i/o timeout|timed? ?out|deadline exceeded",
     "cannot be reached; check the network and the cluster's name, then run the command again"),
    (r"NOT_FOUND|NotFound|not found", "is not there; see `realm launch status`"),
)  # fmt: skip


class Resource(NamedTuple):
    """A resource that has the name of the run. script, nodes: of a queued resource."""

    name: str
    state: str
    detail: str
    owner: str  # the flag that names whose it is, where it is another run's of the same name; else ''
    script: str | None = None  # the startup script that it was created with, if known
    nodes: tuple[str, ...] = ()  # its TPU nodes: several for a trainer of several slices


class CloudTarget(abc.ABC):
    """The base of `JobSets` and `QueuedResources`. kind: what a resource is called in messages."""

    kind: str

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def items(self) -> list[dict[str, str]]:
        """{"name", "state", "detail"} of each resource of the run."""
        return [{"name": item.name, "state": item.state, "detail": item.detail} for item in self._list()]

    def _name(self, part: str) -> str:
        return f"{self._launch.spec.name}-{part}"

    @abc.abstractmethod
    def _list(self) -> list[Resource]:
        """The resources that have the run's name."""

    def _own(self, required: bool = True) -> dict[str, Resource]:
        """Name → resource of the run. Raises UserError for one of another run, and where there is none if required."""
        resources = self._list()
        for resource in resources:
            if resource.owner:
                owner = f"belongs to {resource.owner}; give that one, or set spec.name"
                raise UserError(f"{self.kind} {resource.name}: {owner}")
        if required and not resources:
            name = self._launch.spec.name
            raise UserError(f"spec.name={name}: no {self.kind} of this run is there; see `realm launch status`")
        return {resource.name: resource for resource in resources}


def render(template: str, **values: Any) -> str:
    """Fill in a template of `templates/`. Raises jinja2.UndefinedError for a value that is not given."""
    loader = PackageLoader("realm_jax.launch")
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    # One line, in double quotes: any text is one value, whatever characters it has.
    environment.filters["yaml"] = lambda text: yaml.safe_dump(str(text), default_style='"', width=float("inf")).strip()
    return environment.get_template(template).render(values)


def run_tool(words: Sequence[str], about: str, stdin: str | None = None) -> str:
    """What a tool prints. about: the request, for messages. Raises UserError, with what to do, where it fails."""
    _require(words[0])
    # Never this terminal as its input: a question would wait for ever.
    done = subprocess.run(list(words), input=stdin or "", capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(explain_error(words[0], about, done.stderr or done.stdout))
    return done.stdout


def call_json(words: Sequence[str], about: str) -> Any:
    """The JSON that a tool prints; see `run_tool`."""
    reply = run_tool(words, about)
    try:
        return json.loads(reply)
    except ValueError:
        raise UserError(f"{about}: {words[0]} did not answer with JSON: {' '.join(reply.split())[:100]!r}") from None


def stream(words: Sequence[str]) -> int:
    """Run a tool with its output on this terminal, until it ends or Ctrl-C; its exit code. Raises UserError."""
    _require(words[0])
    return subprocess.call(list(words), stdin=subprocess.DEVNULL)


def _require(tool: str) -> None:
    if shutil.which(tool) is None:
        raise UserError(f"{tool} is not installed; {INSTALL[tool]}")


def explain_error(tool: str, about: str, stderr: str) -> str:
    """One line for a tool's error."""
    reply = " ".join(stderr.split())
    advice = next((advice for pattern, advice in ERROR_HINTS if re.search(pattern, reply)), None)
    reason = reply.removeprefix("ERROR: ")[:300] or "it failed without a message"
    return f"{about}: {advice} ({tool}: {reason})" if advice else f"{about}: {tool} failed: {reason}"
