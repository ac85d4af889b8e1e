"""Grids with liars: what becomes of their results under each policy."""

import math

import pytest

from goblin_dask.errors import InputError
from goblin_dask.testing.simulation import Settings, parse_liars, simulate
from goblin_dask.testing.simulation.workload import CLASSES
from goblin_dask.testing.strategies import STRATEGIES

POLICIES = ("auto", "recompute", "replicate", "sample:0.1")
CHECKABLE = ("product", "decomposition")
UNMET = tuple(one for one in CLASSES if one.name != "several operators")
"""What ``auto`` does not replicate: nobody meets there."""


def grid(policy="auto", liars="", **what):
    return simulate(Settings(policy, parse_liars(liars), **what))


def check_books(result, unfinished=0):
    """What must hold of every simulated grid."""
    assert result.unfinished == unfinished
    assert result.accepted + result.failed + unfinished == result.tasks
    assert result.tasks == sum(work.tasks for work in result.work.values())
    for name, deeds in result.strategies.items():
        assert deeds.blamed == 0, f"right results of {name} were blamed"
        assert deeds.proven <= deeds.lies <= deeds.results
        assert deeds.used_above <= deeds.lies_above
        assert deeds.quarantined == len(deeds.days_until) <= deeds.names
    assert result.used_above == sum(deeds.used_above for deeds in result.strategies.values())
    assert all(work.multiplier >= 1 for work in result.work.values() if work.tasks)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_liars_nothing_is_wrong(policy):
    result = grid(policy, volunteers=50, days=4)
    check_books(result)
    assert (result.tasks, result.failed, result.used, result.strategies) == (100, 0, [], {})
    multipliers = {name: work.multiplier for name, work in result.work.items()}
    if policy == "auto":
        assert all(multipliers[name] < 1.02 for name in CHECKABLE)
    elif policy == "recompute":
        assert set(multipliers.values()) == {2.0}


def test_the_same_seed_is_the_same_grid():
    first, second, other = (grid(liars="always:10%", volunteers=100, days=5, seed=seed) for seed in (1, 1, 2))
    assert {**first.to_dict(), "seconds": 0} == {**second.to_dict(), "seconds": 0}
    assert first.work != other.work


@pytest.mark.parametrize("policy", ["auto", "recompute"])
def test_where_every_chunk_is_checked_no_lie_is_used(policy):
    """Strategies whose errors are larger than the threshold."""
    liars = (
        "always:4%,sleeper:4%,large_only:4%,small_only:4%,reckless:4%,copier:4%,many_hosts:4%,late:4%,nan:4%,shape:4%"
    )
    result = grid(policy, liars, volunteers=500, days=20, classes=UNMET)
    check_books(result)
    assert result.lies_above > 200
    assert result.used == []
    for name in ("always", "reckless", "copier", "many_hosts", "nan", "shape"):
        assert result.strategies[name].quarantined == result.strategies[name].members


def test_what_is_below_the_threshold_is_used_and_said_to_be():
    result = grid("auto", "hidden:20%", volunteers=100, days=10)
    check_books(result)
    assert result.strategies["hidden"].used_below > 0
    assert result.used == []
    assert result.strategies["hidden"].quarantined == 0


def test_replicas_deceive_where_two_of_a_ring_meet():
    """The number of meetings is what chance makes of it; nothing else is used."""
    result = grid("replicate", "colluders:20%:50", volunteers=500, days=10)
    check_books(result)
    assert abs(result.meetings.counted - result.meetings.expected) <= 3 * result.meetings.sigma
    assert 0 < result.used_above <= result.meetings.counted
    assert result.meetings.expected == pytest.approx(result.tasks * 2 * 50 * 49 / (500 * 499), rel=0.05)


def test_one_owner_cannot_deceive_by_many_machines():
    result = grid("replicate", "many_hosts:20%", volunteers=200, days=10)
    check_books(result)
    assert result.strategies["many_hosts"].lies > 0
    assert result.used == []


def test_samples_miss_no_more_than_the_certificate_says():
    """Once a host has shown enough to be spared, it lies."""
    result = grid("sample:0.3", "always:10%,sleeper:10%", volunteers=100, days=20, tasks_per_day=2.0)
    check_books(result)
    assert result.stated_miss == 0.7
    assert 0 < result.measured_miss <= result.stated_miss
    assert result.strategies["always"].used_above == 0, "a new host's results are all checked"
    assert result.reopened > 0


def test_who_never_uploads_is_not_waited_for():
    result = grid("auto", "withholding:20%", volunteers=50, days=5)
    check_books(result)
    assert result.strategies["withholding"].results > 0
    assert (result.used, result.strategies["withholding"].price) == ([], 0)


