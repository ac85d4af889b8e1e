"""What the lab node must know of how `distributed` works inside; written for distributed 2026.8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distributed import Client
from distributed.client import _current_client


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
