"""Common models, captured: what they compute is what PyTorch computes, within what rounding explains."""

import copy

import numpy as np
import pytest

import goblin_dask as goblin
from goblin_dask.graphs.backends.base import NUMPY
from goblin_dask.graphs.backends.choice import backend_named
from goblin_dask.verify.sigma import distance, sigma

torch = pytest.importorskip("torch")

from goblin_dask.testing.models import MODELS  # noqa: E402 needs PyTorch

from ..gpu import here  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
LIGHT = ["LSTM", "GRU", "U-Net", "MLP with BatchNorm", "TransformerEncoder", "MultiheadAttention"]
"""Models of which the default run takes a sample; the others have millions of parameters."""


def results(value):
    return [np.asarray(each.detach()) for each in (value if isinstance(value, tuple) else (value,))]


def backends():
    yield NUMPY
    yield backend_named("torch")
    yield from map(backend_named, here())


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(MODELS))
def test_forward(name, full, sample, report):
    """In both modes, captured with one size of the batch and called with others; random numbers left out."""
    if name not in sample(LIGHT, 2) and not full:
        pytest.skip("not in the sample")
    make, example = MODELS[name]
    torch.manual_seed(0)
    model = make()
    for module in model.modules():  # compared are the layers; what dropout draws is tested by itself
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
    worst, count = 0.0, 0
    for training in (False, True):
        model.train(training)
        captured = goblin.capture(model, example(2))
        double = copy.deepcopy(model).double()
        for batch in (3, 6) if training else (1, 5):
            x = example(batch)
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            with torch.no_grad():
                eager = results(torch.func.functional_call(model, buffers, (x,)))
                wide = x.double() if x.is_floating_point() else x
                fine = results(double(wide))
            for backend in backends():
                found = captured(x, backend=backend)
                found = results(found[0] if captured.state else found)
                for a, b, y in zip(found, eager, fine, strict=True):
                    assert a.dtype == b.dtype
                    ratio = distance(a, b, sigma(b, y, b.dtype)).ratio
                    assert ratio <= 1, (name, training, batch, backend.name, ratio)
                    worst, count = max(worst, ratio), count + 1
    size = sum(parameter.numel() for parameter in model.parameters())
    report(
        f"{name}: {size:,} parameters, {count} results equal to eager, at most {worst:.2f} of what the σ rule allows"
    )


def test_sizes():
    sizes = {name: sum(p.numel() for p in make().parameters()) for name, (make, _) in MODELS.items()}
    assert sizes["ViT"] >= 5e6
    assert sizes["GPT"] >= 10e6
