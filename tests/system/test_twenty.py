"""Twenty volunteers, six of whom lie in mixed ways, and a job of five hundred chunks."""

import time
from collections import Counter

import dask.array as da
import numpy as np
import pytest

import goblin_dask as goblin
from goblin_dask.testing.liar import confessions
from tests.system.test_liars import AT, Grid

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.system, pytest.mark.timeout(5400), pytest.mark.filterwarnings("ignore")]

HONEST = 14
LIARS = (
    ("always", {}),
    ("zeros", {"share": 0.5}),
    ("sleeper", {"after": 10}),
    ("entry", {"times": 3.0, "share": 0.3}),
    ("tf32", {}),
    ("nan", {"share": 0.1}),
)
"""Strategies, and what else they are told. Who lies by TF32 does so where there is something to multiply."""
LOUD = {"zeros", "nan"}
"""Those whose every lie is far beyond what is proven; the others lie near the thresholds, or seldom."""

SIDE, DEPTH, BLOCK = (20, 19), 4096, 512
"""Blocks along both sides of the product, the length that is summed over, and the side of a block."""


class Work:
    """What is computed, and what it must be, class by class."""

    def __init__(self, rng):
        rows, columns = SIDE
        a = rng.standard_normal((rows * BLOCK, DEPTH), np.float32)
        b = rng.standard_normal((DEPTH, columns * BLOCK), np.float32)
        chunks = {0: BLOCK, 1: DEPTH}
        self.product = da.from_array(a, chunks=chunks) @ da.from_array(b, chunks={0: DEPTH, 1: BLOCK})
        self.a, self.b = a, b
        self.x = rng.standard_normal((4000, 400))
        x = da.from_array(self.x, chunks=(100, -1))
        self.elementwise = da.exp(x) * da.sqrt(abs(x)) + 1
        self.sorted = da.map_blocks(np.sort, x, axis=1, dtype=x.dtype)
        self.stack = rng.standard_normal((20, 120, 80))
        self.factors = da.apply_gufunc(
            _svd, "(m,n)->(m,k),(k),(k,n)", da.from_array(self.stack, chunks=(1, -1, -1)),
            output_sizes={"k": 80}, output_dtypes=[float] * 3,
        )  # fmt: skip
        torch.manual_seed(0)
        self.net = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True).eval()
        self.tokens = rng.standard_normal((20, 1024, 512), np.float32)
        captured = goblin.capture(self.net, torch.zeros(1, 1024, 512))
        self.block = captured(da.from_array(self.tokens, chunks=(1, -1, -1)))

    def collections(self):
        return [self.product, self.elementwise, self.sorted, *self.factors, self.block]

    def check(self, product, elementwise, ordered, u, s, v, block):
        """Everything against NumPy in double precision, and PyTorch."""
        k = DEPTH * 2.0**-24
        for start in range(0, product.shape[0], BLOCK):
            rows = self.a[start : start + BLOCK].astype(np.float64)
            exact = rows @ self.b
            assert np.all(np.abs(product[start : start + BLOCK] - exact) <= k * (np.abs(rows) @ np.abs(self.b)))
        exact = np.exp(self.x) * np.sqrt(np.abs(self.x)) + 1
        np.testing.assert_allclose(elementwise, exact, rtol=1e-13)
        np.testing.assert_array_equal(ordered, np.sort(self.x, axis=1))
        np.testing.assert_allclose(u * s[:, None] @ v, self.stack, atol=1e-11)
        with torch.no_grad():
            wanted = self.net(torch.from_numpy(self.tokens)).numpy()
        np.testing.assert_allclose(block, wanted, rtol=1e-3, atol=1e-4)


def _svd(a):
    return np.linalg.svd(a, full_matrices=False)


@pytest.mark.full
def test_a_grid_of_whom_a_third_lies(tmp_path, full, report, monkeypatch):
    if not full:
        pytest.skip("twenty volunteers of 200 MB, for minutes: in `make full`")
    grid = Grid(tmp_path)
    try:
        for _ in range(HONEST - 2):
            grid.grid.add_volunteer()
        journals = {}
        for number, (strategy, options) in enumerate(LIARS):
            journals[number] = tmp_path / f"journal-{strategy}"
            settings = {"strategy": strategy, "journal": str(journals[number]), "seed": number, **options}
            for name, value in settings.items():
                monkeypatch.setenv(f"DASK_GOBLIN__TESTING__LIAR__{name.upper()}", str(value))
            grid.grid.add_volunteer("--preload", "goblin_dask.testing.liar")
            for name in settings:
                monkeypatch.delenv(f"DASK_GOBLIN__TESTING__LIAR__{name.upper()}")
        grid.grid.wait(HONEST + len(LIARS), 1)
        work = Work(np.random.default_rng(1))
        # Unfused: tiles of several blocks would be fewer chunks of the same work.
        lab = goblin.Lab(grid.lab.url, grid.lab._token, offload="always", fuse=False, progress=False)
        begun = time.monotonic()
        with lab, lab.submit(work.collections()) as job:
            results, certificate = job.result(), job.certificate
        seconds = time.monotonic() - begun
        work.check(*results)
        accepted = grid.accepted()
        lies = {number: [one for one in confessions(path) if one.lie] for number, path in journals.items()}
        used = Counter(
            LIARS[number][0]
            for number, told in lies.items()
            for one in told
            if one.size > AT and accepted.intersection(one.outputs)
        )
        assert not used, f"used, above the thresholds: {used}"
        workers = [each for each in grid.status()["workers"] if each["role"] == "volunteer"]
        barred = {row["owner"] for row in grid.rows("SELECT owner FROM reputations WHERE quarantined != ''")}
        liars = {f"volunteer {HONEST + number}": strategy for number, (strategy, _) in enumerate(LIARS)}
        methods = certificate["methods"]
        parts = sum(method["parts"] for method in methods.values())
        needed = sum(method["flops"] for method in methods.values())
        spent = sum(method["flops_spent"] for method in methods.values())
        report(f"{parts} chunks on {len(workers)} volunteers in {seconds:.0f} s: {certificate['summary']}")
        for name, method in methods.items():
            ratio = method["flops_spent"] / method["flops"] if method["flops"] else 0.0
            report(
                f"  {name:11} {method['parts']:4} chunks, {method['flops'] / 1e9:8.1f} GFLOP needed, "
                f"{ratio:.2f} times that spent, {method['rejected']} rejected"
            )
        told = ", ".join(f"{LIARS[number][0]} {len(one)}" for number, one in lies.items())
        report(
            f"  lies: {told}; in quarantine: {sorted(liars.get(owner, owner) for owner in barred)}; "
            f"{spent / needed:.2f} times what is needed, in all"
        )
        assert barred <= set(liars), "an honest volunteer was put into quarantine"
        assert {liars[owner] for owner in barred} >= LOUD
        assert parts >= 500
        assert methods["algebraic"]["flops"] >= 0.8 * needed
        assert spent <= 1.6 * needed
    finally:
        grid.grid.close()
