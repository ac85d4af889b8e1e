"""A PyTorch program as a graph of ATen's operators: all that is known here of how PyTorch works inside.

Written for torch 2.13. `torch.export` records the program on tensors without data, with a symbol for the size of the
batch; what changes state becomes a result. Attention is recorded in its decomposed form and recurrent layers step by
step, whatever the machine would call: a program must be the same on all.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from goblin_dask.errors import InputError
from goblin_dask.graphs.capture.aten.base import Call, Ref
from goblin_dask.graphs.capture.graph import Graph, Slot
from goblin_dask.graphs.capture.sizes import Sizes

IGNORED = re.compile(r"aten\._assert_|aten\.sym_constrain|aten\._linalg_check_errors")
"""Nodes that only check: what a program was captured for; LAPACK's complaints, which are the catalogue's too."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n?\s*([^\n]*)')


class _Flat(torch.nn.Module):
    """A module or function as a module of flat tensors."""

    def __init__(
        self,
        function: Callable[..., Any],
        structure: Any,
        leaves: Sequence[Any],
        tensors: Sequence[int],
        note: Callable[[Any], None],
    ):
        super().__init__()
        self.wrapped = function
        self._structure, self._leaves, self._tensors = structure, list(leaves), tuple(tensors)
        self._note = note
        """Told the structure of the result: torch.export puts attributes back as they were."""

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        leaves = list(self._leaves)
        for number, tensor in zip(self._tensors, tensors, strict=True):
            leaves[number] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        flat, result = pytree.tree_flatten(self.wrapped(*args, **kwargs))
        self._note(result)
        return tuple(flat)


def is_tensor(value: Any) -> bool:
    """Whether a value is PyTorch's."""
    return isinstance(value, torch.Tensor)


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of a tree of arguments."""
    return pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """The tree again."""
    return pytree.tree_unflatten(list(leaves), structure)


def examples(leaves: Sequence[Any], batched: Sequence[bool], axis: int) -> list[Any]:
    """Leaves to export with: a batch of one, which would be taken for a constant, twice."""
    return [
        torch.cat([leaf, leaf], axis) if has and leaf.shape[axis] == 1 else leaf
        for leaf, has in zip(leaves, batched, strict=True)
    ]


def export(
    function: Callable[..., Any], structure: Any, leaves: Sequence[Any], batched: Sequence[bool], axis: int
) -> Graph:
    """Capture a module or a function.

    Parameters
    ----------
    function : torch.nn.Module or callable
    structure, leaves
        Of its arguments, ``(args, kwargs)``.
    batched : sequence of bool
        Which leaves have the batch along `axis`: its size, which must be two or more, is a symbol in the graph.

    Raises
    ------
    InputError
        When PyTorch cannot record it, or only for one size of the batch.
    """
    tensors = [number for number, leaf in enumerate(leaves) if is_tensor(leaf)]
    results: list[Any] = []
    flat = _Flat(function, structure, leaves, tensors, results.append)
    examples = [leaves[number].detach() for number in tensors]
    dynamic: Any = torch.export.Dim.DYNAMIC
    shapes = tuple({axis: dynamic} if batched[number] else None for number in tensors)
    training = [(module, module.training) for module in _modules(function)]
    try:
        with _quiet(), _decomposed(), _told_apart(function):
            exported = torch.export.export(
                flat, tuple(examples), dynamic_shapes=(shapes,) if tensors else None, strict=False
            )
            exported = exported.run_decompositions()
    except Exception as error:
        raise InputError(_reason(error, any(batched))) from None  # what PyTorch says in hundreds of lines
    finally:
        for module, mode in training:
            module.training = mode
    opened = [batched[number] for number in tensors]
    return _graph(exported, results[-1], tensors, _sizes(exported, examples, opened, axis))


def _modules(function: Any) -> Iterator[torch.nn.Module]:
    return function.modules() if isinstance(function, torch.nn.Module) else iter(())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What could not be recorded is said once, by us."""
    logger = logging.getLogger("torch")
    level = logger.level
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.ExitStack() as stack,
    ):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        stack.callback(logger.setLevel, level)
        yield


@contextlib.contextmanager
def _decomposed() -> Iterator[None]:
    """Attention and recurrent layers in operators that every machine has."""
    attention, fast = torch.nn.attention, torch.backends.mha.get_fastpath_enabled()
    with (
        attention.sdpa_kernel(attention.SDPBackend.MATH),
        torch.backends.mkldnn.flags(enabled=False),
        torch.no_grad(),
        contextlib.ExitStack() as stack,
    ):
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        yield


@contextlib.contextmanager
def _told_apart(function: Callable[..., Any]) -> Iterator[None]:
    """Nodes remember lines of a function, as they do of a module's ``forward``: PyTorch keeps no others."""
    anchors = torch.fx.proxy._STACK_TRACE_ANCHORS
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    own = set() if code is None else {(code.co_filename, code.co_name)} - anchors
    anchors |= own
    try:
        yield
    finally:
        anchors -= own


