"""A volunteer that really computes, and lies by a strategy."""

import threading

import numpy as np
import pytest

from goblin_dask.digest import digest, task_digest
from goblin_dask.errors import InputError
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.execute import execute
from goblin_dask.messages import ArraySpec, BlobRef, Routes
from goblin_dask.store.buffers import buffer_of, spec_of
from goblin_dask.testing.liar import Liar, confessions
from goblin_dask.verify.check import check_result
from goblin_dask.volunteer.inputs import Abandoned


def program():
    builder = Builder()
    x = builder.input(ArraySpec((20, 30), "float32"))
    (e,) = builder.add("exp", [x])
    return builder.finish(builder.add("sum", [e], axes=(1,)))[0]


PROGRAM = program()


def inputs(seed):
    return [np.random.default_rng(seed).standard_normal((20, 30), np.float32)]


@pytest.fixture
def liar(tmp_path):
    def make(strategy, **options):
        one = Liar(strategy, str(tmp_path / f"journal {strategy}"), **options)
        one.journal = tmp_path / f"journal {strategy}"
        return one

    return make


def lies(one):
    return [confession.lie for confession in confessions(one.journal)]


def test_a_sleeper_has_a_clean_history_first(liar):
    one = liar("sleeper", after=3)
    for seed in range(5):
        (answer,) = one(PROGRAM, inputs(seed))
        right = np.array_equal(answer, execute(PROGRAM, inputs(seed))[0])
        assert right == (seed < 3)
        assert right or check_result(PROGRAM, inputs(seed), [answer]).verdict != "accepted"
    assert lies(one) == [False, False, False, True, True]


def test_a_corruption_alone_is_a_strategy(liar):
    one = liar("sign", share=0.5, seed=3)
    for seed in range(40):
        one(PROGRAM, inputs(seed))
    assert 5 < sum(lies(one)) < 35
    sometimes = liar("sometimes", share=1.0)
    sometimes(PROGRAM, inputs(0))
    assert lies(sometimes) == [True]


def test_colluders_lie_where_they_meet_with_the_same_bits(liar, tmp_path):
    one, other, third = (liar("colluders", ring=str(tmp_path / "ring"), seed=seed) for seed in (1, 2, 3))
    (alone,) = one(PROGRAM, inputs(0))
    (late,) = other(PROGRAM, inputs(0))
    assert np.array_equal(alone, late), "the first was honest, for it did not know of the other"
    task = inputs(1)
    for member in (one, other):  # both have it in hand before either answers
        member._ring.hold(member_task(task))
    (first,), (second,), (last,) = (member(PROGRAM, task) for member in (one, other, third))
    assert np.array_equal(first, second)
    assert np.array_equal(first, last)
    assert check_result(PROGRAM, task, [first]).verdict != "accepted"
    assert check_result(PROGRAM, task, [first], method="compare", replica=[second]).verdict == "accepted"


def member_task(arrays):
    return task_digest(PROGRAM.digest, [digest(buffer_of(array)) for array in arrays])


def test_a_copier_hands_in_what_its_partner_has(liar, tmp_path):
    honest = liar("colluders", ring=str(tmp_path / "ring"))
    copier = liar("copier", ring=str(tmp_path / "ring"))
    (right,) = honest(PROGRAM, inputs(0))
    (copied,) = copier(PROGRAM, inputs(0))
    assert np.array_equal(right, copied)
    (guessed,) = copier(PROGRAM, inputs(1))
    assert not np.allclose(guessed, execute(PROGRAM, inputs(1))[0])
    assert lies(copier) == [False, True]


def test_what_is_withheld_is_not_sent_until_nobody_waits(liar):
    one = liar("withholding")
    (answer,) = one(PROGRAM, inputs(0))
    stop = threading.Event()
    stop.set()
    ref = BlobRef(digest(buffer_of(answer)), spec_of(answer), answer.nbytes)
    with pytest.raises(Abandoned):
        one.send(None, ref, -1, Routes(), "", stop)


def test_the_late_are_late(liar):
    one = liar("late", delay=0.01)
    (answer,) = one(PROGRAM, inputs(0))
    assert check_result(PROGRAM, inputs(0), [answer]).verdict != "accepted"


def test_values_between_the_nodes_are_those_of_the_lie(liar):
    """It commits to what it hands in, lest it contradict itself."""
    seen = []
    (answer,) = liar("always")(PROGRAM, inputs(0), observe=lambda number, values: seen.append(values))
    assert np.array_equal(seen[-1][0], answer)


def test_an_unknown_strategy_is_refused(liar):
    with pytest.raises(InputError, match="no strategy is called 'saint'"):
        liar("saint")
