"""Between Dask's messages and the structs of `goblin_dask.wire.schema`: `WorkerCodec`, `SchedulerCodec`.

Messages of the other side are not filtered but rebuilt. Neither class does any I/O.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from goblin_dask import messages as m
from goblin_dask.errors import GoblinError, WireError
from goblin_dask.messages import Message
from goblin_dask.wire.dask_internals import (
    failure,
    heartbeat_metrics,
    own_versions,
    remote_exception,
    work_of,
    work_task,
)
from goblin_dask.wire.schema import (
    ANSWERS,
    CALLS,
    DOWNS,
    UPS,
    Beat,
    CloseWorker,
    Compute,
    Done,
    Erred,
    Failed,
    Finished,
    FreeKeys,
    Hangup,
    Heartbeat,
    NannyStarted,
    NotRegistered,
    Register,
    Registered,
    RegisterNanny,
    Rescheduled,
    Retire,
    StatusIs,
    StatusShallBe,
    StreamEnds,
    Unregister,
)

MONTH = 30 * 86400.0
HEARTBEAT = 5.0
"""Seconds between a worker's heartbeats, which only bring figures: who is gone, sessions notice."""
HERE = "~here/"
"""Begins the address of a listener on which nothing listens; 32 hexadecimal characters follow."""


def alias() -> str:
    """New name for such a listener, known to a worker, its nanny and the gateway alone."""
    return secrets.token_hex(16)


def done() -> bytes:
    """The answer to a call that asks for nothing."""
    return m.encode(Done())


def missing() -> bytes:
    """The answer to a heartbeat of a worker that is not registered."""
    return m.encode(Beat("missing"))


UNSAID = frozenset(["keep-alive", "log-event", "release-worker-data"])
"""Stream messages of a worker that the gateway has no use for: sessions have keep-alives, attempts their verdicts."""

CALLS_BY_ROLE: dict[str, tuple[type, ...]] = {
    "volunteer": (Register, Heartbeat, Retire, Hangup),
    "validator": (Register, Heartbeat, Retire, Hangup),
    "nanny": (RegisterNanny, NannyStarted, Unregister, Hangup),
}


def _seconds(start: float, stop: float) -> float:
    spent = stop - start
    return spent if 0 <= spent <= MONTH else 0.0  # NaN compares false


def alias_of(address: object) -> str:
    """The alias within the address of a listener of this process, or of the nanny's worker."""
    text = str(address)
    match = re.fullmatch(r"goblins?://~here/([0-9a-f]{32})", text)
    if match is None:
        raise WireError(f"{text!r} is not the address of a worker of goblin://")
    return match[1]


