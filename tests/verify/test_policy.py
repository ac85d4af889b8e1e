"""Policies: how they are written, drawn, and what they are worth."""

import random

import pytest

from goblin_dask.errors import InputError
from goblin_dask.messages import CheckReport, Policy
from goblin_dask.verify import policy


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("auto", Policy()),
        (" recompute ", Policy("recompute")),
        ("replicate", Policy("replicate")),
        ("sample:0.1", Policy("sample", 0.1)),
        ("sample:1", Policy("sample", 1.0)),
        (Policy("sample", 0.0), Policy("sample", 0.0)),
    ],
)
def test_parse(text, value):
    assert policy.parse(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "Auto", "auto:1", "sample", "sample:", "sample:0", "sample:nan", "sample:1.5", "sample:-1", "x:y", 0.1, None],
)
def test_parse_says_what_is_possible(text):
    with pytest.raises(InputError, match=r"verify="):
        policy.parse(text)


def test_the_draw_has_the_hosts_share_and_suspects_are_never_spared():
    rng = random.Random(0)
    drawn = sum(policy.checked(Policy("sample", 0.9), share=0.1, rng=rng) for _ in range(10_000))
    assert 900 < drawn < 1100
    assert all(policy.checked(Policy("sample", 0.0), share=1.0, rng=rng) for _ in range(100))
    assert all(policy.checked(Policy(name), share=0.0, rng=rng) for name in ("auto", "recompute", "replicate"))


def test_trust_changes_which_check():
    assert policy.order(Policy(), suspicious=False) == "auto"
    assert policy.order(Policy(), suspicious=True) == "recompute"
    assert policy.order(Policy("recompute"), suspicious=False) == "recompute"


def test_miss_probabilities():
    assert policy.miss(Policy("sample", 0.25), None) == 0.75
    assert policy.miss(Policy("sample", 0.25), CheckReport("accepted", "algebraic", miss=1e-9)) == 1e-9
    assert policy.miss(Policy(), CheckReport("accepted", "algebraic", miss=7.0)) == 1.0
    agreed = CheckReport("accepted", "replicate")
    assert policy.miss(Policy("replicate"), agreed) == policy.COLLUDING
    assert policy.miss(Policy(), agreed, audit=0.5) == policy.COLLUDING / 2
    assert policy.miss(Policy("replicate"), CheckReport("accepted", "recompute"), audit=0.5) == 0
    assert policy.undetected(0.1, 0) == 1.0
    assert policy.undetected(0.1, 44) < 0.01


@pytest.mark.parametrize("text", ["auto", "recompute", "replicate", "sample:0.25"])
def test_policies_are_written_as_they_are_read(text):
    assert policy.written(policy.parse(text)) == text


def test_demands_more():
    assert policy.demands_more(Policy(), "unchecked")
    assert not policy.demands_more(Policy("sample", 0.5), "unchecked")
    assert not policy.demands_more(Policy("recompute"), "algebraic")
