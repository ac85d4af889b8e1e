"""What each operator means, said in NumPy's or SciPy's own words: operands, attributes -> result or results."""

from __future__ import annotations

import numpy as np
import scipy

from goblin_dask.graphs.operators.dtypes import DTYPES


def keep(a):
    return {"axis": a.get("axes"), "keepdims": a.get("keepdims", False)}


def typed(a):
    return {**keep(a), "dtype": DTYPES[a["dtype"]] if a.get("dtype") else None}


def bf(array):
    """bfloat16 as float32, for functions that do not know it."""
    return array.astype("f4") if array.dtype.name == "bfloat16" else array


def halves(array):
    return array.astype("f4") if array.dtype.name in ("bfloat16", "float16") else array


def window(a):
    return tuple(
        slice(s, None if s + n * d < 0 else s + n * d, d)
        for s, n, d in zip(a["start"], a["length"], a["step"], strict=True)
    )


def setitem(x, v, a):
    x = x.copy()
    x[window(a)] = v
    return x


def put_along(x, i, v, a):
    x = x.copy()
    np.put_along_axis(x, i.astype("i8"), v, a["axis"])
    return x


def index_put(x, v, *i, a):
    x = x.copy()
    key = (slice(None),) * a.get("axis", 0) + tuple(j.astype("i8") for j in i)
    if a.get("accumulate"):
        np.add.at(x, key, v.astype(x.dtype))
    else:
        x[key] = v
    return x


def pad(x, *v, a):
    pairs = list(zip(a["width"][::2], a["width"][1::2], strict=True))
    mode = a.get("mode", "constant")
    return np.pad(x, pairs, mode, constant_values=v[0]) if v else np.pad(x, pairs, mode)


def topk(x, a):
    axis = a.get("axis", 0)
    s = np.sort(x, axis=axis)
    s = np.flip(s, axis) if a.get("largest", True) else s
    return np.take(s, range(a["k"]), axis=axis)


def axis(a):
    return {"axis": a.get("axis"), "keepdims": a.get("keepdims", False)}


def philox(key, shape):
    bits = np.random.Philox(key=key)
    return np.asarray([bits.random_raw() for _ in range(int(np.prod(shape)))], "u8").reshape(shape)


def named(make, *names, module=np):
    """`make` applied to NumPy's function of each name."""
    return {name: make(getattr(module, name)) for name in names}


