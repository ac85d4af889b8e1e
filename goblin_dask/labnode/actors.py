"""`JobActor`: a Dask actor that holds the progress of one job. The lab node tells it what happened, and rebuilds it.

Dask never makes a lost actor again. The lab node does: from the ledger, which knows every accepted task, and from what
ran in the laboratory.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from goblin_dask.messages import Verdict
from goblin_dask.verify.certificate import Certificate


class OnGrid(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A task was accepted from volunteers, or found in the ledger."""

    key: str
    verdict: Verdict
    origins: int = 1
    """Tasks of the researcher's graph that it stands for."""
    reused: bool = False


class InLab(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A task ran in the laboratory."""

    key: str
    kind: str
    reason: str = ""
    origins: int = 1


class Moved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A task on the grid has another state; ``rejected``: a result of it was proven wrong, and it goes on."""

    key: str
    state: str


SUMS = (
    "grid", "grid_origins", "lab", "lab_origins", "reused", "rejected",
    "bytes_moved", "check_seconds", "compute_seconds",
)  # fmt: skip
"""What a job's progress counts. `grid` and `lab`: tasks accepted from volunteers, and run in the laboratory because
they did not trace or were not worth the way; `…_origins`: tasks of the researcher's graph that these stand for."""

Happening = OnGrid | InLab | Moved


class JobActor:
    """Progress of one job.

    Parameters
    ----------
    total : int
        Tasks of its graph on the lab's cluster.
    history : list of Happening
        What is known already.
    policy : str
        How the researcher asked for it to be verified.
    """

    def __init__(self, total: int, history: list[Happening] | None = None, policy: str = "auto"):
        self._total, self._policy = total, policy
        self._done: dict[str, OnGrid | InLab] = {}
        self._states: dict[str, str] = {}
        self._refused: Counter[str] = Counter()
        """Rejected results of tasks that are not accepted yet, or never were."""
        self._sums: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._methods: Counter[str] = Counter()
        self._volunteers: Counter[str] = Counter()
        self._worst = 0.0
        self.report(history or [])

    def report(self, happenings: list[Happening]) -> dict[str, Any]:
        """Take note of what happened; the progress after it."""
        for each in happenings:
            match each:
                case OnGrid() | InLab():
                    self._forget(each.key)
                    self._done[each.key] = each
                    self._count(each, 1)
                    self._states.pop(each.key, None)
                    if isinstance(each, OnGrid):  # whose verdict counts them
                        self._refused.pop(each.key, None)
                case Moved(state="rejected"):
                    if each.key not in self._done:
                        self._refused[each.key] += 1
                case Moved():
                    if each.key not in self._done:
                        self._states[each.key] = each.state
        return self.progress()

    def _forget(self, key: str) -> None:
        earlier = self._done.pop(key, None)
        if earlier is not None:
            self._count(earlier, -1)

    def _count(self, each: OnGrid | InLab, sign: int) -> None:
        sums = self._sums
        if isinstance(each, InLab):
            self._kinds[each.kind] += sign
            if each.kind == "lab":
                sums["lab"] += sign
                sums["lab_origins"] += sign * each.origins
                self._reasons[each.reason] += sign
            return
        verdict = each.verdict
        sums["grid"] += sign
        sums["grid_origins"] += sign * each.origins
        sums["reused"] += sign * each.reused
        sums["rejected"] += sign * verdict.rejected
        sums["bytes_moved"] += sign * (verdict.bytes_in + verdict.bytes_out)
        sums["check_seconds"] += sign * verdict.check_seconds  # type: ignore[assignment]
        sums["compute_seconds"] += sign * verdict.compute_seconds  # type: ignore[assignment]
        self._methods[verdict.method] += sign
        for volunteer in verdict.volunteers:
            self._volunteers[volunteer] += sign
        if sign > 0:
            self._worst = max(self._worst, verdict.ratio)
        else:
            self._worst = max((o.verdict.ratio for o in self._done.values() if isinstance(o, OnGrid)), default=0.0)

    def progress(self) -> dict[str, Any]:
        """How far the job is."""
        sums = self._sums
        return {
            "total": self._total,
            "done": len(self._done),
            "states": dict(Counter(self._states.values())),
            "kinds": dict(+self._kinds),
            "reasons": dict(+self._reasons),
            "methods": dict(+self._methods),
            "volunteers": len(+self._volunteers),
            "worst_ratio": self._worst,
            **{name: sums[name] for name in SUMS},
            "rejected": sums["rejected"] + self._refused.total(),
        }

    def certificate(self) -> dict[str, Any]:
        """How every part was verified, as it goes into Zarr attributes."""
        certificate = Certificate(self._policy)
        for each in self._done.values():
            if isinstance(each, OnGrid):
                certificate.add(each.verdict)
            elif each.kind == "lab":
                certificate.add_laboratory(each.origins)
        return certificate.to_dict()
