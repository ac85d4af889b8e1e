"""What an operator is: one declaration that shape rule, price, kernel, documentation and tests are derived from.

The catalogue is versioned, so that a volunteer of an older release keeps the work that it knows and is never given
other work. Whoever adds an operator, or changes what one means, gives it the version of the catalogue in which that
happened: ``since=2`` in its declaration, or ``OPERATORS = added_in(2, …)`` for all operators of a module, and raises
`goblin_dask.graphs.operators.CATALOGUE_VERSION` to that number if no operator has it yet.
"""

from __future__ import annotations

import enum
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from goblin_dask.errors import InputError, ProgramError
from goblin_dask.graphs.operators.dtypes import DTYPES
from goblin_dask.graphs.operators.rules import REQUIRED, Attribute, Rule
from goblin_dask.messages import ArraySpec

Specs = tuple[ArraySpec, ...]
Attributes = Mapping[str, Attribute]
"""Complete: defaults are filled in."""
Array = Any
Kernel = Callable[[Any, tuple[Array, ...], Attributes], tuple[Array, ...]]
"""Function of (array namespace, operands, attributes)."""
Example = tuple[tuple[Array, ...], dict[str, Any]]
"""Operands and attributes, as `Builder.add` takes them."""


class Kind(enum.Enum):
    """What passes ask of an operator; an operator may be of several kinds."""

    ELEMENTWISE = "one output element from one element of each (broadcast) operand"
    REDUCTION = "axes disappear"
    CUMULATIVE = "running reductions"
    MOVEMENT = "elements move, none is computed"
    INDEXING = "elements are chosen by an operand of integers"
    CONTRACTION = "sums of products"
    SORTING = "order statistics"
    LINALG = "decompositions and solvers"
    FFT = "discrete Fourier transforms"
    RANDOM = "counter-based random numbers; the key is an operand"
    CREATION = "no array operand"
    NEURAL = "layers of neural networks, under ATen's names"


def _elements(specs: Specs, outputs: Specs, attributes: Attributes) -> float:
    return float(sum(math.prod(spec.shape) for spec in outputs))


def _nothing(specs: Specs, outputs: Specs, attributes: Attributes) -> int:
    return 0


def _fresh(specs: Specs, attributes: Attributes) -> bool:
    return False


