"""The data server: only what a grant covers, only as it was announced, whatever the peer does."""

import array
import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from goblin_dask.digest import digest
from goblin_dask.errors import BlobMissing, ConnectionLost, DigestMismatch, Refused, StoreError
from goblin_dask.gateway.relay import Permit, Relay
from goblin_dask.messages import ArraySpec, BlobRef, encode
from goblin_dask.store import descriptors as d
from goblin_dask.store.chunks import store_array
from goblin_dask.store.http import BlobClient
from goblin_dask.volunteer.transfer import LocalClient
from tests.datalab import DataLab

X = np.random.default_rng(0).random((300, 300)).astype("f4")
OUT = os.urandom(200_000)
SPEC = ArraySpec((200_000,), "uint8")


@pytest.fixture
async def lab(tmp_path):
    lab = await DataLab(tmp_path / "lab").start()
    yield lab
    await lab.close()


@pytest.fixture
def given(lab):
    """A task that reads X and writes 200,000 bytes."""
    ref = store_array(lab.blobs, X)
    return lab.expect([ref], [SPEC]), ref.wire()


@pytest.fixture
def sock(lab):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10)
        sock.connect(d.address(lab.data.local))
        yield sock


def ask(sock, request, fd=None):
    d.send_packet(sock, request if isinstance(request, bytes) else encode(request), fd)
    data, received = d.receive_packet(sock)
    if received is not None:
        os.close(received)
    return d.reply_decoder.decode(data) if data else None


def out_ref(data=OUT):
    return BlobRef(digest(data), ArraySpec((len(data),), "uint8"), len(data))


# --- descriptors -----------------------------------------------------------------------------------------------
async def test_a_blob_is_mapped_and_an_output_handed_in(lab, given):
    task, ref = given
    client = LocalClient(lab.data.local)

    def volunteer():
        view = client.fetch(ref, lab.grant(task))
        assert bytes(view) == X.tobytes()
        fd = d.memory_file([OUT])
        for _ in range(2):  # again, as after a lost answer
            client.send(out_ref(), lab.grant(task), fd)
        os.close(fd)

    await asyncio.to_thread(volunteer)
    assert not lab.blobs.has(digest(OUT))
    seen = await asyncio.to_thread(client.fetch, out_ref(), lab.grant(task, "check"))
    assert bytes(seen) == OUT
    lab.data.accept(task, [out_ref()])
    assert bytes(lab.blobs.get(digest(OUT))) == OUT
    with pytest.raises(Refused, match="nobody waits for this task"):
        await asyncio.to_thread(client.fetch, ref, lab.grant(task))
    client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_other_users_of_the_host_get_no_descriptors(lab, given):
    """A descriptor tells the path of its file, whoever may read that."""
    task, ref = given
    code = """
import os, sys
from goblin_dask.errors import ConnectionLost
from goblin_dask.messages import ArraySpec, BlobRef
from goblin_dask.volunteer.transfer import LocalClient
os.setuid(int(sys.argv[1]))
try:
    LocalClient(sys.argv[2]).fetch(BlobRef(sys.argv[3], ArraySpec((1,), "uint8"), 1), sys.argv[4])
except ConnectionLost as error:
    print(error)
"""
    arguments = ("65534", lab.data.local, ref.digest, lab.grant(task))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *arguments, stdout=subprocess.PIPE)
    said, _ = await process.communicate()
    assert b"was closed" in said or b"cannot be reached" in said  # and so a volunteer takes the next route


async def test_descriptors_are_read_only(lab, given, sock):
    task, ref = given

    def steal():
        d.send_packet(sock, encode(d.Get(ref.digest, lab.grant(task))))
        data, fd = d.receive_packet(sock)
        assert isinstance(d.reply_decoder.decode(data), d.Opened)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 100)
        os.close(fd)

    await asyncio.to_thread(steal)
    assert bytes(lab.blobs.get(ref.digest)) == X.tobytes()


def unsealed():
    return d.memory_file([OUT], seal=False)


def half_sealed():
    fd = d.memory_file([OUT], seal=False)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def resized():
    return d.memory_file([OUT[:-1]])


