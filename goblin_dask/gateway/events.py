"""Events that the gateway's dispatcher receives and instructions that it answers with.

`goblin_dask.gateway.dispatcher.Dispatcher` is pure: ``handle(event, now) -> list[Instruction]``. The server turns
sockets into events and instructions into sockets; tests and simulations drive the same dispatcher without either.
Worker identities are the gateway's own random ones; `now` is monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from goblin_dask import messages as m
from goblin_dask.graphs.outline import Outline


# --- events -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class WorkerJoined:
    worker: str
    role: str
    """``volunteer`` or ``validator``."""
    owner: str
    network: str
    """What the gateway takes for the network of the host; owners of one network are not independent."""
    machine: m.Machine
    holding: tuple[str, ...] = ()
    """Attempts that it still has in hand, after the gateway was restarted or its session opened anew."""
    lab: str = ""
    """Of a validator: the laboratory whose results alone it checks; empty for the operator's, which check all."""
    place: str = ""
    """Opaque; equal to a laboratory's when both are on one host, so that blobs are mapped instead of moved."""


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    worker: str


@dataclass(frozen=True, slots=True)
class WorkerAway:
    """Its connection was cut; its session stays for a while, and it keeps what it has in hand."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerBack:
    """It is connected again, in the same session."""

    worker: str


@dataclass(frozen=True, slots=True)
class LabJoined:
    lab: str
    place: str = ""
    """As in `WorkerJoined`."""


@dataclass(frozen=True, slots=True)
class LabLeft:
    """Its tasks stay until it comes back or `grace` has passed."""

    lab: str


@dataclass(frozen=True, slots=True)
class Needs:
    """What a program asks of whoever runs or checks it."""

    catalogue: int = 1
    """Version of the operator catalogue, at least."""
    operators: frozenset[str] = frozenset()


ANYBODY = Needs()
"""What every volunteer knows."""


@dataclass(frozen=True, slots=True)
class TaskSubmitted:
    lab: str
    task: m.SubmitTask
    needs: Needs = ANYBODY
    outline: Outline | None = None
    """Of its program, where replicas of it can be bisected."""


@dataclass(frozen=True, slots=True)
class TaskCancelled:
    lab: str
    task: str


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A `Committed`, `Uploaded`, `AttemptFailed` or `Checked` of that worker, decoded but not yet believed."""

    worker: str
    message: m.Committed | m.Uploaded | m.AttemptFailed | m.Checked


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines, graces, backups."""


Event = (
    WorkerJoined | WorkerLeft | WorkerAway | WorkerBack | LabJoined | LabLeft | TaskSubmitted | TaskCancelled
    | FromWorker | Tick
)  # fmt: skip


# --- instructions -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Dispatch:
    """Hand an attempt to a worker: the server adds program bytes, grant and routes, and makes the Lease or Check."""

    worker: str
    lab: str
    task: str
    attempt: str
    program: str
    inputs: tuple[m.BlobRef, ...]
    peak: int
    deadline: float
    """Seconds from now."""
    check: CheckOrder | None = None
    """None: a lease for a volunteer; else a check for a validator."""
    encoded: bytes = b""
    """The program that is to be run, where that is not the task's."""
    reveal: RevealOrder | None = None
    """The volunteer reveals values, in a dispute about another attempt of its own."""


@dataclass(frozen=True, slots=True)
class CheckOrder:
    of: str
    """The attempt that is checked."""
    outputs: tuple[m.BlobRef, ...]
    method: m.CheckMethod = "auto"
    replica: tuple[m.BlobRef, ...] = ()
    values: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RevealOrder:
    sizes: tuple[int, ...]
    """Bytes of the values."""
    trace: bool
    """Digests of all values are wanted."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Tell a worker to abandon an attempt."""

    worker: str
    attempt: str


@dataclass(frozen=True, slots=True)
class ToLab:
    lab: str
    message: m.TaskProgress | m.TaskAccepted | m.TaskFailed | m.TaskReopened | m.DropUploads | m.GridOffer


@dataclass(frozen=True, slots=True)
class Record:
    """A fact for the database: a verdict or failure of a host."""

    worker: str
    owner: str
    host_key: str
    """(owner, host, device, driver, versions) as one digest."""
    kind: str
    """accepted, wrong, unproven, late, lost, failed, withdrawn; ignored: a message that it was not entitled to send;
    clone: its host key is connected from two networks at once."""
    task: str
    attempt: str
    method: str = ""
    ratio: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """No more leases for this host key; its unchecked accepted results are re-opened."""

    worker: str
    host_key: str
    reason: str


Instruction = Dispatch | Withdraw | ToLab | Record | Quarantine
