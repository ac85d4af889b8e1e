"""Elementwise operators: NumPy's ufuncs, SciPy's special functions, and the few that are neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import scipy

from goblin_dask.graphs.operators import samples
from goblin_dask.graphs.operators.base import Attributes, Example, Kind, Operator, Specs, broadcast, nbytes
from goblin_dask.graphs.operators.dtypes import DTYPES, common, returned
from goblin_dask.graphs.operators.rules import DType, Int
from goblin_dask.messages import ArraySpec

ELEMENTWISE = frozenset({Kind.ELEMENTWISE})

_UFUNCS = """
abs absolute 1 Absolute value.
acos arccos 1 Inverse cosine.
acosh arccosh 1 Inverse hyperbolic cosine.
add add 1 Sum.
asin arcsin 1 Inverse sine.
asinh arcsinh 1 Inverse hyperbolic sine.
atan arctan 1 Inverse tangent.
atan2 arctan2 1 Angle of the point (second operand, first operand).
atanh arctanh 1 Inverse hyperbolic tangent.
bitwise_and bitwise_and 1 Bits set in both.
bitwise_count bitwise_count 1 Number of bits set in the absolute value.
bitwise_invert invert 1 Each bit inverted; logical negation of booleans.
bitwise_left_shift left_shift 1 Bits moved to the left.
bitwise_or bitwise_or 1 Bits set in either.
bitwise_right_shift right_shift 1 Bits moved to the right, keeping the sign.
bitwise_xor bitwise_xor 1 Bits set in one of both.
cbrt cbrt 1 Cube root.
ceil ceil 1 Smallest integer not below.
conj conjugate 1 Complex conjugate.
copysign copysign 1 First operand with the sign of the second.
cos cos 1 Cosine.
cosh cosh 1 Hyperbolic cosine.
deg2rad deg2rad 1 Degrees to radians.
divide true_divide 1 Quotient.
divmod divmod 2 Floored quotient and remainder.
equal equal 1 Whether equal.
exp exp 1 Exponential.
exp2 exp2 1 Power of two.
expm1 expm1 1 Exponential minus one.
fabs fabs 1 Absolute value, in floating point.
float_power float_power 1 Power, in float64 or complex128 at least.
floor floor 1 Largest integer not above.
floor_divide floor_divide 1 Floored quotient.
fmax fmax 1 Larger one; a number where the other is NaN.
fmin fmin 1 Smaller one; a number where the other is NaN.
fmod fmod 1 Remainder with the sign of the dividend.
frexp frexp 2 Mantissa and exponent.
gcd gcd 1 Greatest common divisor.
greater greater 1 Whether greater.
greater_equal greater_equal 1 Whether not less.
heaviside heaviside 1 Step function; the second operand is its value at zero.
hypot hypot 1 Length of the hypotenuse.
isfinite isfinite 1 Whether finite.
isinf isinf 1 Whether infinite.
isnan isnan 1 Whether NaN.
lcm lcm 1 Least common multiple.
ldexp ldexp 1 First operand times two to the power of the second.
less less 1 Whether less.
less_equal less_equal 1 Whether not greater.
log log 1 Natural logarithm.
log10 log10 1 Decimal logarithm.
log1p log1p 1 Logarithm of one plus the operand.
log2 log2 1 Binary logarithm.
logaddexp logaddexp 1 Logarithm of the sum of exponentials.
logaddexp2 logaddexp2 1 Binary logarithm of the sum of powers of two.
logical_and logical_and 1 Whether both are true.
logical_not logical_not 1 Whether false.
logical_or logical_or 1 Whether either is true.
logical_xor logical_xor 1 Whether one of both is true.
maximum maximum 1 Larger one; NaN where either is.
minimum minimum 1 Smaller one; NaN where either is.
modf modf 2 Fractional and integral part.
multiply multiply 1 Product.
negative negative 1 Negation.
nextafter nextafter 1 Next representable number towards the second operand.
not_equal not_equal 1 Whether different.
positive positive 1 The operand itself, where it has a sign.
pow power 1 Power.
rad2deg rad2deg 1 Radians to degrees.
reciprocal reciprocal 1 One over the operand.
remainder remainder 1 Remainder with the sign of the divisor.
rint rint 1 Nearest integer, halves to even.
sign sign 1 Sign; of a complex number, the number over its absolute value.
signbit signbit 1 Whether the sign bit is set.
sin sin 1 Sine.
sinh sinh 1 Hyperbolic sine.
spacing spacing 1 Distance to the next representable number.
sqrt sqrt 1 Square root.
square square 1 Square.
subtract subtract 1 Difference.
tan tan 1 Tangent.
tanh tanh 1 Hyperbolic tangent.
trunc trunc 1 Integer towards zero.
"""
"""Name, NumPy's name, outputs, summary."""

