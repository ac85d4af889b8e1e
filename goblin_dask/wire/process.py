"""The sessions of this process: one for each gateway that its Dask worker or nanny was pointed at.

The goblin plugin calls `introduce` before the worker connects (``dask_setup`` runs that early), and so says who dials
and gets the control channel. A process that nobody introduced dials as a nanny where it is one, and else as a
volunteer that says nothing of itself, which a gateway may refuse.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl as tls
from typing import Any, Literal

from goblin_dask import config
from goblin_dask import messages as m
from goblin_dask.errors import InputError, WireError
from goblin_dask.wire.client import ClientSession, Owner, dial
from goblin_dask.wire.dask_internals import is_nanny
from goblin_dask.wire.session import PATH

logger = logging.getLogger(__name__)

PORTS = {"goblin": 8787, "goblins": 443}
"""Where a gateway is when its address names no port."""

_owner: Owner | None = None
_sessions: dict[tuple[str, int], asyncio.Task[ClientSession]] = {}

_ADDRESS = re.compile(
    r"(?P<scheme>goblins?)://(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:(?P<port>\d{1,5}))?"
    r"(?P<prefix>/[^#?\s]*)?(#\w*)?"
)


class Bystander:
    """Who a session is opened for when nobody introduced the process."""

    def hello(self) -> m.Hello:
        return m.Hello((m.PROTOCOL,), "nanny" if is_nanny() else "volunteer", token())

    def opened(self, session: ClientSession) -> None:
        """Nothing to add to Dask's own registration."""

    def received(self, session: ClientSession, message: Any) -> None:
        raise WireError(f"a {type(message).__name__} for a process that works on nothing")

    def closed(self, session: ClientSession, reason: str) -> None:
        logger.info("the session with %s is over: %s", session.url, reason)


class Visitor(Bystander):
    """Who only wants to know whether it would be admitted."""

    def __init__(self, role: Literal["volunteer", "validator"], token: str):
        self._role: Literal["volunteer", "validator"] = role
        self._token = token

    def hello(self) -> m.Hello:
        return m.Hello((m.PROTOCOL,), self._role, self._token, machine=m.Machine("0" * 32))


def introduce(owner: Owner | None) -> None:
    """Say for whom the sessions that this process opens from now on are; None: for nobody in particular."""
    global _owner
    _owner = owner


def introduced() -> Owner | None:
    """For whom they are."""
    return _owner


def token() -> str:
    """What to show to the gateway: ``goblin.token``, also as ``DASK_GOBLIN__TOKEN``."""
    return str(config.get("token") or "")


def current(address: str) -> ClientSession | None:
    """The session of this process and event loop with the gateway at a ``goblin://`` address, if it stands."""
    task = _sessions.get((address, id(asyncio.get_running_loop())))
    if task is None or not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return None if task.result().closed else task.result()


async def session_for(address: str, ssl: tls.SSLContext | None = None) -> ClientSession:
    """The session of this process with the gateway at a ``goblin://`` address, opened where it is not open yet.

    Raises
    ------
    InputError
        When that is no address.
    ConnectionLost, Refused
        As `goblin_dask.wire.client.dial`.
    """
    key = (address, id(asyncio.get_running_loop()))
    task = _sessions.get(key)
    if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().closed)):
        owner: Owner = _owner or Bystander()
        task = _sessions[key] = asyncio.create_task(dial(url_of(address), owner, ssl=ssl or trust(address)))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever waits for it gets it too
    return await asyncio.shield(task)


def url_of(address: str) -> str:
    """Where the gateway of a ``goblin://`` address answers sessions.

    A path before it is kept, for gateways behind a proxy; what follows a ``#`` tells sessions of one process apart.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise InputError(
            f"{address!r} is not the address of a gateway; it is written goblin://HOST:PORT or goblins://…"
        )
    scheme = match["scheme"]
    port = int(match["port"] or PORTS[scheme])
    prefix = (match["prefix"] or "").rstrip("/")
    return f"{'wss' if scheme == 'goblins' else 'ws'}://{match['host']}:{port}{prefix}{PATH}"


def trust(address: str) -> tls.SSLContext | None:
    """Whom to trust with ``goblins://``: the authority of ``goblin.tls.ca-file``, or the system's."""
    if not address.startswith("goblins://"):
        return None
    path = config.get("tls.ca-file")
    try:
        return tls.create_default_context(cafile=path)
    except (OSError, tls.SSLError) as error:
        raise InputError(f"goblin.tls.ca-file is {path!r}, which is no file of certificates: {error}") from error
