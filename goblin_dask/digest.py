"""Content addresses: a blob, a program and a task are named by the BLAKE3 digest of their bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from blake3 import blake3

Digest = str
"""64 lower-case hexadecimal characters: 32 bytes of BLAKE3."""


def digest(data: Any) -> Digest:
    """Address of some bytes.

    Parameters
    ----------
    data : buffer
        Anything with a C-contiguous buffer: ``bytes``, ``memoryview``, ``mmap``.
    """
    view = memoryview(data)
    if view.format != "B" or view.ndim != 1:  # blake3 takes nothing but flat bytes
        view = view.cast("B") if view.nbytes else memoryview(b"")
    return blake3(view).hexdigest()


def is_digest(text: object) -> bool:
    """Whether `text` is written as an address, so that it may become part of a path or of an URL."""
    return isinstance(text, str) and len(text) == 64 and not text.strip("0123456789abcdef")


def task_digest(program: Digest, inputs: Iterable[Digest]) -> Digest:
    """Address of a task: its program's and its inputs' addresses, in order."""
    return blake3("\n".join([program, *inputs]).encode()).hexdigest()
