"""Training on a grid: the losses of plain PyTorch over the same micro-batches, whoever computed them."""

import copy
import dataclasses
import functools
import itertools
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import goblin_dask as goblin  # noqa: E402
from goblin_dask.errors import InputError, TooLarge  # noqa: E402
from goblin_dask.graphs.backends.base import NUMPY  # noqa: E402
from goblin_dask.graphs.capture.joint import capture_gradients  # noqa: E402
from goblin_dask.graphs.execute import execute  # noqa: E402
from goblin_dask.graphs.operators import CATALOGUE  # noqa: E402
from goblin_dask.messages import GridOffer  # noqa: E402
from goblin_dask.testing.inprocess import InProcessGrid  # noqa: E402
from goblin_dask.testing.liar import Liar, confessions  # noqa: E402
from goblin_dask.testing.models import GPT, ViT  # noqa: E402
from goblin_dask.training import Trainer  # noqa: E402

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
RELATIVE = {torch.float32: 1e-4, torch.float64: 1e-9}


@pytest.fixture(scope="module")
def grid():
    with InProcessGrid(volunteers=2) as grid:
        yield grid


def language(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def still(module):
    """Without dropout."""
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
        if isinstance(getattr(each, "dropout", None), float):
            each.dropout = 0.0
    return module


def images(count=20):
    return torch.randn(count, 3, 8, 8), torch.randint(0, 5, (count,))


def texts(count=20):
    tokens = torch.randint(0, 32, (count, 9))
    return tokens[:, :-1], tokens[:, 1:]


def cnn():
    """No bias before the norm: its true gradient is zero, and Adam walks at full speed along what rounding leaves."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 5),
    )  # fmt: skip


MODELS = {
    "CNN with BatchNorm": lambda: (cnn(), F.cross_entropy, images()),
    "GPT": lambda: (still(GPT(32, 8, 16, 2, 1)), language, texts()),
    "ViT": lambda: (still(ViT(8, 4, 16, 2, 1, classes=5)), F.cross_entropy, images()),
}
OPTIMIZERS = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3),
}


def plain(module, loss, optimizer, data, *, rounds, batch, micro_batch, clip_norm=None, scheduler=None):
    """Losses and module of a loop as everybody writes it, with gradients accumulated over micro-batches."""
    module = copy.deepcopy(module)
    optimizer = optimizer(list(module.parameters()))
    scheduler = scheduler(optimizer) if scheduler else None
    x, y = data
    losses, start, epoch = [], 0, 0
    for _ in range(rounds):
        order = np.random.default_rng([0, epoch]).permutation(len(x))
        rows = order[start : start + batch]
        total = 0.0
        for part in np.split(rows, range(micro_batch, len(rows), micro_batch)):
            found = loss(module(x[part]), y[part]) * (len(part) / len(rows))
            found.backward()
            total += float(found)
        if clip_norm:
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        losses.append(total)
        start += len(rows)
        if start >= len(x):
            start, epoch = 0, epoch + 1
    return losses, module


def losses_of(trainer, data, rounds, batch):
    return [round.loss for round in trainer.fit(data, rounds=rounds, batch=batch, shuffle=True)]


CASES = list(itertools.product(MODELS, OPTIMIZERS, RELATIVE))


@pytest.mark.full
@pytest.mark.parametrize(("name", "optimizer", "dtype"), CASES, ids=str)
def test_losses_are_those_of_pytorch(grid, name, optimizer, dtype, full, sample, report):
    """20 rounds, 6 by default; the last batch of an epoch is smaller."""
    rounds = 20 if full else 6
    if (name, optimizer, dtype) not in sample(CASES, 2):
        pytest.skip("not in the sample")
    torch.manual_seed(0)
    module, loss, data = MODELS[name]()
    module, data = module.to(dtype), tuple(each.to(dtype) if each.is_floating_point() else each for each in data)
    before = copy.deepcopy(module.state_dict())
    wanted, there = plain(module, loss, OPTIMIZERS[optimizer], data, rounds=rounds, batch=12, micro_batch=4)
    trainer = Trainer(module, loss=loss, optimizer=OPTIMIZERS[optimizer], lab=grid.lab, micro_batch=4, stages=2)
    counted = grid.counts()["grid"]
    found = losses_of(trainer, data, rounds, 12)
    assert grid.counts()["grid"] - counted == rounds // 2 * (3 + 2) * 3  # one stage forward, two back
    apart = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    assert apart <= RELATIVE[dtype]
    report(f"{name}, {optimizer}, {dtype}: losses of {rounds} rounds at most {apart:.1e} from PyTorch's")
    for (key, a), b in zip(trainer.module().state_dict().items(), there.state_dict().values(), strict=True):
        if "running" in key or "tracked" in key:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in before.items())


def test_clipping_schedules_and_state_that_is_handed_on(grid):
    """The vectors of spectral_norm depend on those before: micro-batches, one of them smaller, wait for each other."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.GELU(), nn.Linear(6, 2))
    data = torch.randn(20, 6), torch.randn(20, 2)
    options = {
        "clip_norm": 0.1,
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    }
    optimizer = OPTIMIZERS["AdamW"]
    wanted, there = plain(module, F.mse_loss, optimizer, data, rounds=5, batch=10, micro_batch=4, **options)
    trainer = Trainer(module, loss=F.mse_loss, optimizer=optimizer, lab=grid.lab, micro_batch=4, **options)
    assert losses_of(trainer, data, 5, 10) == pytest.approx(wanted, rel=1e-4)
    for a, b in zip(trainer.module().state_dict().values(), there.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert trainer.evaluate(data) == pytest.approx(float(F.mse_loss(there.eval()(data[0]), data[1])), rel=1e-3)


def test_evaluation_is_in_evaluation_mode(grid):
    torch.manual_seed(0)
    module, data = nn.Sequential(cnn(), nn.Dropout(0.5)), images(11)
    trainer = Trainer(module, loss=F.cross_entropy, optimizer=OPTIMIZERS["AdamW"], lab=grid.lab, micro_batch=4)
    evaluated = copy.deepcopy(module).eval()
    with torch.no_grad():
        output = evaluated(data[0])
    assert trainer.evaluate(data) == pytest.approx(float(F.cross_entropy(output, data[1])), rel=1e-5)
    accuracy = trainer.evaluate(data, measure=lambda y, t: ((y.argmax(1) == t).sum(), len(t)))
    assert accuracy == pytest.approx(float((output.argmax(1) == data[1]).float().mean()))
    assert trainer.module().training


def test_a_round_in_which_nothing_counts(grid):
    trainer = Trainer(nn.Linear(3, 4), loss=F.cross_entropy, optimizer=OPTIMIZERS["AdamW"], lab=grid.lab, micro_batch=2)
    before = copy.deepcopy(trainer.module().state_dict())
    data = torch.randn(4, 3), torch.full((4,), -100)
    assert np.isnan(losses_of(trainer, data, 1, 4)).all()
    assert all(torch.equal(a, b) for a, b in zip(before.values(), trainer.module().state_dict().values(), strict=True))


# --- the same, whoever is there ---------------------------------------------------------------------------------------
DROPPING = {"loss": language, "optimizer": OPTIMIZERS["AdamW"], "micro_batch": 2, "stages": 2}


ROUNDS = 4


@functools.cache
def dropping():
    """A model, which trainers leave as it is, and its data."""
    torch.manual_seed(1)
    return GPT(32, 8, 16, 2, 1, dropout=0.2), texts(16)


@pytest.fixture(scope="module")
def once():
    """A model is captured once for all that train it: that is most of what they would do."""
    known = {}

    def captured(model, loss, inputs, target):
        key = id(model), loss, tuple(each.shape for each in (*inputs, target))
        if key not in known:
            known[key] = model, capture_gradients(model, loss, inputs, target)
        return known[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("goblin_dask.training.trainer.capture_gradients", captured)
        yield


@pytest.fixture(scope="module")
def dropped(grid, once):
    """Losses of some rounds with dropout, on two volunteers."""
    module, data = dropping()
    return losses_of(Trainer(module, lab=grid.lab, **DROPPING), data, ROUNDS, 8)


def test_dropout_does_not_depend_on_the_number_of_volunteers(dropped):
    module, data = dropping()
    with InProcessGrid(volunteers=3) as other:
        trainer = Trainer(module, lab=other.lab, **DROPPING)
        assert losses_of(trainer, data, ROUNDS, 8) == dropped
    assert losses_differ(module, data, dropped)


def losses_differ(module, data, dropped):
    """Without dropout they are others: it was there."""
    found, _ = plain(
        still(copy.deepcopy(module)), language, OPTIMIZERS["AdamW"], data, rounds=1, batch=8, micro_batch=2
    )
    return found[0] != pytest.approx(dropped[0], rel=1e-3)


def test_resuming_gives_the_same_losses(grid, dropped, tmp_path):
    module, data = dropping()
    trainer = Trainer(module, lab=grid.lab, **DROPPING)
    first = losses_of(trainer, data, 2, 8)
    trainer.save(tmp_path / "run.zarr")
    losses_of(trainer, data, 1, 8)  # is lost
    resumed = Trainer.resume(tmp_path / "run.zarr", module, lab=grid.lab, loss=language, optimizer=OPTIMIZERS["AdamW"])
    assert resumed.rounds == 2
    assert first + losses_of(resumed, data, ROUNDS - 2, 8) == dropped
    assert list(resumed.history.values("loss")) == dropped
    with pytest.raises(InputError, match="not the one that was saved"):
        Trainer.resume(tmp_path / "run.zarr", cnn(), lab=grid.lab, loss=language, optimizer=OPTIMIZERS["AdamW"])
    with pytest.raises(InputError, match="no state of training"):
        Trainer.resume(tmp_path / "none.zarr", module, lab=grid.lab, loss=language, optimizer=OPTIMIZERS["AdamW"])


LIES = {
    "inside": {},
    "blown_up": {},
    "sign": {},
    "all_zeros": {},
    "nan": {},
    "bias": {"times": 3.0},
    "bias, faint": {"times": 0.3},
}
"""Ways to poison gradients, with options: an operator that is a thousand times too large, and some of `LIARS`."""
POISONED = list(itertools.product(LIES, ("auto", "replicate")))


def poisoned(times, xp, operands, attributes):
    times.append(1)
    results = CATALOGUE["_log_softmax_backward_data"].kernel(xp, operands, attributes)
    return tuple(np.float32(1000) * each for each in results)


@pytest.mark.full
@pytest.mark.parametrize(("lie", "verify"), POISONED, ids=str)
def test_poisoned_gradients_reach_no_optimizer(once, dropped, lie, verify, sample, report, monkeypatch, tmp_path):
    """One of four volunteers lies, and none of it is used, but for what the rule cannot tell from rounding."""
    if (lie, verify) not in sample(POISONED, 1):
        pytest.skip("not in the sample")
    times = []
    overrides = {"_log_softmax_backward_data": functools.partial(poisoned, times)} if lie == "inside" else {}
    lying = dataclasses.replace(NUMPY, overrides=overrides, inplace=False)
    numbers = itertools.count()
    if lie != "inside":
        liar = Liar(lie.partition(",")[0], str(tmp_path / "journal"), **LIES[lie])

        def executed(program, inputs, *, backend=None, **more):
            return (liar if backend is lying else execute)(program, inputs, backend=backend, **more)

        monkeypatch.setattr("goblin_dask.volunteer.runner.execute", executed)

    def tamper(number, runner):
        if number == 1:
            runner._backend = lying

    config = {"network": lambda address: f"network {next(numbers)}"}
    with InProcessGrid(volunteers=4, gateway_config=config, tamper=tamper) as other:
        module, data = dropping()
        trainer = Trainer(module, lab=other.lab, verify=verify, **DROPPING)
        fitting = trainer.fit(data, rounds=ROUNDS + 20, batch=8, shuffle=True)
        rounds = list(itertools.islice(fitting, ROUNDS))
        for _ in range(20):  # on a busy machine the liar may have had nothing to lie about
            hosts = other.gateway.dispatcher.reputation.hosts.values()
            wrong = {host.owner: host.wrong for host in hosts if host.wrong}
            told = confessions(tmp_path / "journal")
            if wrong or (lie == "bias, faint" and any(each.lie for each in told)):
                break
            rounds.append(next(fitting))
        fitting.close()
    found = [round.loss for round in rounds[:ROUNDS]]
    apart = max(abs(a - b) / abs(b) for a, b in zip(found, dropped, strict=True))
    assert all(round.verified for round in rounds)
    assert times or sum(each.lie for each in told), "nobody lied"
    if lie == "bias, faint":
        assert set(wrong) <= {"volunteer 1"}
    else:
        assert found == dropped
        assert set(wrong) == {"volunteer 1"}
    report(
        f"poisoned gradients, {lie}, verify={verify}: {sum(each.lie for each in told)} lies, proven {wrong}; losses "
        f"{apart:.1e} from honest ones; {rounds[-1].certificate['summary']}"
    )


def test_what_a_researcher_sees(grid, tmp_path):
    """A plan before anything runs, then rounds until the loss no longer falls, with events and a picture."""
    events = []
    module, data = nn.Linear(6, 2), (torch.randn(20, 6), torch.randn(20, 2))
    given = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "lab": grid.lab, "micro_batch": 4}
    trainer = Trainer(module, metrics=events.append, **given)
    counted = grid.counts()["grid"]
    plan = trainer.plan(data, batch=20)
    assert plan.micro_batches == 5
    assert "backward" in str(plan)
    assert grid.counts()["grid"] == counted
    rounds = list(trainer.fit(data, rounds=9, batch=20, stop=goblin.training.EarlyStop(patience=2)))
    assert [each.number for each in rounds] == [1, 2, 3]  # one that improves on nothing, and two that do not improve
    assert list(trainer.history) == rounds
    trainer.save(tmp_path / "run.zarr")
    trainer.evaluate(data)
    names = [event["event"] for event in events]
    assert names == ["begin", "round", "round", "round", "stopped", "saved", "evaluated"]
    assert [event["loss"] for event in events[1:4]] == [each.loss for each in rounds]
    trainer.history.save(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_layer_larger_than_a_volunteer_is_computed_in_blocks(grid, report):
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(64, 256, bias=False),
        nn.BatchNorm1d(256),
        nn.GELU(),
        nn.Linear(256, 1024),
        nn.ReLU(),
        nn.Linear(1024, 5),
    )
    data = torch.randn(20, 64), torch.randint(0, 5, (20,))
    wanted, there = plain(module, F.cross_entropy, OPTIMIZERS["AdamW"], data, rounds=3, batch=12, micro_batch=4)
    trainer = Trainer(
        module, loss=F.cross_entropy, optimizer=OPTIMIZERS["AdamW"], lab=grid.lab, micro_batch=4,
        volunteer_memory="1.5 MB",
    )  # fmt: skip
    plan = trainer.plan(data, batch=12)
    blocked = [each for each in plan.entries if each.blocks > 1]
    assert blocked
    assert len(blocked) < len(plan.entries)
    assert not plan.too_large
    assert max(each.parameters for each in blocked) >= 1024 * 256 * 4
    rounds = list(trainer.fit(data, rounds=3, batch=12, shuffle=True))
    found = [each.loss for each in rounds]
    apart = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    report(f"{plan.tasks} tasks, some on blocks of a layer: losses of 3 rounds at most {apart:.1e} from PyTorch's")
    assert apart <= RELATIVE[torch.float32]
    assert sum(each["parts"] for name, each in rounds[0].certificate["methods"].items() if name != "laboratory") >= (
        plan.tasks
    )
    for a, b in zip(trainer.module().parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


# --- what is refused --------------------------------------------------------------------------------------------------
def test_what_does_not_fit_is_refused_with_its_numbers():
    lab = types.SimpleNamespace(offer=GridOffer(1, 1, memory=(20_000,)), progress=False)
    trainer = Trainer(nn.Linear(1000, 100), loss=F.mse_loss, optimizer=OPTIMIZERS["AdamW"], lab=lab)
    with pytest.raises(TooLarge, match="smaller micro-batches") as caught:
        next(trainer.fit((torch.randn(8, 1000), torch.randn(8, 100)), rounds=1, batch=8))
    assert caught.value.offers == 20_000
    assert caught.value.needs >= 800_000


def test_what_is_refused():
    lab = types.SimpleNamespace(offer=GridOffer(0, 0))
    given = {"loss": F.mse_loss, "optimizer": OPTIMIZERS["AdamW"], "lab": lab}
    with pytest.raises(InputError, match="no parameter"):
        Trainer(nn.Linear(2, 2).requires_grad_(False), **given)
    with pytest.raises(InputError, match="at least one row"):
        Trainer(nn.Linear(2, 2), micro_batch=0, **given)
    with pytest.raises(InputError, match="how many rows"):
        Trainer(nn.Linear(2, 2), **given).fit((torch.zeros(4, 2), torch.zeros(4, 2)), rounds=1)
    assert goblin.training.Trainer is Trainer
