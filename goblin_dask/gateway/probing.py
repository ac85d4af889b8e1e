"""Probing: a volunteer gets work when its machine has shown what its arithmetic is."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np

from goblin_dask import messages as m
from goblin_dask.verify import probe
from goblin_dask.verify.probe import Contract, Probe

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
    """

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._open: dict[str, Probe] = {}
        self.contracts: OrderedDict[str, Contract] = OrderedDict()
        """By host key: another device, driver or version is another key, and is measured again."""

    def begin(self) -> m.Lease:
        """A new probe, to be handed to one worker; its attempt is its name."""
        drawn = probe.draw(np.random.default_rng(self._rng.getrandbits(128)))
        name = f"probe#{self._rng.getrandbits(64):x}"
        self._open[name] = drawn
        return m.Lease(name, probe.encoded(), drawn.inputs, "", m.Routes(), 1 << 20, PATIENCE)

    def is_open(self, name: str) -> bool:
        """Whether an answer to that probe is awaited."""
        return name in self._open

    def forget(self, name: str) -> None:
        """Nobody answers this one any more."""
        self._open.pop(name, None)

    def answered(self, key: str, message: m.Committed) -> str:
        """Why the machine must not get work; empty when it may."""
        contract, reason = probe.judge(self._open.pop(message.attempt), message.outputs)
        if contract is not None and not reason:
            self.contracts[key] = contract
            while len(self.contracts) > KEPT:
                self.contracts.popitem(last=False)
        return reason
