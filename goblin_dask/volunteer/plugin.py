"""The goblin plugin: makes a Dask worker that was pointed at a gateway a volunteer or a validator."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from distributed import Worker

from goblin_dask import config
from goblin_dask.errors import InputError
from goblin_dask.graphs.backends.base import NUMPY
from goblin_dask.graphs.backends.choice import backend_named
from goblin_dask.messages import (
    PROTOCOL,
    Abandon,
    AttemptFailed,
    Checked,
    Committed,
    Hello,
    Holding,
    Machine,
    Message,
    Uploaded,
    decode,
    decoder,
)
from goblin_dask.volunteer import dask_internals as internals
from goblin_dask.volunteer import machine as machines
from goblin_dask.volunteer.limits import Limits
from goblin_dask.volunteer.runner import Runner
from goblin_dask.volunteer.transfer import Transfers
from goblin_dask.volunteer.validator import Checker
from goblin_dask.wire.client import ClientSession
from goblin_dask.wire.process import introduce, token, trust, url_of
from goblin_dask.wire.session import PATH
from goblin_dask.wire.work import perform_with

logger = logging.getLogger(__name__)

Role = Literal["volunteer", "validator"]

_said = decoder(Holding | Committed | Uploaded | AttemptFailed | Checked)


class Member:
    """For whom this process's session is: says who it is, passes messages between gateway and runner."""

    def __init__(self, role: Role, machine: Machine):
        self._role: Role = role
        self._machine = machine
        self._session: ClientSession | None = None
        self.runner: Runner | None = None

    def hello(self) -> Hello:
        """The first message of every connection."""
        return Hello((PROTOCOL,), self._role, token(), machine=self._machine)

    def opened(self, session: ClientSession) -> None:
        """A session stands; one in the place of a forgotten one has to hear what is in hand."""
        self._session = session
        if self.runner is not None:
            # What ended while there was no gateway is as much in hand as what goes on: its messages follow.
            ended = (getattr(decode(each, _said), "attempt", "") for each in session.undelivered)
            session.send(Holding(tuple(filter(None, dict.fromkeys((*self.runner.holding, *ended))))))
            for committed in self.runner.repeat():
                session.send(committed)

    def received(self, session: ClientSession, message: Any) -> None:
        """The gateway has said something; the session lets nothing but an `Abandon` through."""
        if isinstance(message, Abandon) and self.runner is not None:
            self.runner.abandon(message.attempt)

    def closed(self, session: ClientSession, reason: str) -> None:
        """It is over for good."""
        logger.warning("the session with %s is over: %s", session.url, reason)

    def send(self, message: Message) -> None:
        """Put a message on the control channel; lost with the session, whose end abandons the attempt anyway."""
        if self._session is None or self._session.closed:
            logger.warning("no session: a %s was not sent", type(message).__name__)
        else:
            self._session.send(message)


def _role() -> Role:
    role = config.get("volunteer.role")
    if role == "volunteer":
        return "volunteer"
    if role == "validator":
        return "validator"
    raise InputError(f"goblin.volunteer.role is {role!r}; volunteer or validator is needed")


def http_base(address: str) -> str:
    """Where the gateway of a ``goblin://`` address answers HTTP."""
    url = url_of(address)
    return urlsplit(url)._replace(scheme="https" if url.startswith("wss") else "http").geturl().removesuffix(PATH)


async def install(worker: Worker) -> Runner:
    """Make a worker that has not connected yet a volunteer or validator.

    Raises
    ------
    GoblinError
        When the configuration cannot be meant, or the machine computes wrongly.
    """
    internals.close_ports(worker)
    internals.be_quiet(worker)
    role = _role()
    threads, memory = internals.lent(worker)
    limits = Limits.configured(threads=threads, memory=memory)
    machines.keep_one_heap()
    alone = role == "validator"
    worker.goblin_threads = machines.use_threads(1 if alone else limits.threads)  # in force as long as it is kept
    # A validator's word decides, so it computes with what the bounds of rounding were measured for.
    backend = NUMPY if alone else backend_named(config.get("volunteer.backend"))
    backend.use_threads(limits.threads)
    machine = await asyncio.to_thread(machines.describe, limits, limits.threads if alone else 1, backend)
    address = internals.gateway_address(worker)
    member = Member(role, machine)
    transfers = Transfers(http_base(address), trust(address))
    runner = Runner(limits, transfers, member.send, checker=_checker() if alone else None, backend=backend)
    member.runner = runner
    internals.set_slots(worker, machine.slots)
    await internals.add_withdrawals(worker, runner.abandon)
    introduce(member)
    perform_with(runner.run)
    logger.info(
        "%s: %s, %d threads, %.1f GB for tasks, %.0f GFLOP/s",
        role,
        backend.name,
        limits.threads,
        limits.memory / 1e9,
        machine.flops / 1e9,
    )
    return runner


def _checker() -> Checker:
    from goblin_dask.verify.check import check_result  # a volunteer does without all of it
    from goblin_dask.verify.operands import OperandStatistics
    from goblin_dask.verify.scales import Scales

    return partial(check_result, statistics=OperandStatistics(), scales=Scales())


async def remove(runner: Runner) -> None:
    """Undo `install` as far as it concerns the process."""
    perform_with(None)
    introduce(None)
    await runner.close()
