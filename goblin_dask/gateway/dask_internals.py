"""The embedded scheduler: every touch of distributed's internals by the gateway; checked against distributed 2026.8.0.

A task is put into the scheduler's state by hand instead of through `Scheduler.update_graph`: no graph, no client, no
annotations, one group for all (a group and prefix of its own for every key would stay in memory for ever).
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import dask
from distributed.scheduler import ClientState, TaskGroup, TaskPrefix, TaskState

from goblin_dask.errors import ConnectionLost
from goblin_dask.messages import Work
from goblin_dask.wire.dask_internals import GridScheduler, work_task

_GROUP = "attempts"
_SETTINGS: dict[str, Any] = {
    "distributed.scheduler.worker-ttl": None,  # sessions notice who is gone
    "distributed.scheduler.worker-saturation": "inf",
    "distributed.scheduler.preload": [],
    "distributed.scheduler.http.routes": [],
    "distributed.scheduler.work-stealing": False,  # every attempt is bound to its worker
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.admin.low-level-log-length": 100,
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.scheduler.validate": False,
}


class Grid(GridScheduler):
    """The gateway's scheduler: hands attempts to the workers that the dispatcher chose.

    Parameters
    ----------
    joined, left : callable
        Called with a worker's address once it may be given work, and once it is gone.
    failed : callable
        ``failed(address, attempt, text)``: the Dask task ended with an error, where otherwise a message on the session
        says how an attempt went.
    """

    def __init__(
        self,
        joined: Callable[[str], None],
        left: Callable[[str], None],
        failed: Callable[[str, str, str], None],
    ):
        self._joined, self._left, self._failed = joined, left, failed
        with dask.config.set(_SETTINGS):
            super().__init__()
        # Dask keeps this history for ever, one entry a join and a leave.
        self.total_nthreads_history: Any = deque([(time.time(), 0)], maxlen=100)
        self._dispatcher = self.clients["gateway"] = ClientState("gateway")
        self._order = itertools.count()

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """None: the gateway has its own pages, and Dask's show and do too much."""

    def log_event(self, topic: Any, msg: Any) -> None:
        """Nothing: Dask keeps events by worker for an hour, and nobody subscribes."""

    # --- work ---------------------------------------------------------------------------------------------------
    def dispatch(self, address: str, attempt: str, work: Work) -> None:
        """Hand one attempt to one worker.

        Raises
        ------
        ConnectionLost
            When that worker is not there.
        """
        if address not in self.workers:
            raise ConnectionLost(f"the worker at {address} left before {attempt} was handed to it")
        if attempt in self.tasks:
            raise ValueError(f"attempt {attempt} is under way already")
        group = self.task_groups.get(_GROUP)
        if group is None:
            prefix = self.task_prefixes.setdefault(_GROUP, TaskPrefix(_GROUP))
            group = self.task_groups[_GROUP] = TaskGroup(_GROUP, prefix)
        task = TaskState(attempt, work_task(attempt, work), "released", group, self.validate)
        task.worker_restrictions = {address}
        task.priority = (0, next(self._order))
        task.who_wants = {self._dispatcher}
        self._dispatcher.wants_what.add(task)
        self.tasks[attempt] = task
        self.transitions({attempt: "waiting"}, "dispatch")

    def cancel(self, attempt: str) -> None:
        """Take an attempt back; harmless when it has ended."""
        if attempt in self.tasks:
            self.client_releases_keys([attempt], "gateway", "cancel")

    def handle_task_finished(self, key: str, worker: str, stimulus_id: str, **msg: Any) -> None:
        super().handle_task_finished(key=key, worker=worker, stimulus_id=stimulus_id, **msg)
        self.cancel(key)  # its result is None; what counts came as a message

    def handle_task_erred(self, key: str, stimulus_id: str, **msg: Any) -> None:
        task = self.tasks.get(key)
        own = task is not None and task.processing_on is not None and task.processing_on.address == msg["worker"]
        self.cancel(key)
        if own:
            self._failed(msg["worker"], key, str(msg.get("exception_text", "")))

    def _reschedule(self, key: str, worker: str | None = None, *, stimulus_id: str) -> None:
        # Dask would hand it to the same worker again, as often as that one likes.
        task = self.tasks.get(key)
        if task is not None and task.processing_on is not None and task.processing_on.address == worker:
            self.cancel(key)
            self._failed(str(worker), key, "the worker put the attempt back")

    # --- workers ------------------------------------------------------------------------------------------------
    async def handle_worker(self, comm: Any, worker: str) -> None:
        # Soon, not now: the stream to the worker is started by what follows, before anything else runs.
        self.loop.add_callback(self._joined, worker)
        try:
            await super().handle_worker(comm, worker)
        finally:
            self._left(worker)

    async def remove_worker(self, address: str, **kwargs: Any) -> Any:
        # Dask would keep its attempts for it; the dispatcher gives them to somebody else under other names.
        ws = self.workers.get(address)
        if ws is not None:
            for task in [*ws.processing, *ws.has_what]:
                self.cancel(task.key)
        return await super().remove_worker(address, **kwargs)
