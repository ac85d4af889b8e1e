"""The sans-IO core: every message once, in order, whatever connections do; every bound kept."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goblin_dask.errors import WireError
from goblin_dask.wire import frames
from goblin_dask.wire.frames import CLOSE, CONTROL, DATA, OPEN, PIECE, Arrival, Limits, Link

actions = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 1), st.integers(0, 2), st.binary(max_size=100)),
        st.tuples(st.just("pack"), st.integers(0, 1)),
        st.tuples(st.just("deliver"), st.integers(0, 1)),
        st.tuples(st.just("duplicate"), st.integers(0, 1), st.integers(0, 9)),
        st.tuples(st.just("take"), st.integers(0, 1), st.integers(0, 5)),
        st.tuples(
            st.just("cut"),
        ),
    ),
    min_size=40,
    max_size=120,
)


@pytest.fixture(scope="module")
def small():
    """Tiny frames and windows, so that short examples reach every bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "FRAME_BYTES", 16)
        patch.setattr(frames, "PACKET_BYTES", 200)
        patch.setattr(frames, "WINDOW_BYTES", 600)
        patch.setattr(frames, "WINDOW_FRAMES", 6)
        yield


class Wire:
    """Two links and what is under way between them."""

    def __init__(self) -> None:
        self.links = [Link(Limits(message=200)), Link(Limits(message=200))]
        self.flight: list[deque[bytes]] = [deque(), deque()]  # to link 0, to link 1
        self.stale: list[deque[bytes]] = [deque(), deque()]
        self.sent: list[list[tuple[int, bytes]]] = [[], []]
        self.waiting: list[list[Arrival]] = [[], []]  # arrived at, not taken
        self.arrived: list[list[tuple[int, bytes]]] = [[], []]

    def send(self, side: int, channel: int, payload: bytes) -> None:
        self.links[side].send(channel, payload)
        self.sent[side].append((channel, payload))

    def pack(self, side: int, even_empty: bool = False) -> bool:
        packet = self.links[side].packet(even_empty)
        if packet is not None:
            self.flight[1 - side].append(packet)
        return packet is not None

    def deliver(self, side: int) -> bool:
        if not self.flight[side]:
            return False
        packet = self.flight[side].popleft()
        self.stale[side].append(packet)
        for arrival in self.links[side].receive(packet):
            assert arrival.kind == DATA
            self.waiting[side].append(arrival)
            self.arrived[side].append((arrival.channel, arrival.payload))
        return True

    def take(self, side: int, which: int) -> None:
        if self.waiting[side]:
            self.links[side].release(self.waiting[side].pop(which % len(self.waiting[side])).number)

    def cut(self) -> None:
        """Everything under way is lost; a new connection tells both how far the other got."""
        self.flight = [deque(), deque()]
        self.links[0].attach(self.links[1].received)
        self.links[1].attach(self.links[0].received)

    def settle(self) -> None:
        moved = True
        while moved:
            moved = False
            for side in (0, 1):
                while self.waiting[side]:
                    self.take(side, 0)
                moved |= self.pack(side, even_empty=self.links[side].owes)
                moved |= self.deliver(side)


@settings(max_examples=100, deadline=None)
@given(actions=actions)
def test_every_message_once_and_in_order_whatever_connections_do(small, actions):
    wire = Wire()
    for action in actions:
        match action:
            case ("send", side, channel, payload):
                wire.send(side, channel, payload)
            case ("pack", side):
                wire.pack(side)
            case ("deliver", side):
                wire.deliver(side)
            case ("duplicate", side, which) if wire.stale[side]:
                assert wire.links[side].receive(wire.stale[side][which % len(wire.stale[side])]) == []
            case ("take", side, which):
                wire.take(side, which)
            case ("cut",):
                wire.cut()
        for side in (0, 1):
            assert wire.arrived[1 - side] == wire.sent[side][: len(wire.arrived[1 - side])]
            assert sum(len(a.payload) + 64 for a in wire.waiting[side]) <= 600 + 200 + 80
    wire.cut()
    wire.settle()
    assert wire.arrived[1] == wire.sent[0]
    assert wire.arrived[0] == wire.sent[1]
    assert all(link.idle and not link.full for link in wire.links)
    assert not list(wire.links[0].unreleased_controls())


