"""A volunteer that lies, as a preload of a stock worker: ``dask worker … --preload goblin_dask.testing.liar``.

After ``--preload goblin_dask.volunteer``. What it does is said by ``goblin.testing.liar.*`` of the configuration:
``strategy`` (a name of `goblin_dask.testing.liars.LIARS`), ``share`` of the answers that are lies, ``times`` as for
`corrupt`, ``seed``, and ``journal``, a file to which it adds a `Confession` a line for each answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import dask.config
import msgspec
import numpy as np

from goblin_dask.digest import Digest, digest
from goblin_dask.graphs.backends.base import Backend
from goblin_dask.graphs.execute import Allocator, Observer, Source, execute
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import schedule
from goblin_dask.messages import ArraySpec
from goblin_dask.store.buffers import buffer_of, spec_of
from goblin_dask.testing.liars import corrupt
from goblin_dask.testing.liars.distance import distance
from goblin_dask.verify import probe
from goblin_dask.verify.check import plan_check, thresholds
from goblin_dask.verify.evaluate import load
from goblin_dask.verify.operands import Array
from goblin_dask.volunteer import runner


class Confession(msgspec.Struct, frozen=True):
    """What one answer was."""

    outputs: tuple[tuple[Digest, ArraySpec], ...]
    """What was handed in: digests of the bytes, which say nothing of shapes, and these."""
    lie: bool
    method: str
    """How such a program's results are checked."""
    size: float
    """Largest wrong entry over the threshold of the check; `distance.BEYOND` where it is none, or must be exact."""
    error: float = 0.0
    """Largest wrong entry."""


class Liar:
    """Stands in for `goblin_dask.graphs.execute.execute` in a volunteer.

    Parameters
    ----------
    strategy : str
    journal : path
    share : float
        Probability of a lie.
    seed : int
    **options
        For `corrupt`.
    """

    def __init__(self, strategy: str, journal: str, share: float = 1.0, seed: int = 0, **options: Any):
        self._strategy, self._share, self._options = strategy, share, options
        self._journal = Path(journal)
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()

    def __call__(
        self,
        program: Program,
        inputs: Sequence[Source],
        *,
        backend: Backend | None = None,
        observe: Observer | None = None,
        allocate: Allocator | None = None,
    ) -> Sequence[Array]:
        """The program's outputs, or what is said to be them, in memory of its own."""
        if program == probe.program():  # who fails it gets no work to lie about
            return execute(program, inputs, backend=backend, observe=observe, allocate=allocate)
        with self._lock:
            arrays = [load(source) for source in inputs]
            made: list[tuple[Array, ...]] = []
            outputs = list(
                execute(program, arrays, backend=backend, observe=lambda _, values: made.append(values))
                if observe is not None
                else execute(program, arrays, backend=backend)
            )
            lie = bool(self._rng.random() < self._share)
            answer, size, error = outputs, 0.0, 0.0
            if lie:
                answer = corrupt(self._strategy, program, arrays, outputs, self._rng, **self._options)
                limits = thresholds(program, arrays, outputs)
                size, error = distance(answer, outputs, limits)
            names = tuple((digest(buffer_of(array)), spec_of(array)) for array in answer)
            self._confess(Confession(names, lie and size > 0, plan_check(program).method, size, error))
            if observe is not None:
                self._pretend(program, made, answer, observe)
            return answer

    @staticmethod
    def _pretend(program: Program, made: list[tuple[Array, ...]], answer: Sequence[Array], observe: Observer) -> None:
        """Commit to what the nodes made, and to the answer as if they had made it."""
        said = dict(zip(program.outputs, answer, strict=True))
        for number, step in enumerate(schedule(program).steps):
            observe(number, tuple(said.get(value, own) for value, own in zip(step.outputs, made[number], strict=True)))

    def _confess(self, confession: Confession) -> None:
        with self._journal.open("ab") as file:
            file.write(msgspec.json.encode(confession) + b"\n")


def confessions(journal: Path) -> list[Confession]:
    """What a liar has written down so far."""
    lines: Iterable[bytes] = journal.read_bytes().splitlines(keepends=True) if journal.exists() else ()
    return [msgspec.json.decode(line, type=Confession) for line in lines if line.endswith(b"\n")]


def dask_setup(worker: Any) -> None:
    """Called by Dask in the worker's process before it connects."""
    # the name by which the runner calls it
    runner.execute = Liar(**dask.config.get("goblin.testing.liar"))  # type: ignore[assignment, attr-defined]
