"""The life of one task, from submission to a verdict: facts in, effects out, without clocks, sockets or threads.

::

    leased ──▶ committed ──▶ uploaded ──▶ checking ──▶ accepted
      │            │                        ├──▶ wrong      blame; computed again
      └── lost, failed, late ◀──────────────┴──▶ unproven   no blame; another owner, then recomputed by a validator

These are the states of an *attempt*; a task may have several at a time, and is open until one of them is accepted or
the grid gives up. What the task lacks is always read from its state (`TaskLife.wanted`), never remembered: so no event
that is lost, doubled or out of order leaves it waiting for ever.
"""

from __future__ import annotations

import random

from goblin_dask import messages as m
from goblin_dask.graphs.outline import Outline
from goblin_dask.verify import policy as policies
from goblin_dask.verify.commitments import mismatch
from goblin_dask.verify.effects import (
    GONE,
    Accepted,
    Attempt,
    Blame,
    Charge,
    Credit,
    Doubt,
    Effect,
    Failed,
    Holder,
    Ignored,
    Judge,
    Order,
    Stop,
    StopCheck,
)
from goblin_dask.verify.replication import Replication

DISTINCT_HOSTS = 3
"""Independent hosts that must lose or fail a task before that is the task's fault."""
FAILURES = 8
"""Failures on whatever hosts after which the laboratory computes it."""
REJECTIONS = 6
"""Wrong results of one task after which its check is doubted rather than its volunteers."""
CHECK_FAILURES = 3
"""Checks of one result that may fail before it is computed anew; twice as many end the task."""
DOUBTS = 2
"""Owners with unproven results after which a validator recomputes."""
AVOID = 2.0
"""Seconds for which a host that failed a task is not asked again; doubles with each failure of the task."""
AVOID_WRONG = 10.0
"""Seconds for which a host that was wrong is not asked for the same task again."""
MEMORY_CLAIM = 4
"""A volunteer's word raises a task's memory to this multiple of its projected peak at most."""

_SUPPLY = frozenset({"leased", "committed", "uploaded", "checking", "accepted"})
_RUNNING = frozenset({"leased", "committed"})
_HANDED_IN = frozenset({"uploaded", "checking"})