def test_a_window_that_nobody_takes_stops_the_sender():
    one, other = Link(), Link()
    for _ in range(3 * frames.WINDOW_FRAMES):
        one.send(1, b"x")
    arrivals = []
    while (packet := one.packet()) is not None:
        arrivals += other.receive(packet)
    assert len(arrivals) == frames.WINDOW_FRAMES
    assert one.full
    for arrival in arrivals:
        other.release(arrival.number)
    assert other.owes_much
    one.receive(other.packet(even_empty=True))
    assert one.packet() is not None


def test_a_message_larger_than_the_window_arrives_whole():
    one, other = Link(), Link()
    payload = bytes(range(256)) * (5 * frames.WINDOW_BYTES // 256)
    one.send(3, payload)
    arrivals: list[Arrival] = []
    while not arrivals:
        packet = one.packet()
        if packet is None:
            one.receive(other.packet(even_empty=True))
        else:
            assert len(packet) <= frames.PACKET_LIMIT
            arrivals = other.receive(packet)
    assert arrivals[0].payload == payload


def test_what_a_peer_takes_none_of_is_kept_up_to_a_bound():
    link = Link(Limits(outbox=1000))
    link.send(1, bytes(900))
    with pytest.raises(WireError, match="wait for a peer that takes none"):
        link.send(1, bytes(200))


def test_control_messages_are_known_until_they_were_taken():
    one, other = Link(), Link()
    big = bytes(3 * frames.FRAME_BYTES)
    one.send(CONTROL, b"small")
    one.send(1, b"not control")
    one.send(CONTROL, big)
    [first, *rest] = [a for p in iter(one.packet, None) for a in other.receive(p)]
    other.release(first.number)
    one.receive(other.packet(even_empty=True))
    assert list(one.unreleased_controls()) == [big]
    for arrival in rest:
        other.release(arrival.number)
    one.receive(other.packet(even_empty=True))
    assert list(one.unreleased_controls()) == []


def packet(first: int, released: int, *parts: tuple[int, int, bytes]) -> bytes:
    return msgspec.msgpack.encode([first, released, [list(part) for part in parts]])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not of the protocol"),
        (b"\x80\x05\x95garbage", "not of the protocol"),
        (packet(2, 0, (0, DATA, b"x")), "left out"),
        (packet(1, 5), "said to be taken"),
        (packet(1, 0, (0, 9, b"x")), "not of the protocol"),
        (packet(1, 0, (-1, DATA, b"x")), "not of the protocol"),
        (packet(1, 0, (2**40, DATA, b"x")), "not of the protocol"),
        (packet(-1, 0), "not of the protocol"),
        (msgspec.msgpack.encode([1, 0, [], "more"]), "not of the protocol"),
        (msgspec.msgpack.encode([1, 0, [[0, 0, "text"]]]), "not of the protocol"),
        (msgspec.msgpack.encode({"first": 1}), "not of the protocol"),
        (packet(1, 0, (0, DATA, bytes(frames.FRAME_BYTES + 1))), "not of the protocol"),
        (packet(1, 0, *[(0, DATA, b"")] * (frames.PACKET_FRAMES + 1)), "not of the protocol"),
        (packet(1, 0, (1, PIECE, b"a"), (2, DATA, b"b")), "between pieces"),
        (packet(1, 0, (1, PIECE, b"a"), (1, CLOSE, b"b")), "between pieces"),
        (packet(1, 0, (1, PIECE, b"")), "empty piece"),
        (packet(1, 0, (1, PIECE, bytes(60)), (1, PIECE, bytes(60))), "longer than"),
        (packet(1, 0, (1, OPEN, bytes(101))), "longer than"),
    ],
)
def test_what_is_not_a_packet_is_refused_with_its_reason(data, why):
    with pytest.raises(WireError, match=why):
        Link(Limits(message=100)).receive(data)


def test_a_sender_that_ignores_the_window_is_refused():
    link = Link()

    def flood():
        number = 1
        while True:
            link.receive(packet(number, 0, *[(1, DATA, b"")] * 500))
            number += 500

    with pytest.raises(WireError, match="too many"):
        flood()


def test_a_peer_cannot_claim_to_have_received_what_was_not_sent():
    link = Link()
    link.send(1, b"a")
    with pytest.raises(WireError, match="said to be the last received"):
        link.attach(1)
