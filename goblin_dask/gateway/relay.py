"""Blobs through the gateway, for volunteers that cannot reach the laboratory: both sides dial out, bytes are piped.

A volunteer's request waits here while the laboratory is told to dial out (`RelayRequest`), then one body is copied
into the other as fast as the slower side takes it. Nothing is stored; in memory is what lies between two sockets.

====================================  =====================================================================
``GET  /goblin/blobs/{digest}``       volunteer fetches; the blob, exactly as long as its `BlobRef` says
``PUT  /goblin/blobs/{digest}``       volunteer hands in; 204 once the laboratory has *stored* it
``POST /goblin/relay/{transfer}``     laboratory: ``fetch``: here is the blob; ``store``: I have stored it
``GET  /goblin/relay/{transfer}``     laboratory: ``store``: give me the blob
``DELETE /goblin/relay/{transfer}``   laboratory: I have no such blob, or do not take it (404, 403 there)
====================================  =====================================================================

Volunteers show their grant as ``Authorization: Bearer …``; the laboratory gets it in the `RelayRequest` and verifies it
again. A transfer's name is random and told to the laboratory only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from aiohttp import ClientError, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from goblin_dask.digest import is_digest
from goblin_dask.errors import BlobMissing, ConnectionLost, Refused, WireError
from goblin_dask.messages import RelayRequest

T = TypeVar("T")

_BROKEN = (ConnectionLost, TimeoutError, WireError, BlobMissing, OSError, ClientError, HttpProcessingError)
"""All that may go wrong on either side of a transfer."""


@dataclass(frozen=True, slots=True)
class Permit:
    """What a grant allows for one blob."""

    lab: str
    bearer: str
    """Who is counted against `RelayLimits.per_bearer`: the attempt."""
    sizes: frozenset[int]
    """Lengths in bytes that the blob may have; one for a blob that is known."""
    total: int = 0
    """Bytes that the bearer hands in, when nothing goes wrong."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Bounds of the relay."""

    transfers: int = 256
    """Under way together."""
    waiting: int = 1024
    """Requests that may wait for their turn; more are told to come back."""
    per_bearer: int = 8
    """Under way for one attempt."""
    answer: float = 30.0
    """Seconds that the laboratory has to dial out, or to store what it received."""
    stall: float = 30.0
    """Seconds that a side may send or take nothing."""
    slowest: float = 16_384.0
    """Bytes a second below which a transfer is given up, so that nobody holds one for ever."""


@dataclass(slots=True)
class _Transfer:
    name: str
    direction: Literal["fetch", "store"]
    lab: str
    arrived: asyncio.Future[web.Request]
    """The laboratory's request that carries, or wants, the blob."""
    stored: asyncio.Future[None]
    finished: asyncio.Future[None]
    """Done when the volunteer's side is: failed with what went wrong there."""
    source: StreamReader | None = None
    nbytes: int = 0
    taken: bool = False


@dataclass(slots=True)
class RelayCounts:
    """For status and metrics."""

    to_volunteers: int = 0
    from_volunteers: int = 0
    active: int = 0
    waiting: int = 0
    failed: Counter[str] = field(default_factory=Counter)


