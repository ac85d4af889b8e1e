"""Who takes part in a simulated grid: honest volunteers, and liars of several strategies."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from goblin_dask import messages as m
from goblin_dask.errors import InputError
from goblin_dask.testing.strategies import Strategy, strategy_named
from goblin_dask.verify.effects import Holder
from goblin_dask.verify.reputation import Host, Reputation, numeric_class

BUILDS = 8
"""Numeric classes of machines, all as frequent: results of two are equal to rounding, those of one in all bits."""


@dataclass(frozen=True)
class Liars:
    """Some volunteers with one strategy."""

    strategy: Strategy
    share: float = 0.0
    """Of all volunteers."""
    count: int = 0
    """Instead of a share."""

    def members(self, volunteers: int) -> int:
        """How many they are."""
        return self.count or round(self.share * volunteers)


def parse_liars(text: str) -> tuple[Liars, ...]:
    """Liars from a text such as ``colluders:10%:50,sleeper:1%:after=20,many_names:1``.

    Each is a strategy's name, their share (or number), and perhaps how many act together and values of the
    strategy's options (``ring``, ``hosts`` and ``rejoins`` are options of all).

    Raises
    ------
    InputError
        When it says something else.
    """
    liars = [_parse(part.strip()) for part in text.split(",") if part.strip()]
    if sum(one.share for one in liars) > 1:
        raise InputError(f"--liars {text!r}: their shares add up to more than 100 %")
    return tuple(liars)


def _parse(text: str) -> Liars:
    name, *rest = text.split(":")
    if not rest:
        raise InputError(f"liars {text!r}: say how many there are, as in '{text}:10%' or '{text}:3'")
    strategy, amount = strategy_named(name.strip()), rest[0].strip()
    share, count = _amount(text, amount)
    options, own = dict(strategy.options), dict[str, int]()
    for word in rest[1:]:
        key, equals, value = word.strip().partition("=")
        if not equals:
            key, value = "ring", word.strip()
        number = _number(text, value)
        if key in ("ring", "hosts", "rejoins"):
            if number != int(number) or number < (0 if key == "rejoins" else 1):
                raise InputError(f"liars {text!r}: {key} is a number of things, not {value!r}")
            own[key] = int(number)
        elif key in options:
            options[key] = number
        else:
            known = ", ".join([*options, "ring", "hosts", "rejoins"])
            raise InputError(f"liars {text!r}: {name} has no option {key!r}; it has {known}")
    changed = dataclasses.replace(
        strategy,
        options=options,
        ring=own.get("ring", strategy.ring),
        hosts=own.get("hosts", strategy.hosts),
        rejoins=own.get("rejoins", strategy.rejoins),
    )
    return Liars(changed, share, count)


def _amount(text: str, amount: str) -> tuple[float, int]:
    percent = amount.endswith("%")
    number = _number(text, amount.removesuffix("%"))
    share = number / 100 if percent else number
    if not percent and number >= 1 and number == int(number):
        return 0.0, int(number)
    if not 0 < share <= 1:
        raise InputError(f"liars {text!r}: {amount!r} is neither a share such as 10% nor a number of volunteers")
    return share, 0


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise InputError(f"liars {text!r}: {value!r} is no number") from None
    if not 0 <= number < 1e9:
        raise InputError(f"liars {text!r}: {value!r} is not a sensible number")
    return number


@dataclass(slots=True, eq=False)
class Person:
    """Whoever is behind an identity, for as many as it takes."""

    strategy: Strategy | None
    ring: int | None
    rejoins: int
    """How often it will come back yet."""
    names: int = 1
    gain: float = 0.0
    """FLOPs of its wrong results that were used."""
    undeserved: float = 0.0
    """FLOPs of its wrong results that counted as verified work."""
    hosts: list[Host] = field(default_factory=list)

    @property
    def price(self) -> float:
        """FLOPs of its right results that checks have accepted."""
        return sum(host.flops for host in self.hosts) - self.undeserved


@dataclass(slots=True, eq=False)
class Volunteer:
    """One machine under one identity."""

    holder: Holder
    record: Host
    person: Person
    joined: float
    hands: set[str] = field(default_factory=set)
    """Attempts."""
    place: int = -1
    """In the list of idle ones."""
    results: int = 0
    lies: int = 0
    since_lie: int = 0
    flops: float = 0.0
    """Of its results."""


class Population:
    """All volunteers, and who of them is idle.

    Parameters
    ----------
    reputation : Reputation
        In which they are registered.
    rng : random.Random
    slots : int
        Leases that each wants at a time.
    """

    def __init__(self, reputation: Reputation, rng: random.Random, slots: int):
        self.reputation, self.rng, self.slots = reputation, rng, slots
        self.by_key: dict[str, Volunteer] = {}
        self.people: list[Person] = []
        self.idle: list[Volunteer] = []
        self.rings: dict[int, int] = {}
        """Members of each ring that are not in quarantine."""
        self.active = 0
        """Volunteers that are not in quarantine."""
        self.pairs = 0
        """Ordered pairs of them that belong to one ring."""
        self._count = 0

    def fill(self, volunteers: int, liars: Sequence[Liars]) -> None:
        """Let everybody join at time 0."""
        rings = itertools.count()
        for one in liars:
            ring: int | None = None
            for number in range(one.members(volunteers) // one.strategy.hosts):
                if one.strategy.ring > 1 and number % one.strategy.ring == 0:
                    ring = next(rings)
                person = Person(one.strategy, ring, one.strategy.rejoins)
                self.people.append(person)
                for _ in range(one.strategy.hosts):
                    self.join(person, 0.0)
        honest = Person(None, None, 0)
        while self.active < volunteers:
            self.join(honest, 0.0)

    def join(self, person: Person, now: float) -> Volunteer:
        """A machine joins; each of a person's hosts in the beginning, and each of its names later."""
        self._count += 1
        number = self._count
        owner = f"owner {number}"
        if person.strategy is not None and person.strategy.hosts > 1 and len(person.hosts) % person.strategy.hosts:
            owner = person.hosts[-1].owner
        machine = m.Machine(f"host {number}", driver=f"build {self.rng.randrange(BUILDS)}", slots=self.slots)
        record = self.reputation.host(owner, machine)
        holder = Holder(
            f"worker {number}", owner, f"network {owner}", machine.host, record.key, record.identity,
            numeric_class(machine),
        )  # fmt: skip
        volunteer = self.by_key[record.key] = Volunteer(holder, record, person, now)
        if person.strategy is not None:
            person.hosts.append(record)
        self._count_in(person.ring, 1)
        self.index(volunteer, now)
        return volunteer

    def bar(self, volunteer: Volunteer) -> None:
        """It is in quarantine."""
        self._count_in(volunteer.person.ring, -1)

    def _count_in(self, ring: int | None, change: int) -> None:
        self.active += change
        if ring is not None:
            members = self.rings.get(ring, 0)
            self.rings[ring] = members + change
            self.pairs += (members + change) * (members + change - 1) - members * (members - 1)

    @property
    def meeting(self) -> float:
        """Probability that two volunteers drawn at random belong to one ring."""
        return self.pairs / (self.active * (self.active - 1)) if self.active > 1 else 0.0

    def index(self, volunteer: Volunteer, now: float) -> bool:
        """Note whether it may have another lease; whether it may."""
        free = min(self.slots, self.reputation.quota(volunteer.record, now)) > len(volunteer.hands)
        if free and volunteer.place < 0:
            volunteer.place = len(self.idle)
            self.idle.append(volunteer)
        elif not free and volunteer.place >= 0:
            last = self.idle.pop()
            if last is not volunteer:
                self.idle[volunteer.place] = last
                last.place = volunteer.place
            volunteer.place = -1
        return free
