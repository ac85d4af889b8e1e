"""`StageActor`: owns the parameters of a stage, the sums of their gradients, and their optimizer.

It is a Dask actor on the laboratory's cluster: of each parameter there is one owner, which is sent verified gradients
and told when to step. What a round adds up is kept apart until the step, so that a round that is run again, because a
sampled result of it was wrong, begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from goblin_dask.errors import InputError
from goblin_dask.graphs.capture.folds import Fold
from goblin_dask.graphs.capture.torch_internals import shared_tensor, to_numpy

Array = np.ndarray[Any, Any]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[Any], Any]


class StageActor:
    """Parameters and buffers of a stage.

    Parameters
    ----------
    trained : mapping of str to torch.Tensor
        Parameters that get gradients, in the order in which the optimizer is given them.
    kept : mapping of str to torch.Tensor
        Frozen parameters, and buffers.
    optimizer : callable
        Makes an optimizer of `torch.optim` of a list of parameters.
    scheduler : callable, optional
        Makes a scheduler of `torch.optim.lr_scheduler` of the optimizer.
    """

    def __init__(
        self,
        trained: Mapping[str, torch.Tensor],
        kept: Mapping[str, torch.Tensor],
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None,
    ):
        self._trained = {name: nn.Parameter(tensor.detach().clone()) for name, tensor in trained.items()}
        self._kept = {name: tensor.detach().clone() for name, tensor in kept.items()}
        self._optimizer = optimizer(list(self._trained.values())) if self._trained else None
        self._scheduler = scheduler(self._optimizer) if scheduler is not None and self._optimizer is not None else None
        self._added = 0
        """Micro-batches of this round that were added."""
        self._sums: dict[str, Array] = {}
        self._changed: dict[str, Array] = {}
        """Buffers after them."""

    # --- a round ------------------------------------------------------------------------------------------------------
    def read(self, names: Sequence[str]) -> list[Array]:
        """Parameters and buffers as they are between rounds; views, to be copied before the next step."""
        return [to_numpy(self._tensor(name)) for name in names]

    def _tensor(self, name: str) -> torch.Tensor:
        return self._trained[name].detach() if name in self._trained else self._kept[name]

    def add(
        self, number: int, gradients: Mapping[str, Sequence[Array]], state: Mapping[str, tuple[Fold | None, Array]]
    ) -> int:
        """Take up what the next micro-batch gives: 0 begins a round, and what was added before is forgotten.

        Parameters
        ----------
        number : int
        gradients : mapping of str to sequence of array
            Of each parameter the parts whose sum is its gradient: several where several stages use it.
        state : mapping of str to (Fold or None, array)
            Of each buffer what the micro-batch contributes, and how it is taken up; None where it replaces the buffer.

        Raises
        ------
        InputError
            When it is not this micro-batch's turn: gradients are summed in the order of the micro-batches.
        """
        if number == 0:
            self._added, self._sums, self._changed = 0, {}, {}
        if number != self._added:
            raise InputError(f"micro-batch {number} was to be added, but {self._added} comes next")
        for name, parts in gradients.items():
            gradient = parts[0]
            for part in parts[1:]:
                gradient = gradient + part
            if name in self._sums:
                np.add(self._sums[name], gradient, out=self._sums[name])
            else:
                self._sums[name] = np.array(gradient)
        for name, (fold, value) in state.items():
            before = self._changed.get(name)
            if before is None:
                before = to_numpy(self._kept[name])
            self._changed[name] = np.array(value) if fold is None else fold(before, np.asarray(value))
        self._added += 1
        return self._added

    def norms(self, count: float) -> dict[str, torch.Tensor]:
        """Norm of each parameter's mean gradient."""
        return {name: torch.linalg.vector_norm(shared_tensor(each) / count) for name, each in self._sums.items()}

    def step(self, count: float, coefficient: float | torch.Tensor | None, loss: float) -> list[float]:
        """End a round: step with the mean gradients, and keep the buffers.

        Parameters
        ----------
        count : float
            What the sums are divided by; zero where no target counted, and then there is no step.
        coefficient : float, optional
            What the gradients are multiplied by, for clipping.
        loss : float
            For schedulers that look at it.

        Returns
        -------
        list of float
            Learning rates of the groups of parameters, with which it was stepped.
        """
        for name, value in self._changed.items():
            self._kept[name].copy_(shared_tensor(value).reshape(self._kept[name].shape))
        rates: list[float] = []
        if self._optimizer is not None and count:
            for name, parameter in self._trained.items():
                parameter.grad = shared_tensor(self._sums[name]).div_(count) if name in self._sums else None
                if parameter.grad is not None and coefficient is not None:
                    parameter.grad.mul_(coefficient)
            rates = [float(group["lr"]) for group in self._optimizer.param_groups]
            self._optimizer.step()
            self._optimizer.zero_grad()
            if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self._scheduler.step(loss)
            elif self._scheduler is not None:
                self._scheduler.step()
        self._added, self._sums, self._changed = 0, {}, {}
        return rates

    # --- what stays ---------------------------------------------------------------------------------------------------
    def tensors(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers."""
        return {name: self._tensor(name).clone() for name in (*self._trained, *self._kept)}

    def state(self) -> dict[str, Any]:
        """States of optimizer and scheduler."""
        return {
            "optimizer": self._optimizer.state_dict() if self._optimizer is not None else None,
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` has told."""
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
