"""Loss and gradients of modules, captured as one program: what autograd gives, on every backend."""

import copy
import functools

import numpy as np
import pytest

from goblin_dask.errors import InputError
from goblin_dask.graphs.backends.base import NUMPY
from goblin_dask.graphs.backends.choice import backend_named

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from goblin_dask.graphs.capture.joint import capture_gradients  # noqa: E402
from goblin_dask.graphs.capture.losses import Summed  # noqa: E402
from goblin_dask.testing.models import GPT, Recurrent, ViT  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
RELATIVE = {torch.float32: 1e-4, torch.float64: 1e-9}
FLOOR = 1e-3
"""Gradients that are zero but for rounding are compared with this share of the largest of all."""


def language(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def autograd(module, loss, x, target):
    """Sum, count, gradients and buffers of an untouched copy, without anything of ours but the sum of the loss."""
    module = copy.deepcopy(module)
    total, count = Summed(loss)(module(x), target)
    total.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return float(total), float(count), gradients, dict(module.named_buffers())


def require_equal(module, loss, x, target, dtype=torch.float32, captured=None):
    """Captured gradients are autograd's, on NumPy and on PyTorch; returns the largest relative difference."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    captured = captured or capture_gradients(module, loss, x, target)
    total, count, gradients, buffers = autograd(module, loss, x, target)
    largest = max(float(g.abs().max()) for g in gradients.values())
    worst = 0.0
    for backend in (NUMPY, backend_named("torch")):
        found = captured(x, target, key=0, backend=backend)
        assert float(found.count) == pytest.approx(count, rel=1e-6)
        assert float(found.total) == pytest.approx(total, rel=RELATIVE[dtype])
        assert set(found.gradients) == set(gradients)
        for name, wanted in gradients.items():
            wanted = wanted.numpy()
            assert found.gradients[name].dtype == wanted.dtype
            scale = max(float(np.abs(wanted).max()), FLOOR * largest)
            apart = float(np.abs(found.gradients[name] - wanted).max()) / scale
            assert apart <= RELATIVE[dtype], (name, backend.name, apart)
            worst = max(worst, apart)
        for name, value in found.state.items():
            fold = captured.folds.get(name)
            value = value if fold is None else fold(captured.parameters[name], value)
            np.testing.assert_allclose(value, buffers[name].numpy(), rtol=1e-5, atol=1e-7)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} of the user's module changed"
    return worst


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def still(module):
    """Without dropout."""
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
        if isinstance(getattr(each, "dropout", None), float):
            each.dropout = 0.0
    return module


MODELS = {
    "CNN with BatchNorm": lambda: (cnn(), F.cross_entropy, torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))),
    "GPT": lambda: (
        still(GPT(32, 8, 16, 2, 2)), language, torch.randint(0, 32, (3, 8)), torch.randint(0, 32, (3, 8)),
    ),
    "ViT": lambda: (still(ViT(8, 4, 16, 2, 1)), F.cross_entropy, torch.randn(3, 3, 8, 8), torch.randint(0, 10, (3,))),
    "LSTM": lambda: (Recurrent(nn.LSTM, 6), F.mse_loss, torch.randn(3, 4, 16), torch.randn(3, 5)),
}  # fmt: skip


CASES = [(name, dtype) for name in MODELS for dtype in RELATIVE]


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_models(name, dtype, sample, report):
    if (name, dtype) not in sample(CASES, 2):
        pytest.skip("not in the sample")
    torch.manual_seed(0)
    module, loss, x, target = MODELS[name]()
    x, target = (each.to(dtype) if each.is_floating_point() else each for each in (x, target))
    worst = require_equal(module.to(dtype), loss, x, target, dtype)
    report(f"joint graph of {name}, {dtype}: gradients at most {worst:.1e} of the largest from autograd's")


# --- gradients that a captured forward would get wrong --------------------------------------------------------------
class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


class Trap(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.a, self.b, self.of = nn.Linear(4, 4), nn.Linear(4, 4), of

    def forward(self, x):
        return self.of(self, x)


def without_gradient(self, x):
    with torch.no_grad():
        y = self.a(x)
    return self.b(x) * y + self.a(x)


TRAPS = {
    "detach": lambda self, x: self.a(x).detach() * self.b(x) + self.a(x),
    "no_grad": without_gradient,
    "straight-through": lambda self, x: self.b(self.a(x) + (self.a(x).round() - self.a(x)).detach()),
    "custom Function": lambda self, x: self.b(Rounded.apply(self.a(x))),
    "unused": lambda self, x: self.a(x),
    "in place": lambda self, x: self.b(self.a(x).clone().mul_(2).add_(1)),
    "slice assignment": lambda self, x: torch.slice_scatter(self.a(x), self.b(x)[:, :2], 1, 0, 2),
    "constants": lambda self, x: self.b(self.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])),
}


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name):
    torch.manual_seed(0)
    module = Trap(TRAPS[name])
    require_equal(module, F.mse_loss, torch.randn(3, 4), torch.randn(3, 4))


def test_spectral_norm_and_frozen_parameters():
    torch.manual_seed(0)
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 3))
    module[1].weight.requires_grad_(False)
    captured = capture_gradients(module, F.mse_loss, torch.randn(3, 4), torch.randn(3, 3))
    assert "1.weight" not in captured.gradients
    assert {"0.parametrizations.weight.original", "1.bias"} <= set(captured.gradients)
    assert not captured.folds
    assert len(captured.state) == 2  # the vectors of its power iteration
    require_equal(module, F.mse_loss, torch.randn(3, 4), torch.randn(3, 3))


class Tied(nn.Module):
    def __init__(self, parameter=False):
        super().__init__()
        self.e, self.o = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.o.weight = nn.Parameter(self.e.weight.data) if parameter else self.e.weight

    def forward(self, i):
        return self.o(self.e(i))


def test_tied_weights_have_one_gradient():
    torch.manual_seed(0)
    i, target = torch.tensor([0, 3, 1]), torch.tensor([1, 2, 4])
    captured = capture_gradients(Tied(), F.cross_entropy, i, target)
    assert captured.gradients == ("e.weight",)
    assert captured.trained == {"e.weight": "e.weight", "o.weight": "e.weight"}
    torch.manual_seed(0)
    require_equal(Tied(), F.cross_entropy, i, target)
    torch.manual_seed(0)
    twins = Tied(parameter=True)  # two parameters of the same memory
    found = capture_gradients(twins, F.cross_entropy, i, target)(i, target)
    total = F.cross_entropy(twins(i), target, reduction="sum")
    total.backward()
    np.testing.assert_allclose(found.gradients["e.weight"], twins.e.weight.grad + twins.o.weight.grad, rtol=1e-5)
    twins.o.weight = nn.Parameter(twins.e.weight.data[:, :2])
    with pytest.raises(InputError, match=r"\w\.weight and \w\.weight overlap"):
        capture_gradients(twins, lambda a, b: a.mean(), i, target)


class Counter(nn.Module):
    def __init__(self, assigns=False):
        super().__init__()
        self.register_buffer("n", torch.zeros(2))
        self.scale, self.assigns = nn.Parameter(torch.ones(2)), assigns

    def forward(self, x):
        if self.assigns:
            self.n = self.n + x
        else:
            self.n += x
        return self.n * 2 * self.scale


@pytest.mark.parametrize("assigns", [False, True])
def test_state_is_handed_on(assigns):
    module, x = Counter(assigns), torch.ones(2)
    captured = capture_gradients(module, lambda y, t: (y - t).sum(), x, torch.zeros(2))
    assert captured.state == ("n",)
    assert not captured.folds
    state, sums = {}, []
    for _ in range(3):
        found = captured(x, torch.zeros(2), parameters=state)
        state = found.state
        sums.append(float(found.total))
    assert sums == [8.0, 16.0, 24.0]  # 2, 4, 6 in two elements, and two rows
    assert torch.equal(module.n, torch.zeros(2))


def test_running_statistics_are_folded_in_order():
    """Contributions of micro-batches, put together, are what one after the other gives; also of a layer used twice."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, momentum=0.3)
    module = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    batches = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(3)]
    captured = capture_gradients(module, F.mse_loss, *batches[0])
    assert {name: fold.keep for name, fold in captured.folds.items()} == {
        "1.running_mean": pytest.approx(0.49), "1.running_var": pytest.approx(0.49), "1.num_batches_tracked": 1,
    }  # fmt: skip
    state = {name: captured.parameters[name].copy() for name in captured.state}
    for batch in batches:
        found = captured(*batch)
        state = {name: fold(state[name], found.state[name]) for name, fold in captured.folds.items()}
    module = copy.deepcopy(module)
    for x, _ in batches:
        module(x)
    for name, value in state.items():
        np.testing.assert_allclose(value, module.state_dict()[name], rtol=1e-5, atol=1e-7)
    assert state["1.num_batches_tracked"] == 6


