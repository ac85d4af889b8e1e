"""Rewriting of programs: composing them, and bringing sums of products into the form that runs in place and is checked.

What a chunked product becomes after its tasks were put together is full of axes of length one that come and go:
partial products are expanded, added (or concatenated and summed) and squeezed. Here such movement is carried past
additions and cancelled, and ``x + a @ b`` becomes `addmm`, which needs no second buffer. Integers and booleans stay
exact; floating sums keep their terms and may change their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.operators.rules import Attribute
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import schedule
from goblin_dask.messages import ArraySpec

_RESHAPES = frozenset({"reshape", "expand_dims", "squeeze"})
_SUMMED_AS_IS = frozenset({"float32", "float64", "complex64", "complex128", "int64", "uint64"})
"""Dtypes whose sum is a chain of additions of the same dtype; NumPy sums float16 in float32."""


class Rewriter(Builder):
    """A builder that simplifies what is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[str, tuple[int, ...], dict[str, Attribute]]] = {}
        """Operator, operands and attributes of each value that is the only output of a node."""

    def inline(self, program: Program, operands: Sequence[int]) -> tuple[int, ...]:
        """Apply a whole program to values; the numbers of its outputs."""
        values = list(operands)
        for node in program.nodes:
            values.extend(self.apply(node.operator, tuple(values[o] for o in node.operands), node.attributes))
        return tuple(values[output] for output in program.outputs)

    def apply(
        self, operator: str, operands: tuple[int, ...], attributes: tuple[tuple[str, Attribute], ...]
    ) -> tuple[int, ...]:
        """Add a node, or something equal and simpler."""
        given = dict(attributes)
        if operator in _RESHAPES:
            results = self.add(operator, operands, **given)
            return (self._reshaped(operands[0], self.spec(results[0]).shape),)
        if operator == "add":
            return (self._added(*operands),)
        if operator == "sum":
            simpler = self._summed(operands[0], given)
            if simpler is not None:
                return (simpler,)
        if operator in ("tensordot", "einsum") and len(operands) == 2:
            simpler = self._contracted(operands[0], operands[1], given)
            if simpler is not None:
                return (simpler,)
        results = self.add(operator, operands, **given)
        if len(results) == 1 and results[0] not in operands:
            self._made.setdefault(results[0], (operator, operands, given))
        return results

    def _node(self, operator: str, operands: tuple[int, ...], **attributes: Attribute) -> int:
        (result,) = self.add(operator, operands, **attributes)
        if result not in operands:
            self._made.setdefault(result, (operator, operands, attributes))
        return result

    def _unreshaped(self, value: int) -> int:
        while value in self._made and self._made[value][0] in _RESHAPES:
            value = self._made[value][1][0]
        return value

    def _reshaped(self, value: int, shape: tuple[int, ...]) -> int:
        base = self._unreshaped(value)
        return base if self.spec(base).shape == shape else self._node("reshape", (base,), shape=shape)

    def _added(self, a: int, b: int) -> int:
        """Addition, done before a reshape of both operands instead of after."""
        x, y = self._unreshaped(a), self._unreshaped(b)
        if (x != a or y != b) and self.spec(a).shape == self.spec(b).shape and self.spec(x).shape == self.spec(y).shape:
            return self._reshaped(self._node("add", (x, y)), self.spec(a).shape)
        return self._node("add", (a, b))

    def _summed(self, value: int, given: dict[str, Attribute]) -> int | None:
        """A sum over axes of one element each, or over a concatenation of such, as a chain of additions."""
        spec = self.spec(value)
        result = self.spec(self.add("sum", (value,), **given)[0])
        if result.dtype != spec.dtype or spec.dtype not in _SUMMED_AS_IS:
            return None
        axes = given.get("axes")
        rank = len(spec.shape)
        wanted = {axis % rank for axis in _ints(axes)} if axes is not None else set(range(rank))
        pieces = self._pieces(value, wanted)
        if pieces is None:
            return None
        total = pieces[0]
        for piece in pieces[1:]:
            total = self._added(total, piece)
        return self._reshaped(total, result.shape)

    def _pieces(self, value: int, axes: set[int]) -> list[int] | None:
        """Arrays of length one along `axes` whose concatenation along them `value` is."""
        spec = self.spec(value)
        if all(spec.shape[axis] == 1 for axis in axes):
            return [value]
        operator, operands, attributes = self._made.get(value, ("", (), {}))
        if operator != "concat" or _ints(attributes.get("axis", 0))[0] % len(spec.shape) not in axes:
            return None
        pieces: list[int] = []
        for operand in operands:
            below = self._pieces(operand, axes)
            if below is None:
                return None
            pieces.extend(below)
        return pieces

    def _contracted(self, a: int, b: int, given: dict[str, Attribute]) -> int | None:
        """A tensordot or einsum of two matrices over one axis each is a product."""
        x, y = self.spec(a), self.spec(b)
        if len(x.shape) != 2 or len(y.shape) != 2 or x.dtype != y.dtype:
            return None
        swapped = False
        if "subscripts" in given:
            terms = str(given["subscripts"]).replace("->", ",").split(",")
            shared = set(terms[0]) & set(terms[1])
            if any(len(set(term)) != 2 for term in terms) or len(shared) != 1 or shared & set(terms[2]):
                return None
            left, right = (term.index(next(iter(shared))) for term in terms[:2])
            swapped = terms[2][0] in terms[1]
        else:
            axes = _ints(given.get("a_axes")), _ints(given.get("b_axes"))
            if len(axes[0]) != 1:
                return None
            left, right = axes[0][0] % 2, axes[1][0] % 2
        if left == 0:
            a = self._node("permute_dims", (a,), axes=(1, 0))
        if right == 1:
            b = self._node("permute_dims", (b,), axes=(1, 0))
        product = self._node("matmul", (a, b))
        return self._node("permute_dims", (product,), axes=(1, 0)) if swapped else product


