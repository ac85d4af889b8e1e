"""The queue of what waits for a worker: fair between laboratories, then between their jobs, then by priority.

Fairness is by work: every turn is charged with what it costs, and the least charged comes first. Whoever arrives
later starts level with the others, without credit for the time before. Within a job entries lie in heaps by classes
of memory (powers of two) and by version of the catalogue, so that a small or old worker does not search through tasks
that it could never have.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Fit(enum.Enum):
    """Whether a worker can take an entry."""

    NO = 0
    YES = 1
    WAIT = 2
    """Not now, but it must take nothing else until it can."""


class Entry(Generic[T]):
    """One thing that waits."""

    __slots__ = ("alive", "cost", "item", "job", "lab", "need", "priority", "reserved", "since", "version")

    def __init__(
        self, item: T, lab: str, job: str, priority: tuple[int, ...], need: int, cost: float, since: float, version: int
    ):
        self.item, self.lab, self.job, self.priority = item, lab, job, priority
        self.need, self.cost, self.since, self.version = need, cost, since, version
        self.alive = True
        self.reserved = ""
        """Worker that takes nothing else until this fits."""


Heap = list[tuple[tuple[int, ...], int, Entry[T]]]


class _Shares(Generic[R]):
    """Children in the order of what they were charged with; ones without entries stand aside."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, R]] = []
        self._members: set[R] = set()
        self._count = itertools.count()
        self._clock = 0.0

    def enter(self, child: R, charged: float) -> float:
        charged = max(charged, self._clock)
        if child not in self._members:
            self._members.add(child)
            heapq.heappush(self._heap, (charged, next(self._count), child))
        return charged

    def visit(self, charged: Callable[[R], float | None], attempt: Callable[[R], T | None]) -> T | None:
        """Try children in turn until `attempt` succeeds. `charged` is None for a child that has nothing left."""
        back: list[R] = []
        found = None
        while self._heap and found is None:
            key, _, child = heapq.heappop(self._heap)
            now = charged(child)
            if now is None:
                self._members.discard(child)
                continue
            if now > key:  # charged since it was put here
                heapq.heappush(self._heap, (now, next(self._count), child))
                continue
            if not back:
                self._clock = max(self._clock, key)
            found = attempt(child)
            back.append(child)
        for child in back:
            now = charged(child)
            if now is None:
                self._members.discard(child)
            else:
                heapq.heappush(self._heap, (now, next(self._count), child))
        return found


class _Job(Generic[T]):
    __slots__ = ("charged", "dead", "heaps", "live", "name")

    def __init__(self, name: str):
        self.name, self.charged, self.live, self.dead = name, 0.0, 0, 0
        self.heaps: dict[tuple[int, int], Heap[T]] = {}
        """By the bits of what they need, and by version."""

    def take(
        self,
        limit: int,
        version: int,
        fits: Callable[[T, Entry[T]], Fit],
        rank: Callable[[T], float],
        window: int,
        scan: int,
    ) -> Entry[T] | None:
        most = limit.bit_length()
        heaps = [heap for (size, asked), heap in self.heaps.items() if size <= most and asked <= version]
        looked: list[tuple[Heap[T], tuple[tuple[int, ...], int, Entry[T]]]] = []
        best: Entry[T] | None = None
        best_rank = 0.0
        good = 0
        while good < window and len(looked) < scan:
            heap = None
            for candidate in heaps:
                while candidate and not candidate[0][2].alive:
                    heapq.heappop(candidate)
                    self.dead -= 1
                if candidate and (heap is None or candidate[0] < heap[0]):
                    heap = candidate
            if heap is None:
                break
            item = heapq.heappop(heap)
            looked.append((heap, item))
            entry = item[2]
            fit = fits(entry.item, entry)
            if fit is Fit.NO:
                continue
            if fit is Fit.WAIT:
                if best is None:
                    best = _WAITING
                break
            good += 1
            value = rank(entry.item)
            if best is None or value < best_rank:
                best, best_rank = entry, value
            if value <= 0.0:
                break
        for heap, item in looked:
            if item[2] is not best:
                heapq.heappush(heap, item)
        return best


_WAITING: Entry[Any] = Entry(None, "", "", (), 0, 0.0, 0.0, 0)
"""Stands for an entry that the worker must wait for, and take nothing else."""


class _Lab(Generic[T]):
    __slots__ = ("charged", "jobs", "live", "name", "paused", "shares")

    def __init__(self, name: str):
        self.name, self.charged, self.live, self.paused = name, 0.0, 0, False
        self.jobs: dict[str, _Job[T]] = {}
        self.shares: _Shares[_Job[T]] = _Shares()


