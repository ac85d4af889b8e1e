"""`GridLink`: the lab node's line to the gateway. It states what is wanted, for as long as it is wanted.

Outstanding tasks are the *desired state*: whenever a new session stands in the place of a forgotten one, they all are
submitted again. That is harmless, for the same task is the same name; what the ledger has is never submitted at all.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from goblin_dask import messages as m
from goblin_dask.digest import Digest, digest, task_digest
from goblin_dask.errors import ConnectionLost, GoblinError, StoreError, TooLarge, WireError
from goblin_dask.graphs import cost
from goblin_dask.graphs.check import specs
from goblin_dask.graphs.program import Program, encode
from goblin_dask.labnode.data import DataServer
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.buffers import nbytes
from goblin_dask.store.chunks import from_wire
from goblin_dask.store.ledger import Ledger
from goblin_dask.store.refs import ChunkRef
from goblin_dask.verify.check import is_heavy
from goblin_dask.verify.policy import UNCHECKED, demands_more
from goblin_dask.wire.client import ClientSession, dial
from goblin_dask.wire.process import trust, url_of
from goblin_dask.wire.session import PATH

logger = logging.getLogger(__name__)


class Prepared:
    """A program with all that a submission says of it, computed once."""

    __slots__ = ("catalogue", "digest", "encoded", "flops", "heavy", "outputs", "peak", "program")

    def __init__(self, program: Program):
        self.program = program
        self.encoded = encode(program)
        self.digest: Digest = digest(self.encoded)
        values = specs(program)
        self.outputs = tuple(values[output] for output in program.outputs)
        self.flops = cost.flops(program)
        self.peak = cost.peak(program)
        self.catalogue = program.catalogue
        self.heavy = is_heavy(program)


@dataclass(frozen=True, slots=True)
class Accepted:
    """A task that was computed on the grid, and verified."""

    outputs: tuple[ChunkRef, ...]
    verdict: m.Verdict
    reused: bool = False
    """It was in the ledger: nothing was computed."""
    task: Digest = ""
    """Its name."""


class NotOnGrid(GoblinError):
    """The grid will not compute this task; the laboratory runs it."""


@dataclass(slots=True)
class Order:
    """One job's wish for one task."""

    program: Prepared
    inputs: tuple[ChunkRef, ...]
    priority: tuple[int, ...]
    policy: m.Policy
    job: str
    on_state: Callable[[str], None] | None = None
    """Called with each `TaskProgress.state`."""
    on_reopened: Callable[[], None] | None = None
    """Called when the accepted, unchecked result is withdrawn later."""
    cold: bool = False
    """Nobody computes with its outputs."""


@dataclass(slots=True)
class _Outstanding:
    message: m.SubmitTask
    program: Prepared
    orders: dict[Future[Accepted], Order] = field(default_factory=dict)
    accepting: bool = False
    withdrawn: bool = False
    """The result that is being taken over was withdrawn meanwhile, and is not to be used."""
    again: m.TaskAccepted | None = None
    """What was accepted since, in its place."""


@dataclass(slots=True)
class _Unchecked:
    """A task that was accepted without a check; who uses its result is told when it is withdrawn."""

    message: m.SubmitTask
    program: Prepared
    notify: dict[str, Callable[[], None]]
    """By job."""


