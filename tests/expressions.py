"""Kinds of ``dask.array`` programs that researchers write, and the arrays that they are tried on."""

from __future__ import annotations

import dask.array as da
import numpy as np

EXPRESSIONS = {
    # products
    "matmul": lambda x, y, z: x @ y,
    "matmul_transposed": lambda x, y, z: x.T @ y,
    "dot": lambda x, y, z: da.dot(x, y),
    "tensordot": lambda x, y, z: da.tensordot(x, y, axes=1),
    "einsum": lambda x, y, z: da.einsum("ij,jk->ik", x, y),
    "outer": lambda x, y, z: da.outer(x[0], y[0]),
    # element by element
    "add": lambda x, y, z: x + y,
    "elementwise_chain": lambda x, y, z: da.exp(-x) * y + 1,
    "integers": lambda x, y, z: (z << 2) ^ (z & 5),
    "complex": lambda x, y, z: (x + 1j * y).conj().sum(),
    "float16": lambda x, y, z: x.astype("f2").sum(),
    "where": lambda x, y, z: da.where(x > 0.5, x, 0),
    "choose_by_integers": lambda x, y, z: da.where(z % 2 == 0, x, y),
    "clip": lambda x, y, z: x.clip(0.1, 0.5),
    # reductions
    "sum": lambda x, y, z: x.sum(0),
    "mean": lambda x, y, z: x.mean(),
    "nanmean": lambda x, y, z: da.nanmean(x),
    "var": lambda x, y, z: x.var(1),
    "std": lambda x, y, z: x.std(),
    "argmax": lambda x, y, z: x.argmax(1),
    "cumsum": lambda x, y, z: x.cumsum(0),
    "diff": lambda x, y, z: da.diff(x, axis=0),
    "gradient": lambda x, y, z: da.gradient(x)[0],
    "cov": lambda x, y, z: da.cov(x),
    "norm": lambda x, y, z: da.linalg.norm(x),
    # order and counts
    "median": lambda x, y, z: da.median(x, axis=0),
    "percentile": lambda x, y, z: da.percentile(x.ravel(), [50]),
    "topk": lambda x, y, z: da.topk(x, 3),
    "histogram": lambda x, y, z: da.histogram(x, bins=10, range=(0, 1))[0],
    "bincount": lambda x, y, z: da.bincount(z.ravel(), minlength=10),
    "digitize": lambda x, y, z: da.digitize(x, np.linspace(0, 1, 5)),
    "searchsorted": lambda x, y, z: da.searchsorted(da.arange(20, chunks=5), z.ravel()),
    "unique": lambda x, y, z: da.unique(z),
    "isin": lambda x, y, z: da.isin(z, [1, 2]),
    # elements that move
    "slice": lambda x, y, z: x[::2, 3:],
    "fancy_index": lambda x, y, z: x[[1, 5, 3]],
    "boolean_index": lambda x, y, z: x[x > 0.5],
    "take": lambda x, y, z: da.take(x, [1, 2], axis=0),
    "reshape": lambda x, y, z: x.reshape(x.size),
    "rechunk": lambda x, y, z: x.rechunk(5),
    "concatenate": lambda x, y, z: da.concatenate([x, y]),
    "stack": lambda x, y, z: da.stack([x, y]),
    "roll": lambda x, y, z: da.roll(x, 3, 0),
    "pad": lambda x, y, z: da.pad(x, 1),
    "tril": lambda x, y, z: da.tril(x),
    # functions of blocks
    "map_blocks": lambda x, y, z: da.map_blocks(lambda b: np.tanh(b) * 2, x),
    "map_overlap": lambda x, y, z: da.map_overlap(lambda b: b * 2, x, depth=1, boundary=0),
    "apply_gufunc": lambda x, y, z: da.apply_gufunc(
        lambda a: np.mean(a, axis=-1), "(i)->()", x.rechunk((5, x.shape[1]))
    ),
    "coarsen": lambda x, y, z: da.coarsen(np.mean, x.rechunk(10), {0: 2, 1: 2}),
    "fft": lambda x, y, z: da.fft.fft(x.rechunk((7, x.shape[1])), axis=1),
    # linear algebra
    "svd": lambda x, y, z: da.linalg.svd(x.rechunk((5, x.shape[1])))[1],
    "qr": lambda x, y, z: da.linalg.qr(x.rechunk((5, x.shape[1])))[1],
    "solve": lambda x, y, z: da.linalg.solve(x.rechunk(10), y.rechunk(10)),
    "cholesky": lambda x, y, z: da.linalg.cholesky((x @ x.T + 20 * da.eye(len(x), chunks=7)).rechunk(10)),
    # and
    "random": lambda x, y, z: da.random.default_rng(0).random((20, 20), chunks=7) + 1,
    "masked": lambda x, y, z: da.ma.masked_greater(x, 0.5).sum(),
}

