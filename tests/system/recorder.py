"""A further preload of workers under test: tells the test what the runner begins and ends, as it happens.

Each note is a datagram to the Unix socket that ``GOBLIN_TEST_NOTES`` names: ``pid what attempt``.
"""

from __future__ import annotations

import asyncio
import os
import socket

from distributed.core import Status

from goblin_dask.messages import AttemptFailed, Checked
from goblin_dask.volunteer import _installed
from goblin_dask.volunteer.runner import Runner

_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def note(what, attempt=""):
    _socket.sendto(f"{os.getpid()} {what} {attempt}".encode(), os.environ["GOBLIN_TEST_NOTES"])


def dask_setup(worker):
    (runner,) = _installed.values()  # of the preload before this one
    member = runner._send.__self__
    compute, check, send, session_opened = Runner._compute, runner._check, member.send, member.opened

    def computes(program, inputs, attempt, trace):
        name = next((name for name, each in runner._attempts.items() if each is attempt), "gone")
        if name.startswith("probe#"):
            return compute(runner, program, inputs, attempt, trace)
        note("computes", name)
        outputs = compute(runner, program, inputs, attempt, trace)
        note("computed", name)
        return outputs

    async def checks(work, attempt):
        note("checks", work.attempt)
        await check(work, attempt)

    def sends(message):
        send(message)
        if getattr(message, "attempt", "").startswith("probe#"):
            return
        detail = message.report.verdict if isinstance(message, Checked) else ""
        detail = message.kind if isinstance(message, AttemptFailed) else detail
        note(f"{type(message).__name__}{detail and ':'}{detail}", message.attempt)

    async def joined():
        while worker.status != Status.running:
            await asyncio.sleep(0.01)
        note("joined")

    tasks = []

    def opened(session):
        session_opened(session)
        note("opened")
        tasks.append(asyncio.ensure_future(joined()))

    runner._compute, runner._check, runner._send, member.opened = computes, checks, sends, opened
