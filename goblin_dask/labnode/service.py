"""The lab node's HTTP service for its researchers. Everything but ``GET /`` needs the laboratory's token.

================================  =====================================================================================
``POST /jobs``                    a pickled `Submission`; 201 with the job's status. Unpickled only after the token
                                  was checked: researchers are trusted by their own laboratory
``GET /jobs``                     status of all jobs
``GET /jobs/ID``                  status of one
``GET /jobs/ID/events``           server-sent events: its status whenever it changes, until it has ended
``GET /jobs/ID/result``           waits for the end; a pickled `Result`, or a pickled error with status 409; with
                                  ``?wait=SECONDS`` its status and 202 where it has not ended by then
``GET /jobs/ID/blobs/DIGEST``     bytes of one array of the result
``GET /jobs/ID/certificate``      how it was verified
``POST /jobs/ID/cancel``          cancel it; answers when it is gone
``DELETE /jobs/ID``               cancel it if need be, and let go of its results
``POST /actors``                  a parcel of a class, its arguments and a name: start an actor; 201 with its key
``GET /actors``                   all actors: key, class, name, seconds since the last call
``POST /actors/KEY/METHOD``       a parcel of arguments: call a method; a parcel of what it returns, or a pickled error
                                  with status 409
``DELETE /actors/KEY``            let go of it
``GET /offer``                    what the volunteers offer; with ``?volunteers=N&validators=M``, once so many are there
================================  =====================================================================================
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec
from aiohttp import web

from goblin_dask.errors import ActorLost, BlobMissing, InputError, JobFailed
from goblin_dask.labnode import parcels
from goblin_dask.labnode.jobs import FINAL, Job, Submission
from goblin_dask.messages import GridOffer
from goblin_dask.store.chunks import open_chunk

if TYPE_CHECKING:
    from goblin_dask.labnode.node import LabNode

LARGEST = 8 << 30
"""Bytes of a submission, NumPy arrays in its graph included."""


class Service:
    """The routes above, on one node."""

    def __init__(self, node: LabNode):
        self._node = node
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises
        ------
        InputError
            When the address is taken or is none of this machine.
        """
        app = web.Application(middlewares=[self._authenticate], client_max_size=LARGEST)
        app.router.add_get("/", self._hello)
        app.router.add_post("/jobs", self._submit)
        app.router.add_get("/jobs", self._list)
        app.router.add_get("/jobs/{id}", self._status)
        app.router.add_delete("/jobs/{id}", self._forget)
        app.router.add_post("/jobs/{id}/cancel", self._cancel)
        app.router.add_get("/jobs/{id}/events", self._events)
        app.router.add_get("/jobs/{id}/result", self._result)
        app.router.add_get("/jobs/{id}/blobs/{digest}", self._blob)
        app.router.add_get("/jobs/{id}/certificate", self._certificate)
        app.router.add_post("/actors", self._start_actor)
        app.router.add_get("/actors", self._actors)
        app.router.add_post("/actors/{key}/{method}", self._call_actor)
        app.router.add_delete("/actors/{key}", self._release_actor)
        app.router.add_get("/offer", self._offer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise InputError(
                f"the lab node cannot listen on {host}:{port} ({error.strerror}): choose another port with "
                "goblin.lab.port, or stop what listens there"
            ) from error
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if request.path != "/" and not hmac.compare_digest(shown.encode(), self._node.token.encode()):
            raise web.HTTPUnauthorized(text="wrong token: the lab node's is in identity.json of its directory")
        try:
            response: web.StreamResponse = await handler(request)
        except InputError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        except ActorLost as error:
            return web.Response(status=409, body=_pickled_error(error))
        except BlobMissing as error:
            raise web.HTTPNotFound(text=str(error)) from error
        return response

    def _job(self, request: web.Request) -> Job:
        job = self._node.jobs.get(request.match_info["id"])
        if job is None:
            raise web.HTTPNotFound(text="there is no such job here: it was let go of, or the lab node was restarted")
        return job

    async def _hello(self, request: web.Request) -> web.Response:
        return web.Response(text="goblin-dask lab node\n")

    async def _submit(self, request: web.Request) -> web.Response:
        body = await request.read()
        submission = await _unpickled(pickle.loads, body)
        if not isinstance(submission, Submission):
            raise InputError(f"a Submission is expected, got {type(submission).__name__}")
        job = self._node.submit(submission)
        return web.json_response(job.status(), status=201)

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response([job.status() for job in self._node.jobs.values()])

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._job(request).status())

    async def _forget(self, request: web.Request) -> web.Response:
        await self._node.forget(self._job(request))
        return web.Response(status=204)

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self._job(request)
        await self._node.cancel(job)
        return web.json_response(job.status())

    async def _events(self, request: web.Request) -> web.StreamResponse:
        job = self._job(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        queue = job.listen()
        try:
            while True:
                status = await queue.get()
                await response.write(f"data: {json.dumps(status)}\n\n".encode())
                if status["state"] in FINAL:
                    return response
        finally:
            job.unlisten(queue)

    async def _result(self, request: web.Request) -> web.Response:
        job = self._job(request)
        if not job.finished.is_set():
            seconds = float(request.query["wait"]) if "wait" in request.query else None
            try:
                await asyncio.wait_for(job.finished.wait(), seconds)
            except TimeoutError:
                return web.json_response(job.status(), status=202)
        if job.error is not None:
            return web.Response(status=409, body=_pickled_error(job.error))
        return web.Response(body=cloudpickle.dumps(job.result))

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        ref = self._job(request).refs().get(request.match_info["digest"])
        if ref is None:
            raise BlobMissing("the result has no such array")
        fd, offset, nbytes = open_chunk(self._node.blobs, ref)
        with os.fdopen(fd, "rb") as file:
            response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            response.content_length = nbytes
            await response.prepare(request)
            assert request.transport is not None
            await asyncio.get_running_loop().sendfile(request.transport, file, offset, nbytes)
            await response.write_eof()
        return response

    async def _certificate(self, request: web.Request) -> web.Response:
        return web.json_response(self._job(request).certificate)

    async def _start_actor(self, request: web.Request) -> web.Response:
        kind, args, name = await _unpickled((await parcels.receive(request.content)).open)
        outcome = await self._node.residents.start(kind, args, name)
        if outcome.error is not None:
            return web.Response(status=409, body=_pickled_error(outcome.error))
        return web.json_response({"key": outcome.value}, status=201)

    async def _actors(self, request: web.Request) -> web.Response:
        return web.json_response(self._node.residents.status())

    async def _call_actor(self, request: web.Request) -> web.StreamResponse:
        args = await _unpickled((await parcels.receive(request.content)).open)
        key, method = request.match_info["key"], request.match_info["method"]
        outcome = await self._node.residents.call(key, method, args)
        if outcome.error is not None:
            return web.Response(status=409, body=_pickled_error(outcome.error))
        try:
            pieces = await asyncio.to_thread(parcels.pack, outcome.value)
        except Exception as error:
            raise InputError(f"what {method} returned cannot be sent ({type(error).__name__}: {error})") from error
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = parcels.size(pieces)
        await response.prepare(request)
        for piece in parcels.cut(pieces):
            await response.write(piece)
        await response.write_eof()
        return response

    async def _release_actor(self, request: web.Request) -> web.Response:
        await self._node.residents.release(request.match_info["key"])
        return web.Response(status=204)

    async def _offer(self, request: web.Request) -> web.Response:
        volunteers, validators = (int(request.query.get(name, 0)) for name in ("volunteers", "validators"))
        queue: asyncio.Queue[GridOffer] = asyncio.Queue()
        self._node.offer_changed.add(queue)
        try:
            offer = self._node.offer
            while offer.volunteers < volunteers or offer.validators < validators:
                offer = await queue.get()
        finally:
            self._node.offer_changed.discard(queue)
        return web.Response(body=msgspec.json.encode(offer), content_type="application/json")


async def _unpickled(loads: Callable[..., Any], *args: Any) -> Any:
    try:
        return await asyncio.to_thread(loads, *args)
    except Exception as error:
        raise InputError(
            f"the lab node cannot read what was submitted ({type(error).__name__}: {error}): it needs the same "
            "packages, in the same versions, as the program that submits"
        ) from error


def _pickled_error(error: BaseException) -> bytes:
    """An error as the client raises it again; by its text where it cannot be pickled."""
    try:
        pickled: bytes = cloudpickle.dumps((error, error.__cause__))
        pickle.loads(pickled)  # noqa: S301 our own; some errors can be pickled but not made again
    except Exception:
        pickled = cloudpickle.dumps((JobFailed(f"{type(error).__name__}: {error}"), None))
    return pickled