class TaskLife(Replication):
    """One task of one laboratory.

    Parameters
    ----------
    lab : str
    task : SubmitTask
    now : float
        Monotonic seconds.
    outline : Outline, optional
        Of its program: with it, replicas that differ are bisected.
    """

    __slots__ = (
        "_avoid", "_check_flops", "_check_seconds", "_computed", "_leases", "_rejected", "charged", "check_failures",
        "doubted", "failures", "hosts", "lab", "need", "since", "unable",
    )  # fmt: skip

    def __init__(self, lab: str, task: m.SubmitTask, now: float, outline: Outline | None = None):
        self.lab, self.task, self.since, self.outline = lab, task, now, outline
        self.policy = task.policy
        self.state = "open"
        """open, accepted, failed, cancelled."""
        self.attempts: dict[str, Attempt] = {}
        self.checks: dict[str, Attempt] = {}
        """Checks under way, by their own attempt names."""
        self.dispute = None
        """Between two replicas that differ."""
        self.reveals: dict[str, tuple[Attempt, int]] = {}
        """What sides of it are revealing, at which cut, by names of their own."""
        self.need = task.peak
        """Bytes that a volunteer must offer."""
        self.alone = False
        """No second owner can be had for ``replicate``."""
        self.doubted: set[str] = set()
        """Owners of unproven results."""
        self.unable: dict[str, str] = {}
        """Host keys too small for it (``memory``), or without one of its operators (``unsupported``)."""
        self.hosts: set[str] = set()
        """Hosts that lost or failed it."""
        self.charged: list[str] = []
        self.failures = 0
        self.check_failures = 0
        self._avoid: dict[str, float] = {}
        self._leases = self._rejected = 0
        self._check_seconds = self._check_flops = 0.0
        self._computed = 0
        """Attempts that were committed."""

    # --- what it lacks ----------------------------------------------------------------------------------------------
    @property
    def wanted(self) -> int:
        """Further attempts that it needs now."""
        if self.state != "open":
            return 0
        copies = policies.REPLICAS if self.replicated and not self.alone else 1
        have = 0
        for attempt in self.attempts.values():
            have += attempt.state in _SUPPLY and not (attempt.late and attempt.state in _RUNNING)
        return max(0, copies - have)

    @property
    def running(self) -> int:
        """Attempts in volunteers' hands."""
        return sum(attempt.state in _RUNNING for attempt in self.attempts.values())

    @property
    def stage(self) -> str:
        """Where it stands: queued, leased, committed, uploaded, checking, or how it ended."""
        if self.state != "open":
            return self.state
        states = {attempt.state for attempt in self.attempts.values()}
        return next((stage for stage in ("checking", "uploaded", "committed", "leased") if stage in states), "queued")

    @property
    def settled(self) -> bool:
        """Whether nothing about it is under way."""
        return self.state != "open" and not any(a.state == "checking" for a in self.attempts.values())

    @property
    def constrained(self) -> bool:
        """Whether some volunteers with enough memory may not have it."""
        return bool(self.doubted or self.unable or self._avoid or self.replicated or self.attempts)

    def permits(self, holder: Holder, now: float) -> bool:
        """Whether this volunteer may have an attempt now."""
        return self._avoid.get(holder.key, 0.0) <= now and self.ever_permits(holder)

    def ever_permits(self, holder: Holder) -> bool:
        """Whether this volunteer could have an attempt, if not now then later."""
        if holder.owner in self.doubted or holder.key in self.unable:
            return False
        for attempt in self.attempts.values():
            if attempt.state in GONE:
                continue
            other = attempt.holder
            if other.worker == holder.worker:
                return False
            if self.replicated and (other.owner == holder.owner or other.network == holder.network):
                return False
        return True

    def retry_at(self) -> float:
        """When the last host that is avoided may be asked again."""
        return max(self._avoid.values(), default=0.0)

    # --- volunteers' facts ------------------------------------------------------------------------------------------
    def lease(self, name: str, holder: Holder, now: float) -> Attempt:
        """An attempt was given to a volunteer."""
        attempt = self.attempts[name] = Attempt(name, holder, now)
        self._leases += 1
        return attempt

    def commit(self, name: str, message: m.Committed, now: float) -> list[Effect]:
        """The volunteer names its outputs; what they are cannot change any more."""
        attempt = self.attempts[name]
        if attempt.state != "leased":
            differs = attempt.state not in GONE and message.outputs != attempt.outputs
            return [Ignored("a second commitment that differs" if differs else "committed twice", suspicious=differs)]
        attempt.seconds, attempt.fetched = max(0.0, message.seconds), max(0, message.fetched)
        reason = mismatch(message.outputs, self.task.outputs)
        if reason:
            return self._blame(attempt, m.CheckReport("wrong", "structural", reason=reason), now)
        attempt.outputs, attempt.state = message.outputs, "committed"
        self._computed += 1
        return []

    def upload(
        self,
        name: str,
        *,
        suspicious: bool,
        rng: random.Random,
        share: float = 0.0,
        audit: float = 0.0,
        sent: int = 0,
    ) -> list[Effect]:
        """All outputs are in the laboratory (or were inline): now it may be checked.

        Parameters
        ----------
        suspicious : bool
            Its host gets the strictest check.
        share : float
            Probability with which ``sample`` checks it at least.
        audit : float
            Probability with which its host's results are recomputed although a replica agrees.
        """
        attempt = self.attempts[name]
        if attempt.state != "committed":
            early = attempt.state == "leased"
            return [Ignored("uploaded before it committed" if early else "uploaded twice", suspicious=early)]
        attempt.state, attempt.sent = "uploaded", max(0, sent)
        # Drawn after it has committed, and known to nobody: two who have met cannot foresee it.
        attempt.audit, attempt.audited = audit, rng.random() < audit
        if not policies.checked(self.policy, share=share, rng=rng):
            return self._accept(attempt, None)
        if self.policy.method == "sample":
            self.policy = m.Policy()
        if self.replicated:
            if self.alone or suspicious:
                return self._order(attempt, Order(policies.alone(self.policy, suspicious=suspicious)))
            return self._pair(attempt)
        return self._order(attempt, Order(policies.order(self.policy, suspicious=suspicious)))

    def expire(self, name: str) -> list[Effect]:
        """Its deadline has passed. It may go on: a late result has value while the task is open."""
        attempt = self.attempts[name]
        if attempt.state not in _RUNNING or attempt.late:
            return []
        attempt.late = True
        return [Charge(attempt, "late", "no result before the deadline"), *self._failed_on(attempt, "lost", "")]

    def lose(self, name: str) -> list[Effect]:
        """Its volunteer is gone. What was handed in before counts."""
        attempt = self.attempts[name]
        if attempt.state not in _RUNNING:
            return []
        late, attempt.state = attempt.late, "lost"
        if late:  # counted when it became late
            return []
        return [Charge(attempt, "lost"), *self._failed_on(attempt, "lost", "the volunteer went away")]

    def withdraw(self, name: str) -> list[Effect]:
        """The dispatcher takes it back: its volunteer is in quarantine."""
        attempt = self.attempts[name]
        if attempt.state not in _RUNNING:
            return []
        attempt.state = "withdrawn"
        return [Stop(attempt), *self._drop(attempt)]

    def revive(self, name: str, holder: Holder) -> Attempt | None:
        """The host that had lost an attempt is back and still has it in hand."""
        attempt = self.attempts.get(name)
        if attempt is None or attempt.state != "lost" or attempt.holder.key != holder.key or self.state != "open":
            return None
        if not self.ever_permits(holder):
            return None
        attempt.holder, attempt.late = holder, False
        attempt.state = "committed" if attempt.outputs else "leased"
        return attempt

    def fail(self, name: str, message: m.AttemptFailed, now: float) -> list[Effect]:
        """The volunteer could not do it, and says why."""
        attempt = self.attempts[name]
        if attempt.state not in _RUNNING:
            return [Ignored("failed after it ended")]
        effects = self._drop(attempt)
        attempt.state = "failed"
        effects.append(Charge(attempt, "failed", f"{message.kind}: {message.reason}"[:500]))
        key = attempt.holder.key
        self._avoid[key] = now + AVOID * 2.0 ** min(self.failures, 6)
        if message.kind == "memory":
            self.unable[key] = "memory"
            self.need = max(self.need, min(message.needs, MEMORY_CLAIM * self.task.peak))
            return effects
        if message.kind == "cancelled":
            return effects
        if message.kind == "data" and self.state == "open":
            # Whoever says so wrongly gains nothing: the laboratory runs it, and the failure is charged.
            return effects + self._fail("error", message.reason)
        if message.kind == "unsupported":
            self.unable[key] = "unsupported"
        kind = {"unsupported": "unsupported", "compute": "error", "data": "error"}.get(message.kind, "lost")
        return effects + self._failed_on(attempt, kind, message.reason)

    # --- validators' facts ------------------------------------------------------------------------------------------
    def start_check(self, check: str, attempt: Attempt) -> None:
        """A validator was given the check of this attempt."""
        self.checks[check] = attempt

    def lose_check(self, check: str, validator: str) -> list[Effect]:
        """The validator died, or has taken too long: the check is done elsewhere."""
        attempt = self.checks.pop(check, None)
        if attempt is None or attempt.state != "checking":
            return []
        return self._check_failed(attempt, validator, "its validators went away")

    def report(self, check: str, report: m.CheckReport, validator: str, now: float) -> list[Effect]:
        """A validator has an opinion."""
        attempt = self.checks.pop(check, None)
        if attempt is None or attempt.state != "checking" or attempt.order is None:
            return [Ignored("a report that nobody waits for")]
        self._check_seconds += max(0.0, report.seconds)
        self._check_flops += max(0.0, report.flops)
        effects: list[Effect] = [StopCheck(name) for name, of in self.checks.items() if of is attempt]
        for name in [name for name, of in self.checks.items() if of is attempt]:
            del self.checks[name]
        order = attempt.order
        # A report that claims to accept something that is not a number is no acceptance.
        accepted = report.verdict == "accepted" and report.ratio >= 0.0
        if report.verdict == "failed" or (report.verdict == "accepted" and not accepted):
            return effects + self._check_failed(attempt, validator, report.reason or "a report without a ratio")
        if order.question is not None:
            return effects + self._answered(attempt, report, accepted, now)
        if order.replica is not None and not accepted:
            return effects + self._dispute(attempt, order.replica, report)
        if accepted:
            return effects + self._accept(attempt, report)
        if report.verdict == "wrong":
            return effects + self._blame(attempt, report, now)
        return effects + self._doubt(attempt, report)

    # --- laboratory and dispatcher ----------------------------------------------------------------------------------
    def recheck(self, method: m.CheckMethod) -> list[Effect]:
        """Check a result that was accepted unchecked: it was sampled, or its volunteer has lied elsewhere."""
        attempt = self.unchecked
        if attempt is None:
            return []
        self.state, self.policy = "open", m.Policy()
        if self.replicated and not self.alone and method == "auto":
            return self._rest(attempt)
        return self._order(attempt, Order(method))

    @property
    def unchecked(self) -> Attempt | None:
        """The accepted attempt, if nobody has checked it."""
        if self.state != "accepted":
            return None
        return next((a for a in self.attempts.values() if a.state == "accepted" and a.order is None), None)

    def stuck(self, largest: int | None) -> list[Effect]:
        """No volunteer that is connected could ever have the attempt that is wanted.

        Parameters
        ----------
        largest : int or None
            Bytes that the largest volunteer offers; None while there are no volunteers at all.
        """
        if self.state != "open" or not self.wanted:
            return []
        if self.replicated and any(a.state in _RUNNING | _HANDED_IN for a in self.attempts.values()):
            self.alone = True
            waiting = next((a for a in self.attempts.values() if a.state == "uploaded"), None)
            return self._order(waiting, Order("recompute", final=True)) if waiting else []
        doubtful = next((a for a in self.attempts.values() if a.state == "unproven"), None)
        if doubtful is not None:
            return self._order(doubtful, Order("recompute", final=True))
        if largest is None or self.running:
            return []
        if self.need > largest or "memory" in self.unable.values():
            return self._fail("too_large", "no volunteer offers the memory that it needs")
        if self.unable:
            return self._fail("unsupported", "every volunteer has refused it")
        return []

    def unknown(self, reason: str) -> list[Effect]:
        """Nobody who is there knows its operators."""
        return self._fail("unsupported", reason) if self.state == "open" and not self.running else []

    def cancel(self) -> list[Effect]:
        """Nobody wants it any more; uploads of an accepted result are the laboratory's already."""
        effects = self._close(None)
        self.state = "cancelled"
        return effects

    # --- inside -----------------------------------------------------------------------------------------------------
    def _order(self, attempt: Attempt, order: Order) -> list[Effect]:
        attempt.order, attempt.state = order, "checking"
        return [Judge(attempt)]

    def _check_failed(self, attempt: Attempt, validator: str, reason: str) -> list[Effect]:
        attempt.failed_checks += 1
        attempt.avoid.add(validator)
        self.check_failures += 1
        if self.state != "open":  # the loser of a dispute: the task does not depend on it
            attempt.state = "withdrawn"
            return self._drop(attempt)
        if self.check_failures >= 2 * CHECK_FAILURES:
            return self._fail("unverifiable", f"{self.check_failures} checks of it failed, the last because: {reason}")
        if attempt.failed_checks < CHECK_FAILURES:
            return [Judge(attempt)]
        if self.dispute is not None:
            return self._check_both(*self.dispute.pair)
        effects: list[Effect] = []
        pair = [attempt] if attempt.order is None or attempt.order.replica is None else [attempt, attempt.order.replica]
        for one in pair:
            one.state = "withdrawn"
            effects += self._drop(one)
        return effects

    def _accept(self, attempt: Attempt, report: m.CheckReport | None) -> list[Effect]:
        agreeing = [attempt]
        if report is not None and attempt.order is not None and attempt.order.replica is not None:
            agreeing.append(attempt.order.replica)
        used = min(agreeing, key=lambda one: one.since)  # perhaps others use it already, without a check
        effects: list[Effect] = [] if report is None else [Credit(one, report) for one in agreeing]
        for one in agreeing:
            one.state, one.order = "accepted", attempt.order  # a replica has been checked by being compared
        if self.state != "open":
            return effects + self._drop(attempt)
        self.state = "accepted"
        verdict = m.Verdict(
            method=policies.UNCHECKED if report is None else report.method,
            ratio=0.0 if report is None else report.ratio,
            miss=policies.miss(self.policy, report, max(one.audit for one in agreeing)),
            volunteers=tuple(one.holder.identity for one in agreeing),
            attempts=self._leases,
            rejected=self._rejected,
            check_seconds=self._check_seconds,
            compute_seconds=used.seconds,
            bytes_in=used.fetched,
            bytes_out=used.sent,
            flops=self.task.flops,
            spent=self.task.flops * self._computed + self._check_flops,
        )
        effects.append(Accepted(used.outputs, verdict, used))
        for other in agreeing:
            if other is not used:
                effects += self._drop(other)
        return effects + self._close(used)

    def _blame(self, attempt: Attempt, report: m.CheckReport, now: float) -> list[Effect]:
        attempt.state = "wrong"
        self._avoid[attempt.holder.key] = now + AVOID_WRONG
        self._rejected += 1
        effects: list[Effect] = [Blame(attempt, report), *self._drop(attempt)]
        if self.state == "open" and self._rejected >= REJECTIONS:
            effects += self._fail("unverifiable", f"{self._rejected} results of it were rejected: {report.reason}")
        return effects

    def _doubt(self, attempt: Attempt, report: m.CheckReport) -> list[Effect]:
        order = attempt.order
        attempt.state = "unproven"
        self.doubted.add(attempt.holder.owner)
        effects: list[Effect] = [Doubt(attempt, report)]
        if self.state != "open":
            attempt.state = "withdrawn"
            return effects + self._drop(attempt)
        recomputed = order is not None and order.method == "recompute"
        if recomputed and (len(self.doubted) >= DOUBTS or (order is not None and order.final)):
            return effects + self._fail("unverifiable", f"recomputing could not decide either: {report.reason}")
        if len(self.doubted) >= DOUBTS:
            return effects + self._order(attempt, Order("recompute", final=True))
        return effects

    def _failed_on(self, attempt: Attempt, kind: str, reason: str) -> list[Effect]:
        """Count a failure; the task's own only when independent hosts agree, or when it has no end."""
        self.hosts.add(attempt.holder.host)
        self.charged.append(attempt.holder.key)
        self.failures += 1
        if self.state != "open" or any(a.state in _HANDED_IN for a in self.attempts.values()):
            return []
        if len(self.hosts) >= DISTINCT_HOSTS:
            return self._fail(kind, f"{len(self.hosts)} hosts could not complete it: {reason}".rstrip(": "))
        if self.failures >= FAILURES:
            return self._fail(kind, f"{self.failures} attempts could not complete it: {reason}".rstrip(": "))
        return []

    def _fail(self, kind: str, reason: str) -> list[Effect]:
        forgive = tuple(self.charged) if len(self.hosts) >= DISTINCT_HOSTS else ()
        effects: list[Effect] = [Failed(kind, reason, self.need, forgive), *self._close(None)]
        self.state = "failed"
        return effects

    def _close(self, accepted: Attempt | None) -> list[Effect]:
        """End all attempts and checks but the accepted one, and those that a dispute still has to judge."""
        effects = self._end_dispute()
        for attempt in self.attempts.values():
            if attempt.state == "lost":  # kept until now: its host might have come back to finish it
                effects += self._drop(attempt)
            if attempt.state in GONE or attempt.state == "accepted":
                continue
            if accepted is not None and attempt.order is not None and attempt.order.dispute:
                continue
            if attempt.state in _RUNNING:
                effects.append(Stop(attempt))
            attempt.state = "withdrawn"
            effects += self._drop(attempt)
        for check, of in list(self.checks.items()):
            if of.state != "checking":
                del self.checks[check]
                effects.append(StopCheck(check))
        return effects
