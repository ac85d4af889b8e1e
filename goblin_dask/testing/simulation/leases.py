"""What is leased to whom in a simulated grid, and what happens when."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from goblin_dask.gateway import matching
from goblin_dask.gateway.limits import Limits
from goblin_dask.testing.simulation.figures import Result
from goblin_dask.testing.simulation.population import Population, Volunteer
from goblin_dask.testing.simulation.rehearsal import HandedIn
from goblin_dask.testing.simulation.workload import Kind
from goblin_dask.testing.strategies import Answer
from goblin_dask.verify import effects as fx
from goblin_dask.verify.lifecycle import TaskLife

SPEED, LINK = 1e10, 1e7
"""Of every volunteer: FLOP/s, bytes/s."""
TRIED = 64
"""Idle volunteers that are drawn for a task before all are looked at."""
RETRIED = 8
"""Waiting tasks that are offered to a volunteer who is free again."""
GONE = frozenset({"lost", "wrong", "failed", "withdrawn"})


@dataclass(slots=True, eq=False)
class Job:
    """Tasks that are wanted together."""

    open: int
    wrong: dict[Task, fx.Attempt] = field(default_factory=dict)
    """Tasks whose accepted result is wrong, with the attempt that made it."""
    unchecked: list[Task] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Task:
    """A task and what the simulation knows of it besides its life."""

    life: TaskLife
    kind: Kind
    job: Job
    handed: dict[str, HandedIn] = field(default_factory=dict)
    """By attempt."""
    agreed: dict[int, tuple[Answer, HandedIn]] = field(default_factory=dict)
    """What the first of each ring answered."""
    queued: bool = False
    retry: float = 0.0
    """When a host that is avoided may be asked again."""

    @property
    def live(self) -> list[fx.Attempt]:
        """Attempts from which something may come yet, or has come."""
        return [attempt for attempt in self.life.attempts.values() if attempt.state not in GONE]

    @property
    def expected(self) -> float:
        """Seconds that a volunteer needs."""
        return matching.OVERHEAD + self.kind.flops / SPEED + self.kind.moved / LINK


class Leases:
    """Gives tasks to volunteers, and keeps the time.

    Parameters
    ----------
    population : Population
    result : Result
        In which costs and meetings are counted.
    rng : random.Random
    """

    def __init__(self, population: Population, result: Result, rng: random.Random):
        self.population, self.result, self.rng = population, result, rng
        self.limits, self.now = Limits(), 0.0
        self.hands: dict[str, tuple[Task, Volunteer]] = {}
        self.waiting: deque[Task] = deque()
        """Tasks for which nobody was idle who may have them."""
        self._events: list[tuple[float, int, str, Any]] = []
        self._number = itertools.count()

    # --- time --------------------------------------------------------------------------------------------------------
    def at(self, when: float, what: str, about: Any) -> None:
        """Let `next` return (what, about) at that time, in seconds."""
        heapq.heappush(self._events, (when, next(self._number), what, about))

    def next(self) -> tuple[str, Any] | None:
        """What happens next; the clock goes on to then."""
        if not self._events:
            return None
        self.now, _, what, about = heapq.heappop(self._events)
        return what, about

    def name(self) -> str:
        """Of a new attempt or check."""
        return str(next(self._number))

    # --- volunteers --------------------------------------------------------------------------------------------------
    def of(self, attempt: fx.Attempt) -> Volunteer:
        """Who made it."""
        return self.population.by_key[attempt.holder.key]

    def want(self, task: Task) -> None:
        """Lease the task as often as it lacks an attempt."""
        while task.life.wanted:
            volunteer = self._draw(task)
            if volunteer is not None:
                self._lease(task, volunteer)
                continue
            if not task.queued:
                task.queued = True
                self.waiting.append(task)
                retry = task.life.retry_at()
                if retry > self.now and retry != task.retry:
                    task.retry = retry
                    self.at(retry, "look", None)
            return

    def _draw(self, task: Task) -> Volunteer | None:
        """An idle volunteer at random; for a replica rather one of another numeric class, as the dispatcher does."""
        idle, rng, life = self.population.idle, self.rng, task.life
        taken = [attempt.holder.numeric_class for attempt in task.live]
        alike = None
        for _ in range(min(TRIED, 4 * len(idle))):
            volunteer = idle[int(rng.random() * len(idle))]
            if life.permits(volunteer.holder, self.now):
                if volunteer.holder.numeric_class not in taken:
                    return volunteer
                alike = volunteer
        if alike is not None:
            return alike
        everybody = rng.sample(idle, len(idle))
        return next((each for each in everybody if life.permits(each.holder, self.now)), None)

    def _lease(self, task: Task, volunteer: Volunteer) -> None:
        others = [attempt for attempt in task.live if attempt.state != "unproven"]
        ring, meetings = volunteer.person.ring, self.result.meetings
        if others:
            meetings.expected += len(others) * self.population.meeting
            meetings.counted += sum(ring is not None and self.of(other).person.ring == ring for other in others)
        name = self.name()
        task.life.lease(name, volunteer.holder, self.now)
        self.hands[name] = task, volunteer
        volunteer.hands.add(name)
        self.population.index(volunteer, self.now)
        self.result.work[task.kind.of.name].volunteers += task.kind.flops
        self.at(self.now + task.expected * (0.5 + self.rng.random()), "answer", name)

    def release(self, name: str) -> tuple[Task, Volunteer] | None:
        """The attempt is out of its volunteer's hands, if it was in them."""
        held = self.hands.pop(name, None)
        if held is not None:
            held[1].hands.discard(name)
            self.look(held[1])
        return held

    def look(self, volunteer: Volunteer | None) -> None:
        """This one may be free; or anybody, for somebody who was avoided may be asked again."""
        count = len(self.waiting)
        if volunteer is not None:
            if not self.population.index(volunteer, self.now):
                record = volunteer.record
                if not record.quarantined and record.paused_until > self.now:
                    self.at(record.paused_until, "look", volunteer)
                return
            count = min(RETRIED, count)
        for _ in range(count):
            task = self.waiting.popleft()
            task.queued = False
            self.want(task)
