"""A grid in which only decisions are real: lives of tasks, reputations and policies, but no network and no arrays.

Tasks arrive in jobs. Each is leased to idle volunteers drawn at random among those that its `TaskLife` permits; what
they hand in is decided by their strategies, what validators find by rehearsals of the real checks, and what follows
from that by `TaskLife` and `Reputation`, which are those of a gateway. Replicas that differ are not bisected here but
checked whole, both of them: that finds the same liars, for more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from goblin_dask.errors import InputError
from goblin_dask.testing.simulation.answers import Answers
from goblin_dask.testing.simulation.figures import Deeds, Result, Work
from goblin_dask.testing.simulation.leases import Job, Leases, Task
from goblin_dask.testing.simulation.outcomes import DAY, Outcomes
from goblin_dask.testing.simulation.population import Liars, Person, Population, Volunteer
from goblin_dask.testing.simulation.rehearsal import Checker
from goblin_dask.testing.simulation.workload import CLASSES, OperatorClass, kinds_of
from goblin_dask.verify import effects as fx
from goblin_dask.verify import policy as policies
from goblin_dask.verify.lifecycle import TaskLife
from goblin_dask.verify.reputation import Reputation

MEMORY = 1 << 62
"""What the largest volunteer offers."""


@dataclass(frozen=True)
class Settings:
    """A grid to simulate.

    Raises
    ------
    InputError
        For values that make no grid.
    """

    policy: str = "auto"
    """As for ``verify=``."""
    liars: tuple[Liars, ...] = ()
    volunteers: int = 1000
    days: float = 30.0
    tasks_per_day: float = 0.5
    """Of an average volunteer."""
    job: int = 100
    """Tasks of a job: they are submitted at once, and their results are used when all are there."""
    slots: int = 2
    """Leases that a volunteer wants at a time."""
    seed: int = 0
    classes: tuple[OperatorClass, ...] = CLASSES
    names: int | None = None
    """End early, when liars have come back so often under another name."""

    def __post_init__(self) -> None:
        policies.parse(self.policy)
        for name, least in (("volunteers", 2), ("job", 1), ("slots", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("days", "tasks_per_day"):
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"{name} must be a number above 0, not {getattr(self, name)}")
        if sum(one.members(self.volunteers) for one in self.liars) > self.volunteers:
            raise InputError(f"there are more liars than the {self.volunteers} volunteers")


class Simulation:
    """One grid.

    Parameters
    ----------
    settings : Settings
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.rng = random.Random(settings.seed)  # noqa: S311 nobody is to be surprised
        self.result = Result(settings.policy, settings.volunteers, settings.days, settings.seed)
        self.reputation = Reputation(random.Random(settings.seed))  # noqa: S311
        self.population = Population(self.reputation, self.rng, settings.slots)
        self.leases = Leases(self.population, self.result, self.rng)
        self.outcomes = Outcomes(self.leases, self.reputation, self.rng)
        self.answers = Answers(self.leases)
        self.checker = Checker(self.rng)
        policy = policies.parse(settings.policy)
        self._kinds = [kind for one in settings.classes for kind in kinds_of(one)]
        self._shares = [kind.of.share / len(kinds_of(kind.of)) for kind in self._kinds]
        self._submissions = {kind: msgspec.structs.replace(kind.task, policy=policy) for kind in self._kinds}
        self._returned = 0
        for one in settings.classes:
            self.result.work[one.name] = Work(kinds_of(one)[-1].plan.method)

    def run(self) -> Result:
        """Let the days pass."""
        begun, settings = time.perf_counter(), self.settings
        for one in settings.liars:
            deeds = self.result.strategies.setdefault(one.strategy.name, Deeds())
            deeds.members += one.members(settings.volunteers) // one.strategy.hosts * one.strategy.hosts
            deeds.names = deeds.members
        self.population.fill(settings.volunteers, settings.liars)
        tasks = round(settings.volunteers * settings.days * settings.tasks_per_day)
        for first in range(0, tasks, settings.job):
            self.leases.at(self.rng.random() * settings.days * DAY, "job", min(settings.job, tasks - first))
        handlers: dict[str, Callable[[Any], None]] = {
            "job": self._submit, "answer": self._answer, "check": self._check, "deadline": self._deadline,
            "overdue": self._overdue, "look": self.leases.look, "return": self._return,
        }  # fmt: skip
        while (event := self.leases.next()) is not None or self._unstick():
            if event is not None:
                handlers[event[0]](event[1])
            if settings.names is not None and self._returned >= settings.names:
                break
        self.outcomes.count(self.population.people)
        self.result.unfinished = self.result.tasks - self.result.accepted - self.result.failed
        self.result.seconds = time.perf_counter() - begun
        return self.result

    def _submit(self, count: int) -> None:
        job = Job(count)
        self.result.tasks += count
        for kind in self.rng.choices(self._kinds, self._shares, k=count):
            work = self.result.work[kind.of.name]
            work.tasks += 1
            work.needed += kind.flops
            self.leases.want(Task(TaskLife("lab", self._submissions[kind], self.leases.now), kind, job))

    def _unstick(self) -> bool:
        """Nothing is under way: tasks that wait for somebody who does not exist are settled otherwise."""
        waiting = list(self.leases.waiting)
        self.leases.waiting.clear()
        for task in waiting:
            task.queued = False
            self.outcomes.apply(task, task.life.stuck(MEMORY if self.population.idle else None))
        return len(self.leases.waiting) < len(waiting)

    # --- volunteers --------------------------------------------------------------------------------------------------
    def _answer(self, name: str) -> None:
        """The volunteer has computed, or pretends so."""
        held = self.leases.hands.get(name)
        if held is None:
            return
        task, volunteer = held
        if name in task.handed:  # it was late on purpose
            self._hand_in(name, task, volunteer)
            return
        answer = self.answers.decide(name, task, volunteer)
        if not answer.late and not answer.withheld:
            self._hand_in(name, task, volunteer)
            return
        leases = self.leases
        length = max(leases.limits.lease_least, task.expected * leases.limits.lease_factor)
        leases.at(max(leases.now, task.life.attempts[name].since + length), "deadline", name)
        if answer.withheld:
            self._commit(name, task)
        else:
            leases.at(leases.now + 2 * length, "answer", name)

    def _commit(self, name: str, task: Task) -> bool:
        """Name the outputs; whether they can be right at all."""
        effects = task.life.commit(name, self.answers.committed(name, task), self.leases.now)
        committed = task.life.attempts[name].state == "committed"
        if not committed:
            self.leases.release(name)
        self.outcomes.apply(task, effects)
        return committed

    def _hand_in(self, name: str, task: Task, volunteer: Volunteer) -> None:
        if not self._commit(name, task):
            return
        self.leases.release(name)
        record, reputation = volunteer.record, self.reputation
        many = self.outcomes.unchecked_count >= self.leases.limits.remember
        effects = task.life.upload(
            name,
            suspicious=reputation.suspicious(record),
            share=1.0 if many else reputation.share(record, task.life.task.flops),
            audit=reputation.audit_rate(record),
            rng=self.rng,
        )
        self.outcomes.apply(task, effects)

    def _deadline(self, name: str) -> None:
        held = self.leases.hands.get(name)
        if held is not None:
            length = self.leases.now - held[0].life.attempts[name].since
            self.leases.at(self.leases.now + self.leases.limits.overdue_factor * length, "overdue", name)
            self.outcomes.apply(held[0], held[0].life.expire(name))

    def _overdue(self, name: str) -> None:
        held = self.leases.release(name)
        if held is not None:
            self.outcomes.apply(held[0], held[0].life.lose(name))

    def _return(self, person: Person) -> None:
        """Whoever was in quarantine is back, and nobody knows."""
        assert person.strategy is not None
        self._returned += 1
        self.result.strategies[person.strategy.name].names += 1
        self.leases.look(self.population.join(person, self.leases.now))

    # --- validators --------------------------------------------------------------------------------------------------
    def _check(self, about: tuple[Task, fx.Attempt]) -> None:
        task, attempt = about
        order = attempt.order
        if attempt.state != "checking" or order is None:
            return
        name = self.leases.name()
        task.life.start_check(name, attempt)
        replica = order.replica
        other = None if replica is None else task.handed[replica.name]
        alike = replica is not None and replica.holder.numeric_class == attempt.holder.numeric_class
        report = self.checker(task.kind, order.method, task.handed[attempt.name], other, alike=alike)
        self.result.work[task.kind.of.name].validators += self.checker.cost(task.kind, report)
        self.outcomes.apply(task, task.life.report(name, report, "validator", self.leases.now))


def simulate(settings: Settings | None = None, **changes: Any) -> Result:
    """Simulate a grid.

    Parameters
    ----------
    settings : Settings, optional
    **changes
        Fields of `Settings` that are to be others.
    """
    return Simulation(replace(settings or Settings(), **changes)).run()