class GridLink:
    """Session with the gateway, and the tasks that are wanted from it. Lives on one loop; `submit` is thread-safe.

    Parameters
    ----------
    url : str
        ``goblin://host:port`` or ``goblins://host:port``.
    token : str
        What the gateway's operator gave to the laboratory.
    lab, key : str, bytes
        The laboratory's identity, and the key of its grants.
    data : DataServer
        Where blobs go and come.
    ledger : Ledger
        What was accepted before.
    blobs : BlobStore
        Where the ledger's outputs are, if they still are.
    on_offer : callable, optional
        Called with each `GridOffer`.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        lab: str,
        key: bytes,
        data: DataServer,
        ledger: Ledger,
        blobs: BlobStore,
        on_offer: Callable[[m.GridOffer], None] | None = None,
    ):
        self.url = url
        self.offer = m.GridOffer(0, 0)
        self._token = token
        self._lab, self._key = lab, key
        self._data, self._ledger, self._blobs = data, ledger, blobs
        self._on_offer = on_offer
        self._tasks: dict[Digest, _Outstanding] = {}
        self._unchecked: dict[Digest, _Unchecked] = {}
        self._defined: set[Digest] = set()
        self._session: ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._over: str | None = None

    @property
    def outstanding(self) -> int:
        """Tasks that are wanted and not there yet."""
        return len(self._tasks)

    @property
    def connected(self) -> bool:
        """Whether the gateway can be heard now."""
        return self._session is not None and self._session.connected.is_set()

    async def start(self) -> None:
        """Open the session.

        Raises
        ------
        InputError, ConnectionLost, Refused
            When that is no address, there is no gateway, or it does not want us.
        """
        self._loop = asyncio.get_running_loop()
        url = url_of(self.url)
        self._trust = trust(self.url)
        base = urlsplit(url)._replace(scheme="https" if url.startswith("wss") else "http").geturl()
        self._gateway = base.removesuffix(PATH)
        self._session = await dial(url, self, ssl=self._trust)

    async def close(self) -> None:
        """Leave; outstanding tasks fail."""
        if self._session is not None:
            await self._session.close("the lab node stops")
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # --- for jobs -----------------------------------------------------------------------------------------------

    def submit(self, order: Order) -> Future[Accepted]:
        """Want a task. From any thread. Cancelling the future withdraws the wish.

        The future's errors: `TooLarge`; `NotOnGrid`, then the laboratory is to run it; `ConnectionLost`.
        """
        assert self._loop is not None
        future: Future[Accepted] = Future()
        self._loop.call_soon_threadsafe(self._want, order, future)
        return future

    def settle(self, job: str) -> None:
        """Nobody is to be told any more that a result of this job is withdrawn. On the link's loop."""
        for name, kept in list(self._unchecked.items()):
            if kept.notify.pop(job, None) and not kept.notify:
                self._checked(name)
                if self._session is not None and not self._session.closed:
                    self._session.send(m.CancelTask(name))  # the gateway need not remember it either

    def _checked(self, name: Digest) -> None:
        """A result that was accepted unchecked was checked, or interests nobody any more."""
        if self._unchecked.pop(name, None) is not None and name not in self._tasks:
            self._data.forget(name)

    def _want(self, order: Order, future: Future[Accepted]) -> None:
        if future.cancelled():
            return
        if self._over is not None:
            future.set_exception(ConnectionLost(self._over))
            return
        name = task_digest(order.program.digest, (ref.digest for ref in order.inputs))
        task = self._tasks.get(name)
        if task is None:
            known = self._known(name, order.policy)
            if known is not None:
                if order.on_reopened is not None and name in self._unchecked:
                    self._unchecked[name].notify[order.job] = order.on_reopened
                _resolve(future, known)
                return
            task = self._tasks[name] = _Outstanding(
                m.SubmitTask(
                    name,
                    order.program.digest,
                    tuple(ref.wire() for ref in order.inputs),
                    order.program.outputs,
                    order.program.flops,
                    order.program.peak,
                    order.priority,
                    order.policy,
                    order.job,
                    order.program.heavy,
                ),
                order.program,
            )
            self._data.expect(task.message, order.inputs, cold=order.cold)
            self._send(task)
        task.orders[future] = order
        future.add_done_callback(functools.partial(self._settled, name))

    def _known(self, name: Digest, policy: m.Policy) -> Accepted | None:
        """What the ledger has, if its blobs are still there and it was verified as strictly as is asked now."""
        entry = self._ledger.lookup([name]).get(name)
        if entry is None or demands_more(policy, entry.verdict.method):
            return None
        if not all(ref.inline is not None or self._blobs.has(ref.digest) for ref in entry.outputs):
            return None
        return Accepted(tuple(map(from_wire, entry.outputs)), entry.verdict, reused=True, task=name)

    def _settled(self, name: Digest, future: Future[Accepted]) -> None:
        if future.cancelled():
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._unwanted, name, future)

    def _unwanted(self, name: Digest, future: Future[Accepted]) -> None:
        task = self._tasks.get(name)
        if task is not None and task.orders.pop(future, None) is not None and not task.orders and not task.accepting:
            self._abandon(name)

    def _send(self, task: _Outstanding) -> None:
        if self._session is None or self._session.closed:
            return
        if task.program.digest not in self._defined:
            self._defined.add(task.program.digest)
            self._session.send(m.DefineProgram(task.program.digest, task.program.encoded, task.program.catalogue))
        self._session.send(task.message)

    # --- of the session -----------------------------------------------------------------------------------------

    def hello(self) -> m.Hello:
        return m.Hello((m.PROTOCOL,), "lab", self._token)

    def opened(self, session: ClientSession) -> None:
        """The gateway knows nothing of us (any more): say who we are, and all that we want."""
        self._session = session
        self._defined.clear()
        session.send(m.LabReady(self._lab, self._key, self._data.local, self._data.direct))
        if self._tasks:
            logger.info("%d outstanding tasks are submitted to the gateway again", len(self._tasks))
        for task in self._tasks.values():
            self._send(task)

    def closed(self, session: ClientSession, reason: str) -> None:
        self._over = f"the gateway at {self.url} is gone for good: {reason}"
        for name in list(self._tasks):
            self._fail(name, ConnectionLost(self._over))

    def received(self, session: ClientSession, message: Any) -> None:
        match message:
            case m.TaskAccepted():
                self._accept(message)
            case m.TaskFailed():
                self._failed(message)
            case m.TaskProgress():
                self._progress(message)
            case m.TaskReopened():
                self._reopened(message.task)
            case m.GridOffer():
                self.offer = message
                if self._on_offer is not None:
                    self._on_offer(message)
            case m.DropUploads():
                self._data.drop(message.task, message.attempt)
            case m.RelayRequest():
                self._spawn(self._relay(message))
            case _:
                raise WireError(f"a {type(message).__name__} is nothing that a laboratory is sent")

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _progress(self, message: m.TaskProgress) -> None:
        task = self._tasks.get(message.task)
        for order in task.orders.values() if task is not None else ():
            if order.on_state is not None:
                order.on_state(message.state)

    def _failed(self, message: m.TaskFailed) -> None:
        error: GoblinError
        if message.kind == "too_large":
            error = TooLarge(message.needs, message.offers)
        else:
            error = NotOnGrid(f"{message.kind}: {message.reason}")
        self._fail(message.task, error)

    def _fail(self, name: Digest, error: GoblinError) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            self._data.forget(name)
            for future in task.orders:
                _resolve(future, error)

    def _accept(self, message: m.TaskAccepted) -> None:
        task = self._tasks.get(message.task)
        if task is None:
            return  # nobody wants it any more
        if task.accepting:
            if task.withdrawn:
                task.again = message
            return  # else a repetition
        if tuple(ref.spec for ref in message.outputs) != task.message.outputs:
            raise WireError(f"task {message.task} was accepted with outputs that its program does not have")
        inline = _inline(message.outputs)
        if inline is not None:
            self._finish(message, task, inline)
        else:
            task.accepting = True
            self._spawn(self._take_over(message, task))

    async def _take_over(self, message: m.TaskAccepted, task: _Outstanding) -> None:
        try:
            unchecked = message.verdict.method == UNCHECKED
            await asyncio.to_thread(self._data.accept, message.task, message.outputs, unchecked=unchecked)
        except (StoreError, OSError) as error:
            logger.exception("the accepted outputs of task %s cannot be kept", message.task)
            self._fail(message.task, NotOnGrid(f"its verified result could not be kept: {error}"))
        else:
            if task.withdrawn:
                self._go_on(message.task, task)
            else:
                self._finish(message, task, tuple(map(from_wire, message.outputs)))

    def _go_on(self, name: Digest, task: _Outstanding) -> None:
        """What was just taken over does not count: the task waits for the next result, or has it already."""
        again, task.again = task.again, None
        task.accepting = task.withdrawn = False
        if again is not None:
            self._accept(again)
        elif not task.orders:
            self._abandon(name)

    def _abandon(self, name: Digest) -> None:
        """Nobody wants the task any more."""
        del self._tasks[name]
        self._data.forget(name)
        if self._session is not None and not self._session.closed:
            self._session.send(m.CancelTask(name))

    async def _relay(self, request: m.RelayRequest) -> None:
        try:
            await self._data.relay(self._gateway, request, self._trust)
        except GoblinError as error:
            logger.warning("a blob did not get through the relay: %s", error)

    def _finish(self, message: m.TaskAccepted, task: _Outstanding, outputs: tuple[ChunkRef, ...]) -> None:
        name = message.task
        del self._tasks[name]
        self._ledger.record(name, message.outputs, message.verdict)
        notify = {order.job: order.on_reopened for order in task.orders.values() if order.on_reopened is not None}
        if message.verdict.method == UNCHECKED and notify:
            self._unchecked[name] = _Unchecked(task.message, task.program, notify)
        else:
            self._unchecked.pop(name, None)
            self._data.forget(name)
        accepted = Accepted(outputs, message.verdict, task=name)
        for future in task.orders:
            _resolve(future, accepted)

    def _reopened(self, name: Digest) -> None:
        """An unchecked result is withdrawn, for its volunteer was wrong elsewhere; the grid goes on with the task."""
        self._ledger.withdraw(name)
        task = self._tasks.get(name)
        if task is not None and task.accepting:
            task.withdrawn, task.again = True, None
            return
        kept = self._unchecked.pop(name, None)
        if kept is None:
            if name not in self._tasks and self._session is not None and not self._session.closed:
                self._session.send(m.CancelTask(name))
            return
        if name not in self._tasks:
            self._tasks[name] = _Outstanding(kept.message, kept.program)
        for notify in kept.notify.values():
            notify()


def _resolve(future: Future[Accepted], outcome: Accepted | Exception) -> None:
    """Give a future its outcome, unless it was cancelled in the meantime by another thread."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Accepted):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _inline(outputs: tuple[m.BlobRef, ...]) -> tuple[ChunkRef, ...] | None:
    """References to outputs that all came inside the message; None when some lie in the store.

    Raises
    ------
    WireError
        When bytes are not what their digest says.
    """
    if any(ref.inline is None for ref in outputs):
        return None
    for ref in outputs:
        if (
            ref.inline is None
            or not len(ref.inline) == ref.nbytes == nbytes(ref.spec)
            or digest(ref.inline) != ref.digest
        ):
            raise WireError(f"a blob in a message is not the one that its digest {ref.digest} names")
    return tuple(map(from_wire, outputs))
