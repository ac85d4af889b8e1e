"""Divisions: their pieces, one after another, give the whole program's numbers to the bit, within memory."""

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from goblin_dask.errors import InputError, TooLarge  # noqa: E402
from goblin_dask.graphs.builder import Builder  # noqa: E402
from goblin_dask.graphs.capture.joint import capture_gradients  # noqa: E402
from goblin_dask.graphs.check import check  # noqa: E402
from goblin_dask.graphs.cost import peak  # noqa: E402
from goblin_dask.graphs.execute import execute  # noqa: E402
from goblin_dask.graphs.program import encode  # noqa: E402
from goblin_dask.messages import ArraySpec  # noqa: E402
from goblin_dask.testing.models import GPT, Recurrent, UNet, ViT  # noqa: E402
from goblin_dask.training.division import divide  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def language(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def tokens(*shape):
    return torch.randint(0, 61, shape)


MODELS = {
    "GPT": lambda: (GPT(61, 16, 24, 3, 2, 0.1), language, tokens(2, 16), tokens(2, 16)),
    "ViT": lambda: (ViT(8, 4, 24, 3, 2), F.cross_entropy, torch.randn(2, 3, 8, 8), tokens(2) % 10),
    "CNN": lambda: (cnn(), F.cross_entropy, torch.randn(4, 3, 8, 8), tokens(4) % 5),
    "U-Net": lambda: (UNet(1, 4), F.mse_loss, torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8)),
    "LSTM": lambda: (Recurrent(nn.LSTM, 8), F.cross_entropy, torch.randn(2, 4, 16), tokens(2) % 5),
}


@functools.cache
def captured(name):
    """The joint program, its inputs, and what `divide` wants to know of both."""
    torch.manual_seed(0)
    model, loss, x, target = MODELS[name]()
    found = capture_gradients(model, loss, x, target, check=False)
    key = np.array([3, 4], np.uint64) if found.draws else None
    inputs = found.sources(found.leaves(x, target), found.parameters, key)
    fixed = [slot for slot, array in enumerate(inputs) if any(array is each for each in found.parameters.values())]
    program = found.program()
    state = range(2 + len(found.gradients), len(program.outputs))
    return program, inputs, {"loss": (0, 1), "fixed": fixed, "state": state}


def execute_pieces(division, inputs, packed):
    """All values that the pieces give."""
    values = dict(enumerate(inputs))
    for number, kind, part in division.pieces():
        if packed:
            part = division.packed(number, kind)
        check(part.program)
        given = [
            values[read] if isinstance(read, int) else np.concatenate([values[slot].ravel() for slot in read])
            for read in part.reads
        ]
        values.update(zip(part.gives, execute(part.program, given), strict=True))
    return values


def require_equal(division, inputs):
    """What pieces give is what the whole program does, bit for bit."""
    program = division.program
    whole = [each.tobytes() for each in execute(program, inputs)]
    for packed in (False, True):
        values = execute_pieces(division, inputs, packed)
        found = [values[value] for value in division.loss]
        found += [functools.reduce(np.add, [values[value] for value in terms]) for terms in division.gradients]
        assert [each.tobytes() for each in found] == whole


@pytest.mark.full
def test_pieces_give_what_the_whole_program_does(full):
    for name in MODELS if full else ("GPT", "CNN"):
        program, inputs, known = captured(name)
        for count in range(1, 7) if full else (1, 3, 6):
            division = divide(program, stages=count, **known)
            assert len(division.stages) == count, name
            require_equal(division, inputs)
            last = division.stages[-1]
            assert last.forward is None
            assert last.backward is not None
            assert all(stage.forward is not None for stage in division.stages[:-1])
            read = {slot for stage in division.stages for slot in stage.parameters}
            assert read == set(known["fixed"])


