"""A *parcel*: a pickled value with its large arrays beside it, sent over HTTP between a researcher and the lab node.

By protocol 5 of pickle the memory of contiguous arrays is no part of the pickle: it is sent from where it lies, and
received where it stays. A parcel is: the number of its parts, the length of each (u64, little-endian), and the parts,
which are the pickle and the buffers. Whoever opens one has checked before who sent it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from http.client import HTTPResponse
from typing import Any

import cloudpickle
import numpy as np
from aiohttp import StreamReader

from goblin_dask.errors import ConnectionLost, InputError

PIECE = 1 << 20
"""Bytes that are handed to a socket at a time; what it does not take at once is copied."""

Pieces = Sequence[bytes | memoryview]


def pack(value: Any) -> Pieces:
    """A parcel in pieces, to be sent one after the other; the buffers are the arrays' own memory."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [pickled, *(buffer.raw() for buffer in buffers)]
    return [np.array([len(parts), *map(len, parts)], "<u8").tobytes(), *parts]


def size(pieces: Pieces) -> int:
    """Bytes of a parcel."""
    return sum(map(len, pieces))


def cut(pieces: Pieces) -> Iterator[memoryview]:
    """The same bytes in pieces that are not large."""
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]


class Arriving:
    """A parcel that is being received."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray[Any, Any]] = []

    def spaces(self) -> Iterator[memoryview]:
        """Where its bytes belong, in order; each is to be filled before the next is asked for."""
        (count,) = yield from _space(1)
        lengths = yield from _space(int(count))
        for length in lengths:
            part = np.empty(int(length), np.uint8)
            self._parts.append(part)
            yield part.data

    def open(self) -> Any:
        """The value; its arrays lie where they were received, and may be written to."""
        pickled, *buffers = self._parts
        return pickle.loads(pickled.data, buffers=buffers)  # noqa: S301 from the own laboratory, or its researcher


def _space(count: int) -> Any:
    numbers = np.empty(count, "<u8")
    yield numbers.data.cast("B")
    return numbers


def read(response: HTTPResponse) -> Any:
    """The value of the parcel that is a response's body.

    Raises
    ------
    ConnectionLost
        When not all of it comes.
    """
    parcel = Arriving()
    for space in parcel.spaces():
        done = 0
        while done < len(space):
            count = response.readinto(space[done:])
            if not count:
                raise ConnectionLost("the lab node sent only a part of an answer")
            done += count
    response.read()  # nothing more: its connection is free then
    return parcel.open()


async def receive(content: StreamReader) -> Arriving:
    """The parcel that is a request's body.

    Raises
    ------
    InputError
        When not all of it comes.
    """
    parcel = Arriving()
    for space in parcel.spaces():
        done = 0
        while done < len(space):
            chunk = await content.read(len(space) - done)
            if not chunk:
                raise InputError("a request ended before its last byte")
            space[done : done + len(chunk)] = chunk
            done += len(chunk)
    return parcel
