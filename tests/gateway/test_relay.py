"""The relay, over real sockets: both sides dial out."""

from __future__ import annotations

import asyncio
import io
import tracemalloc

import aiohttp
import pytest
from aiohttp import web

from goblin_dask.digest import digest
from goblin_dask.errors import BlobMissing, ConnectionLost, Refused
from goblin_dask.gateway.relay import Permit, Relay, RelayLimits

MB = 1 << 20


class Bench:
    """A gateway that is a relay only, and a laboratory and volunteers that are HTTP clients."""

    def __init__(self):
        self.blobs = {}
        self.stored = {}
        self.requests: asyncio.Queue = asyncio.Queue()
        self.away = False
        self.limits = RelayLimits(answer=5.0, stall=5.0)

    async def __aenter__(self):
        self.relay = Relay(self.permit, self.ask, self.limits)
        app = web.Application()
        app.add_routes(self.relay.routes())
        self.runner = web.AppRunner(app, access_log=None, lingering_time=0.2, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}/goblin"
        self.http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *exc):
        await self.http.close()
        await self.runner.cleanup()

    def permit(self, grant, address, upload):
        if not grant.startswith("good"):
            raise Refused("the grant was not signed for this laboratory")
        if upload:
            return Permit("lab", grant, frozenset({5 * MB}))
        if address not in self.blobs:
            raise BlobMissing("this attempt has no such input")
        return Permit("lab", grant, frozenset({len(self.blobs[address])}))

    def ask(self, lab, request):
        if self.away:
            raise ConnectionLost("the laboratory is away")
        self.requests.put_nowait(request)

    def add(self, data):
        self.blobs[digest(data)] = data
        return digest(data)

    def get(self, address, grant="good"):
        return self.http.get(f"{self.url}/blobs/{address}", headers={"Authorization": f"Bearer {grant}"})

    def put(self, address, data, grant="good"):
        body = io.BytesIO(data) if isinstance(data, bytes) else data
        return self.http.put(f"{self.url}/blobs/{address}", data=body, headers={"Authorization": f"Bearer {grant}"})

    def transfer(self, request):
        return f"{self.url}/relay/{request.transfer}"

    async def serve_one(self):
        """The laboratory's part, once."""
        request = await self.requests.get()
        url = self.transfer(request)
        if request.direction == "fetch":
            async with self.http.post(url, data=io.BytesIO(self.blobs[request.digest])) as response:
                return response.status
        async with self.http.get(url) as response:
            data = await response.read()
        assert digest(data) == request.digest
        self.stored[request.digest] = data
        async with self.http.post(url) as response:
            return response.status


@pytest.fixture
async def bench():
    async with Bench() as bench:
        yield bench


async def test_a_blob_goes_out_and_another_comes_back(bench):
    address = bench.add(bytes(range(256)) * 4096 * 5)
    lab = asyncio.create_task(bench.serve_one())
    async with bench.get(address) as response:
        assert response.status == 200
        assert digest(await response.read()) == address
    assert await lab == 204

    result = b"r" * 5 * MB
    lab = asyncio.create_task(bench.serve_one())
    async with bench.put(digest(result), result) as response:
        assert response.status == 204
    assert bench.stored[digest(result)] == result
    assert await lab == 204
    assert (bench.relay.counts.to_volunteers, bench.relay.counts.from_volunteers) == (5 * MB, 5 * MB)
    assert bench.relay.counts.active == 0


