"""Programs on PyTorch's tensors.

Operators for which PyTorch has a faster kernel that means the same are computed by it, on any of its devices. All
others, and these for dtypes on which the two libraries differ, take NumPy's kernel: on a CPU that costs nothing, for
both look at the same memory; on another device the operands travel. Nothing is approximated for speed: TF32 is off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from goblin_dask.errors import InputError
from goblin_dask.graphs.backends.base import Backend
from goblin_dask.graphs.backends.pytorch_kernels import OWN, Own
from goblin_dask.graphs.backends.tensors import NUMPY_DTYPES, to_array, to_tensor
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.graphs.operators.base import Array, Attributes, Kernel, Operator

Tensor = torch.Tensor


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No gradients, no warnings of NumPy's, and no convolution in TF32 or by an algorithm that differs by the run."""
    cudnn = torch.backends.cudnn
    with (
        torch.inference_mode(),
        np.errstate(all="ignore"),
        cudnn.flags(enabled=cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=False),
    ):
        yield


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """A device whose memory is full is no fault of the program."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error).splitlines()[0]) from error


def on(device: str) -> Backend:
    """PyTorch on a device.

    Raises
    ------
    InputError
        When there is no such device.
    """
    try:
        where = torch.device(device)
        torch.zeros(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"PyTorch has no device {device!r} here: {str(error).splitlines()[0]}") from error
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")

    def to_device(array: Array) -> Tensor:
        with _memory_errors():
            return to_tensor(array).to(where)

    def to_host(tensor: Tensor) -> Array:
        return np.require(to_array(tensor), requirements="C")

    def hosted(operator: Operator) -> Kernel:
        def kernel(xp: Any, operands: tuple[Array, ...], attributes: Attributes) -> tuple[Array, ...]:
            results = operator.kernel(np, tuple(map(to_array, operands)), attributes)
            return tuple(to_device(np.asarray(result)) for result in results)

        return kernel

    def overridden(name: str, own: Own) -> Kernel:
        takes, function = own
        other = hosted(CATALOGUE[name])

        def kernel(xp: Any, operands: tuple[Array, ...], attributes: Attributes) -> tuple[Array, ...]:
            if not takes(operands, attributes):
                return other(xp, operands, attributes)
            with _memory_errors():
                results = function(operands, attributes)
            return results if isinstance(results, tuple) else (results,)

        return kernel

    cuda = where.type == "cuda"
    return Backend(
        f"torch:{where}",
        torch,
        Tensor,
        to_device,
        to_host,
        overrides={name: overridden(name, own) for name, own in OWN.items()},
        kernel=hosted,
        dtype=lambda tensor: NUMPY_DTYPES[tensor.dtype],
        quiet=_quiet,
        device=torch.cuda.get_device_name(where) if cuda else "" if where.type == "cpu" else where.type,
        driver=str(torch.version.cuda or "") if cuda else "",
        libraries=("torch",),
        memory=torch.cuda.get_device_properties(where).total_memory if cuda else 0,
        use_threads=torch.set_num_threads,
    )
