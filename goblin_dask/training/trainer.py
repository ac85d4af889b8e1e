"""`Trainer`: a PyTorch model trained on volunteers, round by round."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from goblin_dask.errors import InputError, TooLarge
from goblin_dask.graphs.capture.captured import CapturedProgram, capture
from goblin_dask.graphs.capture.joint import CapturedGradients, capture_gradients
from goblin_dask.graphs.capture.losses import Summed
from goblin_dask.graphs.capture.torch_internals import flatten, is_tensor, to_numpy, to_tensor
from goblin_dask.graphs.cost import peak
from goblin_dask.graphs.program import Program
from goblin_dask.labnode.client import Lab
from goblin_dask.training import checkpoint
from goblin_dask.training.data import Batch, Position, Rows, parts
from goblin_dask.training.graph import Part, Sums, summed

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

    The model is copied; yours stays as it is. Its modules are trained in the modes, training or evaluation, in which
    they are given. A micro-batch is its own batch for batch normalization, whose running statistics are put together in
    the order of the micro-batches.

    Parameters
    ----------
    model : torch.nn.Module
        One whose gradients of one micro-batch fit a volunteer's memory.
    loss : callable
        Of the model's result and the target; `goblin_dask.graphs.capture.losses.Summed` tells how it is averaged.
    optimizer : callable
        Makes an optimizer of `torch.optim` of a list of parameters.
    lab : Lab
    micro_batch : int
        Rows of a task.
    scheduler : callable, optional
        Makes a scheduler of `torch.optim.lr_scheduler` of the optimizer; it steps once a round.
    clip_norm : float, optional
        Largest norm of all gradients together.
    seed : int
        Decides on the order of the data, and on dropout.
    verify, offload : str, optional
        As for `Lab.submit`; gradients go to volunteers always, unless said otherwise.

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
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        lab: Lab,
        micro_batch: int = 8,
        scheduler: Callable[[Any], Any] | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        verify: str | None = None,
        offload: str = "always",
    ):
        if micro_batch < 1:
            raise InputError(f"a micro-batch has at least one row, not {micro_batch}")
        Summed(loss)  # refuses what cannot be averaged
        self._model, self.loss, self.lab = copy.deepcopy(model), loss, lab
        self.micro_batch, self.clip_norm, self.seed = micro_batch, clip_norm, seed
        self.verify, self.offload = verify, offload
        trained = [each for each in self._model.parameters() if each.requires_grad]
        if not trained:
            raise InputError("the model has no parameter that requires a gradient")
        self.optimizer = optimizer(trained)
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        self.rounds = 0
        """Rounds that were done."""
        self.position = Position()
        self._order: tuple[int, int, bool] | None = None
        self._captures: dict[Any, CapturedGradients] = {}
        self._scores: dict[Any, CapturedProgram] = {}

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self._model.parameters())
        return f"<Trainer of {type(self._model).__name__}: {size:,} parameters, {self.rounds} rounds>"

    # --- training -----------------------------------------------------------------------------------------------------
    def fit(self, data: Any, *, rounds: int, batch: int | None = None, shuffle: bool | None = None) -> Iterator[Round]:
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

        Yields
        ------
        Round
            When its step was taken; `save` then keeps it.

        Raises
        ------
        TooLarge
            When a micro-batch fits no volunteer.
        InputError
            For data that do not suit, or a model that cannot be captured.
        """
        rows = Rows(data)
        size = batch or rows.batch
        if not size or size < 1:
            raise InputError("say how many rows a round has: batch=64")
        order = (len(rows), size, rows.shuffle if shuffle is None else shuffle)
        if self._order not in (None, order):
            self.position = Position(self.position.epoch + 1)
        self._order = order
        return self._fit(rows, rounds, order)

    def _fit(self, rows: Rows, rounds: int, order: tuple[int, int, bool]) -> Iterator[Round]:
        count, batch, shuffle = order
        for _ in range(rounds):
            numbers = self.position.rows(count, batch, shuffle, self.seed)
            done = self._round([rows(part) for part in parts(numbers, self.micro_batch)])
            self.position.advance(len(numbers), count)
            yield done

    def _round(self, batches: list[Batch]) -> Round:
        start = time.perf_counter()
        state = self._state()
        captures = [self._captured(*batch) for batch in batches]
        first = captures[0]
        for each in captures:
            if (each.gradients, each.state, each.folds) != (first.gradients, first.state, first.folds):
                raise InputError(
                    "the model has other gradients, or changes other buffers, for another micro-batch size"
                )
        handed = tuple(
            (name, 2 + len(first.gradients) + place)
            for place, name in enumerate(first.state)
            if name not in first.folds
        )
        tasks = []
        for number, (captured, (inputs, target)) in enumerate(zip(captures, batches, strict=True)):
            key = self._key(number) if captured.draws else None
            named = {name: name if name in state else array for name, array in captured.parameters.items()}
            sources = captured.sources(captured.leaves(inputs, target), named, key)
            tasks.append(Part(captured.program(), tuple(sources), handed))
        shared = {name: state[name] for captured in captures for name in captured.parameters if name in state}
        sums = Sums(2, [first.folds.get(name) for name in first.state])
        found, certificate = self._computed(
            summed(tasks, shared, sums, [state[name] for name in first.state]), f"round {self.rounds + 1}"
        )
        total, counted = float(found[0]), float(found[1])
        loss = total / counted if counted else float("nan")
        if counted:
            self._step(dict(zip(first.gradients, found[2:], strict=False)), counted, loss)
        buffers = dict(self._model.named_buffers())
        with torch.no_grad():
            for name, value in zip(first.state, found[2 + len(first.gradients) :], strict=True):
                buffers[name].copy_(to_tensor(value))
        self.rounds += 1
        verified = bool(certificate["complete"])
        return Round(self.rounds, loss, time.perf_counter() - start, verified, certificate)

    def _step(self, gradients: Mapping[str, Any], count: float, loss: float) -> None:
        parameters = dict(self._model.named_parameters())
        for name, parameter in parameters.items():
            parameter.grad = to_tensor(gradients[name]).div_(count) if name in gradients else None
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    def _captured(self, inputs: tuple[Any, ...], target: Any) -> CapturedGradients:
        key = _shapes((inputs, target))
        if key not in self._captures:
            captured = capture_gradients(self._model, self.loss, _tensors(inputs), _tensors(target))
            self._require_room(captured.program())
            self._captures[key] = captured
        return self._captures[key]

    def _require_room(self, program: Program) -> None:
        needs, offer = peak(program), self.lab.offer
        if offer.memory and needs > offer.memory[0]:
            raise TooLarge(
                needs,
                offer.memory[0],
                "the model is trained in one piece: take a smaller micro_batch, or larger volunteers",
            )

    def _key(self, number: int) -> np.ndarray[Any, Any]:
        """Two numbers that decide on the dropout of a micro-batch."""
        drawn = np.random.SeedSequence([self.seed, self.rounds, number]).generate_state(1, np.uint64)
        return np.array([drawn[0], 0], np.uint64)

    def _state(self) -> dict[str, np.ndarray[Any, Any]]:
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: np.array(to_numpy(tensor)) for name, tensor in named}

    def _computed(self, collection: Any, name: str) -> tuple[Any, dict[str, Any]]:
        """A lazy value, and how it was verified. Tasks are not joined: which ones would depend on who is there."""
        with self.lab.submit(collection, verify=self.verify, offload=self.offload, name=name, fuse=False) as job:
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
        return float(total[0] / total[1]) if total[1] else float("nan")

    def _scored(self, batches: list[Batch], measure: Callable[..., Any]) -> np.ndarray[Any, Any]:
        state = {SCORED + name: array for name, array in self._state().items()}
        tasks, shared = [], {}
        for inputs, target in batches:
            inputs, target = _tensors(inputs), _tensors(target)
            key = (measure, _shapes((inputs, target)))
            if key not in self._scores:
                scored = _Scored(self._model, Summed(measure)).eval()
                captured = self._scores[key] = capture(scored, target, *inputs, dynamic_batch=False)
                if captured.draws:
                    raise InputError("the model draws random numbers in evaluation mode")
                self._require_room(captured.program())
            captured = self._scores[key]
            named = {name: name if name in state else array for name, array in captured.parameters.items()}
            leaves = [to_numpy(x) if is_tensor(x) else x for x in flatten(((target, *inputs), {}))[0]]
            tasks.append(Part(captured.program(), tuple(captured.recordings.sources(leaves, named, None)[1])))
            shared.update({name: state[name] for name in named if name in state})
        found, _ = self._computed(summed(tasks, shared, Sums(2)), "evaluation")
        return np.array([float(found[0]), float(found[1])])

    # --- what stays ---------------------------------------------------------------------------------------------------
    def module(self) -> nn.Module:
        """The model as it is now: an ordinary module of its own."""
        module = copy.deepcopy(self._model)
        for parameter in module.parameters():
            parameter.grad = None
        return module

    def save(self, path: str | Path) -> None:
        """Keep all that the next rounds depend on, in a Zarr group; who is killed meanwhile keeps the last one."""
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        checkpoint.save(
            path,
            {
                "rounds": self.rounds,
                "position": dataclasses.asdict(self.position),
                "order": self._order,
                "options": {"micro_batch": self.micro_batch, "clip_norm": self.clip_norm, "seed": self.seed},
                "model": {name: tensor.detach() for name, tensor in named},
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            },
        )

    @classmethod
    def resume(
        cls,
        path: str | Path,
        model: nn.Module,
        *,
        loss: Callable[..., Any],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        lab: Lab,
        scheduler: Callable[[Any], Any] | None = None,
        verify: str | None = None,
        offload: str = "always",
    ) -> Trainer:
        """Go on from what `save` has kept: the rounds that follow are those that would have followed.

        Parameters
        ----------
        path
            As for `save`. Parameters, buffers, the states of optimizer and scheduler, the position in the data, seed,
            micro-batch and clipping are read; no code is.
        model, loss, optimizer, lab, scheduler, verify, offload
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
            **state["options"],
        )
        named = dict((*trainer._model.named_parameters(), *trainer._model.named_buffers()))
        saved = {name: (tuple(each.shape), each.dtype) for name, each in state["model"].items()}
        given = {name: (tuple(each.shape), each.dtype) for name, each in named.items()}
        if saved != given:
            names = sorted(name for name in {*saved, *given} if saved.get(name) != given.get(name))
            raise InputError(f"the model is not the one that was saved: {', '.join(names[:5])}")
        if (state["scheduler"] is None) is not (trainer.scheduler is None):
            raise InputError("it was saved " + ("without" if state["scheduler"] is None else "with") + " a scheduler")
        with torch.no_grad():
            for name, tensor in named.items():
                tensor.copy_(state["model"][name])
        trainer.optimizer.load_state_dict(state["optimizer"])
        if trainer.scheduler is not None:
            trainer.scheduler.load_state_dict(state["scheduler"])
        trainer.rounds, trainer.position = state["rounds"], Position(**state["position"])
        trainer._order = state["order"]
        return trainer


def _tensors(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, tree)


def _shapes(tree: Any) -> Any:
    leaves, structure = flatten(tree)
    found = tuple((tuple(x.shape), str(x.dtype)) if hasattr(x, "shape") else x for x in leaves)
    return found, str(structure)
