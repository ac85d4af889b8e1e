"""Probing: a volunteer gets work when its machine has shown what its arithmetic is."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from goblin_dask import messages as m
from goblin_dask.gateway.dask_internals import Grid
from goblin_dask.gateway.peers import Peer
from goblin_dask.verify import probe
from goblin_dask.verify.probe import Contract, Probe
from goblin_dask.verify.reputation import host_key

logger = logging.getLogger(__name__)

KEPT = 100_000
"""Host keys whose contract is remembered."""

PATIENCE = 300.0
"""Seconds that a machine may take for its probe."""

AGAIN = 30.0
"""Seconds after which a machine is probed again whose owner does not lend it at the moment."""


class Probing:
    """Probes that are under way, and what was measured.

    Parameters
    ----------
    rng : random.Random
        `random.SystemRandom` outside tests: the answer must not be known before.
    loop : asyncio.AbstractEventLoop
    grid : Grid
        Where probes are handed out.
    passed : callable
        Called with the peer of a volunteer that may get work.
    """

    def __init__(self, rng: random.Random, loop: asyncio.AbstractEventLoop, grid: Grid, passed: Callable[[Peer], None]):
        self._rng, self._loop, self._grid, self._passed = rng, loop, grid, passed
        self._open: dict[str, Probe] = {}
        self.contracts: OrderedDict[str, Contract] = OrderedDict()
        """By host key: another device, driver or version is another key, and is measured again."""

    def knows(self, peer: Peer) -> bool:
        """Whether a volunteer need not be probed.

        One with work in hand is no stranger: the gateway before this one, of the same database, has probed it.
        """
        return host_key(peer.owner, peer.machine) in self.contracts or bool(peer.holding)

    def begin(self, peer: Peer) -> None:
        """Have a volunteer that has just registered show what its arithmetic is."""
        session = peer.session
        if session is None or session.closed or session.address not in self._grid.workers:
            return  # it registers again when it comes back
        drawn = probe.draw(np.random.default_rng(self._rng.getrandbits(128)))
        peer.probe = f"probe#{self._rng.getrandbits(64):x}"
        self._open[peer.probe] = drawn
        lease = m.Lease(peer.probe, probe.encoded(), drawn.inputs, "", m.Routes(), 1 << 20, PATIENCE)
        self._grid.dispatch(session.address, peer.probe, lease)
        self._loop.call_later(PATIENCE, self._unanswered, peer, peer.probe)

    def _unanswered(self, peer: Peer, name: str) -> None:
        self._open.pop(name, None)
        if peer.probe == name and peer.session is not None:
            peer.session.close(f"your machine has not answered its probe within {PATIENCE:.0f} s", True)

    def answered(self, peer: Peer, message: m.Committed | m.AttemptFailed) -> None:
        """The volunteer has computed its probe, or cannot."""
        name, peer.probe = peer.probe, ""
        drawn = self._open.pop(name, None)
        if drawn is None or peer.session is None:
            return
        if isinstance(message, m.Committed):
            contract, reason = probe.judge(drawn, message.outputs)
            if contract is not None and not reason:
                self._keep(host_key(peer.owner, peer.machine), contract)
        elif message.kind == "cancelled":  # its owner does not lend it now
            self._loop.call_later(AGAIN, self.begin, peer)
            return
        else:
            reason = f"it could not compute its probe: {message.reason[:200]}"
        if reason:
            logger.warning("a machine of %s gets no work: %s", peer.owner, reason)
            peer.session.close(f"your machine gets no work here: {reason}")
        elif peer.session.address in self._grid.workers:
            self._passed(peer)

    def _keep(self, key: str, contract: Contract) -> None:
        self.contracts[key] = contract
        while len(self.contracts) > KEPT:
            self.contracts.popitem(last=False)
