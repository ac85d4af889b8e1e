"""Blobs: by digest, counted, capped, quarantined, reconciled."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from goblin_dask.digest import digest
from goblin_dask.errors import BlobMissing, DigestMismatch, StoreError, StoreFull
from goblin_dask.messages import INLINE_LIMIT, ArraySpec
from goblin_dask.store import upload as upload_module
from goblin_dask.store.blobs import BlobStore
from goblin_dask.store.buffers import array_of, buffer_of, spec_of
from goblin_dask.store.chunks import load_array, store_array
from goblin_dask.store.descriptors import memory_file
from goblin_dask.store.shelf import ZarrShelf, key_of


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def blobs(tmp_path):
    store = BlobStore(tmp_path / "blobs", clock=Clock())
    yield store
    store.close()


STORES = {
    "local": LocalStore,
    "memory": lambda path: MemoryStore(),
    "fsspec": lambda path: FsspecStore.from_url(f"memory://{path}"),
}


@pytest.mark.parametrize("kind", STORES)
def test_bytes_come_back_from_any_store(kind, tmp_path):
    store = STORES[kind](tmp_path / "b")
    blobs = BlobStore(store)
    data = os.urandom(300_000)
    name = blobs.put(data)
    assert name == digest(data)
    assert blobs.put(iter([data[:100], data[100:]])) == name
    assert bytes(blobs.get(name)) == data
    assert blobs.size(name) == len(data) == blobs.used
    blobs.close()
    again = BlobStore(store)
    assert again.has(name)
    assert bytes(again.get(name)) == data
    again.close()


def test_both_shelves_have_the_same_layout(tmp_path):
    files = BlobStore(tmp_path)
    name = files.put(b"x" * 1000)
    files.close()
    shelf = ZarrShelf(LocalStore(tmp_path))
    assert list(shelf.listing()) == [(name, 1000)]
    shelf.close()


@pytest.mark.parametrize(
    "array",
    [
        np.array([0x7FC00001, 0x7F800001, 0x80000000], "u4").view("f4"),
        np.zeros((0, 3), "f4"),
        np.zeros((2, 0, 0)),
        np.array(2.5),
        np.arange(6, dtype=">i4").reshape(2, 3).T,
        np.random.default_rng(0).random((200, 300)),
        np.array([1 + 2j]),
        np.array(["2020-01-01", "NaT"], "M8[s]"),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_arrays_keep_every_bit(blobs, array):
    ref = store_array(blobs, array)
    back = load_array(blobs, ref)
    assert back.shape == array.shape
    assert bytes(buffer_of(back)) == array.astype(array.dtype.newbyteorder("<")).tobytes()
    assert (ref.inline is not None) == (array.nbytes <= INLINE_LIMIT)
    assert not back.flags.writeable


def test_a_blob_of_the_wrong_length_is_no_array():
    with pytest.raises(DigestMismatch, match="12 bytes cannot be an array of shape \\(4,\\)"):
        array_of(b"x" * 12, ArraySpec((4,), "float32"))


def test_the_last_reference_and_the_grace_delete(blobs):
    name = blobs.put(b"1" * 1000)
    blobs.retain(name)
    blobs.retain(name)
    blobs.release(name)
    blobs._clock.now = 1e6
    assert blobs.collect() == []
    blobs.release(name)
    blobs._clock.now += blobs.grace - 1
    assert blobs.collect() == []
    blobs.put(b"1" * 1000)  # wanted again
    blobs._clock.now += 2
    assert blobs.collect() == []
    blobs._clock.now += blobs.grace
    assert blobs.collect() == [name]
    assert not blobs.has(name)
    with pytest.raises(BlobMissing, match=name):
        blobs.get(name)
    with pytest.raises(StoreError, match="more often than retained"):
        blobs.release(name)


def test_a_blob_may_go_at_once_unless_another_holds_it(blobs):
    name = blobs.put(b"1" * 1000)
    blobs.retain(name)
    blobs.retain(name)
    blobs.release(name, at_once=True)
    assert blobs.has(name)
    blobs.release(name, at_once=True)
    assert not blobs.has(name)
    assert blobs.used == 0


def test_blobs_of_an_earlier_run_stay_until_room_is_needed(tmp_path):
    first = BlobStore(tmp_path)
    old, older = first.put(b"2" * 1000), first.put(b"1" * 1000)
    os.utime(first._shelf._path(older), (1, 1))
    first.close()
    second = BlobStore(tmp_path, cap=2500, grace=0)
    assert second.collect() == []
    second.retain(old)
    new = second.put(b"3" * 1000)
    assert second.has(old)
    assert second.has(new)
    assert not second.has(older)
    second.retain(new)
    with pytest.raises(StoreFull, match=r"may take 0\.00 GB"):
        second.put(b"4" * 1000)
    second.close()


def test_what_was_just_stored_makes_no_room(tmp_path):
    clock = Clock()
    blobs = BlobStore(tmp_path, cap=1500, grace=10, clock=clock)
    first = blobs.put(b"1" * 1000)
    with pytest.raises(StoreFull):
        blobs.put(b"2" * 1000)
    assert blobs.has(first)
    clock.now = 11
    second = blobs.put(b"2" * 1000)
    assert blobs.has(second)
    assert not blobs.has(first)
    blobs.close()


def test_the_cap_counts_uploads_under_way(tmp_path):
    blobs = BlobStore(tmp_path, cap=1500)
    upload = blobs.upload(1000)
    with pytest.raises(StoreFull):
        blobs.upload(1000)
    upload.abort()
    blobs.upload(1000).abort()
    blobs.close()


def test_a_full_disk_is_said_in_a_sentence(blobs, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(upload_module, "write_all", full)
    with pytest.raises(StoreFull, match=r"is full \(No space left on device\): free some space"):
        blobs.put(b"x" * 1000)
    assert list((blobs.path / "staging").iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setattr(type(blobs._shelf), "free", lambda self: 10)
    with pytest.raises(StoreFull, match=r"0\.00 GB left"):
        blobs.upload(1000)


def test_blobs_of_earlier_runs_go_when_the_disk_is_full(tmp_path, monkeypatch):
    before = BlobStore(tmp_path)
    old = [before.put(bytes([i]) * 1000) for i in range(3)]
    before.close()
    for age, name in enumerate(reversed(old)):
        os.utime(tmp_path / key_of(name), (1e9 - age, 1e9 - age))
    blobs = BlobStore(tmp_path)
    monkeypatch.setattr(type(blobs._shelf), "free", lambda self: 3500 - blobs.used)
    blobs.retain(old[0])
    new = blobs.put(b"x" * 1000)
    assert [blobs.has(name) for name in (*old, new)] == [True, False, True, True]
    with pytest.raises(StoreFull, match="GB left"):
        blobs.put(b"y" * 2000)
    assert blobs.has(old[0])
    blobs.close()


def test_an_upload_is_bounded_and_checked(blobs):
    upload = blobs.upload(10)
    with pytest.raises(StoreError, match="more than the 10 bytes"):
        upload.write(b"x" * 11)
    upload.write(b"x" * 10)
    with pytest.raises(DigestMismatch, match="damaged or changed"):
        blobs.quarantine(digest(b"y"), "a#1", upload)
    assert list((blobs.path / "staging").iterdir()) == []


@pytest.mark.parametrize("memory", [0, 1 << 20], ids=["on disk", "in memory"])
def test_quarantine_is_apart_until_promoted(tmp_path, memory):
    blobs = BlobStore(tmp_path, memory=memory)
    data = b"result" * 1000
    name = digest(data)
    fd = memory_file([data])
    blobs.quarantine(name, "a#1", fd)
    blobs.quarantine(name, "b#1", fd)  # the same bytes, another attempt
    os.close(fd)
    assert not blobs.has(name)
    assert blobs.size(name) == len(data)
    blobs.drop(name, "a#1")
    assert blobs.quarantined(name) == {"b#1"}
    blobs.promote(name)
    blobs.promote(name)
    blobs.drop(name, "b#1")
    assert bytes(blobs.get(name)) == data
    assert not blobs.quarantined(name)
    assert blobs._in_memory == 0
    with pytest.raises(BlobMissing):
        blobs.promote(digest(b"other"))
    blobs.close()


def test_double_uploads_are_one(blobs):
    data = b"twice" * 1000
    for _ in range(2):
        upload = blobs.upload(len(data))
        upload.write(data)
        blobs.quarantine(digest(data), "a#1", upload)
    assert len(list((blobs.path / "staging").iterdir())) == 1
    blobs.drop(digest(data), "a#1")
    assert list((blobs.path / "staging").iterdir()) == []


CRASH = """
import os, sys
from goblin_dask.store.blobs import BlobStore
blobs = BlobStore(sys.argv[1])
print(blobs.put(b"whole" * 1000), flush=True)
upload = blobs.upload(1000)
upload.write(b"half")
os.kill(os.getpid(), 9)
"""


def test_a_crash_leaves_no_half_upload(tmp_path):
    result = subprocess.run([sys.executable, "-c", CRASH, tmp_path], capture_output=True, text=True, check=False)
    assert result.returncode == -9
    assert len(list((tmp_path / "staging").iterdir())) == 1
    blobs = BlobStore(tmp_path)
    assert list((tmp_path / "staging").iterdir()) == []
    assert bytes(blobs.get(result.stdout.strip())) == b"whole" * 1000
    blobs.close()


def test_a_file_spoilt_by_a_power_cut_is_no_blob(tmp_path):
    blobs = BlobStore(tmp_path)
    good, bad = blobs.put(b"good" * 1000), blobs.put(b"bad!" * 1000)
    path = blobs._shelf._path(bad)
    blobs.close()
    os.chmod(path, 0o600)
    path.write_bytes(bytes(4000))  # the name and the length were on the disk, the bytes were not
    note = tmp_path / "opened.json"
    note.write_text(json.dumps({"boot": "an earlier one", "closed": False, "suspect_before": 0}))
    again = BlobStore(tmp_path)
    assert again.has(good)
    assert not again.has(bad)
    assert not path.exists()
    assert again.used == 4000
    again.close()


def test_a_store_has_one_owner(tmp_path):
    blobs = BlobStore(tmp_path)
    with pytest.raises(StoreError, match="open in another process"):
        BlobStore(tmp_path)
    blobs.close()


@pytest.mark.parametrize("name", ["../../etc/passwd", "ab/cd", "A" * 64, "", "0" * 63])
def test_a_digest_never_becomes_a_path(blobs, name):
    with pytest.raises(StoreError, match="no blob address"):
        key_of(name)
    assert not blobs.has(name)


def test_specs_round_trip():
    assert spec_of(np.zeros((2, 3), ">f8")) == ArraySpec((2, 3), "float64")


def test_an_upload_that_is_dropped_leaves_nothing_behind(tmp_path):
    """Also when it is dropped while it is being copied to the disk."""
    store = BlobStore(tmp_path)
    for number, fate in enumerate(["drop", "promote", "drop", "promote"]):
        data = bytes([number]) * 5_000_000
        fd, name = memory_file([data]), digest(data)
        store.quarantine(name, "attempt", fd)
        os.close(fd)
        if fate == "drop":
            store.drop(name, "attempt")
        else:
            store.promote(name)  # copies are made one after the other: the one before is done, too
            assert bytes(store.get(name)) == data
        assert store.has(name) == (fate == "promote")
    assert list((tmp_path / "staging").iterdir()) == []
    store.close()


def test_uploads_beyond_the_memory_wait_on_the_disk(tmp_path):
    store = BlobStore(tmp_path, memory=6_000_000)
    names = []
    for number in range(3):
        data = bytes([number]) * 5_000_000
        fd = memory_file([data])
        names.append(digest(data))
        store.quarantine(names[-1], "attempt", fd)
        os.close(fd)
    assert store._in_memory <= 6_000_000
    for number, name in enumerate(names):
        fd = store.open_quarantined(name)
        assert os.read(fd, 1) == bytes([number])
        os.close(fd)
        store.promote(name)
    assert store.used == 15_000_000
    store.close()


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize(
    "pieces", [[0], [1], [1000] * 9, [5 << 20, 3], [3 << 20] * 3 + [77], [4 << 20, 4 << 20], [9 << 20]]
)
def test_an_upload_is_whole_in_whatever_pieces_it_comes(tmp_path, pieces, cold):
    blobs = BlobStore(tmp_path)
    data = np.random.default_rng(0).bytes(sum(pieces))
    upload, done = blobs.upload(len(data), cold=cold), 0
    for piece in pieces:
        upload.write(data[done : done + piece])
        done += piece
    with pytest.raises(StoreError, match="more than"):
        upload.write(b"x")
    assert upload.nbytes == len(data)
    blobs.quarantine(digest(data), "a#1", upload, cold=cold)
    blobs.promote(digest(data))
    assert bytes(blobs.get(digest(data))) == data
    blobs.close()
