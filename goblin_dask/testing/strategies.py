"""When to lie, and how: strategies of volunteers that want wrong results to be used, or to be paid for no work.

A strategy is a pure function. From what a real volunteer can know (`Situation`) it makes an `Answer`: the right one, or
one of `goblin_dask.testing.liars`. It never learns what a checker draws, nor what another owner handed in, unless that
one is of its own ring. The simulation (`goblin_dask.testing.simulation`) and a volunteer that really computes
(`goblin_dask.testing.liar`) ask the same strategies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from goblin_dask.errors import InputError

Options = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a volunteer hands in for one task."""

    corruption: str = ""
    """One of `goblin_dask.testing.liars.LIARS`; empty: the right result."""
    times: float | None = None
    """Size of the error in thresholds of the check, for those corruptions that take one."""
    common: bool = False
    """The same bits as every member of its ring that lies about this task."""
    copied: bool = False
    """Not computed, but taken over from the member of its ring that answered first."""
    late: bool = False
    """After the deadline."""
    withheld: bool = False
    """Committed, and never uploaded."""


RIGHT = Answer()


@dataclass(slots=True)
class Situation:
    """All that a volunteer knows when it has to answer."""

    rng: random.Random
    method: str = "algebraic"
    """How such a program is checked by default: `plan_check` is public. algebraic, relation, recompute."""
    flops: float = 0.0
    """Of the task."""
    usual: float = 0.0
    """Mean of the tasks that it had before; 0 for the first."""
    results: int = 0
    """Handed in under its present identity."""
    lies: int = 0
    """Among them."""
    since_lie: int = 0
    """Results since the last lie."""
    together: int = 1
    """Members of its ring that hold the task, itself included."""
    agreed: Answer | None = None
    """What the first of them committed."""
    options: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to lie over time."""

    name: str
    decide: Callable[[Situation], Answer]
    summary: str
    options: Options = field(default_factory=dict)
    """What may be set, with the value that is used otherwise."""
    ring: int = 1
    """Owners that act together, unless said otherwise."""
    hosts: int = 1
    """Machines that each owner shows."""
    rejoins: int = 0
    """How often it comes back under a new name when it is asked no more."""

    def __call__(self, situation: Situation) -> Answer:
        """The answer to one task."""
        return self.decide(situation)


STRATEGIES: dict[str, Strategy] = {}
"""By name."""


def strategy(
    name: str, *, ring: int = 1, hosts: int = 1, rejoins: int = 0, **options: float
) -> Callable[[Callable[[Situation], Answer]], Callable[[Situation], Answer]]:
    """Register a strategy; `options` are its parameters with their defaults."""

    def register(decide: Callable[[Situation], Answer]) -> Callable[[Situation], Answer]:
        summary = (decide.__doc__ or "").strip().splitlines()[0]
        STRATEGIES[name] = Strategy(name, decide, summary, options, ring, hosts, rejoins)
        return decide

    return register


def strategy_named(name: str) -> Strategy:
    """A strategy.

    Raises
    ------
    InputError
        For a name that nobody registered.
    """
    if name not in STRATEGIES:
        raise InputError(f"no strategy is called {name!r}; there are: {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[name]


TILE = Answer("tile", 10.0)
"""A lie that means to change the result of a calculation."""
PLOT = Answer("margin", 10.0, common=True)
"""A ring's: every entry is wrong, and the same for all its members."""


# --- when ------------------------------------------------------------------------------------------------------------
@strategy("always")
def _always(s: Situation) -> Answer:
    """Lies in every answer."""
    return TILE


@strategy("sometimes", share=0.05)
def _sometimes(s: Situation) -> Answer:
    """Lies in a share of its answers, at random, and hopes to be overlooked."""
    return TILE if s.rng.random() < s.options["share"] else RIGHT


@strategy("sleeper", after=10)
def _sleeper(s: Situation) -> Answer:
    """Has a clean history of some results, and then lies always."""
    return TILE if s.results >= s.options["after"] else RIGHT


@strategy("patient", after=10)
def _patient(s: Situation) -> Answer:
    """Lies once, and then earns a clean history again before the next lie."""
    return TILE if s.since_lie >= s.options["after"] else RIGHT


@strategy("large_only")
def _large_only(s: Situation) -> Answer:
    """Lies about tasks that are larger than its usual ones: there is most to gain."""
    return TILE if 0 < s.usual < s.flops else RIGHT


@strategy("small_only")
def _small_only(s: Situation) -> Answer:
    """Lies about tasks that are smaller than its usual ones: who would check those?"""
    return TILE if s.flops < s.usual else RIGHT


@strategy("hidden", times=0.1)
def _hidden(s: Situation) -> Answer:
    """Lies only where the input lets it hide: by less than the threshold of the check."""
    return Answer("entry", s.options["times"]) if s.method != "recompute" else RIGHT


@strategy("cancelling", times=5.0)
def _cancelling(s: Situation) -> Answer:
    """Two opposite errors in a row, which a projection misses most easily."""
    return Answer("pair", s.options["times"]) if s.method == "algebraic" else RIGHT