_SIZE = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
"""How PyTorch's guards name the length of an axis of a tensor of `_Flat`."""


def _sizes(exported: Any, examples: Sequence[torch.Tensor], batched: Sequence[bool], axis: int) -> Sizes | None:
    """For which sizes of the batch a recorded program holds: PyTorch's guards, and ranges of its symbols."""
    if not any(batched):
        return None

    def length(found: re.Match[str]) -> str:
        number, place = int(found[1]), int(found[2])
        return "n" if batched[number] and place == axis else str(examples[number].shape[place])

    conditions = [_SIZE.sub(length, code) for code in exported._guards_code]
    recorded = next(example.shape[axis] for example, has in zip(examples, batched, strict=True) if has)
    names = set(exported.graph_signature.user_inputs)
    inputs = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder" and node.name in names]
    for value, has in zip(inputs, batched, strict=True):
        if not has:
            continue
        symbol = value.shape[axis].node.expr
        bounds = exported.range_constraints.get(symbol)
        if bounds is None:  # the length is not the symbol itself: nothing is known of others
            conditions.append(f"n == {recorded}")
            continue
        if bounds.lower > 2:
            conditions.append(f"n >= {bounds.lower}")
        if bounds.upper.is_Integer:
            conditions.append(f"n <= {bounds.upper}")
    return Sizes(int(recorded), tuple(dict.fromkeys(conditions)))


def _reason(error: Exception, batched: bool) -> str:
    """One sentence of what torch.export says in many."""
    text = str(error)
    if batched and re.search(r"[Cc]onstraint|specialized|marked .* as dynamic", text):
        found = re.search(r"specialized it to be a constant \((\d+)\)", text) or re.search(r"- ([^\n]+)", text)
        detail = f" ({found[1].strip()[:200]})" if found else ""
        return (
            f"the program holds for one size of the batch only{detail}: "
            "take the size from the tensor instead of a constant, or capture with dynamic_batch=False"
        )
    where = _where(text) or _where("".join(traceback.format_tb(error.__traceback__)))
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    depends = "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__
    what = "its course depends on data" if depends else first[:300]
    return f"PyTorch cannot record the program: {what}{f', at {where}' if where else ''}"


_OURS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
"""Folders of code that is nobody's but PyTorch's or ours."""


def _where(trace: str) -> str:
    """The last line of a traceback that is the user's own."""
    frames = [each for each in _FRAME.findall(trace or "") if not each[0].startswith(_OURS)]
    if not frames:
        return ""
    file, line, name, code = frames[-1]
    return f"{file}:{line} in {name}" + (f" ({code.strip()})" if code.strip() else "")


def _graph(exported: Any, structure: Any, tensors: Sequence[int], sizes: Sizes | None) -> Graph:
    signature, kinds = exported.graph_signature, torch.export.graph_signature
    arrays = _Arrays(exported)
    slots, leaf = [], iter(tensors)
    for spec in signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind == kinds.InputKind.USER_INPUT:
            if isinstance(spec.arg, kinds.ConstantArgument):
                slots.append(Slot(name, "number", value=spec.arg.value))
            else:
                slots.append(Slot(name, "leaf", next(leaf)))
        elif spec.kind in (kinds.InputKind.PARAMETER, kinds.InputKind.BUFFER, kinds.InputKind.CONSTANT_TENSOR):
            slots.append(Slot(name, "array", target=arrays.name(spec.target)))
        elif spec.kind == kinds.InputKind.TOKEN:
            slots.append(Slot(name, "number"))
        else:
            raise InputError(f"the program reads {spec.target or name!r}, which is no tensor: {spec.kind.name}")
    outputs, state = [], []
    for spec in signature.output_specs:
        value = Ref(spec.arg.name) if hasattr(spec.arg, "name") else spec.arg.value
        if isinstance(spec.arg, kinds.ConstantArgument):
            value = spec.arg.value
        if spec.kind == kinds.OutputKind.USER_OUTPUT:
            outputs.append(value)
        elif spec.kind == kinds.OutputKind.BUFFER_MUTATION:
            state.append((spec.target.removeprefix("wrapped."), value))
        elif spec.kind == kinds.OutputKind.TOKEN:
            continue  # of checks, which `_calls` leaves out
        elif spec.kind == kinds.OutputKind.USER_INPUT_MUTATION:
            number = next(slot.index for slot in slots if slot.name == spec.target)
            state.append((f"argument {number}", value))
        else:
            raise InputError(
                f"the program writes into {spec.target!r}, which is no buffer and no argument: return it instead"
            )
    calls = tuple(_calls(exported.graph_module, arrays, slots))
    return Graph(tuple(slots), calls, tuple(outputs), tuple(state), structure, arrays.values, sizes)


