"""Admission of sessions: what a peer says of itself is looked at, clamped, and its pace is watched."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from goblin_dask import messages as m
from goblin_dask.errors import Refused
from goblin_dask.gateway.accounts import network_of

if TYPE_CHECKING:
    from goblin_dask.gateway.labs import Lab
    from goblin_dask.wire.server import ServerSession

SLOTS = 64
_HOST = re.compile(r"[0-9a-f]{32}")
_FIGURES = ("threads", "slots", "memory", "gpu_memory", "cache", "flops", "bandwidth")


class Pace:
    """Lets messages of one peer through at a bounded rate; a faster peer waits, nobody else does.

    Parameters
    ----------
    rate : float
        Messages a second.
    burst : float
        Messages at once.
    """

    YIELD = 64

    def __init__(self, rate: float, burst: float):
        self.rate, self.burst = rate, burst
        self._left = burst
        self._since = 0.0
        self._row = 0

    def delay(self, now: float) -> float:
        """Seconds that the next message has to wait."""
        self._left = min(self.burst, self._left + (now - self._since) * self.rate) - 1.0
        self._since = now
        return max(0.0, -self._left / self.rate)

    async def take(self) -> None:
        """Wait for one message's turn."""
        delay = self.delay(asyncio.get_running_loop().time())
        self._row += 1
        if delay > 0 or self._row % self.YIELD == 0:
            # Messages that have arrived are handed over without a pause: now and then others get their turn.
            await asyncio.sleep(delay)


@dataclass(eq=False, slots=True)
class Peer:
    """What the gateway knows of a session."""

    role: str
    owner: str
    network: str
    address: str
    worker: str
    machine: m.Machine
    pace: Pace
    session: ServerSession | None = None
    holding: tuple[str, ...] = ()
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while Dask's worker is registered, and so while the dispatcher knows it."""
    probe: str = ""
    """The probe that it was sent and has not answered."""
    lab: Lab | None = None


def address_of(request: web.Request, behind_proxy: bool) -> str:
    """IP address of a peer; behind a proxy the one that the proxy saw (the last that it added)."""
    if behind_proxy:
        forwarded = request.headers.get("X-Forwarded-For", "")
        if forwarded:
            return forwarded.rpartition(",")[2].strip()[:64]
    return request.remote or ""


def check_machine(machine: m.Machine | None, role: str) -> m.Machine:
    """The machine of a volunteer or validator, as it may be believed for scheduling.

    Raises
    ------
    Refused
        When it says nothing, or what cannot be.
    """
    if machine is None:
        raise Refused(f"a {role} tells what machine it runs on: start it with `--preload goblin_dask.volunteer`")
    if not _HOST.fullmatch(machine.host):
        raise Refused("a machine's key is 32 hexadecimal characters, made when it first joins")
    texts = [machine.device, machine.driver, *(text for pair in machine.versions for text in pair)]
    if len(machine.versions) > 64 or any(len(text) > 128 for text in texts):
        raise Refused("a machine names at most 64 versions, in at most 128 characters each")
    if machine.catalogue < 1 or len(machine.lacks) > m.LACKS or any(len(name) > 64 for name in machine.lacks):
        raise Refused(
            f"a machine has version 1 or later of the catalogue, and lacks at most {m.LACKS} of its operators"
        )
    for name in _FIGURES:
        value = getattr(machine, name)
        if not 0 <= value < 2**63 or not math.isfinite(value):
            raise Refused(f"a machine's {name} is a number from 0, not {value!r}")
    return machine


def slots(machine: m.Machine) -> int:
    """Attempts that Dask may hand it at a time."""
    return min(SLOTS, max(1, machine.slots))


def place_of(address: str) -> str:
    """Opaque name of the host that a peer is surely on: known for this one only."""
    return "here" if network_of(address) == "loopback" else ""
