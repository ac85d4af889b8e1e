"""`InProcessGrid`: gateway, lab node, validator and volunteers in this process, for tests that must be quick.

Everything is real but the processes: sockets on the loopback interface, sessions, grants, checks. What `LocalGrid` has
and this has not: several interpreters, memory of their own, and deaths.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import dask.config
import msgspec
from distributed import Worker, get_worker

from goblin_dask.gateway.accounts import create_token
from goblin_dask.gateway.server import Gateway
from goblin_dask.gateway.settings import GatewayConfig
from goblin_dask.labnode.client import Lab
from goblin_dask.labnode.cluster import LoopThread
from goblin_dask.labnode.node import LabNode
from goblin_dask.messages import Hello, Work
from goblin_dask.volunteer.plugin import install
from goblin_dask.volunteer.runner import Runner
from goblin_dask.wire.client import ClientSession, Owner
from goblin_dask.wire.process import introduce, introduced
from goblin_dask.wire.work import perform_with

_SETTINGS = {
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
}


class _WithToken:
    """An owner of a session who shows a token of its own: the configuration has one for the whole process."""

    def __init__(self, owner: Owner, token: str):
        self._owner, self._token = owner, token

    def hello(self) -> Hello:
        return msgspec.structs.replace(self._owner.hello(), token=self._token)

    def opened(self, session: ClientSession) -> None:
        self._owner.opened(session)

    def received(self, session: ClientSession, message: Any) -> Any:
        return self._owner.received(session, message)

    def closed(self, session: ClientSession, reason: str) -> None:
        self._owner.closed(session, reason)


class GridWorker(Worker):  # type: ignore[misc]
    """A worker with the goblin plugin, one of several in a process.

    Parameters
    ----------
    role : {"volunteer", "validator"}
    token : str
    tamper : callable, optional
        Called with the worker's `Runner` when it is made: tests make liars so.
    """

    def __init__(self, *args: Any, role: str, token: str, tamper: Callable[[Any], None] | None = None, **kwargs: Any):
        self._role, self._token, self._tamper = role, token, tamper
        self.runner: Runner | None = None
        super().__init__(*args, **kwargs)

    async def _register_with_scheduler(self) -> None:
        if self.runner is None:  # else it registers again
            await self._install()
        await super()._register_with_scheduler()
        introduce(None)  # one whose session has ended dials again while it closes, and must not do so as the last of us

    async def _install(self) -> None:
        with dask.config.set({"goblin.volunteer.role": self._role, "goblin.volunteer.directory": self.local_directory}):
            self.runner = await install(self)
        if self._tamper is not None:
            self._tamper(self.runner)
        owner = introduced()
        assert owner is not None
        introduce(_WithToken(owner, self._token))
        perform_with(_perform)

    async def close(self, *args: Any, **kwargs: Any) -> Any:
        if self.runner is not None:
            await self.runner.close()
        return await super().close(*args, **kwargs)


async def _perform(work: Work) -> None:
    worker = get_worker()
    assert isinstance(worker, GridWorker)
    if worker.runner is not None:
        await worker.runner.run(work)


_open: set[InProcessGrid] = set()
"""Grids of this process; while there is one, its workers do what `_perform` says."""


class InProcessGrid:
    """A whole grid in this process; a context manager.

    Parameters
    ----------
    volunteers, validators : int
    offload, verify, fuse : optional
        For everything that `lab` computes.
    memory : str
        Of each worker.
    directory : path, optional
        For blobs and ledger; a temporary one by default.
    gateway_config, lab_options : dict, optional
        More settings of `GatewayConfig` and `LabNode`.
    tamper : callable, optional
        Called with the number and the `Runner` of each volunteer.
    """

    def __init__(
        self,
        volunteers: int = 1,
        validators: int = 1,
        *,
        offload: str | None = "always",
        verify: str | None = None,
        fuse: bool = True,
        memory: str = "4GB",
        directory: Path | str | None = None,
        gateway_config: dict[str, Any] | None = None,
        lab_options: dict[str, Any] | None = None,
        tamper: Callable[[int, Any], None] | None = None,
    ):
        self._temporary = tempfile.TemporaryDirectory(prefix="goblin-inprocess-") if directory is None else None
        self.directory = Path(self._temporary.name if self._temporary is not None else directory or "")
        self._counts = volunteers, validators
        self._memory, self._tamper = memory, tamper
        self._gateway_config, self._lab_options = gateway_config or {}, lab_options or {}
        self.workers: list[GridWorker] = []
        self._grid_loop, self._lab_loop = LoopThread("goblin-grid"), LoopThread("goblin-lab")
        try:
            self.run(self._start_grid())
            self._lab_loop.run(self.node.start()).result()
            self.lab = Lab(self.node.url, self.node.token, offload=offload, verify=verify, fuse=fuse, progress=False)
            self.lab.wait_for(volunteers=volunteers, validators=validators)
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop of gateway, volunteers and validators."""
        return self._grid_loop.run(work).result()

    def run_in_lab(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the lab node's loop."""
        return self._lab_loop.run(work).result()

    def counts(self) -> dict[str, int]:
        """Tasks of all graphs so far that read an array: accepted from volunteers (``grid``), and all (``array``)."""
        origins = self.node.origins
        return {"grid": origins["grid"], "array": origins["grid"] + origins["lab"]}

    async def _start_grid(self) -> None:
        _open.add(self)
        self.gateway = Gateway(GatewayConfig(port=0, **self._gateway_config))
        await self.gateway.start()
        token = await create_token(self.gateway.database, "lab", "lab")
        self.node = LabNode(self.gateway.address, token, port=0, directory=self.directory / "lab", **self._lab_options)
        volunteers, validators = self._counts
        for number in range(validators):
            await self._add("validator", number)
        for number in range(volunteers):
            await self._add("volunteer", number)

    async def _add(self, role: str, number: int) -> None:
        token = await create_token(self.gateway.database, role, f"{role} {number}")
        tamper = self._tamper
        with dask.config.set(_SETTINGS):
            worker = GridWorker(
                f"{self.gateway.address}#{role}{number}",
                role=role,
                token=token,
                tamper=(lambda runner: tamper(number, runner)) if tamper and role == "volunteer" else None,
                nthreads=1,
                memory_limit=self._memory,
                local_directory=str(self.directory / f"{role}-{number}"),
                dashboard=False,
            )
            self.workers.append(await worker)

    def close(self) -> None:
        """Stop everything."""
        if hasattr(self, "lab"):
            self.lab.close()
        if hasattr(self, "node"):
            self._lab_loop.run(self.node.close()).result()
        self.run(self._stop_grid())
        self._lab_loop.stop()
        self._grid_loop.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    async def _stop_grid(self) -> None:
        await asyncio.gather(*(worker.close(nanny=False) for worker in self.workers))
        if hasattr(self, "gateway"):
            await self.gateway.stop()
        _open.discard(self)
        if not _open:
            perform_with(None)
        introduce(None)

    def __enter__(self) -> InProcessGrid:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
