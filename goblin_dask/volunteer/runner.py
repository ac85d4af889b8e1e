"""`Runner`: does one lease or check after the other, and tells the gateway on the control channel.

Fetching overlaps computing: a worker has one lease more than devices (`Limits.prefetch`), whose first inputs are
fetched while it waits for the device. A device computes one attempt at a time, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import psutil

from goblin_dask.errors import GoblinError, InputError, ProgramError, WireError
from goblin_dask.graphs.backends.base import NUMPY, Backend
from goblin_dask.graphs.cost import peak
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.program import Program
from goblin_dask.messages import (
    ArraySpec,
    AttemptFailed,
    BlobRef,
    Check,
    Checked,
    Committed,
    Lease,
    Message,
    Uploaded,
    Work,
)
from goblin_dask.volunteer.cache import BlobCache
from goblin_dask.volunteer.inputs import Abandoned, FetchFailed, Inputs, decode_program
from goblin_dask.volunteer.limits import Limits, data_is_limited, free_memory
from goblin_dask.volunteer.machine import return_memory_early, trim
from goblin_dask.volunteer.outputs import Output, OutputFiles
from goblin_dask.volunteer.trace import Trace
from goblin_dask.volunteer.transfer import Transfers
from goblin_dask.volunteer.validator import Checker, Gathered, check

logger = logging.getLogger(__name__)

T = TypeVar("T")

SMALL = 16 << 20
"""Bytes of projected peak below which memory is neither asked for before nor returned after an attempt."""

FETCHES = UPLOADS = 4
"""Blobs that are fetched, and handed in, at a time."""


class _TooLittleMemory(Exception):
    def __init__(self, needs: int, offers: int):
        super().__init__(f"needs {needs / 1e9:.2f} GB, {offers / 1e9:.2f} GB are free here now")
        self.needs, self.offers = needs, offers


class _Closed(Exception):
    """The owner does not lend the machine at this time."""


class _UploadFailed(Exception):
    pass


@dataclass(slots=True)
class _Attempt:
    """One that is being worked on."""

    stop: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None
    committed: Committed | None = None


class Runner:
    """The worker's hands. All methods belong to one event loop.

    Parameters
    ----------
    limits : Limits
        The owner's.
    transfers : Transfers
        The way to the lab's blobs.
    send : callable
        Puts a message on the control channel, at once.
    checker : callable, optional
        A validator's check of a result; None on a volunteer, which then refuses checks.
    backend : Backend
        Where programs run.
    """

    def __init__(
        self,
        limits: Limits,
        transfers: Transfers,
        send: Callable[[Message], None],
        *,
        checker: Checker | None = None,
        backend: Backend = NUMPY,
    ):
        self.limits = limits
        self._backend = backend
        self.cache = BlobCache(limits.cache)
        self._transfers = transfers
        self._send = send
        self._checker = checker
        self._attempts: dict[str, _Attempt] = {}
        self._forestalled: deque[str] = deque(maxlen=1000)
        self._heap_is_used = False
        """Whether the C library may keep memory of attempts that are done."""
        # A check is memory-bound and hardly gains from BLAS threads: a validator does several, one thread each.
        self._device = _threads(limits.threads if checker else 1, "goblin-compute")
        self._fetches = _threads(FETCHES, "goblin-fetch")
        self._uploads = _threads(UPLOADS, "goblin-upload")
        self._owner = _OwnersShare() if limits.busy is not None else None

    @property
    def holding(self) -> tuple[str, ...]:
        """Attempts that are being worked on."""
        return tuple(self._attempts)

    def repeat(self) -> list[Committed]:
        """What was committed and is being uploaded: a gateway that was restarted has to hear it again."""
        return [attempt.committed for attempt in self._attempts.values() if attempt.committed is not None]

    async def run(self, work: Work) -> None:
        """Do one lease or check; returns when it is done, has failed or was abandoned."""
        if work.attempt in self._forestalled:
            return
        attempt = _Attempt()
        self._attempts[work.attempt] = attempt
        job = self._lease(work, attempt) if isinstance(work, Lease) else self._check(work, attempt)
        attempt.task = asyncio.create_task(job)
        try:
            await asyncio.wait([attempt.task])
            if not attempt.task.cancelled():
                attempt.task.result()
        finally:
            self._withdraw(attempt)
            self._attempts.pop(work.attempt, None)
            if self._heap_is_used and not self._attempts:
                # only when idle: pages that the next attempt takes again cost a sixth of a training step's CPU time
                trim()
                self._heap_is_used = False

    def abandon(self, name: str) -> None:
        """Stop an attempt at its next input; nothing is sent for it any more.

        An unknown one is done already, or its lease is still under way on another channel: it will not be begun.
        """
        attempt = self._attempts.get(name)
        if attempt is not None:
            self._withdraw(attempt)
        else:
            self._forestalled.append(name)

    @staticmethod
    def _withdraw(attempt: _Attempt) -> None:
        attempt.stop.set()
        if attempt.task is not None:
            attempt.task.cancel()

    # --- leases ----------------------------------------------------------------------------------------------
    async def _lease(self, work: Lease, attempt: _Attempt) -> None:
        fail = partial(AttemptFailed, work.attempt)
        started = time.perf_counter()
        inputs = None
        try:
            program = decode_program(work.program)
            inputs = self._inputs(work, work.inputs, program.inputs, attempt)
            trace = Trace(self._backend) if work.trace else None
            outputs, seconds = await _in(self._device, partial(self._compute, program, inputs, attempt, trace))
            refs = tuple(output.ref for output in outputs)
            uploads = [output for output in outputs if output.fd >= 0]
            attempt.committed = Committed(
                work.attempt,
                refs,
                seconds,
                time.perf_counter() - started,
                inputs.fetched,
                self.cache.held(ref.digest for ref in work.inputs if ref.inline is None),
                uploaded=not uploads,
                digests=() if trace is None else tuple(trace.digests),
            )
            self._send(attempt.committed)
            if uploads:
                await self._upload(work, attempt, uploads)
        except _TooLittleMemory as error:
            self._send(fail("memory", str(error), needs=error.needs, offers=error.offers))
        except MemoryError:
            self._send(fail("memory", "the memory ran out", needs=work.peak, offers=free_memory()))
        except _Closed as error:
            self._send(fail("cancelled", str(error)))
        except ProgramError as error:
            self._send(fail("unsupported", str(error)))
        except InputError as error:
            self._send(fail("data", str(error)))
        except FetchFailed as error:
            self._send(fail("fetch", str(error)))
        except _UploadFailed as error:
            self._send(fail("upload", str(error)))
        except Abandoned:
            logger.info("attempt %s was abandoned", work.attempt)
        except GoblinError as error:
            self._send(fail("compute", str(error)))
        except Exception as error:
            logger.exception("attempt %s", work.attempt)
            self._send(fail("compute", f"{type(error).__name__}: {error}"))
        finally:
            if inputs is not None:
                inputs.close()

    def _inputs(self, work: Work, refs: tuple[BlobRef, ...], specs: tuple[ArraySpec, ...], attempt: _Attempt) -> Inputs:
        if tuple(ref.spec for ref in refs) != specs:
            raise WireError(f"{len(refs)} arrays were sent that are not those that the program declares")
        return Inputs(
            refs,
            work.routes,
            work.grant,
            transfers=self._transfers,
            cache=self.cache,
            pool=self._fetches,
            stop=attempt.stop,
        )

    def _compute(
        self, program: Program, inputs: Inputs, attempt: _Attempt, trace: Trace | None
    ) -> tuple[list[Output], float]:
        """In the device's thread: the outputs, and CPU seconds taken."""
        needs = peak(program)
        self._begin(attempt, needs)
        start = time.process_time()
        with OutputFiles() as files:
            outputs = files.collect(
                list(execute(program, inputs.sources(), backend=self._backend, observe=trace, allocate=files.allocate))
            )
        self._heap_is_used |= needs > SMALL
        return outputs, time.process_time() - start

    def _begin(self, attempt: _Attempt, needs: int) -> None:
        """The last look before the work: is it still wanted, does the owner allow it, is there memory?"""
        if attempt.stop.is_set():
            raise Abandoned
        reason = self.limits.closed(datetime.datetime.now(), self._owner() if self._owner else 0.0)
        if reason:
            raise _Closed(reason)
        if needs > SMALL:
            if data_is_limited():
                return_memory_early()
            if needs > self._offers():
                trim()
            if needs > (offers := self._offers()):
                raise _TooLittleMemory(needs, offers)

    def _offers(self) -> int:
        return min(self.limits.memory, free_memory())

    async def _upload(self, work: Lease, attempt: _Attempt, uploads: list[Output]) -> None:
        started = time.perf_counter()

        def upload(output: Output) -> None:
            self._transfers.send(output.ref, output.fd, work.routes, work.grant, attempt.stop)

        results = await asyncio.gather(
            *(_in(self._uploads, partial(upload, output)) for output in uploads), return_exceptions=True
        )
        for result in results:
            if isinstance(result, GoblinError):
                raise _UploadFailed(str(result)) from result
            if isinstance(result, BaseException):
                raise result
        sent = sum(output.ref.nbytes for output in uploads)
        self._send(Uploaded(work.attempt, time.perf_counter() - started, sent))

    # --- checks ----------------------------------------------------------------------------------------------
    async def _check(self, work: Check, attempt: _Attempt) -> None:
        if self._checker is None:
            self._send(AttemptFailed(work.attempt, "unsupported", "a volunteer checks nobody's results"))
            return
        gathered = Gathered(work, partial(self._inputs, work, attempt=attempt))
        try:
            report = await _in(self._device, partial(check, work, gathered, self._checker))
            if report is not None:
                self._send(Checked(work.attempt, report))
        finally:
            gathered.close()

    async def close(self) -> None:
        """Abandon everything and end the threads."""
        for attempt in list(self._attempts.values()):
            self._withdraw(attempt)
        for pool in (self._device, self._fetches, self._uploads):
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)
        self._transfers.close()
        self.cache.clear()


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads have all been started: their stacks belong to the worker, not to its first tasks."""
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    everyone = threading.Barrier(count)
    for future in [pool.submit(everyone.wait) for _ in range(count)]:
        future.result()
    return pool


async def _in(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work)


class _OwnersShare:
    """Share of the machine's CPUs that processes other than this one used since it was last asked."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self()  # the first answer is about nothing

    def __call__(self) -> float:
        everything = psutil.cpu_percent(None) / 100
        mine = self._process.cpu_percent(None) / 100 / (psutil.cpu_count() or 1)
        return float(max(0.0, everything - mine))