REFERENCES = {
    "where": lambda c, x, y, a: np.where(c, bf(x), bf(y)),
    **named(lambda f: lambda x, a: f(bf(x), **typed(a)), "sum", "prod", "mean", "nansum", "nanprod"),
    **named(lambda f: lambda x, a: f(x, **keep(a)), "max", "min", "any", "all", "count_nonzero"),
    **named(lambda f: lambda x, a: f(bf(x), **keep(a)), "nanmax", "nanmin", "nanmean", "median", "nanmedian"),
    **named(lambda f: lambda x, a: f(bf(x), **axis(a)), "argmax", "argmin", "nanargmax", "nanargmin"),
    **named(lambda f: lambda x, a: f(x), "inv", "det", "pinv", "eigvalsh", "matrix_rank", module=np.linalg),
    "imag": lambda x, a: np.asarray(np.imag(x)),
    "round": lambda x, a: np.round(x, a["decimals"]),
    "astype": lambda x, a: x.astype(DTYPES[a["dtype"]]),
    "clip": lambda x, lo, hi, a: np.clip(x, lo, hi),
    **{
        name: (lambda f: lambda x, a: f(bf(x), **typed(a)))(getattr(np, name))
        for name in ["sum", "prod", "mean", "nansum", "nanprod"]
    },
    **{
        name: (lambda f: lambda x, a: f(x, **keep(a)))(getattr(np, name))
        for name in ["max", "min", "any", "all", "count_nonzero"]
    },
    **{
        name: (lambda f: lambda x, a: f(bf(x), **keep(a)))(getattr(np, name))
        for name in ["nanmax", "nanmin", "nanmean", "median", "nanmedian"]
    },
    "var": lambda x, a: np.var(bf(x), ddof=a.get("correction", 0), **keep(a)),
    "nanvar": lambda x, a: np.nanvar(bf(x), ddof=a.get("correction", 0), **keep(a)),
    **{
        name: (lambda f: lambda x, a: f(bf(x), **axis(a)))(getattr(np, name))
        for name in ["argmax", "argmin", "nanargmax", "nanargmin"]
    },
    "cumulative_sum": lambda x, a: np.cumsum(bf(x), axis=a["axis"]),
    "cumulative_prod": lambda x, a: np.cumprod(bf(x), axis=a["axis"]),
    "cumulative_max": lambda x, a: np.maximum.accumulate(x, axis=a["axis"]),
    "cumulative_min": lambda x, a: np.minimum.accumulate(x, axis=a["axis"]),
    "diff": lambda x, a: np.diff(x, axis=a["axis"]),
    "gradient": lambda x, *h, a: np.gradient(x, *h, axis=a["axis"], edge_order=a.get("edge_order", 1)),
    "matmul": lambda x, y, a: np.matmul(halves(x), halves(y)),
    "vecdot": lambda x, y, a: np.vecdot(halves(x), halves(y)),
    "tensordot": lambda x, y, a: np.tensordot(halves(x), halves(y), (a["a_axes"], a["b_axes"])),
    "einsum": lambda *x, a: np.einsum(a["subscripts"], *map(halves, x)),
    "outer": lambda x, y, a: np.outer(x, y),
    "addmm": lambda c, x, y, a: halves(c) + halves(x) @ halves(y),
    "baddbmm": lambda c, x, y, a: halves(c) + halves(x) @ halves(y),
    "reshape": lambda x, a: np.reshape(x, a["shape"]),
    "permute_dims": lambda x, a: np.transpose(x, a["axes"]),
    "expand_dims": lambda x, a: np.expand_dims(x, a["axes"]),
    "squeeze": lambda x, a: np.squeeze(x, a["axes"]),
    "concat": lambda *x, a: np.concatenate(x, a["axis"]),
    "stack": lambda *x, a: np.stack(x, a["axis"]),
    "broadcast_to": lambda x, a: np.broadcast_to(x, a["shape"]),
    "flip": lambda x, a: np.flip(x, a["axes"]),
    "roll": lambda x, a: np.roll(x, a["shift"], a["axes"]),
    "pad": pad,
    "repeat": lambda x, a: np.repeat(x, a["counts"], a["axis"]),
    "tile": lambda x, a: np.tile(x, a["counts"]),
    "tril": lambda x, a: np.tril(x, a.get("k", 0)),
    "triu": lambda x, a: np.triu(x, a.get("k", 0)),
    "slice": lambda x, a: x[window(a)],
    "setitem": setitem,
    "diagonal": lambda x, a: np.diagonal(x, a.get("offset", 0), a.get("axis1", 0), a.get("axis2", 1)),
    "diag": lambda x, a: np.diag(x, a.get("offset", 0)),
    "bitcast": lambda x, a: np.ascontiguousarray(x).reshape(x.shape).view(a["dtype"]),
    "sort": lambda x, a: np.sort(x, axis=a["axis"]),
    "argsort": lambda x, a: np.argsort(x, axis=a["axis"]),
    "partition": lambda x, a: np.partition(x, a["kth"], axis=a["axis"]),
    "argpartition": lambda x, a: np.argpartition(x, a["kth"], axis=a["axis"]),
    "topk": lambda x, a: (topk(x, a),),
    "quantile": lambda x, q, a: np.quantile(x, q, method=a.get("method", "linear"), **keep(a)),
    "nanquantile": lambda x, q, a: np.nanquantile(x, q, method=a.get("method", "linear"), **keep(a)),
    "searchsorted": lambda x, v, a: np.searchsorted(x, v, a.get("side", "left")),
    "digitize": lambda x, e, a: np.digitize(x, e, a.get("right", False)),
    "bincount": lambda x, *w, a: np.bincount(x.astype("i8"), *w, minlength=a["length"]),
    "histogram": lambda x, e, *w, a: np.histogram(x, e, weights=w[0] if w else None)[0],
    "histogramdd": lambda x, *e, a: (
        np.histogramdd(x, e[:-1], weights=e[-1])[0] if a.get("weighted") else np.histogramdd(x, e)[0]
    ),
    "isin": lambda x, t, a: np.isin(x, t, invert=a.get("invert", False)),
    "interp": lambda x, p, v, a: np.interp(x, p, v),
    "take": lambda x, i, a: np.take(x, i.astype("i8"), a["axis"]),
    "take_along_axis": lambda x, i, a: np.take_along_axis(x, i.astype("i8"), a["axis"]),
    "scatter": put_along,
    "index": lambda x, *i, a: x[(slice(None),) * a.get("axis", 0) + tuple(j.astype("i8") for j in i)],
    "index_put": index_put,
    "unravel_index": lambda x, a: np.unravel_index(x.astype("i8"), a["shape"]),
    "ravel_multi_index": lambda *x, a: np.ravel_multi_index([i.astype("i8") for i in x], a["shape"]),
    "qr": lambda x, a: tuple(np.linalg.qr(x)),
    "svd": lambda x, a: tuple(np.linalg.svd(x, full_matrices=a.get("full_matrices", True))),
    "svdvals": lambda x, a: np.linalg.svd(x, compute_uv=False),
    "cholesky": lambda x, a: np.linalg.cholesky(x, upper=a.get("upper", False)),
    "lu": lambda x, a: tuple(part if i else part.real for i, part in enumerate(scipy.linalg.lu(x))),
    "solve": lambda x, y, a: np.linalg.solve(x, y),
    "solve_triangular": lambda x, y, a: scipy.linalg.solve_triangular(x, y, **a),
    **{
        name: (lambda f: lambda x, a: f(x))(getattr(np.linalg, name))
        for name in ["inv", "det", "pinv", "eigvalsh", "matrix_rank"]
    },
    "slogdet": lambda x, a: tuple(np.linalg.slogdet(x)),
    "eigh": lambda x, a: tuple(np.linalg.eigh(x)),
    "matrix_power": lambda x, a: np.linalg.matrix_power(x, a["n"]),
    "norm": lambda x, a: np.linalg.norm(x, a.get("ord"), **keep(a)),
    **{
        name: (lambda f: lambda x, a: f(x, a.get("n"), a["axis"], a.get("norm")))(getattr(np.fft, name))
        for name in ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
    },
    **{
        name: (lambda f: lambda x, a: f(x, a.get("s"), a.get("axes"), a.get("norm")))(getattr(np.fft, name))
        for name in ["fftn", "ifftn", "rfftn", "irfftn"]
    },
    "fftshift": lambda x, a: np.fft.fftshift(x, a.get("axes")),
    "ifftshift": lambda x, a: np.fft.ifftshift(x, a.get("axes")),
    "constant": lambda a: np.frombuffer(bytes.fromhex(a["data"]), DTYPES[a["dtype"]]).reshape(a["shape"]),
    "zeros": lambda a: np.zeros(a["shape"], DTYPES[a["dtype"]]),
    "ones": lambda a: np.ones(a["shape"], DTYPES[a["dtype"]]),
    "full": lambda v, a: np.full(a["shape"], v, v.dtype),
    "arange": lambda a: np.arange(a["start"], a["stop"], a["step"], a["dtype"]),
    "eye": lambda a: np.eye(a["rows"], a["columns"], a.get("k", 0), DTYPES[a["dtype"]]),
    "linspace": lambda a: np.linspace(a["start"], a["stop"], a["num"], a.get("endpoint", True), dtype=a["dtype"]),
    "random_bits": lambda key, a: philox(key, a["shape"]),
    "random_uniform": lambda key, a: (
        (philox(key, a["shape"]) >> np.uint64(40)) / 2**24
        if a["dtype"] == "float32"
        else (philox(key, a["shape"]) >> np.uint64(11)) / 2**53
    ),
}
SPECIAL = {"lgamma": "gammaln", "digamma": "psi"}


def reference(name):
    """The table's function, or that of NumPy or SciPy of the same name."""
    if name in REFERENCES:
        return REFERENCES[name]
    function = getattr(np, name, None) or getattr(scipy.special, SPECIAL.get(name, name))
    return lambda *operands, a: function(*operands)
