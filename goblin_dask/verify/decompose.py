"""Find the sums of products that a program ends in.

A value is *bilinear* when it is made of products of two other values by sums, differences and movement; the other
values (inputs, or whatever prologue computes them) are its operands. Axes are followed by labels, as in an einsum:
those of the output, and those that were summed over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from goblin_dask.graphs.operators import MOVEMENT
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.program import Program
from goblin_dask.graphs.schedule import Schedule, Step, schedule
from goblin_dask.verify.tolerances import is_floating

Labels = tuple[int, ...]
PIECES = 65_536
"""Most pieces and terms that are followed; a program with more is recomputed."""


@dataclass(frozen=True)
class Term:
    """One product: two values with labelled axes."""

    left: int
    left_axes: Labels
    right: int
    right_axes: Labels
    sign: int = 1

    def renamed(self, names: dict[int, int]) -> Term:
        return replace(
            self,
            left_axes=tuple(names.get(a, a) for a in self.left_axes),
            right_axes=tuple(names.get(a, a) for a in self.right_axes),
        )

    def swapped(self) -> Term:
        return Term(self.right, self.right_axes, self.left, self.left_axes, self.sign)


@dataclass(frozen=True)
class Piece:
    """A box of a value: a sum of terms."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    axes: Labels
    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Bilinear:
    """A value made of pieces."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Matrices:
    """One piece as matrix products: which axes of operands and output are rows, columns, batch and depth."""

    output: int
    """Position among the program's outputs."""
    views: tuple[tuple[int, ...], ...]
    """Shapes that the output is reshaped to, one after the other, before the piece is cut from it."""
    piece: Piece
    batch: Labels
    rows: Labels
    columns: Labels
    sizes: dict[int, int]

    def extent(self, labels: Labels) -> int:
        """Elements along some axes together."""
        return math.prod(self.sizes[label] for label in labels)

    def depth(self, term: Term) -> Labels:
        """Axes that a term is summed over, in the left operand's order."""
        kept = {*self.batch, *self.rows, *self.columns}
        return tuple(a for a in term.left_axes if a not in kept and a in term.right_axes)

    @property
    def flops(self) -> float:
        """Of all its products."""
        area = self.extent(self.batch) * self.extent(self.rows) * self.extent(self.columns)
        return float(sum(2 * area * self.extent(self.depth(term)) for term in self.piece.terms))


def _class(dtype: Any) -> str:
    """Kinds of numbers whose products are checked alike."""
    return "f" if is_floating(dtype) else "i" if dtype.kind == "u" else str(dtype.kind)


class _Finder:
    def __init__(self, program: Program):
        self.program, self.plan = program, schedule(program)
        self.owner = {value: step for step in self.plan.steps for value in step.outputs}
        self.labels: Iterator[int] = itertools.count()
        self.sizes: dict[int, int] = {}
        self.known: dict[int, Bilinear | None] = {}

    def fresh(self, size: int) -> int:
        label = next(self.labels)
        self.sizes[label] = size
        return label

    def shape(self, value: int) -> tuple[int, ...]:
        return self.plan.specs[value].shape

    def find(self, value: int) -> Bilinear | None:
        """Form of a value; operands first, without recursion: sums may be thousands of nodes deep."""
        stack = [value]
        while stack:
            top = stack[-1]
            if top in self.known:
                stack.pop()
                continue
            step = self.owner.get(top)
            rule = RULES.get(step.operator.name) if step is not None and len(step.outputs) == 1 else None
            if step is None or rule is None or not self._keeps_dtype(step, top):
                self.known[top] = None
                continue
            waiting = [v for v in _followed(step) if v not in self.known]
            if waiting:
                stack.extend(waiting)
                continue
            self.known[top] = rule(self, step, top)
        return self.known[value]

    def _keeps_dtype(self, step: Step, value: int) -> bool:
        """Whether sums are taken in the output's dtype, and operands are of its kind."""
        specs = self.plan.specs
        target = DTYPES[specs[value].dtype]
        if any(specs[operand].dtype != specs[value].dtype for operand in _followed(step)):
            return False
        return all(_class(DTYPES[specs[operand].dtype]) == _class(target) for operand in step.operands)

    def product(self, value: int, left: tuple[int, Labels], right: tuple[int, Labels], axes: Labels) -> Bilinear:
        """One term that is all of a value; a broadcast axis of size 1 gets a label of its own."""
        term = []
        for operand, labels in (left, right):
            shape = self.shape(operand)
            fitted = [
                label if self.sizes[label] == n else self.fresh(n) for label, n in zip(labels, shape, strict=True)
            ]
            term.append((operand, tuple(fitted)))
        (a, a_axes), (b, b_axes) = term
        shape = self.shape(value)
        return Bilinear((Piece((0,) * len(shape), shape, axes, (Term(a, a_axes, b, b_axes),)),))


