"""Loss and gradients of a module as one graph of ATen's operators: what is known here of PyTorch's AOTAutograd.

Written for torch 2.13. `aot_export_joint_with_descriptors` records forward and backward on tensors without data, as
autograd itself goes through them: what is detached, frozen or has a backward of its own is right, which it is not where
a captured forward is differentiated afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from goblin_dask.errors import InputError
from goblin_dask.graphs.apply import apply
from goblin_dask.graphs.capture import torch_internals
from goblin_dask.graphs.capture.aten import LOWERINGS
from goblin_dask.graphs.capture.aten.base import Call, Ref
from goblin_dask.graphs.capture.aten.creation import DRAWING
from goblin_dask.graphs.capture.graph import Graph, Slot
from goblin_dask.graphs.capture.losses import Summed
from goblin_dask.graphs.capture.torch_internals import is_tensor


@dataclass(frozen=True)
class Joint:
    """Loss, its count, gradients and new state as one graph, whose outputs are in this order."""

    graph: Graph
    gradients: tuple[str, ...]
    """Names of the parameters that outputs 2, 3, … are the gradients of."""
    trained: dict[str, str]
    """By name of each parameter that requires a gradient, the name that it has here: what shares memory has one. Those
    that the loss does not depend on have no gradient."""


class _Whole(torch.nn.Module):
    """A module and its loss as one module of flat tensors."""

    def __init__(self, module: torch.nn.Module, loss: Summed, structure: Any, leaves: Sequence[Any]):
        super().__init__()
        self.wrapped, self.loss = module, loss
        self._structure, self._leaves = structure, list(leaves)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = iter(tensors)
        leaves = [next(given) if is_tensor(leaf) else leaf for leaf in self._leaves]
        inputs, target = pytree.tree_unflatten(leaves, self._structure)
        before = dict(self.wrapped.named_buffers())
        total, count = self.loss(self.wrapped(*inputs), target)
        with torch.no_grad():  # a buffer that was assigned, not written into, would be lost
            for name, buffer in self.wrapped.named_buffers():
                if name in before and buffer is not before[name]:
                    before[name].copy_(buffer)
        return total, count.detach()


def joint(module: torch.nn.Module, loss: Summed, structure: Any, leaves: Sequence[Any]) -> Joint:
    """Record loss and gradients of a micro-batch.

    Parameters
    ----------
    module : torch.nn.Module
        Recorded in its mode. It is not written to.
    loss : Summed
    structure, leaves
        Of the pair of the module's arguments, a tuple, and the target.

    Raises
    ------
    InputError
        When PyTorch cannot record it, or when parameters overlap without being the same.
    """
    _require_recordable(module, loss)
    whole = _Whole(module, loss, structure, leaves)
    tensors = tuple(leaf.detach() for leaf in leaves if is_tensor(leaf))
    kept = {
        operator: rule
        for operator, rule in dict(torch._decomp.core_aten_decompositions()).items()
        if str(operator) not in LOWERINGS
    }
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)  # tensors in closures are constants
    try:
        with (
            _as_it_was(module),
            torch_internals._quiet(),
            torch_internals._decomposed(),
            torch.enable_grad(),
            torch._guards.tracing(torch._guards.TracingContext(fake)),
            contextlib.ExitStack() as stack,
        ):
            found = aot_export_joint_with_descriptors(stack, whole, tensors, decompositions=kept)
            graph = found.graph_module
    except InputError:
        raise
    except Exception as error:
        raise InputError(torch_internals._reason(error, False)) from error
    return _Reader(whole, graph, leaves).joint()


@contextlib.contextmanager
def _as_it_was(module: torch.nn.Module) -> Iterator[None]:
    """Whatever computing does to a module's attributes is undone: tensors without data must not stay in it."""
    saved = [(each, dict(each.__dict__), dict(each._parameters), dict(each._buffers)) for each in module.modules()]
    try:
        yield
    finally:
        for each, attributes, parameters, buffers in saved:
            each.__dict__.clear()
            each.__dict__.update(attributes)
            each._parameters.clear()
            each._parameters.update(parameters)
            each._buffers.clear()
            each._buffers.update(buffers)


