"""A laboratory that is nothing but its data: blob store, data server, and grants signed with its key."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.cost import peak
from goblin_dask.graphs.program import Program, encode
from goblin_dask.labnode.data import DataServer
from goblin_dask.messages import ArraySpec, Check, Lease, Routes, SubmitTask
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.buffers import spec_of
from goblin_dask.store.chunks import store_array
from goblin_dask.store.grants import Grant, sign
from goblin_dask.store.refs import ChunkRef

KEY = b"\7" * 32


def product_program(*shapes: tuple[int, int], dtype: str = "float32") -> Program:
    """The product of matrices of these shapes, left to right."""
    build = Builder()
    values = [build.input(ArraySpec(shape, dtype)) for shape in shapes]
    result = values[0]
    for value in values[1:]:
        (result,) = build.add("matmul", [result, value])
    return build.finish([result])[0]


class DataLab:
    """Use within an event loop: `start`, then `task` and `lease`."""

    def __init__(self, folder: Any, **options: Any):
        self.blobs = BlobStore(folder, **options)
        self.data = DataServer(self.blobs, KEY)
        self.counter = 0

    async def start(self, **options: Any) -> DataLab:
        await self.data.start(**options)
        return self

    async def close(self) -> None:
        await self.data.close()
        self.blobs.close()

    def routes(self, *names: str) -> Routes:
        ways = {"local": self.data.local, "direct": self.data.direct, "relay": "/goblin/blobs"}
        return Routes(**{name: ways[name] for name in names or ("local",)})

    def grant(self, task: str, kind: str = "lease", *, attempt: str = "", seconds: float = 60, key: bytes = KEY) -> str:
        return sign(key, Grant(task, attempt or f"{task}#1", kind, time.time() + seconds))

    def expect(self, refs: Sequence[ChunkRef], outputs: Sequence[ArraySpec], program: str = "") -> str:
        self.counter += 1
        task = f"{self.counter:064x}"
        wire = tuple(ref.wire() for ref in refs)
        self.data.expect(SubmitTask(task, program, wire, tuple(outputs), flops=0.0, peak=0), refs)
        return task

    def lease(self, program: Program, arrays: Sequence[np.ndarray], *routes: str) -> tuple[str, Lease]:
        """A task on these arrays, and a lease of it."""
        refs = [store_array(self.blobs, array) for array in arrays]
        outputs = [spec_of(np.empty((arrays[0].shape[0], arrays[-1].shape[-1]), arrays[0].dtype))]
        task = self.expect(refs, outputs, program.digest)
        wire = tuple(ref.wire() for ref in refs)
        return task, Lease(
            f"{task}#1", encode(program), wire, self.grant(task), self.routes(*routes), peak(program), 60.0
        )

    def check(self, task: str, lease: Lease, outputs: Any, *routes: str) -> Check:
        """A check of what was committed for a lease."""
        grant = self.grant(task, "check", attempt=f"{task}#2")
        return Check(f"{task}#2", lease.program, lease.inputs, outputs, grant, self.routes(*routes))