async def test_an_upload_is_not_acknowledged_before_it_is_stored(bench):
    result = b"r" * 5 * MB
    put = asyncio.create_task(bench.put(digest(result), result).__aenter__())
    request = await bench.requests.get()
    async with bench.http.post(bench.transfer(request)) as early:
        assert early.status == 409
    async with bench.http.get(bench.transfer(request)) as response:
        assert await response.read() == result
    assert not put.done()
    async with bench.http.delete(bench.transfer(request)) as response:  # "I do not take it"
        assert response.status == 204
    refused = await put
    assert refused.status == 403
    refused.release()


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("blobs/" + "0" * 64, {}, 401),
        ("blobs/" + "0" * 64, {"Authorization": "Basic x"}, 401),
        ("blobs/" + "0" * 64, {"Authorization": "Bearer forged"}, 403),
        ("blobs/" + "0" * 64, {"Authorization": "Bearer good"}, 404),
        ("blobs/..%2f..%2fetc%2fpasswd", {"Authorization": "Bearer good"}, 400),
        ("blobs/" + "A" * 64, {"Authorization": "Bearer good"}, 400),
        ("relay/" + "0" * 32, {}, 410),
        ("relay/..%2f", {}, 410),
    ],
)
async def test_wrong_requests(bench, path, header, status):
    async with bench.http.get(f"{bench.url}/{path}", headers=header) as response:
        assert response.status == status
        assert len(await response.text()) < 200
    assert bench.requests.empty()


async def test_huge_headers_cost_their_sender_only(bench):
    async with bench.http.get(f"{bench.url}/blobs/{'0' * 64}", headers={"Authorization": "x" * 100_000}) as response:
        assert response.status == 400
    address = bench.add(b"x" * 100_000)
    lab = asyncio.create_task(bench.serve_one())
    async with bench.get(address) as response:
        assert response.status == 200
    assert await lab == 204


async def test_uploads_of_another_length_are_refused_before_the_laboratory_hears_of_them(bench):
    async with bench.put("0" * 64, b"x" * 1000) as response:
        assert response.status == 413

    async def endless():
        yield b"x"

    async with bench.put("0" * 64, endless()) as response:
        assert response.status == 411
    assert bench.requests.empty()


async def test_a_laboratory_that_is_away_or_does_not_have_it(bench):
    address = bench.add(b"x" * 1000)
    get = asyncio.create_task(bench.get(address).__aenter__())
    request = await bench.requests.get()
    async with bench.http.delete(bench.transfer(request)) as response:
        assert response.status == 204
    assert (await get).status == 404
    bench.away = True
    async with bench.get(address) as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
    bench.away = False
    get = asyncio.create_task(bench.get(address).__aenter__())
    await bench.requests.get()
    bench.relay.lab_left("lab")
    assert (await get).status == 503


async def test_a_silent_laboratory_is_not_waited_for_forever(bench):
    bench.relay.limits = RelayLimits(answer=0.05)
    address = bench.add(b"x" * 1000)
    async with bench.get(address) as response:
        assert response.status == 504
        assert "did not dial out" in await response.text()


async def test_a_blob_of_another_length_is_not_passed_on(bench):
    address = bench.add(b"x" * 1000)
    get = asyncio.create_task(bench.get(address).__aenter__())
    request = await bench.requests.get()
    async with bench.http.post(bench.transfer(request), data=b"y" * 999) as response:
        assert response.status == 410
    assert (await get).status == 502


