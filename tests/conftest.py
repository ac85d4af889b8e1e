"""Options and fixtures that every test may use.

Expensive tables are tests marked ``full``. By default each takes a seeded sample of its cases; with ``--full`` it takes
them all, which is how `make full` runs them. Tables print their figures through the `report` fixture.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the expensive tables whole instead of a seeded sample")


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the tables are to be run whole."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def sample(full: bool) -> Callable[[Sequence[T], int], list[T]]:
    """``sample(cases, n)``: all cases with ``--full``, `n` of them (always the same) without."""

    def choose(cases: Sequence[T], n: int) -> list[T]:
        cases = list(cases)
        return cases if full or len(cases) <= n else random.Random(20260101).sample(cases, n)

    return choose


_lines: list[str] = []


@pytest.fixture
def report() -> Callable[[str], None]:
    """``report(line)``: a figure of a table, printed at the end of the run."""
    return _lines.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _lines:
        terminalreporter.section("figures")
        for line in _lines:
            terminalreporter.write_line(line)
