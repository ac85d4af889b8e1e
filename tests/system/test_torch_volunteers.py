"""Volunteers that compute with PyTorch, checked by a validator that computes with NumPy: nobody is blamed."""

import dask
import dask.array as da
import numpy as np
import pytest

import goblin_dask as goblin
from goblin_dask.testing.inprocess import InProcessGrid

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def grid():
    with dask.config.set({"goblin.volunteer.backend": "torch"}), InProcessGrid(volunteers=2, fuse=True) as grid:
        yield grid


def programs():
    rng = np.random.default_rng(3)
    a = rng.standard_normal((120, 90)).astype("f4")
    x, y = da.from_array(a, chunks=(50, 40)), da.from_array(rng.random((90, 70)), chunks=30)
    tall = da.from_array(rng.standard_normal((300, 20)), chunks=(100, 20))
    yield "product", x @ y
    yield "float32 product", x @ x.T
    yield "elementwise", da.exp(x) * da.tanh(x) + da.sqrt(abs(x))
    yield "reductions", da.stack([x.mean(0), x.std(0), x.sum(0), x.max(0)])
    yield "softmax", da.exp(x - x.max(1, keepdims=True)) / da.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)
    yield "integers", (da.arange(1000, chunks=300) ** 2 % 7).sum()
    yield "sorting", da.map_blocks(np.sort, y.rechunk((30, -1)), axis=1, dtype=y.dtype)
    yield "qr", da.linalg.qr(tall)[1]
    yield "fft", da.fft.fft(x.rechunk((50, -1)), axis=1)
    yield "comparisons", da.where(x > 0, x, 0).astype("f8")


@pytest.mark.parametrize(("name", "program"), list(programs()), ids=[name for name, _ in programs()])
def test_programs(grid, name, program):
    before = grid.counts()
    found = grid.lab.compute(program)
    after = grid.counts()
    wanted = program.compute(scheduler="sync")
    assert found.dtype == wanted.dtype
    tolerance = 1e-5 if found.dtype in ("f4", "c8") else 1e-10
    if name == "qr":
        found, wanted = abs(found), abs(wanted)  # signs are free
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * float(np.abs(wanted).max()))
    assert after["grid"] - before["grid"] == after["array"] - before["array"] > 0


def test_a_model(grid):
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(128, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 10),
        torch.nn.Softmax(1),
    ).eval()  # fmt: skip
    images = np.random.default_rng(4).standard_normal((60, 3, 8, 8)).astype("f4")
    captured = goblin.capture(net, torch.zeros(2, 3, 8, 8))
    found = grid.lab.compute(captured(da.from_array(images, chunks=(16, 3, 8, 8))))
    with torch.no_grad():
        np.testing.assert_allclose(found, net(torch.from_numpy(images)), rtol=1e-4, atol=1e-5)


def test_nobody_is_blamed(grid):
    hosts = [worker for worker in grid.gateway.dispatcher.reputation.hosts.values() if worker.accepted]
    assert hosts
    assert not [host for host in hosts if host.wrong or host.unproven]


def test_a_volunteer_says_what_it_computes_with(grid):
    machines = [peer.machine for peer in grid.gateway._peers.values() if peer.role == "volunteer"]
    assert len(machines) == 2
    for machine in machines:
        assert machine.device.startswith("torch cpu")
        assert dict(machine.versions)["torch"] == torch.__version__
