"""Sans-IO core of a resumable session: what is sent once arrives once, in order, however often connections break.

Frames are numbered from 1 in each direction. The sender keeps every frame until the receiver has *released* it, that
is, until whoever the frame was for has taken it, and lets no more than a window of unreleased frames go out. That
bounds the memory on both sides and pushes back on a fast sender. After a cut each side tells how far it has
*received*, and the rest is sent again.

A packet is one binary WebSocket message: the number of its first frame, the number up to which the other direction is
released, and frames. A message longer than a frame is cut in pieces that follow each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from goblin_dask.errors import WireError
from goblin_dask.messages import MESSAGE_LIMIT

CONTROL: Final = 0
"""The channel of `goblin_dask.messages`; all others carry Dask comms."""

DATA, PIECE, OPEN, CLOSE = range(4)
"""Kinds of frames: a message or its end; a message's earlier piece; a channel is opened; a channel is closed."""

FRAME_BYTES: Final = 128 * 1024
PACKET_BYTES: Final = 256 * 1024
PACKET_FRAMES: Final = 512
PACKET_LIMIT: Final = PACKET_BYTES + 64 * 1024
"""Largest packet that is accepted, encoded."""

WINDOW_BYTES: Final = 4 * 1024 * 1024
WINDOW_FRAMES: Final = 4096
"""How much may be under way, sent and not released; both ends know it, so that the receiver can insist on it."""

FRAME_COST: Final = 64
"""Bytes that a frame counts for besides its payload."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    channel: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    kind: Annotated[int, msgspec.Meta(ge=0, le=3)]
    payload: Annotated[bytes, msgspec.Meta(max_length=FRAME_BYTES)] = b""


class Packet(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    first: Count
    released: Count
    frames: Annotated[list[Frame], msgspec.Meta(max_length=PACKET_FRAMES)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Packet)


@dataclass(frozen=True)
class Limits:
    """What one side takes from, and keeps for, the other."""

    message: int = MESSAGE_LIMIT
    """Largest message accepted, in bytes."""
    channels: int = 32
    """Most channels that the other side may have open."""
    outbox: int = 4 * MESSAGE_LIMIT
    """Bytes kept for a peer that takes nothing; beyond them the session is given up."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message, an opening or a closing, to be released once it was taken."""

    channel: int
    kind: int
    payload: bytes
    number: int


