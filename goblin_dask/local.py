"""`LocalGrid`: every actor on this machine, each a process of its own. For trying things out, and for tests.

No process outlives the one that made the grid, however that one ends: each asks the kernel to be killed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dask.utils import parse_bytes

from goblin_dask.errors import ConnectionLost, InputError
from goblin_dask.gateway.accounts import create_token
from goblin_dask.gateway.database import Database
from goblin_dask.labnode.client import Lab

START_SECONDS = 60.0
STOP_SECONDS = 10.0

# PR_SET_PDEATHSIG survives exec; whether the parent died before it was set is looked at afterwards.
_BOUND = """
import ctypes, os, sys
ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Process:
    """One actor's process, with its log."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, environment: dict[str, str]):
        self.name, self.log = name, log
        self._arguments, self._environment = list(arguments), environment
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self, *, ready: bool = False) -> dict[str, str]:
        """Start it; with `ready`, wait until it says that it is up, and return what it says.

        Raises
        ------
        ConnectionLost
            When it ends, or is not up in time; with the end of its log.
        """
        command = [sys.executable, "-S", "-E", "-c", _BOUND, str(os.getpid()), *self._arguments]
        inner, outer = os.pipe() if ready else (-1, -1)
        if ready:
            command += ["--ready-fd", str(outer)]
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                pass_fds=(outer,) if ready else (),
                start_new_session=True,  # an interrupt at the terminal is for whoever made the grid
            )
        if not ready:
            return {}
        os.close(outer)
        with os.fdopen(inner) as file:
            heard, _, _ = select.select([file], [], [], START_SECONDS)
            line = file.readline() if heard else ""
        if not line:
            self.stop()
            raise ConnectionLost(f"{self.name} did not start; the end of its log {self.log}:\n{self.tail()}")
        answer: dict[str, str] = json.loads(line)
        return answer

    @property
    def running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def tail(self, count: int = 2000) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace").rstrip()
        return text if len(text) <= count else text[-count:].partition("\n")[2].strip()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, and wait for its end if that is what it means."""
        if self.running:
            assert self.popen is not None
            self.popen.send_signal(number)
            if number == signal.SIGKILL:
                self.popen.wait()

    def stop(self) -> None:
        """Ask it to end, and see to it that it does."""
        if self.running:
            assert self.popen is not None
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(STOP_SECONDS)
            self.kill()


