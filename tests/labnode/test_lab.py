"""The researcher's interface, against a whole grid in this process."""

import asyncio
import copyreg
import gc
import http.client
import logging
import pickle
import threading
import warnings
from urllib.parse import urlsplit

import cloudpickle
import dask
import dask.array as da
import numpy as np
import pytest
import zarr

import goblin_dask as goblin
from goblin_dask.digest import digest
from goblin_dask.errors import (
    ConnectionLost,
    InputError,
    JobCancelled,
    JobError,
    JobFailed,
    JobTimeout,
    Refused,
    TooLarge,
)
from goblin_dask.gateway.limits import Limits
from goblin_dask.labnode import client
from goblin_dask.labnode.progress import NO_VALIDATOR, NO_VOLUNTEER
from goblin_dask.messages import BlobRef
from goblin_dask.testing.inprocess import InProcessGrid


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    limits = Limits(stop_grace=0.2)
    directory = tmp_path_factory.mktemp("grid")
    with InProcessGrid(volunteers=2, directory=directory, gateway_config={"limits": limits}) as grid:
        yield grid


@pytest.fixture
def lab(grid):
    return grid.lab


def array(shape, chunks, seed=0):
    return da.from_array(np.random.default_rng(seed).random(shape), chunks=chunks)


def test_compute_gives_what_dask_gives(lab):
    x = array((30, 20), 8)
    result = lab.compute(x @ x.T + 1)
    np.testing.assert_allclose(result, (x @ x.T + 1).compute(scheduler="sync"))
    assert type(result) is np.ndarray
    assert result.flags.writeable


def test_several_collections_at_once(lab):
    x = array((12, 12), 5)
    total, both = lab.compute(x.sum(), {"a": x.max(), "b": [x[:2], 7]})
    assert isinstance(total, np.float64)
    assert total == pytest.approx(float(x.sum().compute(scheduler="sync")))
    np.testing.assert_array_equal(both["b"][0], x[:2].compute(scheduler="sync"))
    assert both["b"][1] == 7


def test_what_is_no_collection_comes_back(lab):
    assert lab.compute(3) == 3
    assert lab.compute(3, "a") == (3, "a")
    with pytest.raises(InputError, match="no dask collection was given"):
        lab.submit(3)


def test_as_a_scheduler(lab):
    x = array((20, 20), 7)
    want = x.mean().compute(scheduler="sync")
    assert x.mean().compute(scheduler=lab.get) == pytest.approx(want)
    with dask.config.set(scheduler=lab.get):
        assert x.mean().compute() == pytest.approx(want)


def test_delayed_and_objects_run_in_the_laboratory(lab):
    value = dask.delayed(lambda n: {"n": n, "text": "t" * n})(3)
    assert lab.compute(value) == {"n": 3, "text": "ttt"}


def test_masked_arrays_keep_their_masks(lab):
    x = array((10, 10), 4)
    expression = da.ma.masked_greater(x, 0.5) + 1
    got, want = lab.compute(expression), expression.compute(scheduler="sync")
    np.testing.assert_array_equal(got.mask, want.mask)
    np.testing.assert_array_equal(got.filled(0), want.filled(0))


def test_a_job_tells_how_it_went(lab):
    x = array((40, 40), 10, seed=1)
    with lab.submit(x @ x, name="gram") as job:
        states = [status["state"] for status in job.events()]
        assert states[-1] == "done"
        job.wait()
        progress = job.progress
        assert progress["done"] == progress["total"]
        assert progress["grid"] == sum(progress["methods"].values()) > 0
        assert job.certificate["complete"] is True
        assert job.certificate["volunteers"] in (1, 2)
        assert "gram" in job._repr_html_()
        assert "done" in repr(job)


def test_what_was_accepted_is_not_computed_again(grid, lab):
    data = array((16, 16), 8, seed=5)
    with lab.submit(data.T * 2) as job:
        job.wait()
        assert job.progress["reused"] == 0
    with lab.submit(data.T * 2) as job:
        np.testing.assert_array_equal(job.result(), (data.T * 2).compute(scheduler="sync"))
        assert job.progress["reused"] == job.progress["grid"] == 4