class WorkerCodec:
    """What a worker or nanny says and hears on one comm."""

    def __init__(self) -> None:
        self.streaming = False
        self.greeting: bytes | None = None
        """The registration, with the worker's present status: what a gateway that forgot it is told first."""
        self.missing = False
        """Whether the gateway said that it does not know this worker: the comm is as good as closed."""
        self._register: Register
        self._awaits: str | None = None
        self._renewing = False
        self._done: set[str] = set()  # keys whose end was told, so that a new gateway need not know them

    def encode(self, message: Any) -> bytes | None:
        """Translate what Dask writes; None when there is nothing to say.

        Raises
        ------
        WireError
            When Dask wants to say what cannot be said.
        """
        if self.streaming:
            said = [up for item in message for up in self._up(item)]
            return m.encode(said) if said else None
        call = self._call(message)
        said_now = m.encode(call)
        if isinstance(call, Register):
            self.streaming = True
            self._register, self.greeting = call, said_now
        return said_now

    def _call(self, message: dict[str, Any]) -> Message:
        op = message.get("op")
        self._awaits = op
        match op:
            case "register-worker":
                return Register(alias_of(message["address"]), message["status"])
            case "heartbeat_worker":
                metrics = message["metrics"]
                return Heartbeat(int(metrics.get("memory", 0)), float(metrics.get("cpu", 0.0)))
            case "register_nanny":
                return RegisterNanny()
            case None if "status" in message:
                return NannyStarted(message["status"] == "ok")
            case "unregister":
                return Unregister(alias_of(message["address"]))
            case "retire_workers":
                return Retire()
            case "close":
                return Hangup()
        raise WireError(f"a worker of goblin:// does not call {op!r} of its scheduler")

    def _up(self, message: dict[str, Any]) -> list[Message]:
        op = message["op"]
        if op in UNSAID:
            return []
        match op:
            case "task-finished":
                self._done.add(message["key"])
                return [Finished(message["key"], message["run_id"], _spent(message))]
            case "task-erred":
                self._done.add(message["key"])
                text = str(message["exception_text"])
                kind = text.partition("(")[0][:256]
                return [Erred(message["key"], message["run_id"], kind, text[:4096], _spent(message))]
            case "reschedule":
                return [Rescheduled(message["key"])]
            case "worker-status-change":
                if message["status"] in ("running", "paused"):
                    self.greeting = m.encode(msgspec.structs.replace(self._register, status=message["status"]))
                return [StatusIs(message["status"])]
            case "close-stream":
                return [StreamEnds()]
        raise WireError(f"a worker of goblin:// does not tell its scheduler {op!r}")

    def decode(self, payload: bytes) -> Any:
        """What Dask shall read, or None when it is nothing for Dask.

        Raises
        ------
        WireError
            When the gateway said what it may not.
        """
        if self.streaming and self._awaits is None:
            return [message for down in m.decode(payload, DOWNS) for message in self._down(down)] or None
        answer = m.decode(payload, ANSWERS)
        awaits, self._awaits = self._awaits, None
        if self._renewing:
            self._renewing = False
            if not isinstance(answer, Registered):
                raise WireError(f"the gateway did not take this worker back: {answer}")
            # Nobody knows these keys any more; the worker may let go of them.
            done, self._done = sorted(self._done), set()
            return [_free(done)] if done else None
        return self._answer(answer, awaits)

    def renewed(self) -> None:
        """The registration goes to a gateway that did not know us."""
        self._renewing = True
        self._awaits = "register-worker"

    def _answer(self, answer: Any, awaits: str | None) -> Any:
        match awaits, answer:
            case _, Failed(text):
                return failure(text)
            case "register-worker", Registered(when, interval):
                return {"status": "OK", "time": when, "heartbeat-interval": interval, "worker-plugins": {}}
            case "register-worker", NotRegistered(reason):
                return {"status": "error", "message": reason, "time": time.time()}
            case "heartbeat_worker", Beat(status, when, interval):
                self.missing = status == "missing"
                return {"status": status, "time": when, "heartbeat-interval": min(max(interval, 0.1), 60.0)}
            case "register_nanny", Done():
                return {"status": "OK", "nanny-plugins": {}}
            case "unregister", Done():
                return "OK"
            case "retire_workers", Done():
                return {}
        raise WireError(f"the gateway answers {type(answer).__name__} to {awaits}")

    def _down(self, down: Any) -> list[dict[str, Any]]:
        match down:
            case Compute(run_id, priority, work):
                self._done.discard(work.attempt)
                return [
                    {
                        "op": "compute-task",
                        "key": work.attempt,
                        "run_id": run_id,
                        "priority": priority,
                        "who_has": {},
                        "nbytes": {},
                        "run_spec": work_task(work.attempt, work),
                        "resource_restrictions": {},
                        "actor": False,
                        "annotations": {},
                        "span_id": None,
                        "stimulus_id": f"compute-task-{time.time()}",
                    }
                ]
            case FreeKeys(keys):
                self._done.difference_update(keys)
                return [_free(keys)]
            case StatusShallBe(status):
                return [{"op": "worker-status-change", "status": status, "stimulus_id": f"status-{time.time()}"}]
            case CloseWorker(reason):
                return [{"op": "close", "reason": f"gateway: {reason}"}]
        return [{"op": "close-stream"}]


def _spent(message: Mapping[str, Any]) -> float:
    return sum(_seconds(s["start"], s["stop"]) for s in message["startstops"] if s["action"] == "compute")


def _free(keys: Any) -> dict[str, Any]:
    return {"op": "free-keys", "keys": list(keys), "stimulus_id": f"free-keys-{time.time()}"}