@dataclass(frozen=True, eq=False)
class Operator:
    """One row of the catalogue."""

    name: str
    """The array API standard's where that has one, NumPy's or ATen's else."""
    summary: str
    """One line for the generated table."""
    kinds: frozenset[Kind]
    infer: Callable[[Specs, Attributes], Specs]
    """Shapes and dtypes of the outputs; raises `InputError`, `TypeError` or `ValueError` where there are none."""
    kernel: Kernel
    examples: Callable[[], Iterator[Example]]
    """Operands and attributes for property tests, the awkward ones too."""
    arity: int | None = 1
    """Number of operands; None: any number from `least`."""
    least: int = 0
    outputs: int | None = 1
    """Number of outputs; None: as many as `infer` says."""
    attributes: Mapping[str, Rule] = field(default_factory=dict)
    flops: Callable[[Specs, Specs, Attributes], float] = _elements
    """Of operands' specs, outputs' specs, attributes. One per element moved or computed where nothing else is known."""
    workspace: Callable[[Specs, Specs, Attributes], int] = _nothing
    """Bytes that the kernel allocates besides its outputs, at its peak."""
    view: Callable[[Specs, Attributes], bool] = _fresh
    """Whether output 0 may share operand 0's memory. Every other output is fresh."""
    keeps_order: bool = False
    """A view of a C-contiguous operand is C-contiguous; an operand that is not is copied by a view."""
    unbroken: Callable[[Specs, Attributes], bool] = _fresh
    """Whether a view of a C-contiguous operand is C-contiguous here, though not always: elements without a gap."""
    permutes: bool = False
    """Its result has the operand's memory whole, in another order of axes: a matrix stays one that BLAS takes."""
    idle: bool = False
    """Its result is its operand where that already has the result's shape and dtype."""
    contiguous: bool = False
    """Fresh outputs are C-contiguous whatever the operands are; else only where every operand is."""
    into: Callable[[Any, tuple[Array, ...], Attributes, Array], object] | None = None
    """The kernel, writing its only output into an array that is given, in C order. See `reusable`."""
    reusable: tuple[int, ...] | None = ()
    """Operands that may themselves be the array that `into` writes into; None: any."""
    copies_strided: bool = False
    """The kernel copies operands that BLAS does not take as they lie."""
    check: str = "recompute"
    """Name of the rule by which its results are verified."""
    since: int = 1
    """Version of the catalogue in which it, or its present meaning, came."""
    defaults: Mapping[str, Attribute] = field(init=False)
    cached: bool = field(init=False)
    """Whether equal attributes are interchangeable (0.0 and -0.0 are not) and small: then inference is cached."""

    def __post_init__(self) -> None:
        rules = self.attributes
        defaults = {name: rule.default for name, rule in rules.items() if rule.default is not REQUIRED}
        object.__setattr__(self, "defaults", defaults)
        object.__setattr__(self, "cached", all(rule.exact for rule in rules.values()))

    def complete(self, attributes: tuple[tuple[str, Attribute], ...]) -> dict[str, Attribute]:
        """Attributes with defaults filled in."""
        return {**self.defaults, **dict(attributes)}

    def canonical(self, specs: Specs, attributes: Mapping[str, Any]) -> tuple[tuple[str, Attribute], ...]:
        """Attributes as a `Node` holds them: converted, sorted by name, without those that equal their defaults.

        Raises
        ------
        ProgramError
            For an attribute that is unknown, missing or that its rule refuses.
        """
        rules = self.attributes
        given = {}
        for name, value in attributes.items():
            rule = rules.get(name)
            if rule is None:
                known = ", ".join(rules) or "none"
                raise ProgramError(f"{self.name} has no attribute {name!r}; it has: {known}")
            try:
                given[name] = rule.convert(value, specs)
            except (InputError, TypeError, ValueError, ArithmeticError, LookupError) as error:
                raise ProgramError(f"{self.name}: attribute {name}={shorten(value)}: {error}") from error
        for name in rules:
            if name in given:
                if rules[name].is_default(given[name], specs):
                    del given[name]
            elif name not in self.defaults:
                raise ProgramError(f"{self.name} needs the attribute {name!r}")
        return tuple(sorted(given.items()))

    def outputs_of(self, specs: Specs, attributes: tuple[tuple[str, Attribute], ...]) -> Specs:
        """Specs of the outputs, for canonical attributes.

        Raises
        ------
        InputError
            With the operands' shapes and dtypes, where the operator does not take them.
        """
        if self.arity is not None and len(specs) != self.arity:
            raise ProgramError(f"{self.name} takes {self.arity} operands, got {len(specs)}")
        if len(specs) < self.least:
            raise ProgramError(f"{self.name} takes at least {self.least} operands, got {len(specs)}")
        try:
            return self.infer(specs, self.complete(attributes))
        except (InputError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InputError(f"{self.name} of {describe(specs)}: {error}") from error


def added_in(version: int, *operators: Operator) -> tuple[Operator, ...]:
    """Operators that came with a version of the catalogue.

    Examples
    --------
    >>> OPERATORS = added_in(2, convolution, max_pool2d)  # doctest: +SKIP
    """
    return tuple(replace(operator, since=version) for operator in operators)


_cut = reprlib.Repr()
_cut.maxtuple = _cut.maxlist = _cut.maxdict = 16
_cut.maxstring = _cut.maxother = _cut.maxlong = 80


def shorten(value: object, limit: int = 80) -> str:
    """`repr`, cut; of something huge without making all of it."""
    text = _cut.repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def describe(specs: Specs) -> str:
    """``float32 (3, 4) and float32 (5, 6)``."""
    named = [f"{spec.dtype} {spec.shape}" for spec in specs[:4]]
    if len(specs) > 4:
        named.append(f"{len(specs) - 4} more")
    return " and ".join(named) or "nothing"


def nbytes(spec: ArraySpec) -> int:
    """Bytes of an array's elements."""
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize


def like(spec: ArraySpec, shape: tuple[int, ...]) -> Specs:
    """One output of `spec`'s dtype."""
    return (ArraySpec(shape, spec.dtype),)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """NumPy's rule, without its limit of 64 operands and without an array."""
    first = shapes[0] if shapes else ()
    if all(shape == first for shape in shapes):
        return first
    result = [1] * max(map(len, shapes))
    for shape in shapes:
        for i, size in enumerate(shape, len(result) - len(shape)):
            if size != 1:
                if result[i] not in (1, size):
                    raise InputError(f"the shapes {' and '.join(map(str, shapes[:6]))} do not broadcast together")
                result[i] = size
    return tuple(result)


def check_count(name: str, got: int, wanted: int) -> None:
    """Refuse a tuple attribute of the wrong length."""
    if got != wanted:
        raise InputError(f"{name} has {got} entries, expected {wanted}")


def require_integers(spec: ArraySpec, what: str = "an index") -> None:
    """Refuse an operand that does not index."""
    if DTYPES[spec.dtype].kind not in "iu":
        raise InputError(f"{what} has dtype {spec.dtype}, expected integers")


def require_real(spec: ArraySpec) -> None:
    """Refuse complex numbers, which have no order."""
    if DTYPES[spec.dtype].kind == "c":
        raise InputError("complex numbers have no such order; take their real or absolute values")


def require_axis(specs: Specs, attributes: Any) -> int:
    """The attribute ``axis``, of an operand that has axes."""
    if not specs[0].shape:
        raise InputError("a scalar has no axis")
    return int(attributes["axis"])


def ordered_operator(
    name: str,
    summary: str,
    kinds: frozenset[Kind],
    infer: Any,
    kernel: Any,
    examples: Any,
    arity: int | None,
    **more: Any,
) -> Operator:
    """An operator whose outputs are C-contiguous whatever its operands are."""
    return Operator(name, summary, kinds, infer, kernel, examples, arity=arity, contiguous=True, **more)
