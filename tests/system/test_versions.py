"""A grid whose volunteers are of several releases, with everything real but the release."""

import dask.array as da
import msgspec
import numpy as np
import pytest

from goblin_dask.gateway.limits import Limits
from goblin_dask.graphs.program import Program, decode
from goblin_dask.messages import Lease
from goblin_dask.testing.inprocess import InProcessGrid
from goblin_dask.volunteer import machine

NEW = "sin"
"""What came with version 2, in these tests."""


@pytest.fixture
def release(monkeypatch):
    """Makes volunteers of catalogue 1 out of those with these numbers."""
    monkeypatch.setattr(Program, "catalogue", property(lambda program: 2 if NEW in program.operators else 1))
    describe, count = machine.describe, iter(range(-1, 100))  # the validator is the first that is made

    def make(old):
        def described(limits, at_once=1, lacks=()):
            told = describe(limits, at_once, lacks)
            is_old = next(count) in old
            return msgspec.structs.replace(told, catalogue=1 if is_old else 2)

        monkeypatch.setattr(machine, "describe", described)

    return make


@pytest.mark.parametrize("old", [{0}, {0, 1}])
def test_an_old_volunteer_keeps_working_on_what_it_knows(release, monkeypatch, old):
    release(old)
    given = {0: set(), 1: set()}

    def listen(number, runner):
        run = runner.run

        async def listening(work):
            assert isinstance(work, Lease)
            given[number] |= decode(work.program).operators
            await run(work)

        runner.run = listening

    x = da.from_array(np.arange(64.0).reshape(8, 8), chunks=2)
    with InProcessGrid(
        volunteers=2, tamper=listen, fuse=False, gateway_config={"limits": Limits(patience=0.3)}
    ) as grid:
        np.testing.assert_array_equal(grid.lab.compute(x + 1), x.compute(scheduler="sync") + 1)
        job = grid.lab.submit(da.sin(x))
        np.testing.assert_allclose(job.result(), np.sin(np.arange(64.0).reshape(8, 8)), rtol=1e-15)
        certificate = job.certificate
    assert NEW not in given[0]
    assert "add" in given[0] | given[1]
    (method, part), *more = certificate["methods"].items()
    assert not more
    assert (method, part["parts"]) == ("laboratory" if len(old) == 2 else "recompute", 16)
    assert (NEW in given[1]) == (len(old) == 1)
