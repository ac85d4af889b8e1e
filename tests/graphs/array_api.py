"""Arguments for every function of the array API standard, drawn by Hypothesis' own strategies for it.

`CALLS` maps a function's name to a strategy of ``(arguments, keywords)`` whose arrays are those of the reference
implementation. Values are the awkward ones too: NaN, infinities, extreme integers, empty and 0-dimensional arrays.
"""

from __future__ import annotations

import math
import warnings

import array_api_strict as xp
import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.array_api import make_strategies_namespace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it announces that it is not the newest version's behaviour
    xp.set_array_api_strict_flags(api_version="2024.12")
    xps = make_strategies_namespace(xp, api_version="2024.12")

_INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = {"all": ["bool", *_INTEGERS, "float32", "float64", "complex64", "complex128"]}
DTYPES["numeric"] = DTYPES["all"][1:]
DTYPES["real"] = DTYPES["all"][1:-2]
DTYPES["integer"] = DTYPES["all"][1:9]
DTYPES["bits"] = DTYPES["all"][:9]
DTYPES["inexact"] = DTYPES["all"][9:]
DTYPES["float"] = DTYPES["all"][9:11]
DTYPES["complex"] = DTYPES["all"][11:]
DTYPES["bool"] = ["bool"]

SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
FILLED = hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=4)
WITH_AXES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)


def dtypes(kind="all"):
    return st.sampled_from(DTYPES[kind]).map(lambda name: getattr(xp, name))


def small(dtype):
    """Elements whose sums and products stay small."""
    name = str(dtype).rpartition(".")[2]
    if name.startswith("complex"):
        return st.complex_numbers(max_magnitude=8, width=64 if name == "complex64" else 128)
    if name.startswith("float"):
        return st.integers(-256, 256).map(lambda n: n / 32)
    return None if name == "bool" else st.integers(0 if name.startswith("u") else -9, 9)


def arrays(kind="all", shape=SHAPES, dtype=None, elements=None):
    return st.deferred(
        lambda: (dtypes(kind) if dtype is None else st.just(dtype)).flatmap(
            lambda chosen: xps.arrays(chosen, shape, elements=elements and elements(chosen))
        )
    )


def array(draw, kind="all", shape=SHAPES, elements=None, dtype=None):
    return draw(arrays(kind, shape, dtype, elements))


def together(draw, kind, count=2, elements=None):
    """Arrays of one dtype, or of two that promote, whose shapes broadcast."""
    shapes = draw(hnp.mutually_broadcastable_shapes(num_shapes=count, max_dims=3, max_side=4, min_side=0)).input_shapes
    names = DTYPES[kind]
    first = draw(st.sampled_from(names))
    group = next(g for g in (["bool"], DTYPES["integer"], DTYPES["inexact"]) if first in g)
    rest = [draw(st.sampled_from([first, *(n for n in names if n in group)])) for _ in range(count - 1)]
    return tuple(
        draw(arrays(dtype=getattr(xp, name), shape=shape, elements=elements))
        for name, shape in zip([first, *rest], shapes, strict=True)
    )


def call(function):
    """A strategy of (arguments, keywords) from a function of `draw`; keywords of None are left out."""

    @st.composite
    def composed(draw):
        args, kwargs = function(draw)
        return args, kwargs

    return composed()


def unary(kind, elements=None):
    return call(lambda draw: ((array(draw, kind, elements=elements),), {}))


def binary(kind, elements=None):
    def draw_it(draw):
        a, b = together(draw, kind, elements=elements)
        if draw(st.integers(0, 3)) == 0 and not str(a.dtype).endswith("bool"):  # a Python number on one side
            b = draw(small(a.dtype))
        return (a, b), {}

    return call(draw_it)


def shifts(draw):
    a = array(draw, "integer")
    bits = xp.iinfo(a.dtype).bits
    return (a, draw(xps.arrays(a.dtype, a.shape, elements=st.integers(0, bits - 1)))), {}


def powers(draw):
    a, b = together(draw, "numeric")
    if "int" in str(b.dtype):
        b = draw(xps.arrays(b.dtype, b.shape, elements=st.integers(0, 100)))
    return (a, b), {}