def test_ties_keep_their_rule():
    class Of(nn.Module):
        def __init__(self, of):
            super().__init__()
            self.x, self.of = nn.Parameter(torch.ones(3)), of

        def forward(self, x):
            return self.of(self.x * x)

    for of, wanted in ((lambda x: x.amax(), [1 / 3] * 3), (lambda x: x.max(0).values, [1.0, 0.0, 0.0])):
        captured = capture_gradients(Of(of), lambda y, t: (y, 1), torch.ones(3), torch.zeros(()))
        for backend in (NUMPY, backend_named("torch")):
            found = captured(torch.ones(3), torch.zeros(()), backend=backend).gradients["x"]
            np.testing.assert_allclose(sorted(found, reverse=True), wanted)


@pytest.mark.full
def test_attention_names_no_device(full):
    torch.manual_seed(0)
    heads = [nn.MultiheadAttention(8, 2, batch_first=True), nn.TransformerEncoderLayer(8, 2, 8, 0.0)]
    for module in heads if full else heads[1:]:
        whole = Trap(lambda self, x: self.inner(x, x, x)[0] if hasattr(self.inner, "embed_dim") else self.inner(x))
        whole.inner = module
        x, target = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        captured = capture_gradients(whole, F.mse_loss, x, target)
        names = {call.target for call in captured._recordings.open.calls}
        assert not [name for name in names if "attention" in name or "cpu" in name]
        require_equal(whole, F.mse_loss, x, target, captured=captured)


