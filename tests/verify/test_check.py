"""`check_result`: whole programs, their contractions found wherever fusion leaves them, each with its method."""

import numpy as np
import pytest

from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.messages import ArraySpec
from goblin_dask.verify.check import check_result, plan_check, thresholds
from goblin_dask.verify.decompose import decompose
from goblin_dask.verify.operands import OperandStatistics
from goblin_dask.verify.scales import RENEWED, Scales

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def build(specs, make):
    builder = Builder()
    values = [builder.input(ArraySpec(shape, dtype)) for shape, dtype in specs]
    program, slots = builder.finish(make(builder, *values))
    assert slots == tuple(range(len(specs)))
    return program


def draw(program, seed=0):
    rng = np.random.default_rng(seed)
    arrays = []
    for spec in program.inputs:
        dtype = np.dtype(spec.dtype)
        if dtype.kind == "b":
            arrays.append(rng.random(spec.shape) < 0.1)
        elif dtype.kind in "iu":
            info = np.iinfo(dtype)
            arrays.append(rng.integers(info.min, info.max, spec.shape, dtype, endpoint=True))
        elif dtype.kind == "c":
            arrays.append((rng.standard_normal(spec.shape) + 1j * rng.standard_normal(spec.shape)).astype(dtype))
        else:
            arrays.append(rng.standard_normal(spec.shape).astype(dtype))
    return arrays


def super_tile(dtype, panels=3, m=160, k=150, n=170):
    """Two by two tiles, each a chain of panels that are added."""
    specs = [((m, k), dtype)] * (2 * panels) + [((k, n), dtype)] * (2 * panels)

    def make(b, *v):
        a, c = (v[:panels], v[panels : 2 * panels]), (v[2 * panels : 3 * panels], v[3 * panels :])
        outputs = []
        for i in range(2):
            for j in range(2):
                (total,) = b.add("matmul", [a[i][0], c[j][0]])
                for l in range(1, panels):
                    (total,) = b.add("addmm", [total, a[i][l], c[j][l]])
                outputs.append(total)
        return outputs

    builder = Builder()
    values = [builder.input(ArraySpec(shape, d)) for shape, d in specs]
    return builder.finish(make(builder, *values))[0]


def one(b, name, *operands, **attributes):
    return b.add(name, operands, **attributes)[0]