def test_offload_never_runs_everything_here(lab):
    x = array((16, 16), 8, seed=6)
    with lab.submit(x + 1, offload="never") as job:
        np.testing.assert_array_equal(job.result(), (x + 1).compute(scheduler="sync"))
        assert job.progress["grid"] == 0
        assert job.progress["lab"] == 4
        assert job.progress["reasons"] == {'offload="never"': 4}
        assert list(job.certificate["methods"]) == ["laboratory"]


def test_a_function_that_raises_shows_its_own_error(lab):
    def fails(block):
        raise KeyError("this block is bad")

    x = array((8, 8), 4).map_blocks(fails, dtype=float, meta=np.empty((0, 0)))
    with pytest.raises(KeyError, match="this block is bad") as caught:
        lab.compute(x)
    assert isinstance(caught.value.__cause__, JobFailed)

    def misses(block):
        raise FileNotFoundError("calibration.txt")

    with pytest.raises(FileNotFoundError, match=r"calibration\.txt"):
        lab.compute(array((8, 8), 4).map_blocks(misses, dtype=float, meta=np.empty((0, 0))))


@pytest.fixture
def dask_log(caplog, monkeypatch):
    """What Dask logs: its loggers do not pass it on."""
    monkeypatch.setattr(logging.getLogger("distributed"), "propagate", True)
    return caplog


def test_cancel_gives_up_what_waits(grid, lab, dask_log):
    """A task that waits for a volunteer that never answers is gone when `cancel` returns."""
    started, go_on = threading.Event(), threading.Event()
    grid_run = type(grid.workers[0].runner).run

    async def stuck(self, work):
        started.set()
        await asyncio.to_thread(go_on.wait)
        return await grid_run(self, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(grid.workers[0].runner), "run", stuck)
        job = lab.submit(array((8, 8), 4, seed=9) * 3)
        assert started.wait(30)
        job.cancel()
        assert job.status == "cancelled"
        assert grid.node._link.outstanding == 0
        go_on.set()
    with pytest.raises(JobCancelled):
        job.wait()
    job.release()
    x = array((8, 8), 4, seed=9) * 3
    np.testing.assert_array_equal(lab.compute(x), x.compute(scheduler="sync"))
    gc.collect()
    assert "Attempting to reschedule" not in dask_log.text
    assert "exception was never retrieved" not in dask_log.text


GO_ON = threading.Event()


def held(block):
    GO_ON.wait()
    return block + 0


def test_waiting_has_an_end_where_one_is_given(grid, lab):
    x = array((8, 8), 8).map_blocks(held, dtype=float, meta=np.empty((0, 0)))
    job = lab.submit(x, name="slow")
    for wait in (job.wait, job.result):
        with pytest.raises(JobTimeout, match=r"job slow has not ended within 0 s \(\d of \d tasks are done\)"):
            wait(timeout=0)
    GO_ON.set()
    assert job.result(timeout=30).shape == (8, 8)
    assert job.wait(timeout=0) is job
    job.release()


class TestNobody:
    """Jobs that wait for somebody who is not there."""

    def test_says_so(self, monkeypatch):
        monkeypatch.setattr(client, "WORD_SECONDS", 0.1)
        with InProcessGrid(volunteers=0, validators=0, fuse=False) as grid:
            job = grid.lab.submit(array((8, 8), 4) + 1, name="lonely")
            for status in job.events():
                if status["progress"].get("reasons"):
                    break
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                with pytest.raises(JobTimeout, match="are done; waits for a volunteer: there is none"):
                    job.result(timeout=0.5)
            (warning,) = [str(each.message) for each in said]
            assert warning == f"job lonely {NO_VOLUNTEER} (4 tasks)"
            assert job.progress["reasons"] == {NO_VOLUNTEER: 4}
            grid.run(grid._add("volunteer", 0))
            for status in job.events():
                if status["progress"].get("reasons") == {NO_VALIDATOR: 4}:
                    break
            grid.run(grid._add("validator", 0))
            assert job.result(timeout=30).shape == (8, 8)
            assert job.progress["reasons"] == {}


