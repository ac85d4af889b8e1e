"""What the owner allows."""

import datetime
import resource
import subprocess
import sys

import dask.config
import pytest

from goblin_dask.errors import InputError
from goblin_dask.volunteer.limits import Limits, free_memory, total_memory


def at(hour, minute=0):
    return datetime.datetime(2026, 1, 1, hour, minute)


@pytest.mark.parametrize(
    ("hours", "open_", "shut"),
    [("20:00-07:00", [20, 23, 0, 6], [7, 12, 19]), ("9:30 - 17:00", [10, 16], [9, 17, 3])],
)
def test_hours_may_go_over_midnight(hours, open_, shut):
    with dask.config.set({"goblin.volunteer.hours": hours}):
        limits = Limits.configured(threads=2, memory=1 << 30)
    assert all(not limits.closed(at(hour), 0) for hour in open_)
    assert all("lends this machine" in limits.closed(at(hour), 0) for hour in shut)


def test_a_busy_machine_is_not_lent():
    with dask.config.set({"goblin.volunteer.busy": 0.5}):
        limits = Limits.configured(threads=2, memory=1 << 30)
    assert not limits.closed(at(1), 0.5)
    assert "uses 60%" in limits.closed(at(1), 0.6)


def test_defaults_come_from_the_worker():
    limits = Limits.configured(threads=3, memory=1_000_000)
    assert (limits.threads, limits.memory, limits.cache) == (3, 800_000, 10**9)
    huge = Limits.configured(threads=3, memory=1 << 60)
    assert huge.memory <= total_memory()


@pytest.mark.parametrize(
    ("name", "value"),
    [("threads", -1), ("threads", "x"), ("prefetch", -1), ("busy", 3), ("hours", "always"), ("memory", "lots")],
)
def test_nonsense_is_refused_by_name(name, value):
    with (
        dask.config.set({f"goblin.volunteer.{name}": value}),
        pytest.raises(InputError, match=f"goblin.volunteer.{name} is"),
    ):
        Limits.configured(threads=1, memory=1 << 30)


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_DATA, (1 << 31, resource.RLIM_INFINITY))
from goblin_dask.volunteer.limits import free_memory
print(free_memory())
"""


def test_free_memory_knows_the_process_limit():
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    assert free_memory() > 0
    result = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert 0 < int(result.stdout) < 1 << 31
