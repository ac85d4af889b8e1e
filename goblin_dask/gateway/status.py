"""What can be seen from outside: `Status`, encoded, is ``/goblin/status.json``.

The dispatcher knows what is; the `Board` listens to the same events and instructions as everybody else and adds what
has been: rates over time, latencies, the share of each way of verification. It shows nobody's name and no address of
any data: workers and jobs appear under the random identities that the grid gave them.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from goblin_dask import messages as m
from goblin_dask.gateway import events as e

STATES: Final = ("queued", "leased", "committed", "uploaded", "checking", "accepted", "failed")
"""Life of a task, as shown; the last two are ends."""

PERIOD: Final = 2.0
"""Seconds between samples of `History`."""

SAMPLES: Final = 300
WINDOW: Final = 5
"""Samples that a shown rate is averaged over."""

JOBS: Final = 50
"""Jobs that are shown, newest first."""

REMEMBERED: Final = 100_000
"""Tasks whose time of submission is kept; more than that are not timed."""

METHODS: Final = 16
"""Names of methods come from validators: no more than this many are kept apart."""


class WorkerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A volunteer or validator."""

    id: str
    role: str
    state: str
    """working, idle or quarantined."""
    device: str
    threads: int
    seconds: float
    """Since it joined."""
    leases: int
    flops: float
    """FLOP/s: of its accepted results where there are some, else what it said of itself."""
    measured: bool
    bandwidth: float
    """Bytes/s, as it said; 0 when unknown."""
    memory: int
    cache: int
    """Bytes of inputs that it holds."""
    cache_limit: int
    accepted: int
    wrong: int
    unproven: int
    failed: int
    """Late, lost and failed attempts."""
    checked: int
    """Checks done, by a validator."""


class MethodStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way of verification, over the life of this process."""

    method: str
    accepted: int
    rejected: int
    """Results proven wrong by it, or unproven."""
    flops: float
    """Of the work that it accepted."""
    check_seconds: float
    compute_seconds: float
    ratio: float
    """Worst residual over tolerance among the accepted."""
    miss: float
    """Greatest probability that an error passes."""


class JobStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A laboratory's job."""

    id: str
    submitted: int
    """Tasks that came so far."""
    accepted: int
    failed: int
    active: int
    """Tasks leased, committed, uploaded or being checked."""
    flops: float
    """Accepted."""
    seconds: float
    """Since its first task."""


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Columns of samples, oldest first."""

    time: list[float]
    """Seconds since the epoch."""
    gflops: list[float]
    """Accepted arithmetic, GFLOP/s."""
    down: list[float]
    """To volunteers, MB/s."""
    up: list[float]
    """From volunteers, MB/s."""
    volunteers: list[int]
    queued: list[int]


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Since this process started."""

    flops: float
    bytes_to_volunteers: int
    bytes_from_volunteers: int
    bytes_relayed: int
    compute_seconds: float
    check_seconds: float
    quarantined: int


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything at one moment."""

    version: int
    time: float
    uptime: float
    labs: int
    volunteers: int
    validators: int
    tasks: dict[str, int]
    latency: float
    """Median seconds from submission to acceptance, of the last thousand tasks."""
    workers: list[WorkerStatus]
    methods: list[MethodStatus]
    jobs: list[JobStatus]
    totals: Totals
    history: History


@dataclass(slots=True)
class _Worker:
    machine: m.Machine
    since: float
    wall: float = 0.0
    checked: int = 0


@dataclass(slots=True)
class _Method:
    accepted: int = 0
    rejected: int = 0
    flops: float = 0.0
    check_seconds: float = 0.0
    compute_seconds: float = 0.0
    ratio: float = 0.0
    miss: float = 0.0


@dataclass(slots=True)
class _Pending:
    job: tuple[str, str]
    flops: float
    since: float


class Board:
    """Remembers what the dispatcher has no use for. Pure: time comes in as `now`, monotonic seconds."""

    def __init__(self, now: float):
        self.started = now
        self.quarantined = 0
        self.latencies: deque[float] = deque(maxlen=1000)
        self.methods: dict[str, _Method] = {}
        self._workers: dict[str, _Worker] = {}
        self._pending: OrderedDict[tuple[str, str], _Pending] = OrderedDict()
        self._jobs: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        """When each began and when it last got on."""
        self._history: deque[tuple[float, float, float, float, int, int]] = deque(maxlen=SAMPLES)
        self._marks: deque[tuple[float, float, int, int]] = deque([(now, 0.0, 0, 0)], maxlen=WINDOW + 1)

    # --- what happens -------------------------------------------------------------------------------------------
    def observe(self, event: e.Event, now: float) -> None:
        """An event, as the dispatcher gets it."""
        match event:
            case e.WorkerJoined(worker):
                self._workers[worker] = _Worker(event.machine, now)
            case e.WorkerLeft(worker):
                self._workers.pop(worker, None)
            case e.TaskSubmitted(lab, task):
                self._pending.setdefault((lab, task.task), _Pending((lab, task.job), task.flops, now))
                if len(self._pending) > REMEMBERED:
                    self._pending.popitem(last=False)
                self._job((lab, task.job), now)
            case e.TaskCancelled(lab, name):
                self._pending.pop((lab, name), None)
            case e.FromWorker(worker, m.Committed() as message):
                if worker in self._workers:
                    self._workers[worker].wall += max(0.0, message.wall or message.seconds)
            case e.FromWorker(worker, m.Checked(_, report)):
                if worker in self._workers:
                    self._workers[worker].checked += 1
                method = self._method(report.method)
                method.check_seconds += max(0.0, report.seconds)
                method.rejected += report.verdict in ("wrong", "unproven")

    def follow(self, instructions: Iterable[e.Instruction], now: float) -> None:
        """What the dispatcher decided."""
        for instruction in instructions:
            match instruction:
                case e.ToLab(lab, m.TaskAccepted() as message):
                    self._accepted(lab, message, now)
                case e.ToLab(lab, m.TaskFailed(task)):
                    self._pending.pop((lab, task), None)
                case e.Quarantine():
                    self.quarantined += 1

    def _accepted(self, lab: str, message: m.TaskAccepted, now: float) -> None:
        task = self._pending.pop((lab, message.task), None)
        if task is None:  # an answer that was given before
            return
        verdict = message.verdict
        method = self._method(verdict.method)
        method.accepted += 1
        method.flops += task.flops
        method.compute_seconds += verdict.compute_seconds
        method.ratio = max(method.ratio, verdict.ratio)
        method.miss = max(method.miss, verdict.miss)
        self.latencies.append(now - task.since)
        self._job(task.job, now)

    def _method(self, name: str) -> _Method:
        name = name[:16] if name[:16] in self.methods or len(self.methods) < METHODS else "other"
        return self.methods.setdefault(name, _Method())

    def _job(self, key: tuple[str, str], now: float) -> None:
        since, _ = self._jobs.get(key, (now, now))
        self._jobs[key] = since, now
        if len(self._jobs) > 1000:
            self._jobs.popitem(last=False)

    # --- what is shown ------------------------------------------------------------------------------------------
    def sample(self, state: dict[str, Any], now: float) -> None:
        """To be called every `PERIOD` seconds with the dispatcher's snapshot."""
        mark = now, state["flops"], state["bytes_in"], state["bytes_out"]
        self._marks.append(mark)
        first = self._marks[0]
        span = max(now - first[0], 1e-3)
        rates = [(mark[i] - first[i]) / span for i in (1, 2, 3)]
        volunteers = sum(worker["role"] == "volunteer" for worker in state["workers"])
        queued = _by_state(state)["queued"]
        self._history.append((time.time(), rates[0] / 1e9, rates[1] / 1e6, rates[2] / 1e6, volunteers, queued))

    def latency(self) -> float:
        """Median seconds from submission to acceptance."""
        ordered = sorted(self.latencies)
        return ordered[len(ordered) // 2] if ordered else 0.0

    def status(self, state: dict[str, Any], now: float, relayed: int = 0) -> Status:
        """Everything at this moment, from the dispatcher's snapshot and what was remembered."""
        columns: list[Any] = [list(column) for column in zip(*self._history, strict=True)] or [[] for _ in range(6)]
        roles = [worker["role"] for worker in state["workers"]]
        return Status(
            version=1,
            time=time.time(),
            uptime=now - self.started,
            labs=sum(not lab["away"] for lab in state["labs"].values()),
            volunteers=roles.count("volunteer"),
            validators=roles.count("validator"),
            tasks=_by_state(state),
            latency=self.latency(),
            workers=[self._worker_status(worker, now) for worker in state["workers"]],
            methods=[
                MethodStatus(name, *(getattr(method, field) for field in _Method.__slots__))
                for name, method in sorted(self.methods.items())
            ],
            jobs=[self._job_status(job, state, now) for job in reversed(state["jobs"][-JOBS:])],
            totals=Totals(
                flops=state["flops"],
                bytes_to_volunteers=state["bytes_in"],
                bytes_from_volunteers=state["bytes_out"],
                bytes_relayed=relayed,
                compute_seconds=state["compute_seconds"],
                check_seconds=state["check_seconds"],
                quarantined=self.quarantined,
            ),
            history=History(*columns),
        )

    def _worker_status(self, worker: dict[str, Any], now: float) -> WorkerStatus:
        known = self._workers.get(worker["worker"]) or _Worker(m.Machine(""), now)
        verdicts = worker["verdicts"]
        measured = worker["flops"] > 0 and known.wall > 0
        return WorkerStatus(
            id=worker["worker"][:8],
            role=worker["role"],
            state="quarantined" if worker["quarantined"] else "working" if worker["leases"] else "idle",
            device=worker["device"][:40],
            threads=worker["threads"],
            seconds=now - known.since,
            leases=worker["leases"],
            flops=worker["flops"] / known.wall if measured else known.machine.flops,
            measured=measured,
            bandwidth=known.machine.bandwidth,
            memory=worker["memory"],
            cache=worker["cache"],
            cache_limit=known.machine.cache,
            accepted=verdicts["accepted"],
            wrong=verdicts["wrong"],
            unproven=verdicts["unproven"],
            failed=verdicts["failed"] + verdicts["late"] + verdicts["lost"],
            checked=known.checked,
        )

    def _job_status(self, job: dict[str, Any], state: dict[str, Any], now: float) -> JobStatus:
        lab, name = job["lab"], job["job"]
        since, last = self._jobs.get((lab, name), (now, now))
        waiting = state["queue"].get(lab, {}).get(name, 0)
        return JobStatus(
            id=name[:8],
            submitted=job["submitted"],
            accepted=job["accepted"],
            failed=job["failed"],
            active=max(0, job["open"] - waiting),
            flops=job["flops"],
            seconds=(now if job["open"] > 0 else last) - since,
        )


def _by_state(state: dict[str, Any]) -> dict[str, int]:
    tasks = {stage: state["tasks"].get(stage, 0) for stage in STATES}
    # A task's stage is brought up to date when something happens to it; who waits is what the queue holds.
    waiting = sum(sum(jobs.values()) for jobs in state["queue"].values())
    open_ = tasks["queued"] + tasks["leased"]
    tasks["queued"] = min(waiting, open_)
    tasks["leased"] = open_ - tasks["queued"]
    return tasks
