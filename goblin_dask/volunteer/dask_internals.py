"""Every touch of distributed's internals that the plugin needs; checked against distributed 2026.8.0."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import psutil
from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

logger = logging.getLogger(__name__)


PRELOAD = "goblin_dask.volunteer"


def listen_nowhere() -> None:
    """Have workers that preload the plugin start no HTTP server; Dask does so before it calls the plugin.

    It would listen on all interfaces, with ``--no-dashboard`` too.
    """
    start = Worker.start_http_server

    @functools.wraps(start)
    def start_http_server(self: Worker, *args: Any, **kwargs: Any) -> None:
        if any(getattr(preload.module, "__name__", "") == PRELOAD for preload in self.preloads):
            self._dashboard = False  # there is nothing that it could be shown on
        else:
            start(self, *args, **kwargs)

    Worker.start_http_server = start_http_server


def close_ports(worker: Worker) -> None:
    """Stop the HTTP server of a worker that became a volunteer in another way."""
    server = getattr(worker, "http_server", None)
    if server is not None:
        server.stop()
        worker.services.pop("dashboard", None)


def lent(worker: Worker) -> tuple[int, int]:
    """Threads and bytes that the worker was started with: ``--nthreads``, ``--memory-limit``."""
    memory = worker.memory_manager.memory_limit or psutil.virtual_memory().total // 2
    return worker.state.nthreads, int(memory)


def be_quiet(worker: Worker) -> None:
    """Leave out what Dask looks at many times a second; a machine that is lent shall not work for nothing.

    The memory monitor would also pause the worker, for ever, for memory that it does not have: it goes by the resident
    set, in which the laboratory's files that are mapped here count, though they are the page cache's. What a task may
    take is compared with what is free before it begins (`Runner`). Profiles are of Dask's threads, which do nothing.
    """
    for name in ("memory_monitor", "profile", "profile-cycle"):
        worker.periodic_callbacks.pop(name, None)
    worker.periodic_callbacks["tick"].callback_time = 500  # milliseconds
    worker.periodic_callbacks["monitor"].callback_time = 5000


def set_slots(worker: Worker, slots: int) -> None:
    """Let the worker hold this many attempts at a time; they are coroutines, and compute in the runner's threads."""
    worker.state.nthreads = slots


def gateway_address(worker: Worker) -> str:
    """The address that the worker was started with."""
    return str(worker.scheduler.address)


class Withdrawals(WorkerPlugin):  # type: ignore[misc]
    """Tells when Dask takes back a task that runs: Dask itself lets a coroutine run on, unseen.

    Parameters
    ----------
    abandon : callable
        Called with the task's key.
    """

    name = "goblin-withdrawals"

    def __init__(self, abandon: Callable[[str], None]):
        self._abandon = abandon

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Called by the worker at every transition of a task."""
        if start in ("executing", "long-running") and finish in ("released", "forgotten", "cancelled", "error"):
            self._abandon(str(key))


async def add_withdrawals(worker: Worker, abandon: Callable[[str], None]) -> None:
    """Have `abandon` called for attempts that Dask takes back."""
    await worker.plugin_add(plugin=Withdrawals(abandon), name=Withdrawals.name, catch_errors=False)
