"""Programs that researchers write, on volunteers, against Dask's own scheduler."""

import numpy as np
import pytest

from goblin_dask.testing.inprocess import InProcessGrid
from goblin_dask.verify.tolerances import unit_roundoff
from tests.expressions import EXPRESSIONS, SUMS, VARIANTS, operands

pytestmark = pytest.mark.filterwarnings("ignore::dask.array.core.PerformanceWarning", "ignore:invalid value")

SHARE = 0.9
"""Of the tasks that read an array and are neither source nor sink, at least so many are accepted from volunteers."""

IN_THE_LABORATORY = {
    "masked": "masked arrays are no plain arrays of numbers",
    "unique": "Dask's hands structured arrays of values and counts from task to task",
}
"""Programs most of whose tasks no volunteer can be given, with the reason."""

SMALLEST = {("one_element_chunks", "gradient"): "Chunk size must be larger"}
"""What Dask itself refuses, with its words."""


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    with InProcessGrid(volunteers=2, directory=tmp_path_factory.mktemp("grid")) as grid:
        yield grid


def agree(name, got, want, arrays):
    """Bit for bit where nothing floating is summed, else within 2·n·u·Σ|terms|."""
    assert type(got) is type(want)
    if isinstance(want, np.ma.MaskedArray):
        np.testing.assert_array_equal(np.ma.getmaskarray(got), np.ma.getmaskarray(want))
        got, want = got.filled(0), want.filled(0)
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if name in SUMS and want.dtype.kind in "fc":
        n, terms = SUMS[name](*arrays)
        tolerance = 2 * n * unit_roundoff(want.dtype) * terms
        assert (np.abs(got.astype("c16") - want) <= tolerance).all()
    else:
        assert got.tobytes() == want.tobytes()


@pytest.mark.full
def test_every_program_in_every_variant(grid, sample, report, tmp_path):
    cases = [(variant, name) for variant in VARIANTS for name in EXPRESSIONS]
    counted = {}
    for variant, name in sample(cases, 14):
        folder = tmp_path / f"{variant}-{name}"
        folder.mkdir()
        x, y, z = operands(variant, folder)
        if (variant, name) in SMALLEST:
            with pytest.raises(ValueError, match=SMALLEST[variant, name]):
                EXPRESSIONS[name](x, y, z)
            continue
        collection = EXPRESSIONS[name](x, y, z)
        want = collection.compute(scheduler="sync")
        arrays = [array.compute(scheduler="sync") for array in (x, y, z)]
        before = grid.counts()
        got = collection.compute(scheduler=grid.lab.get)
        counts = {key: value - before[key] for key, value in grid.counts().items()}
        agree(name, got, want, arrays)
        agree(name, grid.lab.compute(collection), got, arrays)
        total = counted.setdefault(name, {"grid": 0, "array": 0})
        for key, value in counts.items():
            total[key] += value
    few = []
    for name, counts in counted.items():
        share = counts["grid"] / counts["array"] if counts["array"] else 1.0
        report(f"{name:20} {counts['grid']:5} of {counts['array']:5} tasks accepted from volunteers ({share:.0%})")
        if share < SHARE and name not in IN_THE_LABORATORY:
            few.append(name)
    accepted, every = (sum(counts[key] for counts in counted.values()) for key in ("grid", "array"))
    report(f"{'all':20} {accepted:5} of {every:5} tasks accepted from volunteers ({accepted / every:.1%})")
    assert accepted >= SHARE * every
    assert not few
