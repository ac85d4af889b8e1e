"""What a peer says of itself, and how fast it may say it."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from goblin_dask.errors import Refused
from goblin_dask.gateway.peers import Pace, address_of, check_machine, place_of
from goblin_dask.messages import Machine


def test_a_pace_lets_bursts_through_and_then_the_rate():
    pace = Pace(rate=10.0, burst=5.0)
    assert [pace.delay(100.0) for _ in range(5)] == [0.0] * 5
    assert pace.delay(100.0) == pytest.approx(0.1)
    assert pace.delay(100.0) == pytest.approx(0.2)
    assert pace.delay(200.0) == 0.0


def test_a_machine_is_needed_and_its_figures_are_finite():
    with pytest.raises(Refused, match="--preload goblin_dask"):
        check_machine(None, "volunteer")
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(Refused, match="flops is a number from 0"):
            check_machine(Machine("a" * 32, flops=bad), "volunteer")
    assert check_machine(Machine("a" * 32), "validator").threads == 1


def test_a_proxys_word_counts_only_behind_a_proxy():
    request = make_mocked_request("GET", "/", headers={"X-Forwarded-For": "198.51.100.1, 203.0.113.9"})
    assert address_of(request, behind_proxy=True) == "203.0.113.9"  # the first could be the peer's own invention
    assert address_of(request, behind_proxy=False) != "203.0.113.9"


def test_only_this_host_is_a_known_place():
    assert place_of("127.0.0.1") == place_of("::1") == "here"
    assert place_of("203.0.113.9") == ""