def test_a_cut_of_a_gpt_is_crossed_by_one_tensor_each_way():
    program, inputs, known = captured("GPT")
    for count in (2, 3):
        division = divide(program, stages=count, **known)
        values = execute_pieces(division, inputs, False)
        results = {*division.loss, *(term for terms in division.gradients for term in terms)}
        for number, stage in enumerate(division.stages):
            crossing = [] if stage.forward is None else list(stage.forward.gives)
            assert len(crossing) == (stage is not division.stages[-1])
            back = set(stage.backward.gives) - results
            assert len(back) == (number > 0)
            assert {values[value].shape for value in (*crossing, *back)} == {(2, 16, 24)}
        assert max(division.flops) <= 0.55 * sum(division.flops)


def test_a_tied_weight_has_a_gradient_of_each_stage_that_reads_it():
    program, _, known = captured("GPT")
    division = divide(program, stages=3, **known)
    (tied,) = [terms for terms in division.gradients if len(terms) > 1]
    first, last = division.stages[0], division.stages[-1]
    assert tied[0] in first.backward.gives
    assert tied[1] in last.backward.gives
    assert set(first.parameters) & set(last.parameters)
    assert all(len(terms) == 1 for terms in divide(program, stages=1, **known).gradients)


def test_random_numbers_and_masks_are_drawn_again_not_passed():
    program, _, known = captured("GPT")
    division = divide(program, stages=3, **known)
    drawn = [sum(n.operator == "random_uniform" for n in part.program.nodes) for _, _, part in division.pieces()]
    assert sum(drawn) > sum(n.operator == "random_uniform" for n in program.nodes)
    for _, kind, part in division.pieces():
        passed = [
            spec for read, spec in zip(part.reads, part.program.inputs, strict=True) if read >= len(program.inputs)
        ]
        assert {spec.shape for spec in passed} <= {(2, 16, 24)}, kind


def test_memory_decides_how_many_stages_there_are():
    program, inputs, known = captured("GPT")
    alone = divide(program, **known)
    assert len(alone.stages) == 1
    memory = alone.peaks[0] // 2
    division = divide(program, memory=memory, **known)
    assert max(division.peaks) <= memory
    assert all(peak(part.program) <= memory for _, _, part in division.pieces())
    assert division.too_large(memory) == ()
    fewer = divide(program, stages=len(division.stages) - 1, **known)
    assert fewer.too_large(memory)
    require_equal(division, inputs)


def test_stages_that_fit_with_their_neighbours_are_put_together():
    """No even division into fewer stages fits, though dividing in halves began with more."""
    program, inputs, known = captured("GPT")
    memory = 120_000
    division = divide(program, memory=memory, anyway=True, **known)
    require_equal(division, inputs)
    fewer = [divide(program, stages=count, **known) for count in range(1, len(division.stages))]
    assert all(each.too_large(memory) for each in fewer)


def test_what_cannot_be_divided_is_told():
    program, inputs, known = captured("GPT")
    memory = 60_000
    with pytest.raises(
        TooLarge, match=r"is too large, in it \w+ of float32 \(.*: take smaller micro-batches"
    ) as caught:
        divide(program, memory=memory, **known)
    assert caught.value.offers == memory
    division = divide(program, memory=memory, anyway=True, **known)
    assert caught.value.needs == max(division.peaks) > memory
    assert 0 < len(division.too_large(memory)) < len(division.stages)
    require_equal(division, inputs)
    with pytest.raises(InputError, match="at least one stage"):
        divide(program, stages=0, **known)


def test_divisions_are_the_same_every_time():
    program, _, known = captured("CNN")
    one, two = (divide(program, stages=3, **known) for _ in range(2))
    assert one.stages == two.stages
    assert one.gradients == two.gradients
    assert [encode(p.program) for _, _, p in one.pieces()] == [encode(p.program) for _, _, p in two.pieces()]


