"""Every touch of distributed's internals that the border needs; checked against distributed 2026.8.0.

The rest of `goblin_dask.wire` uses `distributed.comm`'s public classes only.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any, NoReturn

import dask.config
from dask._task_spec import Task
from distributed.nanny import Nanny
from distributed.protocol.serialize import Serialize, ToPickle
from distributed.scheduler import Scheduler
from distributed.versions import get_versions
from distributed.worker import Worker

from goblin_dask.errors import GoblinError
from goblin_dask.messages import Check, Lease, Work
from goblin_dask.wire.work import run_work

logger = logging.getLogger(__name__)


# --- tasks ---------------------------------------------------------------------------------------------------------
def work_task(attempt: str, work: Work) -> Any:
    """The Dask task that does some work, as gateway and worker build it, each for itself."""
    return Task(attempt, run_work, work)


def work_of(message: dict[str, Any]) -> Work:
    """The work within a scheduler's ``compute-task``.

    Raises
    ------
    GoblinError
        When the task is anything but `run_work` of one lease or check whose attempt is the key.
    """
    spec = message["run_spec"]
    task = spec.data if isinstance(spec, ToPickle) else spec
    if not isinstance(task, Task) or task.func is not run_work or len(task.args) != 1 or task.kwargs:
        raise GoblinError(f"volunteers are handed run_work of one Lease or Check, not {task!r:.200}")
    work = task.args[0]
    if not isinstance(work, Lease | Check) or work.attempt != message["key"] or message["who_has"] or message["actor"]:
        raise GoblinError(
            f"task {message['key']!r} is not the attempt of its work, has inputs of Dask's or is an actor"
        )
    return work


def failure(text: str) -> dict[str, Any]:
    """Dask's answer to a call that failed."""
    error = GoblinError(f"the gateway says: {text}")
    return {
        "status": "uncaught-error",
        "exception": error,
        "traceback": None,
        "exception_text": repr(error),
        "traceback_text": "",
    }


def remote_exception(kind: str, text: str) -> Any:
    """What the scheduler keeps as the exception of a task that failed on a volunteer: our own, with its words."""
    return Serialize(GoblinError(f"on a volunteer: {kind}: {text}"))


def heartbeat_metrics(memory: int, cpu: float) -> dict[str, Any]:
    """The metrics that a scheduler expects from a worker, with the two numbers that a volunteer may give."""
    return {
        "cpu": cpu,
        "memory": memory,
        "time": time.time(),
        "managed_bytes": 0,
        "spilled_bytes": {"memory": 0, "disk": 0},
        "task_counts": {},
        "bandwidth": {"total": 100e6, "workers": {}, "types": {}},
        "transfer": {
            "incoming_bytes": 0,
            "incoming_count": 0,
            "incoming_count_total": 0,
            "outgoing_bytes": 0,
            "outgoing_count": 0,
            "outgoing_count_total": 0,
        },
        "event_loop_interval": 0.02,
        "host_net_io": {"read_bps": 0.0, "write_bps": 0.0},
        "host_disk_io": {"read_bps": 0.0, "write_bps": 0.0},
        "num_fds": 0,
        "digests_total_since_heartbeat": {},
    }


@functools.cache
def own_versions() -> dict[str, Any]:
    """What stands for every worker's versions in Dask's displays; a volunteer's own are in its `Machine`."""
    return dict(get_versions())


# --- who this process is -------------------------------------------------------------------------------------------
def is_nanny() -> bool:
    """Whether this process runs a nanny and no worker of its own."""
    return bool(len(Nanny._instances)) and not len(Worker._instances)


# --- the scheduler -------------------------------------------------------------------------------------------------
DIALLING = (
    "scatter",
    "gather",
    "broadcast",
    "proxy",
    "call_stack",
    "profile",
    "performance_report",
    "worker_logs",
    "rebalance",
    "replicate",
    "run_function",
    "restart",
    "restart_workers",
    "retire_workers",
    "workers_to_close",
    "adaptive_target",
    "benchmark_hardware",
    "register_scheduler_plugin",
    "unregister_scheduler_plugin",
    "register_worker_plugin",
    "unregister_worker_plugin",
    "register_nanny_plugin",
    "unregister_nanny_plugin",
    "dump_cluster_state_to_url",
    "get_cluster_state",
)
"""Handlers that dial workers, run code that was sent, or would move data between volunteers."""


class GridScheduler(Scheduler):  # type: ignore[misc]
    """A Dask scheduler whose workers are strangers.

    It dials no worker, runs no code that it is sent, moves no data between workers, steals nothing, and does not tell
    every worker when one leaves (26-98 ms of its loop each time, with 1,000-5,000 workers). It listens in the process
    only; the gateway's sessions are handed to `handle_comm`.
    """

    def __init__(self, **kwargs: Any):
        options = {"protocol": "inproc", "host": "", "dashboard": False, "dashboard_address": "127.0.0.1:0"}
        # Dask keeps the events of a worker that left, and a timer for them, an hour: too much where many come and go.
        dask.config.set({"distributed.scheduler.events-cleanup-delay": "1s"})
        super().__init__(extensions={}, **{**options, **kwargs})
        for name in DIALLING:
            self.handlers.pop(name, None)
        self.rpc.connect = self._dials_nobody

    async def _dials_nobody(self, addr: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise GoblinError(f"the gateway dials no worker, {addr} neither")

    def worker_send(self, worker: str, msg: dict[str, Any]) -> None:
        if msg["op"] != "remove-worker":
            super().worker_send(worker, msg)

    async def check_worker_ttl(self) -> None:
        """Nothing: sessions notice who is gone, and Dask's way out is to restart it through its nanny."""
