"""`Gateway`: an aiohttp application around the dispatcher, with Dask's scheduler inside.

Sessions become events, instructions become messages and Dask tasks; what is to be remembered goes to the database.
What a laboratory sends stays in memory: no blob, no inline bytes and no program is written to a disk or a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
import time
from collections import Counter, deque
from typing import Any

import msgspec
from aiohttp import web

from goblin_dask import messages as m
from goblin_dask.errors import ConnectionLost, InputError, Refused, StoreError, WireError
from goblin_dask.gateway import events as e
from goblin_dask.gateway import page
from goblin_dask.gateway.accounts import admit
from goblin_dask.gateway.dask_internals import Grid
from goblin_dask.gateway.database import Database, Fact, Seen
from goblin_dask.gateway.dispatcher import Dispatcher
from goblin_dask.gateway.hosts import barred, in_quarantine
from goblin_dask.gateway.labs import Lab, Uploads, check_ready, check_refs, permit
from goblin_dask.gateway.leases import Ticket
from goblin_dask.gateway.metrics import CONTENT_TYPE, Health, Metrics
from goblin_dask.gateway.peers import Pace, Peer, address_of, check_machine, place_of, slots
from goblin_dask.gateway.probing import Probing
from goblin_dask.gateway.relay import Permit, Relay
from goblin_dask.gateway.settings import GatewayConfig
from goblin_dask.gateway.status import PERIOD, Board, Status
from goblin_dask.graphs.outline import Outline
from goblin_dask.verify.policy import may_replicate
from goblin_dask.verify.reputation import Reputation, host_key
from goblin_dask.wire.server import Admission, ServerSession, SessionServer
from goblin_dask.wire.session import PATH

logger = logging.getLogger(__name__)

FRESH = 1.0
"""Seconds for which a status is shown again to whoever asks: viewers cost next to nothing."""


class Gateway:
    """The server. ``await start()``, ``await stop()``; `url` is where it answers.

    Parameters
    ----------
    config : GatewayConfig
        Settings.
    rng : random.Random, optional
        For tests that must repeat; the system's by default.
    """

    def __init__(self, config: GatewayConfig | None = None, rng: random.Random | None = None):
        self.config = config or GatewayConfig()
        self.rng = rng or random.SystemRandom()
        self.port = 0
        self._peers: dict[str, Peer] = {}
        self._by_address: dict[str, Peer] = {}
        self._labs: dict[str, Lab] = {}
        self._networks: Counter[str] = Counter()
        self._events: deque[e.Event] = deque()
        self._busy = self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._touched: set[str] = set()
        self._refused = 0
        self._lag = 0.0
        self._seen: tuple[float, Status] | None = None
        self._uploads = Uploads()

    # --- life ---------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Open the database, start Dask's scheduler, listen.

        Raises
        ------
        StoreError
            When the database cannot be used.
        InputError
            When the address is taken or is none of this machine.
        """
        config = self.config
        self.loop = asyncio.get_running_loop()
        self.database = Database(config.database)
        await self.database.start()
        reputation = Reputation.from_rows(await self.database.reputations(), self.rng)
        self.dispatcher = Dispatcher(config.limits, self.rng, reputation, restarted=await self.database.anybody())
        self.board = Board(self.loop.time())
        self.grid = await Grid(self._registered, self._unregistered, self._task_failed)
        self._probing = Probing(self.rng, self.loop, self.grid, self._join)
        self.server = SessionServer(
            on_hello=self._admit,
            on_message=self._message,
            on_open=self._opened,
            on_close=self._closed,
            on_comm=self.grid.handle_comm,
            on_cut=self._cut,
            on_back=self._back,
            linger=config.linger,
            keepalive=config.keepalive,
            most=config.sessions,
        )
        self.relay = Relay(self._permit, self._ask, config.relay)
        self.metrics = Metrics(lambda: (self.status(), self.health()))
        self._runner = web.AppRunner(
            self._application(), access_log=None, lingering_time=0.5, shutdown_timeout=1.0, keepalive_timeout=60.0
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, config.host, config.port, ssl_context=config.tls, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            raise InputError(
                f"the gateway cannot listen on {config.host}:{config.port} ({error.strerror}): choose another port, or "
                "stop what listens there"
            ) from error
        self.port = self._runner.addresses[0][1]
        self._handle(e.Tick())
        self._sampler = asyncio.create_task(self._sample(), name="goblin-gateway-sampler")
        logger.info("gateway at %s", self.url)

    async def stop(self) -> None:
        """Close all sessions (peers come back when it answers again), write what is to be remembered."""
        self._stopping = True  # what ends from now on is nobody's failure
        if self._timer is not None:
            self._timer.cancel()
        sampler: asyncio.Task[None] | None = getattr(self, "_sampler", None)
        if sampler is not None:
            sampler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampler
        await self.server.close()
        await self._runner.cleanup()
        await self.grid.close()
        self._remember()
        await self.database.stop()

    @property
    def url(self) -> str:
        """Base URL, ``http://HOST:PORT``."""
        return f"http{'s' if self.config.tls else ''}://{self.config.host}:{self.port}"

    @property
    def address(self) -> str:
        """What volunteers, validators and labs dial: ``goblin://HOST:PORT``."""
        return f"goblin{'s' if self.config.tls else ''}://{self.config.host}:{self.port}"

    def _application(self) -> web.Application:
        app = web.Application()
        app.router.add_get(PATH, self.server.handle)
        app.router.add_get("/goblin/status.json", self._status_json)
        app.router.add_get("/metrics", self._metrics)
        app.add_routes(self.relay.routes())
        app.add_routes(page.routes())
        return app

    # --- sessions -----------------------------------------------------------------------------------------------
    async def _admit(self, hello: m.Hello, request: web.Request) -> Admission:
        address = address_of(request, self.config.behind_proxy)
        network = self.config.network(address)
        try:
            peer = await self._peer(hello, address, network)
        except Refused:
            self._refused += 1
            raise
        except StoreError as error:
            logger.error("nobody can be admitted: %s", error)
            raise ConnectionLost("the gateway cannot look up tokens at the moment: try again later") from error
        return Admission(
            worker=peer.worker,
            nthreads=slots(peer.machine),
            memory=min(peer.machine.memory, 2**50),
            peer=peer,
        )

    async def _peer(self, hello: m.Hello, address: str, network: str) -> Peer:
        role, config = hello.role, self.config
        account = await admit(self.database, hello.token, role, network, config.open)
        machine = m.Machine("")
        if role in ("volunteer", "validator"):
            machine = check_machine(hello.machine, role)
            if role == "volunteer":
                reason, freed = await barred(self.database, self.dispatcher.reputation, account.owner, machine)
                self._touched.update(host.key for host in freed)
                if reason:
                    raise Refused(reason)
        if not account.token and self._networks[network] >= config.sessions_per_network:
            raise ConnectionLost(f"{config.sessions_per_network} volunteers of your network are here: try again later")
        pace = Pace(*(config.lab_pace if role == "lab" else config.worker_pace))
        return Peer(role, account.owner, network, address, secrets.token_hex(8), machine, pace)

    def _opened(self, session: ServerSession) -> None:
        peer: Peer = session.admission.peer
        peer.session = session
        self._peers[peer.worker] = peer
        self._networks[peer.network] += 1
        if peer.role in ("volunteer", "validator"):
            self._by_address[session.address] = peer
            key = host_key(peer.owner, peer.machine)
            self.database.record(Seen(key, peer.owner, peer.machine.host, peer.machine.device, peer.machine.driver))

    def _closed(self, session: ServerSession, reason: str) -> None:
        peer: Peer = session.admission.peer
        if self._peers.pop(peer.worker, None) is None:
            return
        self._by_address.pop(session.address, None)
        self._networks[peer.network] -= 1
        if not self._networks[peer.network]:
            del self._networks[peer.network]
        if peer.joined.is_set():
            self._leave(peer)
        lab = peer.lab
        if lab is not None and lab.line is session:
            lab.line = None
            self.relay.lab_left(lab.id)
            self._handle(e.LabLeft(lab.id))

    def _cut(self, session: ServerSession) -> None:
        peer: Peer = session.admission.peer
        if peer.joined.is_set():
            self._handle(e.WorkerAway(peer.worker))

    def _back(self, session: ServerSession) -> None:
        peer: Peer = session.admission.peer
        if peer.joined.is_set():
            self._handle(e.WorkerBack(peer.worker))

    async def _message(self, session: ServerSession, message: Any) -> None:
        peer: Peer = session.admission.peer
        await peer.pace.take()
        match message:
            case m.Holding(attempts):
                self._holding(peer, attempts)
            case m.LabReady():
                self._lab_ready(session, peer, message)
            case m.SubmitTask() | m.DefineProgram() | m.CancelTask():
                self._from_lab(peer, message)
            case m.Committed() | m.AttemptFailed() if peer.probe and message.attempt == peer.probe:
                self._probing.answered(peer, message)
            case _:
                if isinstance(message, m.Committed):
                    check_refs(message.outputs)
                # What was sent before a restart arrives before the worker has registered again.
                await peer.joined.wait()
                self._handle(e.FromWorker(peer.worker, message))

    # --- workers ------------------------------------------------------------------------------------------------
    def _holding(self, peer: Peer, attempts: tuple[str, ...]) -> None:
        if not peer.joined.is_set():
            peer.holding = attempts[:1000]
        elif peer.session is not None:
            for attempt in attempts[:1000]:
                if attempt not in self.grid.tasks:
                    peer.session.send(m.Abandon(attempt))

    def _registered(self, address: str) -> None:
        peer = self._by_address.get(address)
        if peer is None or peer.joined.is_set():
            return
        if peer.role == "volunteer" and self.config.probe and not self._probing.knows(peer):
            self._probing.begin(peer)
        else:
            self._join(peer)

    def _join(self, peer: Peer) -> None:
        peer.joined.set()
        holding, peer.holding = peer.holding, ()
        network = f"of {peer.owner}" if self.config.trust_owners else peer.network
        place = place_of(peer.address)
        self._handle(e.WorkerJoined(peer.worker, peer.role, peer.owner, network, peer.machine, holding, place=place))

        if peer.session is None or not peer.session.connected.is_set():
            self._handle(e.WorkerAway(peer.worker))

    def _unregistered(self, address: str) -> None:
        peer = self._by_address.get(address)
        if peer is not None and peer.joined.is_set():
            self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        peer.joined = asyncio.Event()
        self._handle(e.WorkerLeft(peer.worker))

    def _task_failed(self, address: str, attempt: str, text: str) -> None:
        """The Dask task failed outside of what the volunteer's plugin reports itself."""
        peer = self._by_address.get(address)
        if peer is not None and peer.joined.is_set():
            self._handle(e.FromWorker(peer.worker, m.AttemptFailed(attempt, "compute", text[:500])))

    # --- laboratories -------------------------------------------------------------------------------------------
    def _lab_ready(self, session: ServerSession, peer: Peer, message: m.LabReady) -> None:
        check_ready(message)
        if peer.lab is not None and peer.lab.id != message.lab:
            raise WireError("a session speaks for one laboratory")
        lab = self._labs.get(message.lab)
        if lab is None:
            lab = self._labs[message.lab] = Lab(
                message.lab, peer.owner, b"", "", "", "", "", "", None
            )  # fmt: skip
        elif lab.owner != peer.owner:
            raise WireError("that laboratory's identity belongs to another owner")
        older, lab.line = lab.line, session
        lab.key, lab.local, lab.direct = message.grant_key, message.local, message.direct
        lab.address, lab.network, lab.place = peer.address, peer.network, place_of(peer.address)
        peer.lab = lab
        if older is not None and older is not session:
            older.close("the laboratory opened another session")
        self._handle(e.LabJoined(lab.id, lab.place))

    def _from_lab(self, peer: Peer, message: m.SubmitTask | m.DefineProgram | m.CancelTask) -> None:
        lab = peer.lab
        if lab is None:
            raise WireError("a laboratory announces itself (LabReady) before anything else")
        match message:
            case m.DefineProgram():
                for task in lab.define(message, self.config.lab_limits):
                    self._submit(lab, task)
            case m.SubmitTask():
                if lab.admit(message, self.config.lab_limits):
                    self._submit(lab, message)
            case m.CancelTask(name):
                lab.release(name)
                self._handle(e.TaskCancelled(lab.id, name))

    def _submit(self, lab: Lab, task: m.SubmitTask) -> None:
        known = self.dispatcher.outcomes.labs.get(lab.id)
        tickets = known.tickets if known is not None else {}
        refusal = lab.refusal(task, 0 if task.task in tickets else len(tickets), self.config.lab_limits)
        if refusal is None:
            needs = lab.needs.get(task.program, e.ANYBODY)
            encoded = lab.programs.get(task.program)
            outline = Outline(encoded) if encoded is not None and may_replicate(task.policy, task) else None
            self._handle(e.TaskSubmitted(lab.id, task, needs, outline))
        else:
            self._tell(lab.id, refusal)

    def _tell(self, lab_id: str, message: Any) -> None:
        lab = self._labs.get(lab_id)
        if isinstance(message, m.TaskAccepted | m.TaskFailed) and lab is not None:
            lab.release(message.task)
        if lab is not None and lab.line is not None:
            # One that is away asks again when it is back: the same task is the same name.
            with contextlib.suppress(ConnectionLost):
                lab.line.send(message)

    # --- the dispatcher -----------------------------------------------------------------------------------------
    def _handle(self, event: e.Event) -> None:
        """Let the dispatcher decide on an event, and do what it says; events that come meanwhile wait their turn."""
        if self._stopping:
            return
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                event = self._events.popleft()
                now = self.loop.time()
                self.board.observe(event, now)
                instructions = self.dispatcher.handle(event, now)
                self.board.follow(instructions, now)
                for instruction in instructions:
                    self._execute(instruction)
        finally:
            self._busy = False
            self._set_timer()

    def _set_timer(self) -> None:
        when = self.dispatcher.next_tick(self.loop.time())
        if self._timer is not None:
            if when is not None and self._timer.when() <= when and not self._timer.cancelled():
                return  # it will look again
            self._timer.cancel()
        self._timer = self.loop.call_at(when, self._tick) if when is not None else None

    def _tick(self) -> None:
        self._timer = None
        self._handle(e.Tick())

    def _execute(self, instruction: e.Instruction) -> None:
        match instruction:
            case e.Dispatch():
                self._dispatch(instruction)
            case e.Withdraw(worker, attempt):
                self.grid.cancel(attempt)
                peer = self._peers.get(worker)
                if peer is not None and peer.session is not None and not peer.session.closed:
                    peer.session.send(m.Abandon(attempt))
            case e.ToLab(lab, message):
                self._tell(lab, message)
            case e.Record():
                r = instruction
                self.database.record(Fact(r.host_key, r.kind, r.method[:16], r.ratio, r.seconds, r.flops))
                self._touched.add(r.host_key)
            case e.Quarantine(_, key, reason):
                logger.warning("host %s goes into quarantine: %s", key[:16], reason)
                self._touched.add(key)
                self._remember()
                for peer in list(self._peers.values()):
                    if peer.session is not None and host_key(peer.owner, peer.machine) == key:
                        peer.session.close(in_quarantine(key, reason))

    def _dispatch(self, order: e.Dispatch) -> None:
        lab, peer = self._labs.get(order.lab), self._peers.get(order.worker)
        program = lab.programs.get(order.program) if lab is not None else None
        if lab is None or program is None:
            # Its laboratory fills its share of this gateway with other programs, and must send this one again.
            self.loop.call_soon(self._handle, e.TaskCancelled(order.lab, order.task))
            self._tell(order.lab, m.TaskFailed(order.task, "error", "its program was dropped: submit both again"))
            return
        if peer is None or peer.session is None:
            return  # it has just left, the dispatcher is told next
        # A late result is still taken for a while.
        expires = time.time() + order.deadline * (1 + self.config.limits.overdue_factor) + 600
        routes = lab.routes(peer.address, peer.network, place_of(peer.address))
        work = lab.work(order, order.encoded or program, routes, expires)
        with contextlib.suppress(ConnectionLost):
            self.grid.dispatch(peer.session.address, order.attempt, work)

    # --- the relay ----------------------------------------------------------------------------------------------
    def _ticket(self, lab: str, task: str, /) -> Ticket | None:
        known = self.dispatcher.outcomes.labs.get(lab)
        return known.tickets.get(task) if known is not None else None

    def _permit(self, grant: str, digest: str, upload: bool) -> Permit:
        allowed = permit(self._labs.values(), self._ticket, grant, digest, upload)
        if upload:
            self._uploads.add(allowed)
        return allowed

    def _ask(self, lab_id: str, request: m.RelayRequest) -> None:
        lab = self._labs.get(lab_id)
        if lab is None or lab.line is None:
            raise ConnectionLost("the laboratory is away at the moment")
        lab.line.send(request)

    # --- what is seen -------------------------------------------------------------------------------------------
    async def _sample(self) -> None:
        due = self.loop.time()
        while True:
            due += PERIOD
            await asyncio.sleep(due - self.loop.time())
            self._lag = self.loop.time() - due
            due = max(due, self.loop.time() - PERIOD)
            self.board.sample(self.dispatcher.snapshot(), self.loop.time())
            self._remember()
            for lab in [lab for lab in self._labs.values() if lab.line is None]:
                if lab.id not in self.dispatcher.outcomes.labs:  # the dispatcher waited long enough for it
                    del self._labs[lab.id]

    def _remember(self) -> None:
        hosts = self.dispatcher.reputation.hosts
        for key in self._touched:
            if key in hosts:
                self.database.remember(dataclasses.asdict(hosts[key]))
        self._touched.clear()

    def status(self) -> Status:
        """What the page shows; at most `FRESH` seconds old."""
        now = self.loop.time()
        if self._seen is None or now - self._seen[0] >= FRESH:
            counts = self.relay.counts
            relayed = counts.to_volunteers + counts.from_volunteers
            self._seen = now, self.board.status(self.dispatcher.snapshot(), now, relayed)
        return self._seen[1]

    def health(self) -> Health:
        """Figures of the server itself."""
        counts = self.relay.counts
        return Health(
            sessions=len(self.server.sessions),
            relays_active=counts.active,
            relays_waiting=counts.waiting,
            relays_failed=sum(counts.failed.values()),
            database_pending=self.database.pending,
            database_dropped=self.database.dropped,
            refused=self._refused,
            lag=self._lag,
        )

    async def _status_json(self, request: web.Request) -> web.Response:
        return web.Response(
            body=msgspec.json.encode(self.status()),
            content_type="application/json",
            headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.render(), headers={"Content-Type": CONTENT_TYPE})
