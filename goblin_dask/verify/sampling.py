"""Sampling, inside the laboratory: finished chunk tasks are verified once more, with a full check, at random.

A `distributed.diagnostics.plugin.SchedulerPlugin` for the scheduler of the *laboratory's* cluster. Tasks that may be
sampled carry the annotation ``{"sample": job}``. When one of them reaches memory it is drawn with probability `p`, and
`recheck` submits it again with a full check. The job awaits `settled` before it says that it is complete.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

from goblin_dask.errors import InputError

ANNOTATION = "sample"
"""Of a task: the job that wants it sampled."""

Recheck = Callable[[Any, Any], Awaitable[bool]]
"""``await recheck(key, task)``: execute the task (Dask's `TaskState`) again with a full check; whether it matched."""


class SampledRecheck(SchedulerPlugin):  # type: ignore[misc]
    """Has a random share of finished chunk tasks executed again.

    Parameters
    ----------
    p : float
        Probability with which a finished task is drawn.
    rng : random.Random
        `random.SystemRandom` outside tests: who can foresee the draw lies elsewhere.
    recheck : callable
        ``await recheck(key, task) -> bool``.
    """

    name = "goblin-sampled-recheck"

    def __init__(self, p: float, rng: random.Random, recheck: Recheck):
        if not 0.0 < p <= 1.0:
            raise InputError(f"the share of chunks to check must be above 0 and at most 1, not {p!r}")
        self.p, self._rng, self._recheck = p, rng, recheck
        self._scheduler: Any = None
        self._running: dict[str, dict[Any, asyncio.Task[bool]]] = {}
        self._passed: dict[str, set[Any]] = {}
        """Keys per job that were drawn, or spared: a task that Dask computes again is not drawn again."""

    async def start(self, scheduler: Any) -> None:
        """Dask calls this when the plugin is registered."""
        self._scheduler = scheduler

    def transition(self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any) -> None:
        """A task changed its state."""
        if finish != "memory" or start != "processing":
            return
        task = self._scheduler.tasks.get(key)
        job = (task.annotations or {}).get(ANNOTATION) if task is not None else None
        if job is None or key in self._passed.setdefault(job, set()):
            return
        self._passed[job].add(key)
        if self._rng.random() < self.p:
            coroutine = self._recheck(key, task)
            self._running.setdefault(job, {})[key] = asyncio.ensure_future(coroutine)

    def sampled(self, job: str) -> int:
        """Tasks of the job that were drawn so far."""
        return len(self._running.get(job, ()))

    async def settled(self, job: str) -> tuple[Any, ...]:
        """Wait for the job's drawn tasks, forget the job, and return the keys whose result did not match.

        An empty answer means that the job may be called complete. Otherwise the laboratory submits its graph again:
        what was accepted and not re-opened is in the ledger and is not computed again.

        Raises
        ------
        Exception
            What a `recheck` raised, when all of them have ended.
        """
        mismatched = []
        errors: list[BaseException] = []
        while running := self._running.pop(job, None):  # tasks may be drawn while others are awaited
            results = await asyncio.gather(*running.values(), return_exceptions=True)
            for key, result in zip(running, results, strict=True):
                if isinstance(result, BaseException):
                    errors.append(result)
                elif not result:
                    mismatched.append(key)
        self._passed.pop(job, None)
        if errors:
            raise errors[0]
        return tuple(mismatched)

    def forget(self, job: str) -> None:
        """The job was cancelled: nobody waits for its drawn tasks."""
        for running in self._running.pop(job, {}).values():
            running.cancel()
        self._passed.pop(job, None)

    async def close(self) -> None:
        """Dask calls this when the scheduler closes."""
        for job in list(self._running):
            self.forget(job)
