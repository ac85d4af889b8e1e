"""What a volunteer and a gateway get to see: numbers of the tasks in hand, no name; and on no disk of the gateway."""

import contextlib
import json
import os
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import zarr

from goblin_dask.digest import digest
from goblin_dask.local import LocalGrid
from goblin_dask.testing.faults import PIECE, Proxy

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

TAP = str(Path(__file__).with_name("tap.py"))
PLANTED = {
    "folder": "zwillingsstudie-47b1",
    "file": "befunde-waldemar.zarr",
    "array": "blutdruck-morgens",
    "key": "schluessel-der-klinik-9d2f",
    "job": "antrag-kunigunde",
    "function": "heimliche_rechnung",
    "result": "ergebnis-ottokar.zarr",
}
LARGE, SMALL = (96, 128), (16, 128)
"""Shapes of blocks that travel as blobs (96 KiB), and inside of messages (16 KiB)."""
BLOCKS = 6
READ = 4
"""Blocks of each array that are computed with; the others stay where they are."""


class Recording(Proxy):
    """Writes down what goes to the volunteer, one record a connection."""

    def __init__(self, address):
        self.records = []
        super().__init__(address)

    async def _pump(self, reader, writer, line):
        if line is not None:
            await super()._pump(reader, writer, line)
            return
        record = bytearray()
        self.records.append(record)
        while data := await reader.read(PIECE):
            record += data
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()


class Data:
    """Arrays whose blocks each hold a number that stands nowhere else."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.marks = {}
        """Bytes of a block's number: digest of the block."""

    def array(self, shape):
        blocks = [self.rng.standard_normal(shape) for _ in range(BLOCKS)]
        marks = []
        for block in blocks:
            block[1, ::7] = self.rng.standard_normal()
            marks.append(block[1, 0].tobytes())
            self.marks[marks[-1]] = digest(block.tobytes())
        return np.concatenate(blocks), marks


def secret(data, directory):
    """The work of somebody whose files, keys and functions tell too much; what is read, and what is not."""
    place = directory / PLANTED["folder"] / PLANTED["file"]
    place.parent.mkdir()
    large, large_marks = data.array(LARGE)
    small, small_marks = data.array(SMALL)
    group = zarr.open_group(place, mode="w")
    stored = group.create_array(PLANTED["array"], shape=large.shape, chunks=LARGE, dtype="f8", compressors=None)
    stored[:] = large
    a = da.from_zarr(str(place), component=PLANTED["array"])[: READ * LARGE[0]]
    b = da.from_array(small, chunks=SMALL, name=PLANTED["key"])[: READ * SMALL[0]]

    def heimliche_rechnung(block):
        return np.sqrt(np.abs(block)) + 2

    assert heimliche_rechnung.__name__ == PLANTED["function"]
    work = [array.map_blocks(heimliche_rechnung, dtype="f8") for array in (a, b)]
    want = [heimliche_rechnung(large[: len(a)]), heimliche_rechnung(small[: len(b)])]
    return work, want, large_marks, small_marks


def gateway_files(grid):
    """All that the gateway has on a disk: by what it has open, and by where it was told to write."""
    folder = Path(f"/proc/{grid.gateway.pid}/fd")
    opened = {Path(os.readlink(link)) for link in folder.iterdir()}
    named = set(grid.directory.glob("gateway*"))
    assert {grid.directory / "gateway.sqlite", grid.directory / "gateway.log"} <= opened & named
    return {path: path.read_bytes() for path in opened | named if path.is_file()}


def spellings(name):
    return [name.encode(), name.encode("utf-16-le"), name.encode().hex().encode()]


def contains(content, needle):
    return any(needle in part for part in content.values())


@pytest.mark.full
def test_names_stay_and_numbers_go_where_they_are_needed(full, report, tmp_path, monkeypatch):
    """By each route of the laboratory's data; by the one through the gateway alone in the short run."""
    for routes in ("relay", "direct", "auto") if full else ("relay",):
        directory = tmp_path / routes
        directory.mkdir()
        run(routes, directory, report, monkeypatch)


