"""The dispatcher's settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds. The floors are generous: a lease that ends too early wastes all that was done in it."""

    lease_least: float = 60.0
    """Shortest deadline of any lease or check."""
    lease_most: float = 24 * 3600.0
    lease_factor: float = 6.0
    """Deadline over the time that the worker is expected to need."""
    backup_least: float = 10.0
    backup_factor: float = 2.0
    """A lease that takes this many times what was expected may get a backup copy."""
    copies: int = 3
    """Attempts of one task in volunteers' hands at a time, backups included."""
    overdue_factor: float = 4.0
    """A late attempt is given up after this many further deadlines."""
    stop_grace: float = 10.0
    """A slot whose attempt was withdrawn is free after this time, acknowledged or not."""
    patience: float = 10.0
    """How long a task that no connected volunteer may have waits for another; also after the gateway's start."""
    settle: float = 5.0
    """After a restart tasks wait so long for volunteers to come back who may have them in hand."""
    away: float = 10.0
    """When a worker is without a connection for so long, others may do what it has in hand. After a cut of 5 s it is
    back within 2 s more, later on a busy machine."""
    drain: float = 5.0
    """A task that has waited so long for memory makes a volunteer finish what it has and take nothing else."""
    lab_grace: float = 3600.0
    """How long the tasks of a laboratory that went away are kept."""
    orphan_grace: float = 600.0
    """How long attempts of tasks that no laboratory has submitted yet are kept."""
    offer_pause: float = 1.0
    """Least time between two offers to laboratories."""
    window: int = 6
    """Queued tasks that are weighed for one free slot."""
    scan: int = 64
    """Queued tasks that are looked at to find so many."""
    candidates: int = 6
    """Idle workers that are weighed for one new task."""
    remember: int = 50_000
    """Accepted tasks whose answer is kept, of all laboratories."""
    remember_bytes: int = 64 * 1024 * 1024
    """Inline outputs among them."""
    tasks: int = 2_000_000
    """Open tasks of all laboratories; more are refused."""