def grown():
    return d.memory_file([OUT, b"x"])


def a_pipe():
    read, write = os.pipe()
    os.close(write)
    return read


def a_file():
    return os.open("/etc/hostname", os.O_RDONLY)


def other_bytes():
    return d.memory_file([bytes(len(OUT))])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (unsealed, "not sealed"),
        (half_sealed, "not sealed"),
        (resized, "199999 bytes, 200000 were announced"),
        (grown, "200001 bytes"),
        (a_pipe, "memory file"),
        (a_file, "memory file"),
        (other_bytes, "damaged or changed"),
        (None, "without its memory file"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
async def test_hostile_memory_files(lab, given, sock, make, reason):
    task, _ = given
    fd = make() if make else None
    reply = await asyncio.to_thread(ask, sock, d.Put(digest(OUT), lab.grant(task), len(OUT)), fd)
    assert isinstance(reply, d.Denied)
    assert reason in reply.reason
    assert not lab.blobs.quarantined(digest(OUT))
    if fd is not None:
        os.close(fd)
    good = d.memory_file([OUT])  # the connection still works
    assert await asyncio.to_thread(ask, sock, d.Put(digest(OUT), lab.grant(task), len(OUT)), good) == d.Stored(
        digest(OUT)
    )
    os.close(good)


async def test_nothing_can_change_after_it_was_handed_in(lab, given, sock):
    task, _ = given
    fd = d.memory_file([OUT])
    await asyncio.to_thread(ask, sock, d.Put(digest(OUT), lab.grant(task), len(OUT)), fd)
    for attack in (
        lambda: os.pwrite(fd, b"lie", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, 1 << 20),
        lambda: mmap.mmap(fd, 100),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0),
    ):
        with pytest.raises(PermissionError):
            attack()
    os.close(fd)


GRANTS = [
    (lambda lab, task, other: "", "a grant is needed"),
    (lambda lab, task, other: lab.grant(task, key=b"x" * 32), "not signed for this laboratory"),
    (lambda lab, task, other: lab.grant(task, seconds=-1), "expired"),
    (lambda lab, task, other: lab.grant(other), "belongs to another task"),
    (lambda lab, task, other: lab.grant("f" * 64), "nobody waits"),
]


@pytest.mark.parametrize(("make", "reason"), GRANTS, ids=["none", "foreign", "expired", "other task", "unknown task"])
async def test_gets_that_no_grant_covers(lab, given, sock, make, reason):
    task, ref = given
    other = lab.expect([store_array(lab.blobs, X + 1)], [SPEC])
    grant = make(lab, task, other)
    reply = await asyncio.to_thread(ask, sock, d.Get(ref.digest, grant))
    assert reason in reply.reason
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{lab.data.direct}/blobs/{ref.digest}", headers={"Authorization": f"Bearer {grant}"}) as response,
    ):
        assert response.status == 403
        assert reason in await response.text()


async def test_a_lease_reads_no_uploads_and_a_check_hands_in_none(lab, given, sock):
    task, _ = given
    fd = d.memory_file([OUT])
    denied = await asyncio.to_thread(ask, sock, d.Put(digest(OUT), lab.grant(task, "check"), len(OUT)), fd)
    assert "hands in nothing" in denied.reason
    await asyncio.to_thread(ask, sock, d.Put(digest(OUT), lab.grant(task), len(OUT)), fd)
    denied = await asyncio.to_thread(ask, sock, d.Get(digest(OUT), lab.grant(task)))
    assert "another task" in denied.reason
    os.close(fd)


async def test_an_attempt_hands_in_no_more_than_its_outputs(lab, given, sock):
    task, _ = given
    for number, data in enumerate([OUT, bytes(200_000)]):
        fd = d.memory_file([data])
        reply = await asyncio.to_thread(ask, sock, d.Put(digest(data), lab.grant(task), len(data)), fd)
        os.close(fd)
        assert isinstance(reply, d.Stored) == (number == 0)
    assert "handed in its 1 outputs already" in reply.reason
    small = d.memory_file([b"x"])
    reply = await asyncio.to_thread(ask, sock, d.Put(digest(b"x"), lab.grant(task), 1), small)
    os.close(small)
    assert "[200000]" in reply.reason