_SPECIAL = """
digamma psi Logarithmic derivative of the gamma function.
erf erf Error function.
erfc erfc Complementary error function.
erfcinv erfcinv Inverse of the complementary error function.
erfinv erfinv Inverse of the error function.
expit expit Logistic function.
gamma gamma Gamma function.
lgamma gammaln Logarithm of the absolute value of the gamma function.
log_expit log_expit Logarithm of the logistic function.
log_ndtr log_ndtr Logarithm of the normal distribution function.
logit logit Inverse of the logistic function.
ndtr ndtr Normal distribution function.
ndtri ndtri Inverse of the normal distribution function.
"""
"""Name, SciPy's name, summary."""


@lru_cache(maxsize=8192)
def _kernel_dtypes(
    kernel: Callable[..., Any], attributes: tuple[tuple[str, Any], ...], *dtypes: str
) -> tuple[str, ...]:
    return returned(lambda *operands: kernel(np, operands, dict(attributes)), *dtypes)


def infer_by(kernel: Callable[..., Any]) -> Callable[[Specs, Attributes], Specs]:
    """Shape by broadcasting, dtypes by asking the kernel."""

    def infer(specs: Specs, attributes: Attributes) -> Specs:
        shape = specs[0].shape if len(specs) == 1 else broadcast(*(spec.shape for spec in specs))
        dtypes = _kernel_dtypes(kernel, tuple(attributes.items()), *(spec.dtype for spec in specs))
        return tuple(ArraySpec(shape, dtype) for dtype in dtypes)

    return infer


def _ufunc(name: str, source: str, outputs: int, summary: str) -> Operator:
    function = getattr(np, source)

    def kernel(xp: Any, operands: tuple[Any, ...], attributes: Attributes) -> tuple[Any, ...]:
        result = getattr(xp, source)(*operands)
        return result if outputs > 1 else (result,)

    def into(xp: Any, operands: tuple[Any, ...], attributes: Attributes, out: Any) -> None:
        getattr(xp, source)(*operands, out=out)

    return Operator(
        name,
        summary,
        ELEMENTWISE,
        infer_by(kernel),
        kernel,
        samples.unary() if function.nin == 1 else samples.binary(),
        arity=function.nin,
        outputs=outputs,
        into=into if outputs == 1 else None,
        reusable=None,
    )


def special(xp: Any) -> Any:
    """SciPy's special functions for the arrays of a namespace."""
    if xp is np:
        return scipy.special
    import cupyx.scipy.special  # only where the namespace is CuPy's

    return cupyx.scipy.special


def _special(name: str, source: str, summary: str, arity: int = 1) -> Operator:
    def kernel(xp: Any, operands: tuple[Any, ...], attributes: Attributes) -> tuple[Any, ...]:
        return (getattr(special(xp), source)(*operands),)

    dtypes = tuple(dtype for dtype in samples.ALL if dtype != "bfloat16")
    examples = samples.unary(dtypes) if arity == 1 else samples.binary(dtypes)
    return Operator(name, summary, ELEMENTWISE, infer_by(kernel), kernel, examples, arity=arity)


def _function(name: str, summary: str, kernel: Callable[..., Any], **more: Any) -> Operator:
    examples = more.pop("examples", None) or samples.unary()
    return Operator(name, summary, ELEMENTWISE, infer_by(kernel), kernel, examples, **more)


def _astype(xp: Any, operands: tuple[Any, ...], attributes: Attributes) -> tuple[Any, ...]:
    (array,), target = operands, DTYPES[attributes["dtype"]]  # type: ignore[index]
    if array.dtype.kind == "c" and target.kind not in "cb":
        return (array.real.astype(target),)  # as NumPy does, without its ComplexWarning
    return (array.astype(target, copy=False),)


def _infer_astype(specs: Specs, attributes: Attributes) -> Specs:
    return (ArraySpec(specs[0].shape, str(attributes["dtype"])),)


def _examples_astype() -> Iterator[Example]:
    for dtype in samples.ALL:
        for array in samples.arrays(shapes=((), (3, 4), (0,))):
            finite = np.where(np.isfinite(array), array, 1).astype(array.dtype)
            yield (np.asarray(np.clip(finite.real, 0, 100)).astype(array.dtype),), {"dtype": dtype}


def _infer_where(specs: Specs, attributes: Attributes) -> Specs:
    dtype = common(specs[1].dtype, specs[2].dtype)
    return (ArraySpec(broadcast(*(spec.shape for spec in specs)), dtype),)


def _where(xp: Any, operands: tuple[Any, ...], attributes: Attributes) -> tuple[Any, ...]:
    condition, x, y = operands
    if x.dtype != y.dtype and "bfloat16" in (x.dtype.name, y.dtype.name):
        dtype = DTYPES[common(x.dtype.name, y.dtype.name)]
        x, y = x.astype(dtype), y.astype(dtype)
    return (xp.where(condition, x, y),)


