"""Plans: figures of hand-made tasks, counted by hand, and how they look."""

import re
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from goblin_dask.errors import InputError
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.cost import flops, peak
from goblin_dask.messages import ArraySpec
from goblin_dask.training.plan import Entry, Plan
from goblin_dask.training.tables import amount


def product(rows, inner, columns):
    """A program from a flat vector of weights and (rows, inner) to (rows, columns), float32."""
    build = Builder()
    flat, x = build.input(ArraySpec((inner * columns,), "float32")), build.input(ArraySpec((rows, inner), "float32"))
    (weight,) = build.add("reshape", [flat], shape=(inner, columns))
    (y,) = build.add("matmul", [x, weight])
    return build.finish([y])[0]


def task(stage, direction, program, *reads):
    return SimpleNamespace(stage=stage, direction=direction, program=program, reads=reads, gives=())


FIRST, SECOND = product(4, 8, 16), product(4, 16, 2)
A, B = ("a<b>.weight", "a<b>.bias"), ("b.weight",)


def cut():
    """Stage 1 forward, both ways of stage 2 in one backward task, stage 1 backward, which is its forward again."""
    tasks = [task(0, "forward", FIRST, A, 0), task(1, "backward", SECOND, B, 7), task(0, "backward", FIRST, A, 0)]
    return SimpleNamespace(program=FIRST, tasks=tasks)


def test_figures_of_tasks():
    first, again, second = Plan.of(cut(), micro_batches=3).entries
    assert [(each.stage, each.direction) for each in (first, again, second)] == [
        (0, "forward"), (0, "backward"), (1, "backward"),
    ]  # fmt: skip
    assert (first.flops, first.peak, first.operators) == (flops(FIRST), peak(FIRST), 2)
    assert first.vectors == ((A, 8 * 16 * 4),)
    assert (first.parameters, first.reads, first.gives) == (8 * 16 * 4, 4 * 8 * 4, 4 * 16 * 4)
    assert (second.parameters, second.reads, second.gives) == (16 * 2 * 4, 4 * 16 * 4, 4 * 2 * 4)


def test_sums_of_a_round():
    plan = Plan.of(cut(), micro_batches=3, memory=10**6)
    once = 2 * flops(FIRST) + flops(SECOND)
    assert plan.stages == (A, B)
    assert plan.tasks == 9
    assert plan.flops == 3 * once
    assert plan.recomputation == once / flops(FIRST)
    activations = 2 * (128 + 256) + 256 + 32
    assert plan.moved(held=False) == 3 * (activations + 2 * 512 + 128)
    assert plan.moved() == 3 * activations + 512 + 128  # both tasks of a stage read one vector
    assert not plan.too_large


def test_replication_multiplies():
    plain, copied = (Plan.of(cut(), micro_batches=3, verify=verify) for verify in ("auto", "replicate"))
    assert {each.copies for each in plain.entries} == {1}
    assert {each.copies for each in copied.entries} == {2}
    for measure in ("tasks", "flops"):
        assert getattr(copied, measure) == 2 * getattr(plain, measure)
    assert (copied.moved(), copied.moved(held=False)) == (2 * plain.moved(), 2 * plain.moved(held=False))
    assert copied.recomputation == plain.recomputation
    assert "each computed by 2 volunteers" in str(copied)
    with pytest.raises(InputError, match="no policy"):
        Plan.of(cut(), micro_batches=3, verify="twice")


def test_heavy_tasks_alone_are_copied_by_default():
    """A long chain of exponentials is as much work for whoever checks it; a product is not."""
    build = Builder()
    x = build.input(ArraySpec((3000, 3000), "float32"))
    y = x
    for _ in range(400):
        (y,) = build.add("exp", [y])
    heavy = build.finish([y])[0]
    tasks = [task(0, "forward", FIRST, A, 0), task(1, "forward", heavy, 5)]
    plan = Plan.of(SimpleNamespace(program=heavy, tasks=tasks), micro_batches=2)
    assert [each.copies for each in plan.entries] == [1, 2]
    assert plan.tasks == 6
    assert "of which some are computed by 2 volunteers each" in str(plan)


BLOCKED = Entry(1, "forward", 1, 4e9, 300, ((("wide.weight",), 4000),), 100, 200, blocks=12)


