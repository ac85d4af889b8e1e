"""Preload of the tests' workers: a lease says `Uploaded` at its start, runs until `Abandon`, commits and returns."""

import asyncio
import os

from goblin_dask import messages as m
from goblin_dask.wire import process, work


class Volunteer:
    def __init__(self):
        self.going: dict[str, asyncio.Event] = {}
        self.session = None

    def hello(self):
        machine = m.Machine(host="0" * 32, versions=(("pid", str(os.getpid())),))
        return m.Hello((m.PROTOCOL,), "volunteer", process.token(), machine=machine)

    def opened(self, session):
        self.session = session
        session.send(m.Holding(tuple(self.going)))

    def received(self, session, message):
        self.going.setdefault(message.attempt, asyncio.Event()).set()

    def closed(self, session, reason):
        pass

    async def perform(self, lease):
        done = self.going.setdefault(lease.attempt, asyncio.Event())  # Abandon may come before the lease
        self.session.send(m.Uploaded(lease.attempt))
        try:
            await done.wait()
            outputs = (m.BlobRef("0" * 64, m.ArraySpec((1,), "int8"), 1, b"x"),)
            self.session.send(m.Committed(lease.attempt, outputs, seconds=0.0))
        finally:
            del self.going[lease.attempt]


def dask_setup(worker):
    volunteer = Volunteer()
    process.introduce(volunteer)
    work.perform_with(volunteer.perform)