class Relay:
    """The relay's routes and state.

    Parameters
    ----------
    permit : callable
        ``permit(grant, digest, upload) -> Permit``; raises `Refused` or `BlobMissing`.
    ask : callable
        ``ask(lab, RelayRequest)``; raises `ConnectionLost` when that laboratory is away.
    limits : RelayLimits
        Bounds.
    """

    def __init__(
        self,
        permit: Callable[[str, str, bool], Permit],
        ask: Callable[[str, RelayRequest], None],
        limits: RelayLimits | None = None,
    ):
        self._permit, self._ask = permit, ask
        self.limits = limits or RelayLimits()
        self.counts = RelayCounts()
        self._turns = asyncio.Semaphore(self.limits.transfers)
        self._bearers: Counter[str] = Counter()
        self._transfers: dict[str, _Transfer] = {}

    def routes(self) -> list[web.RouteDef]:
        """To be added to the gateway's application."""
        return [
            web.get("/goblin/blobs/{digest}", self._fetch, allow_head=False),
            web.put("/goblin/blobs/{digest}", self._store),
            web.get("/goblin/relay/{transfer}", self._lab_takes, allow_head=False),
            web.post("/goblin/relay/{transfer}", self._lab_gives),
            web.delete("/goblin/relay/{transfer}", self._lab_declines),
        ]

    def lab_left(self, lab: str) -> None:
        """Fail what waits for a laboratory that is gone."""
        for transfer in self._transfers.values():
            if transfer.lab == lab:
                _fail(transfer.arrived, ConnectionLost("the laboratory went away"))
                _fail(transfer.stored, ConnectionLost("the laboratory went away"))

    # --- volunteers ---------------------------------------------------------------------------------------------
    async def _fetch(self, request: web.Request) -> web.StreamResponse:
        digest, grant, permit = self._admitted(request, upload=False)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        try:
            async with self._transfer("fetch", digest, grant, permit) as transfer:
                source = await _within(self.limits.answer, transfer.arrived, "the laboratory did not dial out")
                length = source.content_length
                if length is None or length not in permit.sizes:
                    raise WireError("the laboratory sent a blob of another length than its reference says")
                response.content_length = length
                await response.prepare(request)
                await self._pipe(source.content, response, length, request)
                await response.write_eof()
                self.counts.to_volunteers += length
        except web.HTTPException:
            if response.prepared:  # too late for another answer; the connection is cut
                return response
            raise
        return response

    async def _store(self, request: web.Request) -> web.StreamResponse:
        digest, grant, permit = self._admitted(request, upload=True)
        length = request.content_length
        if length is None:
            raise web.HTTPLengthRequired(text="an upload states its length (Content-Length)")
        if length not in permit.sizes:
            raise web.HTTPRequestEntityTooLarge(
                max_size=max(permit.sizes, default=0), actual_size=length, text="no output of this attempt is that long"
            )
        async with self._transfer("store", digest, grant, permit) as transfer:
            transfer.source, transfer.nbytes = request.content, length
            await _within(self.limits.answer, transfer.arrived, "the laboratory did not dial out")
            longest = 2 * self.limits.answer + self.limits.stall + length / self.limits.slowest
            await _within(longest, transfer.stored, "the laboratory did not store the blob")
            self.counts.from_volunteers += length
            return web.Response(status=204)

    def _admitted(self, request: web.Request, *, upload: bool) -> tuple[str, str, Permit]:
        digest = request.match_info["digest"]
        if not is_digest(digest):
            raise web.HTTPBadRequest(text="a blob's address is 64 lower-case hexadecimal characters")
        scheme, _, grant = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not grant:
            raise web.HTTPUnauthorized(
                text="a grant is needed to move a blob: Authorization: Bearer GRANT",
                headers={"WWW-Authenticate": "Bearer"},
            )
        try:
            return digest, grant, self._permit(grant, digest, upload)
        except Refused as error:
            raise web.HTTPForbidden(text=str(error)) from error
        except BlobMissing as error:
            raise web.HTTPNotFound(text=str(error)) from error

    @asynccontextmanager
    async def _transfer(
        self, direction: Literal["fetch", "store"], digest: str, grant: str, permit: Permit
    ) -> AsyncIterator[_Transfer]:
        """One transfer from its turn to its end; whatever goes wrong becomes an answer for both sides."""
        if self._bearers[permit.bearer] >= self.limits.per_bearer:
            raise web.HTTPTooManyRequests(text=f"at most {self.limits.per_bearer} transfers of one attempt at a time")
        if self.counts.waiting >= self.limits.waiting:
            raise web.HTTPServiceUnavailable(text="the relay is busy: try again", headers={"Retry-After": "2"})
        loop = asyncio.get_running_loop()
        transfer = _Transfer(
            secrets.token_hex(16),
            direction,
            permit.lab,
            loop.create_future(),
            loop.create_future(),
            loop.create_future(),
        )
        self._bearers[permit.bearer] += 1
        self.counts.waiting += 1
        turn = False
        try:
            try:
                async with asyncio.timeout(self.limits.answer):
                    turn = await self._turns.acquire()
            finally:
                self.counts.waiting -= 1
            self.counts.active += 1
            self._transfers[transfer.name] = transfer
            self._ask(permit.lab, RelayRequest(transfer.name, direction, digest, grant))
            yield transfer
            _done(transfer.finished)
        except _BROKEN as error:
            self.counts.failed[type(error).__name__] += 1
            _fail(transfer.finished, error)
            raise _answer(error) from error
        finally:
            self._transfers.pop(transfer.name, None)
            for future in (transfer.arrived, transfer.stored, transfer.finished):
                _fail(future, ConnectionLost("the other side of this transfer went away"))
                if not future.cancelled():
                    future.exception()  # nobody may be waiting: that is no error of its own
            self._bearers[permit.bearer] -= 1
            if not self._bearers[permit.bearer]:
                del self._bearers[permit.bearer]
            if turn:
                self.counts.active -= 1
                self._turns.release()

    # --- laboratories -------------------------------------------------------------------------------------------
    def _wanted(self, request: web.Request, *directions: str) -> _Transfer:
        transfer = self._transfers.get(request.match_info["transfer"])
        if transfer is None or transfer.direction not in directions:
            raise web.HTTPGone(text="nobody waits for this transfer (any more)")
        return transfer

    async def _lab_gives(self, request: web.Request) -> web.StreamResponse:
        transfer = self._wanted(request, "fetch", "store")
        if transfer.direction == "store":
            if not transfer.taken or transfer.stored.done():
                raise web.HTTPConflict(text="this blob has not been handed over yet")
            transfer.stored.set_result(None)
            return web.Response(status=204)
        if transfer.arrived.done():
            raise web.HTTPConflict(text="this blob is being sent already")
        transfer.arrived.set_result(request)
        try:
            await asyncio.shield(transfer.finished)
        except _BROKEN as error:
            gone = web.Response(status=410, text=f"the transfer ended early: {_sentence(error)}")
            gone.force_close()  # its body is not wanted any more
            return gone
        return web.Response(status=204)

    async def _lab_takes(self, request: web.Request) -> web.StreamResponse:
        transfer = self._wanted(request, "store")
        source = transfer.source
        if transfer.arrived.done() or source is None:
            raise web.HTTPConflict(text="this blob is being handed over already")
        transfer.arrived.set_result(request)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = transfer.nbytes
        await response.prepare(request)
        try:
            await self._pipe(source, response, transfer.nbytes, request)
            transfer.taken = True
            await response.write_eof()
        except _BROKEN as error:
            _fail(transfer.stored, error)
        return response

    async def _lab_declines(self, request: web.Request) -> web.StreamResponse:
        transfer = self._wanted(request, "fetch", "store")
        error = (
            BlobMissing("the laboratory has no such blob")
            if transfer.direction == "fetch"
            else Refused("the laboratory does not take this blob")
        )
        _fail(transfer.arrived, error)
        _fail(transfer.stored, error)
        return web.Response(status=204)

    # --- bytes --------------------------------------------------------------------------------------------------
    async def _pipe(self, source: StreamReader, sink: web.StreamResponse, nbytes: int, request: web.Request) -> None:
        """Copy exactly `nbytes`; on any failure the sink's connection is cut, so that what came cannot pass for all.

        `StreamReader` stops its socket above 128 KiB, `write` waits above the transport's high water: that is all
        that a transfer ever holds.
        """
        remaining = nbytes
        loop = asyncio.get_running_loop()
        latest = loop.time() + self.limits.stall + nbytes / self.limits.slowest
        try:
            while remaining:
                async with asyncio.timeout_at(min(loop.time() + self.limits.stall, latest)):
                    chunk = await source.readany()
                    if not chunk:
                        raise ConnectionLost("the sender went away half-way")
                    if len(chunk) > remaining:
                        raise WireError("the sender sent more than it announced")
                    await sink.write(chunk)
                remaining -= len(chunk)
        except BaseException:
            if request.transport is not None:
                request.transport.abort()
            raise


async def _within(seconds: float, future: asyncio.Future[T], otherwise: str) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.shield(future)
    except TimeoutError as error:
        raise TimeoutError(f"{otherwise} within {seconds:.0f} s") from error


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[web.Request] | asyncio.Future[None], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _answer(error: BaseException) -> web.HTTPException:
    """What a side is told of an error of the other."""
    text = _sentence(error)
    match error:
        case BlobMissing():
            return web.HTTPNotFound(text=text)
        case Refused():
            return web.HTTPForbidden(text=text)
        case TimeoutError():
            return web.HTTPGatewayTimeout(text=text)
        case ConnectionLost():
            return web.HTTPServiceUnavailable(text=text, headers={"Retry-After": "2"})
        case _:
            return web.HTTPBadGateway(text=text)


def _sentence(error: BaseException) -> str:
    return str(error) or "one side stopped sending or taking"
