"""Everything that crosses the border between laboratory, gateway, volunteers and validators.

Nothing else does: no pickles, no names of the researcher's, no code. Each message is an immutable
`msgspec.Struct`, encoded with msgpack, refused when it has an unknown tag or field (`decode`). Bounds that the type
system cannot say are checked by whoever receives it.

Vocabulary
----------
task
    A program with its input blobs; named by `goblin_dask.digest.task_digest`. The same task is the same name in
    every job, process and year.
attempt
    One try of a task on one worker, named ``task#n`` with the gateway's counter ``n``; also the Dask key there.
lease
    What a volunteer gets: an attempt with a grant to fetch its inputs and to hand in its outputs.
check
    What a validator gets: an attempt's inputs, its committed outputs and how to check them.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from goblin_dask.errors import WireError

PROTOCOL = 1
"""Version of this module; both sides state theirs before anything else (`Hello`)."""

INLINE_LIMIT = 64 * 1024
"""Largest blob, in bytes, that travels inside a message instead of over the data path."""

LACKS = 256
"""Most operators that a machine may say it lacks."""

MESSAGE_LIMIT = 64 * 1024 * 1024
"""Largest encoded message that anybody accepts, in bytes."""


CheckMethod = Literal["auto", "recompute", "compare", "audit"]
"""``auto``: as the checker finds cheapest; ``compare``: with a replica; ``audit``: recompute, and compare."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, omit_defaults=True):
    """Base of the tagged messages."""


class ArraySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Shape and dtype of an array; its blob is the array's elements in C order, little-endian."""

    shape: tuple[int, ...]
    dtype: str
    """NumPy's name: ``float32``, ``bool``, ``complex128``, …; ``bfloat16`` for ml_dtypes' type."""


class BlobRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """An array by its content address, with the bytes themselves where they are few."""

    digest: str
    spec: ArraySpec
    nbytes: int
    inline: bytes | None = None
    """The blob itself, when it is at most `INLINE_LIMIT` long."""


# --- who is there -----------------------------------------------------------------------------------------------


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a volunteer or validator says of itself; believed for scheduling only, never for trust."""

    host: str
    """Key made at random on the machine when it first joined, 32 hex characters; not a host name."""
    device: str = "cpu"
    driver: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    """Of python, numpy, its BLAS, dask, goblin_dask, …: sorted pairs."""
    threads: int = 1
    slots: int = 2
    """Leases it wants at a time: devices plus prefetch depth."""
    memory: int = 0
    """Bytes that it offers to tasks' projected peak memory, all slots together."""
    gpu_memory: int = 0
    cache: int = 0
    """Bytes of blobs that it is willing to keep."""
    flops: float = 0.0
    """Measured speed of a float32 matrix product, FLOP/s."""
    bandwidth: float = 0.0
    """Measured link, bytes/s; 0 when unknown."""
    catalogue: int = 1
    """Version of the operator catalogue; 1 for volunteers that were released before there was another."""
    lacks: tuple[str, ...] = ()
    """Operators of that version that it cannot compute, at most `LACKS`."""


class Hello(Message, frozen=True):
    """First frame of every session, from the side that dials."""

    protocols: tuple[int, ...]
    role: Literal["volunteer", "validator", "lab", "nanny"]
    token: str = ""
    session: str = ""
    """Empty, or the session to resume, with its secret."""
    secret: str = ""
    received: int = 0
    """Sequence number of the last frame received in that session."""
    machine: Machine | None = None


class Welcome(Message, frozen=True):
    """Answer to `Hello`: the session is open, or open again."""

    protocol: int
    session: str
    secret: str
    received: int
    resumed: bool
    keepalive: float = 20.0
    """Seconds between keep-alives; a session is quiet for no longer than this."""


class Goodbye(Message, frozen=True):
    """Refusal or orderly end, with one sentence for a person."""

    reason: str
    retry: bool = False
    """Whether dialling again later can help."""


