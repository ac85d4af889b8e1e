"""Stages that no volunteer has the memory for: their programs in blocks, against the programs themselves."""

import dask
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from goblin_dask.graphs.builder import Builder  # noqa: E402
from goblin_dask.graphs.capture.joint import capture_gradients  # noqa: E402
from goblin_dask.graphs.check import specs as specs_of  # noqa: E402
from goblin_dask.graphs.cost import peak  # noqa: E402
from goblin_dask.graphs.execute import execute  # noqa: E402
from goblin_dask.labnode.lowering import lower  # noqa: E402
from goblin_dask.testing.models import Block  # noqa: E402
from goblin_dask.training.blocks import in_blocks, source  # noqa: E402

FLOOR = 1e-3
"""Gradients that are zero but for rounding are compared with this share of the largest."""


class Language(nn.Module):
    """An embedding and a head."""

    def __init__(self, vocabulary, width, tied):
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        return self.head(self.tokens(tokens))


def of_tokens(y, target):
    return F.cross_entropy(y.flatten(0, 1), target.flatten(), ignore_index=3)


def wide():
    return nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def images():
    first = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(first, Block(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def classes(count, *shape):
    return torch.randint(0, count, shape)


CASES = {
    "wide layers": lambda: (wide(), F.cross_entropy, torch.randn(16, 64), classes(10, 16)),
    "vocabulary": lambda: (Language(8192, 64, False), of_tokens, classes(8192, 4, 32), classes(8192, 4, 32)),
    "tied vocabulary": lambda: (Language(8192, 64, True), of_tokens, classes(8192, 4, 32), classes(8192, 4, 32)),
    "images": lambda: (images(), F.cross_entropy, torch.randn(16, 3, 32, 32), classes(10, 16)),
}


def captured(name):
    torch.manual_seed(1)
    module, loss, x, target = CASES[name]()
    found = capture_gradients(module, loss, x, target, check=False)
    inputs = found.sources(found.leaves(x, target), found.parameters, np.array([1, 2], np.uint64))
    return found.program(), [np.asarray(each) for each in inputs]


def largest_operator(program):
    """Projected peak of the operator that takes most, alone."""
    specs, most = specs_of(program), 0
    for node in program.nodes:
        if node.operands:
            build = Builder()
            operands = [build.input(specs[each]) for each in node.operands]
            values = build.add(node.operator, operands, **dict(node.attributes))
            most = max(most, peak(build.finish(values)[0]) if min(values) >= len(set(operands)) else 0)
    return most


def lowered(arrays):
    graph, keys = {}, []
    for array in arrays:
        graph.update(array.__dask_graph__())
        keys.extend(dask.core.flatten(array.__dask_keys__()))
    return lower(graph, keys)


def alike(found, wanted, tolerance=1e-5):
    largest = max(float(np.abs(each).max(initial=0)) for each in wanted[2:])
    for got, each in zip(found, wanted, strict=True):
        got = np.asarray(got)
        assert (got.shape, got.dtype) == (each.shape, each.dtype)
        scale = max(float(np.abs(each).max(initial=0)), FLOOR * largest)
        assert np.abs(got - each).max(initial=0) <= tolerance * scale


@pytest.mark.parametrize("name", CASES)
def test_gradients_in_blocks_are_those_of_the_whole_program_and_every_task_fits(name, report):
    program, inputs = captured(name)
    memory = largest_operator(program) // 4
    arrays = in_blocks(program, inputs, memory)
    plan = lowered(arrays)
    peaks = [peak(task.program) for task in plan.grid]
    report(f"{name}: whole {peak(program):,} B, limit {memory:,} B, {len(peaks)} tasks, largest {max(peaks):,} B")
    assert max(peaks) <= memory < peak(program) / 4
    assert not plan.dynamic  # what each task gives is known before anything runs
    with dask.config.set(scheduler="sync"):
        found = dask.compute(*arrays)
    alike(found, execute(program, inputs), 1e-4 if name == "images" else 1e-5)


def test_a_source_is_read_block_by_block_and_its_blocks_are_known_before():
    whole = np.arange(600 * 500, dtype="f4").reshape(600, 500)
    array = source("kept", whole.__getitem__, whole.shape, "float32", 1 << 21)
    assert max(map(max, array.chunks)) < 600
    plan = lowered([array + 1])
    assert not plan.dynamic
    np.testing.assert_array_equal(array.compute(scheduler="sync"), whole)