def test_the_certificate_is_kept_with_the_result(lab):
    job = lab.submit(array((8, 8), 4, seed=10) * 2)
    job.result()
    job.release()
    assert job.certificate["complete"] is True


class TestToZarr:
    def test_writes_blocks_and_the_certificate(self, lab, tmp_path):
        x = array((50, 30), (20, 30), seed=2)
        job = lab.to_zarr(x * 2, tmp_path / "x.zarr")
        stored = zarr.open_array(tmp_path / "x.zarr")
        np.testing.assert_array_equal(stored[:], (x * 2).compute(scheduler="sync"))
        assert stored.chunks == (20, 30)
        assert stored.attrs["goblin_dask"]["certificate"] == job.certificate
        assert job.certificate["parts"] == 3
        assert [path.name for path in tmp_path.iterdir()] == ["x.zarr"]

    def test_reads_what_it_wrote(self, lab, tmp_path):
        x = array((64, 64), 32, seed=3)
        lab.to_zarr(x, tmp_path / "g.zarr", component="a", compressors=None)
        y = da.from_zarr(str(tmp_path / "g.zarr"), component="a")
        np.testing.assert_allclose(lab.compute(y @ y), x.compute(scheduler="sync") @ x.compute(scheduler="sync"))

    def test_a_failure_leaves_nothing(self, lab, tmp_path):
        def fails(block):
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            lab.to_zarr(array((8, 8), 4).map_blocks(fails, dtype=float, meta=np.empty((0, 0))), tmp_path / "f.zarr")
        assert list(tmp_path.iterdir()) == []

    def test_overwrites_only_when_told(self, lab, tmp_path):
        x = array((4, 4), 2)
        lab.to_zarr(x, tmp_path / "o.zarr")
        with pytest.raises(InputError, match="is there already"):
            lab.to_zarr(x + 1, tmp_path / "o.zarr")
        lab.to_zarr(x + 1, tmp_path / "o.zarr", overwrite=True)
        np.testing.assert_array_equal(zarr.open_array(tmp_path / "o.zarr")[:], (x + 1).compute(scheduler="sync"))
        assert [path.name for path in tmp_path.iterdir()] == ["o.zarr"]

    def test_irregular_blocks_are_made_equal(self, lab, tmp_path):
        x = array((20, 20), ((3, 7, 10), (20,)), seed=4)
        lab.to_zarr(x, tmp_path / "i.zarr")
        np.testing.assert_array_equal(zarr.open_array(tmp_path / "i.zarr")[:], x.compute(scheduler="sync"))

    def test_refuses_what_it_cannot_write(self, lab, tmp_path):
        x = array((20, 20), 7)
        with pytest.raises(InputError, match="takes a dask array, got ndarray"):
            lab.to_zarr(np.ones(3), tmp_path / "r.zarr")
        with pytest.raises(InputError, match="unknown lengths"):
            lab.to_zarr(x[x > 0.5], tmp_path / "r.zarr")
        with pytest.raises(InputError, match="objects"):
            lab.to_zarr(da.from_array(np.array([None, 1], object), chunks=1), tmp_path / "r.zarr")
        for option in ({"chunks": (5, 5)}, {"shape": (1,)}, {"dtype": "f4"}, {"foo": 1}):
            with pytest.raises(InputError, match=f"to_zarr .* {next(iter(option))}="):
                lab.to_zarr(x, tmp_path / "r.zarr", **option)
        assert list(tmp_path.iterdir()) == []