# --- laboratory and gateway -------------------------------------------------------------------------------------


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the researcher wants results verified."""

    method: Literal["auto", "recompute", "replicate", "sample"] = "auto"
    probability: float = 1.0
    """Share of chunks checked, for ``sample``."""


class LabReady(Message, frozen=True):
    """A lab node announces how its data can be reached and which key signs the grants for them."""

    lab: str
    """Random identity of the lab node, 32 hex characters."""
    grant_key: bytes
    """32 bytes that sign grants; shared between this lab and this gateway alone."""
    local: str = ""
    """Abstract Unix socket on which same-host volunteers get file descriptors; empty when there is none."""
    direct: str = ""
    """Base URL at which volunteers of the same network may reach the lab; empty when there is none."""


class SubmitTask(Message, frozen=True):
    """A task for the grid. Sending it again is harmless: the same task is the same name."""

    task: str
    program: str
    """Digest; the program's bytes came, or come, in a `DefineProgram`."""
    inputs: tuple[BlobRef, ...]
    outputs: tuple[ArraySpec, ...]
    flops: float
    peak: int
    """Projected peak memory, in bytes."""
    priority: tuple[int, ...] = ()
    """Dask's, in the laboratory: smaller is sooner."""
    policy: Policy = Policy()
    job: str = ""
    """Random identity of the job (for fairness and for the monitoring page), never its name."""
    heavy: bool = False
    """Nothing but computing it again can check it, and that is much work: ``auto`` means ``replicate``."""


class DefineProgram(Message, frozen=True):
    program: str
    encoded: bytes
    catalogue: int = 1
    """Version of the operator catalogue that whoever runs it must have."""


class CancelTask(Message, frozen=True):
    task: str


class TaskProgress(Message, frozen=True):
    """State of a task, for the lab's progress display."""

    task: str
    state: str


class CheckReport(Message, frozen=True):
    """What a checker found."""

    verdict: Literal["accepted", "wrong", "unproven", "failed"]
    """`failed`: the checker could not do its work (inputs not reachable): says nothing of the result."""
    method: str
    """algebraic, recompute, replicate, settle, structural."""
    ratio: float = 0.0
    """Worst residual over its tolerance; ≤ 1 when accepted by a bound."""
    settled: int = 0
    """Rows computed exactly after suspicion."""
    reason: str = ""
    seconds: float = 0.0
    """CPU seconds that the check took."""
    flops: float = 0.0
    miss: float = 0.0
    """Upper bound of the probability that an error above the thresholds passes this check."""


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an accepted task was verified; goes into the certificate."""

    method: str
    ratio: float
    miss: float
    volunteers: tuple[str, ...]
    """Random identities, given by the gateway, of the volunteers whose results agree with it."""
    attempts: int = 1
    rejected: int = 0
    check_seconds: float = 0.0
    compute_seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    flops: float = 0.0
    """Of one computation of the task."""
    spent: float = 0.0
    """FLOP of all that was done for it: every attempt that was handed in, and every check."""


class TaskAccepted(Message, frozen=True):
    task: str
    outputs: tuple[BlobRef, ...]
    verdict: Verdict


class TaskFailed(Message, frozen=True):
    """The grid will not compute this task; the laboratory runs it, or tells its researcher."""

    task: str
    kind: Literal["too_large", "lost", "unverifiable", "unsupported", "error"]
    reason: str
    needs: int = 0
    offers: int = 0


class DropUploads(Message, frozen=True):
    """Outputs of a rejected or superseded attempt may go."""

    task: str
    attempt: str
    digests: tuple[str, ...]


class TaskReopened(Message, frozen=True):
    """An accepted, unchecked task is withdrawn: its volunteer was proven wrong elsewhere (``sample`` only)."""

    task: str


class GridOffer(Message, frozen=True):
    """What the volunteers offer, for tiling and placement; sent when it changes."""

    volunteers: int
    validators: int
    memory: tuple[int, ...] = ()
    """Bytes offered by each volunteer to one task (its memory over its busy slots), largest first, at most 64."""
    flops: float = 0.0
    """Of all volunteers together, FLOP/s."""
    bandwidth: float = 0.0
    """Median link, bytes/s; 0 when unknown."""
    local: bool = False
    """All volunteers share the lab's host and map its blobs."""


class RelayRequest(Message, frozen=True):
    """The gateway asks the lab to dial out and move one blob through the relay.

    The lab answers ``GET /relay/{transfer}`` of the gateway with POST of the blob (`fetch`), or GETs it (`store`).
    """

    transfer: str
    direction: Literal["fetch", "store"]
    digest: str
    grant: str