def _axes(step: Step, name: str = "axes") -> tuple[int, ...]:
    value = step.attributes[name]
    assert isinstance(value, tuple)
    return value


def _matmul(find: _Finder, step: Step, value: int) -> Bilinear | None:
    a, b = step.operands
    shapes = find.shape(a), find.shape(b)
    rank = max(max(map(len, shapes)) - 2, 0)
    out = find.shape(value)
    batch = tuple(find.fresh(out[i]) for i in range(rank))
    depth = find.fresh(shapes[0][-1])
    rows = (find.fresh(shapes[0][-2]),) if len(shapes[0]) > 1 else ()
    columns = (find.fresh(shapes[1][-1]),) if len(shapes[1]) > 1 else ()
    left = (*batch[rank - max(len(shapes[0]) - 2, 0) :], *rows, depth) if rows else (depth,)
    right = (*batch[rank - max(len(shapes[1]) - 2, 0) :], depth, *columns) if columns else (depth,)
    return find.product(value, (a, left), (b, right), (*batch, *rows, *columns))


def _vecdot(find: _Finder, step: Step, value: int) -> Bilinear | None:
    if find.plan.specs[value].dtype.startswith("complex"):
        return None  # the first operand is conjugated
    left, right, axes = _broadcast(find, step)
    return find.product(value, (step.operands[0], left), (step.operands[1], right), axes[:-1])


def _broadcast(find: _Finder, step: Step) -> tuple[Labels, Labels, Labels]:
    a, b = (find.shape(v) for v in step.operands)
    rank = max(len(a), len(b))
    sizes = [
        max((s[i - rank + len(s)] for s in (a, b) if i - rank + len(s) >= 0), key=lambda n: (n != 1, n))
        for i in range(rank)
    ]
    axes = tuple(find.fresh(n) for n in sizes)
    return axes[rank - len(a) :], axes[rank - len(b) :], axes


def _multiply(find: _Finder, step: Step, value: int) -> Bilinear | None:
    left, right, axes = _broadcast(find, step)
    return find.product(value, (step.operands[0], left), (step.operands[1], right), axes)


def _outer(find: _Finder, step: Step, value: int) -> Bilinear | None:
    a, b = step.operands
    rows, columns = (find.fresh(find.shape(v)[0]) for v in (a, b))
    return find.product(value, (a, (rows,)), (b, (columns,)), (rows, columns))


def _accumulate(find: _Finder, step: Step, value: int) -> Bilinear | None:
    """addmm and baddbmm."""
    total, a, b = step.operands
    form = find.known[total]
    if form is None or len(form.pieces) != 1:
        return None
    axes = form.pieces[0].axes
    depth = find.fresh(find.shape(a)[-1])
    *batch, rows, columns = axes
    term = find.product(value, (a, (*batch, rows, depth)), (b, (*batch, depth, columns)), axes)
    return Bilinear((_merge(form.pieces[0], term.pieces[0]),))


def _tensordot(find: _Finder, step: Step, value: int) -> Bilinear | None:
    a, b = step.operands
    first, second = _axes(step, "a_axes"), _axes(step, "b_axes")
    left = [find.fresh(n) for n in find.shape(a)]
    right = [find.fresh(n) for n in find.shape(b)]
    for i, j in zip(first, second, strict=True):
        right[j] = left[i]
    axes = [label for i, label in enumerate(left) if i not in first]
    axes += [label for j, label in enumerate(right) if j not in second]
    return find.product(value, (a, tuple(left)), (b, tuple(right)), tuple(axes))


def _einsum(find: _Finder, step: Step, value: int) -> Bilinear | None:
    text = step.attributes.get("subscripts")
    if len(step.operands) != 2 or not isinstance(text, str):
        return None
    read, out = text.split("->")
    first, second = read.split(",")
    # a letter twice in one operand is a diagonal
    if len(set(first)) != len(first) or len(set(second)) != len(second):
        return None
    sizes: dict[str, int] = {}
    for names, operand in zip((first, second), step.operands, strict=True):
        for name, size in zip(names, find.shape(operand), strict=True):
            sizes[name] = size if size != 1 else sizes.get(name, 1)
    label = {name: find.fresh(size) for name, size in sizes.items()}
    left, right = (tuple(label[c] for c in names) for names in (first, second))
    return find.product(value, (step.operands[0], left), (step.operands[1], right), tuple(label[c] for c in out))