class SchedulerCodec:
    """What the gateway hears and says on one comm.

    Parameters
    ----------
    role : str
        Of the session.
    worker : dict
        What the gateway, and nobody else, says of this worker: ``address``, ``name``, ``nthreads``, ``memory_limit``,
        ``resources``.
    """

    def __init__(self, role: str, worker: Mapping[str, Any]):
        self.role = role
        self.worker = worker
        self.streaming = False
        self.keys: set[str] = set()
        """Given to this worker, and not yet ended or taken back."""
        self.unknown: list[str] = []
        """Ended, but not given to it by this gateway: to be freed."""
        self._asked: type | None = None

    def call(self, payload: bytes) -> Any:
        """One of `Call`, while the comm is not a stream.

        Raises
        ------
        WireError
            When the peer may not say that.
        """
        call = m.decode(payload, CALLS)
        if not isinstance(call, CALLS_BY_ROLE[self.role]):
            raise WireError(f"a {self.role} may not call {type(call).__name__}")
        if isinstance(call, NannyStarted) != (self._asked is RegisterNanny):
            raise WireError(f"{type(call).__name__} out of turn")
        self._asked = type(call)
        return call

    def for_scheduler(self, call: Any) -> dict[str, Any]:
        """The message that Dask's scheduler expects in the place of a call; nothing but numbers is the peer's."""
        worker = self.worker
        match call:
            case Register(_, status):
                self.streaming = True
                return {
                    "op": "register-worker",
                    "reply": False,
                    **worker,
                    "status": status,
                    "now": time.time(),
                    "local_directory": "",
                    "services": {},
                    "nanny": None,
                    "pid": 0,
                    "versions": own_versions(),
                    "metrics": heartbeat_metrics(0, 0.0),
                    "extra": {},
                    "stimulus_id": f"worker-connect-{time.time()}",
                    "server_id": worker["name"],
                }
            case Heartbeat(memory, cpu):
                metrics = heartbeat_metrics(min(max(memory, 0), 2**50), cpu if 0 <= cpu <= 1e6 else 0.0)
                return {
                    "op": "heartbeat_worker",
                    "address": worker["address"],
                    "now": time.time(),
                    "metrics": metrics,
                    "executing": {},
                    "extensions": {},
                }
            case RegisterNanny():
                return {"op": "register_nanny", "address": worker["address"]}
            case NannyStarted(ok):
                return {"status": "ok" if ok else "error"}
            case Hangup():
                return {"op": "close", "reply": False}
        raise GoblinError(f"{type(call).__name__} is nothing for the scheduler")

    def stream(self, payload: bytes) -> list[dict[str, Any]]:
        """Messages for the scheduler's stream handlers; fills `unknown`."""
        said = []
        for up in m.decode(payload, UPS):
            message = self._up(up)
            if message is not None:
                said.append(message)
        return said

    def _up(self, up: Any) -> dict[str, Any] | None:
        now = time.time()
        match up:
            case StatusIs(status):
                return {"op": "worker-status-change", "status": status, "stimulus_id": f"status-{now}"}
            case StreamEnds():
                return {"op": "close-stream"}
        if up.key not in self.keys:
            self.unknown.append(up.key)
            return None
        self.keys.discard(up.key)
        if isinstance(up, Rescheduled):
            return {"op": "reschedule", "key": up.key, "stimulus_id": f"reschedule-{now}"}
        seconds = _seconds(0.0, up.seconds)
        ended = {
            "key": up.key,
            "run_id": up.run_id,
            "thread": None,
            "startstops": [{"action": "compute", "start": now - seconds, "stop": now}],
            "stimulus_id": f"task-ended-{now}",
        }
        if isinstance(up, Finished):
            return {
                **ended,
                "op": "task-finished",
                "status": "OK",
                "nbytes": 16,  # of the None that work returns
                "type": b"",
                "typename": "NoneType",
                "metadata": {},
            }
        return {
            **ended,
            "op": "task-erred",
            "status": "error",
            "exception": remote_exception(up.kind, up.text),
            "traceback": None,
            "exception_text": up.text,
            "traceback_text": "",
        }

    def freed(self) -> bytes:
        """What to answer to `unknown`."""
        keys, self.unknown = tuple(self.unknown), []
        return m.encode([FreeKeys(keys)])

    def encode(self, message: Any) -> bytes | None:
        """Translate what the scheduler writes; None when the volunteer is not to hear of it.

        Raises
        ------
        GoblinError
            When the scheduler wants to say what volunteers are never told.
        """
        asked, self._asked = self._asked, None
        if asked is None:
            said = [down for item in message for down in self._down(item)]
            return m.encode(said) if said else None
        if isinstance(message, dict) and message.get("status") == "uncaught-error":
            return m.encode(Failed(str(message.get("exception_text", ""))[:4096]))
        if asked is Register:
            if message["status"] == "OK":
                return m.encode(Registered(message["time"], HEARTBEAT))
            return m.encode(NotRegistered(str(message.get("message", ""))[:4096]))
        if asked is Heartbeat:
            if message["status"] == "missing":
                return m.encode(Beat("missing"))
            return m.encode(Beat("OK", message["time"], HEARTBEAT))
        if asked is RegisterNanny:
            self._asked = RegisterNanny  # the nanny says next whether its worker started
            return m.encode(Done())
        if asked is NannyStarted:
            return None
        raise GoblinError(f"the scheduler answers {asked.__name__}, which asks for nothing")

    def _down(self, message: dict[str, Any]) -> list[Message]:
        match message["op"]:
            case "compute-task":
                work = work_of(message)
                self.keys.add(work.attempt)
                return [Compute(message["run_id"], tuple(message["priority"]), work)]
            case "free-keys" | "remove-replicas":
                self.keys.difference_update(message["keys"])
                return [FreeKeys(tuple(message["keys"]))]
            case "worker-status-change":
                return [StatusShallBe(message["status"])]
            case "remove-worker":
                return []  # volunteers know nothing of each other
            case "close" if message.get("reason") == "scheduler-close":
                return []  # they wait for the gateway to come back
            case "close":
                return [CloseWorker(str(message.get("reason", ""))[:4096])]
            case "close-stream":
                return [StreamEnds()]
        raise GoblinError(f"volunteers are never told {message['op']!r}")
