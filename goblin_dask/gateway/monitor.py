"""What the dispatcher shows of itself: counters, a snapshot for monitoring pages, the grid's offer to laboratories."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from goblin_dask import messages as m
from goblin_dask.gateway.workers import Pool

if TYPE_CHECKING:
    from goblin_dask.gateway.dispatcher import Dispatcher
    from goblin_dask.gateway.leases import Ticket

OFFERED = 64
"""Volunteers whose memory an offer names."""
JOBS = 1000
"""Finished jobs that stay in a snapshot."""


@dataclass(slots=True)
class JobCount:
    """Progress of one job."""

    submitted: int = 0
    accepted: int = 0
    failed: int = 0
    open: int = 0
    flops: float = 0.0


@dataclass(slots=True)
class Totals:
    """Counters since the gateway's start."""

    tasks: Counter[str] = field(default_factory=Counter)
    """accepted, failed, reopened."""
    methods: Counter[str] = field(default_factory=Counter)
    """Accepted tasks by how they were verified."""
    flops: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    check_seconds: float = 0.0
    compute_seconds: float = 0.0
    jobs: dict[tuple[str, str], JobCount] = field(default_factory=dict)

    def _job(self, ticket: Ticket) -> JobCount:
        key = (ticket.lab, ticket.life.task.job)
        job = self.jobs.get(key)
        if job is None:
            job = self.jobs[key] = JobCount()
            if len(self.jobs) > JOBS:
                old = next((name for name, one in self.jobs.items() if not one.open and one is not job), None)
                if old is not None:
                    del self.jobs[old]
        return job

    def submitted(self, ticket: Ticket) -> None:
        """A task was taken on."""
        job = self._job(ticket)
        job.submitted += 1
        job.open += 1

    def accepted(self, ticket: Ticket, verdict: m.Verdict) -> None:
        """A task has a result."""
        self.tasks["accepted"] += 1
        self.methods[verdict.method] += 1
        self.flops += ticket.life.task.flops
        self.compute_seconds += verdict.compute_seconds
        job = self._job(ticket)
        job.accepted += 1
        job.flops += ticket.life.task.flops

    def reopened(self, ticket: Ticket) -> None:
        """An unchecked result counts no longer."""
        self.tasks["reopened"] += 1
        self.tasks["accepted"] -= 1
        self.flops -= ticket.life.task.flops
        if ticket.answer is not None:
            self.methods[ticket.answer.verdict.method] -= 1
            self.compute_seconds -= ticket.answer.verdict.compute_seconds
        job = self._job(ticket)
        job.accepted -= 1
        job.flops -= ticket.life.task.flops

    def failed(self, ticket: Ticket) -> None:
        """The grid gave a task up."""
        self.tasks["failed"] += 1
        self._job(ticket).failed += 1

    def ended(self, ticket: Ticket) -> None:
        """Nothing of a task is under way."""
        self._job(ticket).open -= 1

    def forget(self, lab: str) -> None:
        """A laboratory is gone for good."""
        for key in [key for key in self.jobs if key[0] == lab]:
            del self.jobs[key]


def grid_offer(pool: Pool, lab: str, place: str) -> m.GridOffer:
    """What the volunteers offer to a laboratory."""
    volunteers = [worker for worker in pool.volunteers.values() if not worker.record.quarantined]
    memory = sorted((worker.offer // worker.slots for worker in volunteers), reverse=True)
    known = [worker.link for worker in volunteers if worker.machine.bandwidth > 0]
    return m.GridOffer(
        volunteers=len(volunteers),
        validators=sum(worker.lab in ("", lab) for worker in pool.validators.values()),
        memory=tuple(memory[:OFFERED]),
        flops=sum(worker.speed for worker in volunteers),
        bandwidth=statistics.median(known) if known else 0.0,
        local=bool(volunteers) and bool(place) and all(worker.place == place for worker in volunteers),
    )


def snapshot(dispatcher: Dispatcher) -> dict[str, Any]:
    """State of everything, JSON-able, for the operator's pages."""
    leases, totals, outcomes = dispatcher.leases, dispatcher.outcomes.totals, dispatcher.outcomes
    workers = []
    for worker in leases.pool.all.values():
        record = worker.record
        workers.append(
            {
                "worker": worker.id,
                "role": worker.role,
                "identity": record.identity,
                "owner": record.owner,
                "device": worker.machine.device,
                "catalogue": worker.machine.catalogue,
                "threads": worker.machine.threads,
                "slots": worker.slots,
                "quota": dispatcher.reputation.quota(record, dispatcher.now),
                "leases": len(worker.hands),
                "memory": worker.offer,
                "memory_used": worker.used,
                "speed": worker.speed,
                "link": worker.link,
                "correction": worker.correction,
                "cache": worker.held_bytes,
                "flops": worker.flops,
                "bytes_in": worker.fetched,
                "bytes_out": worker.sent,
                "verdicts": {
                    "accepted": record.accepted,
                    "wrong": record.wrong,
                    "unproven": record.unproven,
                    "late": record.late,
                    "lost": record.lost,
                    "failed": record.failed,
                },
                "ignored": worker.ignored,
                "quarantined": record.quarantined,
            }
        )
    states = {stage: count for stage, count in sorted(outcomes.stages.items()) if count and stage != "accepted"}
    return {
        "now": dispatcher.now,
        "tasks": {**states, "accepted": totals.tasks["accepted"], "failed": totals.tasks["failed"]},
        "reopened": totals.tasks["reopened"],
        "queue": leases.tasks.depth(),
        "checks": leases.checks.depth(),
        "labs": {
            lab.name: {"away": lab.away_since is not None, "open": len(lab.tickets)} for lab in outcomes.labs.values()
        },
        "jobs": [
            {
                "lab": lab,
                "job": job,
                "submitted": n.submitted,
                "accepted": n.accepted,
                "failed": n.failed,
                "open": n.open,
                "flops": n.flops,
            }
            for (lab, job), n in totals.jobs.items()
        ],
        "methods": dict(totals.methods),
        "flops": totals.flops,
        "bytes_in": totals.bytes_in,
        "bytes_out": totals.bytes_out,
        "check_seconds": totals.check_seconds,
        "compute_seconds": totals.compute_seconds,
        "orphans": len(dispatcher.orphans),
        "workers": workers,
    }