def _require_recordable(module: torch.nn.Module, loss: Summed) -> None:
    for name, each in module.named_modules():
        if (
            isinstance(each, torch.nn.modules.batchnorm._BatchNorm)
            and each.training
            and each.track_running_stats
            and each.momentum is None
        ):
            raise InputError(
                f"{name or 'the module'} averages over all batches there were (momentum=None), which micro-batches "
                "that are computed side by side cannot do: give it a momentum, such as 0.1"
            )
    own = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]
    if own:
        raise InputError(
            f"the loss has a parameter of its own, {own[0].removeprefix('of.')}: make it part of the model"
        )
    extents: list[tuple[int, int, str, Any]] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad or not parameter.numel():
            continue
        steps = zip(parameter.shape, parameter.stride(), strict=True)
        size = (sum((n - 1) * step for n, step in steps) + 1) * parameter.element_size()
        start = parameter.data_ptr()
        extents.append((start, start + size, name, (parameter.dtype, tuple(parameter.shape), parameter.stride())))
    extents.sort(key=lambda each: each[:2])
    for (start, end, one, layout), (other, _, two, arranged) in itertools.pairwise(extents):
        if other < end and (start, layout) != (other, arranged):
            raise InputError(f"the parameters {one} and {two} overlap in memory without being the same")


class _Reader:
    """From PyTorch's graph to plain calls."""

    def __init__(self, whole: _Whole, module: Any, leaves: Sequence[Any]):
        parameters = dict(whole.named_parameters(remove_duplicate=False))
        buffers = dict(whole.named_buffers(remove_duplicate=False))
        self._module = module
        self._positions = [number for number, leaf in enumerate(leaves) if is_tensor(leaf)]
        self._arrays = torch_internals._Arrays(types.SimpleNamespace(constants=buffers, state_dict=parameters))
        self._trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self._calls: list[Call] = []
        self._slots: list[Slot] = []

    def joint(self) -> Joint:
        """Read it all."""
        self._inputs()
        self._calls += torch_internals._calls(self._module, self._arrays, self._slots)
        if any(call.target == "aten._local_scalar_dense.default" for call in self._calls):
            raise InputError(
                "PyTorch cannot record the program: its course depends on data (a tensor becomes a number)"
            )
        output = next(node for node in self._module.graph.nodes if node.op == "output")
        values: list[Any] = [None, None]
        gradients: dict[str, list[Ref]] = {}
        state: dict[str, Ref] = {}
        for node, desc in zip(output.args[0], output.meta["desc"], strict=True):
            if node is None:
                continue  # no gradient
            if isinstance(desc, descriptors.PlainAOTOutput):
                values[desc.idx] = Ref(node.name)
            elif isinstance(desc, descriptors.GradAOTOutput):
                if isinstance(desc.grad_of, descriptors.ParamAOTInput):
                    gradients.setdefault(self._arrays.name(desc.grad_of.target), []).append(Ref(node.name))
            elif isinstance(desc, descriptors.InputMutationAOTOutput):
                state[self._mutated(desc.mutated_input)] = Ref(node.name)
            else:
                raise InputError(f"the program has a result that nothing is known of: {desc.expr()}")
        values += [self._summed(name, refs) for name, refs in gradients.items()]
        names = {name.removeprefix("wrapped."): self._arrays.name(name) for name in self._trained}
        graph = Graph(
            tuple(self._slots), tuple(self._calls), tuple(values), tuple(state.items()), None, self._arrays.values, None
        )
        return Joint(graph, tuple(gradients), names)

    def _inputs(self) -> None:
        for node in self._module.graph.find_nodes(op="placeholder"):
            desc = node.meta["desc"]
            if isinstance(desc, (descriptors.ParamAOTInput, descriptors.BufferAOTInput)):
                self._slots.append(Slot(node.name, "array", target=self._arrays.name(desc.target)))
            elif isinstance(desc, descriptors.PlainAOTInput):
                self._slots.append(Slot(node.name, "leaf", self._positions[desc.idx]))
            elif isinstance(desc, descriptors.TangentAOTInput):
                # Of the sum, whose gradient is wanted; nothing that comes after reads what becomes of the buffers.
                one = isinstance(desc.output, descriptors.PlainAOTOutput)
                value = node.meta["val"]
                args = (tuple(map(int, value.shape)), float(one))
                self._calls.append(
                    Call(node.name, "aten.full.default", args, {}, (torch_internals.dtype_name(value.dtype),))
                )
            else:
                raise InputError(f"the program reads something that nothing is known of: {desc.expr()}")

    def _mutated(self, desc: Any) -> str:
        if isinstance(desc, descriptors.BufferAOTInput):
            return self._arrays.name(desc.target)
        if isinstance(desc, descriptors.ParamAOTInput):
            name = desc.target.removeprefix("wrapped.")
            raise InputError(f"the module writes into its parameter {name} while it computes")
        raise InputError("the module writes into its arguments: a micro-batch is read again, and must stay as it is")

    def _summed(self, name: str, refs: Sequence[Ref]) -> Ref:
        """The gradient of a parameter, which is the sum over its uses."""
        total = refs[0]
        dtype = self._arrays.values[name].dtype.name
        for number, ref in enumerate(refs[1:]):
            call = Call(f"{total.name}_tied_{number}", "aten.add.Tensor", (total, ref), {}, (dtype,), dtype)
            self._calls.append(call)
            total = Ref(call.name)
        return total


