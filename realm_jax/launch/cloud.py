"""The common parts of targets in a cloud.

The parts of a run are resources whose names begin with the run's name. Templates are filled in, and `sky` and `kubectl`
send them. Their errors become one line with advice.
"""

import abc
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from realm_jax.errors import UserError
from realm_jax.launch.spec import Launch

INSTALL = {
    "sky": "install SkyPilot (`pip install 'skypilot[gcp]'`) and run `sky check gcp`",
    "kubectl": "install it (`gcloud components install kubectl`) and run `gcloud container clusters get-credentials`",
}
# Patterns in their messages that several versions share, and advice for the user; the first match counts.
ERROR_HINTS = (
    (r"gke-gcloud-auth-plugin.*(not found|not installed|executable)|executable gke-gcloud-auth-plugin",
     "kubectl cannot log in; run `gcloud components install gke-gcloud-auth-plugin`, then run the command again"),
    (r"Cloud access is not set up|[Nn]o cloud (access|storage)|[Rr]eauthentication|invalid_grant|"
     r"credentials.*(expired|not found)",
     "not logged in; run `gcloud auth application-default login` and `sky check gcp`, then run the command again"),
    (r"must be logged in to the server|Unauthorized",
     "kubectl is not logged in; run `gcloud container clusters get-credentials CLUSTER`, then run the command again"),
    (r"context.*does not exist|no context exists|current-context is not set",
     "kubectl has no such context; see `kubectl config get-contexts`, and set spec.kubernetes.context"),
    (r"API has not been used|SERVICE_DISABLED|API.*is (disabled|not enabled)",
     "the project does not use this API yet; run `gcloud services enable tpu.googleapis.com`, then try again"),
    (r"[Qq]uota|RESOURCE_EXHAUSTED",
     "over the project's quota; ask for more (console: IAM > Quotas), or name another zone, capacity or slice"),
    (r"not contain any instances satisfying|Invalid (zone|region)",
     "SkyPilot knows no such slice in these zones; see `sky gpus list --all`, and set spec.skypilot.zones"),
    (r"PERMISSION_DENIED|Forbidden|does not have permission",
     "not allowed; ask an owner of the project for the missing role, or name another project"),
    (r"ALREADY_EXISTS|AlreadyExists|already exists",
     "is there already; see `realm launch status`, and remove it with `realm launch delete`, or set spec.name"),
    (r'no matches for kind "JobSet"|have a resource type "jobset',
     "the cluster has no JobSet; install it as docs/howto/gke.md says"),
    (r"namespaces? .*not found", "there is no such namespace; make it, or set spec.kubernetes.namespace"),
    (r"field is immutable|Value is immutable",
     "runs already with other settings; remove it with `realm launch delete`, then start again"),
    (r"[Uu]nable to connect|connection.*refused|no such host|i/o timeout|timed? ?out|deadline exceeded",
     "cannot be reached; check the network and the cluster's name, then run the command again"),
    (r"NOT_FOUND|NotFound|not found", "is not there; see `realm launch status`"),
)  # fmt: skip


KUBECTL_LOG = re.compile(r"[IWEF]\d{4} ")  # begins a log line of kubectl; its error comes after these


class Resource(NamedTuple):
    """A cloud resource of a part of the run.

    Attributes:
        name: name of the resource.
        state: as the cloud reports it.
        detail: for people.
        owner: the flag of another run with the same name to which it belongs; else ''.
        id: SkyPilot's number of a job.
    """

    name: str
    state: str
    detail: str
    owner: str = ""
    id: str = ""


class CloudTarget(abc.ABC):
    """The base of `JobSets` and `SkyPilot`."""

    kind: str  # name of a resource in messages

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def items(self) -> list[dict[str, str]]:
        """Return {"name", "state", "detail"} of each resource of the run."""
        return [{"name": item.name, "state": item.state, "detail": item.detail} for item in self._list()]

    def _name(self, part: str) -> str:
        return f"{self._launch.spec.name}-{part}"

    @abc.abstractmethod
    def _list(self) -> list[Resource]:
        """List the resources whose names are those of parts of the run."""

    def _resources_of_run(self, required: bool = True) -> dict[str, Resource]:
        """Return name → resource of the run.

        Raises UserError if one belongs to another run, or if there is none although one is required.
        """
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
    """Fill in a template.

    Args:
        template: name of a file in `templates/`.
        **values: its variables.

    Raises:
        jinja2.UndefinedError: a variable has no value.
    """
    loader = PackageLoader("realm_jax.launch")
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["quote"] = shlex.quote
    # One line, in double quotes: any text is one value, whatever characters it has.
    environment.filters["yaml"] = lambda text: yaml.safe_dump(str(text), default_style='"', width=float("inf")).strip()
    return environment.get_template(template).render(values)


def run_tool(words: Sequence[str], about: str, stdin: str | None = None) -> str:
    """Run a tool and return its output.

    Args:
        words: words of the command.
        about: the request, for messages.
        stdin: its input.

    Raises:
        UserError: the tool is not installed, or failed; with advice.
    """
    _require(words[0])
    # Its input is never this terminal: a question would wait forever.
    result = subprocess.run(list(words), input=stdin or "", capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(explain_error(words[0], about, result.stderr or result.stdout))
    return result.stdout


def call_json(words: Sequence[str], about: str) -> Any:
    """Run a tool and return the value of its output, which is JSON, perhaps after lines of text.

    Args:
        words: words of the command.
        about: the request, for messages.

    Raises:
        UserError: as `run_tool`, or the output is not JSON.
    """
    reply = run_tool(words, about)
    try:
        return json.loads(re.sub(r"\A.*?^(?=[\[{])", "", reply, count=1, flags=re.DOTALL | re.MULTILINE))
    except ValueError:
        raise UserError(f"{about}: {words[0]} did not answer with JSON: {' '.join(reply.split())[:100]!r}") from None


def stream(words: Sequence[str]) -> int:
    """Run a tool with its output on this terminal until it ends or Ctrl-C, and return its exit code.

    Raises UserError if the tool is not installed.
    """
    _require(words[0])
    return subprocess.call(list(words), stdin=subprocess.DEVNULL)


def _require(tool: str) -> None:
    if shutil.which(tool) is None:
        raise UserError(f"{tool} is not installed; {INSTALL[tool]}")


def explain_error(tool: str, about: str, stderr: str) -> str:
    """Return one line for a tool's error.

    Args:
        tool: its name.
        about: the request.
        stderr: its messages.
    """
    lines = [line for line in stderr.splitlines() if not KUBECTL_LOG.match(line)]
    reply = " ".join((" ".join(lines) or stderr).split())
    advice = next((advice for pattern, advice in ERROR_HINTS if re.search(pattern, reply)), None)
    reason = reply.removeprefix("ERROR: ")[:300] or "it failed without a message"
    return f"{about}: {advice} ({tool}: {reason})" if advice else f"{about}: {tool} failed: {reason}"