@pytest.mark.parametrize("name", ["../../../etc/passwd", "blobs/ab", "A" * 64, ""])
async def test_digests_that_are_paths(lab, given, sock, name):
    task, _ = given
    assert "no blob address" in (await asyncio.to_thread(ask, sock, d.Get(name, lab.grant(task)))).reason


@pytest.mark.parametrize(
    "data", [b"\x80\x04N.", b"\xff" * 100, b"{}", b"x" * 5000], ids=["pickle", "ff", "json", "long"]
)
async def test_nonsense_ends_that_connection_only(lab, given, sock, data):
    task, ref = given
    reply = await asyncio.to_thread(ask, sock, data)
    assert reply is None or isinstance(reply, d.Denied)
    client = LocalClient(lab.data.local)
    assert (await asyncio.to_thread(client.fetch, ref, lab.grant(task))).nbytes == X.nbytes
    client.close()


def memory_files():
    """How many of them this process has open; other descriptors come and go with threads of earlier tests."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
    return count


async def test_many_descriptors_in_one_packet_are_closed(lab, given, sock):
    task, _ = given
    fds = [d.memory_file([b"x"]) for _ in range(50)]
    before = memory_files()

    def flood():
        rights = array.array("i", fds)
        put = encode(d.Put(digest(OUT), lab.grant(task), 1))
        sock.sendmsg([put], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        return d.receive_packet(sock)[0]

    reply = d.reply_decoder.decode(await asyncio.to_thread(flood))
    assert "more than one descriptor" in reply.reason
    assert memory_files() == before
    for fd in fds:
        os.close(fd)


# --- HTTP ------------------------------------------------------------------------------------------------------
async def test_http_moves_blobs(lab, given):
    task, ref = given
    client = BlobClient(lab.data.direct)
    fetched = await asyncio.to_thread(client.fetch, f"/blobs/{ref.digest}", lab.grant(task), ref.digest, ref.nbytes)
    assert bytes(fetched) == X.tobytes()
    for _ in range(2):
        await asyncio.to_thread(client.send, "PUT", f"/blobs/{digest(OUT)}", lab.grant(task), OUT)
    assert lab.blobs.quarantined(digest(OUT)) == {f"{task}#1"}
    lab.data.drop(task, f"{task}#1")
    assert not lab.blobs.quarantined(digest(OUT))
    client.close()


async def test_http_refuses(lab, given):
    task, ref = given
    client = BlobClient(lab.data.direct)

    async def put(name, data, grant=None):
        await asyncio.to_thread(client.send, "PUT", f"/blobs/{name}", grant or lab.grant(task), data)

    with pytest.raises(Refused, match="200001 bytes"):
        await put(digest(OUT), OUT + b"x")
    with pytest.raises(StoreError, match=r"422.*damaged or changed"):
        await put(digest(OUT), bytes(len(OUT)))
    with pytest.raises(Refused, match="no blob address"):
        await put("%2e%2e%2fetc", OUT)
    with pytest.raises(Refused, match="grant is needed"):
        await put(digest(OUT), OUT, " ")
    with pytest.raises(DigestMismatch, match="of a blob that has 7"):
        await asyncio.to_thread(client.fetch, f"/blobs/{ref.digest}", lab.grant(task), ref.digest, 7)
    with pytest.raises(DigestMismatch, match="other bytes"):
        await asyncio.to_thread(client.fetch, f"/blobs/{ref.digest}", lab.grant(task), "0" * 64, ref.nbytes)
    assert list((lab.blobs.path / "staging").iterdir()) == []
    client.close()


async def test_an_upload_that_is_cut_leaves_nothing_and_can_be_repeated(lab, given):
    task, _ = given
    port = int(lab.data.direct.rpartition(":")[2])
    head = (
        f"PUT /blobs/{digest(OUT)} HTTP/1.1\r\nHost: lab\r\nContent-Length: {len(OUT)}\r\n"
        f"Authorization: Bearer {lab.grant(task)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + OUT[:100_000])
    await writer.drain()
    staging = lab.blobs.path / "staging"
    async with asyncio.timeout(10):
        while not list(staging.iterdir()):
            await asyncio.sleep(0)
    writer.transport.abort()
    async with asyncio.timeout(10):
        while list(staging.iterdir()):
            await asyncio.sleep(0)
    client = BlobClient(lab.data.direct)
    await asyncio.to_thread(client.send, "PUT", f"/blobs/{digest(OUT)}", lab.grant(task), OUT)
    assert lab.blobs.quarantined(digest(OUT))
    client.close()


async def test_a_full_store_answers_507(tmp_path):
    lab = await DataLab(tmp_path, cap=1000).start()
    task = lab.expect([], [SPEC])
    client = BlobClient(lab.data.direct)
    with pytest.raises(ConnectionLost, match=r"507.*may take 0\.00 GB"):
        await asyncio.to_thread(client.send, "PUT", f"/blobs/{digest(OUT)}", lab.grant(task), OUT)
    client.close()
    await lab.close()


# --- the relay -------------------------------------------------------------------------------------------------
@pytest.fixture
async def gateway(lab):
    """A gateway's relay in front of the lab."""
    jobs = set()
    sizes = frozenset({X.nbytes, len(OUT)})

    def ask_lab(name, request):
        job = asyncio.create_task(lab.data.relay(base, request))
        jobs.add(job)

    relay = Relay(lambda grant, name, upload: Permit("lab", grant, sizes), ask_lab)
    app = aiohttp.web.Application()
    app.add_routes(relay.routes())
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield base
    await asyncio.gather(*jobs)
    await runner.cleanup()


