"""What follows from the lives of tasks: messages to laboratories, verdicts on hosts, work for the queue."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from goblin_dask import messages as m
from goblin_dask.digest import is_digest
from goblin_dask.gateway import events as e
from goblin_dask.gateway import monitor
from goblin_dask.gateway.leases import Leases, Ticket
from goblin_dask.gateway.limits import Limits
from goblin_dask.gateway.workers import Worker
from goblin_dask.graphs.operators.base import nbytes
from goblin_dask.verify import effects as fx
from goblin_dask.verify.reputation import Host, Reputation

NOTED = 10
"""Unentitled messages of one worker that are recorded; the rest is counted."""


@dataclass(slots=True)
class Lab:
    """A laboratory that is, or was a short while ago, connected."""

    name: str
    place: str = ""
    away_since: float | None = None
    offer: m.GridOffer | None = None
    tickets: dict[str, Ticket] = field(default_factory=dict)


class Outcomes:
    """Laboratories, their tasks, and what is carried out for them."""

    def __init__(self, limits: Limits, leases: Leases, reputation: Reputation):
        self.limits, self.leases, self.reputation = limits, leases, reputation
        self.labs: dict[str, Lab] = {}
        self.answers: OrderedDict[tuple[str, str], m.TaskAccepted] = OrderedDict()
        """Of accepted tasks, for when they are submitted again."""
        self.answer_bytes = 0
        self.unchecked: dict[str, dict[tuple[str, str], Ticket]] = {}
        """Accepted, unchecked tasks by the host key that computed them."""
        self.unchecked_count = 0
        self.stages: Counter[str] = Counter()
        self.totals = monitor.Totals()
        self._offer_due = False

    # --- effects ----------------------------------------------------------------------------------------------------
    def apply(self, ticket: Ticket, effects: Iterable[fx.Effect], by: Worker | None = None) -> None:
        """Carry out what follows for a task, and bring queue and counters in line with it."""
        for effect in effects:
            match effect:
                case fx.Judge(attempt):
                    self.leases.judge(ticket, attempt)
                case fx.Reveal(attempt, cut):
                    # the side that was asked before may have ended the dispute
                    if ticket.life.dispute is not None:
                        barred = bool(self._host(attempt).quarantined)
                        if barred or not self.leases.reveal(ticket, attempt, cut):
                            self.apply(ticket, ticket.life.no_reveal(attempt, barred=barred))
                case fx.Credit(attempt, report):
                    self._credit(ticket, attempt, report)
                case fx.Accepted(outputs, verdict, attempt):
                    self._accepted(ticket, outputs, verdict, attempt)
                case fx.Stop(attempt):
                    if self.leases.stop(attempt.name) is not None:
                        self.record(attempt.holder, "withdrawn", ticket.life.task.task, attempt.name)
                case fx.StopCheck(check):
                    self.leases.stop(check)
                case fx.Drop(attempt, digests):
                    self.tell(ticket.lab, m.DropUploads(ticket.life.task.task, attempt.name, digests))
                case fx.Blame(attempt, report):
                    self._blame(ticket, attempt, report)
                case fx.Doubt(attempt, report):
                    self.reputation.unproven(self._host(attempt), self.leases.now)
                    self._judged(ticket, attempt, report, "unproven")
                case fx.Charge(attempt, kind, reason):
                    self.reputation.failed(self._host(attempt), kind, self.leases.now)
                    self.record(attempt.holder, kind, ticket.life.task.task, attempt.name, reason=reason)
                    self._reindex_key(attempt.holder.key)
                case fx.Failed():
                    self._failed(ticket, effect)
                case fx.Ignored(reason, suspicious):
                    if suspicious and by is not None:
                        self.ignore(by, ticket.life.task.task, reason)
        self.sync(ticket)

    def sync(self, ticket: Ticket) -> None:
        lab = self.labs.get(ticket.lab)
        if lab is None or lab.tickets.get(ticket.life.task.task) is not ticket:
            return
        life = ticket.life
        for name, entry in list(ticket.checks.items()):
            if life.attempts[name].state != "checking":
                self.leases.checks.discard(entry)
                del ticket.checks[name]
        self.leases.want(ticket)
        if ticket.queued and life.constrained:
            self.leases.constrained[ticket.key] = ticket
            retry = life.retry_at()
            if retry > self.leases.now and retry != ticket.retry:
                ticket.retry = retry
                self.leases.at(retry, "retry", ticket.key)
        stage = life.stage
        if stage != ticket.stage:
            self._stage(ticket, stage)
            if stage in ("queued", "leased", "uploaded", "checking") and lab.away_since is None:
                self.tell(ticket.lab, m.TaskProgress(life.task.task, stage))
        if life.state != "open" and life.settled and life.unchecked is None:
            self.forget(ticket)

    def _stage(self, ticket: Ticket, stage: str) -> None:
        if ticket.stage:
            self.stages[ticket.stage] -= 1
        self.stages[stage] += 1
        ticket.stage = stage

    def _credit(self, ticket: Ticket, attempt: fx.Attempt, report: m.CheckReport) -> None:
        flops = ticket.life.task.flops
        self.reputation.accepted(self._host(attempt), flops)
        self._judged(ticket, attempt, report, "accepted")
        worker = self.leases.pool.all.get(attempt.holder.worker)
        if worker is not None:
            worker.accepted += 1
            worker.flops += flops
        self._reindex_key(attempt.holder.key, feed=True)

    def _accepted(
        self, ticket: Ticket, outputs: tuple[m.BlobRef, ...], verdict: m.Verdict, attempt: fx.Attempt
    ) -> None:
        answer = m.TaskAccepted(ticket.life.task.task, outputs, verdict)
        ticket.answer = answer
        self.totals.accepted(ticket, verdict)
        if ticket.life.unchecked is not None:
            ticket.unchecked_of = attempt.holder.key
            self.unchecked.setdefault(ticket.unchecked_of, {})[ticket.key] = ticket
            self.unchecked_count += 1
        self.tell(ticket.lab, answer)

    def _blame(self, ticket: Ticket, attempt: fx.Attempt, report: m.CheckReport) -> None:
        host = self._host(attempt)
        barred = self.reputation.wrong(
            host, report.ratio, structural=report.method == "structural", now=self.leases.now
        )
        self._judged(ticket, attempt, report, "wrong")
        self.tell(ticket.lab, m.TaskProgress(ticket.life.task.task, "rejected"))
        worker = self.leases.pool.all.get(attempt.holder.worker)
        if worker is not None:
            worker.rejected += 1
        self._reopen(host.key)
        for one in barred:
            self._bar(one, attempt.holder.worker if one is host else "")
        self._reindex_key(host.key)

    def _bar(self, host: Host, worker: str) -> None:
        """A host goes into quarantine: it loses what it has in hand, and what nobody checked is re-opened."""
        leases = self.leases
        leases.out.append(e.Quarantine(worker, host.key, host.quarantined))
        self._reopen(host.key)
        for name in list(leases.pool.by_key.get(host.key, ())):
            for attempt in list(leases.pool.all[name].hands):
                hand = leases.hands.get(attempt)
                if hand is not None and hand.reveal:
                    leases.stop(attempt)
                    self.apply(hand.ticket, hand.ticket.life.lose_reveal(attempt, barred=True))
                elif hand is not None and not hand.check:
                    self.apply(hand.ticket, hand.ticket.life.withdraw(attempt))
        self._reindex_key(host.key)
        self.offer_changed()

    def _reopen(self, key: str) -> None:
        for ticket in list(self.unchecked.get(key, {}).values()):
            self.tell(ticket.lab, m.TaskReopened(ticket.life.task.task))
            self.recheck(ticket, "auto")

    def recheck(self, ticket: Ticket, method: m.CheckMethod) -> None:
        self._no_longer_unchecked(ticket)
        effects = ticket.life.recheck(method)
        self.totals.reopened(ticket)
        ticket.answer = None
        self.apply(ticket, effects)

    def _no_longer_unchecked(self, ticket: Ticket) -> None:
        keyed = self.unchecked.get(ticket.unchecked_of)
        if keyed is not None and keyed.pop(ticket.key, None) is not None:
            self.unchecked_count -= 1
            if not keyed:
                del self.unchecked[ticket.unchecked_of]
        ticket.unchecked_of = ""

    def _failed(self, ticket: Ticket, effect: fx.Failed) -> None:
        for key in effect.forgive:
            self.reputation.forgive(self.reputation.hosts[key])
            self._reindex_key(key)
        offers = self.leases.pool.largest(ticket.needs) or 0
        too_large = effect.kind == "too_large"
        self.totals.failed(ticket)
        self.tell(
            ticket.lab,
            m.TaskFailed(
                ticket.life.task.task, effect.kind, effect.reason,  # type: ignore[arg-type]
                effect.needs if too_large else 0, offers if too_large else 0,
            ),
        )  # fmt: skip

    def forget(self, ticket: Ticket) -> None:
        """Nothing of the task is under way any more; of an accepted one the answer is kept for a while."""
        key = ticket.key
        lab = self.labs.get(ticket.lab)
        if lab is None or lab.tickets.get(key[1]) is not ticket:
            return
        del lab.tickets[key[1]]
        self._no_longer_unchecked(ticket)
        if ticket.entry is not None:
            self.leases.tasks.discard(ticket.entry)
        for entry in ticket.checks.values():
            self.leases.checks.discard(entry)
        self.leases.constrained.pop(key, None)
        if ticket.stage:
            self.stages[ticket.stage] -= 1
        self.totals.ended(ticket)
        if ticket.answer is not None and ticket.life.state == "accepted":
            self.answers[key] = ticket.answer
            self.answer_bytes += inline_bytes(ticket.answer)
            while len(self.answers) > self.limits.remember or self.answer_bytes > self.limits.remember_bytes:
                self.answer_bytes -= inline_bytes(self.answers.popitem(last=False)[1])

    # --- small ------------------------------------------------------------------------------------------------------
    def offer_changed(self) -> None:
        self.leases.pool.look(self.leases.now)
        if not self._offer_due:
            self._offer_due = True
            self.leases.at(self.leases.now + self.limits.offer_pause, "offer")

    def offer_grid(self, _: None) -> None:
        self._offer_due = False
        for lab in self.labs.values():
            if lab.away_since is None:
                self.offer_to(lab)

    def offer_to(self, lab: Lab) -> None:
        offer = monitor.grid_offer(self.leases.pool, lab.name, lab.place)
        if offer != lab.offer:
            lab.offer = offer
            self.tell(lab.name, offer)

    def tell(self, lab: str, message: Any) -> None:
        self.leases.out.append(e.ToLab(lab, message))

    def _host(self, attempt: fx.Attempt) -> Host:
        return self.reputation.hosts[attempt.holder.key]

    def _reindex_key(self, key: str, *, feed: bool = False) -> None:
        for name in list(self.leases.pool.by_key.get(key, ())):
            worker = self.leases.pool.all[name]
            self.leases.reindex(worker)
            if feed:
                self.leases.feed(worker)

    def _judged(self, ticket: Ticket, attempt: fx.Attempt, report: m.CheckReport, kind: str) -> None:
        self.record(
            attempt.holder, kind, ticket.life.task.task, attempt.name, method=report.method, ratio=report.ratio,
            seconds=attempt.seconds, flops=ticket.life.task.flops, reason=report.reason[:500],
        )  # fmt: skip

    def record(self, holder: fx.Holder, kind: str, task: str, attempt: str, **what: Any) -> None:
        self.leases.out.append(e.Record(holder.worker, holder.owner, holder.key, kind, task, attempt, **what))

    def ignore(self, worker: Worker, attempt: str, reason: str) -> None:
        worker.ignored += 1
        if worker.ignored <= NOTED:
            self.record(worker.holder, "ignored", "", attempt[:100], reason=reason)


def unfit(task: m.SubmitTask) -> str:
    """Why a task cannot be taken on; empty when it can."""
    if not is_digest(task.task) or not is_digest(task.program):
        return "a task and its program are named by digests of 64 hexadecimal characters"
    if not task.outputs:
        return "a task without outputs"
    if not (0.0 <= task.flops < 1e30) or not 0 <= task.peak < 1 << 60:
        return f"impossible costs: {task.flops} FLOP, {task.peak} bytes"
    for spec in task.outputs:
        try:
            size = nbytes(spec)
        except KeyError:
            return f"outputs of an unknown dtype {spec.dtype[:40]!r}"
        if size < 0 or any(length < 0 for length in spec.shape) or size > 1 << 60:
            return f"an output of impossible shape {spec.shape[:8]}"
    return ""


def inline_bytes(answer: m.TaskAccepted) -> int:
    return sum(len(blob.inline) for blob in answer.outputs if blob.inline is not None)
