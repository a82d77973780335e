"""What the targets in a cloud have in common: the parts of a run are resources that bear its name."""

import abc
from typing import Any

from realm_jax.errors import UserError
from realm_jax.launch.spec import Launch

Resource = dict[str, Any]  # as a cloud's tool prints it


class CloudTarget(abc.ABC):
    """The base of `JobSets` and `QueuedResources`. kind: what a resource is called in messages."""

    kind: str

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def items(self) -> list[dict[str, str]]:
        """{"name", "state", "detail"} of each resource of the run."""
        return [self._describe(item) for item in self._list()]

    def _name(self, part: str) -> str:
        return f"{self._launch.spec.name}-{part}"

    @abc.abstractmethod
    def _list(self) -> list[Resource]:
        """The resources that have the run's name."""

    @abc.abstractmethod
    def _describe(self, item: Resource) -> dict[str, str]:
        """{"name", "state", "detail"} of a resource."""

    @abc.abstractmethod
    def _owner(self, item: Resource) -> str:
        """The flag that names whose a resource is, where it is another run's of the same name; else ''."""

    def _own(self, required: bool = True) -> dict[str, Resource]:
        """Name → resource of the run. Raises UserError for one of another run, and where there is none if required."""
        found = {self._describe(item)["name"]: item for item in self._list()}
        for name, item in found.items():
            if owner := self._owner(item):
                raise UserError(f"{self.kind} {name}: belongs to {owner}; give that one, or set spec.name")
        if required and not found:
            name = self._launch.spec.name
            raise UserError(f"spec.name={name}: no {self.kind} of this run is there; see `realm launch status`")
        return found
