"""Random lives: joins, leaves, lies, failures, restarts, cancels and clock jumps, and what always holds."""

import random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from simulated import Simulated, blob, task

from goblin_dask import messages as m
from goblin_dask.gateway import events as e
from goblin_dask.verify.reputation import Reputation

POLICIES = [m.Policy(), m.Policy("recompute"), m.Policy("replicate"), m.Policy("sample", 0.3), m.Policy("sample", 0.0)]
LABS = ["lab x", "lab y"]
OWNERS = 3
TASKS = 8


class Grid(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.grid = Simulated(seed=1)
        self.restarts = 0
        self.joined = 0
        self.workers: dict[str, e.WorkerJoined] = {}
        self.hands: dict[str, e.Dispatch] = {}
        self.committed: dict[str, m.Committed] = {}
        self.uploaded: set[str] = set()
        self.names: set[str] = set()
        self.open: dict[tuple[str, str], m.SubmitTask] = {}
        self.done: dict[tuple[str, str], m.Verdict] = {}
        self.approved: set[str] = set()
        """Tasks of which some check has accepted a result."""
        for lab in LABS:
            self.do(e.LabJoined(lab))

    # --- the world --------------------------------------------------------------------------------------------------
    def do(self, event):
        self.absorb(self.grid.do(event))

    def absorb(self, out):
        for i in out:
            if isinstance(i, e.Dispatch):
                assert i.attempt not in self.names, "an attempt's name was used twice"
                assert i.worker in self.workers
                self.names.add(i.attempt)
                self.hands[i.attempt] = i
                joined = self.workers[i.worker]
                assert joined.role == ("volunteer" if i.check is None else "validator")
                if i.check is not None:
                    assert i.check.of in self.uploaded, "checked before it was handed in"
                    assert i.check.outputs == self.committed[i.check.of].outputs
            elif isinstance(i, e.Withdraw):
                self.hands.pop(i.attempt, None)
            elif isinstance(i, e.ToLab):
                self.tell(i.lab, i.message)

    def tell(self, lab, message):
        if isinstance(message, m.TaskAccepted):
            key = (lab, message.task)
            assert key in self.open or key in self.done
            if message.verdict.method == "unchecked":
                assert self.submitted(key).policy.method == "sample"
            else:
                assert message.task in self.approved, "accepted without an accepting report"
            self.open.pop(key, None)
            self.done[key] = message.verdict
        elif isinstance(message, m.TaskFailed):
            self.open.pop((lab, message.task))
        elif isinstance(message, m.TaskReopened):
            key = (lab, message.task)
            assert self.done.pop(key).method == "unchecked", "something that was checked is computed again"
            self.open[key] = self.submitted(key)

    def submitted(self, key):
        return next(one for one in self.tasks() if one.task == key[1])

    @staticmethod
    def tasks():
        return [task(n, policy=POLICIES[n % len(POLICIES)], job=f"job {n % 3}") for n in range(TASKS)]

    def in_hand(self, check):
        return [d for d in self.hands.values() if (d.check is not None) == check]

    # --- what happens -----------------------------------------------------------------------------------------------
    @rule(owner=st.integers(0, OWNERS - 1), network=st.integers(0, 2), slots=st.integers(1, 3))
    def volunteer(self, owner, network, slots):
        self.join(f"w{self.joined}", "volunteer", f"o{owner}", f"n{network}", slots)

    @rule(lab=st.sampled_from(["", *LABS]))
    def validator(self, lab):
        self.join(f"w{self.joined}", "validator", "operator", "here", 2, lab)

    def join(self, name, role, owner, network, slots, lab="", holding=()):
        self.joined += 1
        machine = m.Machine(f"host {name}", slots=slots, memory=10**10)
        self.workers[name] = e.WorkerJoined(name, role, owner, network, machine, (), lab)
        self.do(e.WorkerJoined(name, role, owner, network, machine, holding, lab))

    def pick(self, data, items):
        return data.draw(st.sampled_from(sorted(items)))

    @rule(data=st.data(), back=st.booleans())
    def leave(self, data, back):
        if self.workers:
            name = self.pick(data, self.workers)
            old = self.workers.pop(name)
            held = [a for a, d in self.hands.items() if d.worker == name]
            self.do(e.WorkerLeft(name))
            lost = {a: self.hands.pop(a) for a in held if a in self.hands}
            if back:
                again = f"{name}'"
                self.hands |= {a: e.Dispatch(again, *_rest(d)) for a, d in lost.items()}
                self.workers[again] = e.WorkerJoined(again, old.role, old.owner, old.network, old.machine, (), old.lab)
                self.do(e.WorkerJoined(again, old.role, old.owner, old.network, old.machine, tuple(lost), old.lab))

    @rule(lab=st.sampled_from(LABS), number=st.integers(0, TASKS - 1))
    def submit(self, lab, number):
        one = self.tasks()[number]
        if (lab, one.task) not in self.done:
            self.open[lab, one.task] = one
        self.do(e.TaskSubmitted(lab, one))

    @rule(lab=st.sampled_from(LABS), number=st.integers(0, TASKS - 1))
    def cancel(self, lab, number):
        key = (lab, self.tasks()[number].task)
        self.do(e.TaskCancelled(*key))
        self.open.pop(key, None)
        self.done.pop(key, None)

    @rule(data=st.data(), answer=st.sampled_from(["right", "right", "wrong", "shape"]))
    def commit(self, data, answer):
        if found := self.in_hand(check=False):
            d = self.hands[self.pick(data, [d.attempt for d in found])]
            outputs = () if answer == "shape" else (blob(f"{answer} {d.task}"),)
            message = m.Committed(d.attempt, outputs, 1.0)
            if d.attempt not in self.committed:
                self.committed[d.attempt] = message
            if answer == "shape":
                self.hands.pop(d.attempt)
            self.do(e.FromWorker(d.worker, message))

    @rule(data=st.data())
    def upload(self, data):
        if found := [d.attempt for d in self.in_hand(check=False) if d.attempt in self.committed]:
            d = self.hands.pop(self.pick(data, found))
            self.uploaded.add(d.attempt)
            self.do(e.FromWorker(d.worker, m.Uploaded(d.attempt)))

    @rule(
        data=st.data(),
        kind=st.sampled_from(["memory", "fetch", "upload", "compute", "data", "unsupported", "cancelled"]),
    )
    def fail(self, data, kind):
        if self.hands:
            d = self.hands.pop(self.pick(data, self.hands))
            self.do(e.FromWorker(d.worker, m.AttemptFailed(d.attempt, kind, "reason", needs=10**12)))

    @rule(data=st.data(), verdict=st.sampled_from(["accepted", "accepted", "wrong", "unproven", "failed"]))
    def check(self, data, verdict):
        if found := self.in_hand(check=True):
            d = self.hands.pop(self.pick(data, [d.attempt for d in found]))
            self.report(d, verdict)

    def report(self, d, verdict):
        if verdict == "accepted":
            self.approved.add(d.task)
        ratio = {"accepted": 0.3, "wrong": 20.0}.get(verdict, 0.0)
        self.do(e.FromWorker(d.worker, m.Checked(d.attempt, m.CheckReport(verdict, "algebraic", ratio))))

    @rule(data=st.data(), forged=st.sampled_from(["commit", "upload", "check", "fail"]))
    def forge(self, data, forged):
        if self.hands and self.workers:
            d = self.hands[self.pick(data, self.hands)]
            other = self.pick(data, self.workers)
            if other != d.worker:
                message = {
                    "commit": m.Committed(d.attempt, (blob("forged"),), 1.0),
                    "upload": m.Uploaded(d.attempt),
                    "check": m.Checked(d.attempt, m.CheckReport("accepted", "algebraic", 0.1)),
                    "fail": m.AttemptFailed(d.attempt, "compute", ""),
                }[forged]
                self.do(e.FromWorker(other, message))

    @rule(seconds=st.sampled_from([0.5, 5.0, 30.0, 100.0, 1000.0]))
    def wait(self, seconds):
        self.absorb(self.grid.wait(seconds))
        self.nobody_idles()

    @rule()
    def clock_jumps_back(self):
        self.grid.now -= 50.0

    @rule(lab=st.sampled_from(LABS))
    def lab_flickers(self, lab):
        self.do(e.LabLeft(lab))
        self.absorb(self.grid.wait(30.0))
        self.do(e.LabJoined(lab))

    @rule()
    def gateway_restarts(self):
        self.restarts += 1
        rows = self.grid.dispatcher.reputation.to_rows()
        self.grid = Simulated(seed=1 + self.restarts, now=self.grid.now + 3.0,
                              reputation=Reputation.from_rows(rows, random.Random(9)))  # fmt: skip
        for joined in list(self.workers.values()):
            holding = tuple(a for a, d in self.hands.items() if d.worker == joined.worker)
            self.do(e.WorkerJoined(joined.worker, joined.role, joined.owner, joined.network, joined.machine, holding,
                                   joined.lab))  # fmt: skip
            for attempt in holding:
                if attempt in self.hands and attempt in self.committed:
                    self.do(e.FromWorker(joined.worker, self.committed[attempt]))
        for lab in LABS:
            self.do(e.LabJoined(lab))
        for (lab, _), one in list(self.open.items()):
            self.do(e.TaskSubmitted(lab, one))
        # What was accepted is in the laboratory's ledger; unchecked results are asked for again.
        for (lab, name), verdict in list(self.done.items()):
            if verdict.method == "unchecked":
                del self.done[lab, name]
                self.open[lab, name] = self.submitted((lab, name))
                self.do(e.TaskSubmitted(lab, self.open[lab, name]))

    # --- what always holds ------------------------------------------------------------------------------------------
    @invariant()
    def no_task_is_lost(self):
        leases, outcomes = self.grid.dispatcher.leases, self.grid.dispatcher.outcomes
        for lab, name in self.open:
            ticket = outcomes.labs[lab].tickets[name]
            life = ticket.life
            assert life.state == "open"
            assert life.wanted == 0 or ticket.queued
            replicas = {a.order.replica.name for a in life.attempts.values() if a.order and a.order.replica}
            alive = ticket.queued
            for attempt in life.attempts.values():
                if attempt.state in ("leased", "committed"):
                    assert leases.hands[attempt.name].worker.id == attempt.holder.worker
                    alive = True
                elif attempt.state == "checking" and attempt.name not in replicas:
                    running = [c for c, of in life.checks.items() if of is attempt]
                    assert running or ticket.checks[attempt.name].alive
                    assert all(c in leases.hands for c in running)
                    alive = True
            assert alive, life.attempts

    @invariant()
    def replicas_are_independent(self):
        for lab in self.grid.dispatcher.outcomes.labs.values():
            for ticket in lab.tickets.values():
                if ticket.life.policy.method == "replicate":
                    live = [
                        a.holder
                        for a in ticket.life.attempts.values()
                        if a.state in ("leased", "committed", "uploaded", "checking")
                    ]
                    assert len({h.owner for h in live}) == len({h.network for h in live}) == len(live)

    @invariant()
    def books_balance(self):
        dispatcher = self.grid.dispatcher
        leases = dispatcher.leases
        assert set(leases.pool.all) == set(self.workers)
        for worker in leases.pool.all.values():
            assert dispatcher.reputation.quota(worker.record, dispatcher.now) >= 0
            assert worker.used == sum(worker.hands.values()) >= 0
            assert len(worker.hands) <= worker.slots
            if worker.role == "volunteer":
                assert worker.used <= worker.offer
            for name in worker.hands:
                assert name in leases.hands or name in dispatcher.orphans
        open_here = [t for lab in dispatcher.outcomes.labs.values() for t in lab.tickets.values()]
        assert len(leases.tasks) == sum(t.queued for t in open_here)
        assert len(leases.checks) == sum(len(t.checks) for t in open_here)
        assert sum(dispatcher.outcomes.stages.values()) == len(open_here)
        assert dispatcher.outcomes.unchecked_count == sum(map(len, dispatcher.outcomes.unchecked.values()))
        accepted = dispatcher.outcomes.totals.tasks["accepted"]
        assert accepted >= 0
        assert sum(dispatcher.outcomes.totals.methods.values()) == accepted

    def nobody_idles(self):
        leases = self.grid.dispatcher.leases
        for ticket in [t for lab in self.grid.dispatcher.outcomes.labs.values() for t in lab.tickets.values()]:
            if ticket.queued:
                for worker in leases.pool.volunteers.values():
                    able = leases.free_slots(worker) > 0 and worker.free >= ticket.life.need
                    assert not able or not ticket.life.permits(worker.holder, leases.now), "idle beside a queued task"
            for attempt in ticket.checks:
                for worker in leases.pool.validators.values():
                    able = leases.free_slots(worker) > 0 and worker.lab in ("", ticket.lab)
                    others = len(leases.pool.validators) > 1
                    assert not able or others, f"idle beside the check of {attempt}"

    def teardown(self):
        """With honest volunteers of three owners and a validator, all that is open ends."""
        for number in range(3):
            self.join(f"honest {number}", "volunteer", f"honest {number}", f"honest {number}", 2)
        self.join("judge", "validator", "operator", "here", 8)
        for _ in range(400):
            if not self.open:
                break
            for d in list(self.hands.values()):
                if d.attempt not in self.hands:
                    continue
                del self.hands[d.attempt]
                if d.check is not None:
                    self.report(d, "accepted")
                elif d.worker in self.workers:
                    message = self.committed.setdefault(
                        d.attempt, m.Committed(d.attempt, (blob(f"right {d.task}"),), 1.0)
                    )
                    self.uploaded.add(d.attempt)
                    self.do(e.FromWorker(d.worker, message))
                    self.do(e.FromWorker(d.worker, m.Uploaded(d.attempt)))
            self.absorb(self.grid.wait(20.0))
            self.no_task_is_lost()
            self.books_balance()
        assert not self.open, [self.grid.dispatcher.outcomes.labs[lab].tickets[t].life.attempts for lab, t in self.open]


def _rest(d):
    return d.lab, d.task, d.attempt, d.program, d.inputs, d.peak, d.deadline, d.check


Grid.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
TestGrid = Grid.TestCase
