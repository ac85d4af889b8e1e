"""`LocalGrid`: every actor a process of its own; volunteers are stock Dask workers."""

import os
import signal
import subprocess
import sys
import time

import dask.array as da
import numpy as np
import psutil
import pytest
import zarr

import goblin_dask as goblin
from goblin_dask.errors import ConnectionLost, InputError
from goblin_dask.local import Process

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def grid():
    with goblin.LocalGrid(volunteers=2, offload="always", progress=False) as grid:
        yield grid


def test_the_program_of_the_readme(grid, tmp_path):
    rng = np.random.default_rng(0)
    a, b = rng.random((300, 200)), rng.random((200, 250))
    zarr.create_array(tmp_path / "a.zarr", data=a, chunks=(100, 100))
    zarr.create_array(tmp_path / "b.zarr", data=b, chunks=(100, 100))
    lab = grid.lab
    c = da.from_zarr(tmp_path / "a.zarr") @ da.from_zarr(tmp_path / "b.zarr")
    job = lab.submit(c.sum(axis=0))
    np.testing.assert_allclose(job.result(), (a @ b).sum(axis=0))
    assert job.progress["grid"] > 0
    assert job.progress["lab"] == 0
    np.testing.assert_allclose(lab.compute(c[:10]), (a @ b)[:10])
    lab.to_zarr(c, tmp_path / "c.zarr")
    stored = zarr.open_array(tmp_path / "c.zarr")
    np.testing.assert_allclose(stored[:], a @ b)
    assert stored.attrs["goblin_dask"]["certificate"]["complete"]
    assert c.mean().compute(scheduler=lab.get) == pytest.approx((a @ b).mean())


def test_a_large_result_comes_whole(grid):
    x = np.random.default_rng(1).random((1500, 1000))
    np.testing.assert_array_equal(grid.lab.compute(da.from_array(x, chunks=500) * 2), x * 2)


def test_processes_are_what_a_volunteer_types(grid):
    command = psutil.Process(grid.volunteers[0].pid).cmdline()
    assert command[1:5] == ["-m", "dask", "worker", grid.address]
    assert "--preload" in command
    with pytest.raises(InputError, match="at least 0"):
        goblin.LocalGrid(volunteers=-1)


def test_a_process_that_does_not_start_shows_its_log(grid, tmp_path):
    process = grid._process("lab", ["-m", "goblin_dask.cli", "lab", "goblin://127.0.0.1:9", "--port", "0"])
    with pytest.raises(ConnectionLost, match="cannot be reached"):
        grid._up(process)


def test_memory_that_is_none_is_refused_before_anything_starts():
    with pytest.raises(InputError, match="memory='potato': a number of bytes is needed"):
        goblin.LocalGrid(memory="potato")


def test_the_end_of_a_log_is_whole_lines(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("Usage: dask worker [OPTIONS]\n\nError: no such option\n\n")
    process = Process("x", [], log, {})
    assert process.tail() == log.read_text().strip()
    assert process.tail(30) == "Error: no such option"


def test_no_process_outlives_its_parent(tmp_path):
    program = (
        "import goblin_dask, sys\n"
        f"grid = goblin_dask.LocalGrid(volunteers=1, validators=0, directory={str(tmp_path)!r})\n"
        "names = [grid.gateway, grid.lab_node, *grid.volunteers, *grid.validators]\n"
        "print(*[process.pid for process in names], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 3
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(10)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_a_grid_stops_all_it_started(tmp_path):
    with goblin.LocalGrid(volunteers=1, validators=0, directory=tmp_path) as grid:
        children = [psutil.Process(each.pid) for each in (grid.gateway, grid.lab_node, *grid.volunteers)]
        begun = time.monotonic()
    assert time.monotonic() - begun < 20
    _, alive = psutil.wait_procs(children, timeout=1)
    assert not alive
    assert {"gateway.log", "lab.log", "volunteer-0.log"} <= {path.name for path in tmp_path.iterdir()}
