"""Reputation of hosts: how much work a host is trusted with at a time, and when it is trusted with none.

One record per (owner, host, device, driver, versions): the same card has been right under one driver and wrong under
another. Failures of every kind shrink a host's quota, only *verified* success restores it. A machine describes itself,
so a liar can look new at will; what it cannot change is its owner, who answers for all of them together.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

from goblin_dask.messages import Machine

LIES = 3
"""Proven lies after which a host key is in quarantine."""

LOUD = 1e3
"""Residual over tolerance from which one proven lie is enough; so are NaN, infinity and a wrong shape."""

OWNER_LIARS = 3
"""Host keys in quarantine after which their owner may be ..."""

OWNER_SHARE = 0.25
"""... when they are at least this share of the owner's keys that have had a verdict."""

WORTH = 100.0
"""Verified work over what ``sample`` lets a host gain by lying."""

AUDITED_NEW, AUDITED, AUDITED_HALF = 0.1, 0.01, 10
"""Share of a new host's, and of a trusted one's, agreeing replicas that a validator recomputes; and accepted results
after which the share is half of the first."""

OWNERS_FAULT = "hosts of this owner returned results that were proven wrong"
"""Ends the reason of a host that is in quarantine for its owner's others."""

START = 2.0
"""Simultaneous leases of a host that has shown nothing yet."""

LARGEST = 64.0
"""Simultaneous leases of any host."""

PATIENCE = 3
"""Failures in a row without a pause; each one more doubles the pause."""

PAUSE, LONGEST_PAUSE = 2.0, 600.0
"""First and longest pause, in seconds."""


def host_key(owner: str, machine: Machine) -> str:
    """Digest of everything that may make a host compute differently."""
    return blake3(
        msgspec.msgpack.encode((owner, machine.host, machine.device, machine.driver, machine.versions))
    ).hexdigest()


def numeric_class(machine: Machine) -> str:
    """What machines that may err in the same way have in common: device, driver and versions."""
    return blake3(msgspec.msgpack.encode((machine.device, machine.driver, machine.versions))).hexdigest(length=8)


@dataclass(slots=True)
class Host:
    """Record of one host key."""

    key: str
    owner: str
    identity: str
    """Random pseudonym that certificates show."""
    accepted: int = 0
    """Results that a check accepted; nothing else counts as a success anywhere."""
    wrong: int = 0
    unproven: int = 0
    late: int = 0
    lost: int = 0
    failed: int = 0
    quota: float = START
    streak: int = 0
    """Failures since the last verified success."""
    doubts: int = 0
    """Unproven results since the last verified success."""
    flops: float = 0.0
    """Verified work."""
    quarantined: str = ""
    """Reason, or empty."""
    paused_until: float = -math.inf
    """Monotonic seconds of this process; not kept in the database."""