DATA_DEPENDENT = {"boolean_index", "unique", "masked", "percentile"}
"""Their blocks' shapes, or the branches of their functions, depend on data, or their blocks are no plain arrays."""


def _along(axis):
    return lambda x, y, z: (x.shape[axis], np.abs(x).sum(axis, dtype="f8"))


def _product(left, right):
    return np.abs(left).astype("f8") @ np.abs(right).astype("f8")


def _centred(x, axis=None):
    return x.astype("f8") - x.mean(axis, dtype="f8", keepdims=True)


def _whole(x, terms):
    return x.size, np.abs(terms).astype("f8").sum()


SUMS = {
    "matmul": lambda x, y, z: (len(y), _product(x, y)),
    "matmul_transposed": lambda x, y, z: (len(y), _product(x.T, y)),
    "dot": lambda x, y, z: (len(y), _product(x, y)),
    "tensordot": lambda x, y, z: (len(y), _product(x, y)),
    "einsum": lambda x, y, z: (len(y), _product(x, y)),
    "complex": lambda x, y, z: _whole(x, x + 1j * y),
    "float16": lambda x, y, z: _whole(x, x),
    "sum": _along(0),
    "mean": lambda x, y, z: (x.size, np.abs(x).mean(dtype="f8")),
    "nanmean": lambda x, y, z: (x.size, np.abs(x).mean(dtype="f8")),
    "var": lambda x, y, z: (x.shape[1], (_centred(x, 1) ** 2).mean(1)),
    "std": lambda x, y, z: (x.size, x.std(dtype="f8")),
    "cumsum": lambda x, y, z: (np.arange(1, len(x) + 1)[:, None], np.abs(x).cumsum(0, dtype="f8")),
    "cov": lambda x, y, z: (x.shape[1], _product(_centred(x, 1), _centred(x, 1).T) / (x.shape[1] - 1)),
    "norm": lambda x, y, z: (x.size, np.linalg.norm(x.astype("f8"))),
    "apply_gufunc": lambda x, y, z: (x.shape[1], np.abs(x).mean(1, dtype="f8")),
    "coarsen": lambda x, y, z: (4, np.abs(x).reshape(len(x) // 2, 2, -1, 2).mean((1, 3), dtype="f8")),
    "fft": lambda x, y, z: (x.shape[1], np.broadcast_to(np.abs(x).sum(1, keepdims=True, dtype="f8"), x.shape)),
    # decompositions: sums of n terms of the size of the operands, times what an error of the operands becomes
    "svd": lambda x, y, z: (x.size, np.linalg.norm(x)),
    "qr": lambda x, y, z: (x.size, np.linalg.norm(x)),
    "solve": lambda x, y, z: (len(x), np.linalg.cond(x.astype("f8")) * np.linalg.norm(np.linalg.solve(x, y))),
    "cholesky": lambda x, y, z: (len(x), np.linalg.norm(np.linalg.cholesky(x @ x.T + 20 * np.eye(len(x))))),
    "masked": lambda x, y, z: _whole(x, x),
}
"""Results that are floating-point sums: how many terms an element has, and the sum of their absolute values. An honest
sum is within n·u times that of the exact one, two of them within twice as much. Of x, y and z as NumPy arrays."""

SUMMING = frozenset(SUMS)

VARIANTS = {
    # (size, chunks of x, of y, of z, dtype, from Zarr)
    "plain": (20, (7, 9), (9, 7), 8, "f8", False),
    "larger": (60, (20, 30), (30, 20), 25, "f8", False),
    "ragged": (20, ((3, 10, 7), (2, 18)), ((2, 18), (11, 9)), ((13, 7), (7, 13)), "f8", False),
    "one_chunk": (20, 20, 20, 20, "f8", False),
    "one_element_chunks": (
        20,
        ((1, 18, 1), (1, 18, 1)),
        ((1, 18, 1), (1, 18, 1)),
        ((1, 18, 1), (1, 18, 1)),
        "f8",
        False,
    ),
    "float32": (20, (7, 9), (9, 7), 8, "f4", False),
    "zarr": (20, (7, 9), (9, 7), 8, "f8", True),
}


def operands(variant: str, folder) -> tuple[da.Array, da.Array, da.Array]:
    """x, y and z of a variant."""
    size, cx, cy, cz, dtype, zarr = VARIANTS[variant]
    random = np.random.default_rng(42)
    x, y = (random.random((size, size)).astype(dtype) for _ in range(2))
    arrays = [
        da.from_array(array, chunks=chunks)
        for array, chunks in ((x, cx), (y, cy), (random.integers(0, 9, (size, size)), cz))
    ]
    if zarr:
        for name, array in zip("xyz", arrays, strict=True):
            array.to_zarr(str(folder / name))
        arrays = [da.from_zarr(str(folder / name)) for name in "xyz"]
    return tuple(arrays)
