"""Captured programs and the size of the batch: what PyTorch took for granted is kept, or recorded anew, or refused."""

import pickle
import subprocess
import sys

import dask.array as da
import numpy as np
import pytest

import goblin_dask as goblin
from goblin_dask.errors import InputError
from goblin_dask.graphs.capture.blocks import Block
from goblin_dask.graphs.capture.sizes import Sizes, holds

torch = pytest.importorskip("torch")
nn = torch.nn

from goblin_dask.graphs.capture import recordings, torch_internals  # noqa: E402 needs PyTorch

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = (0, 1, 2, 3, 4, 5, 7, 10)


def pairs(x):
    return torch.cat([each.mean(0, keepdim=True) for each in x.split(2)])


def branch(x):
    return x * 2 if x.shape[0] > 3 else x


def single(x):
    return x * 3 if x.shape[0] == 1 else x + 1


def even(x):
    return x * 2 if x.shape[0] % 2 == 0 else x


def swapped(x):
    return torch.cat(x.chunk(2)[::-1])


def folded(x):
    return x.reshape(x.shape[0] // 2, 2, -1).sum(1)


def first(x):
    return x[:3] * 2


def halved(x):
    return nn.functional.interpolate(x.T[None], scale_factor=0.5)[0].T


def squeezed(x):
    return x.squeeze(0)


def whole(x):
    return x.softmax(0)


def rows(x):
    return x.softmax(1)


def places(x):
    return x + torch.arange(x.shape[0])[:, None]


def turned(x):
    return x.flip(0)


def summed(x):
    return x.cumsum(0)


def centred(x):
    return x - x.mean(0)


COURSES = {  # by function: examples that PyTorch can record with an open batch
    pairs: (4,), branch: (2, 4, 6), single: (1, 3), even: (4, 5), swapped: (4, 5), folded: (2, 4), first: (4,),
    halved: (2, 5), squeezed: (2,), whole: (1, 4), rows: (2,), places: (3,), turned: (2,), summed: (2,), centred: (2,),
}  # fmt: skip
CASES = [(function, size) for function, sizes in COURSES.items() for size in sizes]


def eager(function, x):
    """What PyTorch gives; None where it raises."""
    try:
        return function(x)
    except (RuntimeError, IndexError, ZeroDivisionError):
        return None


def same(got, wanted):
    got = np.asarray(got)
    assert got.shape == tuple(wanted.shape)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_every_size_gives_what_pytorch_gives(full, sample, report):
    """Whatever the size of the example was, and where PyTorch raises, a sentence."""
    counted = dict.fromkeys(("equal", "refused, as by PyTorch", "recorded for themselves"), 0)
    must = [(pairs, 4), (branch, 2), (branch, 6)]
    for function, size in [*must, *(case for case in sample(CASES, 1) if case not in must)]:
        captured = goblin.capture(function, torch.zeros(size, 4))
        for batch in SIZES if full else (0, 1, 3, 5):
            x = torch.randn(batch, 4)
            wanted = eager(function, x)
            if wanted is None:
                with pytest.raises(InputError, match=f"a batch of {batch} needs a recording of its own"):
                    captured(x)
                counted["refused, as by PyTorch"] += 1
                continue
            same(captured(x), wanted)
            counted["equal"] += 1
        counted["recorded for themselves"] += len(captured.recordings._single)
    if full:
        report(f"captured programs for other sizes of the batch: {counted}")


@pytest.mark.full
def test_every_block_gives_what_pytorch_gives_for_the_whole(full, sample, report):
    """Or the sentence that says why it cannot."""
    counted = dict.fromkeys(("equal", "refused"), 0)
    must = [(branch, 2), (branch, 6), (rows, 2)]
    chunkings = [(7, 3), (6, 6), (12, 4), (4, (1, 0, 3)), (6, 3), (8, 2), (5, 1), (3, 2), (4, (1, 2, 1))]
    for function, size in [*must, *(case for case in sample(CASES, 1) if case not in must)]:
        captured = goblin.capture(function, torch.zeros(size, 4))
        for length, chunks in chunkings if full else chunkings[:4]:
            x = torch.randn(length, 4)
            wanted = eager(function, x)
            try:
                found = captured(da.from_array(x.numpy(), chunks=(chunks, 2)))
            except InputError:
                assert function is not rows
                counted["refused"] += 1
                continue
            computed = found.compute(scheduler="sync")
            assert found.shape == computed.shape
            same(computed, wanted)
            counted["equal"] += 1
    assert all(counted.values())
    if full:
        report(f"captured programs over blocks of a batch: {counted}")


class Branches(nn.Module):
    """Another layer for a batch of more than three."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x):
        y = self.one(x)
        return y * self.scale if x.shape[0] > 3 else y + self.scale


@pytest.fixture
def recorded(monkeypatch):
    """How often PyTorch recorded."""
    calls, export = [], torch_internals.export

    def counted(*arguments):
        calls.append(arguments)
        return export(*arguments)

    monkeypatch.setattr(torch_internals, "export", counted)
    return calls


class TestRecordings:
    def test_one_is_enough_for_what_does_not_ask(self, recorded):
        net = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2)).eval()
        captured = goblin.capture(net, torch.zeros(1, 4))
        for batch in SIZES:
            x = torch.randn(batch, 4)
            same(captured(x), net(x).detach())
        assert len(recorded) == 1

    def test_of_one_element_go_elsewhere(self):
        captured = pickle.loads(pickle.dumps(goblin.capture(rows, torch.zeros(2, 4))))
        x = torch.randn(1, 4)
        same(captured(x), rows(x))

    def test_are_kept(self, recorded):
        captured = goblin.capture(branch, torch.zeros(2, 4))
        for _ in range(3):
            for batch in (5, 6):
                captured(np.ones((batch, 4), "f4"))
        assert len(recorded) == 3

    def test_are_not_made_without_end(self, monkeypatch):
        monkeypatch.setattr(recordings, "SINGLE", 2)
        captured = goblin.capture(branch, torch.zeros(2, 4))
        for batch in (5, 6):
            captured(torch.ones(batch, 4))
        with pytest.raises(InputError, match=r"a batch of 7 .* holds where n <= 3, and 2 sizes have one: give batches"):
            captured(torch.ones(7, 4))

    def test_are_of_the_parameters_that_were_captured(self):
        """The module is trained on: nothing of it changes what was captured, and nothing is written into it."""
        module = Branches()
        x, y = torch.randn(2, 4), torch.randn(5, 4)
        wanted = [module(each).detach() for each in (x, y)]
        captured = goblin.capture(module, x)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor += 1
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        attributes = set(vars(module))
        for given, each in zip((x, y), wanted, strict=True):
            same(captured(given), each)
        assert set(vars(module)) == attributes
        assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())

    def test_are_not_of_a_function_that_changed(self):
        factor = [2.0]
        captured = goblin.capture(lambda x: x * factor[0] if x.shape[0] > 3 else x + factor[0], torch.zeros(2, 4))
        factor[0] = 5.0
        with pytest.raises(InputError, match=r"a batch of 5 .* not what it was when it was captured: capture it again"):
            captured(torch.ones(5, 4))

    def test_are_of_the_mode_that_was_captured(self):
        module = Branches().eval()
        captured = goblin.capture(module, torch.zeros(2, 4))
        module.train()
        with pytest.raises(InputError, match="not in the mode that it was captured in"):
            captured(torch.ones(5, 4))
        assert module.training

    def test_travel_and_are_not_made_elsewhere(self):
        captured = goblin.capture(branch, torch.zeros(2, 4))
        x = np.ones((5, 4), "f4")
        captured(x)
        again = pickle.loads(pickle.dumps(captured))
        np.testing.assert_array_equal(again(x), 2 * x)
        with pytest.raises(InputError, match="call it with such a batch once where it was captured"):
            again(np.ones((6, 4), "f4"))

    def test_decide_on_the_program(self):
        captured = goblin.capture(branch, torch.zeros(2, 4))
        assert "multiply" in captured.program(5).operators
        program, inputs = captured.bound(np.ones((5, 4), "f4"))
        assert program == captured.program(5)
        assert len(inputs) == 1


class TestConditions:
    @pytest.mark.parametrize(
        ("condition", "sizes"),
        [
            ("n > 3", {4, 5, 6, 7}),
            ("((1 + n) // 2) == 2", {3, 4}),
            ("(-8) + 4*n >= 2", {3, 4, 5, 6, 7}),
            ("(n % 2) == 0 and not (n == 4)", {2, 6}),
            ("math.trunc(0.5*torch.sym_float(n)) != 1", {1, 4, 5, 6, 7}),
            ("(6 // (n - 2)) == 3", {4}),
            ("max(n, 3) == 3 or n == 7", {1, 2, 3, 7}),
            ("L['tensors'][0].stride()[0] == 4", set()),
            ("unheard_of(n)", set()),
            ("n >", set()),
        ],
    )
    def test_hold_for_some_sizes(self, condition, sizes):
        """What has no value for a size, or is not understood, does not hold."""
        assert {n for n in range(1, 8) if holds(condition, n)} == sizes

    def test_hold_for_the_size_that_was_recorded(self):
        sizes = Sizes(4, ("unheard_of(n)",))
        assert sizes.hold(4)
        assert sizes.broken(5) == "unheard_of(n)"


class TestBlocks:
    @pytest.mark.parametrize("function", [whole, turned, summed, centred, places])
    def test_that_depend_on_each_other_are_refused(self, function):
        captured = goblin.capture(function, torch.zeros(2, 4))
        x = torch.randn(6, 4)
        with pytest.raises(InputError, match="elements of the batch depend on each other"):
            captured(da.from_array(x.numpy(), chunks=(3, 4)))
        same(captured(da.from_array(x.numpy(), chunks=(6, 2))).compute(scheduler="sync"), function(x))

    def test_of_which_each_is_another_program_than_the_whole_are_refused(self):
        captured = goblin.capture(branch, torch.zeros(2, 4))
        with pytest.raises(InputError, match=r"a batch of 9 is not computed as its blocks are.*n <= 3"):
            captured(da.ones((9, 4), chunks=(3, 4), dtype="f4"))

    def test_of_integers(self):
        """Of an example that is all zeros."""
        embedding = nn.Embedding(5, 3)
        tokens = da.from_array(np.arange(12).reshape(6, 2) % 5, chunks=(2, 2))
        same(
            goblin.capture(embedding, torch.zeros(2, 2, dtype=int))(tokens).compute(scheduler="sync"),
            embedding(torch.from_numpy(tokens.compute())).detach(),
        )
        coupled = goblin.capture(lambda i: centred(embedding(i)), torch.zeros(2, 2, dtype=int))
        with pytest.raises(InputError, match="depend on each other"):
            coupled(tokens)

    def test_of_unknown_size(self):
        captured = goblin.capture(branch, torch.zeros(4, 4))
        x = np.random.default_rng(0).standard_normal((24, 4)).astype("f4")
        x[:, 0] = np.repeat([1, -1, 1, -1], [7, 5, 5, 7])
        blocks = da.from_array(x, chunks=(12, 4))
        kept = blocks[blocks[:, 0] > 0]
        same(captured(kept).compute(scheduler="sync"), 2 * torch.from_numpy(x[x[:, 0] > 0]))
        net = nn.Linear(4, 3)
        x[:10, 0] = -1
        few = da.from_array(x, chunks=(12, 4))
        with pytest.raises(InputError, match=r"a block has a batch of 0, .* call compute_chunk_sizes"):
            captured(few[few[:, 0] > 0]).compute(scheduler="sync")
        same(
            goblin.capture(net, torch.zeros(4, 4))(few[few[:, 0] > 0]).compute(scheduler="sync"),
            net(torch.from_numpy(x[x[:, 0] > 0])).detach(),
        )

    def test_of_two_arrays_are_those_they_have_together(self):
        """Blocks of 4 and of 6 are blocks of 4, 2, 2 and 4."""
        captured = goblin.capture(lambda a, b: a + b, torch.zeros(2, 4), torch.zeros(2, 4))
        a, b = (np.random.default_rng(i).standard_normal((12, 4)).astype("f4") for i in range(2))
        found = captured(da.from_array(a, chunks=(4, 4)), da.from_array(b, chunks=(6, 4)))
        assert found.chunks[0] == (4, 2, 2, 4)
        same(found.compute(scheduler="sync"), a + b)
        branched = goblin.capture(lambda a, b: a + b if a.shape[0] > 3 else a - b, torch.zeros(4, 4), torch.zeros(4, 4))
        with pytest.raises(InputError, match="depend on each other, or on how many there are"):
            branched(da.from_array(a, chunks=(4, 4)), da.from_array(b, chunks=(6, 4)))

    def test_need_neither_pytorch_nor_the_parameters_twice(self, tmp_path):
        module = nn.Linear(300, 300)
        captured = goblin.capture(module, torch.zeros(2, 300))
        sent = pickle.dumps(Block(captured.recordings, [0], [0], [None], [3]))
        assert len(sent) < 20_000
        x = np.random.default_rng(0).standard_normal((3, 300)).astype("f4")
        (tmp_path / "block").write_bytes(pickle.dumps((sent, x, list(captured.parameters.values()))))
        script = (
            "import pickle, sys; sys.modules['torch'] = None; sent, x, arrays = pickle.load(open('block', 'rb')); "
            "sys.stdout.buffer.write(pickle.loads(sent)(x, *arrays).tobytes())"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, check=False)
        assert not done.returncode, done.stderr.decode()[-2000:]
        same(np.frombuffer(done.stdout, "f4").reshape(3, 300), module(torch.from_numpy(x)).detach())
