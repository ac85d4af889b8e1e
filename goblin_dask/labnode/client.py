"""The researcher's side: `connect` to a lab node, a `Lab` to compute with, a `Job` for what takes its time."""

from __future__ import annotations

import json
import math
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import dask.array as da
import msgspec
import numpy as np
from dask.base import is_dask_collection, unpack_collections

from goblin_dask import config
from goblin_dask.errors import ConnectionLost, InputError, JobError, JobFailed, JobTimeout
from goblin_dask.graphs.capture.dask_internals import check_names, collections_in, expression_of
from goblin_dask.labnode.assemble import Values, join
from goblin_dask.labnode.jobs import FINAL, Result, Submission, Target
from goblin_dask.labnode.lab_actor import LabActor
from goblin_dask.labnode.line import Line, Releases
from goblin_dask.labnode.plan import Declared
from goblin_dask.labnode.progress import Bar, job_html, stands_still
from goblin_dask.messages import GridOffer
from goblin_dask.store.arrays import check_options
from goblin_dask.store.buffers import dtype_name
from goblin_dask.store.refs import ChunkRef

WORD_SECONDS = 10.0
"""After this time whoever waits for a job is told that it stands still, where it does."""


def connect(url: str | None = None, *, token: str | None = None, **options: Any) -> Lab:
    """Connect to a lab node.

    Parameters
    ----------
    url : str, optional
        ``http://host:port``; by default ``goblin.lab.url`` of the configuration.
    token : str, optional
        The laboratory's; by default ``goblin.lab.token``.
    **options
        Of `Lab`: ``verify``, ``offload``, ``fuse``, ``progress``.

    Raises
    ------
    ConnectionLost
        When nobody answers there.
    Refused
        When the token is wrong.
    """
    where = config.need("lab.url", url, "say where the lab node is, as http://HOST:PORT")
    lab = Lab(where, config.get("lab.token", token) or "", **options)
    try:
        lab.wait_for()  # asks, and so finds out now whether we are welcome
    except BaseException:
        lab.close()
        raise
    return lab