# --- the check of a capture -------------------------------------------------------------------------------------------
class _Keyed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random numbers of PyTorch's own course, drawn from the key and streams that the captured program draws from.

    A layer that is computed again for its backward puts the state of PyTorch's generator back, and is to draw the same
    once more: so that state tells which stream it is.
    """

    def __init__(self, key: np.ndarray[Any, Any]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._key = key
        self._streams: dict[bytes, int] = {}

    def _drawn(self, distribution: str, shape: Sequence[int]) -> torch.Tensor:
        state = torch.get_rng_state().numpy().tobytes()
        torch.rand(())
        stream = self._streams.setdefault(state, len(self._streams) + 1)
        key = self._key + np.array([0, stream], np.uint64)
        return torch.from_numpy(np.array(apply(f"random_{distribution}", key, shape=tuple(shape), dtype="float32")))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        if name == "aten.bernoulli_.float":
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return args[0].copy_(self._drawn("uniform", args[0].shape) < p)
        if name not in DRAWING:
            return func(*args, **kwargs)
        if name == "aten.native_dropout.default":
            x, p, train = args
            if train is False or p == 0:
                return x.clone(), torch.ones_like(x, dtype=torch.bool)
            kept = self._drawn("uniform", x.shape) >= p
            return x * kept.to(x.dtype) * (1.0 / (1.0 - p) if p < 1 else 0.0), kept
        like = func(*args, **kwargs)
        drawn = self._drawn("normal" if "randn" in name else "uniform", like.shape)
        if "bernoulli" in name:
            drawn = drawn < (args[1] if name.endswith(".p") else args[0].float())
        return drawn.to(like.dtype)


def eager(
    module: torch.nn.Module,
    loss: Summed,
    structure: Any,
    leaves: Sequence[Any],
    key: np.ndarray[Any, Any] | None = None,
) -> tuple[Any, Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Sum, count, gradients by name, and new buffers by name, as autograd gives them; the module stays as it is.

    Random numbers are drawn from `key` where there is one.
    """
    parameters = {name: p.detach().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    whole = _Whole(module, loss, structure, leaves)
    given = {f"wrapped.{name}": value for name, value in {**parameters, **buffers}.items()}
    tensors = [leaf.detach().clone() for leaf in leaves if is_tensor(leaf)]
    with _as_it_was(module), _quietly(), _drawing(key):
        total, count = torch.func.functional_call(whole, given, tuple(tensors), tie_weights=True)
        trained = {name: each for name, each in parameters.items() if each.requires_grad}
        found = (
            torch.autograd.grad(total, list(trained.values()), allow_unused=True)
            if total.requires_grad
            else [None] * len(trained)
        )
    gradients = {name: each for name, each in zip(trained, found, strict=True) if each is not None}
    return total.detach(), count, gradients, buffers


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with (
        torch_internals._quiet(),
        torch_internals._decomposed(),
        torch.enable_grad(),
        torch.random.fork_rng(devices=()),
    ):
        yield


@contextlib.contextmanager
def _drawing(key: np.ndarray[Any, Any] | None) -> Iterator[None]:
    if key is None:
        yield
        return
    with enable_python_dispatcher(), _Keyed(key):  # with it dropout is `native_dropout`, as it was recorded
        yield
