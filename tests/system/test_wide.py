"""A network whose matrices of weights are larger than any volunteer: drawn where they are used, never stored."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

import goblin_dask as goblin
from goblin_dask.errors import TooLarge
from goblin_dask.graphs.builder import Builder
from goblin_dask.local import LocalGrid
from goblin_dask.messages import ArraySpec
from goblin_dask.testing.inprocess import InProcessGrid
from tests.system.bench import RECORDER, Notes
from tests.system.test_memory import LIMITED, Sampler

pytestmark = pytest.mark.system

LAYERS, BATCH = 3, 64
UNIT = 2.0**-24


def perceptron(width):
    """Layers of weights that are uniform in [-1/2, 1/2) times a scale, and rectified."""
    build = Builder()
    h = build.input(ArraySpec((BATCH, width), "float32"))
    keys = [build.input(ArraySpec((2,), "uint64")) for _ in range(LAYERS)]
    for key in keys:
        (w,) = build.add("random_uniform", [key], shape=(width, width), dtype="float32")
        (w,) = build.add("subtract", [w, build.constant(0.5, "float32")])
        (w,) = build.add("multiply", [w, build.constant(scale(width), "float32")])
        (h,) = build.add("matmul", [h, w])
        (h,) = build.add("relu", [h])
    program, slots = build.finish([h])
    return program, slots


def scale(width):
    return np.float32((24 / width) ** 0.5)


def by_hand(x, keys, width):
    """Some rows of the result, and what may be lost in each sum; weights from the generator itself."""
    h = x.astype(np.float64)
    for key in keys:
        after, bound = np.zeros(h.shape), np.zeros(h.shape)
        rows = max(1, min(width, 8_000_000 // width))
        for start in range(0, width, rows):
            count = min(rows, width - start)
            first = start * width
            words = np.random.Philox(key=key, counter=first // 4).random_raw(first % 4 + count * width)[first % 4 :]
            # 24 bits a float32 number, as NumPy's generators make them
            w = (((words >> np.uint64(40)).astype(np.float32) * np.float32(UNIT)) - np.float32(0.5)) * scale(width)
            w = w.reshape(count, width).astype(np.float64)
            after += h[:, start : start + count] @ w
            bound += 2 * width * UNIT * np.abs(h[:, start : start + count]) @ np.abs(w)
        h = np.maximum(after, 0)
    return h, bound


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_network_larger_than_its_volunteers(tmp_path, full, monkeypatch, report):
    width = 60_000 if full else 3_000
    notes = Notes(tmp_path)
    monkeypatch.setenv("GOBLIN_TEST_NOTES", notes.path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    program, slots = perceptron(width)
    x = np.random.default_rng(0).standard_normal((BATCH, width)).astype("f4")
    keys = [np.array([number, 7], np.uint64) for number in range(LAYERS)]
    inputs = [[x, *keys][slot] for slot in slots]
    with LocalGrid(0, 1, offload="always", progress=False, memory="1GB", directory=tmp_path / "g") as grid:
        volunteers = [grid.add_volunteer(*RECORDER, *LIMITED) for _ in range(2)]
        grid.wait(2, 1)
        started = time.perf_counter()
        with Sampler(grid.processes, "RssAnon", "RssShmem") as sampler:
            job = grid.lab.submit(goblin.tiled(program, inputs, offer=grid.lab.offer))
            found = job.result()
        seconds = time.perf_counter() - started
        assert job.progress["lab"] == 0
        assert job.certificate["complete"]
        stored = sum(file.stat().st_size for file in (tmp_path / "g" / "lab").rglob("*") if file.is_file())
        shares = []
        for process in volunteers:
            said = [note.what.split(":") for note in notes.since(0) if note.pid == process.pid and ":" in note.what]
            baseline = next(int(value) for what, value in said if what == "baseline")
            peak = max(int(value) for what, value in said if what == "peak")
            shares.append((sampler.peaks[process.name] - baseline) / peak)
    notes.close()
    rows = [0, 17, 63] if full else list(range(BATCH))
    wanted, error = by_hand(x[rows], keys, width)
    apart = np.abs(found[rows] - wanted)
    assert (apart <= error).all()
    distance = float(np.sqrt(np.mean(apart**2)) / np.sqrt(np.mean(wanted**2)))
    assert distance < 1e-5  # the bound of any order of so long a sum is loose
    assert stored < 8 * LAYERS * found.nbytes + 20e6
    assert max(shares) <= 1.2
    report(
        f"{LAYERS} layers of {width} × {width} float32 ({width * width * 4 / 1e9:.2f} GB each) on volunteers of 1 GB: "
        f"{seconds:.0f} s, {stored / 1e6:.0f} MB stored, memory {max(shares):.2f} of what was projected (limit 1.2), "
        f"error at most {float((apart / error).max()):.2g} of the tolerance, {distance:.1e} in all; "
        f"{job.certificate['summary']}"
    )


def test_what_has_no_blocks_is_refused_with_the_numbers():
    with InProcessGrid(memory="500MB") as grid:
        build = Builder()
        a = build.input(ArraySpec((6000, 6000), "float64"))
        program, _ = build.finish(build.add("inv", [a]))
        with pytest.raises(TooLarge, match=r"inv of float64 \(6000, 6000\) has no form in smaller blocks"):
            grid.lab.run(program, [np.zeros((6000, 6000))])
        build = Builder()
        x = build.input(ArraySpec((300, 50), "float32"))
        (y,) = build.add("_softmax", [x], dim=1)
        program, _ = build.finish(build.add("sum", [y], axes=(0,)))
        data = np.random.default_rng(1).standard_normal((300, 50)).astype("f4")
        exact = np.exp(data) / np.exp(data).sum(1, keepdims=True)
        np.testing.assert_allclose(grid.lab.run(program, [data]), exact.sum(0), rtol=1e-5)
