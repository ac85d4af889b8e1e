"""Orphans: attempts in workers' hands whose task no laboratory has submitted (yet), after the gateway's restart."""

from __future__ import annotations

from dataclasses import dataclass, field

from goblin_dask import messages as m
from goblin_dask.gateway.leases import Leases
from goblin_dask.gateway.workers import Worker


@dataclass(slots=True)
class Orphan:
    """One of them."""

    worker: Worker
    messages: list[m.Committed | m.Uploaded] = field(default_factory=list)
    """What was said of it since."""


class Orphans:
    """They hold a slot of their worker until a laboratory submits the task, or for a while.

    Parameters
    ----------
    leases : Leases
        For its timer, and to dismiss those that nobody claims.
    """

    def __init__(self, leases: Leases):
        self._leases = leases
        self._by_task: dict[str, dict[str, Orphan]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_task.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._by_task.get(_task(name), ())

    def add(self, worker: Worker, name: str) -> None:
        """The worker says that it has this attempt in hand."""
        self._by_task.setdefault(_task(name), {})[name] = Orphan(worker)
        worker.hands[name] = 0
        self._leases.at(self._leases.now + self._leases.limits.orphan_grace, "orphan", name)

    def of(self, worker: Worker, name: str) -> Orphan | None:
        """The orphan of that name, if it is in this worker's hand."""
        orphan = self._by_task.get(_task(name), {}).get(name)
        return orphan if orphan is not None and orphan.worker is worker else None

    def claim(self, task: str) -> list[tuple[str, Orphan]]:
        """All orphans of a task that was submitted just now; they are none any more."""
        found = list(self._by_task.get(task, {}).items())
        for name, _ in found:
            self.forget(name)
        return found

    def forget(self, name: str) -> None:
        """It is out of its worker's hand."""
        held = self._by_task.get(_task(name), {})
        orphan = held.pop(name, None)
        if orphan is not None:
            orphan.worker.hands.pop(name, None)
            if not held:
                del self._by_task[_task(name)]

    def due(self, name: str) -> None:
        """Nobody has claimed it for long enough."""
        orphan = self._by_task.get(_task(name), {}).get(name)
        if orphan is not None:
            self.forget(name)
            self._leases.dismiss(orphan.worker, name)


def _task(name: str) -> str:
    return name.rpartition("#")[0]