def _ints(value: Attribute) -> tuple[int, ...]:
    """An attribute that is an integer or a tuple of them."""
    return tuple(v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, int))


def accumulate(program: Program) -> tuple[Program, tuple[int, ...]]:
    """Turn sums with products among their terms into chains of `addmm` (`baddbmm` for stacks of matrices).

    ``(x + a @ b) + (y + c @ d)`` becomes ``((x + y) + a @ b) + c @ d``: one buffer, whatever the shape of the sum was.

    Returns
    -------
    program : Program
    slots : tuple of int
        Which input of the given program each input of the result is.
    """
    sums = _Sums(program)
    if not sums.found:
        return program, tuple(range(len(program.inputs)))
    build = Builder()
    values = {slot: build.input(spec) for slot, spec in enumerate(program.inputs)}
    for step, node in zip(sums.plan.steps, program.nodes, strict=True):
        value = step.outputs[0]
        if value in sums.gone:
            continue
        if value in sums.found:
            values[value] = _chain(build, *sums.terms(value), values)
        else:
            results = build.add(node.operator, [values[o] for o in node.operands], **dict(node.attributes))
            values.update(zip(step.outputs, results, strict=True))
    return build.finish([values[output] for output in program.outputs])


_ACCUMULATIONS = frozenset({"addmm", "baddbmm"})


