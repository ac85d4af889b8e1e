"""`Trainer`: a PyTorch model trained on volunteers, round by round."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dask.utils import parse_bytes
from torch import nn

from goblin_dask.errors import InputError
from goblin_dask.graphs.capture.captured import capture
from goblin_dask.graphs.capture.joint import capture_gradients
from goblin_dask.graphs.capture.losses import Summed
from goblin_dask.graphs.capture.torch_internals import flatten
from goblin_dask.labnode.client import Lab
from goblin_dask.training import checkpoint
from goblin_dask.training.actors import MakeOptimizer, MakeScheduler
from goblin_dask.training.cutting import Captured, cut_forward, cut_gradients
from goblin_dask.training.data import Batch, Position, Rows, parts
from goblin_dask.training.graph import MicroBatch, round_graph
from goblin_dask.training.history import EarlyStop, History, Metrics
from goblin_dask.training.plan import Plan
from goblin_dask.training.progress import FitBar
from goblin_dask.training.stages import Stages

EVALUATED = 64
"""Micro-batches of one job of an evaluation."""

SCORED = "model."
"""Prefix of the model's names in a captured evaluation."""


@dataclass(frozen=True)
class Round:
    """One step of the optimizer."""

    number: int
    """Counted from 1, over all calls and resumptions."""
    loss: float
    """Of the batch, before the step; NaN where no target counted, and then no step was taken."""
    seconds: float
    verified: bool
    """Whether every result of a volunteer was checked before it was used; not so with ``sample:p``."""
    certificate: dict[str, Any]
    """How."""
    learning_rate: float
    """Of the first group of parameters; NaN where no step was taken."""
    gradient_norm: float | None
    """Of all gradients together, before they were clipped; None where they are not."""


