"""Workers as the dispatcher knows them: what they offer, what they have in hand, who is idle."""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from goblin_dask import messages as m
from goblin_dask.gateway.events import ANYBODY, Needs, WorkerJoined
from goblin_dask.verify.effects import Holder
from goblin_dask.verify.reputation import Host, numeric_class

SPEEDS = (1e8, 1e14)
"""Bounds of a believable speed, FLOP/s: a driver's nonsense must not make a deadline of a second."""
USUAL_SPEED = 5e9
LINKS = (1e5, 1e10)
"""Bounds of a believable link, bytes/s."""
USUAL_LINK = 1e7
MAPPED_LINK = 2e9
"""Of a worker that shares the laboratory's host."""
SLOTS = 64
"""Most slots that a worker gets."""
CORRECTION = (0.1, 100.0)
"""Bounds of observed over expected time."""


def believable(value: float, bounds: tuple[float, float], usual: float) -> float:
    """`value` within `bounds`; `usual` where it says nothing."""
    if not value > 0.0 or not math.isfinite(value):
        return usual
    return min(bounds[1], max(bounds[0], value))


@dataclass(slots=True, eq=False)
class Worker:
    """A volunteer or validator that is connected."""

    id: str
    role: str
    holder: Holder
    record: Host
    machine: m.Machine
    lab: str
    place: str
    slots: int
    offer: int
    """Bytes for tasks' projected peaks, all slots together."""
    speed: float
    link: float
    lacks: frozenset[str] = frozenset()
    """Operators of its catalogue that it cannot compute."""
    hands: dict[str, int] = field(default_factory=dict)
    """Attempts (or checks) in hand, with the bytes that each may take."""
    stopping: set[str] = field(default_factory=set)
    """Withdrawn ones that it has not let go of yet."""
    away_since: float | None = None
    """Since when it has no connection."""
    used: int = 0
    ahead: float = 0.0
    """Seconds of work in hand, as expected."""
    correction: float = 1.0
    """Observed over expected time."""
    held: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Blobs that it says it keeps, with their sizes; oldest use first."""
    held_bytes: int = 0
    ignored: int = 0
    accepted: int = 0
    rejected: int = 0
    flops: float = 0.0
    fetched: int = 0
    sent: int = 0
    place_in_idle: tuple[int, str] | None = None

    def knows(self, needs: Needs) -> bool:
        """Whether it has the operators of a program."""
        return self.machine.catalogue >= needs.catalogue and (not self.lacks or self.lacks.isdisjoint(needs.operators))

    @property
    def free(self) -> int:
        """Bytes that no task in hand may take."""
        return self.offer - self.used

    def keep(self, blobs: dict[str, int]) -> None:
        """It says that it holds these blobs now."""
        for digest, nbytes in blobs.items():
            if digest not in self.held:
                self.held_bytes += nbytes
                self.held[digest] = nbytes
            self.held.move_to_end(digest)
        while self.held and self.held_bytes > self.machine.cache:
            self.held_bytes -= self.held.popitem(last=False)[1]

    def observe(self, elapsed: float, expected: float) -> None:
        """An attempt took so long."""
        ratio = min(CORRECTION[1], max(CORRECTION[0], elapsed / max(expected, 1e-6)))
        self.correction = min(CORRECTION[1], max(CORRECTION[0], self.correction * ratio**0.25))


def make_worker(event: WorkerJoined, record: Host) -> Worker:
    """Worker that has just joined; what it says of itself is clamped to what can be."""
    machine = event.machine
    offer = machine.gpu_memory if machine.device != "cpu" and machine.gpu_memory > 0 else machine.memory
    return Worker(
        id=event.worker,
        role=event.role,
        holder=Holder(
            event.worker, event.owner, event.network, f"{event.owner}/{machine.host}", record.key, record.identity,
            numeric_class(machine),
        ),
        record=record,
        machine=machine,
        lab=event.lab,
        place=event.place,
        slots=min(SLOTS, max(1, machine.slots)),
        offer=max(0, offer),
        speed=believable(machine.flops, SPEEDS, USUAL_SPEED),
        link=believable(machine.bandwidth, LINKS, USUAL_LINK),
        lacks=frozenset(machine.lacks),
    )  # fmt: skip


class Pool:
    """All workers, and an index of the idle volunteers by free memory."""

    def __init__(self) -> None:
        self.all: dict[str, Worker] = {}
        self.volunteers: dict[str, Worker] = {}
        self.validators: dict[str, Worker] = {}
        self.by_key: dict[str, set[str]] = {}
        self.idle_validators: dict[str, Worker] = {}
        self.independent = False
        """Whether volunteers of two owners, in two networks, are connected and not in quarantine."""
        self.alone_since: float | None = None
        """Since when there are volunteers, but no two that are independent."""
        self._versions: Counter[int] = Counter()
        """Volunteers by the catalogue that they have."""
        self._idle: list[tuple[int, str]] = []
        self._offers: list[tuple[int, str]] = []

    def add(self, worker: Worker) -> None:
        """A worker joined."""
        self.all[worker.id] = worker
        (self.volunteers if worker.role == "volunteer" else self.validators)[worker.id] = worker
        self.by_key.setdefault(worker.record.key, set()).add(worker.id)
        if worker.role == "volunteer":
            bisect.insort(self._offers, (worker.offer, worker.id))
            self._versions[worker.machine.catalogue] += 1

    def remove(self, worker: Worker) -> None:
        """A worker left."""
        self.index(worker, idle=False)
        del self.all[worker.id]
        (self.volunteers if worker.role == "volunteer" else self.validators).pop(worker.id)
        keyed = self.by_key[worker.record.key]
        keyed.discard(worker.id)
        if not keyed:
            del self.by_key[worker.record.key]
        if worker.role == "volunteer":
            del self._offers[bisect.bisect_left(self._offers, (worker.offer, worker.id))]
            catalogue = worker.machine.catalogue
            self._versions[catalogue] -= 1
            if not self._versions[catalogue]:
                del self._versions[catalogue]

    def index(self, worker: Worker, *, idle: bool) -> None:
        """Note whether a worker has a free slot, and its free memory."""
        if worker.role != "volunteer":
            if idle:
                self.idle_validators[worker.id] = worker
            else:
                self.idle_validators.pop(worker.id, None)
            return
        place = (worker.free, worker.id) if idle else None
        if place == worker.place_in_idle:
            return
        if worker.place_in_idle is not None:
            del self._idle[bisect.bisect_left(self._idle, worker.place_in_idle)]
        if place is not None:
            bisect.insort(self._idle, place)
        worker.place_in_idle = place

    def idle(self, need: int) -> Idle:
        """Idle volunteers with `need` bytes free."""
        return Idle(self, self._idle, bisect.bisect_left(self._idle, (need, "")))

    def look(self, now: float) -> None:
        """Look who is there: some have come or gone, or are in quarantine."""
        owners: set[str] = set()
        networks: set[str] = set()
        self.independent = False
        for worker in self.volunteers.values():
            if not worker.record.quarantined:
                owners.add(worker.holder.owner)
                networks.add(worker.holder.network)
                if len(owners) > 1 and len(networks) > 1:
                    self.independent = True
                    break
        if self.independent or not owners:
            self.alone_since = None
        elif self.alone_since is None:
            self.alone_since = now

    def alone(self, since: float) -> bool:
        """Whether no two volunteers were independent since that time, although some are there."""
        return self.alone_since is not None and self.alone_since <= since

    @property
    def newest(self) -> int:
        """Newest catalogue that a volunteer has; 0 while there is no volunteer."""
        return max(self._versions, default=0)

    def largest(self, needs: Needs = ANYBODY) -> int | None:
        """Bytes that the largest volunteer not in quarantine offers that knows a program; None when there is none."""
        if needs.catalogue > self.newest:
            return None
        able = (w for w in self.by_offer() if not w.record.quarantined and w.knows(needs))
        return next((worker.offer for worker in able), None)

    def by_offer(self) -> Iterator[Worker]:
        """Volunteers, the largest first."""
        return (self.all[name] for _, name in reversed(self._offers))


class Idle:
    """Idle volunteers with enough free memory; a view that is valid until the pool changes."""

    def __init__(self, pool: Pool, ordered: list[tuple[int, str]], start: int):
        self._pool, self._ordered, self._start = pool, ordered, start

    def __len__(self) -> int:
        return len(self._ordered) - self._start

    def __iter__(self) -> Iterator[Worker]:
        return (self._pool.all[self._ordered[i][1]] for i in range(self._start, len(self._ordered)))

    def some(self, count: int, rng: random.Random) -> list[Worker]:
        """At most `count` of them, at random."""
        if len(self) <= count:
            return list(self)
        picked = {self._start + int(rng.random() * len(self)) for _ in range(count)}
        return [self._pool.all[self._ordered[i][1]] for i in picked]
