"""Hosts as the gateway's operator sees them: who they are, what became of their results, and pardons for those that are
in quarantine.

A pardon is written beside the records, which belong to the gateway while it runs; it takes it up when the host asks
to join again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from goblin_dask.errors import InputError
from goblin_dask.gateway import database as tables
from goblin_dask.gateway.database import Database, Pardon
from goblin_dask.messages import Machine
from goblin_dask.verify.reputation import Host as Record
from goblin_dask.verify.reputation import Reputation, host_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostInfo:
    """What is known of one host."""

    key: str
    owner: str
    device: str
    last_seen: float
    """Seconds since the epoch; 0 when that was not written down."""
    accepted: int
    wrong: int
    unproven: int
    failed: int
    """Leases that it failed, lost, or was late with."""
    quarantined: str
    """Why it is in quarantine; empty when it is not."""
    pardoned: bool
    """Whether it may come back nevertheless."""


async def list_hosts(database: Database) -> list[HostInfo]:
    """All hosts that have had a verdict, those in quarantine first, then the one seen last."""

    def read(session: Session) -> list[HostInfo]:
        query = (
            sa.select(tables.Reputation, tables.Host, Pardon.key)
            .outerjoin(tables.Host, tables.Host.key == tables.Reputation.key)
            .outerjoin(Pardon, Pardon.key == tables.Reputation.key)
        )
        return [
            HostInfo(
                record.key,
                record.owner,
                host.device if host is not None else "",
                host.last_seen if host is not None else 0.0,
                record.accepted,
                record.wrong,
                record.unproven,
                record.failed + record.lost + record.late,
                record.quarantined,
                pardon is not None,
            )
            for record, host, pardon in session.execute(query)
        ]

    return sorted(await database.transaction(read), key=lambda host: (not host.quarantined, -host.last_seen))


async def pardon(database: Database, host: str) -> HostInfo:
    """Let a host come back that is in quarantine; the gateway will take it for one that it does not know.

    Parameters
    ----------
    host : str
        Its key, or so much of the beginning as no other has.

    Raises
    ------
    InputError
        When there is no such host, or it is not in quarantine.
    """
    found = [each for each in await list_hosts(database) if host and each.key.startswith(host)]
    if len(found) != 1:
        which = f"{len(found)} hosts have keys that begin" if found else "no host has a key that begins"
        raise InputError(f"{which} with {host[:64]!r}: list them with `goblin gateway hosts`")
    if not found[0].quarantined:
        raise InputError(f"host {found[0].key[:16]} is not in quarantine")
    await database.transaction(lambda session: session.merge(Pardon(key=found[0].key, time=time.time())) and None)
    return found[0]


def in_quarantine(key: str, reason: str) -> str:
    """What a volunteer is told that is in quarantine."""
    return f"this host ({key[:16]}) is in quarantine: {reason}; write to the gateway's operator"


async def barred(database: Database, reputation: Reputation, owner: str, machine: Machine) -> tuple[str, list[Record]]:
    """Why a volunteer may not join, empty where it may, and the records of who has just been pardoned."""
    key = host_key(owner, machine)
    record = reputation.hosts.get(key)
    reason = record.quarantined if record is not None else reputation.owners.get(owner, "")
    if not reason:
        return "", []
    if record is None or not await database.transaction(lambda session: _take_pardon(session, key)):
        return in_quarantine(key, reason), []
    logger.warning("host %s was pardoned", key[:16])
    return "", reputation.pardon(record)


def _take_pardon(session: Session, key: str) -> bool:
    """Whether a host was pardoned; it is so once."""
    found = session.get(Pardon, key)
    if found is not None:
        session.delete(found)
    return found is not None
