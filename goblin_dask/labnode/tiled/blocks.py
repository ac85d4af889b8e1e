"""One operator applied block by block: what the rules of `goblin_dask.labnode.tiled.rules` are made of.

Axes are named by labels, as `dask.array.blockwise` names them. Along a *whole* label an operator has to see everything,
so that axis becomes one block; along the others blocks are computed independently.
"""

from __future__ import annotations

import math
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

    def node(self, blocks: Iterable[Sequence[int]], terms: int = 1) -> int:
        """Projected peak memory, in bytes, of this operator on blocks of such shapes, or of the sum of `terms` such."""
        build, given = (
            Builder(),
            [ArraySpec(tuple(map(int, s)), o.dtype) for s, o in zip(blocks, self.specs, strict=True)],
        )
        total: Any = None
        for _ in range(min(terms, 3)):
            found = build.add(self.operator.name, [build.input(spec) for spec in given], **self.attributes)
            total = found if total is None else build.add("add", [*total, *found])
        return peak(build.finish(total)[0])


def cut(array: da.Array, limit: int) -> da.Array:
    """The array in blocks of at most so many bytes; its own where they are."""
    lengths = [max(each, default=0) for each in array.chunks]
    found = list(lengths)
    while math.prod(found) * array.dtype.itemsize > limit and max(found, default=0) > 1:
        longest = found.index(max(found))
        found[longest] = -(-found[longest] // 2)
    smaller = {axis: length for axis, (length, old) in enumerate(zip(found, lengths, strict=True)) if length < old}
    return array.rechunk(smaller) if smaller else array


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
        if isinstance(term, tuple):
            (term,) = term
        total = term if total is None else apply("add", total, term)
    return total


def _blocks(value: Any) -> list[Any]:
    """Blocks along labels that no output has, as `dask.array.blockwise` nests them."""
    return [each for item in value for each in _blocks(item)] if isinstance(value, list) else [value]


@applies_operators
def pick(outputs: Any, *, number: int, axes: int = 0) -> Any:
    """One of several outputs of a block, with so many further axes of one element in front."""
    found = outputs[number]
    return apply("expand_dims", found, axes=tuple(range(axes))) if axes else found


def blockwise(
    this: Application,
    labels: Sequence[Labels],
    outputs: Sequence[Labels | None],
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
        Of each output's axes, None for one that is not wanted. Labels that no operand has are axes of one block. Where
        the operator has several outputs, one of them may lack labels of operands along which there are several blocks:
        what the blocks give for it comes side by side, along further axes in front.
    whole : iterable of int
        Labels along which each operand becomes one block.
    function : callable
        `block` or `block_of_sum`.
    """
    whole = set(whole)
    known = {label for each in labels for label in each}
    summed = known.difference(whole, *(each or () for each in outputs)) if function is block_of_sum else set()
    operands = _fitting(this, labels, whole, summed)
    given = {"operator": this.operator.name, "attributes": tuple(this.attributes.items())}
    pairs = [item for array, each in zip(operands, labels, strict=True) for item in (array, each)]
    if (this.operator.outputs == 1 or function is block_of_sum) and outputs[0] is not None:
        return (_made(function, outputs[0], pairs, this.outputs[0], known, **given),)
    shared = tuple(sorted(known - whole))
    # Blocks of this one are tuples of the outputs' blocks.
    together = _made(function, shared, pairs, ArraySpec((0,) * len(shared), this.outputs[0].dtype), known, **given)
    found = []
    for number, (each, spec) in enumerate(zip(outputs, this.outputs, strict=True)):
        if each is None:
            continue
        parts = tuple(label for label in shared if label not in each)
        spec = ArraySpec((0,) * len(parts) + spec.shape, spec.dtype)
        more = {"adjust_chunks": dict.fromkeys(parts, 1)} if parts else {}
        pair = [together, shared]
        made = _made(pick, parts + each, pair, spec, set(shared), number=number, axes=len(parts), **more)
        found.append(made)
    return tuple(found)


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


def _fitting(this: Application, labels: Sequence[Labels], whole: set[int], summed: set[int]) -> list[da.Array]:
    """Operands in blocks with which the operator takes half of what the largest volunteer has, or at least fits it.

    Raises
    ------
    TooLarge
        When there are none.
    """
    memory = this.tiles.memory
    lengths, counts = _lengths(this.operands, labels, whole)
    cuts: dict[int, int] = dict.fromkeys(whole, -1)
    while memory is not None:
        shapes = [
            tuple(1 if size == 1 else lengths[label] for label, size in zip(each, array.shape, strict=True))
            for array, each in zip(this.operands, labels, strict=True)
        ]
        needs = this.node(shapes, math.prod(counts[label] for label in summed))
        free = {label: size for label, size in lengths.items() if label not in whole and size > 1}
        if needs <= memory // 2 or (not free and needs <= memory):
            break
        if not free:
            raise too_large(this, needs)
        longest = max(free, key=lambda label: free[label])
        cuts[longest] = lengths[longest] = -(-lengths[longest] // 2)
        counts[longest] *= 2
    operands = []
    for array, each in zip(this.operands, labels, strict=True):
        # One call for all axes: what is to be cut along one is never joined whole along another before.
        chunks = {i: cuts[label] for i, label in enumerate(each) if label in cuts and array.shape[i] != 1}
        operands.append(array.rechunk(chunks) if chunks else array)
    return operands


def _lengths(
    operands: Sequence[da.Array], labels: Sequence[Labels], whole: set[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """Longest block along each label once operands are cut alike, and how many blocks there are at least."""
    lengths: dict[int, int] = {}
    counts: dict[int, int] = {}
    for array, each in zip(operands, labels, strict=True):
        for label, size, blocks in zip(each, array.shape, array.chunks, strict=True):
            longest = size if label in whole else max(blocks, default=0)
            if size != 1 or label not in lengths:
                lengths[label] = longest if lengths.get(label, 1) == 1 else min(lengths[label], longest)
                counts[label] = max(counts.get(label, 1), 1 if label in whole else len(blocks))
    return lengths, counts


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
