"""Closed schemas of what a Dask worker or nanny and the gateway's scheduler tell each other.

Dask's own messages never cross the border; these structs do (`goblin_dask.wire.codec` translates). They hold numbers,
short strings and the gateway's own work. What Dask has and they have not (``type``, ``metadata``, ``extra``,
``versions``, ``services``, ``worker``, addresses, plugins, functions) cannot be said at all: it is an unknown field,
and closes the session, as an unknown operation does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from goblin_dask import messages as m
from goblin_dask.messages import Message

Key = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Alias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
RunId = Annotated[int, msgspec.Meta(ge=-1, lt=2**62)]

MOST_MESSAGES = 10_000
"""Messages in one batch of a stream."""


# --- worker or nanny to gateway: calls -----------------------------------------------------------------------------
class Register(Message, frozen=True):
    alias: Alias
    status: Literal["init", "running", "paused"] = "init"


class Heartbeat(Message, frozen=True):
    memory: int = 0
    """Resident bytes."""
    cpu: float = 0.0
    """Per cent."""


class RegisterNanny(Message, frozen=True):
    pass


class NannyStarted(Message, frozen=True):
    ok: bool


class Unregister(Message, frozen=True):
    """A nanny says that the process of its worker has ended."""

    alias: Alias


class Retire(Message, frozen=True):
    """A worker is about to stop by itself."""


class Hangup(Message, frozen=True):
    """The comm is done with."""


# --- worker to gateway: the stream ---------------------------------------------------------------------------------
class Finished(Message, frozen=True):
    key: Key
    run_id: RunId
    seconds: float = 0.0


class Erred(Message, frozen=True):
    key: Key
    run_id: RunId
    kind: Name
    text: Text
    seconds: float = 0.0


class Rescheduled(Message, frozen=True):
    key: Key


class StatusIs(Message, frozen=True):
    status: Literal["init", "running", "paused", "closing", "closing_gracefully"]


class StreamEnds(Message, frozen=True):
    pass


# --- gateway to worker or nanny ------------------------------------------------------------------------------------
class Registered(Message, frozen=True):
    time: float
    interval: float
    """Seconds between heartbeats."""


class NotRegistered(Message, frozen=True):
    reason: Text


class Beat(Message, frozen=True):
    status: Literal["OK", "missing"]
    time: float = 0.0
    interval: float = 0.0


class Done(Message, frozen=True):
    pass


class Failed(Message, frozen=True):
    """A call failed; what is told of the exception."""

    text: Text


class Compute(Message, frozen=True):
    """`goblin_dask.wire.work.run_work` is to be called with this; the key is the attempt."""

    run_id: RunId
    priority: Annotated[tuple[float, ...], msgspec.Meta(max_length=16)]
    work: m.Work


class FreeKeys(Message, frozen=True):
    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=100_000)]


class StatusShallBe(Message, frozen=True):
    status: Literal["running", "paused", "closing_gracefully"]


class CloseWorker(Message, frozen=True):
    reason: Text = ""


Call = Register | Heartbeat | RegisterNanny | NannyStarted | Unregister | Retire | Hangup
Answer = Registered | NotRegistered | Beat | Done | Failed
Up = Annotated[list[Finished | Erred | Rescheduled | StatusIs | StreamEnds], msgspec.Meta(max_length=MOST_MESSAGES)]
Down = Annotated[
    list[Compute | FreeKeys | StatusShallBe | CloseWorker | StreamEnds], msgspec.Meta(max_length=MOST_MESSAGES)
]

CALLS = m.decoder(Call)
ANSWERS = m.decoder(Answer)
UPS: Any = m.decoder(Up)
DOWNS: Any = m.decoder(Down)
