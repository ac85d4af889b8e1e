"""The ledger: look-ups at once, on disk when it says so, through kill -9."""

import sqlite3
import subprocess
import sys

import pytest

from goblin_dask.digest import digest
from goblin_dask.errors import StoreError
from goblin_dask.messages import ArraySpec, BlobRef, Verdict
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.ledger import Ledger

VERDICT = Verdict("algebraic", 0.1, 1e-9, ("v1",))


def task(n: int) -> str:
    return digest(str(n).encode())


def outputs(n: int) -> tuple[BlobRef, ...]:
    return (BlobRef(task(n), ArraySpec((n,), "uint8"), n, bytes(n)), BlobRef(task(n), ArraySpec((), "bool"), 1))


def test_what_was_recorded_is_found_by_the_next_process(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    done = [ledger.record(task(n), outputs(n), VERDICT) for n in range(1200)]
    found = ledger.lookup([task(3), task(5000), task(3)])
    assert list(found) == [task(3)]
    assert found[task(3)].outputs == outputs(3)
    ledger.withdraw(task(4)).result(10)
    [future.result(10) for future in done]
    ledger.close()
    again = Ledger(tmp_path / "ledger.db")
    found = again.lookup(task(n) for n in range(1200))
    assert set(found) == {task(n) for n in range(1200)} - {task(4)}
    assert found[task(1199)].verdict == VERDICT
    assert len(again) == 1199
    again.close()


def test_tasks_whose_blobs_are_gone_are_not_done(tmp_path):
    blobs, ledger = BlobStore(tmp_path / "blobs", grace=0), Ledger(tmp_path / "ledger.db")
    name = blobs.put(b"x" * 100_000)
    ledger.record(task(1), (BlobRef(name, ArraySpec((100_000,), "uint8"), 100_000),), VERDICT)
    ledger.record(task(2), (outputs(2)[0],), VERDICT)
    assert set(ledger.lookup([task(1), task(2)], blobs)) == {task(1), task(2)}
    blobs.retain(name)
    blobs.release(name)
    blobs.collect()
    assert set(ledger.lookup([task(1), task(2)], blobs)) == {task(2)}
    ledger.close()
    blobs.close()


def test_a_later_word_supersedes_one_that_waits(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    first, second = ledger.record(task(1), outputs(1), VERDICT), ledger.withdraw(task(1))
    assert ledger.lookup([task(1)]) == {}
    first.result(10)
    second.result(10)
    assert ledger.lookup([task(1)]) == {}
    ledger.close()


WRITER = """
import os, sys
from tests.store.test_ledger import *
ledger = Ledger(sys.argv[1])
for n in range(200):
    ledger.record(task(n), outputs(n), VERDICT).result()
    print(n, flush=True)
for n in range(200, 100_000):
    ledger.record(task(n), outputs(2), VERDICT)
    if n == 3000:
        os.kill(os.getpid(), 9)
"""


def test_what_was_acknowledged_survives_kill_9(tmp_path):
    path = tmp_path / "ledger.db"
    result = subprocess.run([sys.executable, "-c", WRITER, path], capture_output=True, text=True, check=False)
    assert result.returncode == -9, result.stderr
    acknowledged = [int(line) for line in result.stdout.split()]
    assert acknowledged == list(range(200))
    ledger = Ledger(path)
    found = ledger.lookup(task(n) for n in range(100_000))
    assert {task(n) for n in acknowledged} <= set(found)
    for name, entry in found.items():  # the others are there whole or not at all
        n = next(n for n in range(3001) if task(n) == name) if len(entry.outputs[0].inline) != 2 else 2
        assert entry.outputs[0].inline == bytes(n)
    ledger.close()


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    path = tmp_path / "ledger.db"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(StoreError, match="cannot be opened as a ledger"):
        Ledger(path)


def test_a_ledger_of_another_version_is_refused(tmp_path):
    path = tmp_path / "ledger.db"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(StoreError, match="version 99"):
        Ledger(path)


def test_a_writer_that_cannot_write_says_so(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger.db")

    def full(connection, batch):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(ledger, "_commit", full)
    with pytest.raises(StoreError, match="disk is full"):
        ledger.record(task(1), outputs(1), VERDICT).result(10)
    with pytest.raises(StoreError, match="disk is full"):
        ledger.record(task(2), outputs(2), VERDICT)
    ledger.close()