def _examples_where() -> Iterator[Example]:
    for (x, y), _ in samples.binary()():
        yield (samples.sample(y.shape, "bool"), x, y), {}
    yield (samples.sample((3, 1), "float32"), samples.sample((4,), "int8"), samples.sample((), "uint8")), {}


def _clip(xp: Any, operands: tuple[Any, ...], attributes: Attributes) -> tuple[Any, ...]:
    return (xp.clip(*operands),)


def _examples_clip() -> Iterator[Example]:
    for dtype in samples.ALL:
        for shape in ((), (5,), (3, 4), (0,)):
            one = np.ones((), DTYPES[dtype])
            yield (samples.sample(shape, dtype), one, samples.sample((), dtype)), {}
    yield (samples.sample((3, 4), "int8"), np.zeros((4,), "float32"), np.ones((3, 1), "int64")), {}


def _numpy(name: str, *given: str) -> Callable[..., tuple[Any, ...]]:
    """NumPy's function of that name, with these attributes."""

    def kernel(xp: Any, operands: tuple[Any, ...], attributes: Attributes) -> tuple[Any, ...]:
        return (getattr(xp, name)(*operands, *(attributes[a] for a in given)),)

    return kernel


def _real(xp: Any, operands: tuple[Any, ...], attributes: Attributes) -> tuple[Any, ...]:
    return (operands[0].real if operands[0].dtype.kind == "c" else operands[0],)


def _imag(xp: Any, operands: tuple[Any, ...], attributes: Attributes) -> tuple[Any, ...]:
    (array,) = operands
    return (array.imag if array.dtype.kind == "c" else xp.zeros(array.shape, array.dtype),)


def _is_complex(specs: Specs, attributes: Attributes) -> bool:
    return specs[0].dtype.startswith("complex")


def _temporaries(count: int) -> Callable[[Specs, Specs, Attributes], int]:
    """So many arrays of the result's size."""
    return lambda specs, outputs, attributes: count * max(nbytes(specs[0]), nbytes(outputs[0]))


_RIGHT = tuple(dtype for dtype in samples.ALL if dtype != "bfloat16")

OPERATORS: tuple[Operator, ...] = (
    _function("real", "Real part.", _real, idle=True, view=lambda specs, attributes: True),
    _function("imag", "Imaginary part.", _imag, view=_is_complex),
    _function("angle", "Angle of a complex number.", _numpy("angle"), workspace=_temporaries(2)),
    _function(
        "round",
        "Rounded to ``decimals`` places, halves to even.",
        _numpy("round", "decimals"),
        attributes={"decimals": Int(0, low=-400, high=400)},
        examples=samples.unary(decimals=1),
        workspace=_temporaries(2),
    ),
    _function("sinc", "sin(πx) / πx.", _numpy("sinc"), workspace=_temporaries(4), examples=samples.unary(_RIGHT)),
    _function(
        "i0",
        "Modified Bessel function of the first kind and order zero.",
        _numpy("i0"),
        workspace=_temporaries(8),
        examples=samples.unary(_RIGHT),
    ),
    _special("xlogy", "xlogy", "First operand times the logarithm of the second; zero where the first is.", 2),
    _special("xlog1py", "xlog1py", "First operand times log(1 + second); zero where the first is.", 2),
    *(
        _ufunc(name, source, int(n), text)
        for name, source, n, text in (r.split(" ", 3) for r in _UFUNCS.split("\n") if r)
    ),
    *(_special(name, source, text) for name, source, text in (r.split(" ", 2) for r in _SPECIAL.split("\n") if r)),
    Operator(
        "astype",
        "Cast, as NumPy's with ``casting='unsafe'``.",
        ELEMENTWISE,
        _infer_astype,
        _astype,
        _examples_astype,
        attributes={"dtype": DType()},
        idle=True,
        view=lambda specs, attributes: specs[0].dtype == attributes["dtype"],
        keeps_order=True,
    ),
    Operator(
        "where",
        "Second operand where the first is true, third elsewhere.",
        ELEMENTWISE,
        _infer_where,
        _where,
        _examples_where,
        arity=3,
    ),
    _function("clip", "First operand limited to the second and third.", _clip, examples=_examples_clip, arity=3),
)


def _ufuncs() -> dict[Any, str]:
    found = {getattr(np, row.split(" ")[1]): row.split(" ")[0] for row in _UFUNCS.split("\n") if row}
    return {**found, np.degrees: "rad2deg", np.radians: "deg2rad"}


UFUNCS = _ufuncs()
"""Operator of each ufunc of NumPy."""
