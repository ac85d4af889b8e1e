"""Outputs of an attempt: computed, where they are large, in the memory files in which they are handed in."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass

import numpy as np

from goblin_dask.digest import digest
from goblin_dask.messages import INLINE_LIMIT, ArraySpec, BlobRef
from goblin_dask.store.buffers import Array, array_of, buffer_of, nbytes, spec_of
from goblin_dask.store.descriptors import SEALS, empty_memory_file, memory_file

TOGETHER = 4 << 20
"""Bytes of an attempt's outputs that travel inside one message; a gateway bounds what it reads."""

LARGE = 4 << 20
"""Bytes from which an output is computed in its memory file."""


@dataclass(slots=True)
class Output:
    """A computed array: its reference, and its bytes in a sealed memory file unless they are inline.

    The file goes with the last reference to this object: an upload that was abandoned still reads from it.
    """

    ref: BlobRef
    fd: int = -1

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class OutputFiles:
    """Memory files of one attempt; a context manager that closes those that were not collected."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        """Descriptor by the address at which its file is mapped."""

    def __enter__(self) -> OutputFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def allocate(self, spec: ArraySpec) -> Array | None:
        """A writable array in a new memory file; None for a small one, which is as well copied into its file."""
        size = nbytes(spec)
        if size < LARGE:
            return None
        fd, memory = empty_memory_file(size)
        array = array_of(memory, spec)  # the mapping ends with the last array that refers to it
        array.flags.writeable = True
        self._files[array.ctypes.data] = fd
        return array

    def collect(self, arrays: list[Array]) -> list[Output]:
        """Outputs of these arrays, which must be referred to from nowhere else; empties the list.

        Each array that needs a copy is dropped as soon as its bytes are in a memory file.
        """
        arrays.reverse()
        outputs, room, mapped = [], TOGETHER, []
        while arrays:
            array = arrays.pop()
            output = self._collect(array, room)
            room -= len(output.ref.inline or b"")
            outputs.append(output)
            if output.fd >= 0 and not _is_sealed(output.fd):
                mapped.append(array)  # others may be views of it
            del array
        mapped.clear()  # a file that is mapped for writing cannot be sealed
        for output in outputs:
            if output.fd >= 0 and not _is_sealed(output.fd):
                fcntl.fcntl(output.fd, fcntl.F_ADD_SEALS, SEALS)
        return outputs

    def _collect(self, array: Array, room: int) -> Output:
        buffer, spec = buffer_of(array), spec_of(array)
        name = digest(buffer)
        if buffer.nbytes <= min(INLINE_LIMIT, room):
            return Output(BlobRef(name, spec, buffer.nbytes, bytes(buffer)))
        ref = BlobRef(name, spec, buffer.nbytes)
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        fd = self._files.get(address, -1)
        if fd >= 0 and os.fstat(fd).st_size == buffer.nbytes:
            del self._files[address]
            return Output(ref, fd)
        return Output(ref, memory_file([buffer]))


def _is_sealed(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)
