"""Replicas: the part of a task's life that is about results of several owners, which agree or do not.

::

    uploaded ──▶ compared, or audited ──▶ accepted, both
                   │
                   └── they differ ──▶ bisected (`goblin_dask.verify.dispute`) ──▶ wrong: blamed; right there: waits
                                       └── cannot be ──▶ each is checked whole      for another partner
"""

from __future__ import annotations

from goblin_dask import messages as m
from goblin_dask.graphs.outline import Outline
from goblin_dask.verify import policy as policies
from goblin_dask.verify.dispute import Ask, Compare, Dispute, Settle
from goblin_dask.verify.effects import GONE, Attempt, Charge, Drop, Effect, Holder, Ignored, Order, Reveal, StopCheck


class Replication:
    """What a task's life needs besides for its replicas; `goblin_dask.verify.lifecycle.TaskLife` has the rest."""

    __slots__ = ("alone", "attempts", "checks", "dispute", "outline", "policy", "reveals", "state", "task")

    task: m.SubmitTask
    policy: m.Policy
    state: str
    outline: Outline | None
    alone: bool
    attempts: dict[str, Attempt]
    checks: dict[str, Attempt]
    dispute: Dispute | None
    reveals: dict[str, tuple[Attempt, int]]

    @property
    def replicated(self) -> bool:
        """Whether it is checked by another owner's replica, where there is another."""
        return policies.replicates(self.policy, self.task)

    def _order(self, attempt: Attempt, order: Order) -> list[Effect]:
        raise NotImplementedError

    def _blame(self, attempt: Attempt, report: m.CheckReport, now: float) -> list[Effect]:
        raise NotImplementedError

    def _doubt(self, attempt: Attempt, report: m.CheckReport) -> list[Effect]:
        raise NotImplementedError

    def _drop(self, attempt: Attempt) -> list[Effect]:
        """Uploads that may go: not those that another attempt committed too, and never one of the task's inputs."""
        if not attempt.outputs:
            return []
        kept = {blob.digest for blob in self.task.inputs}
        for other in self.attempts.values():
            if other is not attempt and other.state not in GONE:
                kept.update(blob.digest for blob in other.outputs)
        gone = tuple(blob.digest for blob in attempt.outputs if blob.inline is None and blob.digest not in kept)
        return [Drop(attempt, gone)] if gone else []

    def _pair(self, attempt: Attempt) -> list[Effect]:
        """Have it compared with another owner's result, if one is there."""
        for other in self.attempts.values():
            if other.state == "uploaded" and other is not attempt and _independent(other.holder, attempt.holder):
                other.state = "checking"
                audited = attempt.audited or other.audited
                return self._order(attempt, Order("audit" if audited else "compare", replica=other))
        return []

    def _dispute(self, one: Attempt, other: Attempt, report: m.CheckReport) -> list[Effect]:
        """Two replicas differ, or the validator does not find what both say."""
        outline = self.outline if report.method == "replicate" else None
        if self.state == "open" and outline is not None and Dispute.possible(outline):
            self.dispute = Dispute(outline, self.task.inputs, (one, other))
            return self._move()
        return self._check_both(one, other)

    def _check_both(self, *replicas: Attempt) -> list[Effect]:
        """Each by itself and whole."""
        effects = self._end_dispute()
        for one in replicas:
            effects += self._order(one, Order("auto", dispute=True))
        return effects

    def _move(self) -> list[Effect]:
        """What a dispute needs next."""
        dispute = self.dispute
        effects: list[Effect] = []
        for move in dispute.moves() if dispute is not None else ():
            match move:
                case Ask(attempt, cut):
                    effects.append(Reveal(attempt, cut))
                case Compare(question):
                    one, other = dispute.pair  # type: ignore[union-attr]
                    effects += self._order(one, Order("compare", replica=other, question=question))
                case Settle(questions):
                    for side, question in zip(dispute.pair, questions, strict=True):  # type: ignore[union-attr]
                        effects += self._order(side, Order("auto", dispute=True, question=question))
        return effects

    def start_reveal(self, name: str, attempt: Attempt, cut: int) -> None:
        """The volunteer of one side was asked for its values at a cut."""
        self.reveals[name] = attempt, cut

    def revealed(self, name: str, message: m.Committed, now: float) -> list[Effect]:
        """One side has handed in its values at a cut."""
        attempt, cut = self.reveals.pop(name)
        dispute = self.dispute
        if dispute is None or attempt not in dispute.pair:
            return []
        if reason := dispute.revealed(attempt, cut, message.outputs, message.digests):
            return [Charge(attempt, "failed", reason), *self._check_both(*dispute.pair)]
        return self._move()

    def lose_reveal(self, name: str, *, barred: bool = False) -> list[Effect]:
        """One side could not reveal its values; `barred`: for it is in quarantine."""
        attempt, _ = self.reveals.pop(name)
        return self.no_reveal(attempt, barred=barred)

    def no_reveal(self, attempt: Attempt, *, barred: bool = False) -> list[Effect]:
        """One side cannot be asked: both results are checked whole, or the barred one is not looked at any more."""
        dispute = self.dispute
        if dispute is None or attempt not in dispute.pair:
            return []
        if not barred:
            return self._check_both(*dispute.pair)
        attempt.state = "withdrawn"
        effects = [*self._end_dispute(), *self._drop(attempt)]
        for one in dispute.pair:
            if one is not attempt:
                effects += self._rest(one)
        return effects

    def _answered(self, attempt: Attempt, report: m.CheckReport, accepted: bool, now: float) -> list[Effect]:
        """A validator has answered a question in a dispute."""
        dispute = self.dispute
        if dispute is None or attempt.order is None:
            return [Ignored("an answer that nobody waits for")]
        if attempt.order.replica is not None:
            dispute.compared(accepted)
            return self._move()
        dispute.verdicts[attempt.name] = report
        if len(dispute.verdicts) < len(dispute.pair):
            return []
        verdicts = [dispute.verdicts[one.name] for one in dispute.pair]
        if all(verdict.verdict == "accepted" for verdict in verdicts):
            # rounding, or a decision within its margin, as far as this node goes
            return self._check_both(*dispute.pair)
        effects = self._end_dispute()
        for one, verdict in zip(dispute.pair, verdicts, strict=True):
            if verdict.verdict == "wrong":
                effects += self._blame(one, verdict, now)
            elif verdict.verdict == "unproven":
                effects += self._doubt(one, verdict)
        for one, verdict in zip(dispute.pair, verdicts, strict=True):
            if verdict.verdict == "accepted" and self.state == "open":
                effects += self._rest(one)
        return effects

    def _rest(self, attempt: Attempt) -> list[Effect]:
        """It was right where it was looked at, and needs another partner: one that waits, or a new one."""
        attempt.state, attempt.order = "uploaded", None
        return self._pair(attempt)

    def _end_dispute(self) -> list[Effect]:
        effects: list[Effect] = [StopCheck(name) for name in self.reveals]
        self.reveals.clear()
        if self.dispute is not None:
            for name in [name for name, of in self.checks.items() if of in self.dispute.pair]:
                del self.checks[name]
                effects.append(StopCheck(name))
        self.dispute = None
        return effects


def _independent(one: Holder, other: Holder) -> bool:
    return one.owner != other.owner and one.network != other.network
