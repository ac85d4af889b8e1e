"""A large product, with every actor a process of its own: what each keeps in memory while it is computed."""

import os
import threading
from pathlib import Path

import dask.array as da
import numpy as np
import psutil
import pytest
import zarr

from goblin_dask.local import LocalGrid
from tests.system.bench import RECORDER, Notes

pytestmark = pytest.mark.system

LIMITED = ("--preload", str(Path(__file__).with_name("limited.py")))
MOST = 600 * 10**6
"""Bytes for the lab node, and for the gateway."""


class Sampler:
    """Greatest memory of process trees that is no file's, looked at while it is open."""

    def __init__(self, processes, *kinds):
        self._kinds = tuple(f"{kind}:" for kind in kinds)
        self._processes = {process.name: psutil.Process(process.pid) for process in processes}
        self.peaks = dict.fromkeys(self._processes, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self):
        while not self._stop.wait(0.02):
            for name, process in self._processes.items():
                tree = [process, *process.children(recursive=True)]
                self.peaks[name] = max(self.peaks[name], sum(resident(each, self._kinds) for each in tree))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()


def resident(process, kinds):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(kinds))


def stored(path, side, seed):
    """A square float32 array in 2048-square chunks, written slab by slab."""
    array = zarr.create_array(path, shape=(side, side), chunks=(2048, 2048), dtype="f4", compressors=None)
    rng = np.random.default_rng(seed)
    for start in range(0, side, 2048):
        array[start : start + 2048] = rng.random((2048, side), "f4")
    return array


@pytest.fixture
def notes(tmp_path, monkeypatch):
    notes = Notes(tmp_path)
    monkeypatch.setenv("GOBLIN_TEST_NOTES", notes.path)
    yield notes
    notes.close()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("routes", ["auto", "relay"])
def test_a_product_stays_within_its_memory(tmp_path, full, notes, monkeypatch, report, routes):
    side = 16384 if full else 3072
    if routes == "relay" and not full:
        pytest.skip("make full runs it through the relay too")
    a, b = stored(tmp_path / "a.zarr", side, 1), stored(tmp_path / "b.zarr", side, 2)
    # a preload that is a file finds nothing beside it
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    with LocalGrid(
        0, 1, offload="always", progress=False, memory="2GB", routes=routes, directory=tmp_path / "g"
    ) as grid:
        volunteers = [grid.add_volunteer(*RECORDER, *LIMITED) for _ in range(2)]
        grid.wait(2, 1)
        # Memory files count where they are the outputs; by other routes they are the cache, which has its own limit.
        kinds = ("RssAnon", "RssShmem") if routes == "auto" else ("RssAnon",)
        with Sampler(grid.processes, *kinds) as sampler:
            job = grid.lab.to_zarr(grid.lab.matmul(a, b), tmp_path / "c.zarr", compressors=None)
        assert job.progress["lab"] == 0
        assert job.certificate["complete"]
        size = side * side * 4 / 2**30
        peaks = {name: bytes_ / 1e6 for name, bytes_ in sampler.peaks.items()}
        report(
            f"{side}² float32 ({size:.2f} GiB an operand), {routes}: lab node {peaks['lab']:.0f} MB, "
            f"gateway {peaks['gateway']:.0f} MB, validator {peaks['validator-0']:.0f} MB"
        )
        for process in volunteers:
            said = [note.what.split(":") for note in notes.since(0) if note.pid == process.pid and ":" in note.what]
            baseline = next(int(value) for what, value in said if what == "baseline")
            peak = max(int(value) for what, value in said if what == "peak")
            used = sampler.peaks[process.name]
            report(
                f"  {process.name}: baseline {baseline / 1e6:.0f} MB, projected peak {peak / 1e6:.0f} MB, "
                f"used {(used - baseline) / peak:.2f} of it, limit 1.2"
            )
            assert used <= baseline + 1.2 * peak
    failed = [note for note in notes.since(0) if note.what.startswith("AttemptFailed")]
    assert not failed, "a task did not fit into what was projected"
    c = zarr.open_array(tmp_path / "c.zarr")
    rows = np.random.default_rng(3).integers(0, side, 4)
    left = np.stack([a[row] for row in rows])
    want = np.concatenate([left @ b[:, start : start + 2048] for start in range(0, side, 2048)], axis=1)
    np.testing.assert_allclose(np.stack([c[row] for row in rows]), want, rtol=1e-4)
    assert sampler.peaks["lab"] <= MOST
    assert sampler.peaks["gateway"] <= MOST


@pytest.mark.timeout(120)
def test_mapped_files_are_not_held_against_a_volunteer(tmp_path, full, report):
    """What it keeps mapped for later tasks is the page cache's: it is neither paused for it nor as large."""
    side, count, rng = 3072, 8 if full else 4, np.random.default_rng(0)
    with LocalGrid(volunteers=1, memory="512 MiB", offload="always", progress=False) as grid:
        volunteer = psutil.Process(grid.volunteers[0].pid)
        baseline = volunteer.memory_info().rss
        for number in range(count):
            path = tmp_path / f"{number}.zarr"
            array = zarr.create_array(path, shape=(side, side), chunks=(1024, 1024), dtype="f4", compressors=None)
            array[...] = rng.standard_normal((side, side), dtype="f4")
            x = da.from_zarr(path)
            product = x @ x[:256].T  # all of it is read, little is computed
            grid.lab.to_zarr(product, tmp_path / "product.zarr", overwrite=True, compressors=None)
        kept, log = volunteer.memory_info().rss - baseline, grid.volunteers[0].log.read_text()
    report(
        f"{count} products with {side}²: {count * side * side * 4 >> 20} MB were mapped, "
        f"{kept >> 20} MB more are resident"
    )
    assert "Pausing worker" not in log
    assert kept < 100 << 20