def _add(find: _Finder, step: Step, value: int) -> Bilinear | None:
    a, b = (find.known[operand] for operand in step.operands)
    if a is None or b is None or find.shape(step.operands[0]) != find.shape(step.operands[1]):
        return None
    sign = -1 if step.operator.name == "subtract" else 1
    other = {piece.offset: piece for piece in b.pieces}
    if len(other) != len(a.pieces):
        return None
    merged = []
    for piece in a.pieces:
        match = other.get(piece.offset)
        if match is None or match.shape != piece.shape:
            return None
        merged.append(_merge(piece, match, sign))
    return Bilinear(tuple(merged))


def _merge(piece: Piece, other: Piece, sign: int = 1) -> Piece:
    names = dict(zip(other.axes, piece.axes, strict=True))
    terms = tuple(replace(term.renamed(names), sign=term.sign * sign) for term in other.terms)
    return replace(piece, terms=piece.terms + terms)


def _negative(find: _Finder, step: Step, value: int) -> Bilinear | None:
    form = find.known[step.operands[0]]
    if form is None or find.plan.specs[value].dtype.startswith("uint"):
        return None
    return Bilinear(tuple(replace(p, terms=tuple(replace(t, sign=-t.sign) for t in p.terms)) for p in form.pieces))


def _sum(find: _Finder, step: Step, value: int) -> Bilinear | None:
    form = find.known[step.operands[0]]
    if form is None:
        return None
    rank = len(find.shape(step.operands[0]))
    axes = step.attributes["axes"]
    gone = set(axes) if isinstance(axes, tuple) else set(range(rank))
    keep = bool(step.attributes["keepdims"])
    found: dict[tuple[int, ...], Piece] = {}
    for piece in form.pieces:
        offset, shape, labels = [], [], []
        for i in range(rank):
            if i not in gone:
                offset.append(piece.offset[i])
                shape.append(piece.shape[i])
                labels.append(piece.axes[i])
            elif keep:
                offset.append(0)
                shape.append(1)
                labels.append(find.fresh(1))
        rest = Piece(tuple(offset), tuple(shape), tuple(labels), piece.terms)
        if rest.offset in found:
            if found[rest.offset].shape != rest.shape:
                return None
            rest = _merge(found[rest.offset], rest)
        found[rest.offset] = rest
    return Bilinear(tuple(found.values()))


