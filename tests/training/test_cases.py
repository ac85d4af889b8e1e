"""What goes wrong silently when training is not what PyTorch does: each with the value that is right."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from goblin_dask.testing.inprocess import InProcessGrid  # noqa: E402
from goblin_dask.training import Trainer  # noqa: E402

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def lab():
    with InProcessGrid(volunteers=2) as grid:
        yield grid.lab


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def decaying(parameters):
    """Takes a step also where the gradient is zero, and none where there is none."""
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def total(output, target):
    """A loss whose sum is that of the output; the target is there to be counted."""
    return output.sum(), len(target)


class Scaled(nn.Module):
    """One number times the input."""

    def __init__(self, start):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def forward(self, x):
        return self.w * x


# --- optimizers -------------------------------------------------------------------------------------------------------
def test_adam_counts_its_steps(lab, tmp_path):
    """Gradients 1, 2, 3 at a rate of 0.1 lead from 0 to -0.2923, also where training is resumed in between."""

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.1)

    data = torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3)
    trainer = Trainer(Scaled(0.0), loss=total, optimizer=adam, lab=lab, micro_batch=1)
    for _ in trainer.fit(data, rounds=1, batch=1):
        trainer.save(tmp_path / "run.zarr")
    resumed = Trainer.resume(tmp_path / "run.zarr", Scaled(0.0), loss=total, optimizer=adam, lab=lab)
    for each in (trainer, resumed):
        assert len(list(each.fit(data, rounds=2, batch=1))) == 2
        assert float(each.module().w) == pytest.approx(-0.2923, abs=5e-5)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.outward.weight = self.inward.weight

    def forward(self, tokens):
        return self.outward(self.inward(tokens))


def test_tied_weights_take_one_step(lab):
    """Both uses are in the gradient, momentum is kept once, and they are still one parameter afterwards."""
    torch.manual_seed(0)
    module, data = Tied(), (torch.tensor([0, 3, 1, 3]), torch.tensor([1, 2, 4, 0]))
    wanted = copy.deepcopy(module)
    optimizer = decaying(list(wanted.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(wanted(data[0]), data[1]).backward()
        optimizer.step()
    trainer = Trainer(module, loss=F.cross_entropy, optimizer=decaying, lab=lab, micro_batch=2)
    assert len(list(trainer.fit(data, rounds=3, batch=4))) == 3
    found = trainer.module()
    assert found.outward.weight is found.inward.weight
    torch.testing.assert_close(found.inward.weight, wanted.inward.weight, rtol=1e-4, atol=1e-5)


# --- state ------------------------------------------------------------------------------------------------------------
class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x):
        self.seen += x.sum(0)
        return self.seen * 2 * self.w


def test_what_a_module_counts_goes_from_part_to_part_and_from_round_to_round(lab):
    """Each part sees what those before it have left: outputs 2, 4, 6, and 8, 10, 12 in the second round."""
    module = Counter()
    data = torch.ones(3, 2), torch.zeros(3)
    trainer = Trainer(module, loss=total, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), lab=lab, micro_batch=1)
    assert [round.loss for round in trainer.fit(data, rounds=2, batch=3)] == [
        2 * (2 + 4 + 6) / 3,
        2 * (8 + 10 + 12) / 3,
    ]
    assert trainer.module().seen.tolist() == [6, 6]
    assert module.seen.tolist() == [0, 0]


# --- means ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [0, 1, 3, 2, 4]], ids=["rows 3 + 2", "a part is ignored whole"])
def test_a_mean_is_over_the_rows_that_count(lab, order):
    scores = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))[order]
    target = torch.tensor([0, 1, -100, 2, -100])[order]
    trainer = Trainer(Scaled(1.0), loss=F.cross_entropy, optimizer=sgd, lab=lab, micro_batch=3)
    (round,) = trainer.fit((scores, target), rounds=1, batch=5)
    assert round.loss == pytest.approx(1.0567, abs=5e-5)  # the mean of the parts' means would be 0.9705
    wanted = Scaled(1.0)
    F.cross_entropy(wanted(scores), target).backward()
    assert float(trainer.module().w) == pytest.approx(1 - float(wanted.w.grad), rel=1e-5)


# --- gradients --------------------------------------------------------------------------------------------------------
class Sign(torch.autograd.Function):
    """The sign, whose gradient is said to be five."""

    @staticmethod
    def forward(context, x):
        return torch.sign(x)

    @staticmethod
    def backward(context, gradient):
        return 5 * gradient


class Vector(nn.Module):
    """A function of two parameters and the input."""

    def __init__(self, of):
        super().__init__()
        self.u, self.v, self.of = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3)), of

    def forward(self, x):
        return self.of(self.u, self.v, x)


def not_graded(u, v, x):
    with torch.no_grad():
        inner = x * u
    return inner * v


GRADIENTS = {
    # Gradients of the sum with respect to u and v at ones, for x = (1, 2, 3); None: there is none.
    "detached": (lambda u, v, x: (x * u).detach() * v, None, [1, 2, 3]),
    "detached, and not": (lambda u, v, x: (x * u).detach() * v * u, [1, 2, 3], [1, 2, 3]),
    "no_grad": (not_graded, None, [1, 2, 3]),
    "straight through": (lambda u, v, x: u * x * v + (torch.round(u * 0.7) - u * x * v).detach(), [1, 2, 3], [1, 2, 3]),
    "custom function": (lambda u, v, x: Sign.apply(u * x) * v, [5, 10, 15], [1, 1, 1]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_that_are_meant(lab, name):
    of, *gradients = GRADIENTS[name]
    trainer = Trainer(Vector(of), loss=total, optimizer=sgd, lab=lab, micro_batch=1)
    assert len(list(trainer.fit((torch.tensor([[1.0, 2.0, 3.0]]), torch.zeros(1)), rounds=1, batch=1))) == 1
    found = trainer.module()
    for parameter, gradient in zip((found.u, found.v), gradients, strict=True):
        wanted = torch.ones(3) if gradient is None else 1 - torch.tensor(gradient, dtype=torch.float32)
        torch.testing.assert_close(parameter.detach(), wanted)


def test_what_has_no_gradient_does_not_decay(lab):
    """Frozen, or only ever used where nothing is recorded: an optimizer that decays weights leaves both alone."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), Vector(not_graded), nn.Linear(3, 3))
    module[2].weight.requires_grad_(False)
    data = torch.randn(4, 3), torch.randn(4, 3)
    wanted = copy.deepcopy(module)
    optimizer = decaying([each for each in wanted.parameters() if each.requires_grad])
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(wanted(data[0]), data[1]).backward()
        optimizer.step()
    trainer = Trainer(module, loss=F.mse_loss, optimizer=decaying, lab=lab, micro_batch=2)
    assert len(list(trainer.fit(data, rounds=2, batch=4))) == 2
    for (name, found), right, before in zip(
        trainer.module().named_parameters(), wanted.parameters(), module.parameters(), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
        assert torch.equal(found, before) is (name in {"0.weight", "0.bias", "1.u", "2.weight"})