# --- gateway and volunteers -------------------------------------------------------------------------------------


class Routes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Ways to a lab's blobs, best first: descriptor passing, HTTP to the lab, HTTP through the gateway."""

    local: str = ""
    direct: str = ""
    relay: str = ""
    """Path on the gateway that the volunteer is connected to, e.g. ``/goblin/blobs``."""


class Lease(Message, frozen=True):
    """One attempt, given to a volunteer."""

    attempt: str
    program: bytes
    inputs: tuple[BlobRef, ...]
    grant: str
    """Signed permission to fetch these inputs and to hand in the outputs (`goblin_dask.store.grants`)."""
    routes: Routes
    peak: int
    deadline: float
    """Seconds from now after which the attempt is given to somebody else."""
    trace: bool = False
    """In a dispute: name the digests of the values of all nodes."""


class Check(Message, frozen=True):
    """One attempt's result, given to a validator. `outputs` are committed: no randomness was drawn before."""

    attempt: str
    program: bytes
    inputs: tuple[BlobRef, ...]
    outputs: tuple[BlobRef, ...]
    grant: str
    routes: Routes
    method: CheckMethod = "auto"
    replica: tuple[BlobRef, ...] = ()
    """Outputs of another owner's attempt, for ``compare`` and ``audit``."""
    values: tuple[int, ...] = ()
    """The program's values that `outputs` and `replica` are, in a dispute; empty: its outputs."""


class Committed(Message, frozen=True):
    """Digests of an attempt's outputs, before they are uploaded."""

    attempt: str
    outputs: tuple[BlobRef, ...]
    seconds: float
    """CPU seconds of the computation."""
    wall: float = 0.0
    fetched: int = 0
    """Bytes moved to compute it (mapped ones too); blobs held already count nothing."""
    held: tuple[str, ...] = ()
    """Digests of the inputs that the volunteer keeps in its cache now."""
    uploaded: bool = False
    """True when all outputs are inline: there is nothing to upload."""
    digests: tuple[str, ...] = ()
    """Of the values of all nodes, for a lease with ``trace``."""


class Uploaded(Message, frozen=True):
    attempt: str
    seconds: float = 0.0
    sent: int = 0


class AttemptFailed(Message, frozen=True):
    attempt: str
    kind: Literal["memory", "fetch", "upload", "compute", "data", "unsupported", "cancelled"]
    """``data``: the program cannot be run on these inputs, here or anywhere (a singular matrix, say)."""
    reason: str
    needs: int = 0
    """With ``memory``: bytes needed; `offers`: bytes that are free now."""
    offers: int = 0


class Checked(Message, frozen=True):
    attempt: str
    report: CheckReport


class Holding(Message, frozen=True):
    """After a session was opened anew: attempts that the worker still has in hand."""

    attempts: tuple[str, ...]


class Abandon(Message, frozen=True):
    """Gateway to worker: stop this attempt, nobody waits for it."""

    attempt: str


Session = Hello | Welcome | Goodbye
ToGateway = (
    LabReady | SubmitTask | DefineProgram | CancelTask | Committed | Uploaded | AttemptFailed | Checked | Holding
)
FromGateway = TaskProgress | TaskAccepted | TaskFailed | TaskReopened | DropUploads | GridOffer | RelayRequest | Abandon
Work = Lease | Check
"""What the gateway hands to a Dask worker as the one argument of the one function that it may run."""

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode(message: object) -> bytes:
    """Encode a message with msgpack."""
    return _encoder.encode(message)


def decoder(union: object) -> msgspec.msgpack.Decoder[object]:
    """Decoder of one of the unions above; keep it, making one is slow."""
    return msgspec.msgpack.Decoder(union)


def decode(data: bytes | memoryview, using: msgspec.msgpack.Decoder[M]) -> M:
    """Decode one message.

    Raises
    ------
    WireError
        When `data` is too long, or not a message of the decoder's union.
    """
    if len(data) > MESSAGE_LIMIT:
        raise WireError(f"a message of {len(data)} bytes; at most {MESSAGE_LIMIT} are accepted")
    try:
        return using.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise WireError(f"a message that is not of the protocol: {error}") from error
