"""A grid without computers: drives a `Dispatcher` by hand and keeps what it instructed."""

from __future__ import annotations

import dataclasses
import random

from goblin_dask import messages as m
from goblin_dask.digest import digest
from goblin_dask.gateway import events as e
from goblin_dask.gateway.dispatcher import Dispatcher
from goblin_dask.gateway.limits import Limits

SPEC = m.ArraySpec((512, 512), "float32")
"""1 MiB: travels by the data path."""
SMALL = m.ArraySpec((4,), "float32")
PROGRAM = digest(b"program")
AUTO = m.Policy()
ENOUGH = 1000


def blob(name: str, spec: m.ArraySpec = SPEC) -> m.BlobRef:
    return m.BlobRef(digest(name.encode()), spec, 4 * spec.shape[0] * (spec.shape[1] if len(spec.shape) > 1 else 1))


def inline(data: bytes = bytes(16)) -> m.BlobRef:
    return m.BlobRef(digest(data), SMALL, 16, data)


def task(name, *, policy=AUTO, peak=10**8, priority=(), job="job", inputs=("a", "b"), flops=1e9, outputs=(SPEC,)):
    return m.SubmitTask(
        digest(f"task {name}".encode()), PROGRAM, tuple(blob(i) for i in inputs), outputs, flops, peak, priority,
        policy, job,
    )  # fmt: skip


class Simulated:
    """One dispatcher and its surroundings."""

    def __init__(self, *, seed: int = 0, limits: Limits | None = None, reputation=None, now: float = 1000.0):
        self.limits = limits or Limits()
        self.dispatcher = Dispatcher(self.limits, random.Random(seed), reputation, restarted=reputation is not None)
        self.now = now
        self.log: list[e.Instruction] = []

    def do(self, event) -> list[e.Instruction]:
        out = self.dispatcher.handle(event, self.now)
        self.log += out
        return out

    def wait(self, seconds: float) -> list[e.Instruction]:
        """Let time pass, ticking whenever the dispatcher asks for it."""
        out, end = [], self.now + seconds
        while (due := self.dispatcher.next_tick(self.now)) is not None and due <= end:
            self.now = max(self.now, due)
            out += self.do(e.Tick())
        self.now = end
        return out + self.do(e.Tick())

    def volunteer(self, name, *, owner=None, network=None, host=None, memory=8 * 10**9, slots=2, holding=(), **machine):
        return self.do(
            e.WorkerJoined(
                name, "volunteer", owner or f"owner-{name}", network or f"net-{name}",
                m.Machine(host or f"host-{name}", slots=slots, memory=memory, cache=10**9, flops=1e10, bandwidth=1e7,
                          **machine),
                tuple(holding),
            )
        )  # fmt: skip

    def validator(self, name="v", *, lab="", slots=4, holding=(), **machine):
        machine = m.Machine(f"host-{name}", slots=slots, memory=8 * 10**9, **machine)
        return self.do(e.WorkerJoined(name, "validator", "operator", "here", machine, tuple(holding), lab))

    def know(self, *names):
        """These volunteers have shown enough for ``sample`` to spare them."""
        for name in names:
            record = self.dispatcher.leases.pool.all[name].record
            record.accepted, record.flops = ENOUGH, 1e15

    def leave(self, name):
        return self.do(e.WorkerLeft(name))

    def lab(self, name="lab"):
        return self.do(e.LabJoined(name))

    def submit(self, one, lab="lab", needs=e.ANYBODY):
        return self.do(e.TaskSubmitted(lab, one, needs))

    def commit(self, d: e.Dispatch, outputs=None, *, worker=None, uploaded=False, held=()):
        outputs = (blob(f"out {d.task}"),) if outputs is None else outputs
        message = m.Committed(d.attempt, outputs, 1.0, 1.0, 100, held, uploaded)
        return self.do(e.FromWorker(worker or d.worker, message))

    def upload(self, d: e.Dispatch, *, worker=None):
        return self.do(e.FromWorker(worker or d.worker, m.Uploaded(d.attempt, 0.1, 100)))

    def fail(self, d: e.Dispatch, kind="compute", *, needs=0, offers=0, reason="it did not work"):
        return self.do(e.FromWorker(d.worker, m.AttemptFailed(d.attempt, kind, reason, needs, offers)))

    def hand_in(self, d: e.Dispatch, outputs=None):
        return self.commit(d, outputs) + self.upload(d)

    def report(self, d: e.Dispatch, verdict="accepted", *, worker=None, **what):
        what.setdefault("method", {"auto": "algebraic", "compare": "replicate"}.get(d.check.method, d.check.method))
        if verdict == "accepted":
            what.setdefault("ratio", 0.5)
        elif verdict == "wrong":
            what.setdefault("ratio", 50.0)
        report = m.CheckReport(verdict, seconds=0.1, miss=1e-6, **what)
        return self.do(e.FromWorker(worker or d.worker, m.Checked(d.attempt, report)))


def leases(out):
    return [i for i in out if isinstance(i, e.Dispatch) and i.check is None]


def checks(out):
    return [i for i in out if isinstance(i, e.Dispatch) and i.check is not None]


def told(out, kind):
    return [i.message for i in out if isinstance(i, e.ToLab) and isinstance(i.message, kind)]


def withdrawn(out):
    return [(i.worker, i.attempt) for i in out if isinstance(i, e.Withdraw)]


def records(out, kind):
    return [i for i in out if isinstance(i, e.Record) and i.kind == kind]


def only(items):
    assert len(items) == 1, items
    return items[0]


replace = dataclasses.replace
