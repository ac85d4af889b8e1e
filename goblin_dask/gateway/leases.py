"""Leases and checks: who is given what, for how long, and what comes back into the queue."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from goblin_dask import messages as m
from goblin_dask.gateway import matching
from goblin_dask.gateway.events import ANYBODY, CheckOrder, Dispatch, Instruction, Needs, RevealOrder, Withdraw
from goblin_dask.gateway.limits import Limits
from goblin_dask.gateway.queue import Entry, FairQueue, Fit
from goblin_dask.gateway.workers import Pool, Worker
from goblin_dask.graphs.cost import peak
from goblin_dask.graphs.operators.base import nbytes
from goblin_dask.graphs.outline import Outline
from goblin_dask.graphs.program import encode
from goblin_dask.verify.effects import Attempt, Question
from goblin_dask.verify.lifecycle import TaskLife
from goblin_dask.verify.reputation import Reputation

ANY_MEMORY = 1 << 62
NOMINAL_SPEED, NOMINAL_LINK = 1e10, 1e7
"""With which a task's share of the grid is charged to its laboratory and job."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A task and what the dispatcher knows of it besides its life."""

    lab: str
    life: TaskLife
    inputs: dict[str, int]
    """Blobs that have to be moved, with their sizes."""
    input_bytes: int
    output_bytes: int
    cost: float
    entry: Entry[Ticket] | None = None
    checks: dict[str, Entry[Judging]] = field(default_factory=dict)
    stage: str = ""
    answer: m.TaskAccepted | None = None
    place: str = ""
    needs: Needs = ANYBODY
    unchecked_of: str = ""
    """Host key whose unchecked result was accepted."""
    retry: float = 0.0
    """When a host that is avoided may be asked again."""

    @property
    def key(self) -> tuple[str, str]:
        return self.lab, self.life.task.task

    @property
    def queued(self) -> bool:
        """Whether it waits for a volunteer."""
        return self.entry is not None and self.entry.alive


Judging = tuple[Ticket, Attempt]


def make_ticket(
    lab: str,
    task: m.SubmitTask,
    place: str,
    output_bytes: int,
    now: float,
    needs: Needs,
    outline: Outline | None = None,
) -> Ticket:
    """Ticket of a task that was just submitted."""
    inputs = {blob.digest: blob.nbytes for blob in task.inputs if blob.inline is None}
    output_bytes = output_bytes if output_bytes > m.INLINE_LIMIT else 0
    input_bytes = sum(inputs.values())
    cost = 0.01 + task.flops / NOMINAL_SPEED + (input_bytes + output_bytes) / NOMINAL_LINK
    life = TaskLife(lab, task, now, outline)
    return Ticket(lab, life, inputs, input_bytes, output_bytes, cost, place=place, needs=needs)


@dataclass(slots=True, eq=False)
class InHand:
    """A lease or check that a worker has in hand."""

    name: str
    ticket: Ticket
    attempt: Attempt
    worker: Worker
    check: bool
    since: float
    expected: float
    need: int
    deadline: float
    length: float
    """Seconds of the lease."""
    reveal: bool = False
    """It is neither a lease nor a check: one side of a dispute reveals values."""
    said: m.Committed | None = None
    """What it says that they are."""