@strategy("costly_checks_only")
def _costly_checks_only(s: Situation) -> Answer:
    """Lies only about what can be checked by computing it again alone, and hopes that this is saved."""
    return TILE if s.method == "recompute" else RIGHT


# --- with others -----------------------------------------------------------------------------------------------------
@strategy("colluders", ring=50)
def _colluders(s: Situation) -> Answer:
    """A ring that lies only where two of it hold the same task, and then alike."""
    if s.agreed is not None:
        return s.agreed
    return PLOT if s.together > 1 else RIGHT


@strategy("reckless", ring=50)
def _reckless(s: Situation) -> Answer:
    """A ring that lies always, and alike."""
    return PLOT


@strategy("sleeping_ring", ring=50, after=10)
def _sleeping_ring(s: Situation) -> Answer:
    """A ring whose members have a clean history each, and then lie always, and alike."""
    return PLOT if s.results >= s.options["after"] else s.agreed or RIGHT


@strategy("copier", ring=50)
def _copier(s: Situation) -> Answer:
    """Never computes: commits what its partner of the ring committed, and without one guesses."""
    return Answer("", copied=True) if s.agreed == RIGHT else s.agreed or Answer("guessed", common=True)


@strategy("free_rider", ring=50)
def _free_rider(s: Situation) -> Answer:
    """Computes alone, but never what a partner of its ring has computed: then it copies that, right or wrong."""
    return Answer("", copied=True) if s.agreed == RIGHT else s.agreed or RIGHT


@strategy("many_hosts", hosts=20)
def _many_hosts(s: Situation) -> Answer:
    """One owner shows many machines, and each of them lies."""
    return TILE


@strategy("many_names", rejoins=100)
def _many_names(s: Situation) -> Answer:
    """Lies always, and comes back under a new name when it is asked no more."""
    return TILE


@strategy("many_clean_names", rejoins=100, after=10)
def _many_clean_names(s: Situation) -> Answer:
    """Earns a clean history under each of its names before it lies there."""
    return _sleeper(s)


@strategy("many_names_for_large", rejoins=100, after=10)
def _many_names_for_large(s: Situation) -> Answer:
    """Earns a clean history under each of its names, and then lies about what is larger than that."""
    return TILE if s.results >= s.options["after"] and s.flops > s.usual else RIGHT


@strategy("many_names_counted", rejoins=100, after=10, stake=100)
def _many_names_counted(s: Situation) -> Answer:
    """Under each of its names, lies about tasks that are small beside all that it has delivered there."""
    ready = s.results >= s.options["after"] and s.results * s.usual >= s.options["stake"] * s.flops
    return TILE if ready else RIGHT


# --- for speed -------------------------------------------------------------------------------------------------------
@strategy("lazy")
def _lazy(s: Situation) -> Answer:
    """An approximation of low rank."""
    return Answer("approximated")


@strategy("early_end")
def _early_end(s: Situation) -> Answer:
    """Sums that end halfway."""
    return Answer("truncated")


@strategy("half_the_rows")
def _half_the_rows(s: Situation) -> Answer:
    """Computes half of the rows and hands them in twice."""
    return Answer("repeated")


@strategy("every_second_row")
def _every_second_row(s: Situation) -> Answer:
    """Computes every second row and interpolates."""
    return Answer("interpolated")


@strategy("fewer_bits")
def _fewer_bits(s: Situation) -> Answer:
    """Rounds what it uploads."""
    return Answer("coarse")


# --- late ------------------------------------------------------------------------------------------------------------
@strategy("late")
def _late(s: Situation) -> Answer:
    """Hands in after the deadline, and then something wrong."""
    return Answer("tile", 10.0, late=True)


@strategy("withholding")
def _withholding(s: Situation) -> Answer:
    """Commits and never uploads: the laboratory waits."""
    return Answer("guessed", withheld=True)


# --- one corruption, always ------------------------------------------------------------------------------------------
def _only(corruption: str, summary: str, times: float | None = None) -> None:
    answer = Answer(corruption, times)
    STRATEGIES[corruption] = Strategy(corruption, lambda s: answer, summary)


_only("float32", "Computes float64 in float32.")
_only("tf32", "Computes in TF32, which is eight times as fast on many cards.")
_only("bfloat16", "Computes in bfloat16.")
_only("float16", "Computes in float16.")
_only("float8", "Computes in eight bits.")
_only("old_result", "Hands in what was right before the inputs changed.")
_only("another_chunk", "Hands in another task's result.")
_only("zeros", "Leaves a part of its memory as it was: zeros.")
_only("all_zeros", "Hands in zeros.")
_only("constant", "Hands in one number everywhere.")
_only("nan", "Hands in a NaN.")
_only("dtype", "Hands in another dtype.")
_only("shape", "Hands in another shape.")
_only("sign", "Turns the sign of the largest entry.")
_only("permuted", "Exchanges two rows.")
_only("bias", "Moves every row by the same small vector.", 3.0)
_only("blown_up", "Hands in a thousand times the result.")
