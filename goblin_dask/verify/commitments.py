"""What a volunteer says its outputs are, before anybody looks at them, and whether it can stand by that."""

from __future__ import annotations

from collections.abc import Sequence

from goblin_dask import messages as m
from goblin_dask.digest import digest, is_digest
from goblin_dask.graphs.operators.base import nbytes


def mismatch(outputs: Sequence[m.BlobRef], specs: Sequence[m.ArraySpec]) -> str:
    """Why these cannot be the outputs of a program that declares `specs`; empty when they may be."""
    if len(outputs) != len(specs):
        return f"{len(outputs)} outputs where {len(specs)} are declared"
    for number, (blob, spec) in enumerate(zip(outputs, specs, strict=True)):
        if blob.spec != spec:
            return f"output {number} is {blob.spec.dtype[:20]} {blob.spec.shape[:8]}, not {spec.dtype} {spec.shape}"
        if blob.nbytes != nbytes(spec):
            return f"output {number} has {blob.nbytes} bytes, not {nbytes(spec)}"
        if not is_digest(blob.digest):
            return f"output {number} has no valid digest"
        if blob.inline is not None and (
            len(blob.inline) != blob.nbytes or blob.nbytes > m.INLINE_LIMIT or digest(blob.inline) != blob.digest
        ):
            return f"output {number} came with bytes that are not those of its digest"
    return ""