async def test_the_sender_is_cut_half_way(bench):
    """The volunteer sees a broken body, never a short one that looks whole."""
    address = bench.add(b"x" * 20 * MB)
    get = asyncio.create_task(bench.get(address).__aenter__())
    request = await bench.requests.get()
    _reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    head = f"POST /goblin/relay/{request.transfer} HTTP/1.1\r\nHost: x\r\nContent-Length: {20 * MB}\r\n\r\n"
    writer.write(head.encode() + b"x" * MB)
    await writer.drain()
    response = await get
    await response.content.readexactly(MB // 2)
    writer.transport.abort()
    with pytest.raises(aiohttp.ClientPayloadError):
        await response.read()
    assert bench.relay.counts.active == 0


async def test_the_receiver_is_cut_half_way(bench):
    address = bench.add(b"x" * 50 * MB)
    lab = asyncio.create_task(bench.serve_one())
    response = await bench.get(address).__aenter__()
    await response.content.readexactly(MB)
    response.close()
    try:
        assert await lab == 410
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
        pass  # the laboratory was still sending: it sees the connection end
    assert bench.relay.counts.active == 0


async def test_an_upload_cut_half_way_is_not_complete_for_the_laboratory(bench):
    _reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    head = f"PUT /goblin/blobs/{'0' * 64} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer good\r\n"
    head += f"Content-Length: {5 * MB}\r\n\r\n"
    writer.write(head.encode() + b"x" * MB)
    request = await bench.requests.get()
    response = await bench.http.get(bench.transfer(request)).__aenter__()
    await response.content.readexactly(MB // 2)
    writer.transport.abort()
    with pytest.raises(aiohttp.ClientPayloadError):
        await response.read()


async def test_only_what_is_under_way_is_in_memory(bench):
    """A reader that stops stops the laboratory; the gateway holds next to nothing of 256 MB."""
    size = 256 * MB
    address = "1" * 64
    bench.blobs[address] = range(size)  # its length is all that is asked for
    get = asyncio.create_task(bench.get(address).__aenter__())
    request = await bench.requests.get()
    piece = b"x" * MB
    sent = 0

    async def body():
        nonlocal sent
        while sent < size:
            yield piece
            sent += MB

    async def send():
        async with bench.http.post(bench.transfer(request), data=body(), headers={"Content-Length": str(size)}) as r:
            return r.status

    tracemalloc.start()
    lab = asyncio.create_task(send())
    response = await get
    before = -1
    while before != sent:  # until nothing more goes in: all sockets and buffers between the two are full
        before = sent
        await asyncio.wait([lab], timeout=0.3)
    assert sent < 24 * MB
    received = 0
    async for chunk in response.content.iter_any():
        received += len(chunk)
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert received == size
    assert await lab == 204
    assert peak < 6 * MB, peak  # three sockets' buffers in this process, the laboratory's pieces among them


async def test_a_side_that_stalls_is_given_up(bench):
    bench.relay.limits = RelayLimits(answer=5.0, stall=0.1)
    address = bench.add(b"x" * 50 * MB)
    get = asyncio.create_task(bench.get(address).__aenter__())
    request = await bench.requests.get()
    _reader, writer = await asyncio.open_connection("127.0.0.1", bench.port)
    head = f"POST /goblin/relay/{request.transfer} HTTP/1.1\r\nHost: x\r\nContent-Length: {50 * MB}\r\n\r\n"
    writer.write(head.encode() + b"x" * MB)
    response = await get
    with pytest.raises(aiohttp.ClientPayloadError):
        await response.read()
    assert bench.relay.counts.failed["TimeoutError"] == 1
    writer.close()


async def test_transfers_are_bounded():
    bench = Bench()
    bench.limits = RelayLimits(transfers=1, waiting=1, per_bearer=2, answer=5.0)
    async with bench:
        address = bench.add(b"x" * 1000)
        first = asyncio.create_task(bench.get(address, "good1").__aenter__())
        await bench.requests.get()
        second = asyncio.create_task(bench.get(address, "good2").__aenter__())
        while not bench.relay.counts.waiting:
            await asyncio.sleep(0)
        async with bench.get(address, "good3") as response:
            assert response.status == 503
        bench.relay.lab_left("lab")
        assert (await first).status == 503
        lab = asyncio.create_task(bench.serve_one())
        assert (await second).status == 200
        assert await lab == 204


async def test_transfers_of_one_attempt_are_bounded():
    bench = Bench()
    bench.limits = RelayLimits(per_bearer=1, answer=5.0)
    async with bench:
        address = bench.add(b"x" * 1000)
        first = asyncio.create_task(bench.get(address).__aenter__())
        request = await bench.requests.get()
        async with bench.get(address) as response:
            assert response.status == 429
        async with bench.http.post(bench.transfer(request), data=b"x" * 1000) as response:
            assert response.status == 204
        assert (await first).status == 200
