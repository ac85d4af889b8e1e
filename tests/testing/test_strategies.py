"""Strategies say when to lie from what a volunteer knows, and name lies that exist."""

import random

import numpy as np
import pytest

from goblin_dask.errors import InputError
from goblin_dask.testing.liars import LIARS
from goblin_dask.testing.simulation import parse_liars
from goblin_dask.testing.simulation.rehearsal import rehearsal_of
from goblin_dask.testing.simulation.workload import CLASSES, kinds_of
from goblin_dask.testing.strategies import PLOT, RIGHT, STRATEGIES, TILE, Answer, Situation, strategy_named


def ask(name, count=1, **knows):
    """Answers of a strategy in one situation."""
    one = STRATEGIES[name]
    rng = random.Random(1)
    answers = [one(Situation(rng, options=one.options, **knows)) for _ in range(count)]
    return answers if count > 1 else answers[0]


def situations(one):
    rng = random.Random(0)
    for number in range(200):
        yield Situation(
            rng,
            method=rng.choice(["algebraic", "relation", "recompute"]),
            flops=10.0 ** rng.uniform(6, 12),
            usual=rng.choice([0.0, 10.0 ** rng.uniform(6, 12)]),
            results=number,
            lies=rng.randrange(number + 1),
            since_lie=rng.randrange(number + 1),
            together=rng.choice([1, 2]) if one.ring > 1 else 1,
            agreed=rng.choice([None, RIGHT, PLOT]) if one.ring > 1 else None,
            options=one.options,
        )


def test_there_are_enough_and_each_says_what_it_does():
    assert len(STRATEGIES) >= 20
    for name, one in STRATEGIES.items():
        assert one.name == name
        assert one.summary[-1] in ".?"


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_strategy_lies_somewhere_and_by_lies_that_exist(name):
    one = strategy_named(name)
    answers = [one(situation) for situation in situations(one)]
    assert any(answer.corruption for answer in answers)
    assert {answer.corruption for answer in answers} <= {"", *LIARS}


def test_an_unknown_strategy_is_refused_by_name():
    with pytest.raises(InputError, match=r"no strategy is called 'saint'.*sleeper"):
        strategy_named("saint")


def test_who_waits_for_an_occasion():
    assert [ask("sleeper", results=n) for n in (0, 9, 10, 50)] == [RIGHT, RIGHT, TILE, TILE]
    assert [ask("patient", since_lie=n) for n in (0, 9, 10)] == [RIGHT, RIGHT, TILE]
    assert [ask("large_only", flops=f, usual=u) for f, u in ((9, 0), (9, 8), (9, 10))] == [RIGHT, TILE, RIGHT]
    assert [ask("small_only", flops=f, usual=u) for f, u in ((9, 0), (9, 8), (9, 10))] == [RIGHT, RIGHT, TILE]
    assert [ask("hidden", method=m).corruption for m in ("algebraic", "recompute")] == ["entry", ""]
    assert [ask("costly_checks_only", method=m) for m in ("algebraic", "recompute")] == [RIGHT, TILE]
    assert 10 < ask("sometimes", 1000).count(TILE) < 100


def test_rings_lie_where_they_meet_and_alike():
    assert ask("colluders") == RIGHT
    assert ask("colluders", together=2) == PLOT
    assert ask("colluders", together=2, agreed=RIGHT) == RIGHT, "its partner has been honest already"
    assert ask("colluders", together=2, agreed=PLOT) == PLOT
    assert ask("reckless") == PLOT
    assert PLOT.common


def test_a_copier_does_not_compute():
    assert ask("copier", together=2).corruption == "guessed", "nobody has committed anything that it could copy"
    assert ask("copier", together=2, agreed=RIGHT) == Answer(copied=True)
    assert ask("copier", together=2, agreed=PLOT) == PLOT
    assert ask("free_rider") == RIGHT


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("saint:1%", "no strategy is called 'saint'"),
        ("always", "say how many there are, as in 'always:10%'"),
        ("always:0%", "'0%' is neither a share"),
        ("always:2.5", "'2.5' is neither a share"),
        ("always:many", "'many' is no number"),
        ("always:-1%", "'-1' is not a sensible number"),
        ("always:60%,zeros:50%", "add up to more than 100 %"),
        ("sleeper:1%:before=3", "has no option 'before'; it has after, ring, hosts, rejoins"),
        ("colluders:1%:2.5", "ring is a number of things, not '2.5'"),
        ("many_hosts:1%:hosts=0", "hosts is a number of things, not '0'"),
    ],
)
def test_liars_are_said_in_words(text, sentence):
    with pytest.raises(InputError) as refused:
        parse_liars(text)
    assert sentence in str(refused.value)


def test_liars_have_options():
    colluders, sleeper, named = parse_liars("colluders:10%:7, sleeper:0.5%:after=3:rejoins=2, many_names:3")
    assert (colluders.strategy.ring, colluders.members(1000)) == (7, 100)
    assert (sleeper.strategy.options["after"], sleeper.strategy.rejoins, sleeper.members(1000)) == (3, 2, 5)
    assert (named.strategy.rejoins, named.members(1000)) == (100, 3)
    assert STRATEGIES["colluders"].ring == 50, "the registry is as it was"


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.name)
def test_rehearsed_programs_are_checked_as_the_large_ones_are(one):
    """What a small program's check finds is taken for what a large one's would find."""
    assert {kind.plan.method for kind in kinds_of(one)} == {rehearsal_of(one).plan.method}


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.name)
def test_rehearsed_lies_are_what_they_say(one):
    rehearsal = rehearsal_of(one)
    for answer, determined in ((TILE, False), (Answer("all_zeros"), True), (Answer("margin", 10.0), False)):
        lies = rehearsal.lies(answer)
        assert [lie.determined for lie in lies] == [determined] * len(lies)
        assert all(lie.above for lie in lies)
        assert all(rehearsal.report(lie, "auto").verdict != "accepted" for lie in lies)
        assert rehearsal.report(None, "compare", lies[0], replicated=True).verdict != "accepted"
        assert rehearsal.report(lies[0], "audit", lies[0], replicated=True).verdict != "accepted"
        assert (len(lies) > 1) != determined
    assert rehearsal.lies(Answer("float32")) == [], "float32 computed in float32 is no lie"
    misshapen = rehearsal.lies(Answer("shape"))[0]
    (kind, *_) = kinds_of(one)
    assert rehearsal.committed(kind, misshapen)[0].spec != kind.task.outputs[0]
    assert [blob.spec for blob in rehearsal.committed(kind, rehearsal.lies(TILE)[0])] == list(kind.task.outputs)
    assert np.isfinite(rehearsal.lies(TILE)[0].size)
