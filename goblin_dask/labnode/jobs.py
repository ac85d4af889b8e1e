"""Jobs as the lab node has them: from a pickled graph to references to its results."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from distributed.client import FutureCancelledError

from goblin_dask import messages as m
from goblin_dask.digest import Digest
from goblin_dask.errors import ConnectionLost, GoblinError, InputError, JobCancelled, JobFailed
from goblin_dask.labnode.actors import Happening, InLab, JobActor, Moved, OnGrid
from goblin_dask.labnode.assemble import Stored
from goblin_dask.labnode.cluster import LabCluster
from goblin_dask.labnode.execute import Run
from goblin_dask.labnode.plan import Declared, Key, Plan
from goblin_dask.labnode.uplink import Accepted
from goblin_dask.store.refs import ChunkRef

logger = logging.getLogger(__name__)

State = Literal["lowering", "running", "storing", "done", "failed", "cancelled"]
REPORT_SECONDS = 0.1
"""Least time between two messages to a job's actor."""

ACTORS = 10
"""How often the actor of one job is made again before the job is given up."""

FINAL = ("done", "failed", "cancelled")


@dataclass(frozen=True)
class Target:
    """A Zarr array that is to be written."""

    store: Any
    """Path, URL or Zarr store."""
    path: str
    """The array's name therein."""
    keys: Any
    """Nested lists of the keys of its blocks."""
    chunks: tuple[tuple[int, ...], ...]
    """As Dask writes them: lengths along each axis."""
    dtype: str
    overwrite: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Submission:
    """What a researcher sends to the own lab node, pickled."""

    graph: Any
    """As Dask hands it to a scheduler: an expression, a high-level graph or a dict."""
    keys: Any
    verify: str | m.Policy | None = None
    offload: str | None = None
    target: Target | None = None
    declared: tuple[Declared, ...] = ()
    """What the arrays that are wanted say of their blocks; blocks unlike that are refused."""
    fuse: bool = True
    """Whether tasks may be joined into larger ones; without, each is verified on its own."""
    name: str = ""
    """For the researcher's eyes; it never leaves the laboratory."""


@dataclass(frozen=True)
class Result:
    """What a job came to."""

    keys: Any
    """As they were asked for."""
    request_keys: tuple[Key, ...]
    values: dict[Key, Stored]
    assemble: Callable[[Any], Any]
    """`goblin_dask.graphs.capture.dask_internals.Request.assemble`."""
    certificate: dict[str, Any]
    """How every part was verified."""


