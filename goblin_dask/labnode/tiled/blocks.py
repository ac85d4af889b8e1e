"""One operator applied block by block: what the rules of `goblin_dask.labnode.tiled.rules` are made of.

Axes are named by labels, as `dask.array.blockwise` names them. Along a *whole* label an operator has to see everything,
so that axis becomes one block; along the others blocks are computed independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np

from goblin_dask.errors import TooLarge
from goblin_dask.graphs.apply import applies_operators, apply
from goblin_dask.graphs.builder import Builder, infer
from goblin_dask.graphs.cost import peak
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.operators.base import Operator, describe
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.messages import ArraySpec

Labels = tuple[int, ...]
Arrays = tuple[da.Array, ...]


@dataclass(frozen=True, slots=True)
class Tiles:
    """How large blocks may be."""

    block: int
    """Bytes of a block that is made here."""
    memory: int | None
    """Bytes that the largest volunteer offers to a task; None where that is not known."""

    def chunks(self, shape: Sequence[int], dtype: Any) -> tuple[tuple[int, ...], ...]:
        """Blocks of an array that has none yet."""
        found: tuple[tuple[int, ...], ...] = da.core.normalize_chunks(
            "auto", tuple(shape), limit=self.block, dtype=np.dtype(dtype)
        )
        return found


@dataclass(frozen=True, slots=True)
class Application:
    """An operator with its operands, to be tiled."""

    operator: Operator
    operands: Arrays
    attributes: dict[str, Any]
    """Complete."""
    specs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]
    tiles: Tiles

    @classmethod
    def of(cls, name: str, operands: Sequence[Any], tiles: Tiles, **attributes: Any) -> Application:
        """An application of an operator to dask arrays and numbers."""
        arrays = tuple(x if isinstance(x, da.Array) else da.from_array(np.asarray(x)) for x in operands)
        specs = tuple(spec_of(array) for array in arrays)
        given, outputs = infer(name, specs, attributes)
        return cls(CATALOGUE[name], arrays, CATALOGUE[name].complete(given), specs, outputs, tiles)

    def node(self, blocks: Iterable[Sequence[int]]) -> int:
        """Projected peak memory, in bytes, of this operator on blocks of such shapes."""
        build = Builder()
        numbers = [
            build.input(ArraySpec(tuple(shape), spec.dtype)) for shape, spec in zip(blocks, self.specs, strict=True)
        ]
        return peak(build.finish(build.add(self.operator.name, numbers, **self.attributes))[0])


def spec_of(array: da.Array) -> ArraySpec:
    """Shape and dtype."""
    return ArraySpec(tuple(map(int, array.shape)), array.dtype.name)


@applies_operators
def block(*arrays: Any, operator: str, attributes: tuple[tuple[str, Any], ...]) -> Any:
    """The operator on blocks."""
    return apply(operator, *(_blocks(each)[0] for each in arrays), **dict(attributes))


@applies_operators
def block_of_sum(*arrays: Any, operator: str, attributes: tuple[tuple[str, Any], ...]) -> Any:
    """The sum, along the one label of several blocks that no output has, of the operator on blocks."""
    lists = [_blocks(each) for each in arrays]
    total: Any = None
    for number in range(max(map(len, lists))):
        parts = [each[number] if len(each) > 1 else each[0] for each in lists]
        term = apply(operator, *parts, **dict(attributes))
        total = term if total is None else apply("add", total, term)
    return total


def _blocks(value: Any) -> list[Any]:
    """Blocks along labels that no output has, as `dask.array.blockwise` nests them."""
    return [each for item in value for each in _blocks(item)] if isinstance(value, list) else [value]


@applies_operators
def pick(outputs: Any, *, number: int) -> Any:
    """One of several outputs of a block."""
    return outputs[number]


def blockwise(
    this: Application,
    labels: Sequence[Labels],
    outputs: Sequence[Labels],
    *,
    whole: Iterable[int] = (),
    function: Any = block,
) -> Arrays:
    """Apply an operator block by block.

    Parameters
    ----------
    this : Application
    labels : sequence
        Of each operand's axes.
    outputs : sequence
        Of each output's axes; labels that no operand has are axes of one block.
    whole : iterable of int
        Labels along which each operand becomes one block.
    function : callable
        `block` or `block_of_sum`.
    """
    whole = set(whole)
    operands = [
        array.rechunk({i: -1 for i, label in enumerate(each) if label in whole}) if whole & set(each) else array
        for array, each in zip(this.operands, labels, strict=True)
    ]
    operands = _fitting(this, operands, labels, whole)
    given = {"operator": this.operator.name, "attributes": tuple(this.attributes.items())}
    pairs = [item for array, each in zip(operands, labels, strict=True) for item in (array, each)]
    known = {label for each in labels for label in each}
    if len(this.outputs) == 1:
        return (_made(function, outputs[0], pairs, this.outputs[0], known, **given),)
    shared = tuple(sorted(known - whole))
    # Blocks of this one are tuples of the outputs' blocks.
    together = _made(function, shared, pairs, ArraySpec((0,) * len(shared), this.outputs[0].dtype), known, **given)
    return tuple(
        _made(pick, each, [together, shared], spec, set(shared), number=number)
        for number, (each, spec) in enumerate(zip(outputs, this.outputs, strict=True))
    )


def _made(
    function: Any, labels: Labels, pairs: Sequence[Any], spec: ArraySpec, known: set[int], **given: Any
) -> da.Array:
    dtype = DTYPES[spec.dtype]
    new = {label: size for label, size in zip(labels, spec.shape, strict=True) if label not in known}
    return da.blockwise(
        function,
        labels,
        *pairs,
        new_axes=new,
        dtype=dtype,
        meta=np.empty((0,) * len(labels), dtype),
        concatenate=False,
        **given,
    )


def _fitting(this: Application, operands: list[da.Array], labels: Sequence[Labels], whole: set[int]) -> list[da.Array]:
    """Operands in blocks with which the operator fits the largest volunteer.

    Raises
    ------
    TooLarge
        When there are none.
    """
    memory = this.tiles.memory
    while whole and memory is not None:
        shapes = [tuple(max(lengths, default=0) for lengths in array.chunks) for array in operands]
        needs = this.node(shapes)
        if needs <= memory:
            break
        lengths = {
            label: size
            for shape, each in zip(shapes, labels, strict=True)
            for label, size in zip(each, shape, strict=True)
            if label not in whole and size > 1
        }
        if not lengths:
            raise too_large(this, needs)
        longest = max(lengths, key=lambda label: lengths[label])
        smaller = -(-lengths[longest] // 2)
        operands = [
            array.rechunk({i: smaller for i, label in enumerate(each) if label == longest and array.shape[i] > 1})
            if longest in each
            else array
            for array, each in zip(operands, labels, strict=True)
        ]
    return operands


def single(this: Application) -> Arrays:
    """The operator on whole arrays, in one task.

    Raises
    ------
    TooLarge
        When no volunteer has the memory for it.
    """
    needs = this.node([spec.shape for spec in this.specs])
    if this.tiles.memory is not None and needs > this.tiles.memory:
        raise too_large(this, needs)
    labels, at = [], 0
    for spec in this.specs:
        labels.append(tuple(range(at, at + len(spec.shape))))
        at += len(spec.shape)
    outputs = []
    for spec in this.outputs:
        outputs.append(tuple(range(at, at + len(spec.shape))))
        at += len(spec.shape)
    return blockwise(this, labels, outputs, whole=range(at))


def too_large(this: Application, needs: int) -> TooLarge:
    """What to say of an operator that cannot be cut into smaller tasks."""
    return TooLarge(
        needs,
        this.tiles.memory or 0,
        f"{this.operator.name} of {describe(this.specs)} has no form in smaller blocks; use smaller arrays, or a "
        "volunteer with more memory",
    )
