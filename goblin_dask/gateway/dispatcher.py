"""The gateway's brain: events in, instructions out.

`Dispatcher` owns what is leased to whom. It knows no sockets, no clock but the `now` it is given, and no chance but
the generator it is given. It believes of a worker only what that worker may say: a message about an attempt counts
if the worker has that attempt in hand. What it tells a laboratory is about that laboratory's own tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from goblin_dask import messages as m
from goblin_dask.digest import is_digest
from goblin_dask.gateway import events as e
from goblin_dask.gateway import matching, monitor, stuck
from goblin_dask.gateway.leases import InHand, Leases, Ticket, make_ticket
from goblin_dask.gateway.limits import Limits
from goblin_dask.gateway.orphans import Orphans
from goblin_dask.gateway.outcomes import Lab, Outcomes, inline_bytes, unfit
from goblin_dask.gateway.workers import Worker, make_worker
from goblin_dask.graphs.operators.base import nbytes
from goblin_dask.verify import effects as fx
from goblin_dask.verify import policy as policies
from goblin_dask.verify.reputation import Reputation


class Dispatcher:
    """What is leased to whom.

    Parameters
    ----------
    limits : Limits
    rng : random.Random
        Draws what is sampled and makes pseudonyms: `random.SystemRandom` outside tests.
    reputation : Reputation, optional
        As it was before the gateway's restart.
    restarted : bool
        Whether workers may come back with attempts in hand.
    """

    def __init__(
        self, limits: Limits, rng: random.Random, reputation: Reputation | None = None, *, restarted: bool = False
    ):
        self.limits, self.rng, self._restarted = limits, rng, restarted
        self.reputation = reputation if reputation is not None else Reputation(rng)
        self.leases = Leases(limits, rng, self.reputation)
        self.outcomes = Outcomes(limits, self.leases, self.reputation)
        self.orphans = Orphans(self.leases)
        self._started: float | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            e.WorkerJoined: self._worker_joined,
            e.WorkerLeft: self._worker_left,
            e.WorkerAway: self._worker_away,
            e.WorkerBack: self._worker_back,
            e.LabJoined: self._lab_joined,
            e.LabLeft: self._lab_left,
            e.TaskSubmitted: self._submitted,
            e.TaskCancelled: self._cancelled,
            e.FromWorker: self._from_worker,
            e.Tick: self._tick,
        }
        self._timed: dict[str, Callable[[Any], None]] = {
            "lease": self._lease_due,
            "stopped": self._stopped_due,
            "worker": self._worker_due,
            "away": self._away_due,
            "settled": self._settled_due,
            "retry": self._retry_due,
            "lab": self._lab_due,
            "orphan": self.orphans.due,
            "offer": self.outcomes.offer_grid,
            "sweep": self._sweep,
        }

    # --- the interface ----------------------------------------------------------------------------------------------
    def handle(self, event: e.Event, now: float) -> list[e.Instruction]:
        """What to do because of an event. A clock that goes backwards stands still."""
        leases = self.leases
        if self._started is None:
            self._started = leases.now = now
            leases.at(now + self.limits.patience, "sweep")
            if self._restarted:
                leases.settled_at = now + self.limits.settle
                leases.at(leases.settled_at, "settled")
        leases.now = max(leases.now, now)
        out: list[e.Instruction] = []
        leases.out = out
        self._handlers[type(event)](event)
        return out

    def next_tick(self, now: float) -> float | None:
        """When a `Tick` is needed; None while nothing is timed."""
        return self.leases.next_time()

    def snapshot(self) -> dict[str, Any]:
        """State for monitoring pages."""
        return monitor.snapshot(self)

    @property
    def now(self) -> float:
        """Time of the last event."""
        return self.leases.now

    # --- workers ----------------------------------------------------------------------------------------------------
    def _worker_joined(self, event: e.WorkerJoined) -> None:
        pool, holding = self.leases.pool, event.holding
        old = pool.all.get(event.worker)
        carried: list[InHand] = []
        if old is not None:  # a new session of a worker that we know
            carried = [self.leases.hands[name] for name in set(holding) & set(old.hands) & set(self.leases.hands)]
            for hand in carried:
                self.leases.release(hand)
            self._detach(old)
        record = self.reputation.host(event.owner, event.machine, event.role)
        worker = make_worker(event, record)
        others = [pool.all[name] for name in pool.by_key.get(record.key, ())]
        if any(other.holder.network != event.network for other in others):
            self.outcomes.record(worker.holder, "clone", "", "", reason="its host key is connected from two networks")
        pool.add(worker)
        for hand in carried:
            if not hand.check and not hand.reveal:
                hand.attempt.holder = worker.holder
            self.leases.hold(hand.name, hand.ticket, hand.attempt, worker, check=hand.check, reveal=hand.reveal)
        for name in dict.fromkeys(holding):
            if name not in worker.hands and not (len(worker.hands) < worker.slots and self._adopt(worker, name)):
                self.leases.out.append(e.Withdraw(worker.id, name))
        self.leases.reindex(worker)
        self.leases.feed(worker)
        self.outcomes.offer_changed()

    def _adopt(self, worker: Worker, name: str) -> bool:
        """Take up an attempt that the worker says it has in hand."""
        task, mark, number = name.rpartition("#")
        if worker.role != "volunteer" or worker.record.quarantined or not mark or name in self.leases.hands:
            return False
        if not is_digest(task) or not number.isascii() or not number.isdigit() or len(number) > 20:
            return False
        tickets = [lab.tickets[task] for lab in self.outcomes.labs.values() if task in lab.tickets]
        for ticket in tickets:
            attempt = ticket.life.revive(name, worker.holder)
            if attempt is not None:
                self.leases.hold(name, ticket, attempt, worker, check=False)
                self.outcomes.sync(ticket)
                return True
        for ticket in tickets:
            if name not in ticket.life.attempts and self._take_up(ticket, worker, name):
                return True
        if tickets or any((lab, task) in self.outcomes.answers for lab in self.outcomes.labs):
            return False
        self.orphans.add(worker, name)
        return True

    def _take_up(self, ticket: Ticket, worker: Worker, name: str) -> bool:
        life = ticket.life
        # one that is under way may be nearly done, and so goes on beside a copy that was begun after a restart
        wanted = life.wanted or 0 < life.running < self.limits.copies
        if not wanted or not matching.permits(ticket, worker, self.now):
            return False
        attempt = ticket.life.lease(name, worker.holder, self.now)
        self.leases.hold(name, ticket, attempt, worker, check=False)
        self.outcomes.sync(ticket)
        return True

    def _worker_left(self, event: e.WorkerLeft) -> None:
        worker = self.leases.pool.all.get(event.worker)
        if worker is not None:
            self._detach(worker)
            self.outcomes.offer_changed()

    def _worker_away(self, event: e.WorkerAway) -> None:
        worker = self.leases.pool.all.get(event.worker)
        if worker is not None and worker.away_since is None:
            worker.away_since = self.now
            self.leases.reindex(worker)
            self.leases.at(self.now + self.limits.away, "away", (worker.id, self.now))

    def _worker_back(self, event: e.WorkerBack) -> None:
        worker = self.leases.pool.all.get(event.worker)
        if worker is not None and worker.away_since is not None:
            worker.away_since = None
            self.leases.reindex(worker)
            self.leases.feed(worker)

    def _detach(self, worker: Worker) -> None:
        """The worker is gone, with all that it had in hand."""
        leases = self.leases
        hands = [leases.hands[name] for name in worker.hands if name in leases.hands]
        for hand in hands:
            leases.release(hand, index=False)
        worker.stopping.clear()
        leases.pool.remove(worker)
        for name in list(worker.hands):
            self.orphans.forget(name)
        for hand in hands:
            life = hand.ticket.life
            if hand.check or hand.reveal:
                self.reputation.failed(worker.record, "lost", self.now)
                effects = life.lose_check(hand.name, worker.id) if hand.check else life.lose_reveal(hand.name)
                self.outcomes.apply(hand.ticket, effects)
            else:
                self.outcomes.apply(hand.ticket, life.lose(hand.name))

    def _from_worker(self, event: e.FromWorker) -> None:
        worker = self.leases.pool.all.get(event.worker)
        if worker is None:
            return
        message = event.message
        name = message.attempt
        hand = self.leases.hands.get(name)
        if hand is None or hand.worker is not worker:
            self._not_in_hand(worker, message)
        elif hand.check != isinstance(message, m.Checked) and not (hand.check and isinstance(message, m.AttemptFailed)):
            self.outcomes.ignore(worker, name, f"{type(message).__name__} of a {'check' if hand.check else 'lease'}")
        elif isinstance(message, m.Committed):
            self._committed(hand, message)
        elif isinstance(message, m.Uploaded):
            self._uploaded(hand, max(0, message.sent))
        elif isinstance(message, m.AttemptFailed):
            self._attempt_failed(hand, message)
        else:
            self._checked(hand, message.report)

    def _not_in_hand(self, worker: Worker, message: m.Committed | m.Uploaded | m.AttemptFailed | m.Checked) -> None:
        name = message.attempt
        if name in worker.stopping:
            if not isinstance(message, m.Committed) or message.uploaded:
                self.leases.let_go(worker, name)
            return
        orphan = self.orphans.of(worker, name)
        if orphan is None:
            self.outcomes.ignore(worker, name, "an attempt that it does not have in hand")
        elif isinstance(message, (m.Committed, m.Uploaded)) and len(orphan.messages) < 2:
            orphan.messages.append(message)
        elif isinstance(message, m.AttemptFailed):
            self.orphans.forget(name)
            self.leases.reindex(worker)
            self.leases.feed(worker)

    def _committed(self, hand: InHand, message: m.Committed) -> None:
        ticket, life, worker = hand.ticket, hand.ticket.life, hand.worker
        if hand.reveal:
            self._revealing(hand, message)
            return
        first = hand.attempt.state == "leased"
        effects = life.commit(hand.name, message, self.now)
        if first:
            worker.observe(self.now - hand.since, worker.ahead if len(worker.hands) > 1 else hand.expected)
            worker.keep({name: ticket.inputs[name] for name in message.held if name in ticket.inputs})
            fetched = min(max(0, message.fetched), ticket.input_bytes)
            worker.fetched += fetched
            self.outcomes.totals.bytes_in += fetched
        if hand.attempt.state == "wrong":
            self.leases.release(hand)
        self.outcomes.apply(ticket, effects, worker)
        if hand.attempt.state != "committed" or hand.name not in self.leases.hands:
            self.leases.feed(worker)
        elif message.uploaded and all(blob.inline is not None for blob in hand.attempt.outputs):
            self._uploaded(hand, 0)
        elif first:  # time to hand it in, whatever the computation took
            hand.deadline = max(hand.deadline, self.now + self.limits.lease_least)

    def _revealing(self, hand: InHand, message: m.Committed) -> None:
        """A side of a dispute names its values: it is taken at its word when they are there."""
        if hand.said is not None and hand.said != message:
            self.outcomes.ignore(hand.worker, hand.name, "values named twice that differ")
        hand.said = message
        hand.deadline = max(hand.deadline, self.now + self.limits.lease_least)
        if message.uploaded and all(blob.inline is not None for blob in message.outputs):
            self._revealed(hand)

    def _revealed(self, hand: InHand) -> None:
        if hand.said is None:
            self.outcomes.ignore(hand.worker, hand.name, "values handed in that were not named")
            return
        self.leases.release(hand)
        self.outcomes.apply(hand.ticket, hand.ticket.life.revealed(hand.name, hand.said, self.now), hand.worker)
        self.leases.feed(hand.worker)

    def _uploaded(self, hand: InHand, sent: int) -> None:
        if hand.reveal:
            self._revealed(hand)
            return
        worker, life = hand.worker, hand.ticket.life
        sent = min(sent, hand.ticket.output_bytes)
        # More unchecked results than are remembered could not be re-opened: then each is checked.
        many = self.outcomes.unchecked_count >= self.limits.remember
        if hand.attempt.state == "committed":
            worker.sent += sent
            self.outcomes.totals.bytes_out += sent
            self.leases.release(hand)
        effects = life.upload(
            hand.name,
            suspicious=self.reputation.suspicious(worker.record),
            share=1.0 if many else self.reputation.share(worker.record, life.task.flops),
            audit=self.reputation.audit_rate(worker.record),
            rng=self.rng,
            sent=sent,
        )
        self.outcomes.apply(hand.ticket, effects, worker)
        self.leases.feed(worker)

    def _attempt_failed(self, hand: InHand, message: m.AttemptFailed) -> None:
        ticket, worker = hand.ticket, hand.worker
        self.leases.release(hand)
        if hand.check:
            self.reputation.failed(worker.record, "failed", self.now)
            effects = ticket.life.lose_check(hand.name, worker.id)
        elif hand.reveal:
            self.reputation.failed(worker.record, "failed", self.now)
            effects = ticket.life.lose_reveal(hand.name)
        else:
            effects = ticket.life.fail(hand.name, message, self.now)
        self.outcomes.apply(ticket, effects)
        self.leases.reindex(worker)
        self.leases.feed(worker)

    def _checked(self, hand: InHand, report: m.CheckReport) -> None:
        ticket, worker = hand.ticket, hand.worker
        self.leases.release(hand)
        if report.verdict == "failed":
            self.reputation.failed(worker.record, "failed", self.now)
            worker.rejected += 1
        else:
            self.reputation.accepted(worker.record)
            worker.accepted += 1
        self.outcomes.totals.check_seconds += max(0.0, report.seconds)
        self.outcomes.apply(ticket, ticket.life.report(hand.name, report, worker.id, self.now), worker)
        self.leases.reindex(worker)
        self.leases.feed(worker)

    # --- laboratories -----------------------------------------------------------------------------------------------
    def _lab_joined(self, event: e.LabJoined) -> None:
        lab = self.outcomes.labs.setdefault(event.lab, Lab(event.lab))
        lab.place, lab.away_since, lab.offer = event.place, None, None
        self.leases.away.discard(lab.name)
        self.leases.tasks.pause(lab.name, False)
        self.leases.checks.pause(lab.name, False)
        self.outcomes.offer_to(lab)
        self.leases.feed_idle()

    def _lab_left(self, event: e.LabLeft) -> None:
        lab = self.outcomes.labs.get(event.lab)
        if lab is None or lab.away_since is not None:
            return
        lab.away_since = self.now
        self.leases.away.add(lab.name)
        self.leases.tasks.pause(lab.name)
        self.leases.checks.pause(lab.name)
        self.leases.at(self.now + self.limits.lab_grace, "lab", (lab.name, lab.away_since))

    def _submitted(self, event: e.TaskSubmitted) -> None:
        if event.lab not in self.outcomes.labs:
            self._lab_joined(e.LabJoined(event.lab))
        lab, task = self.outcomes.labs[event.lab], event.task
        ticket = lab.tickets.get(task.task)
        answer = self.outcomes.answers.get((lab.name, task.task)) if ticket is None else ticket.answer
        if answer is not None:
            if ticket is not None and policies.demands_more(task.policy, answer.verdict.method):
                self.outcomes.recheck(ticket, policies.order(task.policy, suspicious=False))
            else:
                self.outcomes.tell(lab.name, answer)
            return
        if ticket is not None:
            return
        reason = unfit(task)
        if not reason and sum(len(one.tickets) for one in self.outcomes.labs.values()) >= self.limits.tasks:
            reason = f"the gateway holds {self.limits.tasks} open tasks already"
        if reason:
            self.outcomes.tell(lab.name, m.TaskFailed(task.task[:64], "error", reason))
            return
        size = sum(nbytes(spec) for spec in task.outputs)
        ticket = make_ticket(lab.name, task, lab.place, size, self.now, event.needs, event.outline)
        # Where nobody can make a replica nobody is waited for: at once if none was asked for, else after some patience.
        waited = task.policy.method != "replicate" or self.leases.pool.alone(self.now - self.limits.patience)
        ticket.life.alone = waited and not self.leases.pool.independent
        lab.tickets[task.task] = ticket
        self.outcomes.totals.submitted(ticket)
        for name, orphan in self.orphans.claim(task.task):
            if self._take_up(ticket, orphan.worker, name):
                for message in orphan.messages:
                    self._from_worker(e.FromWorker(orphan.worker.id, message))
            else:
                self.leases.dismiss(orphan.worker, name)
        if ticket.life.state == "open":
            pool = self.leases.pool
            if self._settled() and stuck.beyond(pool, ticket):
                self.outcomes.apply(ticket, stuck.end(pool, ticket))
            else:
                self.outcomes.sync(ticket)

    def _cancelled(self, event: e.TaskCancelled) -> None:
        lab = self.outcomes.labs.get(event.lab)
        if lab is None:
            return
        answer = self.outcomes.answers.pop((lab.name, event.task), None)
        if answer is not None:
            self.outcomes.answer_bytes -= inline_bytes(answer)
        ticket = lab.tickets.get(event.task)
        if ticket is not None:
            self.outcomes.apply(ticket, ticket.life.cancel())
            self.outcomes.forget(ticket)

    # --- time -------------------------------------------------------------------------------------------------------
    def _tick(self, event: e.Tick) -> None:
        while (timer := self.leases.due()) is not None:
            self._timed[timer[0]](timer[1])

    def _lease_due(self, name: str) -> None:
        hand = self.leases.hands.get(name)
        if hand is None:
            return
        now, life, leases = self.now, hand.ticket.life, self.leases
        if now < hand.deadline and (hand.check or hand.reveal):
            leases.at(hand.deadline, "lease", name)
        elif now < hand.deadline:  # time for a backup copy
            leases.at(hand.deadline, "lease", name)
            leases.slow(hand)
        elif hand.check or hand.reveal:
            leases.stop(name)
            self.reputation.failed(hand.worker.record, "late", now)
            effects = life.lose_check(name, hand.worker.id) if hand.check else life.lose_reveal(name)
            self.outcomes.apply(hand.ticket, effects)
            leases.reindex(hand.worker)
        elif not hand.attempt.late:
            leases.at(now + self.limits.overdue_factor * hand.length, "lease", name)
            self.outcomes.apply(hand.ticket, life.expire(name))
        else:
            leases.stop(name)
            self.outcomes.apply(hand.ticket, life.lose(name))

    def _stopped_due(self, what: tuple[str, str]) -> None:
        worker = self.leases.pool.all.get(what[0])
        if worker is not None:
            self.leases.let_go(worker, what[1])

    def _worker_due(self, name: str) -> None:
        worker = self.leases.pool.all.get(name)
        if worker is not None:
            self.leases.reindex(worker)
            self.leases.feed(worker)

    def _away_due(self, what: tuple[str, float]) -> None:
        """A worker has been away for a while: its leases may get backup copies, its checks are done by others."""
        worker = self.leases.pool.all.get(what[0])
        if worker is None or worker.away_since != what[1]:
            return
        self.leases.at(self.now + self.limits.away, "away", what)
        for name in list(worker.hands):
            hand = self.leases.hands.get(name)  # none: an orphan
            if hand is not None and hand.reveal:
                self.leases.stop(name)
                self.outcomes.apply(hand.ticket, hand.ticket.life.lose_reveal(name))
            elif hand is not None and not hand.check:
                self.leases.slow(hand)
            elif hand is not None and self.leases.others(worker, hand.ticket, hand.attempt):
                self.leases.stop(name)
                self.outcomes.apply(hand.ticket, hand.ticket.life.lose_check(name, worker.id))

    def _settled_due(self, _: None) -> None:
        for worker in self.leases.pool.all.values():
            self.leases.reindex(worker)
        self.leases.feed_idle()

    def _retry_due(self, key: tuple[str, str]) -> None:
        lab = self.outcomes.labs.get(key[0])
        ticket = lab.tickets.get(key[1]) if lab is not None else None
        if ticket is not None:
            self.leases.requeue(ticket)
            self.outcomes.sync(ticket)

    def _lab_due(self, what: tuple[str, float]) -> None:
        lab = self.outcomes.labs.get(what[0])
        if lab is None or lab.away_since != what[1]:
            return
        for ticket in list(lab.tickets.values()):
            for effect in ticket.life.cancel():
                if not isinstance(effect, fx.Drop):  # nobody is there to be told
                    self.outcomes.apply(ticket, [effect])
            self.outcomes.forget(ticket)
        for key in [key for key in self.outcomes.answers if key[0] == lab.name]:
            self.outcomes.answer_bytes -= inline_bytes(self.outcomes.answers.pop(key))
        del self.outcomes.labs[lab.name]
        self.leases.away.discard(lab.name)
        self.leases.tasks.forget(lab.name)
        self.leases.checks.forget(lab.name)
        self.outcomes.totals.forget(lab.name)

    def _sweep(self, _: None) -> None:
        """Find queued tasks that no connected volunteer could ever have, and idle workers that could."""
        leases, pool = self.leases, self.leases.pool
        leases.at(self.now + max(self.limits.patience / 2, 1.0), "sweep")
        for ticket in stuck.waiting(leases, self.now - self.limits.patience):
            if ticket.lab not in leases.away:
                self.outcomes.apply(ticket, stuck.end(pool, ticket))
        leases.feed_idle()

    def _settled(self) -> bool:
        return self._started is not None and self.now >= self._started + self.limits.patience