class Lab:
    """A connection to a lab node. Thread-safe.

    Parameters
    ----------
    url, token : str
    verify : str, optional
        Policy where a call does not say: ``auto``, ``recompute``, ``replicate`` or ``sample:p``.
    offload : str, optional
        ``auto``, ``always`` or ``never`` where a call does not say.
    fuse : bool
        Whether tasks may be joined into larger ones; without, each of Dask's tasks is verified on its own.
    progress : bool, optional
        Whether `compute`, `get` and `to_zarr` show a bar; by default where there is somebody to see it.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        verify: str | None = None,
        offload: str | None = None,
        fuse: bool = True,
        progress: bool | None = None,
    ):
        self.url, self._token = url, token
        self.verify, self.offload, self.fuse, self.progress = verify, offload, fuse, progress
        self._line = Line(url, token)

    def __repr__(self) -> str:
        return f"<Lab {self.url}>"

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; jobs go on."""
        self._line.close()

    # --- computing ------------------------------------------------------------------------------------------------
    def submit(
        self,
        *collections: Any,
        verify: str | None = None,
        offload: str | None = None,
        name: str = "",
        fuse: bool | None = None,
    ) -> Job:
        """Start to compute dask collections; returns at once.

        Parameters
        ----------
        *collections
            Dask arrays, or anything that `dask.compute` takes. With one, `Job.result` is its value, with more a tuple.
        verify : {"auto", "recompute", "replicate", "sample:p"}, optional
        offload : {"auto", "always", "never"}, optional
            ``auto`` sends to the grid what is worth the way.
        name : str, optional
            For your own eyes; it never leaves the laboratory.
        fuse : bool, optional
            Whether tasks may be joined; by default as the `Lab` says.
        """
        found, repack = unpack_collections(*collections)
        if not found:
            raise InputError("nothing to compute: no dask collection was given, such as a dask array")
        check_names(collections_in(collections))
        expression, keys = expression_of(found)
        arrays = tuple(declared(each) for each in found if type(each) is da.Array)
        submission = self._submission(expression, keys, verify, offload, name=name, declared=arrays, fuse=fuse)
        return Job(self, self._post(submission), repack, found, single=len(collections) == 1)

    def compute(self, *collections: Any, verify: str | None = None, offload: str | None = None) -> Any:
        """Compute dask collections, as `dask.compute` does. With one argument its value, with more a tuple."""
        if not any(map(is_dask_collection, collections)) and not unpack_collections(*collections)[0]:
            return collections[0] if len(collections) == 1 else collections
        with self.submit(*collections, verify=verify, offload=offload) as job, self._bar(job):
            return job.result()

    def get(self, graph: Any, keys: Any, **kwargs: Any) -> Any:
        """A Dask scheduler: ``x.compute(scheduler=lab.get)``, or ``dask.config.set(scheduler=lab.get)``.

        Keywords ``verify`` and ``offload`` are those of `submit`.
        """
        submission = self._submission(graph, keys, kwargs.get("verify"), kwargs.get("offload"))
        with Job(self, self._post(submission)) as job, self._bar(job):
            return job.result()

    def to_zarr(
        self,
        array: da.Array,
        path: Any,
        *,
        component: str = "",
        overwrite: bool = False,
        verify: str | None = None,
        offload: str | None = None,
        **options: Any,
    ) -> Job:
        """Compute an array into a Zarr array, block by block; it is there when this returns, or nothing is.

        Parameters
        ----------
        array : dask.array.Array
        path : path, URL or Zarr store
            In the laboratory's file system.
        component : str
            The array's name within a store that is a group.
        overwrite : bool
            Whether an array that is there may be replaced.
        **options
            Passed to `zarr.create_array`: ``compressors``, ``shards``, ….

        Returns
        -------
        Job
            Done; its certificate also stands in the array's attributes, under ``goblin_dask``.
        """
        check_options(options)
        job = self._write(array, path, component, overwrite, verify, offload, options)
        with self._bar(job):
            job.wait()
        return job

    def _write(
        self, array: Any, path: Any, component: str, overwrite: bool, verify: Any, offload: Any, options: Any
    ) -> Job:
        if not isinstance(array, da.Array):
            raise InputError(f"to_zarr takes a dask array, got {type(array).__name__}")
        dtype = dtype_name(array.dtype)
        if not any(np.isnan(n) for lengths in array.chunks for n in lengths):
            array = array.rechunk(tuple(max(lengths, default=1) or 1 for lengths in array.chunks))
        expression, keys = expression_of([array])
        target = Target(
            os.path.abspath(path) if isinstance(path, str | Path) and "://" not in str(path) else path,
            component,
            array.__dask_keys__(),
            array.chunks,
            dtype,
            overwrite,
            options,
        )
        return Job(
            self,
            self._post(self._submission(expression, keys, verify, offload, target=target, declared=(declared(array),))),
        )

    def _submission(
        self, graph: Any, keys: Any, verify: str | None, offload: str | None, fuse: bool | None = None, **more: Any
    ) -> Submission:
        fuse = self.fuse if fuse is None else fuse
        return Submission(graph, keys, verify or self.verify, offload or self.offload, fuse=fuse, **more)

    @contextmanager
    def _bar(self, job: Job) -> Iterator[None]:
        with Bar(job, self.progress):
            yield

    @property
    def offer(self) -> GridOffer:
        """What the volunteers offer now."""
        return self.wait_for()

    def wait_for(self, *, volunteers: int = 0, validators: int = 0) -> GridOffer:
        """Wait until so many are there."""
        try:
            body = self._line.request("GET", f"/offer?volunteers={volunteers}&validators={validators}")
            return msgspec.json.decode(body, type=GridOffer)
        except (JobError, InputError, msgspec.DecodeError) as error:
            raise ConnectionLost(
                f"something answers at {self.url}, but no lab node: is it the gateway's address? `goblin lab` says "
                "where researchers connect to"
            ) from error

    def jobs(self) -> list[dict[str, Any]]:
        """Status of all jobs of the lab node."""
        found: list[dict[str, Any]] = json.loads(self._line.request("GET", "/jobs"))
        return found

    def actor(self, kind: Callable[..., Any], *args: Any, name: str = "") -> LabActor:
        """Start an actor in the laboratory: an instance of a class, whose methods are called one at a time.

        Parameters
        ----------
        kind : type
            Sent as it is, pickled; it runs in the laboratory, never on a volunteer.
        *args
            For the instance.
        name : str, optional
            For your own eyes.

        Raises
        ------
        Exception
            What making the instance raises.
        """
        return LabActor.start(self, kind, args, name)

    def actors(self) -> list[dict[str, Any]]:
        """All actors of the lab node: ``key``, ``kind``, ``name``, and the seconds since the last call, ``idle``."""
        found: list[dict[str, Any]] = json.loads(self._line.request("GET", "/actors"))
        return found

    def matmul(self, a: Any, b: Any) -> da.Array:
        """`goblin_dask.matmul`, cut for the volunteers that are there now."""
        from goblin_dask.labnode.matmul import matmul

        return matmul(a, b, offer=self.offer)

    def run(self, program: Any, inputs: Sequence[Any], *, verify: str | None = None, offload: str | None = None) -> Any:
        """Compute a program whose arrays may be larger than any machine: each of its operators in blocks.

        Parameters
        ----------
        program : Program
            Such as `CapturedProgram.bound` gives, or a `Builder` makes.
        inputs : sequence of numpy.ndarray, zarr.Array or dask.array.Array
            In the program's order.
        verify, offload : str, optional
            As for `submit`.

        Returns
        -------
        numpy.ndarray, or tuple of them
            For results that do not fit here either, give `goblin_dask.tiled` of the same to `to_zarr`.

        Raises
        ------
        TooLarge
            When an operator that has no form in blocks needs more memory than the largest volunteer offers.
        """
        from goblin_dask.labnode.tiled.program import tiled

        found = tiled(program, inputs, offer=self.offer)
        return self.compute(*found if isinstance(found, tuple) else (found,), verify=verify, offload=offload)

    def _post(self, submission: Submission) -> dict[str, Any]:
        try:
            body = cloudpickle.dumps(submission, protocol=5)
        except Exception as error:
            raise InputError(
                f"the graph cannot be sent to the lab node, for something in it cannot be pickled: {error}"
            ) from error
        status: dict[str, Any] = json.loads(self._line.request("POST", "/jobs", body))
        return status


