"""The plugin on a real Dask scheduler: what it draws is executed again before the job may be called complete."""

import asyncio
import random

import dask
import pytest
from dask import delayed
from distributed import Client, LocalCluster

from goblin_dask.errors import InputError
from goblin_dask.verify.sampling import SampledRecheck


def square(x):
    return x * x


async def run(p, recheck, job="job", count=20):
    async with (
        LocalCluster(n_workers=1, processes=False, asynchronous=True, dashboard_address=None) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        plugin = SampledRecheck(p, random.Random(3), recheck)
        await plugin.start(cluster.scheduler)
        cluster.scheduler.add_plugin(plugin)
        with dask.annotate(sample=job):
            chunks = [delayed(square)(i, dask_key_name=f"chunk-{i}") for i in range(count)]
        total = delayed(sum)(chunks, dask_key_name="total")
        assert await client.compute(total, optimize_graph=False) == sum(i * i for i in range(count))
        drawn = plugin.sampled(job)
        return drawn, await plugin.settled(job), plugin


async def test_drawn_tasks_are_rechecked_before_the_job_settles():
    gate, seen = asyncio.Event(), []

    async def recheck(key, task):
        await gate.wait()
        seen.append(key)
        return key not in ("chunk-3", "chunk-5")

    async def open_gate():
        while not seen and not gate.is_set():
            await asyncio.sleep(0)
            gate.set()

    opener = asyncio.ensure_future(open_gate())
    drawn, mismatched, _ = await run(1.0, recheck)
    await opener
    assert drawn == len(seen) == 20, "every annotated task, and not the sum"
    assert sorted(mismatched) == ["chunk-3", "chunk-5"]


async def test_only_a_share_is_drawn():
    async def recheck(key, task):
        return True

    drawn, mismatched, plugin = await run(0.3, recheck, count=100)
    assert 15 <= drawn <= 45
    assert mismatched == ()
    assert plugin.sampled("job") == 0
    assert await plugin.settled("another job") == ()


async def test_an_error_of_a_recheck_is_raised():
    async def recheck(key, task):
        if key == "chunk-7":
            raise OSError("the gateway is gone")
        return True

    with pytest.raises(OSError, match="the gateway is gone"):
        await run(1.0, recheck)


def test_the_share_must_be_a_probability():
    for p in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(InputError, match="above 0 and at most 1"):
            SampledRecheck(p, random.Random(0), None)
