"""What a machine says of itself."""

import subprocess
import sys
import threading

import dask.config
import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from goblin_dask.errors import GoblinError
from goblin_dask.graphs.operators import CATALOGUE_VERSION
from goblin_dask.volunteer import machine
from goblin_dask.volunteer.limits import Limits


@pytest.fixture(autouse=True)
def folder(tmp_path):
    with dask.config.set({"goblin.volunteer.directory": str(tmp_path / "state")}):
        yield tmp_path / "state"


def test_the_key_is_random_and_kept(folder):
    keys = []
    threads = [threading.Thread(target=lambda: keys.append(machine.host_key())) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(set(keys)) == 1
    assert (folder / "host-key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == ["host-key"]
    (folder / "host-key").unlink()
    assert machine.host_key() != keys[0]


def test_a_spoilt_key_is_said(folder):
    folder.mkdir()
    (folder / "host-key").write_text("hostname")
    with pytest.raises(GoblinError, match="delete it"):
        machine.host_key()


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        dask.config.set({"goblin.volunteer.directory": str(tmp_path / "file")}),
        pytest.raises(GoblinError, match=r"set goblin\.volunteer\.directory"),
    ):
        machine.host_key()


def test_a_machine_describes_itself():
    told = machine.describe(Limits(memory=5, cache=6, threads=2, prefetch=1))
    assert (told.memory, told.cache, told.threads, told.slots) == (5, 6, 2, 2)
    assert told.flops > 1e8
    assert told.catalogue == CATALOGUE_VERSION
    assert told.lacks == ()
    assert dict(told.versions)["numpy"] == np.__version__
    assert "blas" in dict(told.versions)


def test_a_broken_blas_is_noticed(monkeypatch):
    honest = np.ones

    class Mixed(np.ndarray):
        def __matmul__(self, other):
            return np.asarray(self) @ np.asarray(other) * 0 + 3  # another thread's rows

    monkeypatch.setattr(machine.np, "ones", lambda *args, **kwargs: honest(*args, **kwargs).view(Mixed))
    with pytest.raises(GoblinError, match="rows of another thread"):
        machine.check_blas()


def test_threads_are_set_for_good():
    before = {lib["filepath"]: lib["num_threads"] for lib in ThreadpoolController().info()}
    kept = machine.use_threads(1)
    assert all(lib["num_threads"] == 1 for lib in ThreadpoolController().info())
    kept.restore_original_limits()
    assert {lib["filepath"]: lib["num_threads"] for lib in ThreadpoolController().info()} == before


def test_threads_are_set_for_every_blas_that_tasks_use():
    """NumPy and SciPy each have one, and SciPy loads its own only when it is asked for."""
    code = (
        "from goblin_dask.volunteer import machine; kept = machine.use_threads(1)\n"
        "import scipy.linalg.blas; from threadpoolctl import ThreadpoolController\n"
        "found = [lib['num_threads'] for lib in ThreadpoolController().info() if lib['user_api'] == 'blas']\n"
        "assert found == [1] * len(found), found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_blas_that_is_used_for_the_first_time_takes_its_memory_before_the_first_task():
    code = (
        "import psutil, numpy as np; from goblin_dask.volunteer import machine; kept = machine.use_threads(1)\n"
        "machine.check_blas(); before = psutil.Process().memory_info().data\n"
        "from goblin_dask.graphs.operators.contraction import _gemm; c = np.ones((300, 300), 'f4'); _gemm(c, c, c)\n"
        "assert psutil.Process().memory_info().data - before < 8 << 20"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
