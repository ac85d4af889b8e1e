"""Programs of many nodes on real volunteers: replicas, and a liar in the middle of a network who is bisected."""

import dataclasses
import itertools

import dask.array as da
import numpy as np
import pytest

import goblin_dask as goblin
from goblin_dask.graphs.backends.base import NUMPY
from goblin_dask.graphs.operators import CATALOGUE
from goblin_dask.testing.inprocess import InProcessGrid

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.system, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

WIDTH, TOKENS, SEQUENCES = 192, 64, 4
"""Large enough that values on the way, of 200 KB, travel by the data path."""


def astray(xp, operands, attributes):
    """A layer norm that is a tenth too large."""
    results = CATALOGUE["native_layer_norm"].kernel(xp, operands, attributes)
    return (results[0] * np.float32(1.1), *results[1:])


@pytest.fixture(scope="module", params=["one machine", "relay"])
def grid(request, full):
    if request.param == "relay" and not full:
        pytest.skip("make full runs it through the relay too")
    numbers = itertools.count()

    def tamper(number, runner):
        if number == 1:
            overrides = {"native_layer_norm": astray}
            runner._backend = dataclasses.replace(NUMPY, overrides=overrides, inplace=False)
            return

        def summed(xp, operands, attributes):  # the third volunteer's machine sums in another order
            a, b = operands
            half = a.shape[-1] // 2
            return (a[..., :half] @ b[..., :half, :] + a[..., half:] @ b[..., half:, :],)

        if number == 2:
            runner._backend = dataclasses.replace(NUMPY, overrides={"matmul": summed}, inplace=False)

    relayed = request.param == "relay"
    with InProcessGrid(
        volunteers=3,
        gateway_config={"network": lambda address: f"network {next(numbers)}"},
        lab_options={"routes": "relay"} if relayed else {},
        tamper=tamper,
    ) as grid:
        grid.gateway.dispatcher.reputation.audit_rate = lambda host: 0.0
        yield grid


@pytest.mark.full
def test_a_liar_in_the_middle_is_found_by_bisection(grid, report):
    torch.manual_seed(0)
    net = torch.nn.TransformerEncoderLayer(WIDTH, 8, 2 * WIDTH, batch_first=True).eval()
    captured = goblin.capture(net, torch.randn(SEQUENCES, TOKENS, WIDTH))
    x = np.random.default_rng(0).standard_normal((24, TOKENS, WIDTH)).astype("f4")
    job = grid.lab.submit(captured(da.from_array(x, chunks=(SEQUENCES, -1, -1))), verify="replicate")
    found = job.result()
    with torch.no_grad():
        wanted = net(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    certificate = job.certificate
    assert certificate["policy"] == "replicate"
    assert {name: method["parts"] for name, method in certificate["methods"].items()} == {"replicate": 6}
    assert certificate["methods"]["replicate"]["miss_probability"] <= 0.01
    assert len(certificate["assumptions"]) == 1
    hosts = grid.gateway.dispatcher.reputation.hosts.values()
    wrong = {host.owner: host.wrong for host in hosts if host.wrong}
    assert set(wrong) == {"volunteer 1"}
    methods = dict(grid.gateway.dispatcher.outcomes.totals.methods)
    report(f"{certificate['summary']}; proven wrong: {wrong}; {methods}")