def run(routes, directory, report, monkeypatch):
    monkeypatch.setenv("GOBLIN_TEST_TAP", str(directory / "tap"))
    data = Data(seed=len(routes))
    work, want, large_marks, small_marks = secret(data, directory)
    inside, inside_marks = data.array(LARGE)
    with contextlib.ExitStack() as stack:
        grid = stack.enter_context(
            LocalGrid(0, offload="always", routes=routes, directory=directory / "grid", progress=False)
        )
        proxy = stack.enter_context(Recording(grid.address))
        volunteers = [grid.add_volunteer("--preload", TAP, address=proxy.address) for _ in range(2)]
        grid.wait(2, 1)
        with grid.lab.submit(*work, name=PLANTED["job"]) as job:
            for got, wanted in zip(job.result(), want, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-14)
            progress = job.progress
        with grid.lab.submit(da.from_array(inside, chunks=LARGE) * 3, offload="never") as job:
            np.testing.assert_array_equal(job.result(), inside * 3)
        grid.lab.to_zarr(work[0] - 1, directory / PLANTED["folder"] / PLANTED["result"])
        gateway = gateway_files(grid)
        identity = json.loads((grid.directory / "lab" / "identity.json").read_text())
        for process in volunteers:
            process.stop()
        gateway |= gateway_files(grid)
        pids = [process.pid for process in volunteers]
        tapped = [{path.name: path.read_bytes() for path in (directory / "tap" / str(pid)).iterdir()} for pid in pids]
    assert progress["grid"] >= 2

    # the tap inside the volunteers and the proxy outside of them saw the same
    streams = [content for taps in tapped for name, content in taps.items() if name.startswith(f"tcp-{proxy.port}-")]
    records = [bytes(record) for record in proxy.records]
    assert all(any(record.startswith(stream) for record in records) for stream in streams)
    assert sum(map(len, streams)) > 0.99 * sum(map(len, records)) > 0

    received = [{name: content for name, content in taps.items() if name != "leases"} for taps in tapped]
    leased = [{name for line in taps.get("leases", b"").splitlines() for name in json.loads(line)} for taps in tapped]
    arrived = 0
    for content, inputs in zip(received, leased, strict=True):
        for mark, block in data.marks.items():
            if contains(content, mark):
                assert block in inputs, "a number reached a volunteer that had no task with it"
                arrived += 1
    by_route = [content for taps in received for name, content in taps.items() if by(routes, name, proxy)]
    for marks in (large_marks, small_marks):  # each was seen on its way: the scan can find them
        assert all(any(contains(content, mark) for content in received) for mark in marks[:READ])
        assert not any(contains(content, mark) for content in received for mark in marks[READ:])
    assert all(any(mark in content for content in by_route) for mark in large_marks[:READ])
    assert not any(contains(content, mark) for content in received for mark in inside_marks)

    assert all(contains(content, b"sqrt") for content in received)  # what must be told is found, so names would be
    assert contains(gateway, b"volunteer 0")

    names = [*PLANTED.values(), str(directory / "grid"), identity["key"], identity["token"]]
    for name in names:
        for spelling in [*spellings(name), *([bytes.fromhex(name)] if name == identity["key"] else [])]:
            assert not any(contains(content, spelling) for content in received), f"{name} reached a volunteer"
    for name in PLANTED.values():
        assert not any(contains(gateway, spelling) for spelling in spellings(name)), f"{name} is on the gateway's disk"
    for mark in data.marks:
        assert not contains(gateway, mark), "a number is on the gateway's disk"
    total = sum(len(part) for content in received for part in content.values())
    report(
        f"privacy, {routes}: {sum(map(len, records)) / 1e6:.2f} MB to volunteers through the gateway, "
        f"{total / 1e6:.2f} MB in all; {len(names)} names "
        f"in none of it; {arrived} blocks, each at a volunteer with a task for it; nothing of either in the gateway's "
        f"{len(gateway)} files of {sum(map(len, gateway.values())) / 1e3:.0f} kB"
    )


def by(routes, name, proxy):
    """Whether a record of the tap is of the route in question."""
    if routes == "auto":
        return name == "mapped"
    through_gateway = name.startswith(f"tcp-{proxy.port}-")
    return through_gateway if routes == "relay" else name.startswith("tcp-") and not through_gateway
