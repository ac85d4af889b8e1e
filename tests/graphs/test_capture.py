"""PyTorch modules and functions as programs: what is captured, what is refused, and why."""

import pickle
import re
import traceback
import warnings

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest

import goblin_dask as goblin
from goblin_dask.errors import InputError
from goblin_dask.graphs.check import check
from goblin_dask.graphs.schedule import schedule
from goblin_dask.testing.inprocess import InProcessGrid

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.filterwarnings("ignore")


class Counter(nn.Module):
    """State that changes with every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(2))

    def forward(self, x):
        self.n += x
        return self.n * 2


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.o = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.o.weight = self.e.weight

    def forward(self, i):
        return self.o(self.e(i))


class Both(nn.Module):
    """Two results in a dict, of arguments in a dict."""

    def __init__(self):
        super().__init__()
        self.linear, self.lstm = nn.Linear(8, 4), nn.LSTM(4, 6, batch_first=True)

    def forward(self, given, *, scale=1.0):
        y = self.linear(given["x"]) * scale
        return {"y": y, "z": self.lstm(y)[0].mean(1)}


@pytest.fixture(scope="module")
def both():
    """The module, and its capture."""
    module = Both().eval()
    return module, goblin.capture(module, {"x": torch.randn(2, 5, 8)})


class TestState:
    def test_is_a_result_and_the_module_keeps_its_own(self):
        module = Counter()
        captured = goblin.capture(module, torch.ones(2), dynamic_batch=False)
        assert captured.state == ("n",)
        state, seen = None, []
        for _ in range(3):
            y, state = captured(torch.ones(2), state=state)
            seen.append(y.tolist())
        assert seen == [[2, 2], [4, 4], [6, 6]]
        assert module.n.tolist() == [0, 0]

    def test_running_statistics(self):
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
        captured = goblin.capture(module, torch.randn(5, 3))
        x = torch.randn(9, 3)
        y, state = captured(x)
        with torch.no_grad():
            wanted = module(x)
        torch.testing.assert_close(y, wanted)
        for name, value in state.items():
            torch.testing.assert_close(value, module.state_dict()[name])

    def test_another_state_of_another_shape_is_refused(self):
        captured = goblin.capture(Counter(), torch.ones(2), dynamic_batch=False)
        with pytest.raises(InputError, match=r"n is .* captured was"):
            captured(torch.ones(2), state={"n": np.zeros(3, "f4")})
        with pytest.raises(InputError, match="no parameter or buffer 'm'; there are n"):
            captured(torch.ones(2), state={"m": np.zeros(2, "f4")})


def test_tied_weights_are_one():
    module = Tied()
    captured = goblin.capture(module, torch.tensor([1, 2, 3]))
    assert list(captured.parameters) == ["e.weight"]
    i = torch.tensor([4, 0, 0, 1])
    torch.testing.assert_close(captured(i), module(i).detach())


def test_modes_are_captured_apart():
    module = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5))
    x = torch.randn(4, 3)
    training, evaluation = (goblin.capture(module.train(mode), x) for mode in (True, False))
    assert (training.draws, evaluation.draws) == (True, False)
    torch.testing.assert_close(evaluation(x), module.eval()(x).detach())


class TestBatch:
    def test_is_no_constant(self):
        captured = goblin.capture(lambda x: x.sum() / x.shape[0], torch.ones(4, 2))
        assert captured(torch.ones(2, 2)) == 2.0
        assert captured(torch.ones(4, 2)) == 2.0

    @pytest.mark.parametrize("size", [1, 3])
    def test_of_the_example_does_not_matter(self, size):
        module = Both().eval()
        captured = goblin.capture(module, {"x": torch.randn(size, 5, 8)}, scale=2.0)
        for batch in (1, 2, 5):
            x = torch.randn(batch, 5, 8)
            with torch.no_grad():
                wanted = module({"x": x}, scale=2.0)
            found = captured({"x": x}, scale=2.0)
            assert found.keys() == wanted.keys()
            for name in wanted:
                torch.testing.assert_close(found[name], wanted[name])

    def test_that_is_baked_in_is_refused(self):
        with pytest.raises(InputError, match=r"holds for one size of the batch only .*dynamic_batch=False"):
            goblin.capture(lambda x: x.view(4, -1) + 1, torch.ones(4, 6))
        assert goblin.capture(lambda x: x.view(4, -1) + 1, torch.ones(4, 6), dynamic_batch=False)(
            torch.ones(4, 6)
        ).shape == (4, 6)

    def test_along_another_axis(self):
        module = nn.LSTM(4, 6).eval()
        captured = goblin.capture(module, torch.randn(7, 2, 4), batch_axis=1)
        x = torch.randn(7, 5, 4)
        torch.testing.assert_close(captured(x)[0], module(x)[0].detach())

    def test_of_two_arguments_is_one(self):
        captured = goblin.capture(lambda a, b: a + b, torch.ones(3, 2), torch.ones(3, 2))
        with pytest.raises(InputError, match="argument 1 has a batch of 5, the arguments before it one of 4"):
            captured(np.ones((4, 2), "f4"), np.ones((5, 2), "f4"))

    def test_programs_are_checked_ones(self, both):
        _, captured = both
        for batch in (None, 1, 6):
            check(captured.program(batch))
        assert (6, 5, 8) in {spec.shape for spec in captured.program(6).inputs}


class TestAttention:
    MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]).bool()

    def test_of_a_row_that_may_look_at_nothing_is_zero(self):
        q = torch.randn(2, 3, 4)
        captured = goblin.capture(
            lambda q, mask: nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask), q, self.MASK
        )
        found = captured(q, self.MASK)
        assert found[0, 1].tolist() == [0.0, 0.0, 0.0, 0.0]
        torch.testing.assert_close(
            found, nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=self.MASK), rtol=1e-5, atol=1e-5
        )

    @pytest.mark.parametrize("module", ["function", "MultiheadAttention", "TransformerEncoder"])
    def test_names_no_device(self, module):
        if module == "function":
            function, shape = (
                lambda q: nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
                (2, 2, 6, 4),
            )
        elif module == "MultiheadAttention":
            layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
            function, shape = lambda x: layer(x, x, x, need_weights=False)[0], (2, 6, 8)
        else:
            function, shape = (
                nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval(),
                (2, 6, 8),
            )
        captured = goblin.capture(function, torch.randn(shape))
        targets = {call.target for call in captured.recordings.open.calls}
        assert not [target for target in targets if re.search("flash|cpu|cuda|efficient|fused|mkldnn|fast", target)]
        assert "matmul" in captured.program().operators


class TestElements:
    def test_bfloat16_bit_for_bit(self):
        captured = goblin.capture(lambda x: (x, x * 3), torch.ones(2, dtype=torch.bfloat16))
        x = torch.tensor([1.0, -0.0, 3.140625, float("inf")], dtype=torch.bfloat16)
        same, thrice = captured(x)
        assert same.dtype == torch.bfloat16
        assert same.view(torch.int16).tolist() == x.view(torch.int16).tolist()
        assert thrice.tolist() == (x * 3).tolist()
        (array, _) = captured(x.float().numpy().astype(ml_dtypes.bfloat16))
        assert array.dtype.name == "bfloat16"

    def test_conjugate_and_negative_views_are_resolved(self):
        x = torch.tensor([1 + 2j])
        for view in (x.conj(), torch._neg_view(x)):
            captured = goblin.capture(lambda x: x * 2, view)
            assert captured(view).tolist() == (view * 2).tolist()

    def test_memory_that_is_not_contiguous(self):
        x = torch.arange(24.0).reshape(4, 6)
        captured = goblin.capture(lambda x: x @ x.T, x.t())
        torch.testing.assert_close(captured(x.t()), x.t() @ x)

    def test_slices_are_assigned(self):
        def assign(x):
            y = x.clone()
            y[:, 0] = 1.0
            y[:, 2:4] += 5
            return y

        x = torch.randn(3, 6)
        torch.testing.assert_close(goblin.capture(assign, x)(x), assign(x))


class TestRandomNumbers:
    def test_come_from_a_key(self):
        captured = goblin.capture(nn.Dropout(0.25).train(), torch.ones(2, 1000))
        x = np.ones((40, 1000), "f4")
        one, again, other = captured(x, key=1), captured(x, key=1), captured(x, key=2)
        np.testing.assert_array_equal(one, again)
        assert (one != other).any()
        assert set(np.unique(one)) == {np.float32(0), np.float32(1) / np.float32(0.75)}
        assert abs((one == 0).mean() - 0.25) < 0.01

    def test_of_two_layers_are_not_the_same(self):
        twice = nn.Dropout(0.5).train()
        captured = goblin.capture(lambda x: (twice(x), twice(x)), torch.ones(2, 50))
        a, b = captured(np.ones((4, 50), "f4"), key=0)
        assert (a != b).any()

    def test_need_one(self):
        captured = goblin.capture(nn.Dropout(0.25).train(), torch.ones(2, 3))
        with pytest.raises(InputError, match="give a key="):
            captured(np.ones((2, 3), "f4"))

    def test_that_no_key_decides_on_are_refused(self):
        with pytest.raises(InputError, match=r"randperm.* no key decides on"):
            goblin.capture(lambda x: x + torch.randperm(3), torch.ones(2, 3))


class Airy(nn.Module):
    def forward(self, x):
        y = x + 1
        return torch.special.airy_ai(y)


class TestRefusals:
    def test_an_operator_that_the_catalogue_lacks_is_named_with_its_line(self):
        with pytest.raises(
            InputError, match=r"no operator for aten\.special_airy_ai\.default.*test_capture\.py:\d+.*airy_ai\(y\)"
        ):
            goblin.capture(Airy(), torch.ones(2))

    def test_a_course_that_depends_on_data(self):
        with pytest.raises(InputError, match=r"its course depends on data, at .*test_capture\.py:\d+"):
            goblin.capture(lambda x: x * 2 if x.sum() > 0 else x, torch.ones(2, 3))

    def test_arguments_unlike_the_example(self):
        captured = goblin.capture(lambda x, n: x * n, torch.ones(2, 3), 4)
        for arguments, sentence in (
            ((np.ones((2, 4), "f4"), 4), r"argument 0 is float32 \(2, 4\), captured was float32 \('batch', 3\)"),
            ((np.ones((2, 3)), 4), "argument 0 is float64"),
            ((np.ones((2, 3), "f4"), 5), "argument 1 is 5; 4 was captured"),
            ((np.ones((2, 3), "f4"),), "1 argument given, 2 captured"),
            (("x", 4), "argument 0 is a str"),
        ):
            with pytest.raises(InputError, match=sentence):
                captured(*arguments)

    def test_what_depends_on_the_time_of_day(self):
        """Something outside of its arguments, which a recording cannot hold."""
        calls = []

        def counts(x):
            calls.append(1)
            return x * len(calls)

        with pytest.raises(InputError, match="not what the module gives on the example"):
            goblin.capture(counts, torch.ones(2, 3))


class Called:
    """A method, and an object that is called."""

    def method(self, x):
        return torch.special.airy_ai(x + 1)

    def __call__(self, x):
        return self.method(x)


def lacking(x):
    y = x + 1
    return torch.special.airy_ai(y)


class TestWhatIsSaid:
    """Once, in one sentence, and of the researcher's own code."""

    @pytest.mark.parametrize("function", [lacking, Called().method, lambda x: torch.special.airy_ai(x)])
    def test_the_line_of_a_plain_function(self, function):
        with pytest.raises(InputError, match=r"test_capture\.py:\d+ in (lacking|method|<lambda>) \(.*airy_ai"):
            goblin.capture(function, torch.ones(2))

    def test_the_line_of_what_pytorch_refuses(self):
        with pytest.raises(InputError, match=r"PyTorch cannot record .*test_capture\.py:\d+ in <lambda>"):
            goblin.capture(lambda x: x @ torch.ones(7, 7), torch.ones(2, 3))

    def test_nothing_else_is_printed(self, capfd):
        """PyTorch prints the graph as far as it came, and chains errors of hundreds of lines."""
        with pytest.raises(InputError, match="its course depends on data") as caught:
            goblin.capture(lambda x: x * 2 if x.sum() > 0 else x, torch.ones(2, 3))
        assert capfd.readouterr() == ("", "")
        assert len(traceback.format_exception(caught.value)) < 10

    def test_no_warning(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            captured = goblin.capture(nn.Linear(3, 2), torch.ones(2, 3))
            captured(da.ones((4, 3), chunks=(2, 3), dtype="f4"))

    def test_arguments_that_are_not_the_example_s(self):
        captured = goblin.capture(lambda x, *, more: x + more["y"], torch.ones(2, 3), more={"y": torch.ones(2, 3)})
        x, more = np.ones((2, 3), "f4"), {"y": np.ones((2, 3), "f4")}
        for call in (captured, captured.bound):
            for args, kwargs, sentence in (
                ((), {"more": more}, "0 arguments given, 1 captured"),
                ((x, x), {"more": more}, "2 arguments given, 1 captured"),
                ((x,), {}, "arguments by name are none; captured were more"),
                (([[1.0, 2.0]],), {"more": more}, "argument 0 is a list; a tensor was captured"),
                ((x,), {"more": x}, "argument more is a ndarray; another dict was captured"),
            ):
                with pytest.raises(InputError, match=sentence):
                    call(*args, **kwargs)

    def test_an_example_of_numpy_s(self):
        module = nn.Linear(3, 2)
        captured = goblin.capture(module, np.zeros((2, 3), "f4"))
        torch.testing.assert_close(captured(torch.ones(4, 3)), module(torch.ones(4, 3)).detach())
        with pytest.raises(InputError, match="argument 0 is an array of dtype <U1, of which there are no tensors"):
            goblin.capture(module, np.array([["a"]]))
        with pytest.raises(InputError, match="axes are counted from the first"):
            goblin.capture(module, np.zeros((2, 3), "f4"), batch_axis=-1)


class TestDask:
    def test_batch_by_batch(self, both):
        module, captured = both
        x = np.random.default_rng(0).standard_normal((50, 5, 8)).astype("f4")
        found = captured({"x": da.from_array(x, chunks=(16, 2, 8))})
        assert found["z"].chunks == ((16, 16, 16, 2), (6,))
        with torch.no_grad():
            wanted = module({"x": torch.from_numpy(x)})
        (computed,) = dask.compute(found, scheduler="sync")
        for name, value in wanted.items():
            np.testing.assert_allclose(computed[name], value, rtol=1e-5, atol=1e-5)

    def test_on_volunteers(self, both):
        """Every block is a task of the grid."""
        module, captured = both
        x = np.random.default_rng(1).standard_normal((40, 5, 8)).astype("f4")
        found = captured({"x": da.from_array(x, chunks=(8, 5, 8))})
        with InProcessGrid(volunteers=2) as grid:
            y, z = grid.lab.compute(found["y"], found["z"])
            counts = grid.counts()
        assert counts["grid"] == counts["array"] > 0
        with torch.no_grad():
            wanted = module({"x": torch.from_numpy(x)})
        np.testing.assert_allclose(y, wanted["y"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(z, wanted["z"], rtol=1e-5, atol=1e-5)

    def test_that_cannot_be_put_together_is_refused(self):
        x = da.ones((6, 2), chunks=(3, 2), dtype="f4")
        with pytest.raises(InputError, match="call it batch by batch"):
            goblin.capture(lambda x: x.sum() / x.shape[0], torch.ones(4, 2))(x)
        with pytest.raises(InputError, match="draws random numbers"):
            goblin.capture(nn.Dropout(0.5).train(), torch.ones(4, 2))(x, key=1)
        with pytest.raises(InputError, match="changes state"):
            goblin.capture(nn.BatchNorm1d(2).train(), torch.ones(4, 2))(x)


def test_blocks_of_one_program():
    """What depends on all of the batch is cut operator by operator."""
    captured = goblin.capture(lambda x: x.softmax(0), torch.zeros(2, 4))
    x = np.random.default_rng(0).standard_normal((9, 4)).astype("f4")
    blocks = da.from_array(x, chunks=(2, 3))
    found = goblin.tiled(*captured.bound(blocks)).compute(scheduler="sync")
    np.testing.assert_allclose(found, torch.from_numpy(x).softmax(0), rtol=1e-5)
    with pytest.raises(InputError, match=r"captured\.bound\(x\) gives both"):
        goblin.tiled(captured, [blocks])
    with pytest.raises(InputError, match="unknown shape: call its compute_chunk_sizes"):
        captured.bound(blocks[blocks[:, 0] > 0])


def test_a_captured_program_travels_without_pytorch():
    """What is pickled is data; another process computes it, and the module itself is not in it."""
    captured = goblin.capture(nn.Linear(3, 2), torch.ones(2, 3))
    again = pickle.loads(pickle.dumps(captured))
    x = np.random.default_rng(2).standard_normal((5, 3)).astype("f4")
    np.testing.assert_array_equal(again(x), captured(x))


def test_a_layer_on_a_turned_tensor_is_one_product_of_matrices():
    """PyTorch leaves it as many products of rows with a matrix that is repeated: as much memory as there are rows."""
    layer = torch.nn.Linear(50, 70)
    captured = goblin.capture(lambda x: layer(x.transpose(0, 1)), torch.randn(2, 30, 50))
    x = torch.randn(4, 30, 50)
    np.testing.assert_allclose(captured(x), layer(x.transpose(0, 1)).detach(), rtol=1e-5, atol=1e-6)
    program, _ = captured.bound(x)
    shapes = [spec.shape for spec in schedule(program).specs]
    assert max(map(len, shapes)) <= 3
    assert max(np.prod(shape) for shape in shapes) < 4 * 30 * 70 + 1
