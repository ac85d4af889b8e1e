"""`LabCluster`: the lab's own Dask cluster. Its scheduler, its workers and the uplink live in this process.

Scheduler, a worker for what runs in the laboratory, and the *uplink*, a worker with as many slots as tasks may wait for
the grid, share the event loop of one thread. Blobs and researchers are served on another, so thousands of waiting
coroutines keep nobody else waiting. A third thread for the uplink alone cost 2.8 ms instead of 2.1 ms a pair of tasks
(250 pairs, 2 busy cores, two runs): each message between two loops takes the interpreter's lock over.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import dask.config
from dask.highlevelgraph import HighLevelGraph
from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

from goblin_dask.errors import ConnectionLost
from goblin_dask.labnode.dask_internals import LabScheduler, LabWorker, current_client
from goblin_dask.verify.sampling import SampledRecheck

_SETTINGS = {
    "distributed.scheduler.work-stealing": False,  # every task is bound to its kind of worker
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.scheduler.allowed-failures": 3,
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.worker.memory.spill-compression": None,
    "distributed.admin.large-graph-warning-threshold": "1GB",
    "distributed.diagnostics.computations.nframes": 0,
}


T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it here."""
        return await asyncio.wrap_future(self.run(work))

    def stop(self) -> None:
        """Cancel what still runs there, and end the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


class ReleasePlugin(SchedulerPlugin):  # type: ignore[misc]
    """Tells which values Dask has let go of. Only the scheduler knows: a worker may drop a mere copy."""

    name = "goblin-release"

    def __init__(self, on_release: Callable[[str], None]):
        self._on_release = on_release

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if start == "memory" and finish in ("released", "forgotten", "erred"):  # erred: a lost actor
            self._on_release(key)


class CancelPlugin(WorkerPlugin):  # type: ignore[misc]
    """Tells which waiting coroutines Dask has given up. It does not do so itself."""

    name = "goblin-cancel"

    def __init__(self, on_cancel: Callable[[str], None]):
        self._on_cancel = on_cancel

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        if start == "executing" and finish in ("released", "cancelled", "resumed", "forgotten"):
            self._on_cancel(key)


@dataclass(frozen=True)
class ActorHandle:
    """A Dask actor, as whoever started it has it."""

    future: Any
    proxy: Any
    lost: asyncio.Future[None]
    """Done when the actor is not there any more."""


class LabCluster:
    """Scheduler, uplink and lab worker.

    Parameters
    ----------
    slots : int
        Tasks that may wait for the grid at a time.
    threads : int
        Tasks that run in the laboratory at a time.
    directory : Path
        For Dask's scratch files.
    on_release, on_cancel : callable
        Called with a key that Dask has let go of, or whose execution it has given up; on Dask's threads.
    """

    def __init__(
        self,
        *,
        slots: int,
        threads: int,
        directory: Path,
        on_release: Callable[[str], None],
        on_cancel: Callable[[str], None],
    ):
        self.slots, self.threads = slots, threads
        self._directory = directory
        self._on_release, self._on_cancel = on_release, on_cancel
        self._lost: dict[str, asyncio.Future[None]] = {}

    async def start(self) -> None:
        """Start all parts."""
        self._main = LoopThread("goblin-lab-dask")
        await self._main.ask(self._start())

    async def _start(self) -> None:
        with dask.config.set(_SETTINGS):
            self.scheduler = await LabScheduler(protocol="inproc://", dashboard=False)
            self.scheduler.add_plugin(ReleasePlugin(self._released))
            self.client = await Client(self.scheduler.address, asynchronous=True, set_as_default=False)
        self.worker = await self._worker("lab", self.threads, {"lab": self.threads})
        self.uplink = await self._worker("uplink", self.slots, {"uplink": self.slots}, CancelPlugin(self._on_cancel))

    async def _worker(self, name: str, nthreads: int, resources: dict[str, int], plugin: Any = None) -> Any:
        with dask.config.set(_SETTINGS):
            return await LabWorker(
                self.scheduler.address,
                name=name,
                nthreads=nthreads,
                resources=resources,
                memory_limit=0,
                local_directory=str(self._directory),
                plugins=(plugin,) if plugin is not None else (),
                dashboard=False,
            )

    async def close(self) -> None:
        """Stop all parts."""
        await self._main.ask(self._close())
        self._main.stop()

    async def _close(self) -> None:
        await self.client.close()
        await self.uplink.close(nanny=False)
        await self.worker.close(nanny=False)
        await self.scheduler.close()

    # --- for jobs -----------------------------------------------------------------------------------------------

    def priority_of(self, key: str) -> tuple[int, ...]:
        """Dask's priority of a task that waits on the uplink; smaller is sooner."""
        state = self.uplink.state.tasks.get(key)
        return tuple(int(number) for number in state.priority) if state is not None and state.priority else ()

    async def compute(self, graph: HighLevelGraph, keys: list[str], on_futures: Callable[[list[Any]], None]) -> Any:
        """Run a graph; the values of `keys`. From any loop."""
        return await self._main.ask(self._compute(graph, keys, on_futures))

    async def _compute(self, graph: HighLevelGraph, keys: list[str], on_futures: Callable[[list[Any]], None]) -> Any:
        with dask.config.set(_SETTINGS):
            futures = self.client.get(graph, keys, sync=False)
        on_futures(futures)
        # Cancelled, `gather` would leave what it waits with to log its errors; it ends when the futures are cancelled.
        gathering = asyncio.ensure_future(self.client.gather(futures))
        gathering.add_done_callback(lambda done: done.cancelled() or done.exception())
        return dict(zip(keys, await asyncio.shield(gathering), strict=True))

    async def sample(self, run: str, p: float, recheck: Callable[[str], Awaitable[bool]]) -> SampledRecheck:
        """Have a random share of a run's finished grid tasks verified once more."""

        async def start() -> SampledRecheck:
            plugin = SampledRecheck(p, random.SystemRandom(), lambda key, task: recheck(key))
            await plugin.start(self.scheduler)
            self.scheduler.add_plugin(plugin, name=f"goblin-sample-{run}")
            return plugin

        return await self._main.ask(start())

    async def settled(self, run: str, plugin: SampledRecheck) -> tuple[str, ...]:
        """Wait for what was drawn, end the sampling, and tell the keys whose results did not match."""
        try:
            return await self._main.ask(plugin.settled(run))
        finally:
            await self.stop_sampling(run, plugin)

    async def stop_sampling(self, run: str, plugin: SampledRecheck) -> None:
        """Nobody waits for what was drawn."""

        async def stop() -> None:
            plugin.forget(run)
            if f"goblin-sample-{run}" in self.scheduler.plugins:
                self.scheduler.remove_plugin(f"goblin-sample-{run}")

        await self._main.ask(stop())

    async def cancel(self, futures: Iterable[Any]) -> None:
        """Give up what was asked for."""

        async def cancel() -> None:
            await self.client.cancel(list(futures), force=True)

        await self._main.ask(cancel())

    async def release(self, futures: Iterable[Any]) -> None:
        """Let go of results."""

        async def release() -> None:
            for future in futures:
                future.release()

        await self._main.ask(release())

    async def actor(self, kind: type, *args: Any, key: str) -> ActorHandle:
        """Start a Dask actor on a lab worker; it lives as long as its handle's future."""

        async def start() -> ActorHandle:
            lost = self._lost[key] = asyncio.get_running_loop().create_future()
            future = self.client.submit(kind, *args, actor=True, key=key, pure=False, resources={"lab": 0})
            with current_client(self.client):
                return ActorHandle(future, await future, lost)

        return await self._main.ask(start())

    async def call(self, actor: ActorHandle, method: str, *args: Any) -> Any:
        """Send an actor a message and wait for its answer, as `send` does."""
        return await asyncio.wrap_future(self.send(actor, method, *args))

    def send(self, actor: ActorHandle, method: str, *args: Any) -> Future[Any]:
        """Send an actor a message; its answer. From any thread.

        Raises
        ------
        ConnectionLost
            By the future, when its worker was lost. Dask's own call would wait for ever.
        """

        async def send() -> Any:
            gone = ConnectionLost("the worker that held it is gone")
            if actor.lost.done():
                raise gone
            answer = asyncio.ensure_future(_answer(getattr(actor.proxy, method)(*args)))
            await asyncio.wait([answer, actor.lost], return_when=asyncio.FIRST_COMPLETED)
            if actor.lost.done() and (not answer.done() or answer.exception() is not None):
                answer.cancel()
                raise gone  # whatever Dask says of it
            return answer.result()

        # The context of a task's thread names its worker: there Dask's proxy would make a client of that worker's own.
        return contextvars.Context().run(self._main.run, send())

    def _released(self, key: str) -> None:
        lost = self._lost.pop(key, None)
        if lost is None:
            self._on_release(key)
        elif not lost.done():
            lost.set_result(None)


async def _answer(future: Any) -> Any:
    return await future