def some(**strategies):
    """Keywords, each there or not."""
    return st.fixed_dictionaries({}, optional=strategies)


def axes(shape, several=True, none=True):
    one = st.integers(-len(shape), len(shape) - 1) if shape else st.nothing()
    kinds = [st.none()] if none else []
    if several:
        kinds.append(xps.valid_tuple_axes(len(shape)))
    return st.one_of(*kinds, one) if shape else st.one_of(*kinds)


def reduction(kind, shape=SHAPES, several=True, elements=None, typed=False, **more):
    def draw_it(draw):
        x = array(draw, kind, shape, elements)
        given = {"axis": axes(x.shape, several), "keepdims": st.booleans(), **more}
        if typed and not str(x.dtype).endswith("bool"):
            given["dtype"] = dtypes("numeric" if "complex" not in str(x.dtype) else "complex")
        return (x,), draw(some(**given))

    return call(draw_it)


def along(kind, shape=WITH_AXES, **more):
    """An array and one of its axes."""

    def draw_it(draw):
        x = array(draw, kind, shape)
        return (x,), draw(some(axis=axes(x.shape, several=False, none=False), **more))

    return call(draw_it)


def cumulative(draw):
    x = array(draw, "numeric", WITH_AXES, small)
    more = draw(some(include_initial=st.booleans()))
    return (x,), {"axis": draw(axes(x.shape, several=False, none=x.ndim == 1)), **more}


def diff(draw):
    x = array(draw, "numeric", WITH_AXES)
    axis = draw(axes(x.shape, several=False, none=False))
    given = draw(some(n=st.integers(0, 3)))
    for name in draw(st.sets(st.sampled_from(["prepend", "append"]))):
        shape = list(x.shape)
        shape[axis] = draw(st.integers(1, 2))
        given[name] = draw(xps.arrays(x.dtype, tuple(shape)))
    return (x,), {"axis": axis, **given}


def clip(draw):
    x = array(draw, "real", elements=small)
    elements = small(x.dtype)
    bound = st.one_of(st.none(), elements, xps.arrays(x.dtype, st.sampled_from([(), x.shape]), elements=elements))
    return (x,), draw(some(min=bound, max=bound))


def where(draw):
    a, b = together(draw, "all")
    shape = draw(xps.broadcastable_shapes(a.shape, max_dims=3, max_side=4)) if a.shape == b.shape else ()
    return (draw(xps.arrays(xp.bool, shape)), a, b), {}


def searched(draw):
    x = xp.sort(draw(xps.arrays(draw(dtypes("real")), st.integers(0, 6))))
    return (x, draw(xps.arrays(x.dtype, SHAPES))), draw(some(side=st.sampled_from(["left", "right"])))


def broadcast_to(draw):
    x = array(draw, shape=hnp.array_shapes(min_dims=0, max_dims=2, max_side=4))
    stretched = tuple(draw(st.integers(0, 3)) if n == 1 else n for n in x.shape)
    return (x, (*draw(st.lists(st.integers(0, 3), max_size=2)), *stretched)), {}


def joined(same):
    def draw_it(draw):
        x = array(draw, shape=hnp.array_shapes(min_dims=0 if same else 1, max_dims=3, min_side=0, max_side=3))
        axis = draw(st.integers(-x.ndim - same, x.ndim - 1 + same))
        parts = [x]
        for _ in range(draw(st.integers(0, 2))):
            shape = list(x.shape)
            if not same:
                shape[axis] = draw(st.integers(0, 3))
            parts.append(draw(xps.arrays(x.dtype, tuple(shape))))
        return (parts,), {"axis": None if not same and draw(st.integers(0, 5)) == 0 else axis}

    return call(draw_it)


def permuted(draw):
    x = array(draw)
    return (x, tuple(draw(st.permutations(range(x.ndim))))), {}


def moved(draw):
    x = array(draw, shape=WITH_AXES)
    place = st.integers(-x.ndim, x.ndim - 1)
    return (x, draw(place), draw(place)), {}


