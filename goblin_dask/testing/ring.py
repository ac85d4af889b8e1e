"""What colluding volunteers tell each other: which tasks each of them holds, and what the first of them answered.

A directory that all of a ring's machines can write to. Names of files are tasks; whoever creates one first has said it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from goblin_dask.digest import Digest
from goblin_dask.messages import ArraySpec
from goblin_dask.store.buffers import array_of, buffer_of, spec_of
from goblin_dask.testing.strategies import Answer
from goblin_dask.verify.operands import Array


class _Agreed(msgspec.Struct, frozen=True):
    answer: Answer
    outputs: tuple[tuple[ArraySpec, bytes], ...]


class Ring:
    """One member's view of its ring.

    Parameters
    ----------
    directory : path
        The ring's; made when it is missing.
    """

    def __init__(self, directory: str | Path):
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._me = secrets.token_hex(8)

    def hold(self, task: Digest) -> int:
        """Say that this member has a task; how many of the ring have it, or had it."""
        (self._directory / f"{task}.{self._me}").touch()
        return sum(1 for _ in self._directory.glob(f"{task}.*"))

    def agreed(self, task: Digest) -> tuple[Answer, list[Array]] | None:
        """What the first member that answered has committed: its answer, and the outputs themselves."""
        path = self._directory / task
        if not path.exists():
            return None
        said = msgspec.msgpack.decode(path.read_bytes(), type=_Agreed)
        return said.answer, [array_of(data, spec) for spec, data in said.outputs]

    def agree(self, task: Digest, answer: Answer, outputs: Sequence[Array]) -> tuple[Answer, list[Array]]:
        """Say what this member is going to commit, unless another was first; what the first one said."""
        said = _Agreed(answer, tuple((spec_of(array), bytes(buffer_of(array))) for array in outputs))
        mine = self._directory / f"{self._me}.new"
        mine.write_bytes(msgspec.msgpack.encode(said))
        try:
            os.link(mine, self._directory / task)
        except FileExistsError:
            pass  # somebody was first
        finally:
            mine.unlink()
        first = self.agreed(task)
        assert first is not None
        return first
