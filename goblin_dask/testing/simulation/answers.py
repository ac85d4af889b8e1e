"""What simulated volunteers hand in."""

from __future__ import annotations

from goblin_dask import messages as m
from goblin_dask.testing.simulation.leases import Leases, Task
from goblin_dask.testing.simulation.population import Volunteer
from goblin_dask.testing.simulation.rehearsal import RIGHT, HandedIn, Lie, rehearsal_of
from goblin_dask.testing.strategies import Answer, Situation


class Answers:
    """Asks the volunteers' strategies, and makes of their answers what they commit.

    Parameters
    ----------
    leases : Leases
    """

    def __init__(self, leases: Leases):
        self._leases, self._rng = leases, leases.rng
        self._blobs: dict[tuple[str, Lie | None], tuple[m.BlobRef, ...]] = {}

    def decide(self, name: str, task: Task, volunteer: Volunteer) -> Answer:
        """What the volunteer is going to hand in for this attempt; noted in ``task.handed``."""
        person = volunteer.person
        answer, handed = Answer(), RIGHT
        if person.strategy is not None:
            first = task.agreed.get(person.ring) if person.ring is not None else None
            situation = Situation(
                self._rng,
                method=task.kind.plan.method,
                flops=task.kind.flops,
                usual=volunteer.flops / max(volunteer.results, 1),
                results=volunteer.results,
                lies=volunteer.lies,
                since_lie=volunteer.since_lie,
                together=self._together(task, person.ring),
                agreed=first[0] if first else None,
                options=person.strategy.options,
            )
            answer = person.strategy(situation)
            handed = self._made(task, volunteer, answer, first[1] if first else None)
            if person.ring is not None:
                task.agreed.setdefault(person.ring, (answer, handed))
            deeds = self._leases.result.strategies[person.strategy.name]
            deeds.results += 1
            if handed.lie is not None and not answer.withheld:
                deeds.lies += 1
                deeds.lies_above += handed.lie.above
        task.handed[name] = handed
        volunteer.results += 1
        volunteer.flops += task.kind.flops
        volunteer.lies += handed.lie is not None
        volunteer.since_lie = 0 if handed.lie is not None else volunteer.since_lie + 1
        return answer

    def _together(self, task: Task, ring: int | None) -> int:
        """Members of the ring that hold the task."""
        if ring is None:
            return 1
        return sum(self._leases.of(attempt).person.ring == ring for attempt in task.live)

    def _made(self, task: Task, volunteer: Volunteer, answer: Answer, first: HandedIn | None) -> HandedIn:
        if first is not None and (answer.copied or (answer.common and first.lie is not None)):
            return first
        lies = rehearsal_of(task.kind.of).lies(answer) if answer.corruption else []
        if not lies:  # the right result, or a corruption that changes nothing here
            return RIGHT
        lie = lies[int(self._rng.random() * len(lies))]
        return HandedIn(lie, volunteer.person.ring if answer.common else volunteer.record.key)

    def committed(self, name: str, task: Task) -> m.Committed:
        """The message that commits the attempt's result."""
        lie = task.handed[name].lie
        key = task.kind.task.task, lie
        if key not in self._blobs:
            self._blobs[key] = rehearsal_of(task.kind.of).committed(task.kind, lie)
        return m.Committed(name, self._blobs[key], task.expected)
