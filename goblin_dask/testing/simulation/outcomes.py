"""What follows from the lives of simulated tasks: as in `goblin_dask.gateway.outcomes`, without messages."""

from __future__ import annotations

import random
from collections.abc import Iterable

from goblin_dask import messages as m
from goblin_dask.testing.simulation.figures import Deeds
from goblin_dask.testing.simulation.leases import Job, Leases, Task
from goblin_dask.testing.simulation.population import Person, Volunteer
from goblin_dask.verify import effects as fx
from goblin_dask.verify import policy as policies
from goblin_dask.verify.reputation import Host, Reputation

DAY = 86400.0
CHECK_SECONDS = 30.0
"""From an upload to a validator's report."""
REJOIN_SECONDS = 3600.0
"""From a quarantine to the return under another name."""
HONEST = "honest"


class Outcomes:
    """Carries out effects, and counts what became of whose results.

    Parameters
    ----------
    leases : Leases
    reputation : Reputation
    rng : random.Random
        Draws what laboratories sample.
    """

    def __init__(self, leases: Leases, reputation: Reputation, rng: random.Random):
        self._leases, self._reputation, self._rng, self.result = leases, reputation, rng, leases.result
        self._unchecked: dict[str, dict[Task, None]] = {}
        self.unchecked_count = 0

    def apply(self, task: Task, effects: Iterable[fx.Effect]) -> None:
        """Carry out what follows for a task."""
        leases = self._leases
        for effect in effects:
            match effect:
                case fx.Judge(attempt):
                    leases.at(leases.now + CHECK_SECONDS, "check", (task, attempt))
                case fx.Credit(attempt):
                    self._credit(task, attempt)
                case fx.Accepted(_, verdict, attempt):
                    self._accepted(task, verdict, attempt)
                case fx.Blame(attempt, report):
                    self._blame(task, attempt, report)
                case fx.Doubt(attempt):
                    self._reputation.unproven(leases.of(attempt).record, leases.now)
                    self._deeds(leases.of(attempt)).unproven += task.handed[attempt.name].lie is not None
                    leases.look(leases.of(attempt))
                case fx.Charge(attempt, kind):
                    self._reputation.failed(leases.of(attempt).record, kind, leases.now)
                    leases.look(leases.of(attempt))
                case fx.Stop(attempt):
                    leases.release(attempt.name)
                case fx.Failed():
                    self._failed(task, effect)
                case fx.Reveal(attempt):
                    barred = bool(leases.of(attempt).record.quarantined)
                    self.apply(task, task.life.no_reveal(attempt, barred=barred))
                case fx.StopCheck() | fx.Drop() | fx.Ignored():
                    pass  # nothing is stored, and a check that nobody waits for is seen when it is due
        leases.want(task)

    def _deeds(self, volunteer: Volunteer) -> Deeds:
        strategy = volunteer.person.strategy
        return self.result.strategies.setdefault(HONEST if strategy is None else strategy.name, Deeds())

    def _credit(self, task: Task, attempt: fx.Attempt) -> None:
        volunteer = self._leases.of(attempt)
        self._reputation.accepted(volunteer.record, task.kind.flops)
        if task.handed[attempt.name].lie is not None:
            self._deeds(volunteer).credited += 1
            volunteer.person.undeserved += task.kind.flops
        self._leases.look(volunteer)

    # --- results that are used ---------------------------------------------------------------------------------------
    def _accepted(self, task: Task, verdict: m.Verdict, attempt: fx.Attempt) -> None:
        unchecked = verdict.method == policies.UNCHECKED
        if unchecked and self._rng.random() < task.life.policy.probability:
            self.apply(task, task.life.recheck("auto"))
            return
        self.result.accepted += 1
        self.result.stated_miss = max(self.result.stated_miss, verdict.miss)
        if task.handed[attempt.name].lie is not None:
            task.job.wrong[task] = attempt
        if unchecked:
            self._unchecked.setdefault(attempt.holder.key, {})[task] = None
            self.unchecked_count += 1
            task.job.unchecked.append(task)
        self._done(task.job)

    def _failed(self, task: Task, effect: fx.Failed) -> None:
        for key in effect.forgive:
            self._reputation.forgive(self._reputation.hosts[key])
        self.result.failed += 1
        self.result.work[task.kind.of.name].laboratory += task.kind.flops
        self._done(task.job)

    def _done(self, job: Job) -> None:
        """A task of the job has ended; with the last one, what was accepted is used."""
        job.open -= 1
        if job.open:
            return
        for task in job.unchecked:
            if task.life.unchecked is not None:
                self._forget(task)
                self.result.unchecked += 1
        for task, attempt in job.wrong.items():
            lie, liar = task.handed[attempt.name].lie, self._leases.of(attempt)
            assert lie is not None
            if not lie.above:
                self._deeds(liar).used_below += 1
                continue
            self._deeds(liar).used_above += 1
            liar.person.gain += task.kind.flops
            strategy = liar.person.strategy.name if liar.person.strategy else HONEST
            self.result.used.append((self._leases.now / DAY, task.kind.of.name, strategy))

    def _forget(self, task: Task) -> None:
        """Nobody wants to know any more whether the task's volunteer lies."""
        attempt = task.life.unchecked
        if attempt is not None and task in self._unchecked.get(attempt.holder.key, {}):
            del self._unchecked[attempt.holder.key][task]
            self.unchecked_count -= 1

    # --- who is not believed any more --------------------------------------------------------------------------------
    def _blame(self, task: Task, attempt: fx.Attempt, report: m.CheckReport) -> None:
        leases, volunteer = self._leases, self._leases.of(attempt)
        if task.handed[attempt.name].lie is None:
            self._deeds(volunteer).blamed += 1
        else:
            self._deeds(volunteer).proven += 1
        record = volunteer.record
        barred = self._reputation.wrong(record, report.ratio, structural=report.method == "structural", now=leases.now)
        self._reopen(record)
        for host in barred:
            self._reopen(host)
            self._bar(leases.population.by_key[host.key])
        leases.look(volunteer)

    def _reopen(self, host: Host) -> None:
        """Check what was used of it without a check, in jobs that have not ended."""
        for task in list(self._unchecked.get(host.key, ())):
            self._forget(task)
            self.result.reopened += 1
            self.result.accepted -= 1
            task.job.open += 1
            task.job.wrong.pop(task, None)
            self.apply(task, task.life.recheck("auto"))

    def _bar(self, volunteer: Volunteer) -> None:
        """The host is in quarantine."""
        leases, person, deeds = self._leases, volunteer.person, self._deeds(volunteer)
        leases.population.bar(volunteer)
        deeds.quarantined += 1
        deeds.results_until += volunteer.results
        deeds.lies_until += volunteer.lies
        deeds.days_until.append((leases.now - volunteer.joined) / DAY)
        for name in list(volunteer.hands):
            held = leases.release(name)
            if held is not None:
                self.apply(held[0], held[0].life.withdraw(name))
        if person.rejoins:
            person.rejoins -= 1
            leases.at(leases.now + REJOIN_SECONDS, "return", person)

    def count(self, people: Iterable[Person]) -> None:
        """Sum up what the liars have gained, and what they had to deliver for it."""
        for person in people:
            assert person.strategy is not None
            deeds = self.result.strategies[person.strategy.name]
            deeds.gain += person.gain
            deeds.price += person.price
