"""A volunteer that lies, as a preload of a stock worker: ``dask worker … --preload goblin_dask.testing.liar``.

After ``--preload goblin_dask.volunteer``. What it does is said by ``goblin.testing.liar.*`` of the configuration:
``strategy``, a name of `goblin_dask.testing.strategies.STRATEGIES` or of `goblin_dask.testing.liars.LIARS`;
``journal``, a file to which it adds a `Confession` a line for each answer; and what else `Liar` takes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import dask.config
import msgspec
import numpy as np

from goblin_dask.digest import Digest, digest, task_digest
from goblin_dask.graphs.backends.base import NUMPY, Backend
from goblin_dask.graphs.cost import flops
from goblin_dask.graphs.execute import Allocator, Observer, Source, execute
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import schedule
from goblin_dask.messages import ArraySpec, BlobRef, Routes
from goblin_dask.store.buffers import buffer_of, spec_of
from goblin_dask.testing.liars import LIARS, corrupt
from goblin_dask.testing.liars.distance import distance
from goblin_dask.testing.ring import Ring
from goblin_dask.testing.strategies import RIGHT, Answer, Situation, Strategy, strategy_named
from goblin_dask.verify import probe
from goblin_dask.verify.check import plan_check, thresholds
from goblin_dask.verify.evaluate import load
from goblin_dask.verify.operands import Array
from goblin_dask.volunteer import runner
from goblin_dask.volunteer.inputs import Abandoned
from goblin_dask.volunteer.transfer import Transfers


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


def _only(corruption: str, options: dict[str, Any]) -> Strategy:
    """Who tells one kind of lie in a share of its answers."""
    lie = Answer(corruption, options.get("times"))
    return Strategy(corruption, lambda s: lie if s.rng.random() < s.options["share"] else RIGHT, "", {"share": 1.0})


_send = Transfers.send


class Liar:
    """Stands in for `goblin_dask.graphs.execute.execute` in a volunteer.

    It computes the right result too, whatever it hands in: for its journal.

    Parameters
    ----------
    strategy : str
        One of `goblin_dask.testing.strategies.STRATEGIES`; or one of `LIARS`, for who does nothing else.
    journal : path
    share : float, optional
        Probability of a lie, for one of `LIARS` and where the strategy has that option.
    seed : int
    ring : path, optional
        Directory that the members of its ring share.
    delay : float
        Seconds for which it is late, where its strategy is to be late.
    **options
        Of the strategy, or for `corrupt`.

    Raises
    ------
    InputError
        For an unknown strategy.
    """

    def __init__(
        self,
        strategy: str,
        journal: str,
        share: float | None = None,
        seed: int = 0,
        ring: str = "",
        delay: float = 0.0,
        **options: Any,
    ):
        self._decide = _only(strategy, options) if strategy in LIARS else strategy_named(strategy)
        self._options, given = options, options if share is None else {**options, "share": share}
        self._situation = Situation(random.Random(seed), options={**self._decide.options, **given})  # noqa: S311
        self._ring = Ring(ring) if ring else None
        self._delay, self._journal = delay, Path(journal)
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self.withheld: set[Digest] = set()
        """Outputs that it has committed, and is not going to upload."""

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
            task = task_digest(program.digest, [digest(buffer_of(array)) for array in arrays])
            if self._ring is not None:
                self._ring.hold(task)
            made: list[tuple[Array, ...]] = []
            used = backend or NUMPY

            def keep(number: int, values: tuple[Any, ...]) -> None:
                made.append(tuple(np.array(used.to_host(value)) for value in values))  # others write over them

            outputs = list(execute(program, arrays, backend=used, observe=keep if observe is not None else None))
            said, answer = self._answer(task, program, arrays, outputs)
            size, error = 0.0, 0.0
            if said.corruption:
                size, error = distance(answer, outputs, thresholds(program, arrays, outputs))
            names = tuple((digest(buffer_of(array)), spec_of(array)) for array in answer)
            self._confess(Confession(names, size > 0, self._situation.method, size, error))
            self._remember(size > 0)
            if said.withheld:
                self.withheld.update(name for name, _ in names)
            if observe is not None:
                self._pretend(program, made, answer, observe, used)
        if said.late:
            threading.Event().wait(self._delay)
        return answer

    def _answer(
        self, task: Digest, program: Program, inputs: Sequence[Array], outputs: list[Array]
    ) -> tuple[Answer, list[Array]]:
        """What the strategy says, and the arrays that it hands in."""
        situation, ring, first = self._situation, self._ring, None
        situation.method, situation.flops = plan_check(program).method, flops(program)
        if ring is not None:
            situation.together, first = ring.hold(task), ring.agreed(task)
            situation.agreed = first[0] if first else None
        said = self._decide(situation)
        if first is not None and (said.copied or (said.common and first[0].corruption)):
            return first
        answer = outputs
        if said.corruption:
            options = {key: value for key, value in self._options.items() if key not in self._decide.options}
            if said.times is not None:
                options["times"] = said.times
            rng = np.random.default_rng(int(task[:16], 16)) if said.common else self._rng
            answer = corrupt(said.corruption, program, inputs, outputs, rng, **options)
        if ring is not None:
            first = ring.agree(task, said, answer)
            if said.common and first[0].corruption:
                return first
        return said, answer

    def _remember(self, lied: bool) -> None:
        """This answer is part of its history now."""
        situation = self._situation
        situation.usual += (situation.flops - situation.usual) / (situation.results + 1)
        situation.results += 1
        situation.lies += lied
        situation.since_lie = 0 if lied else situation.since_lie + 1

    def send(
        self, transfers: Transfers, ref: BlobRef, fd: int, routes: Routes, grant: str, stop: threading.Event
    ) -> None:
        """Stands in for `Transfers.send`: what is withheld is not sent, until nobody waits for it any more."""
        if ref.digest in self.withheld:
            stop.wait()
            raise Abandoned
        _send(transfers, ref, fd, routes, grant, stop)

    @staticmethod
    def _pretend(
        program: Program, made: list[tuple[Array, ...]], answer: Sequence[Array], observe: Observer, backend: Backend
    ) -> None:
        """Commit to what the nodes made, and to the answer as if they had made it."""
        said = dict(zip(program.outputs, answer, strict=True))
        for number, step in enumerate(schedule(program).steps):
            values = (said.get(value, own) for value, own in zip(step.outputs, made[number], strict=True))
            observe(number, tuple(map(backend.to_device, values)))

    def _confess(self, confession: Confession) -> None:
        with self._journal.open("ab") as file:
            file.write(msgspec.json.encode(confession) + b"\n")


def confessions(journal: Path) -> list[Confession]:
    """What a liar has written down so far."""
    lines: Iterable[bytes] = journal.read_bytes().splitlines(keepends=True) if journal.exists() else ()
    return [msgspec.json.decode(line, type=Confession) for line in lines if line.endswith(b"\n")]


def dask_setup(worker: Any) -> None:
    """Called by Dask in the worker's process before it connects."""
    liar = Liar(**dask.config.get("goblin.testing.liar"))
    runner.execute = liar  # type: ignore[assignment, attr-defined]  # the name by which the runner calls it
    Transfers.send = lambda *arguments: liar.send(*arguments)  # type: ignore[method-assign]