def test_what_is_computed_in_blocks_is_marked():
    plan = Plan.of(cut(), micro_batches=3, memory=400, blocks=[BLOCKED])
    assert [each.blocks for each in plan.entries] == [1, 1, 12, 1]
    assert plan.tasks == 3 * (3 + 12)
    assert plan.stages == (A, ("wide.weight", *B))
    assert re.search(r"^2 +forward, 12 blocks +1 +4 GFLOP +300 B \(75%\) +4 kB +100 B +200 B +36$", str(plan), re.M)


def test_what_is_too_large_is_said():
    plan = Plan.of(cut(), micro_batches=1, memory=peak(FIRST) - 1)
    assert [(each.stage, each.direction) for each in plan.too_large] == [(0, "forward"), (0, "backward")]
    assert f"Too large for volunteers with {amount(plan.memory, 'B')}: stage 1 forward, stage 1 backward." in str(plan)
    assert "Every task fits volunteers with 1 MB." in str(Plan.of(cut(), micro_batches=1, memory=10**6))
    assert "volunteers with" not in str(Plan.of(cut(), micro_batches=1))


def test_the_table_is_plain_text():
    lines = str(Plan.of(cut(), micro_batches=3, memory=10**6)).splitlines()
    table = lines[: lines.index("")]
    assert len(table) == 4
    assert {len(line) for line in table} == {len(table[0])}, "columns of numbers end alike"
    assert "\x1b" not in "".join(lines)
    assert "Stage 1 reads 2 parameters: a<b>.weight, a<b>.bias." in lines
    assert "A round is 3 micro-batches: 9 tasks." in lines
    many = SimpleNamespace(program=FIRST, tasks=[task(0, "forward", FIRST, tuple(f"p{i}" for i in range(9)), 0)])
    assert "Stage 1 reads 9 parameters: p0 … p8." in str(Plan.of(many, micro_batches=1))


def test_a_stage_without_parameters():
    plan = Plan.of(SimpleNamespace(program=FIRST, tasks=[task(0, "forward", FIRST, 0, 1)]), micro_batches=1)
    assert plan.stages == ((),)
    assert "Stage 1 reads 0 parameters." in str(plan)
    assert plan._repr_html_()


def test_notebooks_get_escaped_names():
    html = Plan.of(cut(), micro_batches=3)._repr_html_()
    assert "a&lt;b&gt;.weight" in html
    assert "a<b>" not in html
    assert html.count("<tr>") == 4


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"), (1, "1 B"), (999, "999 B"), (999.6, "1 kB"), (1234, "1.23 kB"), (999_499, "999 kB"),
        (999_500, "1 MB"), (512e6, "512 MB"), (2.5e21, "2.5e+03 EB"),
    ],
)  # fmt: skip
def test_amounts(value, text):
    assert amount(value, "B") == text


@pytest.mark.parametrize("name", ["plan.png", "plan.svg"])
def test_pictures(tmp_path, name):
    pytest.importorskip("matplotlib")
    Plan.of(cut(), micro_batches=3, memory=400, blocks=[BLOCKED]).save(tmp_path / name)
    head = (tmp_path / name).read_bytes()
    assert head.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in head


def test_what_a_picture_shows():
    pytest.importorskip("matplotlib")
    from goblin_dask.training import pictures

    boxes, memory, work = pictures.plan(Plan.of(cut(), micro_batches=3, memory=400, blocks=[BLOCKED])).axes
    assert [text.get_text() for text in boxes.texts if text.get_text()] == [
        "2 parameters\n512 B", "2 parameters\n4 kB\nin 12 blocks",
    ]  # fmt: skip
    heights = [bar.get_height() for bar in memory.patches]
    assert heights == pytest.approx([peak(FIRST) / 1e6, 300e-6, peak(FIRST) / 1e6, peak(SECOND) / 1e6])
    assert [line.get_ydata()[0] for line in memory.lines] == [400e-6]
    assert [bool(bar.get_hatch()) for bar in work.patches] == [False, True, False, False]


def test_pictures_that_cannot_be(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    plan = Plan.of(cut(), micro_batches=3)
    for path in (tmp_path / "nowhere" / "plan.png", tmp_path / "plan.doc"):
        with pytest.raises(InputError, match="cannot be written"):
            plan.save(path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="needs matplotlib: pip install matplotlib"):
        plan.save(tmp_path / "plan.png")
