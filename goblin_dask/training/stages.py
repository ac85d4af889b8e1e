"""`Stages`: the actors of a model's stages, as the trainer has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from goblin_dask.errors import InputError
from goblin_dask.graphs.capture.torch_internals import to_numpy
from goblin_dask.labnode.client import Lab
from goblin_dask.labnode.residents import ActorRef
from goblin_dask.store.buffers import spec_of
from goblin_dask.training.actors import MakeOptimizer, MakeScheduler, StageActor
from goblin_dask.training.graph import Owners
from goblin_dask.training.tasks import Owned


class Stages:
    """Who owns what of a model, and the actors that do, once they are needed.

    Owners are chosen for the first micro-batch that is captured. Programs for micro-batches of other sizes may be cut
    elsewhere; owners stay.

    Parameters
    ----------
    lab : Lab
    model : torch.nn.Module
        What is trained, as it is at the start.
    optimizer, scheduler : callable
        As for `StageActor`.
    """

    def __init__(self, lab: Lab, model: nn.Module, optimizer: MakeOptimizer, scheduler: MakeScheduler | None):
        self._lab, self._optimizer, self._scheduler = lab, optimizer, scheduler
        self._trained = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
        frozen = {name: each.detach() for name, each in model.named_parameters() if not each.requires_grad}
        self._kept: dict[str, torch.Tensor] = {**frozen, **dict(model.named_buffers())}
        self._owners: Owners = []
        self._states: Sequence[Mapping[str, Any]] = ()
        self._actors: list[Any] = []
        self.owned: dict[str, Owned] = {}
        """By name, when the actors are there."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all parameters and buffers."""
        return (*self._trained, *self._kept)

    # --- actors -------------------------------------------------------------------------------------------------------
    def start(self, owners: Owners) -> None:
        """Have the actors, with these owners unless there are some."""
        if self._actors:
            return
        self._owners = self._owners or owners
        for number, names in enumerate(self._owners):
            trained = {name: self._trained[name] for name in names if name in self._trained}
            kept = {name: self._kept[name] for name in names if name in self._kept}
            actor = self._lab.actor(
                StageActor, trained, kept, self._optimizer, self._scheduler, name=f"stage {number + 1}"
            )
            self._actors.append(actor)
            if self._states:
                actor.call("load", self._states[number])
            for name, tensor in (*trained.items(), *kept.items()):
                self.owned[name] = Owned(ActorRef(actor.key), name, spec_of(to_numpy(tensor)))

    def close(self) -> None:
        """Let go of the actors."""
        for actor in self._actors:
            actor.release()
        self._actors, self.owned = [], {}

    def step(self, count: float, loss: float, clip_norm: float | None) -> tuple[float, float | None]:
        """End a round: the first learning rate, and the norm of the gradients where they are clipped."""
        norm = coefficient = None
        if clip_norm is not None and count:
            found: dict[str, torch.Tensor] = {}
            for actor in self._actors:
                found.update(actor.call("norms", count))
            # as `torch.nn.utils.clip_grad_norm_`, in the order of the model
            norms = [found[name] for name in self._trained if name in found]
            total = torch.linalg.vector_norm(torch.stack(norms))
            norm, coefficient = float(total), torch.clamp(clip_norm / (total + 1e-6), max=1.0)
        rates = [rate for actor in self._actors for rate in actor.call("step", count, coefficient, loss)]
        return (rates[0] if rates else float("nan")), norm

    # --- what stays ---------------------------------------------------------------------------------------------------
    def tensors(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers as they are now."""
        found: dict[str, torch.Tensor] = {**self._trained, **self._kept}
        for actor in self._actors:
            found.update(actor.call("tensors"))
        return found

    def state(self) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        return {
            "owners": self._owners,
            "model": self.tensors(),
            "actors": [actor.call("state") for actor in self._actors],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Begin with what `state` has told, before there are actors.

        Raises
        ------
        InputError
            When that was another model.
        """
        here = {**self._trained, **self._kept}
        saved = {name: (tuple(each.shape), each.dtype) for name, each in state["model"].items()}
        given = {name: (tuple(each.shape), each.dtype) for name, each in here.items()}
        if saved != given:
            names = sorted(name for name in {*saved, *given} if saved.get(name) != given.get(name))
            raise InputError(f"the model is not the one that was saved: {', '.join(names[:5])}")
        self._trained = {name: state["model"][name] for name in self._trained}
        self._kept = {name: state["model"][name] for name in self._kept}
        self._owners, self._states = [tuple(names) for names in state["owners"]], state["actors"]
