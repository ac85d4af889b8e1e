"""What a machine says of itself when it joins: a random key, its parts and versions, its measured speed."""

from __future__ import annotations

import ctypes
import os
import platform
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg.blas  # loads its library: `use_threads` reaches only those that are loaded
from threadpoolctl import ThreadpoolController

from goblin_dask import config
from goblin_dask.errors import GoblinError
from goblin_dask.graphs.backends.base import NUMPY, Backend
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.graphs.operators import CATALOGUE_VERSION
from goblin_dask.messages import ArraySpec, Machine
from goblin_dask.volunteer.limits import Limits

SPEED_SIZE = 1024
"""Rows of the matrices whose product measures the speed: 2.1 GFLOP."""


def host_key() -> str:
    """The machine's key: 32 hexadecimal characters, random, made here at the first start and kept.

    It says nothing of the machine, and is not taken from an image of a disk unless the image was made after it.
    """
    folder = config.get("volunteer.directory")
    folder = Path(folder).expanduser() if folder else Path.home() / ".local/share/goblin-dask/volunteer"
    path = folder / "host-key"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            fresh = folder / secrets.token_hex(8)
            fresh.write_text(secrets.token_hex(16))
            fresh.chmod(0o600)
            with suppress(FileExistsError):  # another worker of this machine was faster: its key is ours
                os.link(fresh, path)
            fresh.unlink()
        key = path.read_text().strip()
    except OSError as error:
        text = f"the machine's key cannot be kept in {folder} ({error}): set goblin.volunteer.directory"
        raise GoblinError(text) from error
    if len(key) != 32 or key.strip("0123456789abcdef"):
        raise GoblinError(f"{path} does not hold a machine's key (32 hexadecimal characters): delete it")
    return key


def check_blas() -> None:
    """Refuse to join with a BLAS that mixes up threads or transposes.

    Raises
    ------
    GoblinError
        When it gives wrong products; names the library.
    """

    def rows(t: int) -> bool:
        product = (t * np.ones((20_000, 3))) @ np.eye(3).T
        return bool((product == t).all())

    with ThreadPoolExecutor(8) as pool:
        threads = all(pool.map(rows, range(8)))
    a = np.arange(625 * 5, dtype="f8").reshape(625, 5) % 97
    b = np.arange(5 * 625, dtype="f8").reshape(5, 625) % 89
    exact = (a.astype("i8")[:, None, :] * b.astype("i8").T[None, :, :]).sum(-1)
    transposes = bool((a @ b == exact).all() and (exact == (b.T @ a.T).T).all())
    # SciPy brings another one, which adds products up. It takes 32 MB for itself when it is first used, and waits for
    # ever where it may not have them: now, and not in the first task.
    gemm = scipy.linalg.blas.dgemm
    transposes &= bool((gemm(1, b.T, a.T) == exact.T).all() and (gemm(1, b, a, trans_a=1, trans_b=1) == exact.T).all())
    if not threads or not transposes:
        what = "rows of another thread" if not threads else "a wrong product of transposed matrices"
        raise GoblinError(
            f"this machine's BLAS ({blas()}) returns {what}: its results would be rejected; install another NumPy build"
        )


def blas() -> str:
    """Name and version of the linear algebra library that NumPy uses."""
    found = [lib for lib in ThreadpoolController().info() if lib.get("user_api") == "blas"]
    return " ".join(str(found[0].get(k)) for k in ("internal_api", "version", "architecture")) if found else "none"


def measure_flops(backend: Backend = NUMPY) -> float:
    """Speed of a float32 matrix product, FLOP/s: the best of three."""
    spec = ArraySpec((SPEED_SIZE, SPEED_SIZE), "float32")
    build = Builder()
    program, _ = build.finish(build.add("matmul", [build.input(spec), build.input(spec)]))
    a = backend.to_device(np.ones(spec.shape, spec.dtype))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        execute(program, [a, a], backend=backend)
        best = min(best, time.perf_counter() - start)
    return 2 * SPEED_SIZE**3 / best


def describe(limits: Limits, at_once: int = 1, backend: Backend = NUMPY) -> Machine:
    """Test and measure this machine, with the threads that are set.

    It works on `at_once` attempts at a time.
    """
    check_blas()
    names = ("numpy", "dask", "distributed", "goblin-dask", *backend.libraries)
    versions = {name: version(name) for name in names} | {"python": platform.python_version(), "blas": blas()}
    kind = backend.name.partition(":")[0]
    device = backend.device or f"cpu {platform.machine()}"
    return Machine(
        host=host_key(),
        device=device if kind == "numpy" else f"{kind} {device}",
        driver=backend.driver,
        versions=tuple(sorted(versions.items())),
        threads=limits.threads,
        slots=at_once + limits.prefetch,
        memory=min(limits.memory, backend.memory) if backend.memory else limits.memory,
        gpu_memory=backend.memory,
        cache=limits.cache,
        flops=measure_flops(backend),
        catalogue=CATALOGUE_VERSION,
    )


def use_threads(count: int) -> Any:
    """Set BLAS's threads for good; keep what is returned. A nanny starts its workers with one, whatever the owner said.

    Once, not for each task: looking for the libraries takes milliseconds.
    """
    return ThreadpoolController().limit(limits=count)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_one_heap() -> None:
    """Have the C library reuse memory, from one heap for all threads, until `trim` returns what is left over.

    An array that is mapped by itself is paid for page by page each time: a third of the CPU time of a stage of a
    transformer. 32 MiB is the most that the library takes for small. Nothing to do where it is not glibc.
    """
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        libc.mallopt(_M_ARENA_MAX, 1)


def return_memory_early() -> None:
    """Have the C library map every large array by itself and unmap it when it is freed.

    For where the kernel counts what is reserved, with ``RLIMIT_DATA``: the heap's holes count too.
    """
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 20)


def trim() -> None:
    """Give what the heap has left over back to the machine."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def _libc() -> Any:
    if platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(None)
