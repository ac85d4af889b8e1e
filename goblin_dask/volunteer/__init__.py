"""The goblin plugin of a Dask worker: ``dask worker goblin://HOST:PORT --preload goblin_dask.volunteer``."""

from __future__ import annotations

from typing import Any

from goblin_dask.volunteer.dask_internals import listen_nowhere

listen_nowhere()  # when Dask calls `dask_setup` it would be too late

_installed: dict[int, Any] = {}


async def dask_setup(worker: Any) -> None:
    """Called by Dask in the worker's process before it connects."""
    from goblin_dask.errors import GoblinError
    from goblin_dask.volunteer.plugin import install

    try:
        _installed[id(worker)] = await install(worker)
    except GoblinError as error:
        # Dask logs what a preload raises and goes on without it; a worker that can do nothing must not join
        raise SystemExit(f"goblin: {error}") from error


async def dask_teardown(worker: Any) -> None:
    """Called by Dask when the worker closes."""
    from goblin_dask.volunteer.plugin import remove

    runner = _installed.pop(id(worker), None)
    if runner is not None:
        await remove(runner)
