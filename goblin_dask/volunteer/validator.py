"""A validator's work: fetch an attempt's inputs and committed outputs, check them, report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from goblin_dask.digest import digest
from goblin_dask.errors import GoblinError
from goblin_dask.graphs.execute import Source
from goblin_dask.graphs.program import Program
from goblin_dask.messages import ArraySpec, BlobRef, Check, CheckMethod, CheckReport
from goblin_dask.store.buffers import nbytes
from goblin_dask.volunteer.inputs import Abandoned, FetchFailed, Inputs, decode_program

logger = logging.getLogger(__name__)


class Checker(Protocol):
    """`goblin_dask.verify.check.check_result`, with the operands' statistics that this process keeps."""

    def __call__(
        self,
        program: Program,
        inputs: Sequence[Source],
        outputs: Sequence[Any],
        *,
        method: CheckMethod,
        replica: Sequence[Any] | None,
        values: Sequence[int],
        digests: Sequence[str],
    ) -> CheckReport: ...


class Gathered:
    """What a check needs, being fetched while the check waits for its device.

    Parameters
    ----------
    work : Check
    fetch : callable
        ``fetch(refs, specs) -> Inputs``; raises `GoblinError` when they do not fit.
    """

    def __init__(self, work: Check, fetch: Callable[[tuple[BlobRef, ...], tuple[ArraySpec, ...]], Inputs]):
        self._opened: list[Inputs] = []
        self.problem: CheckReport | None = None
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.replica: list[Any] = []
        try:
            self.program = decode_program(work.program)
            for kept, refs, specs in (
                (self.inputs, work.inputs, self.program.inputs),
                (self.outputs, work.outputs, tuple(ref.spec for ref in work.outputs)),
                (self.replica, work.replica, tuple(ref.spec for ref in work.replica)),
            ):
                inputs = fetch(refs, specs)
                self._opened.append(inputs)
                kept.extend(inputs.sources())
        except GoblinError as error:
            self.problem = CheckReport("failed", work.method, reason=str(error))

    def close(self) -> None:
        """Cancel what was not asked for."""
        for inputs in self._opened:
            inputs.close()


def check(work: Check, gathered: Gathered, checker: Checker) -> CheckReport | None:
    """Check one attempt's result; None when it was abandoned meanwhile. Blocks.

    Whatever keeps the check from being done is reported as ``failed``, which says nothing of the result.
    """
    for ref in (*work.outputs, *work.replica):
        if reason := _misdeclared(ref):
            return CheckReport("wrong", "structural", reason=reason)
    if gathered.problem is not None:
        return gathered.problem
    try:
        return checker(
            gathered.program,
            gathered.inputs,
            [load() for load in gathered.outputs],
            method=work.method,
            replica=[load() for load in gathered.replica] or None,
            values=work.values,
            digests=[ref.digest for ref in work.inputs],
        )
    except Abandoned:
        return None
    except FetchFailed as error:
        return CheckReport("failed", work.method, reason=f"a blob could not be fetched: {error}")
    except (GoblinError, MemoryError) as error:
        return CheckReport("failed", work.method, reason=str(error) or "the memory ran out")
    except Exception as error:
        logger.exception("check %s", work.attempt)
        return CheckReport("failed", work.method, reason=f"{type(error).__name__}: {error}")


def _misdeclared(ref: BlobRef) -> str:
    """What is wrong with a committed reference itself; empty when nothing is."""
    try:
        expected = nbytes(ref.spec)
    except GoblinError as error:
        return str(error)
    if ref.nbytes != expected or (ref.inline is not None and len(ref.inline) != expected):
        return f"an output of shape {ref.spec.shape} and dtype {ref.spec.dtype} was committed as {ref.nbytes} bytes"
    if ref.inline is not None and digest(ref.inline) != ref.digest:
        return "an output is not what it was committed as"
    return ""
