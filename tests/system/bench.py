"""What the tests with real processes share: notes of what workers do, a grid whose jobs can be hit midway."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import dask.array as da
import numpy as np
import zarr

from goblin_dask.local import LocalGrid

RECORDER = ("--preload", str(Path(__file__).with_name("recorder.py")))
SIDE = 2304
"""Of the products: 24 GFLOP each, half a second of one core and more."""


@dataclass(frozen=True)
class Note:
    """A worker did something."""

    time: float
    pid: int
    what: str
    attempt: str

    @property
    def task(self):
        return self.attempt.partition("#")[0]


class Notes:
    """What the workers with the recorder tell, in order."""

    def __init__(self, directory):
        self.all: list[Note] = []
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.path = str(directory / "notes")
        self._socket.bind(self.path)
        self._thread = threading.Thread(target=self._listen, daemon=True)  # of a fixture that failed, it has no end
        self._thread.start()

    def _listen(self):
        while data := self._socket.recv(1000):
            pid, what, attempt = data.decode().split(" ")
            with self._changed:
                self.all.append(Note(time.monotonic(), int(pid), what, attempt))
                self._changed.notify_all()

    def mark(self):
        """A moment; `wait` and `since` look at what comes after it."""
        with self._changed:
            return len(self.all)

    def since(self, mark, *what):
        """Notes after `mark`, of these kinds."""
        with self._changed:
            return [note for note in self.all[mark:] if not what or note.what in what]

    def wait(self, mark, condition, seconds=60.0):
        """First note after `mark` of which `condition` is true; waits for it."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                found = next((note for note in self.all[mark:] if condition(note)), None)
                if found is not None:
                    return found
                assert self._changed.wait(deadline - time.monotonic()), f"not within {seconds} s: {self.all[mark:]}"

    def close(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self.path)
        self._thread.join()
        self._socket.close()


def until(condition, seconds=60.0):
    """What `condition` gives once it gives something; for what only shows to those who ask."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)  # between two questions, not in place of an event
    return found


class Bench:
    """A grid of processes with recorders, and products that take a second each."""

    def __init__(self, directory, *, tasks=4, **options):
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.notes = Notes(directory)
        self.grid = LocalGrid(0, 0, directory=directory / "grid", offload="always", progress=False, **options)
        self.tasks = tasks
        self._factor = 1.0
        rng = np.random.default_rng(0)
        self.x, self.y = (rng.random((tasks, SIDE, SIDE)) for _ in "xy")
        for name, data in (("x", self.x), ("y", self.y)):
            array = zarr.create_array(
                directory / f"{name}.zarr", shape=data.shape, chunks=(1, SIDE, SIDE), dtype="f8", compressors=None
            )
            array[:] = data

    def close(self):
        self.grid.close()
        self.notes.close()

    # --- workers ------------------------------------------------------------------------------------------------
    def volunteer(self, address=""):
        """A further volunteer, joined."""
        return self._joined(lambda: self.grid.add_volunteer(*RECORDER, address=address))

    @contextlib.contextmanager
    def guest(self, address=""):
        """A volunteer for a while."""
        process = self.volunteer(address)
        try:
            yield process
        finally:
            process.kill()

    def validator(self):
        """A further validator, joined."""
        return self._joined(lambda: self.grid.add_validator(*RECORDER))

    def _joined(self, start):
        mark = self.notes.mark()
        os.environ["GOBLIN_TEST_NOTES"] = self.notes.path
        process = start()
        del os.environ["GOBLIN_TEST_NOTES"]
        self.notes.wait(mark, lambda note: note.pid == process.pid and note.what == "joined")
        return process

    def ensure(self, volunteers):
        """So many volunteers that run, the newest."""
        running = [process for process in self.grid.volunteers if process.running]
        while len(running) < volunteers:
            running.append(self.volunteer())
        if not any(process.running for process in self.grid.validators):
            self.validator()
        return running[len(running) - volunteers :]

    @property
    def status(self):
        """Of the gateway."""
        with urlopen(f"http://{self.grid.address.partition('://')[2]}/goblin/status.json") as response:
            return json.load(response)

    # --- jobs ---------------------------------------------------------------------------------------------------
    def submit(self):
        """A job of at least `tasks` tasks that nobody has computed before."""
        self._factor *= 2  # the right answer is the same numbers with other exponents
        x, y = (da.from_zarr(str(self.directory / f"{name}.zarr")) for name in "xy")
        self.started = time.monotonic()
        return self.grid.lab.submit(x @ (y * self._factor))

    def check(self, job):
        """The job is done, and its answer right."""
        result = job.result()
        assert result.shape == self.x.shape
        rng = np.random.default_rng(1)
        v = rng.random((SIDE, 1)) - 0.5
        want = self.x @ (self.y @ v) * self._factor
        bound = 4 * SIDE * 2.0**-53 * (np.abs(self.x) @ (np.abs(self.y) @ np.abs(v))) * self._factor
        assert (np.abs(result @ v - want) <= bound).all()
        rows = rng.integers(0, SIDE, 3)
        np.testing.assert_allclose(result[:, rows], self.x[:, rows] @ self.y * self._factor, rtol=1e-12)

    def account(self, mark, job):
        """What it took, as text; nothing may be computed that had been accepted already.

        A worker is told within milliseconds, a busy machine may need longer: a computation that began within a second
        after the acceptance of its task is one that was under way.
        """
        accepted = {}
        for note in self.notes.since(mark, "Checked:accepted"):
            accepted.setdefault(note.task, note.time)
        progress = job.progress
        assert progress["grid"] == len(accepted) >= self.tasks, (progress, accepted)
        assert progress["reused"] == 0
        begun = self.notes.since(mark, "computes")
        again = [note for note in begun if note.time > accepted.get(note.task, np.inf) + 1.0]
        assert not again, again
        done = self.notes.since(mark, "computed")
        checks = self.notes.since(mark, "checks")
        return (
            f"{len(accepted)} tasks: {len(begun)} computations begun, {len(done)} finished, {len(checks)} checks, "
            f"{time.monotonic() - self.started:.1f} s"
        )
