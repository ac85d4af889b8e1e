"""What can be seen from outside: the `Board` listens to the same events and instructions as everybody else.

``/goblin/status.json`` is a `Status`, encoded; the monitoring page and ``goblin status`` read it. It shows nobody's
name and no address of any data: workers and jobs appear under the random identities that the grid gave them.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from goblin_dask import messages as m
from goblin_dask.gateway import events as e

STATES: Final = ("queued", "leased", "committed", "uploaded", "checking", "accepted", "failed", "cancelled")
"""Life of a task, as shown. The last three are ends."""

LIVE: Final = STATES[:5]
PERIOD: Final = 2.0
"""Seconds between samples of `History`."""

SAMPLES: Final = 300
WINDOW: Final = 5
"""Samples that a shown rate is averaged over."""

JOBS: Final = 50
HELD: Final = 4096
"""Blobs per volunteer that its shown cache is counted from."""


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
    event: e.WorkerJoined
    since: float
    leases: set[str] = field(default_factory=set)
    verdicts: Counter[str] = field(default_factory=Counter)
    flops: float = 0.0
    wall: float = 0.0
    held: OrderedDict[str, int] = field(default_factory=OrderedDict)
    quarantined: bool = False


@dataclass(slots=True)
class _Job:
    name: str
    since: float
    last: float
    submitted: int = 0
    accepted: int = 0
    failed: int = 0
    live: int = 0
    active: int = 0
    flops: float = 0.0


@dataclass(slots=True)
class _Task:
    job: _Job
    flops: float
    since: float
    sizes: dict[str, int]
    state: str = "queued"
    attempts: dict[str, str] = field(default_factory=dict)
    """State of each live attempt."""


@dataclass(slots=True)
class _Method:
    accepted: int = 0
    rejected: int = 0
    flops: float = 0.0
    check_seconds: float = 0.0
    compute_seconds: float = 0.0
    ratio: float = 0.0
    miss: float = 0.0


class Board:
    """Keeps count. Pure: time comes in as `now`, monotonic seconds."""

    def __init__(self, now: float):
        self.started = now
        self.states: Counter[str] = Counter()
        self.workers: dict[str, _Worker] = {}
        self.methods: dict[str, _Method] = {}
        self.labs: set[str] = set()
        self.flops = self.compute_seconds = self.check_seconds = 0.0
        self.down = self.up = 0
        self.quarantined = 0
        self.latencies: deque[float] = deque(maxlen=1000)
        self._tasks: dict[tuple[str, str], _Task] = {}
        self._attempts: dict[str, tuple[tuple[str, str], str]] = {}
        self._jobs: OrderedDict[tuple[str, str], _Job] = OrderedDict()
        self._history: deque[tuple[float, float, float, float, int, int]] = deque(maxlen=SAMPLES)
        self._marks: deque[tuple[float, float, int, int]] = deque([(now, 0.0, 0, 0)], maxlen=WINDOW + 1)

    # --- what happens -------------------------------------------------------------------------------------------
    def observe(self, event: e.Event, now: float) -> None:
        """An event, before the dispatcher gets it."""
        match event:
            case e.TaskSubmitted(lab, task):
                self._submitted(lab, task, now)
            case e.FromWorker(worker, m.Committed() as message):
                self._committed(worker, message)
            case e.FromWorker(worker, m.Uploaded(attempt, _, sent)):
                self.up += max(0, sent)
                self._attempt(attempt, "uploaded")
                self._free(worker, attempt)
            case e.FromWorker(worker, m.AttemptFailed(attempt)):
                self._drop(worker, attempt)
            case e.FromWorker(worker, m.Checked(attempt, report)):
                self._checked(worker, attempt, report)
            case e.TaskCancelled(lab, task):
                self._end((lab, task), "cancelled", now)
            case e.WorkerJoined(worker):
                self.workers[worker] = _Worker(event, now)
            case e.WorkerLeft(worker):
                if worker in self.workers:
                    for attempt in list(self.workers[worker].leases):
                        self._drop(worker, attempt)
                    del self.workers[worker]
            case e.LabJoined(lab):
                self.labs.add(lab)
            case e.LabLeft(lab):
                self.labs.discard(lab)

    def follow(self, instructions: Iterable[e.Instruction], now: float) -> None:
        """What the dispatcher decided."""
        for instruction in instructions:
            match instruction:
                case e.Dispatch(worker, lab, task, attempt):
                    self._dispatched((lab, task), worker, attempt, instruction.check)
                case e.Withdraw(worker, attempt):
                    self._drop(worker, attempt)
                case e.ToLab(lab, m.TaskAccepted() as message):
                    self._accepted(lab, message, now)
                case e.ToLab(lab, m.TaskFailed(task)):
                    self._end((lab, task), "failed", now)
                case e.Record():
                    self._recorded(instruction)
                case e.Quarantine(worker):
                    self.quarantined += 1
                    if worker in self.workers:
                        self.workers[worker].quarantined = True

    def forget_lab(self, lab: str, now: float) -> None:
        """A laboratory was given up: its tasks are gone."""
        for key in [key for key in self._tasks if key[0] == lab]:
            self._end(key, "cancelled", now)

    def _submitted(self, lab: str, task: m.SubmitTask, now: float) -> None:
        if (lab, task.task) in self._tasks:
            return
        job = self._jobs.get((lab, task.job))
        if job is None:
            job = self._jobs[lab, task.job] = _Job(task.job[:8], now, now)
            if len(self._jobs) > JOBS:
                idle = next((key for key, job in self._jobs.items() if not job.live), None)
                if idle is not None:
                    del self._jobs[idle]
        job.submitted += 1
        job.live += 1
        sizes = {ref.digest: ref.nbytes for ref in task.inputs if ref.inline is None}
        self._tasks[lab, task.task] = _Task(job, task.flops, now, sizes)
        self.states["queued"] += 1

    def _dispatched(self, key: tuple[str, str], worker: str, attempt: str, check: e.CheckOrder | None) -> None:
        self._attempts[attempt] = key, worker
        if worker in self.workers:
            self.workers[worker].leases.add(attempt)
        task = self._tasks.get(key)
        if task is not None:
            task.attempts[attempt] = "leased" if check is None else "checking"
            self._settle(task)

    def _attempt(self, attempt: str, state: str) -> _Task | None:
        key, _ = self._attempts.get(attempt, (None, None))
        task = self._tasks.get(key) if key is not None else None
        if task is not None and attempt in task.attempts:
            task.attempts[attempt] = state
            self._settle(task)
        return task

    def _committed(self, worker: str, message: m.Committed) -> None:
        self.down += max(0, message.fetched)
        task = self._attempt(message.attempt, "uploaded" if message.uploaded else "committed")
        who = self.workers.get(worker)
        if who is None or task is None:
            return
        if message.uploaded:
            self._free(worker, message.attempt)
        who.wall += max(0.0, message.wall or message.seconds)
        for digest in message.held:
            if digest in task.sizes:
                who.held[digest] = task.sizes[digest]
                who.held.move_to_end(digest)
        while len(who.held) > HELD:
            who.held.popitem(last=False)

    def _checked(self, worker: str, attempt: str, report: m.CheckReport) -> None:
        self._drop(worker, attempt)
        seconds = max(0.0, report.seconds)
        self.check_seconds += seconds
        if worker in self.workers:
            self.workers[worker].verdicts["checked"] += 1
        if report.verdict != "failed":
            method = self.methods.setdefault(report.method[:16], _Method()) if len(self.methods) < 16 else _Method()
            method.check_seconds += seconds
            method.rejected += report.verdict != "accepted"

    def _accepted(self, lab: str, message: m.TaskAccepted, now: float) -> None:
        task = self._tasks.get((lab, message.task))
        if task is None:
            return
        verdict = message.verdict
        method = self.methods.setdefault(verdict.method, _Method())
        method.accepted += 1
        method.flops += task.flops
        method.compute_seconds += verdict.compute_seconds
        method.ratio = max(method.ratio, verdict.ratio)
        method.miss = max(method.miss, verdict.miss)
        self.compute_seconds += verdict.compute_seconds
        self.flops += task.flops
        task.job.flops += task.flops
        self.latencies.append(now - task.since)
        self._end((lab, message.task), "accepted", now)

    def _recorded(self, record: e.Record) -> None:
        who = self.workers.get(record.worker)
        if who is not None:
            who.verdicts[record.kind] += 1
            if record.kind == "accepted":
                who.flops += record.flops
        if record.kind != "accepted":
            self._drop(record.worker, record.attempt)

    def _free(self, worker: str, attempt: str) -> None:
        if worker in self.workers:
            self.workers[worker].leases.discard(attempt)

    def _drop(self, worker: str, attempt: str) -> None:
        self._free(worker, attempt)
        key, _ = self._attempts.pop(attempt, (None, None))
        task = self._tasks.get(key) if key is not None else None
        if task is not None and task.attempts.pop(attempt, None) is not None:
            self._settle(task)

    def _settle(self, task: _Task) -> None:
        state = max(task.attempts.values(), key=LIVE.index, default="queued")
        if state != task.state:
            self.states[task.state] -= 1
            self.states[state] += 1
            task.job.active += (state != "queued") - (task.state != "queued")
            task.state = state

    def _end(self, key: tuple[str, str], state: str, now: float) -> None:
        task = self._tasks.pop(key, None)
        if task is None:
            return
        for attempt in task.attempts:
            _, worker = self._attempts.pop(attempt)
            self._free(worker, attempt)
        self.states[task.state] -= 1
        self.states[state] += 1
        job = task.job
        job.live -= 1
        job.active -= task.state != "queued"
        job.accepted += state == "accepted"
        job.failed += state == "failed"
        job.submitted -= state == "cancelled"
        job.last = now

    # --- what is shown ------------------------------------------------------------------------------------------
    def sample(self, now: float) -> None:
        """To be called every `PERIOD` seconds."""
        self._marks.append((now, self.flops, self.down, self.up))
        then, flops, down, up = self._marks[0]
        span = max(now - then, 1e-3)
        rates = ((self.flops - flops) / span / 1e9, (self.down - down) / span / 1e6, (self.up - up) / span / 1e6)
        self._history.append((time.time(), *rates, self.count("volunteer"), self.states["queued"]))

    def count(self, role: str) -> int:
        """Workers of a role that are there."""
        return sum(1 for worker in self.workers.values() if worker.event.role == role)

    def status(self, now: float, relayed: int = 0) -> Status:
        """Everything at this moment."""
        columns: list[list[float]] = [list(column) for column in zip(*self._history, strict=True)] or [[]] * 6
        latencies = sorted(self.latencies)
        return Status(
            version=1,
            time=time.time(),
            uptime=now - self.started,
            labs=len(self.labs),
            volunteers=self.count("volunteer"),
            validators=self.count("validator"),
            tasks={state: self.states[state] for state in STATES},
            latency=latencies[len(latencies) // 2] if latencies else 0.0,
            workers=[self._worker_status(worker, now) for worker in self.workers.values()],
            methods=[
                MethodStatus(name, *(getattr(method, field) for field in _Method.__slots__))
                for name, method in sorted(self.methods.items())
            ],
            jobs=[
                JobStatus(
                    job.name,
                    job.submitted,
                    job.accepted,
                    job.failed,
                    job.active,
                    job.flops,
                    (now if job.live else job.last) - job.since,
                )
                for job in reversed(self._jobs.values())
            ],
            totals=Totals(
                self.flops, self.down, self.up, relayed, self.compute_seconds, self.check_seconds, self.quarantined
            ),
            history=History(*columns),  # type: ignore[arg-type]
        )

    def _worker_status(self, worker: _Worker, now: float) -> WorkerStatus:
        machine, verdicts = worker.event.machine, worker.verdicts
        measured = worker.flops > 0 and worker.wall > 0
        state = "quarantined" if worker.quarantined else "working" if worker.leases else "idle"
        return WorkerStatus(
            id=worker.event.worker[:8],
            role=worker.event.role,
            state=state,
            device=machine.device[:40],
            threads=machine.threads,
            seconds=now - worker.since,
            leases=len(worker.leases),
            flops=worker.flops / worker.wall if measured else machine.flops,
            measured=measured,
            bandwidth=machine.bandwidth,
            memory=machine.memory,
            cache=min(sum(worker.held.values()), machine.cache),
            cache_limit=machine.cache,
            accepted=verdicts["accepted"],
            wrong=verdicts["wrong"],
            unproven=verdicts["unproven"],
            failed=verdicts["failed"] + verdicts["late"] + verdicts["lost"],
            checked=verdicts["checked"],
        )