def test_statistics_of_batch_norms_come_from_forward_pieces():
    """All but the number of rows, which is a constant, and those of the last stage."""
    program, _, known = captured("CNN")
    division = divide(program, stages=6, **known)
    given = {value for stage in division.stages if stage.forward for value in stage.forward.gives}
    stated = [division.gradients[position - 2][0] for position in known["state"]]
    assert len(given.intersection(stated)) >= 2
    assert set(stated) - given <= set(division.stages[-1].backward.gives)


def perceptron(weights, frozen=0):
    """A joint program by hand: ``x = x + tanh(x @ w)`` for each weight, by number, and gradients of those not frozen.

    Returns the program, drawn inputs, and the slots of the weights.
    """
    build = Builder()
    x = build.input(ArraySpec((4, 8), "float32"))
    slots = {number: build.input(ArraySpec((8, 8), "float32")) for number in sorted(set(weights))}
    saved, there = [], x
    for number in weights:
        (inner,) = build.add("tanh", build.add("matmul", [there, slots[number]]))
        saved.append((number, there, inner))
        (there,) = build.add("add", [there, inner])
    (loss,) = build.add("sum", [there])
    (back,) = build.add("full", [build.constant(np.float32(1))], shape=(4, 8))
    one, gradients = build.constant(np.float32(1)), {}
    for number, before, inner in reversed(saved[frozen:]):
        (slope,) = build.add("subtract", [one, *build.add("multiply", [inner, inner])])
        (outer,) = build.add("multiply", [back, slope])
        (found,) = build.add("matmul", [*build.add("permute_dims", [before], axes=(1, 0)), outer])
        gradients[number] = build.add("add", [gradients[number], found])[0] if number in gradients else found
        (down,) = build.add("matmul", [outer, *build.add("permute_dims", [slots[number]], axes=(1, 0))])
        (back,) = build.add("add", [back, down])
    program, order = build.finish([loss, build.constant(np.float32(4)), *gradients.values()])
    random = np.random.default_rng(0)
    inputs = [random.standard_normal(spec.shape).astype(spec.dtype) for spec in program.inputs]
    return program, inputs, [slot for slot, declared in enumerate(order) if declared]


def test_a_weight_read_in_three_stages_has_three_gradients_added_in_the_order_of_the_whole():
    program, inputs, fixed = perceptron([1, 2, 1, 3, 1])
    for count in range(1, 15):
        require_equal(divide(program, loss=(0, 1), fixed=fixed, stages=count), inputs)
    division = divide(program, loss=(0, 1), fixed=fixed, stages=5)
    assert sorted(map(len, division.gradients)) == [1, 1, 3]


def test_stages_before_all_that_is_trained_go_forward_only():
    program, inputs, fixed = perceptron([1, 2, 3, 4], frozen=2)
    division = divide(program, loss=(0, 1), fixed=fixed, stages=4)
    require_equal(division, inputs)
    assert division.stages[0].backward is None
    assert division.stages[-1].forward is None
    assert [kind for _, kind, _ in division.pieces()].count("forward") == 3


def test_without_gradients_all_pieces_go_forward():
    build = Builder()
    x = build.input(ArraySpec((4, 8), "float32"))
    weights = [build.input(ArraySpec((8, 8), "float32")) for _ in range(4)]
    y = x
    for weight in weights:
        (y,) = build.add("relu", build.add("matmul", [y, weight]))
    program, slots = build.finish([*build.add("sum", [y]), build.constant(np.float32(4)), y])
    fixed = [number for number, slot in enumerate(slots) if slot]
    inputs = [np.random.default_rng(n).standard_normal(s.shape).astype(s.dtype) for n, s in enumerate(program.inputs)]
    for count in (1, 2, 4, 100):
        division = divide(program, loss=(0, 1, 2), fixed=fixed, stages=count)
        assert len(division.stages) == min(count, 9)
        assert all(stage.backward is None for stage in division.stages)
        require_equal(division, inputs)
    assert [len(stage.parameters) for stage in divide(program, loss=(0, 1, 2), fixed=fixed, stages=4).stages] == [1] * 4
