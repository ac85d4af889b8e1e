"""What the lab node must know of how `distributed` works inside; written for distributed 2026.8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed import Client, Scheduler, Worker
from distributed.client import _current_client


class LabScheduler(Scheduler):  # type: ignore[misc]
    """A scheduler that nobody can reach but this process."""

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """None: what is not there need not be guarded, and jobs are watched through the lab node."""

    def _reschedule(self, key: Any, worker: str | None = None, *, stimulus_id: str) -> None:
        """As Dask's, which warns of every task that was cancelled while it waited for the grid."""
        if key in self.tasks:
            super()._reschedule(key, worker, stimulus_id=stimulus_id)


class LabWorker(Worker):  # type: ignore[misc]
    """A worker that nobody can reach but this process."""

    def start_http_server(self, *args: Any, **kwargs: Any) -> None:
        """None, as for the scheduler."""


@contextmanager
def current_client(client: Client) -> Iterator[None]:
    """Make a client the one that values received in this context belong to.

    As ``client.as_current()``, which also sets the scheduler of Dask's configuration. That is the whole process's: a
    researcher who computes in another thread at that moment would be told that there is no such scheduler.
    """
    token = _current_client.set(client)
    try:
        yield
    finally:
        _current_client.reset(token)