def declared(array: da.Array) -> Declared:
    """What a dask array says of its blocks."""
    return Declared(array.name, array.chunks, array.dtype.name)


class Job(Releases):
    """A job on the lab node.

    As a context manager it lets go of the job, and of its results in the laboratory, at the end.
    """

    def __init__(
        self,
        lab: Lab,
        status: dict[str, Any],
        repack: Callable[[Any], Any] | None = None,
        collections: Any = None,
        single: bool = False,
    ):
        self.lab, self.id, self.name = lab, status["id"], status["name"]
        self._last = status
        self._repack, self._collections, self._single = repack, collections, single
        self._result: Any = None
        self._certificate: dict[str, Any] | None = None
        self._has_result = False

    def __repr__(self) -> str:
        progress = self._last["progress"]
        return f"<Job {self.name}: {self._last['state']}, {progress['done']}/{progress['total']} tasks>"

    def _repr_html_(self) -> str:
        return job_html(self._refresh())

    def _refresh(self) -> dict[str, Any]:
        if self._last["state"] not in FINAL:
            self._last = json.loads(self.lab._line.request("GET", f"/jobs/{self.id}"))
        return self._last

    @property
    def status(self) -> str:
        """lowering, running, storing, done, failed or cancelled."""
        return str(self._refresh()["state"])

    @property
    def progress(self) -> dict[str, Any]:
        """Numbers of its progress, as `goblin_dask.labnode.actors.JobActor.progress` gives them."""
        found: dict[str, Any] = self._refresh()["progress"]
        return found

    @property
    def certificate(self) -> dict[str, Any]:
        """How every part was verified; complete when the job is done, and kept once `wait` or `result` has returned."""
        if self._certificate is None:
            final = self._refresh()["state"] in FINAL
            found: dict[str, Any] = json.loads(self.lab._line.request("GET", f"/jobs/{self.id}/certificate"))
            if not final:
                return found
            self._certificate = found
        return self._certificate

    def events(self) -> Iterator[dict[str, Any]]:
        """Its status whenever that changes, until it has ended."""
        with self.lab._line.response("GET", f"/jobs/{self.id}/events") as response:
            for line in response:
                if line.startswith(b"data: "):
                    self._last = json.loads(line[6:])
                    yield self._last

    def wait(self, timeout: float | None = None) -> Job:
        """Wait until it is done. Its certificate is kept then, also for when the lab node has gone.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; without end by default.

        Raises
        ------
        JobTimeout
            When it has not ended by then; it goes on.
        JobFailed, JobCancelled, TooLarge, or the error of the researcher's own function
        """
        self._take(timeout)
        return self

    def result(self, timeout: float | None = None) -> Any:
        """Its value; waits for it as `wait` does, and fetches it block by block."""
        if not self._has_result:
            found = self._take(timeout)
            self._result, self._has_result = self._assembled(found), True
        return self._result

    def _take(self, timeout: float | None = None) -> Result:
        end = math.inf if timeout is None else time.monotonic() + timeout
        warned = False
        while (body := self._ended(min(WORD_SECONDS, end - time.monotonic()))) is None:
            still = stands_still(self._last)
            if time.monotonic() >= end:
                progress = self._last["progress"]
                raise JobTimeout(
                    f"job {self.name} has not ended within {timeout:g} s ({progress['done']} of {progress['total']} "
                    f"tasks are done{'; ' * bool(still)}{still}): wait again, or cancel() it"
                )
            if still and not warned:
                warned = True
                warnings.warn(f"job {self.name} {still}", stacklevel=3)
        result = pickle.loads(body)  # noqa: S301 from the researcher's own laboratory
        if not isinstance(result, Result):
            raise JobFailed(f"the lab node sent a {type(result).__name__} for a result; is it of the same version?")
        self._certificate = result.certificate
        return result

    def _ended(self, seconds: float) -> bytes | None:
        """Its pickled result; None where it has not ended after so many seconds."""
        path = f"/jobs/{self.id}/result?wait={max(0.0, seconds):.3f}"
        with self.lab._line.response("GET", path) as response:
            body = response.read()
            if response.status != 202:
                return body
        self._last = json.loads(body)
        return None

    def _assembled(self, found: Result) -> Any:
        def fetch(ref: ChunkRef) -> Any:
            return self.lab._line.fetch(self.id, ref)

        if self._collections is None:
            return found.assemble(Values(found.values, fetch))
        whole = None
        if all(type(each) is da.Array for each in self._collections):
            whole = [join(each.__dask_keys__(), found.values, fetch) for each in self._collections]
        if whole is None or any(each is None for each in whole):
            whole = found.assemble(Values(found.values, fetch))
        values = self._repack(whole) if self._repack is not None else whole
        return values[0] if self._single else values

    def cancel(self) -> None:
        """Cancel it; when this returns it is gone, and so are its blobs."""
        self._last = json.loads(self.lab._line.request("POST", f"/jobs/{self.id}/cancel"))

    def release(self) -> None:
        """Let go of it: what it computed is kept no longer for its sake."""
        try:
            self.lab._line.request("DELETE", f"/jobs/{self.id}")
        except JobError:
            pass  # it was let go of before
