"""`DataServer`: the lab's blobs, over a Unix socket, over HTTP, and through the gateway's relay."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from goblin_dask.errors import BlobMissing, DigestMismatch, GoblinError, Refused, StoreError, StoreFull
from goblin_dask.labnode.data_local import LocalServer
from goblin_dask.labnode.permits import Permits
from goblin_dask.messages import BlobRef, RelayRequest, SubmitTask
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.http import BlobClient
from goblin_dask.store.refs import ChunkRef

logger = logging.getLogger(__name__)

RELAYS = 16
"""Blobs that move through the relay at a time."""


class DataServer:
    """Serves and takes the blobs of the tasks that are on the grid, and of no others.

    Parameters
    ----------
    blobs : BlobStore
        The lab's blobs.
    key : bytes
        Key of the grants, shared with the gateway.
    """

    def __init__(self, blobs: BlobStore, key: bytes):
        self.permits = Permits(blobs, key)
        self._local: LocalServer | None = None
        self._runner: web.AppRunner | None = None
        self._clients: dict[str, BlobClient] = {}
        self._relays = ThreadPoolExecutor(RELAYS, thread_name_prefix="goblin-relay")
        self.direct = ""
        """Base URL of the HTTP server; empty when there is none."""

    @property
    def local(self) -> str:
        """Name of the abstract Unix socket; empty when there is none."""
        return self._local.name if self._local else ""

    async def start(self, *, local: bool = True, host: str | None = "127.0.0.1", port: int = 0) -> None:
        """Open the Unix socket and, with a `host`, the HTTP server; blobs are served from this event loop."""
        if local:
            self._local = LocalServer(self.permits)
        if host is not None:
            app = web.Application()
            app.add_routes(self.routes())
            self._runner = web.AppRunner(app, access_log=None)
            await self._runner.setup()
            site = web.TCPSite(self._runner, host, port)
            await site.start()
            bound = self._runner.addresses[0][1]
            self.direct = f"http://{host}:{bound}"

    async def close(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._local is not None:
            await asyncio.to_thread(self._local.close)
        await asyncio.to_thread(self._relays.shutdown, cancel_futures=True)
        for client in self._clients.values():
            client.close()

    # --- what the lab knows of its tasks ---------------------------------------------------------------------
    def expect(self, task: SubmitTask, refs: Iterable[ChunkRef], *, cold: bool = False) -> None:
        """The task is on the grid from now on; `refs` say where its inputs lie, `cold` that its outputs only lie."""
        self.permits.expect(task, refs, cold=cold)

    def accept(self, task: str, outputs: Collection[BlobRef], *, unchecked: bool = False) -> None:
        """The task's outputs become blobs; it is forgotten, unless it is `unchecked`: then its check is yet served.

        Blocks on the disk: call it in a thread.
        """
        self.permits.accept(task, outputs, unchecked=unchecked)

    def drop(self, task: str, attempt: str) -> None:
        """This attempt's uploads are not wanted."""
        self.permits.drop(task, attempt)

    def forget(self, task: str) -> None:
        """The task is not on the grid any more; what was uploaded for it goes."""
        self.permits.forget(task)

    # --- HTTP ------------------------------------------------------------------------------------------------
    def routes(self) -> list[web.RouteDef]:
        """Routes for any aiohttp application."""
        return [
            web.get("/blobs/{digest}", self._get, allow_head=False),
            web.put("/blobs/{digest}", self._put),
        ]

    async def _get(self, request: web.Request) -> web.StreamResponse:
        try:
            # in a thread: a store that is no file system answers over a network
            fd, offset, nbytes = await asyncio.to_thread(
                self.permits.open, _bearer(request), request.match_info["digest"]
            )
        except GoblinError as error:
            raise _answer(error) from error
        with os.fdopen(fd, "rb") as file:
            response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            response.content_length = nbytes
            await response.prepare(request)
            if request.transport is None:
                raise ConnectionResetError("the volunteer hung up")
            if nbytes:
                await asyncio.get_running_loop().sendfile(request.transport, file, offset, nbytes)
            await response.write_eof()
            return response

    async def _put(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["digest"]
        if request.content_length is None:
            raise web.HTTPLengthRequired(text="an upload states its length (Content-Length)")
        try:
            grant = self.permits.admit(_bearer(request), name, request.content_length)
            upload = self.permits.begin(grant, request.content_length)
            try:
                async for data in request.content.iter_any():
                    rest = upload.take(memoryview(data))
                    while rest:
                        await _in_thread(upload.flush)
                        rest = upload.take(rest)
                await _in_thread(self.permits.receive, grant, name, upload)
            except BaseException:
                upload.abort()
                raise
        except GoblinError as error:
            raise _answer(error) from error
        return web.Response(status=204)

    # --- the relay -------------------------------------------------------------------------------------------
    async def relay(self, gateway: str, request: RelayRequest, context: ssl.SSLContext | None = None) -> None:
        """Dial out and move one blob through the gateway.

        Parameters
        ----------
        gateway : str
            Its base URL, ``http://HOST:PORT``.
        request : RelayRequest
            What the gateway asked for.

        Raises
        ------
        ConnectionLost, BlobMissing
            When the gateway cannot be reached, or does not wait for the blob any more.
        """
        client = self._clients.get(gateway)
        if client is None:
            client = self._clients[gateway] = BlobClient(gateway, context=context)
        await asyncio.get_running_loop().run_in_executor(self._relays, self._move, client, request)

    def _move(self, client: BlobClient, request: RelayRequest) -> None:
        path = f"/goblin/relay/{request.transfer}"
        try:
            if request.direction == "fetch":
                fd, offset, nbytes = self.permits.open(request.grant, request.digest)
            else:
                # the relay has let in no blob of a length that this lab did not expect
                upload = self.permits.admit_any(request.grant, request.digest)
        except GoblinError as error:
            logger.warning("relay: %s", error)
            client.send("DELETE", path, request.grant)
            return
        if request.direction == "fetch":
            try:
                client.send("POST", path, request.grant, nbytes, fd=fd, offset=offset)
            finally:
                os.close(fd)
            return
        try:
            client.download(path, request.grant, upload)
            grant = self.permits.admit(request.grant, request.digest, upload.nbytes)
            self.permits.receive(grant, request.digest, upload)
        except (Refused, StoreError) as error:
            upload.abort()
            logger.warning("relay: %s", error)
            client.send("DELETE", path, request.grant)
            return
        except BaseException:
            upload.abort()
            raise
        client.send("POST", path, request.grant)


async def _in_thread(function: Callable[..., object], *args: object) -> None:
    """Call a function in a thread, and wait until it has returned even when cancelled."""
    future = asyncio.get_running_loop().run_in_executor(None, function, *args)
    try:
        await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


def _bearer(request: web.Request) -> str:
    scheme, _, grant = request.headers.get("Authorization", "").partition(" ")
    return grant if scheme == "Bearer" else ""


def _answer(error: GoblinError) -> web.HTTPException:
    """The refusal as a status, with its sentence."""
    text = str(error)
    match error:
        case Refused():
            return web.HTTPForbidden(text=text)
        case BlobMissing():
            return web.HTTPNotFound(text=text)
        case StoreFull():
            return web.HTTPInsufficientStorage(text=text)
        case DigestMismatch():
            return web.HTTPUnprocessableEntity(text=text)
        case _:
            return web.HTTPBadRequest(text=text)
