"""Templates: one recording, checked once, for all tasks that differ in their keys alone."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from goblin_dask.digest import digest
from goblin_dask.errors import GoblinError, NotTraceable
from goblin_dask.graphs import cost
from goblin_dask.graphs.capture import selfcheck
from goblin_dask.graphs.capture.pytree import Leaf, flatten, is_array, map_tree, spec_of, unflatten
from goblin_dask.graphs.capture.skeleton import Skeletons, evaluate, only_applies
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.trace import Traced, record
from goblin_dask.messages import ArraySpec

SMALL = 2**21
"""Elements of operands up to which a template is checked at its full size."""
FLOPS = 1e9
"""Arithmetic up to which it is."""


@dataclass(slots=True)
class Trees:
    """Trees of specs, numbered, so that comparing two is comparing numbers."""

    numbers: dict[Hashable, int]
    trees: list[Any]
    sizes: list[int]
    """Arrays in each."""

    @classmethod
    def new(cls) -> Trees:
        return cls({}, [], [])

    def number(self, tree: Any) -> int:
        """The number of a tree with an `ArraySpec` in the place of each array; -1 for None: not known."""
        if tree is None:
            return -1
        key = tree if type(tree) is ArraySpec else _frozen(tree)
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.trees)
            self.trees.append(tree)
            self.sizes.append(len(flatten(tree, lambda value: isinstance(value, ArraySpec))[0]))
        return number


def _frozen(tree: Any) -> Hashable:
    if isinstance(tree, dict):
        return (dict, *((repr(name), _frozen(value)) for name, value in tree.items()))
    if isinstance(tree, (list, tuple)):
        return (type(tree), *map(_frozen, tree))
    return tree if isinstance(tree, ArraySpec) else (type(tree), repr(tree))


@dataclass(slots=True)
class Template:
    """What all tasks of one skeleton with operands of the same specs are."""

    reason: str = ""
    """Why they run in the laboratory; empty where they do not."""
    program: Program | None = None
    """None: nothing is computed, the value is made of other keys' arrays."""
    sources: tuple[tuple[str, Any, int], ...] = ()
    """Of each input: ``("operand", number of the key read, leaf in it)``, ``("literal", its number, 0)`` or
    ``("found", array, 0)``."""
    tree: Any = None
    result: int = -1
    """Number of the value's specs; -1: not known."""
    unsure: Traced | None = None
    """To be compared on real operands before it is trusted: the function raises on drawn data."""


class Templates:
    """The templates of one lowering.

    Parameters
    ----------
    check : bool
        Compare each recording with its function on drawn data before it is trusted.
    inputs : bool
        Whether arrays among a task's own arguments become inputs of its program.
    """

    def __init__(self, check: bool = True, inputs: bool = True) -> None:
        self.check = check
        self.inputs = inputs
        self.trees = Trees.new()
        self.skeletons = Skeletons()
        self._templates: dict[Hashable, Template | dict[tuple[str, ...], Template]] = {}
        self._baked: dict[Hashable, frozenset[int]] = {}
        self._digests: dict[int, tuple[Any, str]] = {}

    def __len__(self) -> int:
        return sum(len(each) if isinstance(each, dict) else 1 for each in self._templates.values())

    def of(self, node: Any, numbers: dict[Hashable, int]) -> Template:
        """The template of a task.

        Parameters
        ----------
        node : Task
        numbers : dict
            Number of the specs of each key that it reads, none of them -1. Afterwards ``skeletons.refs`` and
            ``skeletons.literals`` are those of this task.
        """
        skeletons = self.skeletons
        skeleton = skeletons.of(node)
        operands = tuple([numbers[key] for key in skeletons.refs])
        key = (skeleton, operands)
        found = self._templates.get(key)
        if found is None:
            return self._make(node, key, operands)
        if type(found) is Template:
            return found
        values = self._values(self._baked[key])
        return found.get(values) or self._make(node, key, operands)  # type: ignore[union-attr]

    def _values(self, baked: frozenset[int]) -> tuple[str, ...]:
        result = []
        for number in sorted(baked):
            array = self.skeletons.literals[number]
            known = self._digests.get(id(array))
            if known is None:
                known = self._digests[id(array)] = (array, digest(array.tobytes()))
            result.append(known[1])
        return tuple(result)

    def _make(self, node: Any, key: Hashable, operands: tuple[int, ...]) -> Template:
        trees = [self.trees.trees[number] for number in operands]
        literals = list(self.skeletons.literals)
        template, baked = self._trace(node, trees, literals)
        if not baked:
            self._templates[key] = template
            return template
        # What the function looked at may differ with the values, so later ones look at least at as much.
        variants = self._templates.get(key)
        merged = baked | self._baked.get(key, frozenset())
        if not isinstance(variants, dict) or merged != self._baked.get(key):
            variants = {}
        self._baked[key] = merged
        variants[self._values(merged)] = template
        self._templates[key] = variants
        return template

    def _trace(self, node: Any, trees: list[Any], literals: list[Any]) -> tuple[Template, frozenset[int]]:
        call = _caller(node)
        try:
            traced = record(call, trees, literals, inputs=self.inputs)
        except NotTraceable as error:
            # Had the values been others, the recording might not have failed.
            return Template(str(error)), frozenset(range(len(literals)))
        reason = _useless(traced)
        tree, unsure = traced.tree, None
        if self.check and not only_applies(node):
            try:
                tree = self._confirm(call, trees, literals, traced)
            except selfcheck.Different as error:
                return Template(f"self-check: {error}"), traced.baked
            except selfcheck.Undecided as error:
                if reason:
                    return Template(str(error)), traced.baked
                unsure = traced
                return Template(unsure=unsure, reason=str(error)), traced.baked
            except GoblinError as error:  # a program that is too large to be one
                return Template(str(error)), traced.baked
        result = self.trees.number(traced.specs)
        if reason:
            return Template(reason, result=result), traced.baked
        return Template("", traced.program, _sources(traced, trees), tree, result), traced.baked

    def _confirm(self, call: Any, trees: list[Any], literals: list[Any], traced: Traced) -> Any:
        leaves = flatten(trees, lambda value: isinstance(value, ArraySpec))[0]
        size = sum(math.prod(spec.shape) for spec in leaves)
        work = cost.flops(traced.program) if traced.program is not None else 0.0
        if (size > SMALL or work > FLOPS) and self.skeletons.library and not literals:
            smaller = _shrunk(call, trees, traced)
            if smaller is not None:
                try:
                    return _renumber(traced.tree, selfcheck.confirm(_called(call), smaller[0], literals, smaller[1]))
                except selfcheck.Undecided:
                    pass  # the full size may suit the function better
        return selfcheck.confirm(_called(call), trees, literals, traced)

    def settle(self, node: Any, template: Template, values: Sequence[Any]) -> Template:
        """Compare an unsure template with its function on real operands.

        Parameters
        ----------
        values : sequence of tree
            Of arrays: the values of the keys in ``skeletons.refs``.
        """
        traced = template.unsure
        if traced is None:
            return template
        call, literals = _caller(node), list(self.skeletons.literals)
        trees = [map_tree(lambda value: _spec(value), tree) for tree in values]
        try:
            tree = selfcheck.confirm_on(_called(call), values, literals, traced)
        except selfcheck.Different as error:
            return Template(f"self-check: {error}")
        return Template("", traced.program, _sources(traced, trees), tree, self.trees.number(traced.specs))


