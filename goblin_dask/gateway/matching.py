"""Which task for which worker: an estimate in seconds, and who may have what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from goblin_dask.gateway.workers import CORRECTION, MAPPED_LINK, Worker
from goblin_dask.verify.lifecycle import TaskLife

if TYPE_CHECKING:
    from goblin_dask.gateway.leases import Ticket

OVERHEAD = 0.02
"""Seconds that every attempt takes, whatever its size."""


def permits(ticket: Ticket, worker: Worker, now: float) -> bool:
    """Whether the volunteer may have an attempt of the task now, memory apart."""
    return ticket.life.permits(worker.holder, now) and worker.knows(ticket.needs)


def weigh(inputs: dict[str, int], size: int, worker: Worker) -> int:
    """Bytes of a task's inputs, `size` in all, that the worker does not hold."""
    held = worker.held
    if not held:
        return size
    for name, nbytes in inputs.items():
        if name in held:
            size -= nbytes
    return size


def seconds(moved: int, flops: float, worker: Worker, *, mapped: bool) -> float:
    """Time that the worker is expected to need for a task, without what it has in hand already."""
    return OVERHEAD + flops / worker.speed + moved / (MAPPED_LINK if mapped else worker.link)


def trust(worker: Worker) -> float:
    """Factor on expected time: work of hosts that fail often has to be done again."""
    record = worker.record
    good = record.accepted + 1.0
    bad = record.wrong * 4.0 + record.lost + record.late + record.failed + record.unproven
    return min(8.0, (good + bad) / good)


def cost_of_waiting(expected: float, worker: Worker) -> float:
    """Seconds until the worker would be done with a further task: smaller is better."""
    return (worker.ahead + expected) * min(CORRECTION[1], worker.correction) * trust(worker)


def crossed(life: TaskLife, worker: Worker) -> float:
    """Factor for replicas: machines of one class may agree on a wrong number, so classes are crossed on purpose."""
    if not life.replicated:
        return 1.0
    alike = any(
        attempt.holder.numeric_class == worker.holder.numeric_class
        for attempt in life.attempts.values()
        if attempt.state in ("leased", "committed", "uploaded", "checking")
    )
    return 4.0 if alike else 1.0
