"""Products of matrices, decompositions and Fourier transforms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from goblin_dask.errors import NotTraceable
from goblin_dask.graphs.capture.aten.base import Call, array, axes_of, axis_of, lowers, refuse, shaped
from goblin_dask.graphs.capture.aten.reductions import vector_norm
from goblin_dask.graphs.tracer.array import Tracer
from goblin_dask.graphs.tracer.casting import astype, broadcast_to
from goblin_dask.graphs.tracer.recorder import current, op, ops


@lowers("aten.mm.default", "aten.bmm.default", "aten.dot.default", "aten.mv.default", "aten.matmul.default")
def _matmul(call: Call, a: Tracer, b: Tracer) -> Tracer:
    matrix = _repeated(b) if a.ndim == b.ndim == 3 else None
    if matrix is None:
        return op("matmul", a, b)
    # One product of matrices, not many of rows: PyTorch's decompositions leave a linear layer so.
    rows = shaped(a, (a.shape[0] * a.shape[1], a.shape[2]))
    return shaped(op("matmul", rows, matrix), (*a.shape[:2], b.shape[2]))


def _repeated(x: Tracer) -> Tracer | None:
    """The matrix that every one of a batch is; None where they differ."""
    if x.is_known or x.ndim != 3:
        return None
    build = current().builder
    operator, operands = build.maker(x.value)
    if operator != "broadcast_to":
        return None
    spec = build.spec(operands[0])
    if spec.shape[-2:] != x.shape[-2:] or any(n != 1 for n in spec.shape[:-2]):
        return None
    return shaped(Tracer(operands[0], spec), x.shape[-2:])


@lowers("aten.vdot.default")
def _vdot(call: Call, a: Tracer, b: Tracer) -> Tracer:
    return op("vecdot", a, b)


@lowers("aten.addmm.default", "aten.addmv.default", "aten.baddbmm.default")
def _addmm(call: Call, addend: Tracer, a: Tracer, b: Tracer, *, beta: Any = 1, alpha: Any = 1) -> Tracer:
    rank = a.ndim
    if alpha == beta == 1 and a.ndim == b.ndim and rank in (2, 3) and addend.dtype == a.dtype == b.dtype:
        whole = broadcast_to(addend, (*a.shape[:-1], b.shape[-1]))
        return op("addmm" if rank == 2 else "baddbmm", whole, a, b)
    product = op("matmul", a, b)
    if alpha != 1:
        product = op("multiply", product, array(alpha, product.dtype.name))
    if beta == 0:  # what it would be multiplied with does not count, NaN neither
        return product
    if beta != 1:
        addend = op("multiply", addend, array(beta, addend.dtype.name))
    return op("add", product, astype(addend, product.dtype))


@lowers("aten.addr.default")
def _addr(call: Call, addend: Tracer, a: Tracer, b: Tracer, *, beta: Any = 1, alpha: Any = 1) -> Tracer:
    return _addmm(call, addend, a.reshape((a.size, 1)), b.reshape((1, b.size)), beta=beta, alpha=alpha)


# --- decompositions -------------------------------------------------------------------------------------------------
@lowers("aten.linalg_qr.default")
def _qr(call: Call, a: Tracer, mode: str = "reduced") -> Any:
    if mode not in ("reduced", "complete"):
        raise NotTraceable(f"a QR decomposition with mode={mode!r}")
    return tuple(ops("qr", a, mode=mode))


@lowers("aten._linalg_svd.default")
def _svd(call: Call, a: Tracer, full_matrices: bool = False, compute_uv: bool = True, *, driver: Any = None) -> Any:
    if not compute_uv:
        raise NotTraceable("singular values without vectors: call torch.linalg.svdvals")
    return tuple(ops("svd", a, full_matrices=full_matrices))


@lowers("aten.linalg_svdvals.default")
def _svdvals(call: Call, a: Tracer, *, driver: Any = None) -> Tracer:
    return op("svdvals", a)


@lowers("aten._linalg_eigh.default")
def _eigh(call: Call, a: Tracer, uplo: str = "L", compute_v: bool = True) -> Any:
    if not compute_v:
        return op("eigvalsh", a, triangle=uplo), a
    return tuple(ops("eigh", a, triangle=uplo))


def _no_error(a: Tracer) -> Tracer:
    """LAPACK's code: a failure of these operators is the task's."""
    return op("full", array(0, "int32"), shape=a.shape[:-2])


@lowers("aten.linalg_cholesky_ex.default")
def _cholesky(call: Call, a: Tracer, *, upper: bool = False, check_errors: bool = False) -> Any:
    return op("cholesky", a, upper=upper), _no_error(a)


@lowers("aten.cholesky.default")
def _cholesky_old(call: Call, a: Tracer, upper: bool = False) -> Tracer:
    return op("cholesky", a, upper=upper)


@lowers("aten.linalg_inv_ex.default")
def _inv(call: Call, a: Tracer, *, check_errors: bool = False) -> Any:
    return op("inv", a), _no_error(a)


@lowers("aten._linalg_det.default")
def _det(call: Call, a: Tracer) -> Any:
    return op("det", a), None, None


@lowers("aten._linalg_slogdet.default")
def _slogdet(call: Call, a: Tracer) -> Any:
    return (*ops("slogdet", a), None, None)


@lowers("aten._linalg_solve_ex.default")
def _solve(call: Call, a: Tracer, b: Tracer, *, left: bool = True, check_errors: bool = False) -> Any:
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    if not left:
        swap = (*range(a.ndim - 2), a.ndim - 1, a.ndim - 2)
        swap_b = (*range(b.ndim - 2), b.ndim - 1, b.ndim - 2)
        x = op("solve", op("permute_dims", a, axes=swap), op("permute_dims", b, axes=swap_b))
        return op("permute_dims", x, axes=swap_b), None, None, _no_error(a)
    if vector and b.ndim > 1:
        return (
            op("squeeze", op("solve", a, op("expand_dims", b, axes=(b.ndim,))), axes=(b.ndim,)),
            None,
            None,
            _no_error(a),
        )
    return op("solve", a, b), None, None, _no_error(a)


# --- distances ------------------------------------------------------------------------------------------------------
@lowers("aten._cdist_forward.default")
def _cdist(call: Call, a: Tracer, b: Tracer, p: float, compute_mode: Any = None) -> Tracer:
    """Distances of all pairs of rows, from the differences themselves: no cancellation, whatever the mode."""
    rows, columns = op("expand_dims", a, axes=(a.ndim - 1,)), op("expand_dims", b, axes=(b.ndim - 2,))
    return vector_norm(call, op("subtract", rows, columns), p, [-1])


# --- Fourier transforms ---------------------------------------------------------------------------------------------
NORMALIZATIONS = {0: "backward", 1: "ortho", 2: "forward"}
"""ATen's, of a forward transform; the inverse one's are the other way round."""
_INVERSE = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


def _norm(code: int, forward: bool) -> str:
    name = NORMALIZATIONS[code]
    return name if forward else _INVERSE[name]


@lowers("aten._fft_c2c.default")
def _fft_c2c(call: Call, x: Tracer, dim: Sequence[int], normalization: int, forward: bool) -> Tracer:
    if not dim:
        return x
    return astype(
        op("fftn" if forward else "ifftn", x, axes=axes_of(x, dim), norm=_norm(normalization, forward)), call.dtype
    )


@lowers("aten._fft_r2c.default")
def _fft_r2c(call: Call, x: Tracer, dim: Sequence[int], normalization: int, onesided: bool) -> Tracer:
    name = "rfftn" if onesided else "fftn"
    return astype(op(name, x, axes=axes_of(x, dim), norm=NORMALIZATIONS[normalization]), call.dtype)


@lowers("aten._fft_c2r.default")
def _fft_c2r(call: Call, x: Tracer, dim: Sequence[int], normalization: int, last: Any) -> Tracer:
    axes = axes_of(x, dim)
    points = (*(x.shape[axis] for axis in axes[:-1]), int(last))
    return astype(op("irfftn", x, axes=axes, s=points, norm=_norm(normalization, False)), call.dtype)


@lowers("aten.cross.default", "aten.linalg_cross.default")
def _cross(call: Call, a: Tracer, b: Tracer, dim: int = -1) -> Tracer:
    refuse(None if dim is None else True, True, "the axis of a cross product")
    axis = axis_of(a, dim)

    def rolled(x: Tracer, by: int) -> Tracer:
        return op("roll", x, shift=(by,), axes=(axis,))

    return op(
        "subtract",
        op("multiply", rolled(a, -1), rolled(b, -2)),
        op("multiply", rolled(a, -2), rolled(b, -1)),
    )