def reshaped(draw):
    x = array(draw)
    shape = draw(xps.reshape_shapes(x.shape)) if hasattr(xps, "reshape_shapes") else None
    if shape is None:
        shape = draw(st.sampled_from([(-1,), (x.size,), (1, *x.shape), x.shape[::-1]])) if x.size else x.shape[::-1]
    return (x, shape), {}


def rolled(draw):
    x = array(draw, shape=WITH_AXES)
    if draw(st.booleans()):
        chosen = draw(xps.valid_tuple_axes(x.ndim, min_size=1))
        return (x, tuple(draw(st.integers(-9, 9)) for _ in chosen)), {"axis": chosen}
    return (x, draw(st.integers(-9, 9))), draw(some(axis=axes(x.shape, several=False)))


def squeezed(draw):
    x = array(draw, shape=WITH_AXES)
    ones = [i for i, n in enumerate(x.shape) if n == 1]
    return (x, tuple(draw(st.sets(st.sampled_from(ones)))) if ones else ()), {}


def taken(draw):
    x = array(draw, shape=WITH_AXES)
    axis = draw(axes(x.shape, several=False, none=False))
    places = st.integers(0, x.shape[axis] - 1)
    index = xps.arrays(draw(st.sampled_from([xp.int64, xp.int32])), st.integers(0, 5), elements=places)
    return (x, draw(index)), {"axis": axis}


def taken_along(draw):
    x = array(draw, shape=WITH_AXES)
    axis = draw(axes(x.shape, several=False, none=False))
    shape = list(x.shape)
    shape[axis] = draw(st.integers(0, 4))
    return (x, draw(xps.arrays(xp.int64, tuple(shape), elements=st.integers(0, x.shape[axis] - 1)))), {"axis": axis}


def repeated(draw):
    x = array(draw, shape=WITH_AXES)
    return (x, draw(st.integers(0, 3))), draw(some(axis=axes(x.shape, several=False)))


def products(draw):
    kind = draw(st.sampled_from(["integer", "inexact"]))
    dtype = draw(dtypes(kind))
    n, m, k = (draw(st.integers(0, 4)) for _ in range(3))
    batch = draw(st.sampled_from([(), (2,), (3, 1)]))
    vectors = [((k,), (k,)), ((n, k), (k,)), ((k,), (k, m))]
    shapes = draw(st.sampled_from([*vectors, ((*batch, n, k), (k, m)), ((*batch, n, k), (2, k, m))]))
    return tuple(draw(xps.arrays(dtype, shape, elements=small(dtype))) for shape in shapes), {}


def tensordot(draw):
    dtype = draw(dtypes("numeric"))
    a, b = ((2, 3, 4), (4, 3, 2))
    if draw(st.booleans()):
        pairs = ([2, 1], [0, 1]) if draw(st.booleans()) else ([-1], [0])
        keywords = {"axes": pairs}
    else:
        count = draw(st.integers(0, 2))
        a, b, keywords = (2, 3, 2), (3, 2, 4) if count == 2 else (2, 4), {"axes": count}
    return tuple(draw(xps.arrays(dtype, shape, elements=small(dtype))) for shape in (a, b)), keywords


def vecdot(draw):
    dtype = draw(dtypes("numeric"))
    shape = draw(WITH_AXES)
    axis = draw(st.integers(-len(shape), -1))
    return tuple(draw(xps.arrays(dtype, shape, elements=small(dtype))) for _ in "ab"), {"axis": axis}


# --- linear algebra ---------------------------------------------------------------------------------------------
def matrix(draw, kind="inexact", square=False, definite=False, least=0):
    dtype = draw(dtypes(kind))
    batch = draw(st.sampled_from([(), (2,), (2, 1)]))
    n, m = draw(st.integers(least, 4)), draw(st.integers(least, 4))
    m = n if square or definite else m
    values = draw(xps.arrays(dtype, (*batch, n, m), elements=small(dtype)))
    if not definite:
        return values
    a = np.asarray(values).astype("c16" if "complex" in str(dtype) else "f8")
    a = a @ np.swapaxes(a.conj(), -1, -2) + (n + 1) * np.eye(n)
    return xp.asarray(np.ascontiguousarray(a.astype(str(dtype).rpartition(".")[2])))