class Job:
    """One job. Lives on the node's loop; `Run` reports from any thread.

    Parameters
    ----------
    submission : Submission
    loop : asyncio.AbstractEventLoop
        The node's.
    waits : callable, optional
        What tasks in these states wait for that is not there.
    """

    def __init__(
        self,
        submission: Submission,
        loop: asyncio.AbstractEventLoop,
        waits: Callable[[dict[str, int]], dict[str, int]] = lambda states: {},
    ):
        self.id = secrets.token_hex(8)
        self.submission = submission
        self.name = submission.name or self.id
        self.state: State = "lowering"
        self.error: BaseException | None = None
        self.result: Result | None = None
        self.progress: dict[str, Any] = {"total": 0, "done": 0}
        self.certificate: dict[str, Any] = {}
        self.started = time.time()
        self.seconds = 0.0
        self.finished = asyncio.Event()
        self.run: Run | None = None
        self.plan: Plan | None = None
        self.futures: list[Any] = []
        self.task: asyncio.Task[None] | None = None
        self._loop = loop
        self._waits = waits
        self._happenings: list[Happening] = []
        self._woken = False
        self._stirred = asyncio.Event()
        self._listeners: set[asyncio.Queue[dict[str, Any]]] = set()
        self._accepted: dict[str, tuple[Digest, int]] = {}
        self._lab: dict[str, InLab] = {}
        self._ending = asyncio.Event()
        self._reporter: asyncio.Task[None] | None = None

    # --- what is known of it ------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """For the researcher, as JSON; among the reasons of its progress is what it waits for."""
        progress = self.progress
        if self.state == "running" and (found := self._waits(progress.get("states", {}))):
            progress = {**progress, "reasons": {**progress.get("reasons", {}), **found}}
        return {
            "id": self.id,
            "name": self.name,
            "state": self.state,
            "seconds": self.seconds or time.time() - self.started,
            "error": str(self.error) if self.error is not None else "",
            "progress": progress,
        }

    def listen(self) -> asyncio.Queue[dict[str, Any]]:
        """A queue of its events from now on; the first one is its status."""
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        queue.put_nowait(self.status())
        self._listeners.add(queue)
        return queue

    def unlisten(self, queue: asyncio.Queue[dict[str, Any]]) -> None:
        self._listeners.discard(queue)

    def announce(self) -> None:
        """Tell all listeners how it stands."""
        for queue in self._listeners:
            queue.put_nowait(self.status())

    def become(self, state: State) -> None:
        """Enter a state."""
        self.state = state
        if state in FINAL:
            self.seconds = time.time() - self.started
            self.finished.set()
        self.announce()

    def refs(self) -> dict[Digest, ChunkRef]:
        """All arrays of its result."""
        values = self.result.values.values() if self.result is not None else ()
        return {ref.digest: ref for value in values for ref in value.refs}

    # --- `Observer` of its run, from any thread -------------------------------------------------------------------

    def grid_state(self, key: str, state: str) -> None:
        self._tell(Moved(key, state))

    def grid_done(self, key: str, accepted: Accepted, origins: int) -> bool:
        """Whether it is the first time: one that was sampled is done twice."""
        first = key not in self._accepted
        self._accepted[key] = (accepted.task, origins)
        self._tell(OnGrid(key, accepted.verdict, origins, accepted.reused))
        return first

    def lab_done(self, key: str, kind: str, reason: str, origins: int) -> None:
        happening = self._lab[key] = InLab(key, kind, reason, origins)
        self._tell(happening)

    def _tell(self, happening: Happening) -> None:
        self._happenings.append(happening)
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._stirred.set)

    # --- its actor --------------------------------------------------------------------------------------------------

    def report_to_actor(
        self, cluster: LabCluster, total: int, policy: str, known: Callable[[dict[str, tuple[Digest, int]]], Any]
    ) -> None:
        """Start its actor and keep it informed; begin anew from what is known when it is lost."""
        self._reporter = asyncio.create_task(self._report(cluster, total, policy, known))

    async def _report(
        self, cluster: LabCluster, total: int, policy: str, known: Callable[..., list[Happening]]
    ) -> None:
        actor = None
        attempt = 0
        try:
            while True:
                self._woken = False
                batch, self._happenings = self._happenings, []
                try:
                    if actor is None:
                        attempt += 1
                        history = [] if attempt == 1 else [*known(self._accepted), *self._lab.values()]
                        key = f"job-{self.id}-{attempt}"
                        actor = await cluster.actor(JobActor, total, [*history, *batch], policy, key=key)
                        self.progress = await cluster.call(actor, "progress")
                    elif batch:
                        self.progress = await cluster.call(actor, "report", batch)
                    if self._ending.is_set() and not self._happenings:
                        self.certificate = await cluster.call(actor, "certificate")
                        return
                except ConnectionLost as error:
                    if attempt == ACTORS:
                        raise
                    logger.warning("job %s: its actor was lost (%s), it is rebuilt from the ledger", self.id, error)
                    actor = None
                    continue
                self.announce()
                if not self._ending.is_set():
                    await self._stirred.wait()
                    self._stirred.clear()
                    # gathers what happens meanwhile into one message: progress is for eyes
                    await _first(self._ending.wait(), REPORT_SECONDS)
        finally:
            if actor is not None:
                await cluster.release([actor.future])

    async def stop_reporting(self) -> None:
        """Its progress interests nobody any more."""
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.wait([self._reporter])

    async def last_report(self) -> None:
        """Wait until the actor knows everything, and take its certificate."""
        if self._reporter is not None:
            self._ending.set()
            self._stirred.set()
            await self._reporter


async def _first(event: Coroutine[Any, Any, Any], seconds: float) -> None:
    task = asyncio.ensure_future(event)
    try:
        await asyncio.wait([task], timeout=seconds)
    finally:
        task.cancel()


def check_target(target: Target) -> None:
    """Check that a target can be written block by block.

    Raises
    ------
    InputError
        For blocks of unknown or irregular size.
    """
    for axis, lengths in enumerate(target.chunks):
        if any(length != length for length in lengths):
            raise InputError(
                f"to_zarr: the blocks along axis {axis} have unknown lengths; call compute_chunk_sizes() first"
            )
        if len(set(lengths[:-1])) > 1 or (len(lengths) > 1 and lengths[-1] > lengths[0]):
            raise InputError(f"to_zarr: the blocks along axis {axis} are {lengths}; rechunk to equal ones first")


def translate(error: BaseException, job: Job) -> BaseException:
    """The error that a researcher is to see: the function's own where one failed, with the job in its cause."""
    if isinstance(error, asyncio.CancelledError | FutureCancelledError):
        return JobCancelled(f"job {job.name} was cancelled")
    if isinstance(error, GoblinError):
        return error
    if error.__cause__ is None:
        error.__cause__ = JobFailed(f"job {job.name}: a task that ran in the laboratory raised {type(error).__name__}")
    return error