class FairQueue(Generic[T]):
    """What waits for a worker."""

    def __init__(self) -> None:
        self._labs: dict[str, _Lab[T]] = {}
        self._shares: _Shares[_Lab[T]] = _Shares()
        self._count = itertools.count()
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(
        self,
        item: T,
        *,
        lab: str,
        job: str,
        priority: tuple[int, ...],
        need: int,
        cost: float,
        now: float,
        version: int = 1,
    ) -> Entry[T]:
        """Let `item` wait.

        Its turn will be charged with `cost`; it needs a worker with `need` bytes and of catalogue `version`.
        """
        entry = Entry(item, lab, job, priority, need, cost, now, version)
        house = self._lab(lab)
        work = house.jobs.get(job)
        if work is None:
            work = house.jobs[job] = _Job(job)
        if not house.live:
            house.charged = self._shares.enter(house, house.charged)
        if not work.live:
            work.charged = house.shares.enter(work, work.charged)
        heapq.heappush(work.heaps.setdefault((need.bit_length(), version), []), (priority, next(self._count), entry))
        work.live += 1
        house.live += 1
        self._live += 1
        return entry

    def take(
        self,
        limit: int,
        fits: Callable[[T, Entry[T]], Fit],
        rank: Callable[[T], float],
        *,
        window: int = 1,
        scan: int = 64,
        lab: str = "",
        version: int = 1,
    ) -> T | None:
        """Take the best of the first `window` entries that a worker can have, in the order of fairness.

        Parameters
        ----------
        limit : int
            Bytes that the worker has in all; entries that need more are not looked at.
        fits : callable
            ``fits(item, entry)``: whether the worker can have it.
        rank : callable
            Smaller is better; 0 cannot be bettered.
        lab : str
            Of this laboratory alone.
        version : int
            Catalogue that the worker has; entries that need a later one are not looked at.
        """
        if not self._live:
            return None

        def from_job(job: _Job[T]) -> Entry[T] | None:
            return job.take(limit, version, fits, rank, window, scan)

        def from_lab(house: _Lab[T]) -> Entry[T] | None:
            if house.paused or (lab and house.name != lab):
                return None
            return house.shares.visit(lambda job: job.charged if job.live else None, from_job)

        if lab:
            house = self._labs.get(lab)
            entry = from_lab(house) if house is not None and house.live else None
        else:
            entry = self._shares.visit(lambda house: house.charged if house.live else None, from_lab)
        if entry is None or entry is _WAITING:
            return None
        house = self._labs[entry.lab]
        house.charged += entry.cost
        house.jobs[entry.job].charged += entry.cost
        self._end(entry, taken=True)
        return entry.item

    def discard(self, entry: Entry[T]) -> None:
        """Take an entry out; harmless when it is out already."""
        if entry.alive:
            self._end(entry, taken=False)

    def _end(self, entry: Entry[T], *, taken: bool) -> None:
        entry.alive = False
        house = self._labs[entry.lab]
        work = house.jobs[entry.job]
        work.live -= 1
        house.live -= 1
        self._live -= 1
        if not work.live:
            del house.jobs[entry.job]
        if taken:
            return
        work.dead += 1
        if work.dead > 64 and work.dead > work.live:
            for heap in work.heaps.values():
                heap[:] = [item for item in heap if item[2].alive]
                heapq.heapify(heap)
            work.dead = 0

    def pause(self, lab: str, paused: bool = True) -> None:
        """Let a laboratory's entries wait, or go on: its data cannot be reached while it is away."""
        self._lab(lab).paused = paused

    def forget(self, lab: str) -> None:
        """Drop what is remembered of a laboratory that has no entries."""
        house = self._labs.get(lab)
        if house is not None and not house.live:
            del self._labs[lab]

    def _lab(self, name: str) -> _Lab[T]:
        house = self._labs.get(name)
        if house is None:
            house = self._labs[name] = _Lab(name)
        return house

    def depth(self) -> dict[str, dict[str, int]]:
        """Entries by laboratory and job."""
        return {
            lab.name: {job.name: job.live for job in lab.jobs.values() if job.live}
            for lab in self._labs.values()
            if lab.live
        }

    def beyond(self, limit: int, version: int) -> Iterator[T]:
        """Entries that need more than `limit` bytes, or a later `version`."""
        least = limit.bit_length()
        for lab in self._labs.values():
            for job in lab.jobs.values():
                for (size, asked), heap in job.heaps.items():
                    if asked > version:
                        yield from (entry.item for _, _, entry in heap if entry.alive)
                    elif size >= least:
                        yield from (entry.item for _, _, entry in heap if entry.alive and entry.need > limit)
