"""Reputation: failures shrink, verified success alone restores, liars are out."""

import math
import random

import pytest

from goblin_dask.messages import Machine
from goblin_dask.verify.reputation import (
    AUDITED,
    AUDITED_NEW,
    LIES,
    OWNER_LIARS,
    START,
    WORTH,
    Host,
    Reputation,
    host_key,
    numeric_class,
)


def machine(host="h", **what):
    return Machine(host, **what)


@pytest.fixture
def reputation():
    return Reputation(random.Random(0))


def test_trust_is_per_owner_host_device_driver_and_versions(reputation):  # situation 4
    one = machine(device="cuda:0", driver="1", versions=(("numpy", "2.4"),))
    keys = {
        host_key("o", one),
        host_key("p", one),
        host_key("o", machine("i", device="cuda:0", driver="1", versions=(("numpy", "2.4"),))),
        host_key("o", machine(device="cuda:1", driver="1", versions=(("numpy", "2.4"),))),
        host_key("o", machine(device="cuda:0", driver="2", versions=(("numpy", "2.4"),))),
        host_key("o", machine(device="cuda:0", driver="1", versions=(("numpy", "2.5"),))),
    }
    assert len(keys) == 6
    assert host_key("o", machine(flops=1.0, slots=9)) == host_key("o", machine())
    assert numeric_class(machine("h")) == numeric_class(machine("i"))
    assert reputation.host("o", one) is reputation.host("o", one)
    assert reputation.host("o", one) is not reputation.host("o", one, "validator")


@pytest.mark.parametrize("kind", ["lost", "late", "failed"])
def test_failures_of_every_kind_shrink_the_quota_and_then_pause(reputation, kind):
    host = reputation.host("o", machine())
    for _ in range(10):
        reputation.accepted(host)
    assert reputation.quota(host, 0.0) == START + 10
    quotas = []
    for _ in range(5):
        reputation.failed(host, kind, 100.0)
        quotas.append(reputation.quota(host, 100.0))
    assert quotas[:2] == [6, 3]
    assert quotas[2:] == [0, 0, 0]
    assert getattr(host, kind) == 5
    assert reputation.quota(host, 100.0 + 3.9) == 0
    assert reputation.quota(host, 100.0 + 8.1) == 1
    reputation.accepted(host)
    assert reputation.quota(host, 109.0) == 2


def test_the_pause_is_bounded(reputation):
    host = reputation.host("o", machine())
    for _ in range(10_000):
        reputation.failed(host, "failed", 0.0)
    assert reputation.quota(host, 601.0) == 1


def test_unproven_is_no_blame_but_earns_nothing(reputation):
    host = reputation.host("o", machine())
    for _ in range(3):
        reputation.unproven(host, 0.0)
    assert reputation.quota(host, 0.0) == START
    for _ in range(10):
        reputation.unproven(host, 0.0)
    assert not host.quarantined
    assert not reputation.suspicious(host)
    assert reputation.quota(host, 0.0) == 0


def test_audits_of_trusted_hosts_are_rare_and_never_end(reputation):
    host = reputation.host("o", machine())
    rates = [reputation.audit_rate(host)]
    for _ in range(10_000):
        reputation.accepted(host)
        rates.append(reputation.audit_rate(host))
    assert rates[0] == AUDITED_NEW
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == AUDITED > 0


def test_the_share_that_is_checked_falls_with_verified_work(reputation):
    host = reputation.host("o", machine())
    assert reputation.share(host, 1e9) == 1.0
    for number in range(1, 1000):
        reputation.accepted(host, 1e9)
        assert reputation.share(host, 1e9) == min(1.0, WORTH / number)
    assert reputation.share(host, 1e12) == 1.0, "a much larger task than it was ever trusted with"
    assert reputation.share(host, 0.0) == 0.0, "nothing to be gained"
    reputation.wrong(host, 5.0, structural=False, now=0.0)
    assert reputation.share(host, 1e9) == 1.0


@pytest.mark.parametrize("after", [1, 50, 150, 1000])
def test_coming_back_under_new_names_does_not_pay(after):
    """Gain, in FLOP of unchecked lies before the first that is checked, over the verified FLOP of all names."""
    rng = random.Random(after)
    gain = price = 0.0
    for _ in range(400):
        reputation = Reputation(rng)
        host = reputation.host("o", machine())
        for _ in range(after):
            reputation.accepted(host, 1e9)
        price += host.flops
        while rng.random() >= max(0.1, reputation.share(host, 1e9)):
            gain += 1e9
    assert gain <= 1.2 * price / WORTH