class Reputation:
    """All hosts' records.

    Parameters
    ----------
    rng : random.Random
        Makes pseudonyms; `random.SystemRandom` outside tests.
    """

    def __init__(self, rng: random.Random):
        self._rng = rng
        self.hosts: dict[str, Host] = {}
        self.owners: dict[str, str] = {}
        """Owners in quarantine, with the reason."""
        self._of_owner: dict[str, set[str]] = {}

    def host(self, owner: str, machine: Machine, role: str = "volunteer") -> Host:
        """Record of a machine, made when it is new. Validators have records of their own."""
        key = host_key(owner if role == "volunteer" else f"{role}:{owner}", machine)
        record = self.hosts.get(key)
        if record is None:
            record = Host(key, owner, f"{self._rng.getrandbits(64):016x}", quarantined=self.owners.get(owner, ""))
            self._add(record)
        return record

    def _add(self, record: Host) -> None:
        self.hosts[record.key] = record
        self._of_owner.setdefault(record.owner, set()).add(record.key)

    def quota(self, host: Host, now: float) -> int:
        """Leases that the host may hold at this moment."""
        if host.quarantined or now < host.paused_until:
            return 0
        return int(host.quota)

    def suspicious(self, host: Host) -> bool:
        """Whether its results get the strictest check."""
        return host.wrong > 0

    def share(self, host: Host, flops: float) -> float:
        """Least share of its results of so much work that is checked, whatever a policy says.

        A liar that is checked with probability r, and never again when it was caught, brings (1 - r) / r lies to the
        end before that. With r = `WORTH` times the work of one over the verified work that it has delivered, what it
        gains is less than that work over `WORTH`, however often it comes back under new names.
        """
        if host.wrong or not host.accepted:
            return 1.0
        return min(1.0, WORTH * flops / host.flops) if flops and host.flops else float(bool(flops))

    def audit_rate(self, host: Host) -> float:
        """Probability with which its results are recomputed although another owner's replica agrees.

        Falls with every result that was accepted, and never below `AUDITED`.
        """
        return max(AUDITED, AUDITED_NEW / (1.0 + host.accepted / AUDITED_HALF))

    # --- facts ------------------------------------------------------------------------------------------------------
    def accepted(self, host: Host, flops: float = 0.0) -> None:
        """A check accepted one of its results."""
        host.accepted += 1
        host.flops += flops
        host.streak = host.doubts = 0
        host.quota = min(LARGEST, host.quota + 1.0)

    def failed(self, host: Host, kind: str, now: float) -> None:
        """It was ``lost``, ``late`` or ``failed`` with a lease in hand."""
        if kind == "late":
            host.late += 1
        elif kind == "lost":
            host.lost += 1
        else:
            host.failed += 1
        self._shrink(host, now)

    def unproven(self, host: Host, now: float) -> None:
        """Neither right nor proven wrong. No blame; a host of which nothing else comes is asked less."""
        host.unproven += 1
        host.doubts += 1
        if host.doubts > PATIENCE:
            self._shrink(host, now)

    def wrong(self, host: Host, ratio: float, *, structural: bool, now: float) -> list[Host]:
        """A result was proven wrong.

        Returns
        -------
        list of Host
            Those that are in quarantine from now on: itself, or all of its owner's.
        """
        host.wrong += 1
        self._shrink(host, now)
        if host.quarantined:
            return []
        loud = structural or not ratio < LOUD
        if host.wrong < LIES and not loud:
            return []
        host.quarantined = (
            "a result that no honest machine returns" if loud else f"{host.wrong} results that were proven wrong"
        )
        return [host, *self._owner_answers(host.owner)]

    def _owner_answers(self, owner: str) -> list[Host]:
        records = [self.hosts[key] for key in self._of_owner[owner]]
        liars = sum(1 for record in records if record.quarantined)
        judged = sum(1 for record in records if record.accepted or record.wrong)
        if owner in self.owners or liars < OWNER_LIARS or liars < OWNER_SHARE * judged:
            return []
        self.owners[owner] = f"{liars} {OWNERS_FAULT}"
        others = [record for record in records if not record.quarantined]
        for record in others:
            record.quarantined = self.owners[owner]
        return others

    def pardon(self, host: Host) -> list[Host]:
        """The operator lets a host out of quarantine; it begins anew, as one of which nothing is known.

        Returns
        -------
        list of Host
            Those that are out: it, and all that were in for its owner's sake alone, if too few of the owner's others
            are in for lies of their own.
        """
        host.quarantined = ""
        host.accepted = host.wrong = host.streak = host.doubts = 0
        host.flops, host.quota, host.paused_until = 0.0, START, -math.inf
        freed = [host]
        records = [self.hosts[key] for key in self._of_owner[host.owner]]
        liars = sum(bool(record.quarantined) and not record.quarantined.endswith(OWNERS_FAULT) for record in records)
        if liars < OWNER_LIARS and self.owners.pop(host.owner, ""):
            freed += [record for record in records if record.quarantined.endswith(OWNERS_FAULT)]
            for record in freed:
                record.quarantined = ""
        return freed

    def forgive(self, host: Host) -> None:
        """A failure turned out to be the task's: it failed on several independent hosts."""
        host.streak = max(0, host.streak - 1)
        host.quota = max(host.quota, min(START, host.quota * 2.0))
        if host.streak < PATIENCE:
            host.paused_until = -math.inf

    def _shrink(self, host: Host, now: float) -> None:
        host.quota = max(1.0, host.quota / 2.0)
        host.streak += 1
        if host.streak >= PATIENCE:
            pause = PAUSE * 2.0 ** min(host.streak - PATIENCE, 16)
            host.paused_until = now + min(pause, LONGEST_PAUSE)

    # --- the database -----------------------------------------------------------------------------------------------
    def to_rows(self) -> list[dict[str, Any]]:
        """Plain rows, one a host."""
        return [{field.name: getattr(host, field.name) for field in _KEPT} for host in self.hosts.values()]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]], rng: random.Random) -> Reputation:
        """The same reputation again. Rows need ``key`` and ``owner``; a database that keeps counts alone is enough.

        Without a stored ``quota`` a host begins with what its verified successes earned and its failures left.
        """
        self = cls(rng)
        for row in rows:
            known = {field.name: row[field.name] for field in _KEPT if field.name in row}
            known.setdefault("identity", f"{rng.getrandbits(64):016x}")
            record = Host(**known)
            if record.quarantined:
                record.quarantined = str(record.quarantined)
            if "quota" not in known:
                failures = record.lost + record.late + record.failed + record.wrong
                record.quota = max(1.0, min(LARGEST, START + record.accepted) / 2.0 ** min(failures, 16))
                if record.accepted > 8 * failures:
                    record.quota = min(LARGEST, START + record.accepted)
            self._add(record)
        for owner in self._of_owner:
            self._owner_answers(owner)
        return self


_KEPT = tuple(field for field in dataclasses.fields(Host) if field.name != "paused_until")