class _Sums:
    """The additions of a program, as trees with terms and products at their leaves."""

    def __init__(self, program: Program) -> None:
        self.plan = schedule(program)
        self.specs = self.plan.specs
        self.nodes = {step.outputs[0]: node for step, node in zip(self.plan.steps, program.nodes, strict=True)}
        uses = Counter(operand for node in program.nodes for operand in node.operands)
        uses.update(program.outputs)
        self.single = {value for value in self.nodes if uses[value] == 1}
        sums = [value for value in self.nodes if self._is_sum(value)]
        self.inner = {
            operand
            for value in sums
            for operand in self._summands(value)
            if operand in self.single and (self._is_sum(operand) or self._is_product(operand))
        }
        """Values that only one sum reads, and that are sums or products themselves."""
        self.found = {
            value
            for value in sums
            if value not in self.inner and any(t in self.inner for t in self._summands(value)) and self.terms(value)[1]
        }
        """Sums that have products among their terms and are worth writing anew."""
        self.gone: set[int] = set()
        """What is part of those."""
        stack = [operand for value in self.found for operand in self._summands(value)]
        while stack:
            value = stack.pop()
            if value in self.inner:
                self.gone.add(value)
                stack.extend(self._summands(value) if self._is_sum(value) else ())

    def _is_sum(self, value: int) -> bool:
        node = self.nodes.get(value)
        if node is None:
            return False
        if node.operator in _ACCUMULATIONS:
            return True
        return node.operator == "add" and all(self.specs[o] == self.specs[value] for o in node.operands)

    def _summands(self, value: int) -> tuple[int, ...]:
        node = self.nodes[value]
        return node.operands[:1] if node.operator in _ACCUMULATIONS else node.operands

    def _is_product(self, value: int) -> bool:
        node = self.nodes.get(value)
        if node is None or node.operator != "matmul" or self.specs[value].dtype == "bool":
            return False
        a, b = (self.specs[operand] for operand in node.operands)
        rank = len(a.shape)
        return rank in (2, 3) and rank == len(b.shape) and a.shape[:-2] == b.shape[:-2] and a.dtype == b.dtype

    def terms(self, root: int) -> tuple[list[int], list[tuple[int, ...]]]:
        """Terms of a sum, and the factors of its products, from left to right."""
        terms: list[int] = []
        products: list[tuple[int, ...]] = []
        stack: list[int | tuple[int, ...]] = [root]
        while stack:
            top = stack.pop()
            if isinstance(top, tuple):
                products.append(top)
            elif top != root and top not in self.inner:
                terms.append(top)
            elif self._is_product(top):
                products.append(self.nodes[top].operands)
            else:
                if self.nodes[top].operator in _ACCUMULATIONS:
                    stack.append(self.nodes[top].operands[1:])
                stack.extend(reversed(self._summands(top)))
        return terms, products


def _chain(build: Builder, terms: list[int], products: list[tuple[int, ...]], values: dict[int, int]) -> int:
    factors = [tuple(values[operand] for operand in product) for product in products]
    if terms:
        total = values[terms[0]]
        for term in terms[1:]:
            (total,) = build.add("add", (total, values[term]))
    else:
        (total,) = build.add("matmul", factors.pop(0))
    for a, b in factors:
        (total,) = build.add("addmm" if len(build.spec(a).shape) == 2 else "baddbmm", (total, a, b))
    return total


def compose(outer: Program, inner: Sequence[tuple[Program, dict[int, int]]]) -> tuple[Program, tuple[int, ...]]:
    """Put producers into their consumer.

    Parameters
    ----------
    outer : Program
        The consumer.
    inner : sequence of (Program, {slot: output})
        Producers, each with the slots of `outer` that read one of its outputs.

    Returns
    -------
    program : Program
    slots : tuple of int
        For each input of the result where it comes from, counting the inputs of `outer` first and then those of each
        producer.
    """
    build = Rewriter()
    operands = [build.input(spec) for spec in outer.inputs]
    declared = [[build.input(spec) for spec in program.inputs] for program, _ in inner]
    for (program, reads), inputs in zip(inner, declared, strict=True):
        results = build.inline(program, inputs)
        for slot, output in reads.items():
            operands[slot] = results[output]
    return _finished(build, build.inline(outer, operands))


def side_by_side(
    program: Program, operands: Sequence[Sequence[int]], specs: Sequence[ArraySpec]
) -> tuple[Program, tuple[int, ...]]:
    """One program that does what `program` does for several sets of operands, sharing those that are the same.

    Parameters
    ----------
    program : Program
    operands : sequence of sequence of int
        For each copy and each slot, which of the shared operands it reads.
    specs : sequence of ArraySpec
        Of the shared operands.

    Returns
    -------
    program : Program
        Its outputs are those of the copies, one copy after the other.
    slots : tuple of int
        Which shared operand each input is.
    """
    build = Rewriter()
    shared = [build.input(spec) for spec in specs]
    outputs: list[int] = []
    for chosen in operands:
        outputs.extend(build.inline(program, [shared[operand] for operand in chosen]))
    return build.finish(outputs)


def _finished(build: Builder, outputs: Sequence[int]) -> tuple[Program, tuple[int, ...]]:
    program, slots = build.finish(outputs)
    rewritten, kept = accumulate(program)
    return rewritten, tuple(slots[k] for k in kept)
