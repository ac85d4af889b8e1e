"""The gateway's settings."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from goblin_dask.gateway.accounts import network_of
from goblin_dask.gateway.labs import LabLimits
from goblin_dask.gateway.limits import Limits
from goblin_dask.gateway.relay import RelayLimits


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of a gateway. Times in seconds."""

    host: str = "127.0.0.1"
    """Interface to listen on; the loopback one unless somebody says otherwise."""
    port: int = 8787
    """0: any free one; `Gateway.port` tells which."""
    database: str = "sqlite://"
    """SQLAlchemy's URL; the default forgets everything when the process ends."""
    open: bool = False
    """Whether volunteers without a token are admitted."""
    behind_proxy: bool = False
    """Whether peers' addresses are those that a proxy in front puts into ``X-Forwarded-For``."""
    network: Callable[[str], str] = network_of
    """Network of a peer's address: owners of one network are not taken for independent."""
    trust_owners: bool = False
    """Whether owners are taken for independent though they are of one network: for a grid inside one institution."""
    probe: bool = True
    """Whether a volunteer's arithmetic is measured before it gets work."""
    tls: ssl.SSLContext | None = None
    """For ``goblins://`` without a proxy in front."""
    linger: float = 60.0
    """How long a session without a connection is kept."""
    keepalive: float = 20.0
    sessions: int = 20_000
    sessions_per_network: int = 2_000
    """Anonymous ones."""
    lab_pace: tuple[float, float] = (5_000.0, 20_000.0)
    """Messages a second, and at once, that a laboratory may send; a faster one is slowed down."""
    worker_pace: tuple[float, float] = (500.0, 2_000.0)
    limits: Limits = field(default_factory=Limits)
    relay: RelayLimits = field(default_factory=RelayLimits)
    lab_limits: LabLimits = field(default_factory=LabLimits)
