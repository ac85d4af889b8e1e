"""A backend by its name: ``numpy``, ``cupy``, ``torch``, or ``torch:DEVICE``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.graphs.backends.base import NUMPY, Backend
from goblin_dask.graphs.operators.base import Array, Attributes, Kernel, Operator


def cupy_backend() -> Backend:
    """CuPy on the current device.

    Raises
    ------
    InputError
        When CuPy is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise InputError("there is no CuPy here: install goblin-dask[cupy]") from error

    def kernel_of(operator: Operator) -> Kernel:
        def kernel(xp: Any, operands: tuple[Array, ...], attributes: Attributes) -> tuple[Array, ...]:
            try:
                return operator.kernel(xp, operands, attributes)
            except (AttributeError, NotImplementedError):  # CuPy lacks some of NumPy's functions: these run on the host
                results = operator.kernel(np, tuple(map(cupy.asnumpy, operands)), attributes)
                return tuple(map(cupy.asarray, results))

        return kernel

    number = cupy.cuda.runtime.getDevice()
    return Backend(
        "cupy",
        cupy,
        cupy.ndarray,
        cupy.asarray,
        lambda array: cupy.asnumpy(array, order="C"),
        kernel=kernel_of,
        device=cupy.cuda.runtime.getDeviceProperties(number)["name"].decode(),
        driver=str(cupy.cuda.runtime.driverGetVersion()),
        memory=int(cupy.cuda.runtime.memGetInfo()[1]),
    )


def torch_backend(device: str = "cpu") -> Backend:
    """PyTorch on a device.

    Raises
    ------
    InputError
        When PyTorch is not installed, or does not have that device.
    """
    try:
        from goblin_dask.graphs.backends.pytorch import on
    except ImportError as error:
        raise InputError("there is no PyTorch here: install goblin-dask[torch]") from error
    return on(device)


_KINDS: dict[str, Callable[..., Backend]] = {
    "numpy": lambda: NUMPY,
    "cupy": cupy_backend,
    "torch": torch_backend,
}


def backend_named(name: str) -> Backend:
    """The backend of a name.

    Raises
    ------
    InputError
        For a name that is none, or a library or device that is not here.
    """
    kind, colon, device = str(name).partition(":")
    if kind not in _KINDS or (colon and (kind != "torch" or not device)):
        raise InputError(f"{name!r} is no backend; there are numpy, cupy, torch and torch:DEVICE, as in torch:cuda:0")
    return _KINDS[kind](device) if device else _KINDS[kind]()