def _reordered(form: Bilinear, order: tuple[int, ...]) -> Bilinear:
    def pick(items: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(items[i] for i in order)

    return Bilinear(
        tuple(replace(p, offset=pick(p.offset), shape=pick(p.shape), axes=pick(p.axes)) for p in form.pieces)
    )


def _permute(find: _Finder, step: Step, value: int) -> Bilinear | None:
    form = find.known[step.operands[0]]
    return None if form is None else _reordered(form, _axes(step))


def _reshape(find: _Finder, step: Step, value: int) -> Bilinear | None:
    """Only where axes of size 1 come and go."""
    form, old, new = find.known[step.operands[0]], find.shape(step.operands[0]), find.shape(value)
    if form is None or [n for n in old if n != 1] != [n for n in new if n != 1]:
        return None
    kept = iter([i for i, n in enumerate(old) if n != 1])
    sources = [next(kept) if n != 1 else None for n in new]
    pieces = []
    for p in form.pieces:
        pieces.append(
            Piece(
                tuple(p.offset[i] if i is not None else 0 for i in sources),
                tuple(p.shape[i] if i is not None else 1 for i in sources),
                tuple(p.axes[i] if i is not None else find.fresh(1) for i in sources),
                p.terms,
            )
        )
    return Bilinear(tuple(pieces))


def _join(find: _Finder, step: Step, value: int) -> Bilinear | None:
    axis = step.attributes["axis"]
    assert isinstance(axis, int)
    pieces: list[Piece] = []
    at = 0
    for operand in step.operands:
        form = find.known[operand]
        if form is None or len(pieces) > PIECES:
            return None
        for p in form.pieces:
            if step.operator.name == "stack":
                offset = (*p.offset[:axis], at, *p.offset[axis:])
                shape = (*p.shape[:axis], 1, *p.shape[axis:])
                pieces.append(Piece(offset, shape, (*p.axes[:axis], find.fresh(1), *p.axes[axis:]), p.terms))
            else:
                offset = tuple(o + at if i == axis else o for i, o in enumerate(p.offset))
                pieces.append(replace(p, offset=offset))
        at += 1 if step.operator.name == "stack" else find.shape(operand)[axis]
    return Bilinear(tuple(pieces))


def _same(find: _Finder, step: Step, value: int) -> Bilinear | None:
    return find.known[step.operands[0]]


RULES = {
    "matmul": _matmul,
    "vecdot": _vecdot,
    "tensordot": _tensordot,
    "einsum": _einsum,
    "outer": _outer,
    "addmm": _accumulate,
    "baddbmm": _accumulate,
    "multiply": _multiply,
    "add": _add,
    "subtract": _add,
    "negative": _negative,
    "positive": _same,
    "sum": _sum,
    "permute_dims": _permute,
    "reshape": _reshape,
    "expand_dims": _reshape,
    "squeeze": _reshape,
    "concat": _join,
    "stack": _join,
}
"""Operators that keep a value bilinear, or make it so."""

PRODUCTS = frozenset({"matmul", "vecdot", "tensordot", "einsum", "multiply", "outer"})
"""Those that make a bilinear value of any others."""


def _followed(step: Step) -> tuple[int, ...]:
    """Operands that must be bilinear themselves."""
    if step.operator.name in PRODUCTS:
        return ()
    return step.operands[:1] if step.operator.name in ("addmm", "baddbmm") else step.operands


def decompose(program: Program) -> tuple[Matrices, ...] | None:
    """All outputs of a program as matrix products; None when some output is something else."""
    finder, found = _Finder(program), []
    for number, value in enumerate(program.outputs):
        views: list[tuple[int, ...]] = []
        form = finder.find(value)
        while form is None and (step := finder.owner.get(value)) is not None and step.operator.name == "reshape":
            value = step.operands[0]
            views.append(finder.shape(value))
            form = finder.find(value)
        if form is None or len(form.pieces) > PIECES:
            return None
        for piece in form.pieces:
            matrices = _matrices(finder, number, tuple(views), piece)
            if matrices is None:
                return None
            found.append(matrices)
    return tuple(found)


def _matrices(finder: _Finder, number: int, views: tuple[tuple[int, ...], ...], piece: Piece) -> Matrices | None:
    """Sort the axes of a piece into batch, rows and columns, the same for all of its terms."""
    sizes = finder.sizes
    first = piece.terms[0]
    both = set(first.left_axes) & set(first.right_axes)
    batch = tuple(a for a in piece.axes if a in both)
    rows = tuple(a for a in piece.axes if a in first.left_axes and a not in both)
    columns = tuple(a for a in piece.axes if a in first.right_axes and a not in both)
    rest = set(piece.axes) - {*batch, *rows, *columns}
    if any(sizes[a] != 1 for a in rest) or len(piece.terms) > PIECES:
        return None
    half = finder.plan.specs[finder.program.outputs[number]].dtype in ("float16", "bfloat16")
    if half and len(piece.terms) > 1:
        return None  # each partial sum was rounded to half precision
    kept, terms = {*batch, *rows, *columns}, []
    for term in piece.terms:
        if not _fits(term, batch, rows, columns):
            term = term.swapped()
            if not _fits(term, batch, rows, columns):
                return None
        # an axis of one operand alone, summed over, is a sum before the product
        alone = (set(term.left_axes) ^ set(term.right_axes)) - kept
        if any(sizes[a] != 1 for a in alone):
            return None
        terms.append(term)
    return Matrices(number, views, replace(piece, terms=tuple(terms)), batch, rows, columns, sizes)


def _fits(term: Term, batch: Labels, rows: Labels, columns: Labels) -> bool:
    left, right = set(term.left_axes), set(term.right_axes)
    return (
        all(a in left and a in right for a in batch)
        and all(a in left and a not in right for a in rows)
        and all(a in right and a not in left for a in columns)
    )


def moves_only(plan: Schedule, steps: list[int]) -> bool:
    """Whether a prologue only moves elements, and so is exact."""
    return all(plan.steps[number].operator.name in MOVEMENT for number in steps)
