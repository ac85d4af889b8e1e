"""What came out of a simulation."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass
class Work:
    """FLOPs of one class of operators."""

    method: str
    """How its results are checked by default."""
    tasks: int = 0
    needed: float = 0.0
    """Each task once."""
    volunteers: float = 0.0
    """Spent by volunteers, on whatever attempts."""
    validators: float = 0.0
    laboratory: float = 0.0
    """Spent on tasks that the grid gave up."""

    @property
    def multiplier(self) -> float:
        """FLOPs spent over FLOPs needed."""
        spent = self.volunteers + self.validators + self.laboratory
        return spent / self.needed if self.needed else 0.0


@dataclass
class Deeds:
    """What the volunteers of one strategy did, and what became of it."""

    members: int = 0
    names: int = 0
    """Identities that they had, later ones included."""
    results: int = 0
    """Handed in."""
    lies: int = 0
    lies_above: int = 0
    """Those that are larger than the threshold of the check."""
    proven: int = 0
    """Lies that a check proved wrong."""
    unproven: int = 0
    """Lies that were refused without blame."""
    credited: int = 0
    """Lies that were counted as verified work."""
    used_above: int = 0
    """Wrong results that were used, larger than the threshold."""
    used_below: int = 0
    """Smaller than that."""
    gain: float = 0.0
    """FLOPs of the wrong results above the threshold that were used."""
    price: float = 0.0
    """FLOPs of right, verified results that they delivered."""
    blamed: int = 0
    """Right results that were proven wrong: must be none."""
    quarantined: int = 0
    """Identities."""
    results_until: int = 0
    """Results of identities that came into quarantine, all together."""
    lies_until: int = 0
    days_until: list[float] = field(default_factory=list)
    """Days from joining to quarantine, of each identity that came into it."""

    @property
    def typical_days(self) -> float:
        """Median time to quarantine in days; NaN where nobody came into it."""
        days = sorted(self.days_until)
        return days[len(days) // 2] if days else math.nan


@dataclass
class Meetings:
    """Pairs of one ring that were given the same task."""

    expected: float = 0.0
    """Sum over the pairs of attempts of the probability that both holders belong to one ring: with a volunteers of
    each ring among M, that is Σ a (a − 1) / (M (M − 1))."""
    counted: int = 0

    @property
    def sigma(self) -> float:
        """Standard deviation of the number, which is nearly a Poisson variable."""
        return math.sqrt(self.expected)


@dataclass
class Result:
    """The figures of one simulated grid."""

    policy: str
    volunteers: int
    days: float
    seed: int
    tasks: int = 0
    accepted: int = 0
    failed: int = 0
    """Given up by the grid, so that the laboratory computed them."""
    unfinished: int = 0
    stated_miss: float = 0.0
    """Largest probability, in any certificate, that a wrong result is accepted like that one was."""
    unchecked: int = 0
    """Results that were used without a check."""
    reopened: int = 0
    seconds: float = 0.0
    """That the simulation took."""
    strategies: dict[str, Deeds] = field(default_factory=dict)
    work: dict[str, Work] = field(default_factory=dict)
    meetings: Meetings = field(default_factory=Meetings)
    used: list[tuple[float, str, str]] = field(default_factory=list)
    """Day, class and strategy of each wrong result above the threshold that was used."""

    @property
    def lies_above(self) -> int:
        """Wrong results above the threshold that were handed in."""
        return sum(deeds.lies_above for deeds in self.strategies.values())

    @property
    def used_above(self) -> int:
        """Those of them that were used."""
        return len(self.used)

    @property
    def wrong_share(self) -> float:
        """Share of all results that are wrong, above the threshold, and were used."""
        return self.used_above / self.accepted if self.accepted else 0.0

    @property
    def measured_miss(self) -> float:
        """Share of the wrong results above the threshold that were used."""
        return self.used_above / self.lies_above if self.lies_above else 0.0

    @property
    def miss_sigma(self) -> float:
        """Standard deviation of `measured_miss`, were the certificate's figure the true one."""
        p = self.stated_miss
        return math.sqrt(p * (1 - p) / self.lies_above) if self.lies_above else 0.0

    @property
    def multiplier(self) -> float:
        """FLOPs spent over FLOPs needed, of all classes together."""
        needed = sum(work.needed for work in self.work.values())
        return sum(work.multiplier * work.needed for work in self.work.values()) / needed if needed else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        found = dataclasses.asdict(self)
        found |= {
            name: getattr(self, name)
            for name in ("lies_above", "used_above", "wrong_share", "measured_miss", "multiplier")
        }
        for name, work in self.work.items():
            found["work"][name]["multiplier"] = work.multiplier
        found["meetings"]["sigma"] = self.meetings.sigma
        return found

    def print(self, console: Console) -> None:
        """Tables for a person."""
        console.print(
            f"{self.policy}: {self.volunteers:,} volunteers, {self.days:g} days, {self.tasks:,} tasks "
            f"({self.failed:,} left to the laboratory, {self.unfinished:,} unfinished), seed {self.seed}"
        )
        deeds = self.strategies.items()
        console.print(_table(_LIES, [_lies_row(name, one) for name, one in deeds]))
        console.print(_table(_LIARS, [_liars_row(name, one) for name, one in deeds]))
        console.print(_table(_WORK, [_work_row(name, one) for name, one in self.work.items()]))
        console.print(
            f"wrong results used: {self.used_above} of {self.lies_above:,} lies above the threshold "
            f"({self.measured_miss:.2g}), {self.wrong_share:.2g} of all results; "
            f"certificates state at most {self.stated_miss:.2g}"
        )
        if self.unchecked or self.reopened:
            console.print(
                f"used unchecked: {self.unchecked:,}; re-opened because of their volunteer: {self.reopened:,}"
            )
        if self.meetings.expected:
            console.print(
                f"two of a ring at one task: {self.meetings.counted}; "
                f"expected {self.meetings.expected:.1f} ± {self.meetings.sigma:.1f}"
            )
        blamed = sum(deeds.blamed for deeds in self.strategies.values())
        if blamed:
            console.print(f"right results that were blamed: {blamed}")


_LIES = ("liars", "results", "lies", "proven", "unproven", "used", "used, below")
_LIARS = ("liars", "names", "barred", "after results", "after days", "gain/price")
_WORK = ("operators", "checked by", "tasks", "volunteers", "validators", "work ×")


def _lies_row(name: str, deeds: Deeds) -> list[str]:
    counts = (deeds.results, deeds.lies, deeds.proven, deeds.unproven, deeds.used_above, deeds.used_below)
    return [name, *(f"{count:,}" for count in counts)]


def _liars_row(name: str, deeds: Deeds) -> list[str]:
    until = ["-", "-"]
    if deeds.quarantined:
        until = [f"{deeds.results_until / deeds.quarantined:.1f}", f"{deeds.typical_days:.1f}"]
    share = "0" if not deeds.gain else f"{deeds.gain / deeds.price:.2%}" if deeds.price else "∞"
    return [name, f"{deeds.names:,}", f"{deeds.quarantined:,}", *until, share]


def _work_row(name: str, work: Work) -> list[str]:
    needed = work.needed or 1.0
    shares = (work.volunteers / needed, work.validators / needed, work.multiplier)
    return [name, work.method, f"{work.tasks:,}", *(f"{share:.3f}" for share in shares)]


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