def test_many_names_are_counted_together():
    result = grid("auto", "many_names:1:rejoins=3", volunteers=20, days=30, tasks_per_day=4)
    check_books(result)
    deeds = result.strategies["many_names"]
    assert (deeds.members, deeds.names, deeds.quarantined) == (1, 4, 4)


def test_everybody_lies():
    """No honest volunteer is left, and the tasks wait for one."""
    result = grid("auto", "nan:100%", volunteers=10, days=10)
    check_books(result, unfinished=result.tasks)
    assert result.used == []
    assert result.strategies["nan"].quarantined == 10


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ({"volunteers": 1}, "volunteers must be at least 2, not 1"),
        ({"days": 0.0}, "days must be a number above 0, not 0.0"),
        ({"tasks_per_day": math.nan}, "tasks_per_day must be a number above 0, not nan"),
        ({"policy": "trust"}, "is no policy"),
        ({"volunteers": 5, "liars": parse_liars("always:6")}, "more liars than the 5 volunteers"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(what, sentence):
    with pytest.raises(InputError) as refused:
        Settings(**what)
    assert sentence in str(refused.value)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("policy", POLICIES)
def test_colluders(policy, full, report):
    """100,000 volunteers for 30 days, a tenth of them in rings of 50 owners; small by default."""
    result = grid(policy, "colluders:4%:50,reckless:3%:50,sleeping_ring:3%:50", volunteers=100_000 if full else 400)
    check_books(result)
    multipliers = ", ".join(f"{name} {work.multiplier:.3f}" for name, work in result.work.items())
    report(
        f"{policy:10} {result.tasks:9,} tasks: {result.used_above} of {result.lies_above:,} lies used "
        f"({result.measured_miss:.3g}, stated {result.stated_miss:.3g}); work × {multipliers}; {result.seconds:.0f} s"
    )
    for name, deeds in result.strategies.items():
        report(
            f"{'':10} {name}: {deeds.results:,} results, {deeds.lies:,} lies, {deeds.proven:,} proven, "
            f"{deeds.quarantined:,} of {deeds.names:,} in quarantine after "
            f"{deeds.results_until / max(deeds.quarantined, 1):.1f} results, {deeds.typical_days:.1f} days"
        )
    meetings = result.meetings
    report(
        f"{'':10} two of a ring at one task: {meetings.counted}, expected {meetings.expected:.1f} ± "
        f"{meetings.sigma:.1f}; wrong are {result.wrong_share:.2g} of all results"
    )
    if policy.startswith("sample"):
        assert result.measured_miss <= result.stated_miss
    else:
        assert abs(meetings.counted - meetings.expected) <= 3 * meetings.sigma
        assert result.used_above <= meetings.counted
    if policy in ("auto", "recompute"):
        assert {name for _, name, _ in result.used} <= ({"several operators"} if policy == "auto" else set())
    if policy in ("auto", "sample:0.1"):
        assert all(result.work[name].multiplier <= 1.15 for name in CHECKABLE)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("policy", "liars"),
    [
        *((policy, "many_names:1") for policy in POLICIES),
        *((policy, "many_clean_names:1") for policy in ("auto", "replicate", "sample:0.1")),
        *((policy, "many_names_for_large:1") for policy in ("auto", "replicate", "sample:0.1")),
        ("auto", "cancelling:1:rejoins=100"),
    ],
)
def test_coming_back_under_new_names_does_not_pay(policy, liars, full, report):
    """The same liar, a hundred times; four by default. Gain: FLOP of wrong results used; price: of verified ones."""
    names = 100 if full else 8 if policy.startswith("sample") else 4
    result = grid(policy, liars, volunteers=30, days=600, tasks_per_day=12.0, names=names)
    (deeds,) = result.strategies.values()
    share = f"{deeds.gain / deeds.price:.2%}" if deeds.price else "nothing"
    report(
        f"{policy:10} {liars:24} {deeds.names} names, {deeds.results} results, {deeds.lies} lies, {deeds.used_above} "
        f"used: {deeds.gain / 1e12:.2f} TFLOP of {deeds.price / 1e12:.1f} verified, {share}"
    )
    assert deeds.names == names + 1
    assert deeds.gain <= 0.01 * deeds.price


def test_every_strategy_takes_part():
    """All at once: nobody honest is blamed, and every task gets a result."""
    liars = ",".join(f"{name}:1%:ring={min(one.ring, 4)}" for name, one in STRATEGIES.items())
    result = grid("auto", liars, volunteers=200, days=10, classes=UNMET)
    check_books(result)
    assert set(result.strategies) >= set(STRATEGIES)
    assert {liar for _, _, liar in result.used} <= {"cancelling"}