def of_matrix(square=False, definite=False, kind="inexact", least=0, **more):
    return call(lambda draw: ((matrix(draw, kind, square, definite, least),), draw(some(**more))))


def solve(draw):
    a = matrix(draw, definite=True)
    n = a.shape[-1]
    shape = draw(st.sampled_from([(n,), (n, 2), (*a.shape[:-2], n, 3)]))
    return (a, draw(xps.arrays(a.dtype, shape, elements=small(a.dtype)))), {}


def cross(draw):
    dtype = draw(dtypes("numeric"))
    shape, axis = draw(st.sampled_from([((3,), -1), ((2, 3), -1), ((3, 2), -2), ((2, 0, 3), -1)]))
    return tuple(draw(xps.arrays(dtype, shape, elements=small(dtype))) for _ in "ab"), {"axis": axis}


def outer(draw):
    dtype = draw(dtypes("numeric"))
    return tuple(draw(xps.arrays(dtype, st.integers(0, 4))) for _ in "ab"), {}


VECTOR_ORDERS = st.sampled_from([0, 1, 2, 3, 0.5, -1, -2, math.inf, -math.inf])
MATRIX_ORDERS = st.sampled_from([1, 2, -1, -2, math.inf, -math.inf, "fro", "nuc"])


def vector_norm(draw):
    x = array(draw, "inexact", WITH_AXES, small)
    return (x,), draw(some(axis=axes(x.shape), keepdims=st.booleans(), ord=VECTOR_ORDERS))


# --- Fourier transforms -----------------------------------------------------------------------------------------
NORMS = st.sampled_from(["backward", "ortho", "forward"])


def transform(kind, least=1):
    def draw_it(draw):
        x = array(draw, kind, hnp.array_shapes(min_dims=1, max_dims=3, min_side=least, max_side=5), small)
        return (x,), draw(some(n=st.integers(least, 6), axis=axes(x.shape, several=False, none=False), norm=NORMS))

    return call(draw_it)


def transforms(kind, least=1):
    def draw_it(draw):
        x = array(draw, kind, hnp.array_shapes(min_dims=1, max_dims=3, min_side=least, max_side=5), small)
        given = draw(some(norm=NORMS))
        if draw(st.booleans()):
            chosen = tuple(sorted(draw(st.sets(st.integers(0, x.ndim - 1), min_size=1))))
            given["axes"] = chosen
            if draw(st.booleans()):
                given["s"] = tuple(draw(st.integers(least, 6)) for _ in chosen)
        return (x,), given

    return call(draw_it)


def shifted(draw):
    x = array(draw, "inexact", WITH_AXES)
    return (x,), draw(some(axes=axes(x.shape)))


def like(**more):
    def draw_it(draw):
        x = array(draw)
        return (x,), draw(some(dtype=dtypes(), **more))

    return call(draw_it)


def full_like(draw):
    x = array(draw, "real")
    return (x, draw(small(x.dtype))), {}


def cast(draw):
    """An array, and a dtype that its elements have a meaning in."""

    def positive(dtype):
        return small(dtype) if "bool" in str(dtype) or "complex" in str(dtype) else small(dtype).map(abs)

    x = array(draw, elements=positive)
    return x, draw(dtypes("complex" if "complex" in str(x.dtype) else "all"))


def asks(*kinds):
    """Arguments of the functions that answer questions about dtypes."""
    return call(lambda draw: (tuple(draw(dtypes(kind)) if kind in DTYPES else draw(kind) for kind in kinds), {}))


LENGTHS = st.one_of(st.integers(0, 5), SHAPES)
TYPED = some(dtype=dtypes("float"))
TRIANGLE = hnp.array_shapes(min_dims=2, max_dims=3, min_side=0, max_side=4)