class TestWrongInput:
    def test_unreachable(self):
        with pytest.raises(ConnectionLost, match="cannot be reached"):
            goblin.connect("http://127.0.0.1:9", token="x")
        with pytest.raises(InputError, match="http://HOST:PORT"):
            goblin.connect("lab:8788", token="x")

    def test_wrong_token(self, lab):
        with pytest.raises(Refused, match="wrong token"):
            goblin.connect(lab.url, token="wrong")

    def test_nothing_is_unpickled_without_the_token(self, lab):
        class Bomb:
            def __reduce__(self):
                return (pytest.fail, ("it was unpickled",))

        connection = http.client.HTTPConnection(urlsplit(lab.url).netloc)
        connection.request("POST", "/jobs", cloudpickle.dumps(Bomb()))
        assert connection.getresponse().status == 401
        connection.close()

    def test_policies_and_placements(self, lab):
        x = array((4, 4), 2)
        with pytest.raises(InputError, match="'sometimes' is no policy"):
            lab.compute(x, verify="sometimes")
        with pytest.raises(InputError, match='offload must be "auto"'):
            lab.compute(x, offload="maybe")

    def test_too_large(self, grid, lab):
        x = da.zeros((100_000, 10_000), chunks=-1)
        with pytest.raises(TooLarge, match="the largest volunteer offers"):
            lab.compute((x + 1).sum())

    def test_its_numbers_reach_the_researcher(self, monkeypatch):
        monkeypatch.setattr(copyreg, "dispatch_table", {})  # Dask's own way to pickle the errors that it has seen
        again = pickle.loads(pickle.dumps(TooLarge(3, 2, "buy more")))
        assert (again.needs, again.offers) == (3, 2)
        assert str(again).endswith("buy more")

    def test_missing_zarr_path(self, lab, tmp_path):
        with pytest.raises((FileNotFoundError, InputError)):
            lab.compute(da.from_zarr(str(tmp_path / "nothing.zarr")))

    def test_a_job_that_is_gone(self, lab):
        job = lab.submit(array((4, 4), 2))
        job.wait()
        job.release()
        with pytest.raises(JobError, match="no such job"):
            job.wait()


def test_matmul_is_cut_for_the_grid(lab, tmp_path):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-5, 5, (40, 30)).astype("i1"), rng.integers(-5, 5, (30, 20)).astype("i1")
    result = lab.compute(lab.matmul(a, b))
    np.testing.assert_array_equal(result, a @ b)
    assert result.dtype == np.int8


class TestSampling:
    def test_what_was_drawn_has_matched_before_the_job_is_done(self, lab):
        x = array((48, 48), 8, seed=21)
        lab_once = goblin.Lab(lab.url, lab._token, offload="always", fuse=False, progress=False)
        with lab_once, lab_once.submit(x * 5, verify="sample:0.3") as job:
            np.testing.assert_array_equal(job.result(), (x * 5).compute(scheduler="sync"))
            methods = job.progress["methods"]
            assert sum(methods.values()) == 36
            assert methods.get("unchecked", 0) < 36

    def test_a_wrong_result_that_is_drawn_is_computed_again(self, tmp_path):
        """A volunteer lies until the first of its results is proven wrong; whatever of it was used is not returned."""
        lies = []

        def tamper(number, runner):
            if number == 0:
                compute = runner._compute

                def lie(program, inputs, attempt, trace):
                    outputs, seconds = compute(program, inputs, attempt, trace)
                    for output in outputs:
                        data = np.frombuffer(output.ref.inline, output.ref.spec.dtype) + 1
                        output.ref = BlobRef(digest(data), output.ref.spec, output.ref.nbytes, data.tobytes())
                    lies.append(attempt)
                    return outputs, seconds

                runner._compute = lie

        x = array((40, 40), 4, seed=22)
        with (
            InProcessGrid(
                volunteers=2, fuse=False, directory=tmp_path, tamper=tamper, gateway_config={"probe": False}
            ) as grid,
            grid.lab.submit(x - 3, verify="sample:0.9") as job,
        ):
            np.testing.assert_array_equal(job.result(), (x - 3).compute(scheduler="sync"))
        assert lies