class LocalGrid:
    """Gateway, lab node, validators and volunteers on this machine; a context manager.

    Its volunteers are owners of their own, and taken for independent of each other.

    Parameters
    ----------
    volunteers, validators : int
        How many processes of each.
    offload, verify, fuse, progress : optional
        As for `goblin_dask.Lab`, for everything that `lab` computes.
    threads_per_volunteer : int
    memory : str or int, optional
        What each volunteer offers, e.g. ``"2GB"``; by default what Dask gives a worker.
    directory : path, optional
        For logs, database, blobs and ledger; by default a temporary one, which goes with the grid.
    routes : {"auto", "direct", "relay"}
        ``direct``: no files are mapped, blobs go over HTTP; ``relay``: they go through the gateway.
    """

    def __init__(
        self,
        volunteers: int = 2,
        validators: int = 1,
        *,
        offload: str | None = "auto",
        verify: str | None = None,
        threads_per_volunteer: int = 1,
        memory: str | int | None = None,
        directory: Path | str | None = None,
        routes: str = "auto",
        fuse: bool = True,
        progress: bool | None = None,
    ):
        if volunteers < 0 or validators < 0:
            raise InputError(f"a grid of {volunteers} volunteers and {validators} validators; both must be at least 0")
        if memory is not None:
            memory = _bytes(memory)
        self._temporary = directory is None
        self.directory = Path(directory) if directory else Path(tempfile.mkdtemp(prefix="goblin-grid-"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self._counts = volunteers, validators
        self._threads, self._memory = threads_per_volunteer, memory
        self._routes = routes
        self._options: dict[str, Any] = {"offload": offload, "verify": verify, "fuse": fuse, "progress": progress}
        self.volunteers: list[Process] = []
        self.validators: list[Process] = []
        # The kernel kills children with the *thread* that made them, so that thread must live as long as the grid.
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="goblin-spawner")
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<LocalGrid {self.address}: {len(self.volunteers)} volunteers, {len(self.validators)} validators>"

    # --- life ---------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        self._database = f"sqlite:///{self.directory / 'gateway.sqlite'}"
        volunteers, validators = self._counts
        counts = {"lab": 1, "validator": validators, "volunteer": volunteers}
        self._tokens = asyncio_run(_make_tokens(self._database, counts))
        self.gateway = self._process("gateway", self._gateway_arguments(0))
        self.address = self._up(self.gateway)["address"]
        self._port = int(self.address.rpartition(":")[2])
        where = self._start_lab_node(0)
        self.lab = Lab(where["url"], where["token"], **self._options)
        for _ in range(validators):
            self.add_validator()
        for _ in range(volunteers):
            self.add_volunteer()
        self.wait(volunteers, validators)

    def _gateway_arguments(self, port: int) -> list[str]:
        arguments = ["-m", "goblin_dask.cli", "-v", "gateway", "run", "--port", str(port), "--database", self._database]
        return [*arguments, "--trust-owners"]

    def _start_lab_node(self, port: int) -> dict[str, str]:
        arguments = ["-m", "goblin_dask.cli", "-v", "lab", self.address, "--port", str(port)]
        arguments += ["--directory", str(self.directory / "lab")]
        self.lab_node = self._process("lab", arguments, token=self._tokens["lab"][0], routes=self._routes)
        return self._up(self.lab_node)

    def _process(self, name: str, arguments: Sequence[str], **settings: str) -> Process:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        names = {"token": "DASK_GOBLIN__TOKEN", "role": "DASK_GOBLIN__VOLUNTEER__ROLE"}
        environment |= {names[each]: value for each, value in settings.items() if each in names}
        if settings.get("routes", "auto") != "auto":
            environment["DASK_GOBLIN__LAB__ROUTES"] = settings["routes"]
        return Process(name, arguments, self.directory / f"{name}.log", environment)

    def _up(self, process: Process, *, ready: bool = True) -> dict[str, str]:
        return self._spawner.submit(process.start, ready=ready).result()

    def _worker(self, role: str, number: int, options: Sequence[str], address: str = "") -> Process:
        arguments = ["-m", "dask", "worker", address or self.address, "--preload", "goblin_dask.volunteer", *options]
        arguments += ["--no-nanny"]
        arguments += ["--nthreads", str(self._threads if role == "volunteer" else os.cpu_count() or 1)]
        arguments += ["--local-directory", str(self.directory / "scratch")]
        if self._memory is not None and role == "volunteer":
            arguments += ["--memory-limit", str(self._memory)]
        name = f"{role}-{number}"
        tokens = self._tokens[role]
        if number >= len(tokens):
            tokens += asyncio_run(_make_tokens(self._database, {role: 1}, first=number))[role]
        process = self._process(name, arguments, token=tokens[number], role=role)
        process._environment["DASK_GOBLIN__VOLUNTEER__DIRECTORY"] = str(self.directory / name)
        self._up(process, ready=False)
        return process

    def add_volunteer(self, *options: str, address: str = "") -> Process:
        """Start one more; `wait` waits until it has joined.

        Parameters
        ----------
        *options : str
            Further ones of ``dask worker``, such as another ``--preload``.
        address : str, optional
            What it dials instead of the gateway: a proxy.
        """
        self.volunteers.append(self._worker("volunteer", len(self.volunteers), options, address))
        return self.volunteers[-1]

    def add_validator(self, *options: str) -> Process:
        """Start one more."""
        self.validators.append(self._worker("validator", len(self.validators), options))
        return self.validators[-1]

    def wait(self, volunteers: int, validators: int = 0) -> None:
        """Wait until so many have joined.

        Raises
        ------
        ConnectionLost
            When one of the processes has ended instead; with the end of its log.
        """
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(self.lab.wait_for, volunteers=volunteers, validators=validators)
            begun = time.monotonic()
            while not joined.done():
                with contextlib.suppress(TimeoutError):
                    joined.result(0.5)
                ended = [process for process in (*self.validators, *self.volunteers) if not process.running]
                missing = len([p for p in self.volunteers if p.running]) < volunteers
                if (missing and ended) or time.monotonic() - begun > START_SECONDS:
                    self.lab_node.stop()  # which ends the waiting
                    process = ended[0] if ended else self.gateway
                    raise ConnectionLost(f"{process.name} did not join; the end of its log:\n{process.tail()}")
            joined.result()

    def close(self) -> None:
        """Stop everything; a temporary directory is removed."""
        if hasattr(self, "lab"):
            self.lab.close()
        processes = [*self.volunteers, *self.validators]
        processes += [getattr(self, name) for name in ("lab_node", "gateway") if hasattr(self, name)]
        for process in processes:
            if process.running:
                process.popen.terminate()  # type: ignore[union-attr]
        for process in processes:
            process.stop()
        self._spawner.shutdown()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> LocalGrid:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def processes(self) -> list[Process]:
        """All of them: gateway, lab node, validators, volunteers."""
        return [self.gateway, self.lab_node, *self.validators, *self.volunteers]

    # --- faults, for tests ----------------------------------------------------------------------------------------
    def kill_volunteer(self, number: int, signal_number: int = signal.SIGKILL) -> None:
        """End a volunteer at once, or send it another signal."""
        self.volunteers[number].kill(signal_number)

    def kill_validator(self, number: int = 0) -> None:
        """End a validator at once."""
        self.validators[number].kill()

    def kill_gateway(self) -> None:
        """End the gateway at once."""
        self.gateway.kill()

    def restart_gateway(self) -> None:
        """Start the gateway again, at the same address."""
        self.gateway = self._process("gateway", self._gateway_arguments(self._port))
        self._up(self.gateway)

    def kill_lab_node(self) -> None:
        """End the lab node at once."""
        self.lab_node.kill()

    def restart_lab_node(self) -> None:
        """Start the lab node again, at the same address, with what it has stored."""
        self._start_lab_node(int(self.lab.url.rpartition(":")[2]))


def _bytes(memory: str | int) -> int:
    try:
        return int(parse_bytes(memory))
    except ValueError as error:
        raise InputError(f"memory={memory!r}: a number of bytes is needed, such as 2GB") from error


async def _make_tokens(url: str, counts: Mapping[str, int], first: int = 0) -> dict[str, list[str]]:
    """Tokens for so many of each role; every volunteer is an owner of its own, numbered from `first`."""
    database = Database(url)
    await database.start()
    try:
        return {
            role: [
                await create_token(database, role, f"volunteer {first + n}" if role == "volunteer" else "laboratory")
                for n in range(count)
            ]
            for role, count in counts.items()
        }
    finally:
        await database.stop()


def asyncio_run(work: Any) -> Any:
    """Run a coroutine, also where an event loop runs already (in notebooks)."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
