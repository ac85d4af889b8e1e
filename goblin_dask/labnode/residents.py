"""Actors that researchers keep in the laboratory: state with one owner, which sessions and tasks of graphs call alike.

An actor is an instance of a researcher's class, held by a Dask actor on the lab's cluster. Its methods run one at a
time, in the order in which the calls come, on Dask's thread for actors; nothing is pickled within the process, so what
a method is given and what it returns are the very same objects on both sides: a method that goes on to change an array
returns a copy of it.

Who may call: the researcher, over HTTP (`goblin_dask.labnode.lab_actor`), and tasks of a graph that run in the
laboratory, by `resident` or an `ActorRef` among their arguments. While a graph is lowered nobody may: a function that
calls an actor is never recorded. A task may run more than once (when sampling has found a wrong result, the graph is
run again), and an actor that must take each contribution once numbers them.

How long they live: until they are released. An actor that nobody has called for `IDLE_SECONDS` is let go of, and when
there are `KEPT_ACTORS`, the next one takes the place of the one that was called longest ago. They do not outlive the
lab node, nor the Dask worker that holds them: calls raise `ActorLost` then.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from goblin_dask.errors import ActorLost, ConnectionLost, InputError, JobFailed, NotTraceable
from goblin_dask.labnode.cluster import ActorHandle, LabCluster

KEPT_ACTORS = 100
"""Actors that are kept at a time."""
IDLE_SECONDS = 24 * 3600.0
"""After this time without a call an actor is let go of: its researcher has gone."""


@dataclass(frozen=True)
class Outcome:
    """What a method returned, or raised. A value of its own, for errors of Dask's look the same as the method's."""

    value: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        """The value.

        Raises
        ------
        Exception
            What the method raised.
        """
        if self.error is not None:
            raise self.error
        return self.value


class Resident:
    """The Dask actor: holds a researcher's instance, and runs its methods."""

    def __init__(self) -> None:
        self._instance: Any = None

    def begin(self, kind: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
        """Make the instance."""
        outcome = _outcome(kind, args)
        self._instance = outcome.value
        return Outcome(error=outcome.error)

    def call(self, method: str, args: tuple[Any, ...]) -> Outcome:
        """Run a method."""
        return _outcome(lambda *args: getattr(self._instance, method)(*args), args)

    def end(self) -> None:
        """Let go of the instance."""
        self._instance = None


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    try:
        value = function(*args)
        if inspect.iscoroutine(value):
            value.close()
            raise InputError(f"{value.__qualname__} is a coroutine function: an actor's methods are plain functions")
        return Outcome(value)
    except Exception as error:
        return Outcome(error=error)
    except BaseException as error:  # SystemExit and its like would end the lab's event loop
        failure = JobFailed(f"a method of an actor raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        return Outcome(error=failure)


@dataclass
class _Kept:
    handle: ActorHandle
    kind: str
    name: str
    last: float
    """When it was called last."""
    busy: int = 0
    """Calls that are under way."""


class Residents:
    """The actors of one lab node. Calls come from any thread, the rest from the node's loop.

    Parameters
    ----------
    cluster : LabCluster
    clock : callable
        Gives seconds.
    """

    def __init__(self, cluster: LabCluster, clock: Callable[[], float] = time.monotonic):
        self._cluster, self._clock = cluster, clock
        self._kept: dict[str, _Kept] = {}
        self._lock = threading.Lock()

    async def start(self, kind: Callable[..., Any], args: tuple[Any, ...], name: str = "") -> Outcome:
        """Start an actor.

        Returns
        -------
        Outcome
            Its key, or what making the instance raised.
        """
        await self.sweep()
        while len(self._kept) >= KEPT_ACTORS:
            idle = [key for key, kept in list(self._kept.items()) if not kept.busy]
            if not idle:
                raise InputError(f"{KEPT_ACTORS} actors are busy here, and no more are kept: release() some")
            await self.release(min(idle, key=lambda key: self._kept[key].last))
        key = f"actor-{secrets.token_hex(8)}"
        handle = await self._cluster.actor(Resident, key=key)
        self._kept[key] = _Kept(handle, getattr(kind, "__qualname__", type(kind).__name__), name, self._clock())
        try:
            outcome = await self._ask(key, "begin", kind, args)
        except BaseException:
            await self.release(key)
            raise
        if outcome.error is not None:
            await self.release(key)
            return outcome
        return Outcome(key)

    async def call(self, key: str, method: str, args: tuple[Any, ...]) -> Outcome:
        """Call a method of an actor.

        Raises
        ------
        ActorLost
        """
        return await self._ask(key, "call", method, args)

    def call_from_thread(self, key: str, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of an actor from a thread that may wait; what it returns, or raises.

        Raises
        ------
        ActorLost
        """
        with self._lost_if_gone(key):
            outcome: Outcome = self._send(key, "call", method, args).result()
        return outcome.result()

    async def _ask(self, key: str, message: str, *args: Any) -> Outcome:
        with self._lost_if_gone(key):
            outcome: Outcome = await asyncio.wrap_future(self._send(key, message, *args))
        return outcome

    def _send(self, key: str, message: str, *args: Any) -> concurrent.futures.Future[Any]:
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                raise _lost(key)
            kept.busy += 1
        future = self._cluster.send(kept.handle, message, *args)
        future.add_done_callback(lambda _: self._called(kept))
        return future

    def _called(self, kept: _Kept) -> None:
        with self._lock:
            kept.busy -= 1
            kept.last = self._clock()

    @contextmanager
    def _lost_if_gone(self, key: str) -> Iterator[None]:
        try:
            yield
        except (ConnectionLost, concurrent.futures.CancelledError) as error:
            with self._lock:
                self._kept.pop(key, None)
            raise _lost(key) from error

    async def release(self, key: str) -> None:
        """Let go of an actor; whoever waits for a method of it is told that it is lost."""
        with self._lock:
            kept = self._kept.pop(key, None)
        if kept is not None:
            await self._cluster.release([kept.handle.future])

    async def sweep(self) -> None:
        """Let go of actors whose researchers have gone."""
        oldest = self._clock() - IDLE_SECONDS
        for key, kept in list(self._kept.items()):
            if not kept.busy and kept.last < oldest:
                await self.release(key)

    async def close(self) -> None:
        """Let go of all."""
        for key in list(self._kept):
            await self.release(key)

    def status(self) -> list[dict[str, Any]]:
        """Of each actor: its ``key``, ``kind``, ``name``, and the seconds since it was called, ``idle``."""
        now = self._clock()
        return [
            {"key": key, "kind": kept.kind, "name": kept.name, "idle": 0.0 if kept.busy else now - kept.last}
            for key, kept in list(self._kept.items())
        ]


def _lost(key: str) -> ActorLost:
    return ActorLost(
        f"there is no actor {key} in the laboratory any more: it was released, or the lab node or the worker that held "
        "it was restarted; start another, from your last checkpoint"
    )


# --- in tasks of graphs -----------------------------------------------------------------------------------------------
_here = threading.local()


@contextmanager
def reachable(residents: Residents | None) -> Iterator[None]:
    """While a task runs in the laboratory in this thread, it may call these actors."""
    _here.residents, _here.called = residents, False
    try:
        yield
    finally:
        _here.residents = None


def called_one() -> bool:
    """Whether the task of this thread has called an actor: then it must not be called a second time."""
    return getattr(_here, "called", False)


@dataclass(frozen=True)
class ActorRef:
    """An actor by its key: what a `LabActor` is where it was pickled, and so an argument for tasks of a graph."""

    key: str

    def call(self, method: str, *args: Any) -> Any:
        """Call a method, in a task that runs in the laboratory, and wait for what it returns.

        Raises
        ------
        ActorLost
            When it is not there any more.
        NotTraceable
            Elsewhere, and while a graph is lowered.
        Exception
            Whatever the method raises.
        """
        residents: Residents | None = getattr(_here, "residents", None)
        if residents is None:
            raise NotTraceable("it calls an actor, which only tasks can that run in the laboratory")
        _here.called = True
        return residents.call_from_thread(self.key, method, args)


class Proxy:
    """An actor, as a task in the laboratory sees it: its methods are the actor's, and wait for their results."""

    def __init__(self, ref: ActorRef):
        self._ref = ref

    def __repr__(self) -> str:
        return f"<Proxy {self._ref.key}>"

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: self._ref.call(method, *args)


def resident(actor: str | ActorRef) -> Proxy:
    """The actor of this key, for a task that runs in the laboratory.

    Raises
    ------
    NotTraceable
        Anywhere else: a function that asks for an actor is not recorded, and never called while a graph is lowered.
    """
    if getattr(_here, "residents", None) is None:
        raise NotTraceable("it calls an actor, which only tasks can that run in the laboratory")
    return Proxy(actor if isinstance(actor, ActorRef) else ActorRef(actor))