class Leases:
    """Gives queued tasks to volunteers and results to validators.

    Everything that it decides is appended to `out`, which the dispatcher empties.
    """

    def __init__(self, limits: Limits, rng: random.Random, reputation: Reputation):
        self.limits, self.rng, self.reputation = limits, rng, reputation
        self.pool = Pool()
        self.tasks: FairQueue[Ticket] = FairQueue()
        self.checks: FairQueue[Judging] = FairQueue()
        self.hands: dict[str, InHand] = {}
        self.away: set[str] = set()
        """Laboratories that cannot be reached now."""
        self.stragglers: dict[str, None] = {}
        self.constrained: OrderedDict[tuple[str, str], Ticket] = OrderedDict()
        """Queued tasks that some volunteers with enough memory may not have."""
        self.out: list[Instruction] = []
        self.now = self.settled_at = 0.0
        # Begins anywhere: a restarted gateway must not reuse the number of an attempt that is still in some hand.
        self._number = rng.getrandbits(48)
        self._timers: list[tuple[float, int, str, Any]] = []
        self._count = itertools.count()

    # --- time -------------------------------------------------------------------------------------------------------
    def at(self, when: float, kind: str, what: Any = None) -> None:
        """Let `due` return (kind, what) at that time."""
        heapq.heappush(self._timers, (when, next(self._count), kind, what))

    def due(self) -> tuple[str, Any] | None:
        """Next timer that is due."""
        if self._timers and self._timers[0][0] <= self.now:
            _, _, kind, what = heapq.heappop(self._timers)
            return kind, what
        return None

    def next_time(self) -> float | None:
        """When the next timer is due; those of leases that have ended are dropped."""
        while self._timers:
            when, _, kind, what = self._timers[0]
            if kind == "lease" and what not in self.hands:
                heapq.heappop(self._timers)
                continue
            return when
        return None

    # --- slots ------------------------------------------------------------------------------------------------------
    def free_slots(self, worker: Worker) -> int:
        """Leases that the worker may get now."""
        if worker.away_since is not None or (self.now < self.settled_at and worker.role == "volunteer"):
            return 0
        quota = self.reputation.quota(worker.record, self.now)
        return min(worker.slots, quota) - len(worker.hands) - len(worker.stopping)

    def reindex(self, worker: Worker) -> None:
        """Its slots or memory have changed."""
        self.pool.index(worker, idle=self.free_slots(worker) > 0)
        paused_until = worker.record.paused_until
        if paused_until > self.now:
            self.at(paused_until, "worker", worker.id)

    def hold(
        self, name: str, ticket: Ticket, attempt: Attempt, worker: Worker, *, check: bool, reveal: bool = False
    ) -> InHand:
        """Note that the worker has it in hand."""
        expected = self._expected(ticket, worker)
        need = 0 if check else ticket.life.need
        whole = (worker.ahead + expected) * worker.correction
        limits = self.limits
        length = min(limits.lease_most, max(limits.lease_least, whole * limits.lease_factor))
        hand = InHand(name, ticket, attempt, worker, check, self.now, expected, need, self.now + length, length, reveal)
        self.hands[name] = hand
        worker.hands[name] = need
        worker.used += need
        worker.ahead += expected
        backup = self.now + max(limits.backup_least, whole * limits.backup_factor)
        self.at(hand.deadline if check or reveal else min(hand.deadline, backup), "lease", name)
        self.reindex(worker)
        return hand

    def release(self, hand: InHand, *, index: bool = True) -> None:
        """It is out of the worker's hand."""
        if self.hands.pop(hand.name, None) is None:
            return
        worker = hand.worker
        del worker.hands[hand.name]
        worker.used -= hand.need
        worker.ahead = max(0.0, worker.ahead - hand.expected) if worker.hands else 0.0
        self.stragglers.pop(hand.name, None)
        if index:
            self.reindex(worker)

    def stop(self, name: str) -> InHand | None:
        """Tell the worker that nobody waits for it; the slot is free when it lets go, or after a grace."""
        hand = self.hands.get(name)
        if hand is None:
            return None
        self.release(hand, index=False)
        self.dismiss(hand.worker, name)
        return hand

    def dismiss(self, worker: Worker, name: str) -> None:
        """Withdraw what is not, or no longer, in the books."""
        worker.stopping.add(name)
        self.out.append(Withdraw(worker.id, name))
        self.at(self.now + self.limits.stop_grace, "stopped", (worker.id, name))
        self.reindex(worker)

    def let_go(self, worker: Worker, name: str) -> None:
        """The worker no longer works on a withdrawn attempt."""
        if name in worker.stopping:
            worker.stopping.discard(name)
            self.reindex(worker)
            self.feed(worker)

    def next_name(self, ticket: Ticket) -> str:
        """Name of a new attempt."""
        while True:
            self._number += 1
            name = f"{ticket.life.task.task}#{self._number}"
            if name not in self.hands and name not in ticket.life.attempts:
                return name

    # --- volunteers -------------------------------------------------------------------------------------------------
    def want(self, ticket: Ticket) -> None:
        """Bring the queue in line with what the task lacks."""
        wanted = ticket.life.wanted
        if not wanted:
            if ticket.entry is not None:
                self.tasks.discard(ticket.entry)
                ticket.entry = None
            return
        if ticket.queued:
            return
        while wanted and ticket.lab not in self.away:
            worker = self._idle_for(ticket)
            if worker is None:
                break
            self.lease(ticket, worker)
            wanted = ticket.life.wanted
        if wanted:
            self._queue(ticket)

    def _queue(self, ticket: Ticket) -> None:
        task = ticket.life.task
        ticket.entry = self.tasks.push(
            ticket, lab=ticket.lab, job=task.job, priority=task.priority, need=ticket.life.need, cost=ticket.cost,
            now=self.now, version=ticket.needs.catalogue,
        )  # fmt: skip

    def requeue(self, ticket: Ticket) -> None:
        """Look again for an idle volunteer: one that was avoided may be asked now."""
        if ticket.queued and ticket.entry is not None:
            since = ticket.entry.since
            self.tasks.discard(ticket.entry)
            ticket.entry = None
            self.want(ticket)
            if ticket.entry is not None:
                ticket.entry.since = since

    def _idle_for(self, ticket: Ticket) -> Worker | None:
        if ticket.needs.catalogue > self.pool.newest:
            return None
        idle = self.pool.idle(ticket.life.need)
        now = self.now
        some = idle.some(self.limits.candidates, self.rng)
        able = [worker for worker in some if matching.permits(ticket, worker, now)]
        if not able:
            if len(some) >= len(idle):
                return None
            return next((worker for worker in idle if matching.permits(ticket, worker, now)), None)
        if ticket.life.replicated and ticket.life.attempts:
            # Chance picks the partner, not who says that it is fast: of another class of machines where it can.
            crossing = [worker for worker in able if matching.crossed(ticket.life, worker) == 1.0]
            return self.rng.choice(crossing or able)
        if len(able) == 1:
            return able[0]
        return min(able, key=lambda worker: self._waiting(ticket, worker))

    def _expected(self, ticket: Ticket, worker: Worker) -> float:
        mapped = bool(worker.place) and worker.place == ticket.place
        moved = matching.weigh(ticket.inputs, ticket.input_bytes, worker) + ticket.output_bytes
        return matching.seconds(moved, ticket.life.task.flops, worker, mapped=mapped)

    def _waiting(self, ticket: Ticket, worker: Worker) -> float:
        expected = self._expected(ticket, worker)
        return matching.cost_of_waiting(expected, worker) * matching.crossed(ticket.life, worker)

    def lease(self, ticket: Ticket, worker: Worker) -> None:
        """Give the task to the volunteer."""
        name = self.next_name(ticket)
        attempt = ticket.life.lease(name, worker.holder, self.now)
        hand = self.hold(name, ticket, attempt, worker, check=False)
        task = ticket.life.task
        self.out.append(
            Dispatch(
                worker.id, ticket.lab, task.task, name, task.program, task.inputs, ticket.life.need, hand.length,
            )
        )  # fmt: skip

    def feed(self, worker: Worker) -> None:
        """Fill the worker's free slots."""
        if worker.role != "volunteer":
            self._feed_validator(worker)
            return
        limits, now = self.limits, self.now

        def fits(ticket: Ticket, entry: Entry[Ticket]) -> Fit:
            if not matching.permits(ticket, worker, now):
                if not worker.knows(ticket.needs):
                    self.constrained[ticket.key] = ticket
                return Fit.NO
            if entry.need <= worker.free:
                return Fit.YES
            if entry.need > worker.offer or now - entry.since < limits.drain:
                return Fit.NO
            if entry.reserved != worker.id and entry.reserved in self.pool.all:
                return Fit.NO
            entry.reserved = worker.id
            return Fit.WAIT

        def rank(ticket: Ticket) -> float:
            missing = matching.weigh(ticket.inputs, ticket.input_bytes, worker)
            return missing and matching.crossed(ticket.life, worker) * missing / ticket.input_bytes

        while self.free_slots(worker) > 0:
            ticket = self.tasks.take(
                worker.offer, fits, rank, window=limits.window if worker.held else 1, scan=limits.scan,
                version=worker.machine.catalogue,
            )  # fmt: skip
            if ticket is None:
                ticket = self._straggler_for(worker)
                if ticket is None:
                    return
                self.lease(ticket, worker)
                continue
            ticket.entry = None
            if ticket.life.wanted:  # it may have ended within this very event
                self.lease(ticket, worker)
            self.want(ticket)

    def feed_idle(self) -> None:
        """Fill the free slots of all idle workers."""
        for worker in [*self.pool.idle(0), *self.pool.idle_validators.values()]:
            if not self.tasks and not self.checks and not self.stragglers:
                return
            self.feed(worker)

    def _straggler_for(self, worker: Worker) -> Ticket | None:
        """A task in slow hands, of which this worker may have a backup copy: only when nothing is queued for it."""
        for name in list(itertools.islice(self.stragglers, self.limits.scan)):
            hand = self.hands.get(name)
            if hand is None:
                del self.stragglers[name]
                continue
            life = hand.ticket.life
            if life.state != "open" or life.wanted or life.running >= self.limits.copies:
                del self.stragglers[name]
                continue
            if hand.ticket.lab in self.away or life.need > worker.free:
                continue
            if not matching.permits(hand.ticket, worker, self.now):
                continue
            del self.stragglers[name]
            return hand.ticket
        return None

    def slow(self, hand: InHand) -> None:
        """An attempt takes longer than expected: a backup copy is welcome."""
        self.stragglers[hand.name] = None
        for worker in self.pool.idle(hand.need).some(self.limits.candidates, self.rng):
            self.feed(worker)
            if hand.name not in self.stragglers:
                return

    # --- disputes ---------------------------------------------------------------------------------------------------
    def reveal(self, ticket: Ticket, attempt: Attempt, cut: int) -> bool:
        """Ask a side of a dispute for its values at a cut, or all digests; False when its volunteer is not there."""
        worker, life = self.pool.all.get(attempt.holder.worker), ticket.life
        if worker is None or worker.away_since is not None or life.outline is None:
            return False
        # not the name of an attempt: after the gateway's restart nobody would know what its outputs are
        name = f"{self.next_name(ticket)}r"
        life.start_reveal(name, attempt, cut)
        hand = self.hold(name, ticket, attempt, worker, check=False, reveal=True)
        task, outline = life.task, life.outline
        whole = cut == outline.nodes
        program, slots = (outline.program, range(len(task.inputs))) if whole else outline.before(cut)
        sizes = tuple(map(nbytes, outline.specs(program.outputs if whole else outline.live(cut))))
        self.out.append(
            Dispatch(
                worker.id, ticket.lab, task.task, name, task.program, tuple(task.inputs[slot] for slot in slots),
                peak(program), hand.length, encoded=encode(program), reveal=RevealOrder(sizes, whole),
            )
        )  # fmt: skip
        return True

    # --- validators -------------------------------------------------------------------------------------------------
    def judge(self, ticket: Ticket, attempt: Attempt) -> None:
        """A result waits for a validator."""
        task = ticket.life.task
        ticket.checks[attempt.name] = self.checks.push(
            (ticket, attempt), lab=ticket.lab, job=task.job, priority=task.priority, need=0, cost=ticket.cost,
            now=self.now, version=ticket.needs.catalogue,
        )  # fmt: skip
        if not self.pool.idle_validators or ticket.lab in self.away:
            return
        some = itertools.islice(self.pool.idle_validators.values(), 32)
        able = [v for v in some if v.lab in ("", ticket.lab) and v.knows(ticket.needs)]
        able.sort(key=lambda v: (v.lab != ticket.lab, v.id in attempt.avoid, len(v.hands) / v.slots))
        for validator in able:
            self.feed(validator)
            if attempt.name not in ticket.checks:
                return

    def _feed_validator(self, validator: Worker) -> None:
        def fits(item: Judging, entry: Entry[Judging]) -> Fit:
            if not validator.knows(item[0].needs):
                return Fit.NO
            return Fit.NO if validator.id in item[1].avoid and self.others(validator, *item) else Fit.YES

        while self.free_slots(validator) > 0:
            item = self.checks.take(
                ANY_MEMORY, fits, lambda item: 0.0, scan=self.limits.scan, lab=validator.lab,
                version=validator.machine.catalogue,
            )  # fmt: skip
            if item is None:
                return
            self._check(*item, validator)

    def others(self, validator: Worker, ticket: Ticket, attempt: Attempt) -> bool:
        """Whether a validator that has not failed this check yet may do it."""
        return any(
            other is not validator
            and other.away_since is None
            and other.lab in ("", ticket.lab)
            and other.knows(ticket.needs)
            and other.id not in attempt.avoid
            for other in self.pool.validators.values()
        )

    def _check(self, ticket: Ticket, attempt: Attempt, validator: Worker) -> None:
        ticket.checks.pop(attempt.name, None)
        order = attempt.order
        if attempt.state != "checking" or order is None:
            return
        name = self.next_name(ticket)
        ticket.life.start_check(name, attempt)
        hand = self.hold(name, ticket, attempt, validator, check=True)
        task, question = ticket.life.task, order.question
        if question is None:
            replica = order.replica.outputs if order.replica is not None else ()
            question = Question(task.inputs, attempt.outputs, replica)
        self.out.append(
            Dispatch(
                validator.id, ticket.lab, task.task, name, task.program, question.inputs, task.peak, hand.length,
                CheckOrder(attempt.name, question.outputs, order.method, question.replica, question.values),
                encoded=question.encoded,
            )
        )  # fmt: skip
