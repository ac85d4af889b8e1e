"""The blob cache: bounded, least recently used out first, one fetch for all who ask."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from goblin_dask.volunteer import cache as cache_module
from goblin_dask.volunteer.cache import Blob, BlobCache


def blob(size, mapped=False):
    return Blob(memoryview(bytes(size)), mapped)


def test_the_least_recently_used_go_first():
    cache = BlobCache(100)
    for name in "abc":
        cache.get(name, lambda: blob(40))
    assert cache.held("abc") == ("b", "c")
    cache.get("b", lambda: blob(40))
    cache.get("d", lambda: blob(40))
    assert cache.held("abcd") == ("b", "d")
    assert cache.used == 80
    assert cache.get("e", lambda: blob(101))[0].view.nbytes == 101  # used, not kept
    assert cache.held("bde") == ("b", "d")


def test_mapped_blobs_cost_nothing_but_are_counted(monkeypatch):
    monkeypatch.setattr(cache_module, "MAPPINGS", 3)
    cache = BlobCache(0)
    for name in "abcd":
        cache.get(name, lambda: blob(1 << 20, mapped=True))
    assert cache.held("abcd") == ("b", "c", "d")
    assert cache.used == 0


def test_one_fetch_serves_all_who_ask():
    cache, calls, go = BlobCache(1000), [], threading.Event()

    def fetch():
        calls.append(1)
        assert go.wait(10)
        return blob(10)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(cache.get, "a", fetch) for _ in range(4)]
        go.set()
        results = [future.result() for future in futures]
    assert len(calls) == 1
    assert sorted(held for _, held in results) == [False, True, True, True]


def test_a_failure_is_each_ones_own():
    cache, started, go = BlobCache(1000), threading.Event(), threading.Event()

    def fail():
        started.set()
        assert go.wait(10)
        raise ConnectionError("expired")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "a", fail)
        assert started.wait(10)
        second = pool.submit(cache.get, "a", lambda: blob(7))
        go.set()
        with pytest.raises(ConnectionError):
            first.result()
        assert second.result()[0].view.nbytes == 7