class _Arrays:
    """Parameters, buffers and constants by name; those that share memory and layout are one."""

    def __init__(self, exported: Any):
        self._tensors = {**exported.constants, **exported.state_dict}
        self._names: dict[Any, str] = {}
        self.values: dict[str, np.ndarray[Any, Any]] = {}

    def name(self, target: str) -> str:
        tensor = self._tensors[target]
        where = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        name = target.removeprefix("wrapped.")
        if tensor.numel() and where in self._names:
            return self._names[where]
        self._names[where] = name
        self.values[name] = np.array(to_numpy(tensor))  # a copy: the module goes on to be trained
        return name

    def constant(self, name: str, tensor: torch.Tensor) -> str:
        self._tensors[name] = tensor
        return self.name(name)


def _calls(module: Any, arrays: _Arrays, slots: list[Slot]) -> Iterator[Call]:
    left_out: set[Any] = set()
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr":
            value = getattr(module, node.target, None)
            if not isinstance(value, torch.Tensor):
                raise InputError(f"the program branches on data ({node.target}), at {_where(node.stack_trace or '')}")
            slots.append(Slot(node.name, "array", target=arrays.constant(node.target, value)))
            continue
        target = _target(node.target)
        if target == "higher_order.with_effects":  # a node that must not be left out, as PyTorch sees it
            target = _target(node.args[1])
        if IGNORED.match(target) or left_out.intersection(node.all_input_nodes):
            left_out.add(node)
            continue
        yield Call(
            node.name,
            target,
            _plain(node.args),
            {name: _plain(value) for name, value in node.kwargs.items() if name not in _PLACES},
            _dtypes(node.meta.get("val")),
            _promoted(node),
            _where(node.stack_trace or ""),
        )


_PLACES = ("device", "layout", "pin_memory", "memory_format")


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.__name__}"
    return f"operator.{getattr(target, '__name__', target)}"


def _plain(value: Any) -> Any:
    """An argument of a node as plain data; PyTorch's lists are of a class of its own."""
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(_plain(each) for each in value)
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return None
    return value


def dtype_name(dtype: torch.dtype) -> str:
    """NumPy's name of a dtype."""
    name = str(dtype).removeprefix("torch.")
    return {"half": "float16", "float": "float32", "double": "float64", "long": "int64"}.get(name, name)


def _dtypes(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(dtype_name(each.dtype) for each in values if is_tensor(each))


def _promoted(node: Any) -> str:
    """The dtype that elementwise operators compute in."""
    given = [each.meta.get("val") if isinstance(each, torch.fx.Node) else each for each in node.args]
    numbers = [each for each in given if is_tensor(each) or isinstance(each, (bool, int, float, complex, torch.SymInt))]
    if not any(is_tensor(each) for each in numbers):
        return ""
    common = torch._prims_common
    kind = common.ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    _, result = common.elementwise_dtypes(*numbers, type_promotion_kind=kind)
    return dtype_name(result)


# --- tensors and arrays ---------------------------------------------------------------------------------------------
def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's elements, bit for bit; views that are conjugate or negative are resolved."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    try:
        return tensor.numpy()
    except TypeError as error:
        raise InputError(f"tensors of dtype {tensor.dtype} are not computed on volunteers") from error


def to_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """An array as a tensor of its own memory."""
    return shared_tensor(np.array(array))


def shared_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor of an array's memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# --- the program itself ---------------------------------------------------------------------------------------------
def modes(function: Callable[..., Any]) -> tuple[bool, ...]:
    """Whether each of a module's modules is in training mode; empty for a function."""
    return tuple(module.training for module in _modules(function))


def names_of_state(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a module's parameters and buffers; those that are tied have several."""
    if not isinstance(function, torch.nn.Module):
        return frozenset()
    state = (*function.named_parameters(remove_duplicate=False), *function.named_buffers(remove_duplicate=False))
    return frozenset(name for name, _ in state)


def eager(
    function: Callable[..., Any], structure: Any, leaves: Sequence[Any], arrays: Mapping[str, np.ndarray[Any, Any]]
) -> list[Any]:
    """What the program itself gives, on copies of what it could change; random numbers are drawn for nobody else.

    Parameters
    ----------
    function, structure, leaves
        As for `export`.
    arrays : mapping of str to numpy.ndarray
        Parameters and buffers in the places of the module's own.
    """
    args, kwargs = pytree.tree_unflatten([leaf.clone() if is_tensor(leaf) else leaf for leaf in leaves], structure)
    with torch.no_grad(), torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(function, torch.nn.Module):
            state: dict[str, Any] = {name: buffer.clone() for name, buffer in function.named_buffers()}
            for name, tensor in (*function.named_parameters(), *function.named_buffers()):
                if name in arrays:
                    state[name] = to_tensor(arrays[name]).to(tensor.device)
            result = torch.func.functional_call(function, state, args, kwargs)
        else:
            result = function(*args, **kwargs)
    return pytree.tree_flatten(result)[0]
