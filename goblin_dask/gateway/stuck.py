"""Tasks that nobody who is connected could ever have: their laboratories are told why, and compute them."""

from __future__ import annotations

from goblin_dask.gateway.events import Needs
from goblin_dask.gateway.leases import ANY_MEMORY, Leases, Ticket
from goblin_dask.gateway.workers import Pool
from goblin_dask.verify.effects import Effect

SWEPT = 256
"""Queued tasks looked at per sweep for whether anybody could ever have them."""


def beyond(pool: Pool, ticket: Ticket) -> bool:
    """Whether there are volunteers, none of which has both the operators and the memory for the task."""
    if pool.largest() is None:
        return False
    largest = pool.largest(ticket.needs)
    return largest is None or ticket.life.need > largest or bool(unknown(pool, ticket))


def unknown(pool: Pool, ticket: Ticket) -> str:
    """Why nobody who is there knows a task's operators; empty while somebody does, or nobody is there."""
    needs = ticket.needs
    volunteers = [worker for worker in pool.volunteers.values() if not worker.record.quarantined]
    if volunteers and pool.largest(needs) is None:
        return _reason("volunteer", needs, max(worker.machine.catalogue for worker in volunteers))
    validators = [worker for worker in pool.validators.values() if worker.lab in ("", ticket.lab)]
    if validators and not any(worker.knows(needs) for worker in validators):
        return _reason("validator", needs, max(worker.machine.catalogue for worker in validators))
    return ""


def _reason(role: str, needs: Needs, newest: int) -> str:
    if needs.catalogue > newest:
        return (
            f"its program needs version {needs.catalogue} of the operator catalogue and the newest {role} has version "
            f"{newest}: a newer goblin-dask there has it"
        )
    return f"no {role} has all of its operators ({', '.join(sorted(needs.operators)[:8])})"


def end(pool: Pool, ticket: Ticket) -> list[Effect]:
    """What follows for a task that nobody could ever have."""
    reason = unknown(pool, ticket)
    return ticket.life.unknown(reason) if reason else ticket.life.stuck(pool.largest())


def waiting(leases: Leases, waited: float) -> list[Ticket]:
    """Tasks that wait, since `waited` or longer, for what nobody who is connected could ever do; some in each sweep."""
    pool = leases.pool
    found = []
    if pool.validators:
        newest = max(worker.machine.catalogue for worker in pool.validators.values())
        unchecked = leases.checks.beyond(ANY_MEMORY, newest)
        found = [ticket for ticket, attempt in unchecked if ticket.checks[attempt.name].since <= waited]
    return found + _queued(leases, waited)


def _queued(leases: Leases, waited: float) -> list[Ticket]:
    pool = leases.pool
    largest = pool.largest()
    alone = pool.alone(waited)
    found = []
    if largest is not None:
        far = leases.tasks.beyond(largest, pool.newest)
        found = [ticket for ticket in far if ticket.entry is not None and ticket.entry.since <= waited]
    for _turn in range(min(SWEPT, len(leases.constrained))):
        key, ticket = leases.constrained.popitem(last=False)
        if not ticket.queued or ticket.entry is None:
            continue
        leases.constrained[key] = ticket
        life = ticket.life
        # what a second owner must do need not wait again for what was waited for already
        if (ticket.entry.since <= waited or (alone and life.replicated)) and not any(
            worker.offer >= life.need
            and not worker.record.quarantined
            and worker.knows(ticket.needs)
            and life.ever_permits(worker.holder)
            for worker in pool.by_offer()
        ):
            found.append(ticket)
    return found