def _spec(value: Any) -> Any:
    return spec_of(value) if is_array(value) else value


def _caller(node: Any) -> Any:
    def call(route: Any, operands: list[Any], literals: list[Any]) -> Any:
        return evaluate(node, iter(operands), iter(literals), route)

    return call


def _called(call: Any) -> selfcheck.Call:
    def with_own_functions(operands: list[Any], literals: list[Any]) -> Any:
        return call(lambda function: function, operands, literals)

    return with_own_functions


def _useless(traced: Traced) -> str:
    """Why a recording, though right, is no work for a volunteer."""
    if not any(kind == "operand" for kind, _ in traced.slots):
        return "it computes nothing from its operands' elements"
    if traced.program is None and any(kind != "operand" for kind, _ in traced.slots):
        return "its result is partly an array of its own"
    return ""


def _sources(traced: Traced, trees: list[Any]) -> tuple[tuple[str, Any, int], ...]:
    """Where each input comes from, operands by the key read and the leaf in its value."""
    places: list[tuple[int, int]] = []
    for ref, tree in enumerate(trees):
        count = len(flatten(tree, lambda value: isinstance(value, ArraySpec))[0])
        places.extend((ref, leaf) for leaf in range(count))
    return tuple((kind, *places[what]) if kind == "operand" else (kind, what, 0) for kind, what in traced.slots)


def _renumber(tree: Any, marked: Any) -> Any:
    """A tree whose leaves keep their numbers and take the marks of another of the same structure."""
    marks = flatten(marked, lambda value: isinstance(value, Leaf))[0]
    leaves, skeleton = flatten(tree, lambda value: isinstance(value, Leaf))
    return unflatten(skeleton, [Leaf(a.index, b.scalar) for a, b in zip(leaves, marks, strict=True)])


def _shrunk(call: Any, trees: list[Any], traced: Traced) -> tuple[list[Any], Traced] | None:
    """The same recording on smaller operands of the same ranks, where its nodes are the same.

    Only for functions of NumPy, SciPy and Dask: theirs do the same at every size, and what is checked is that this
    recording of them is right, which a small size shows as well as a large one. Anybody else's function may branch on
    shapes, and is run at full size. Sizes that are equal stay equal.
    """
    sizes = sorted(
        {size for spec in flatten(trees, lambda v: isinstance(v, ArraySpec))[0] for size in spec.shape if size > 32}
    )
    smaller = {size: 17 + 2 * i for i, size in enumerate(sizes)}
    shrunk = map_tree(
        lambda value: (
            ArraySpec(tuple(smaller.get(n, n) for n in value.shape), value.dtype)
            if isinstance(value, ArraySpec)
            else value
        ),
        trees,
    )
    try:
        again = record(call, shrunk, [])
    except (NotTraceable, GoblinError):
        return None
    a, b = traced.program, again.program
    if (a is None) is not (b is None) or traced.slots != again.slots:
        return None
    if a is not None and b is not None:
        if a.outputs != b.outputs or len(a.nodes) != len(b.nodes):
            return None
        for x, y in zip(a.nodes, b.nodes, strict=True):
            if (x.operator, x.operands) != (y.operator, y.operands) or [n for n, _ in x.attributes] != [
                n for n, _ in y.attributes
            ]:
                return None
    return shrunk, again
