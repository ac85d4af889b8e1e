"""Effects: what follows from a fact in the life of a task, as `goblin_dask.verify.lifecycle.TaskLife` answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from goblin_dask.messages import BlobRef, CheckMethod, CheckReport, Verdict

GONE = frozenset({"lost", "wrong", "failed", "withdrawn"})
"""States of attempts that are over, and of no use."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker as the life of a task sees it."""

    worker: str
    owner: str
    network: str
    host: str
    """The machine, whatever device and versions."""
    key: str
    """Host key of its reputation."""
    identity: str
    """Pseudonym for the certificate."""
    numeric_class: str = ""


@dataclass(slots=True)
class Attempt:
    """One try of a task on one volunteer."""

    name: str
    holder: Holder
    since: float
    state: str = "leased"
    """leased, committed, uploaded, checking, unproven, accepted; gone ones: lost, wrong, failed, withdrawn."""
    late: bool = False
    """Its deadline has passed; what it still brings is welcome while the task is open."""
    outputs: tuple[BlobRef, ...] = ()
    audit: float = 0.0
    """Probability with which its host's results are recomputed although another's agrees."""
    audited: bool = False
    """Whether this one is."""
    seconds: float = 0.0
    fetched: int = 0
    sent: int = 0
    order: Order | None = None
    failed_checks: int = 0
    avoid: set[str] = field(default_factory=set)
    """Validators whose check of it failed."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a validator is asked where it is not about a task's outputs."""

    inputs: tuple[BlobRef, ...]
    outputs: tuple[BlobRef, ...]
    replica: tuple[BlobRef, ...] = ()
    values: tuple[int, ...] = ()
    """Numbers of the program's values that are compared; empty: its outputs are."""
    encoded: bytes = b""
    """The program; empty: the task's."""


@dataclass(slots=True)
class Order:
    """How an attempt's result is to be checked."""

    method: CheckMethod
    replica: Attempt | None = None
    question: Question | None = None
    """In a dispute: what is asked of values between the nodes."""
    final: bool = False
    """Nobody else can compute the task: an unproven result ends it."""
    dispute: bool = False
    """Two replicas differ: this one is judged even when the other was accepted meanwhile."""


@dataclass(frozen=True, slots=True)
class Judge:
    """This attempt's result waits for a validator."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Reveal:
    """This attempt's volunteer has to hand out its values at a cut of the program."""

    attempt: Attempt
    cut: int


@dataclass(frozen=True, slots=True)
class Credit:
    """A check accepted this attempt's result."""

    attempt: Attempt
    report: CheckReport


@dataclass(frozen=True, slots=True)
class Blame:
    """This attempt's result was proven wrong."""

    attempt: Attempt
    report: CheckReport


@dataclass(frozen=True, slots=True)
class Doubt:
    """This attempt's result could be proven neither right nor wrong."""

    attempt: Attempt
    report: CheckReport


@dataclass(frozen=True, slots=True)
class Charge:
    """This attempt ended without a result: ``lost``, ``late`` or ``failed``."""

    attempt: Attempt
    kind: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Nobody waits for this attempt any more."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class StopCheck:
    """Nobody waits for this check, or for what this side of a dispute was to reveal, any more."""

    check: str


@dataclass(frozen=True, slots=True)
class Drop:
    """These uploads of the attempt may go."""

    attempt: Attempt
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The task has a result."""

    outputs: tuple[BlobRef, ...]
    verdict: Verdict
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Failed:
    """The grid gives the task up. `forgive`: host keys whose failures were the task's."""

    kind: str
    reason: str
    needs: int = 0
    forgive: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ignored:
    """A message that says nothing new, or that nobody was entitled to send."""

    reason: str
    suspicious: bool = False


Effect = Judge | Reveal | Credit | Blame | Doubt | Charge | Stop | StopCheck | Drop | Accepted | Failed | Ignored