async def test_blobs_move_through_the_relay(lab, given, gateway):
    task, ref = given
    client = BlobClient(gateway)
    path = "/goblin/blobs/"
    view = await asyncio.to_thread(client.fetch, path + ref.digest, lab.grant(task), ref.digest, ref.nbytes)
    assert bytes(view) == X.tobytes()
    await asyncio.to_thread(client.send, "PUT", path + digest(OUT), lab.grant(task), OUT)
    assert lab.blobs.quarantined(digest(OUT)) == {f"{task}#1"}
    with pytest.raises(BlobMissing):
        await asyncio.to_thread(client.fetch, path + "0" * 64, lab.grant(task), "0" * 64, ref.nbytes)
    with pytest.raises(Refused):
        await asyncio.to_thread(client.send, "PUT", path + "1" * 64, lab.grant(task), OUT)
    client.close()


# --- TLS -------------------------------------------------------------------------------------------------------
async def test_blobs_move_over_tls_and_an_unknown_authority_is_named(lab, given):
    task, ref = given
    folder = Path(__file__).parents[1] / "tls"
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    app = aiohttp.web.Application()
    app.add_routes(lab.data.routes())
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0, ssl_context=serving).start()
    base = f"https://127.0.0.1:{runner.addresses[0][1]}"
    client = BlobClient(base, context=ssl.create_default_context(cafile=folder / "certificate.pem"))
    view = await asyncio.to_thread(client.fetch, f"/blobs/{ref.digest}", lab.grant(task), ref.digest, ref.nbytes)
    assert bytes(view) == X.tobytes()
    with tempfile.TemporaryFile() as file:
        file.write(b"before" + OUT)
        file.flush()
        await asyncio.to_thread(
            client.send, "PUT", f"/blobs/{digest(OUT)}", lab.grant(task), len(OUT), fd=file.fileno(), offset=6
        )
    assert lab.blobs.quarantined(digest(OUT))
    stranger = BlobClient(base)
    with pytest.raises(Refused, match=r"is not trusted .* set goblin\.tls\.ca-file"):
        await asyncio.to_thread(stranger.fetch, f"/blobs/{ref.digest}", lab.grant(task), ref.digest, ref.nbytes)
    plain = BlobClient(base.replace("https", "http"))
    with pytest.raises((ConnectionLost, StoreError), match="http://127"):
        await asyncio.to_thread(plain.fetch, f"/blobs/{ref.digest}", lab.grant(task), ref.digest, ref.nbytes)
    client.close()
    await runner.cleanup()
