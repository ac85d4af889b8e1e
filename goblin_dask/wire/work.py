"""The one function that a Dask task of the grid may call.

Gateway and worker both look it up here, by import, never by a name that came over the wire. What it does on a worker
is set by the goblin plugin (`perform_with`); a worker without the plugin can compute nothing at all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from goblin_dask.errors import GoblinError
from goblin_dask.messages import Work

Performer = Callable[[Work], Awaitable[None]]

_performer: Performer | None = None


def perform_with(performer: Performer | None) -> None:
    """Set what this process does with work that it is handed; None: nothing, it refuses."""
    global _performer
    _performer = performer


async def run_work(work: Work) -> None:
    """Do one lease or check. Its results travel as messages on the session's control channel, not as Dask results.

    Raises
    ------
    GoblinError
        When the worker was started without the goblin plugin.
    """
    if _performer is None:
        raise GoblinError("this worker has no goblin plugin: start it with `--preload goblin_dask.volunteer`")
    await _performer(work)