F = "float32"
FORMS = {
    "matmul": ([((300, 400), F), ((400, 500), F)], lambda b, x, y: one(b, "matmul", x, y)),
    "half": ([((300, 400), "float16"), ((400, 500), "float16")], lambda b, x, y: one(b, "matmul", x, y)),
    "double": ([((300, 400), "float64"), ((400, 500), "float64")], lambda b, x, y: one(b, "matmul", x, y)),
    "complex": ([((900, 400), "complex64"), ((400, 900), "complex64")], lambda b, x, y: one(b, "matmul", x, y)),
    "transposed": (
        [((400, 500), F), ((400, 600), F)],
        lambda b, x, y: one(b, "matmul", one(b, "permute_dims", x, axes=(1, 0)), y),
    ),
    "transposed result": (
        [((300, 400), F), ((400, 500), F)],
        lambda b, x, y: one(b, "permute_dims", one(b, "matmul", x, y), axes=(1, 0)),
    ),
    "gram": ([((700, 400), F)], lambda b, x: one(b, "matmul", x, one(b, "permute_dims", x, axes=(1, 0)))),
    "prologue": (
        [((400, 900), F), ((400, 900), F)],
        lambda b, x, y: one(b, "matmul", one(b, "permute_dims", one(b, "tanh", x), axes=(1, 0)), one(b, "exp", y)),
    ),
    "prologue in double": (
        [((400, 900), "float64"), ((400, 900), "float64")],
        lambda b, x, y: one(b, "matmul", one(b, "permute_dims", one(b, "tanh", x), axes=(1, 0)), one(b, "exp", y)),
    ),
    "normalised": (
        [((600, 700), F), ((700, 600), F)],
        lambda b, x, y: one(b, "matmul", one(b, "subtract", x, one(b, "mean", x, axes=(1,), keepdims=True)), y),
    ),
    "einsum": (
        [((1024, 20, 30), F), ((1024, 40, 10), F)],
        lambda b, x, y: one(b, "einsum", x, y, subscripts="aij,akl->ijkl"),
    ),
    "tensordot": (
        [((400, 30, 20), F), ((20, 30, 500), F)],
        lambda b, x, y: one(b, "tensordot", x, y, a_axes=(1, 2), b_axes=(1, 0)),
    ),
    "batch": ([((2, 700, 300), F), ((2, 300, 700), F)], lambda b, x, y: one(b, "matmul", x, y)),
    "partial sums concatenated": (
        [((512, 400), F), ((400, 512), F), ((512, 300), F), ((300, 512), F)],
        lambda b, p, q, r, s: one(
            b,
            "sum",
            one(
                b,
                "concat",
                one(b, "expand_dims", one(b, "matmul", p, q), axes=(1,)),
                one(b, "expand_dims", one(b, "matmul", r, s), axes=(1,)),
                axis=1,
            ),
            axes=(1,),
        ),
    ),
    "tiles stacked": (
        [((512, 400), F), ((400, 512), F), ((512, 300), F), ((300, 512), F)],
        lambda b, p, q, r, s: one(
            b, "reshape", one(b, "stack", one(b, "matmul", p, q), one(b, "matmul", r, s)), shape=(1024, 512)
        ),
    ),
    "difference": (
        [((512, 400), F), ((400, 512), F), ((512, 300), F), ((300, 512), F)],
        lambda b, p, q, r, s: one(b, "subtract", one(b, "matmul", p, q), one(b, "matmul", r, s)),
    ),
    "sum of broadcast products": (
        [((100, 200), F), ((200, 120), F)],
        lambda b, x, y: one(
            b,
            "sum",
            one(b, "multiply", one(b, "expand_dims", x, axes=(2,)), one(b, "expand_dims", y, axes=(0,))),
            axes=(1,),
        ),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_contractions_are_found_and_checked_by_projection(name):
    specs, make = FORMS[name]
    program = build(specs, lambda b, *v: [make(b, *v)])
    inputs = draw(program)
    outputs = execute(program, inputs)
    assert decompose(program) is not None
    report = check_result(program, inputs, outputs)
    assert report.verdict == "accepted", report
    assert report.method == "algebraic"
    assert report.ratio <= 1
    (threshold,) = thresholds(program, inputs, outputs)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        wrong = [np.array(output) for output in outputs]
        at = tuple(rng.integers(n) for n in wrong[0].shape)
        wrong[0][at] += wrong[0].dtype.type(3 * threshold + 4e-3 * abs(wrong[0][at]) * (name == "half"))
        assert check_result(program, inputs, wrong).verdict != "accepted"


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int8", "uint16", "int64", "uint64", "bool"])
def test_super_tiles(dtype):
    program = super_tile(dtype)
    inputs = draw(program)
    outputs = execute(program, inputs)
    found = decompose(program)
    assert found is not None
    assert [len(m.piece.terms) for m in found] == [3] * 4
    assert check_result(program, inputs, outputs).verdict == "accepted"
    for tile in range(4):
        wrong = [np.array(output) for output in outputs]
        if dtype == "bool":
            wrong[tile][3, 4] ^= True
        elif wrong[tile].dtype.kind in "iu":
            bits = wrong[tile].dtype.itemsize * 8
            wrong[tile].view(f"u{bits // 8}")[3, 4] ^= np.array(1 << (bits - 1), f"u{bits // 8}")  # the highest bit
        else:
            wrong[tile][3, 4] += 10
        assert check_result(program, inputs, wrong).verdict == "wrong"


@pytest.mark.parametrize(
    ("a", "b", "right"),
    [
        (np.full((2, 6), 11, "i1"), np.full((6, 2), 7, "i1"), -50),
        (np.full((1, 4), 200, "u1"), np.full((4, 1), 200, "u1"), 0),
        (np.ones((2, 4), bool), np.ones((4, 2), bool), True),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_small_dtypes_wrap_as_numpy_does_however_the_sum_is_cut(a, b, right, chunk):
    panels = [(a[:, i : i + chunk], b[i : i + chunk]) for i in range(0, a.shape[1], chunk)]
    specs = [(x.shape, x.dtype.name) for pair in panels for x in pair]

    def make(build, *v):
        total = one(build, "matmul", v[0], v[1])
        for x, y in zip(v[2::2], v[3::2], strict=True):
            total = one(build, "add", total, one(build, "matmul", x, y))
        return [total]

    program = build(specs, make)
    inputs = [x for pair in panels for x in pair]
    (output,) = execute(program, inputs)
    assert output.dtype == a.dtype
    assert np.all(output == right)
    assert np.array_equal(output, a @ b)
    for method in ("auto", "recompute"):
        assert check_result(program, inputs, [output], method=method).verdict == "accepted"
        for value in (-306, 462, 1):  # what other widths would give
            wrong = np.full_like(output, 0)
            wrong[...] = np.array(value).astype(output.dtype)
            if not np.array_equal(wrong, output):
                assert check_result(program, inputs, [wrong], method=method).verdict == "wrong"
        assert check_result(program, inputs, [output.astype("i8")], method=method).method == "structural"


def test_a_row_alone_and_in_a_batch():
    """Their last bits differ; neither is a lie."""
    a, b = np.ones((2, 90)), np.random.default_rng(0).random((90, 128))
    program = build([(a.shape, "float64"), (b.shape, "float64")], lambda build, x, y: build.add("matmul", [x, y]))
    alone = np.vstack([a[:1] @ b, a[1:] @ b])
    for result in (a @ b, alone, (b.T @ a.T).T, np.array([[sum(col) for col in b.T]] * 2)):
        assert check_result(program, [a, b], [np.ascontiguousarray(result)]).verdict == "accepted"


def test_a_contraction_over_two_axes():
    x = np.arange(20.0).reshape(4, 5)
    program = build(
        [(x.shape, "float64")] * 2, lambda b, x, y: b.add("tensordot", [x, y], a_axes=(0, 1), b_axes=(0, 1))
    )
    assert check_result(program, [x, x], [np.array(2470.0)]).verdict == "accepted"
    assert check_result(program, [x, x], [np.array(2471.0)]).verdict == "wrong"


def test_partial_sums_of_an_einsum():
    parts = [np.ones((256, 8, 8)) for _ in range(4)]
    specs = [(part.shape, "float64") for part in parts] * 2

    def make(b, *v):
        total = None
        for x, y in zip(v[:4], v[4:], strict=True):
            term = one(b, "einsum", x, y, subscripts="aij,akl->ijkl")
            total = term if total is None else one(b, "add", total, term)
        return [total]

    builder = Builder()
    values = [builder.input(ArraySpec(shape, dtype)) for shape, dtype in specs]
    program, slots = builder.finish(make(builder, *values))
    inputs = [[*parts, *parts][slot] for slot in slots]
    (output,) = execute(program, inputs)
    assert np.all(output == 1024)
    assert check_result(program, inputs, [output]).verdict == "accepted"
    output = output.copy()
    output[1, 2, 3, 4] = 1023
    assert check_result(program, inputs, [output]).verdict == "wrong"


def test_inputs_may_be_functions_and_read_only_maps(tmp_path):
    program = build([((300, 400), F), ((400, 500), F)], lambda b, x, y: b.add("matmul", [x, y]))
    arrays = draw(program)
    maps = []
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
        maps.append(np.load(tmp_path / f"{number}.npy", mmap_mode="r"))
    outputs = execute(program, arrays)
    outputs[0].flags.writeable = False
    assert check_result(program, maps, outputs).verdict == "accepted"
    assert check_result(program, [lambda array=array: array for array in maps], outputs).verdict == "accepted"


def test_statistics_serve_every_chunk_of_an_operand():
    program = build([((300, 400), F), ((400, 500), F)], lambda b, x, y: b.add("matmul", [x, y]))
    inputs = draw(program)
    statistics = OperandStatistics()
    for _ in range(3):
        report = check_result(
            program, inputs, execute(program, inputs), statistics=statistics, digests=("left", "right")
        )
        assert report.verdict == "accepted"
        kept = statistics.nbytes
    assert 0 < kept == statistics.nbytes


def test_a_wrong_shape_or_dtype_is_refused_before_anything_is_computed():
    program = build([((300, 400), F), ((400, 500), F)], lambda b, x, y: b.add("matmul", [x, y]))
    for outputs, words in (
        ([np.zeros((300, 500))], "float64"),
        ([np.zeros((500, 300), "f4")], "(500, 300)"),
        ([], "0 outputs, expected 1"),
    ):
        report = check_result(program, [None, None], outputs)
        assert (report.verdict, report.method) == ("wrong", "structural")
        assert words in report.reason


def test_the_cheaper_check_is_chosen():
    large = build([((2000, 2000), F), ((2000, 2000), F)], lambda b, x, y: b.add("matmul", [x, y]))
    small = build([((20, 20), F), ((20, 20), F)], lambda b, x, y: b.add("matmul", [x, y]))
    vector = build([((2000, 2000), F), ((2000,), F)], lambda b, x, y: b.add("matmul", [x, y]))
    heads = build([((64, 128, 64), F), ((64, 64, 128), F)], lambda b, x, y: b.add("matmul", [x, y]))
    elementwise = build([((2000, 2000), F)], lambda b, x: b.add("exp", [x]))
    assert plan_check(large).method == "algebraic"
    assert plan_check(large).flops < 0.05 * 2 * 2000**3
    assert 0 < plan_check(large).miss <= 0.01
    for program in (small, vector, heads, elementwise):
        assert plan_check(program).method == "recompute"
        assert plan_check(program).miss == 0


def softmax(b, x, y):
    z = one(b, "matmul", x, y)
    e = one(b, "exp", one(b, "subtract", z, one(b, "max", z, axes=(1,), keepdims=True)))
    return [one(b, "divide", e, one(b, "sum", e, axes=(1,), keepdims=True))]


def test_replicas_are_compared_by_the_scale_of_rounding():
    program = build([((60, 500), F), ((500, 80), F)], softmax)
    inputs = draw(program)
    (first,) = execute(program, inputs)
    x, y = inputs
    z = sum(x[:, i : i + 50] @ y[i : i + 50] for i in range(0, 500, 50))
    e = np.exp(z - z.max(axis=1, keepdims=True))
    second = e / e.sum(axis=1, keepdims=True)
    assert not np.array_equal(first, second)
    report = check_result(program, inputs, [first], method="compare", replica=[second])
    assert (report.verdict, report.method) == ("accepted", "replicate")
    assert check_result(program, inputs, [first], method="compare", replica=[first.copy()]).ratio == 0
    lie = second.copy()
    lie[3, 4] += 0.01
    for one, other in ((lie, second), (first, lie)):
        report = check_result(program, inputs, [one], method="compare", replica=[other])
        assert (report.verdict, report.method) == ("unproven", "replicate")  # whose it is, is another question
    report = check_result(program, inputs, [lie], method="audit", replica=[lie])
    assert (report.verdict, report.method) == ("wrong", "recompute")
    assert check_result(program, inputs, [first], method="audit", replica=[second]).verdict == "accepted"
    assert check_result(program, inputs, [first], method="audit", replica=[lie]).verdict == "unproven"


def test_values_on_the_way_are_compared_by_scales_that_are_kept():
    program = build([((60, 500), F), ((500, 80), F)], softmax)
    inputs = draw(program)
    values = {}
    execute(program, inputs, observe=lambda number, made: values.update({len(program.inputs) + number: made[0].copy()}))
    scales = Scales()

    def compare(value, array):
        report = check_result(
            program, inputs, [values[value]], method="compare", replica=[array], values=[value], scales=scales
        )
        return report.verdict, report.flops > 0

    assert compare(2, values[2]) == ("accepted", False), "the same bits"
    noisy = (values[2] * np.float32(1 + 2**-23)).astype("f4")
    assert compare(2, noisy) == ("accepted", True), "measured"
    assert compare(2, noisy) == ("accepted", False), "remembered"
    assert compare(2, noisy * np.float32(1.001)) == ("unproven", True), "decided by the scales of its own inputs"
    assert compare(3, np.full_like(values[3], np.nan))[0] == "unproven"
    renewed = sum(compare(2, noisy)[1] for _ in range(2 * RENEWED))
    assert renewed == 2


def test_scales_that_are_kept_grow_and_shrink_with_the_data():
    program = build([((40, 300), F), ((300, 30), F)], softmax)
    a, b = draw(program)
    scales = Scales()

    def agree(size, error):
        inputs = [a * np.float32(size), b]
        z = inputs[0] @ b
        other = z + error * np.float32(np.sqrt(np.mean(np.square(z))))
        return scales.compare(program, inputs, [2], [z], [other])[0] <= 1

    assert agree(1, 2e-7)
    for size in (1e-6, 1e6):
        assert agree(size, 2e-7)
        assert not agree(size, 1e-4)


def test_two_who_agree_on_zeros_are_not_believed():  # situation 3
    program = build([((60, 500), F), ((500, 80), F)], softmax)
    inputs = draw(program)
    zeros = [np.zeros((60, 80), "f4")]
    report = check_result(program, inputs, zeros, method="compare", replica=zeros)
    assert report.verdict == "wrong"


def test_a_report_tells_what_it_cost():
    program = build([((600, 700), F), ((700, 800), F)], lambda b, x, y: b.add("matmul", [x, y]))
    inputs = draw(program)
    report = check_result(program, inputs, execute(program, inputs))
    assert report.seconds > 0
    assert report.flops > 0
    assert report.miss == 0.01


def test_random_numbers_are_fresh():
    """Against known projections, any error can be built that passes."""
    program = build([((600, 700), F), ((700, 800), F)], lambda b, x, y: b.add("matmul", [x, y]))
    inputs = draw(program)
    outputs = execute(program, inputs)
    reports = [check_result(program, inputs, outputs) for _ in range(5)]
    assert {report.method for report in reports} == {"algebraic"}
    assert len({report.ratio for report in reports}) == 5
