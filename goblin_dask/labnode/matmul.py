"""`matmul`: a matrix product as a dask array that is cut for the grid."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import zarr

from goblin_dask.errors import InputError
from goblin_dask.labnode.tiling import Tiling, choose
from goblin_dask.messages import GridOffer


def sum_of_products(a: list[Any], b: list[Any]) -> Any:
    """Sum over panels of ``a[l] @ b[l]``: one block of a product.

    ``+`` of booleans is *or* and that of integers wraps, so the result is NumPy's in every dtype, however k was cut.
    """
    total = np.matmul(a[0], b[0])
    for left, right in zip(a[1:], b[1:], strict=True):
        total = total + np.matmul(left, right)
    return total


def matmul(a: Any, b: Any, *, offer: GridOffer | None = None) -> da.Array:
    """Matrix product of `a` and `b`, with NumPy's result in every dtype and however it is cut.

    Dask's own ``@`` gives each block of a product along k to a task of its own; here a task makes one block of the
    result, panel by panel, and neighbouring blocks are made by one volunteer. Integers wrap and booleans stay booleans
    as in `numpy.matmul`.

    Parameters
    ----------
    a, b : zarr.Array, numpy.ndarray or dask.array.Array
        Of one dimension or more, broadcast as `numpy.matmul` does. Dask arrays keep their chunks along the first and
        the last axis.
    offer : GridOffer, optional
        What the grid offers, ``lab.offer``; decides the blocks of arrays that are not dask arrays.

    Returns
    -------
    dask.array.Array

    Raises
    ------
    InputError
        For shapes that do not match and dtypes that have no product.
    """
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, da.Array | zarr.Array) and not hasattr(x, "__array__"):
            raise InputError(f"matmul: {name} must be a Zarr, NumPy or dask array, got {type(x).__name__}")
        if np.dtype(x.dtype).kind not in "biufcV" or np.dtype(x.dtype).names:
            raise InputError(
                f"matmul: {name} has dtype {x.dtype}, which has no matrix product; convert it to a number type first"
            )
    if not a.ndim or not b.ndim:
        raise InputError(f"matmul: operands need at least one dimension, got shapes {a.shape} and {b.shape}")
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise InputError(
            f"matmul: shapes {a.shape} and {b.shape} do not match: the last axis of a has {a.shape[-1]} elements, "
            f"the {'second last' if b.ndim > 1 else 'only'} axis of b {b.shape[-2 if b.ndim > 1 else 0]}"
        )
    try:
        np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError as error:
        raise InputError(f"matmul: the leading axes of shapes {a.shape} and {b.shape} do not broadcast") from error
    itemsize = np.result_type(a.dtype, b.dtype).itemsize
    m, k, n = (a.shape[-2] if a.ndim > 1 else 1), a.shape[-1], (b.shape[-1] if b.ndim > 1 else 1)
    tiling = choose((m, k, n), itemsize, offer or GridOffer(0, 0), _stored(a), _stored(b))
    x, y = _blocked(a, tiling.m, tiling.k), _blocked(b, tiling.k, tiling.n)
    if isinstance(a, da.Array) and not isinstance(b, da.Array):
        y = y.rechunk({max(0, y.ndim - 2): x.chunks[-1]})
    elif x.chunks[-1] != y.chunks[max(0, y.ndim - 2)]:
        x = x.rechunk({x.ndim - 1: y.chunks[max(0, y.ndim - 2)]})
    return _product(x, y)


def _product(x: da.Array, y: da.Array) -> da.Array:
    row, column = x.ndim == 1, y.ndim == 1
    if row:
        x = x[None, :]
    if column:
        y = y[:, None]
    batch = max(x.ndim, y.ndim) - 2
    axes = tuple(range(batch))
    i, k, j = batch, batch + 1, batch + 2
    result = da.blockwise(
        sum_of_products,
        (*axes, i, j),
        x,
        (*axes[batch - (x.ndim - 2) :], i, k),
        y,
        (*axes[batch - (y.ndim - 2) :], k, j),
        dtype=np.matmul(np.ones((1, 1), x.dtype), np.ones((1, 1), y.dtype)).dtype,
        meta=np.empty((0,) * (batch + 2), np.result_type(x.dtype, y.dtype)),
        concatenate=False,
        align_arrays=True,
    )
    if row:
        result = result[..., 0, :]
    return result[..., 0] if column else result


def _stored(x: Any) -> tuple[int, int] | None:
    """Chunk of the last two axes of a stored two-dimensional array."""
    return (x.chunks[0], x.chunks[1]) if isinstance(x, zarr.Array) and x.ndim == 2 else None


def _blocked(x: Any, rows: int, columns: int) -> da.Array:
    if isinstance(x, da.Array):
        return x
    blocks = (1,) * max(0, x.ndim - 2) + ((rows, columns) if x.ndim > 1 else (max(rows, columns),))
    return da.from_zarr(x, chunks=blocks) if isinstance(x, zarr.Array) else da.from_array(np.asarray(x), chunks=blocks)


__all__ = ["Tiling", "matmul", "sum_of_products"]