# --- losses -----------------------------------------------------------------------------------------------------------
def test_means_do_not_average():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([0, 1, -100, 2, -100])

    class Itself(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * self.scale

    total = count = gradient = 0.0
    for rows in (slice(0, 3), slice(3, 5), slice(4, 5)):
        found = capture_gradients(Itself(), F.cross_entropy, x[rows], target[rows])(x[rows], target[rows])
        total, count = total + found.total, count + found.count
        gradient = gradient + found.gradients["scale"]
    assert (found.total, found.count, found.gradients["scale"]) == (0, 0, 0)  # all rows are ignored
    assert total / count == pytest.approx(1.0567, abs=1e-4)
    whole = Itself()
    F.cross_entropy(whole(x), target).backward()
    assert gradient / count == pytest.approx(float(whole.scale.grad), rel=1e-5)


CLASSES = torch.tensor([0, 2, 1, 2, 0, 1])
WEIGHT = torch.tensor([0.5, 2.0, 1.5])
LOSSES = {
    "cross_entropy": (F.cross_entropy, CLASSES),
    "CrossEntropyLoss, weighted": (nn.CrossEntropyLoss(WEIGHT, ignore_index=1, label_smoothing=0.1), CLASSES),
    "cross_entropy, weighted": (functools.partial(F.cross_entropy, weight=WEIGHT), CLASSES),
    "cross_entropy of probabilities": (nn.CrossEntropyLoss(WEIGHT), torch.full((6, 3), 1 / 3)),
    "nll_loss": (functools.partial(F.nll_loss, ignore_index=2), CLASSES),
    "mse_loss": (F.mse_loss, torch.linspace(-1, 1, 18).reshape(6, 3)),
    "L1Loss": (nn.L1Loss(), torch.linspace(-1, 1, 18).reshape(6, 3)),
    "SmoothL1Loss": (nn.SmoothL1Loss(beta=0.3), torch.linspace(-1, 1, 18).reshape(6, 3)),
    "huber_loss": (functools.partial(F.huber_loss, delta=0.2), torch.linspace(-1, 1, 18).reshape(6, 3)),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), torch.linspace(0, 1, 18).reshape(6, 3)),
    "binary_cross_entropy": (
        lambda y, t: F.binary_cross_entropy(torch.sigmoid(y), t), torch.linspace(0, 1, 18).reshape(6, 3),
    ),
    "own": (lambda y, t: (y - t).abs().mean(), torch.linspace(-1, 1, 18).reshape(6, 3)),
    "own pair": (lambda y, t: ((y - t).abs().sum(), t.numel()), torch.linspace(-1, 1, 18).reshape(6, 3)),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, sample):
    """Sums over parts, divided by the counts of parts, are PyTorch's mean and its gradient."""
    if name not in sample(list(LOSSES), 4):
        pytest.skip("not in the sample")
    loss, target = LOSSES[name]
    torch.manual_seed(0)
    module, x = nn.Linear(4, 3), torch.randn(6, 4)
    total = count = gradient = 0.0
    for rows in (slice(0, 4), slice(4, 6)):
        found = capture_gradients(module, loss, x[rows], target[rows])(x[rows], target[rows])
        total, count = total + found.total, count + found.count
        gradient = gradient + found.gradients["weight"]
    wanted = loss(module(x), target)
    wanted = wanted[0] / wanted[1] if isinstance(wanted, tuple) else wanted
    wanted.backward()
    assert total / count == pytest.approx(float(wanted), rel=1e-5)
    np.testing.assert_allclose(gradient / count, module.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "is a mean"),
        (functools.partial(F.mse_loss, weight=torch.ones(3)), "weight="),
        (lambda y, t: (y - t).abs(), "a scalar"),
        (lambda y, t: "no", "a scalar"),
    ],
)
def test_losses_refused(loss, match):
    with pytest.raises(InputError, match=match):
        capture_gradients(nn.Linear(4, 3), loss, torch.zeros(2, 4), torch.zeros(2, 3))