class _Scored(nn.Module):
    """A model with the loss, or another measure, that it is evaluated by."""

    def __init__(self, model: nn.Module, measure: Summed):
        super().__init__()
        self.model, self.measure = model, measure

    def forward(self, target: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, count = self.measure(self.model(*inputs), target)
        return total, count


class Trainer:
    """Trains a model: volunteers compute gradients of micro-batches, the laboratory adds them up and steps.

    The model is cut into as many stages as it takes for a task to fit a volunteer. Its parameters live in the
    laboratory, where each stage has an actor with an optimizer of its own. Yours stays as it is. Its modules are
    trained in the modes, training or evaluation, in which they are given. A micro-batch is its own batch for batch
    normalization, whose running statistics are put together in the order of the micro-batches.

    Parameters
    ----------
    model : torch.nn.Module
    loss : callable
        Of the model's result and the target; `goblin_dask.graphs.capture.losses.Summed` tells how it is averaged.
    optimizer : callable
        Makes an optimizer of `torch.optim` of a list of parameters. It is called once for each stage.
    lab : Lab
    micro_batch : int
        Rows of a task.
    volunteer_memory : int or str, optional
        What a task may take, such as ``"512 MB"``. By default what at least half of the volunteers offer that are
        there when training begins.
    stages : int, optional
        How many stages; as few as fit by default.
    scheduler : callable, optional
        Makes a scheduler of `torch.optim.lr_scheduler` of the optimizer; it steps once a round.
    clip_norm : float, optional
        Largest norm of all gradients together.
    seed : int
        Decides on the order of the data, and on dropout.
    verify, offload : str, optional
        As for `Lab.submit`; gradients go to volunteers always, unless said otherwise.
    metrics : callable or path, optional
        Who is told of each round, as `goblin_dask.training.history.Metrics` does it.

    Attributes
    ----------
    history : History
        Rounds so far, those before it was resumed without their certificates; notebooks show their losses, and
        `History.save` draws them.

    Examples
    --------
    >>> import torch, goblin_dask as goblin                                           # doctest: +SKIP
    >>> trainer = goblin.training.Trainer(model, loss=torch.nn.functional.cross_entropy,
    ...     optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4), lab=lab)               # doctest: +SKIP
    >>> for round in trainer.fit((x, y), rounds=200, batch=64, shuffle=True):         # doctest: +SKIP
    ...     print(round.number, round.loss)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Callable[..., Any],
        optimizer: MakeOptimizer,
        lab: Lab,
        micro_batch: int = 8,
        volunteer_memory: int | str | None = None,
        stages: int | None = None,
        scheduler: MakeScheduler | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        verify: str | None = None,
        offload: str = "always",
        metrics: Callable[[dict[str, Any]], object] | str | Path | None = None,
    ):
        if micro_batch < 1:
            raise InputError(f"a micro-batch has at least one row, not {micro_batch}")
        if stages is not None and stages < 1:
            raise InputError(f"a model has at least one stage, not {stages}")
        Summed(loss)  # refuses what cannot be averaged
        self._model, self.loss, self.lab = copy.deepcopy(model), loss, lab
        self.micro_batch, self.clip_norm, self.seed = micro_batch, clip_norm, seed
        self.verify, self.offload = verify, offload
        self._memory, self._count = _bytes(volunteer_memory), stages
        trained = [each for each in self._model.parameters() if each.requires_grad]
        if not trained:
            raise InputError("the model has no parameter that requires a gradient")
        tried = optimizer(trained)  # what is wrong with it shows here, not in the laboratory
        if scheduler is not None:
            scheduler(tried)
        self._scheduled = scheduler is not None
        self._stages = Stages(lab, self._model, optimizer, scheduler)
        self.history = History()
        self._metrics = Metrics(metrics if metrics is not None else _nobody)
        self._bar = FitBar(0, False)
        self.rounds = 0
        """Rounds that were done."""
        self.position = Position()
        self._order: tuple[int, int, bool] | None = None
        self._captures: dict[Any, Captured] = {}
        self._scores: dict[Any, Captured] = {}

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self._model.parameters())
        return f"<Trainer of {type(self._model).__name__}: {size:,} parameters, {self.rounds} rounds>"

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the model in the laboratory; what was not saved is lost."""
        self._stages.close()

    # --- training -----------------------------------------------------------------------------------------------------
    def fit(
        self,
        data: Any,
        *,
        rounds: int,
        batch: int | None = None,
        shuffle: bool | None = None,
        stop: EarlyStop | None = None,
    ) -> Iterator[Round]:
        """Train, a round at a time.

        Parameters
        ----------
        data : torch.utils.data.Dataset, DataLoader, or pair of arrays
            As `goblin_dask.training.data.Rows` takes them. The same data are gone on with where the last call ended.
        rounds : int
            How many steps.
        batch : int, optional
            Rows of a round; a `DataLoader`'s own by default.
        shuffle : bool, optional
            Whether each epoch has an order of its own; by default as a `DataLoader` does, and not otherwise.
        stop : EarlyStop, optional
            Ends it sooner.

        Yields
        ------
        Round
            When its step was taken; `save` then keeps it.

        Raises
        ------
        TooLarge
            When a part of the model that cannot be cut fits no volunteer.
        InputError
            For data that do not suit, or a model that cannot be captured.
        ActorLost
            When the lab node was started anew; `resume` goes on from what was saved.
        """
        rows = Rows(data)
        size = _batch(batch or rows.batch)
        order = (len(rows), size, rows.shuffle if shuffle is None else shuffle)
        if self._order not in (None, order):
            self.position = Position(self.position.epoch + 1)
        self._order = order
        return self._fit(rows, rounds, order, stop)

    def _fit(self, rows: Rows, rounds: int, order: tuple[int, int, bool], stop: EarlyStop | None) -> Iterator[Round]:
        count, batch, shuffle = order
        self._metrics.tell("begin", rounds=rounds, batch=batch)
        with FitBar(rounds, self.lab.progress) as bar:
            for _ in range(rounds):
                numbers = self.position.rows(count, batch, shuffle, self.seed)
                self._bar = bar
                done = self._round([rows(part) for part in parts(numbers, self.micro_batch)])
                self._bar = FitBar(0, False)  # an evaluation between two rounds is none of them
                self.position.advance(len(numbers), count)
                bar.told(done)
                self.history.append(done)
                self._metrics.told(done)
                yield done
                stop = stop.told(done) if stop is not None else None
                if stop is not None and stop.over:
                    self._metrics.tell("stopped", number=done.number, reason=f"no better {stop.measure}")
                    return

    def plan(self, data: Any, *, batch: int | None = None) -> Plan:
        """What a round would take of volunteers, before anything runs.

        Parameters
        ----------
        data, batch
            As for `fit`; a micro-batch of them is captured.

        Raises
        ------
        TooLarge, InputError
            As `fit` would.
        """
        rows = Rows(data)
        size = min(_batch(batch or rows.batch), len(rows))
        captured = self._captured(*rows(range(min(self.micro_batch, size))))
        count = -(-size // self.micro_batch)
        verify = self.verify or self.lab.verify
        return Plan.of(captured.cut, micro_batches=count, memory=self._room(), verify=verify, blocks=captured.blocked)

    def _round(self, batches: list[Batch]) -> Round:
        start = time.perf_counter()
        captures = [self._captured(*batch) for batch in batches]
        if any(captured.flow != captures[0].flow for captured in captures):
            raise InputError("the model has other gradients, or changes other buffers, for another micro-batch size")
        stages = self._stages
        stages.start(captures[0].owners(stages.names))
        tasks = []
        for number, (captured, (inputs, target)) in enumerate(zip(captures, batches, strict=True)):
            sources = captured.sources((inputs, target), self._key(number) if captured.draws else None)
            tasks.append(MicroBatch(captured.cut, sources))
        graph = round_graph(tasks, stages.owned)
        (total, counted), certificate = self._computed(graph, f"round {self.rounds + 1}")
        loss = total / counted if counted else float("nan")
        rate, norm = stages.step(counted, loss, self.clip_norm)
        self.rounds += 1
        seconds = time.perf_counter() - start
        return Round(self.rounds, loss, seconds, bool(certificate["complete"]), certificate, rate, norm)

    def _captured(self, inputs: tuple[Any, ...], target: Any) -> Captured:
        key = _shapes((inputs, target))
        if key not in self._captures:
            gradients = capture_gradients(self._model, self.loss, _tensors(inputs), _tensors(target))
            names = self._stages.names
            self._captures[key] = cut_gradients(gradients, (inputs, target), names, self._room(), self._count)
        return self._captures[key]

    def _room(self) -> int | None:
        """Bytes that a task may take."""
        if self._memory is None and (offered := self.lab.offer.memory):
            self._memory = offered[len(offered) // 2]
        return self._memory

    def _key(self, number: int) -> np.ndarray[Any, Any]:
        """Two numbers that decide on the dropout of a micro-batch."""
        drawn = np.random.SeedSequence([self.seed, self.rounds, number]).generate_state(1, np.uint64)
        return np.array([drawn[0], 0], np.uint64)

    def _computed(self, collection: Any, name: str) -> tuple[Any, dict[str, Any]]:
        """A lazy value, and how it was verified. Tasks are not joined: which ones would depend on who is there."""
        with (
            self.lab.submit(collection, verify=self.verify, offload=self.offload, name=name, fuse=False) as job,
            self._bar.beside(job),
        ):
            return job.result(), job.certificate

    # --- evaluation ---------------------------------------------------------------------------------------------------
    def evaluate(self, data: Any, *, measure: Callable[..., Any] | None = None) -> float:
        """The mean loss on data, in evaluation mode, computed by volunteers.

        Parameters
        ----------
        data
            As for `fit`.
        measure : callable, optional
            In the place of the loss, counted as losses are: ``lambda y, t: ((y.argmax(1) == t).sum(), len(t))`` gives
            the accuracy.
        """
        rows = Rows(data)
        chosen = self.loss if measure is None else measure
        modes = [(each, each.training) for each in self._model.modules()]
        self._model.eval()
        try:
            total = np.zeros(2)
            every = parts(np.arange(len(rows)), self.micro_batch)
            for start in range(0, len(every), EVALUATED):
                total += self._scored([rows(part) for part in every[start : start + EVALUATED]], chosen)
        finally:
            for each, mode in modes:
                each.training = mode
        mean = float(total[0] / total[1]) if total[1] else float("nan")
        self._metrics.tell("evaluated", number=self.rounds, value=mean)
        return mean

    def _scored(self, batches: list[Batch], measure: Callable[..., Any]) -> np.ndarray[Any, Any]:
        tasks = []
        for inputs, target in batches:
            inputs, target = _tensors(inputs), _tensors(target)
            key = (measure, _shapes((inputs, target)))
            if key not in self._scores:
                scored = _Scored(self._model, Summed(measure)).eval()
                program = capture(scored, target, *inputs, dynamic_batch=False)
                if program.draws:
                    raise InputError("the model draws random numbers in evaluation mode")
                names = {SCORED + name: name for name in self._stages.names}
                self._scores[key] = cut_forward(program, (target, *inputs), names, self._room(), self._count)
            captured = self._scores[key]
            tasks.append(MicroBatch(captured.cut, captured.sources((target, *inputs), None)))
        self._stages.start(captured.owners(self._stages.names))
        graph = round_graph(tasks, self._stages.owned, adding=False)
        return np.array(self._computed(graph, "evaluation")[0])

    # --- what stays ---------------------------------------------------------------------------------------------------
    def module(self) -> nn.Module:
        """The model as it is now: an ordinary module of its own."""
        module = copy.deepcopy(self._model)
        found = self._stages.tensors()
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensor.copy_(found[name])
                tensor.grad = None
        return module

    def save(self, path: str | Path) -> None:
        """Keep all that the next rounds depend on, in a Zarr group; who is killed meanwhile keeps the last one."""
        checkpoint.save(
            path,
            {
                "rounds": self.rounds,
                "position": dataclasses.asdict(self.position),
                "order": self._order,
                "options": {
                    "micro_batch": self.micro_batch,
                    "clip_norm": self.clip_norm,
                    "seed": self.seed,
                    "stages": self._count,
                    "volunteer_memory": self._memory,
                },
                "scheduled": self._scheduled,
                "history": [{**vars(each), "certificate": {}} for each in self.history],
                **self._stages.state(),
            },
        )
        self._metrics.tell("saved", number=self.rounds, path=path)

    @classmethod
    def resume(
        cls,
        path: str | Path,
        model: nn.Module,
        *,
        loss: Callable[..., Any],
        optimizer: MakeOptimizer,
        lab: Lab,
        scheduler: MakeScheduler | None = None,
        verify: str | None = None,
        offload: str = "always",
        metrics: Callable[[dict[str, Any]], object] | str | Path | None = None,
    ) -> Trainer:
        """Go on from what `save` has kept: the rounds that follow are those that would have followed.

        Parameters
        ----------
        path
            As for `save`. Parameters, buffers, the states of optimizer and scheduler, the position in the data, seed,
            micro-batch, stages and clipping are read; no code is.
        model, loss, optimizer, lab, scheduler, verify, offload, metrics
            As they were.

        Raises
        ------
        InputError
            When nothing is there, or the model is another.
        """
        state = checkpoint.load(path)
        trainer = cls(
            model,
            loss=loss,
            optimizer=optimizer,
            lab=lab,
            scheduler=scheduler,
            verify=verify,
            offload=offload,
            metrics=metrics,
            **state["options"],
        )
        if state["scheduled"] is not (scheduler is not None):
            raise InputError("it was saved " + ("with" if state["scheduled"] else "without") + " a scheduler")
        trainer._stages.load(state)
        trainer.rounds, trainer.position = state["rounds"], Position(**state["position"])
        trainer._order = state["order"]
        trainer.history = History(Round(**each) for each in state["history"])
        return trainer


def _nobody(event: dict[str, Any]) -> None:
    """Nobody wants to know."""


def _batch(size: int | None) -> int:
    if not size or size < 1:
        raise InputError("say how many rows a round has: batch=64")
    return size


def _bytes(memory: int | str | None) -> int | None:
    if memory is None:
        return None
    try:
        found = parse_bytes(memory) if isinstance(memory, str) else int(memory)
    except (TypeError, ValueError) as error:
        raise InputError(f'volunteer_memory is a number of bytes, or such as "512 MB", not {memory!r}') from error
    if found <= 0:
        raise InputError(f"volunteer_memory is {memory!r}; a task takes more than that")
    return found


def _tensors(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, tree)


def _shapes(tree: Any) -> Any:
    leaves, structure = flatten(tree)
    found = tuple((tuple(x.shape), str(x.dtype)) if hasattr(x, "shape") else x for x in leaves)
    return found, str(structure)