ELEMENTWISE = {
    "all": "equal not_equal",
    "numeric": "abs add isfinite isinf isnan multiply negative positive sign square subtract",
    "real": "ceil floor floor_divide greater greater_equal less less_equal maximum minimum remainder round trunc",
    "inexact": "acos acosh asin asinh atan atanh cos cosh divide exp expm1 log log10 log1p log2 reciprocal sin sinh "
    "sqrt tan tanh",
    "float": "atan2 copysign hypot logaddexp nextafter signbit",
    "complex": "imag",
    "bits": "bitwise_and bitwise_invert bitwise_or bitwise_xor",
    "bool": "logical_and logical_not logical_or logical_xor",
}
TWO = [
    "equal",
    "not_equal",
    "add",
    "multiply",
    "subtract",
    "floor_divide",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "maximum",
    "minimum",
    "remainder",
    "divide",
    "atan2",
    "copysign",
    "hypot",
    "logaddexp",
    "nextafter",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "logical_and",
    "logical_or",
    "logical_xor",
]

CALLS = {
    **{name: (binary if name in TWO else unary)(kind) for kind, names in ELEMENTWISE.items() for name in names.split()},
    "conj": unary("numeric"),
    "real": unary("numeric"),
    "bitwise_left_shift": call(shifts),
    "bitwise_right_shift": call(shifts),
    "pow": call(powers),
    "clip": call(clip),
    "where": call(where),
    # creation
    "arange": st.tuples(st.tuples(st.integers(-5, 5), st.integers(-5, 9), st.integers(1, 3)), TYPED),
    "asarray": call(lambda draw: ((x := cast(draw))[:1], {"dtype": x[1]} if draw(st.booleans()) else {})),
    "empty": st.tuples(st.tuples(LENGTHS), TYPED),
    "empty_like": like(),
    "eye": st.tuples(st.tuples(st.integers(0, 4), st.integers(0, 4)), some(k=st.integers(-3, 3), dtype=dtypes())),
    "from_dlpack": unary("all"),
    "full": st.tuples(
        st.tuples(LENGTHS, st.one_of(st.booleans(), st.integers(-9, 9), st.floats(width=32))), st.just({})
    ),
    "full_like": call(full_like),
    "linspace": st.tuples(
        st.tuples(st.integers(-4, 4), st.integers(-4, 4), st.integers(0, 6)),
        some(endpoint=st.booleans(), dtype=dtypes("float")),
    ),
    "meshgrid": call(
        lambda draw: (
            tuple(draw(xps.arrays(xp.float64, st.integers(0, 3))) for _ in range(draw(st.integers(1, 3)))),
            draw(some(indexing=st.sampled_from(["xy", "ij"]))),
        )
    ),
    "ones": st.tuples(st.tuples(LENGTHS), some(dtype=dtypes())),
    "ones_like": like(),
    "tril": call(lambda draw: ((array(draw, shape=TRIANGLE),), draw(some(k=st.integers(-4, 4))))),
    "triu": call(lambda draw: ((array(draw, shape=TRIANGLE),), draw(some(k=st.integers(-4, 4))))),
    "zeros": st.tuples(st.tuples(LENGTHS), some(dtype=dtypes())),
    "zeros_like": like(),
    # dtypes
    "astype": call(lambda draw: (cast(draw), {})),
    "can_cast": asks("all", "all"),
    "finfo": asks("inexact"),
    "iinfo": asks("integer"),
    "isdtype": asks(
        "all", st.sampled_from(["bool", "integral", "real floating", "complex floating", "numeric", "signed integer"])
    ),
    "result_type": asks("float", "inexact"),
    # linear algebra of the main namespace
    "matmul": call(products),
    "matrix_transpose": unary("all").filter(lambda given: given[0][0].ndim > 1),
    "tensordot": call(tensordot),
    "vecdot": call(vecdot),
    # manipulation
    "broadcast_arrays": call(lambda draw: (together(draw, "all", 3), {})),
    "broadcast_to": call(broadcast_to),
    "concat": joined(False),
    "expand_dims": call(lambda draw: ((x := array(draw),), {"axis": draw(st.integers(-x.ndim - 1, x.ndim))})),
    "flip": call(lambda draw: ((x := array(draw),), draw(some(axis=axes(x.shape))))),
    "moveaxis": call(moved),
    "permute_dims": call(permuted),
    "repeat": call(repeated),
    "reshape": call(reshaped),
    "roll": call(rolled),
    "squeeze": call(squeezed),
    "stack": joined(True),
    "tile": call(lambda draw: ((array(draw, shape=FILLED), tuple(draw(st.lists(st.integers(0, 2), max_size=3)))), {})),
    "unstack": along("all"),
    # searching, sorting, taking
    "argmax": reduction("real", FILLED, several=False),
    "argmin": reduction("real", FILLED, several=False),
    "argsort": along("real", descending=st.booleans(), stable=st.just(True)),
    "sort": along("real", descending=st.booleans(), stable=st.booleans()),
    "searchsorted": call(searched),
    "count_nonzero": reduction("all"),
    "take": call(taken),
    "take_along_axis": call(taken_along),
    # reductions
    "all": reduction("all"),
    "any": reduction("all"),
    "max": reduction("real", FILLED),
    "min": reduction("real", FILLED),
    "mean": reduction("float", FILLED, elements=small),
    "prod": reduction("numeric", elements=small, typed=True),
    "std": reduction("float", FILLED, elements=small, correction=st.sampled_from([0, 1, 0.5])),
    "sum": reduction("numeric", elements=small, typed=True),
    "var": reduction("float", FILLED, elements=small, correction=st.sampled_from([0, 1, 0.5])),
    "cumulative_sum": call(cumulative),
    "cumulative_prod": call(cumulative),
    "diff": call(diff),
    # the extensions
    "linalg.cholesky": of_matrix(definite=True, upper=st.booleans()),
    "linalg.cross": call(cross),
    "linalg.det": of_matrix(square=True),
    "linalg.diagonal": of_matrix(kind="all", least=1, offset=st.integers(-3, 3)),
    "linalg.eigh": of_matrix(definite=True),
    "linalg.eigvalsh": of_matrix(definite=True),
    "linalg.inv": of_matrix(definite=True),
    "linalg.matmul": call(products),
    "linalg.matrix_norm": of_matrix(least=1, keepdims=st.booleans(), ord=MATRIX_ORDERS),
    "linalg.matrix_power": call(lambda draw: ((matrix(draw, definite=True), draw(st.integers(-2, 4))), {})),
    "linalg.matrix_rank": of_matrix(least=1),
    "linalg.matrix_transpose": of_matrix(kind="all"),
    "linalg.outer": call(outer),
    "linalg.pinv": of_matrix(definite=True),
    "linalg.qr": of_matrix(least=1, mode=st.sampled_from(["reduced", "complete"])),
    "linalg.slogdet": of_matrix(definite=True),
    "linalg.solve": call(solve),
    "linalg.svd": of_matrix(least=1, full_matrices=st.booleans()),
    "linalg.svdvals": of_matrix(least=1),
    "linalg.tensordot": call(tensordot),
    "linalg.trace": of_matrix(kind="numeric", offset=st.integers(-3, 3)),
    "linalg.vecdot": call(vecdot),
    "linalg.vector_norm": call(vector_norm),
    **{f"fft.{name}": transform("complex") for name in ("fft", "ifft")},
    **{f"fft.{name}": transforms("complex") for name in ("fftn", "ifftn")},
    "fft.rfft": transform("float"),
    "fft.ihfft": transform("float"),
    "fft.irfft": transform("complex", 2),
    "fft.hfft": transform("complex", 2),
    "fft.rfftn": transforms("float"),
    "fft.irfftn": transforms("complex", 2),
    "fft.fftfreq": st.tuples(st.tuples(st.integers(1, 6)), some(d=st.sampled_from([0.5, 2.0]))),
    "fft.rfftfreq": st.tuples(st.tuples(st.integers(1, 6)), some(d=st.sampled_from([0.5, 2.0]))),
    "fft.fftshift": call(shifted),
    "fft.ifftshift": call(shifted),
}
