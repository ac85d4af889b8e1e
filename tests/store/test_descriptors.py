"""Copies of memory files, on every medium."""

import os
import resource
import tempfile
from pathlib import Path

import numpy as np
import pytest

from goblin_dask.store.descriptors import copy_file, memory_file


@pytest.mark.parametrize("nbytes", [0, 1, (1 << 16) - 1, 1 << 16, (1 << 16) + 5, (17 << 20) + 3])
@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("medium", ["disk", "memory"])
def test_a_memory_file_is_copied(tmp_path, nbytes, cold, medium):
    data = np.random.default_rng(0).bytes(nbytes)
    fd = memory_file([data])
    with tempfile.TemporaryDirectory(dir=tmp_path if medium == "disk" else "/dev/shm") as folder:
        path = Path(folder, "copy")
        copy_file(fd, path, nbytes, cold=cold)
        assert path.read_bytes() == data
        with pytest.raises(FileExistsError):
            copy_file(fd, path, nbytes, cold=cold)
    os.close(fd)


def test_a_medium_that_is_full_is_said(tmp_path):
    fd = memory_file([bytes(1 << 20)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            copy_file(fd, tmp_path / "copy", 1 << 20, cold=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        os.close(fd)