# --- random numbers ---------------------------------------------------------------------------------------------------
def test_dropout_is_decided_by_its_key():
    torch.manual_seed(0)
    x, target = torch.randint(0, 32, (2, 8)), torch.randint(0, 32, (2, 8))
    captured = capture_gradients(GPT(32, 8, 16, 2, 1, dropout=0.3), language, x, target)  # with attention's dropout
    assert captured.draws
    found = [captured(x, target, key=key, backend=backend) for key, backend in (
        (1, NUMPY), (1, backend_named("torch")), (1, NUMPY), (2, NUMPY),
    )]  # fmt: skip
    assert found[0].total == found[2].total
    assert all(np.array_equal(found[0].gradients[name], found[2].gradients[name]) for name in captured.gradients)
    assert float(found[1].total) == pytest.approx(float(found[0].total), rel=1e-5)
    assert float(found[3].total) != float(found[0].total)
    with pytest.raises(InputError, match="give a key"):
        captured(x, target)


def test_a_checkpointed_layer_draws_once():
    """Its second forward is to see the same dropout, and the gradients are those of the capture's check."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    module = Trap(lambda self, x: checkpoint(lambda y: F.dropout(self.b(y), 0.5), self.a(x), use_reentrant=False))
    captured = capture_gradients(module, F.mse_loss, torch.randn(3, 4), torch.randn(3, 4))
    assert sum("dropout" in call.target for call in captured._recordings.open.calls) == 1


REFUSED = {
    "normal_": (lambda self, x: self.a(x) * torch.empty(4).normal_(), "no key decides"),
    "randint": (lambda self, x: self.a(x) * torch.randint(0, 3, (4,)), "no key decides"),
    "gumbel": (lambda self, x: F.gumbel_softmax(self.a(x)), "no key decides"),
    "data decide": (lambda self, x: self.a(x) * x.sum().item(), "depends on data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    of, match = REFUSED[name]
    with pytest.raises(InputError, match=match):
        capture_gradients(Trap(of), F.mse_loss, torch.randn(3, 4), torch.randn(3, 4))


def test_a_cumulative_average_is_refused():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(InputError, match="momentum=None"):
        capture_gradients(module, F.mse_loss, torch.randn(3, 4), torch.randn(3, 4))


def test_the_check_sees_a_wrong_gradient(monkeypatch):
    """A condition of every capture: an operator lowered wrongly does not pass."""
    from goblin_dask.graphs.capture.aten import LOWERINGS

    right = LOWERINGS["aten.gelu_backward.default"]
    monkeypatch.setitem(LOWERINGS, "aten.gelu_backward.default", lambda *a, **k: right(*a, **k) * np.float32(1.01))
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    with pytest.raises(InputError, match=r"gradient of 0\.\w+ is not autograd's"):
        capture_gradients(module, F.mse_loss, torch.randn(3, 4), torch.randn(3, 4))