def test_quarantine_within_three_proven_lies(reputation):
    host = reputation.host("o", machine())
    for _ in range(1000):
        reputation.accepted(host)
    out = [reputation.wrong(host, 5.0, structural=False, now=0.0) for _ in range(LIES)]
    assert out == [[], [], [host]]
    assert reputation.quota(host, 1e9) == 0
    assert reputation.wrong(host, 5.0, structural=False, now=0.0) == []
    reputation.accepted(host)
    assert reputation.quota(host, 1e9) == 0


@pytest.mark.parametrize(("ratio", "structural"), [(1e3, False), (math.inf, False), (math.nan, False), (0.0, True)])
def test_loud_lies_are_enough_at_once(reputation, ratio, structural):
    host = reputation.host("o", machine())
    assert reputation.wrong(host, ratio, structural=structural, now=0.0) == [host]
    assert "no honest machine" in host.quarantined


def test_an_owner_answers_for_what_calls_itself_new(reputation):
    good = reputation.host("o", machine("good"))
    reputation.accepted(good)
    barred = []
    for number in range(3):
        liar = reputation.host("o", machine("bad", versions=(("numpy", str(number)),)))
        barred += reputation.wrong(liar, math.inf, structural=False, now=0.0)
    assert good in barred
    assert reputation.host("o", machine("newer")).quarantined
    assert not reputation.host("somebody else", machine("newer")).quarantined


def test_a_large_owner_is_not_punished_for_a_few_broken_machines(reputation):
    for number in range(100):
        reputation.accepted(reputation.host("university", machine(f"good {number}")))
    for number in range(5):
        reputation.wrong(reputation.host("university", machine(f"bad {number}")), math.inf, structural=False, now=0.0)
    assert "university" not in reputation.owners


def test_forgiving_never_gives_more_than_was_taken(reputation):
    host = reputation.host("o", machine())
    reputation.failed(host, "lost", 0.0)
    for _ in range(10):
        reputation.forgive(host)
    assert (host.quota, host.streak) == (START, 0)


def test_rows_round_trip(reputation):
    host = reputation.host("o", machine())
    reputation.accepted(host, 1e9)
    reputation.failed(host, "lost", 5.0)
    liar = reputation.host("p", machine())
    reputation.wrong(liar, math.inf, structural=False, now=0.0)
    again = Reputation.from_rows(reputation.to_rows(), random.Random(1))
    assert again.to_rows() == reputation.to_rows()
    assert again.quota(again.hosts[liar.key], 0.0) == 0
    assert again.host("o", machine()).identity == host.identity


def lie(reputation, *hosts):
    for host in hosts:
        reputation.wrong(host, math.inf, structural=False, now=0.0)


def test_a_pardoned_host_begins_anew(reputation):
    host = reputation.host("o", machine())
    reputation.accepted(host, 1e12)
    lie(reputation, host)
    assert host.quarantined
    assert reputation.pardon(host) == [host]
    fresh = reputation.host("p", machine())
    kept = {"key", "owner", "identity"}
    assert {name: getattr(host, name) for name in Host.__slots__ if name not in kept} == {
        name: getattr(fresh, name) for name in Host.__slots__ if name not in kept
    }
    lie(reputation, host)
    assert host.quarantined


def test_a_pardon_frees_the_owner_of_too_few_liars(reputation):
    liars, innocent = [reputation.host("o", machine(str(i))) for i in range(OWNER_LIARS + 1)], machine("innocent")
    bystander = reputation.host("o", innocent)
    lie(reputation, *liars[:-1])
    assert bystander.quarantined == liars[-1].quarantined == reputation.owners["o"]
    again = Reputation.from_rows(reputation.to_rows(), random.Random(0))  # after a restart
    for one in (reputation, again):
        hosts = [one.hosts[host.key] for host in (*liars, bystander)]
        assert set(map(id, one.pardon(hosts[0]))) == {id(host) for host in (hosts[0], *hosts[-2:])}
        assert [bool(host.quarantined) for host in hosts] == [False, True, True, False, False]
        assert not one.host("o", machine("new")).quarantined


def test_rows_of_counts_alone_are_enough():
    rows = [
        {"key": "x", "owner": "o", "accepted": 50, "lost": 1},
        {"key": "y", "owner": "o", "accepted": 0, "failed": 9},
        {"key": "z", "owner": "o", "quarantined": "3 lies"},
    ]
    again = Reputation.from_rows(rows, random.Random(1))
    assert [again.quota(again.hosts[key], 0.0) for key in "xyz"] == [52, 1, 0]
    assert len({host.identity for host in again.hosts.values()}) == 3