class Link:
    """One side of a session. A new session has a new link; a new connection of the same session has not.

    Parameters
    ----------
    limits : Limits
    """

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self.received = 0
        """Number of the last frame that came in."""
        self.released = 0
        """All frames up to this number have been taken by whoever they were for."""
        self._acknowledged = 0  # the `released` that the peer was last told
        self._unacknowledged = 0  # bytes released since then
        self._open: deque[int] = deque()  # numbers received and not released, ascending
        self._taken: set[int] = set()  # of those, the ones taken out of order
        self._costs: dict[int, int] = {}
        self._held = 0
        self._pieces: list[bytes] = []
        self._pieces_bytes = 0
        self._pieces_channel = CONTROL

        self._last = 0  # number of the last frame that was made
        self._sent: deque[tuple[int, Frame]] = deque()
        self._unsent: deque[tuple[int, Frame]] = deque()
        self._sent_bytes = 0
        self._unsent_bytes = 0
        self._controls: deque[tuple[int, bytes]] = deque()

    # --- sending ------------------------------------------------------------------------------------------------

    def send(self, channel: int, payload: bytes = b"", kind: int = DATA) -> None:
        """Queue a message (or an opening, a closing).

        Raises
        ------
        WireError
            When the peer has not taken what was queued before for so long that no more can be kept.
        """
        if self._sent_bytes + self._unsent_bytes + len(payload) > self.limits.outbox:
            raise WireError(
                f"{self._sent_bytes + self._unsent_bytes} bytes wait for a peer that takes none; "
                f"at most {self.limits.outbox} are kept"
            )
        if len(payload) <= FRAME_BYTES:
            self._queue(Frame(channel, kind, payload))
        else:
            view = memoryview(payload)
            cuts = range(0, len(payload), FRAME_BYTES)
            for start in cuts:
                last = start == cuts[-1]
                # Encoded as bytes and never decoded from here, a view saves the copy.
                piece: bytes = view[start : start + FRAME_BYTES]  # type: ignore[assignment]
                self._queue(Frame(channel, kind if last else PIECE, piece))
        if channel == CONTROL:
            self._controls.append((self._last, payload))

    def _queue(self, frame: Frame) -> None:
        self._last += 1
        self._unsent.append((self._last, frame))
        self._unsent_bytes += len(frame.payload) + FRAME_COST

    @property
    def full(self) -> bool:
        """Whether a considerate sender waits before it queues more."""
        return (
            self._sent_bytes + self._unsent_bytes > WINDOW_BYTES or len(self._sent) + len(self._unsent) > WINDOW_FRAMES
        )

    @property
    def idle(self) -> bool:
        """Whether everything that was queued has been taken."""
        return not self._sent and not self._unsent

    @property
    def owes(self) -> bool:
        """Whether the peer has not been told yet how much was released."""
        return self.released > self._acknowledged

    @property
    def owes_much(self) -> bool:
        """Whether the peer may be waiting for us to tell it."""
        return self.released - self._acknowledged > WINDOW_FRAMES // 4 or self._unacknowledged > WINDOW_BYTES // 4

    def packet(self, even_empty: bool = False) -> bytes | None:
        """Next packet to send over the present connection, or None."""
        frames: list[Frame] = []
        size = 0
        first = self._unsent[0][0] if self._unsent else self._last + 1
        while self._unsent and len(frames) < PACKET_FRAMES and size < PACKET_BYTES - FRAME_BYTES:
            if self._sent_bytes >= WINDOW_BYTES or len(self._sent) >= WINDOW_FRAMES:
                break
            number, frame = self._unsent.popleft()
            cost = len(frame.payload) + FRAME_COST
            self._sent.append((number, frame))
            self._sent_bytes += cost
            self._unsent_bytes -= cost
            size += cost
            frames.append(frame)
        if not frames and not even_empty:
            return None
        self._acknowledged, self._unacknowledged = self.released, 0
        return _encoder.encode(Packet(first, self.released, frames))

    def unreleased_controls(self) -> Iterator[bytes]:
        """Messages of the control channel of which it is not known that they were taken."""
        return (payload for _, payload in self._controls)

    # --- receiving ----------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[Arrival]:
        """Take a packet apart; frames that have been received before are passed over.

        Raises
        ------
        WireError
            When it is not a packet, leaves frames out or is more than was agreed on. The session is over then.
        """
        try:
            packet = _decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(f"a packet that is not of the protocol: {error}") from error
        self._release_sent(packet.released)
        if packet.first > self.received + 1:
            raise WireError(f"frame {packet.first} came after frame {self.received}: frames were left out")
        arrivals = []
        for number, frame in enumerate(packet.frames, packet.first):
            if number > self.received:
                self.received = number
                arrival = self._take(number, frame)
                if arrival is not None:
                    arrivals.append(arrival)
        return arrivals

    def _take(self, number: int, frame: Frame) -> Arrival | None:
        payload = frame.payload
        self._open.append(number)
        if frame.kind == PIECE or self._pieces:
            if self._pieces and frame.channel != self._pieces_channel:
                raise WireError(f"a frame of channel {frame.channel} between pieces of channel {self._pieces_channel}")
            if not payload or frame.kind not in (PIECE, DATA):
                raise WireError("an empty piece, or an opening or closing between pieces of a message")
            self._pieces_channel = frame.channel
            self._pieces.append(payload)
            self._pieces_bytes += len(payload)
            if self._pieces_bytes > self.limits.message:
                raise WireError(f"a message longer than the {self.limits.message} bytes that are accepted")
            if frame.kind == PIECE:
                # Released at once, or a message longer than the window could never be sent.
                self._costs[number] = len(payload) + FRAME_COST
                self._held += len(payload) + FRAME_COST
                self.release(number)
                return None
            payload = b"".join(self._pieces)
            self._pieces.clear()
            self._pieces_bytes = 0
        elif len(payload) > self.limits.message:
            raise WireError(f"a message longer than the {self.limits.message} bytes that are accepted")
        self._costs[number] = len(payload) + FRAME_COST
        self._held += len(payload) + FRAME_COST
        if self._held > WINDOW_BYTES + FRAME_BYTES + self.limits.message or len(self._open) > 2 * WINDOW_FRAMES:
            raise WireError(f"{self._held} bytes in {len(self._open)} frames before any were released: too many")
        return Arrival(frame.channel, frame.kind, payload, number)

    def release(self, number: int) -> None:
        """Say that the arrival of this number was taken."""
        cost = self._costs.pop(number)
        self._held -= cost
        self._unacknowledged += cost
        self._taken.add(number)
        while self._open and self._open[0] in self._taken:
            self.released = self._open.popleft()
            self._taken.remove(self.released)

    def _release_sent(self, released: int) -> None:
        if released > self._last - len(self._unsent):
            raise WireError(
                f"frame {released} is said to be taken, but only {self._last - len(self._unsent)} were sent"
            )
        while self._sent and self._sent[0][0] <= released:
            _, frame = self._sent.popleft()
            self._sent_bytes -= len(frame.payload) + FRAME_COST
        while self._controls and self._controls[0][0] <= released:
            self._controls.popleft()

    # --- connections --------------------------------------------------------------------------------------------

    def attach(self, received: int) -> None:
        """A new connection stands; the peer has received frames up to this number.

        Raises
        ------
        WireError
            When that cannot be.
        """
        sent = self._last - len(self._unsent)
        gone = sent - len(self._sent)
        if not gone <= received <= sent:
            raise WireError(f"frame {received} is said to be the last received; it was between {gone} and {sent}")
        while self._sent and self._sent[-1][0] > received:
            number, frame = self._sent.pop()
            cost = len(frame.payload) + FRAME_COST
            self._sent_bytes -= cost
            self._unsent_bytes += cost
            self._unsent.appendleft((number, frame))
        self._acknowledged = 0  # what we last told may have been lost on the way
