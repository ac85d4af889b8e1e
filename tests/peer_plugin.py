"""Pytest plugin of `tests.peer`: runs somebody else's tests with the lab as Dask's scheduler, and notes the outcomes.

``GOBLIN_PEER_MODE`` is ``sync`` (Dask as it is) or ``lab``; ``GOBLIN_PEER_RESULT`` names the JSON file to write.
Dask's ``assert_eq`` asks for the scheduler named ``sync``, and tests for others by name: in mode ``lab`` every name
means the lab.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from dask.base import named_schedulers

_outcomes: dict[str, str] = {}
_reasons: dict[str, str] = {}
_counts: dict[str, int] = {}


@pytest.fixture(scope="session", autouse=True)
def _scheduler() -> Iterator[None]:
    if os.environ["GOBLIN_PEER_MODE"] == "lab":
        from goblin_dask.testing.inprocess import InProcessGrid

        original = dict(named_schedulers)
        with InProcessGrid(volunteers=2, offload="always", memory="12GB") as grid:
            for name in named_schedulers:
                named_schedulers[name] = grid.lab.get
            with dask.config.set(scheduler=grid.lab.get):
                yield
            _counts.update(grid.counts())
        named_schedulers.update(original)
    else:
        yield


def pytest_sessionfinish(exitstatus: int) -> None:
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        return  # it did not come to its end: its outcomes are not all there
    result = {"outcomes": _outcomes, "reasons": _reasons, "counts": _counts}
    Path(os.environ["GOBLIN_PEER_RESULT"]).write_text(json.dumps(result))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.rpartition("/")[2]
    if report.failed:
        _outcomes[name] = "failed"
        _reasons[name] = str(report.longrepr)[-1500:]
    elif report.when == "call" and _outcomes.get(name) != "failed":
        _outcomes[name] = "xfailed" if hasattr(report, "wasxfail") else report.outcome
    elif report.skipped:
        _outcomes.setdefault(name, "skipped")
