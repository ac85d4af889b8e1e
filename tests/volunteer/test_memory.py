"""A volunteer takes no more memory than it was said that a task takes, and gives it back."""

import asyncio
import sys

import numpy as np
import pytest

from goblin_dask import messages as m
from tests.datalab import DataLab, product_program

CHILD = """
import asyncio, gc, resource, sys
import psutil
from goblin_dask import messages as m
from goblin_dask.graphs.cost import peak
from goblin_dask.graphs.program import decode
from goblin_dask.volunteer import machine
from goblin_dask.volunteer.limits import Limits
from goblin_dask.volunteer.runner import Runner
from goblin_dask.volunteer.transfer import Transfers

def data():
    return psutil.Process().memory_info().data

def anonymous():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))

machine.keep_one_heap()
threads = machine.use_threads(1)
machine.check_blas()
machine.measure_flops()
limits = Limits(memory=1 << 30, cache=1 << 28, threads=1)
said = []
runner = Runner(limits, Transfers(), said.append)
leases = m.decode(sys.stdin.buffer.read(), m.decoder(tuple[m.Lease, ...]))
peak = peak(decode(leases[0].program))

async def main():
    before, rss = data(), anonymous()
    resource.setrlimit(resource.RLIMIT_DATA, (before + peak * 6 // 5, resource.RLIM_INFINITY))
    for lease in leases:
        await runner.run(lease)
    print([type(message).__name__ for message in said], getattr(said[0], "reason", ""))
    print(data() - before, anonymous() - rss, peak)
    await runner.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("route", ["local", "direct"])
async def test_a_task_stays_within_its_projected_peak(tmp_path, route, report):
    lab = await DataLab(tmp_path / "lab").start()
    shape = (2048, 2048)
    program = product_program(shape, shape, shape)
    rng = np.random.default_rng(0)
    leases = []
    for _ in range(3):
        _, lease = lab.lease(program, [rng.random(shape, "f4") for _ in range(3)], route)
        leases.append(lease)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate(m.encode(tuple(leases)))
    said, numbers = out.decode().splitlines()
    assert said.startswith(str(["Committed", "Uploaded"] * 3)), said
    left, anonymous, peak = map(int, numbers.split())
    report(f"after 3 tasks of {peak / 1e6:.0f} MB ({route}): {anonymous / 1e6:.1f} MB anonymous more than before")
    assert left < 0.1 * peak
    assert anonymous < 0.1 * peak
    await lab.close()
