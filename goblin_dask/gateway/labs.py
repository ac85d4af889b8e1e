"""What the gateway keeps of a connected laboratory, in memory only: its programs, its key, the ways to its blobs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from goblin_dask import messages as m
from goblin_dask.digest import Digest, digest, is_digest, task_digest
from goblin_dask.errors import BlobMissing, ProgramError, Refused, WireError
from goblin_dask.gateway.events import ANYBODY, Dispatch, Needs
from goblin_dask.gateway.relay import Permit
from goblin_dask.graphs.operators import CATALOGUE_VERSION
from goblin_dask.graphs.program import decode
from goblin_dask.store import grants
from goblin_dask.store.buffers import nbytes

if TYPE_CHECKING:
    from goblin_dask.gateway.leases import Ticket

IDENTITY = 32
RELAY = "/goblin/blobs"
REPEATS = 8
"""How often an attempt may hand in its outputs: connections are cut, uploads repeated."""

UPLOADS = 10_000
"""Attempts whose relayed uploads are added up."""


class Line(Protocol):
    """The part of a session that is used to talk to a laboratory."""

    def send(self, message: object) -> None: ...

    def close(self, reason: str, retry: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class LabLimits:
    """What one laboratory may keep in the gateway's memory."""

    programs: int = 50_000
    program_bytes: int = 128 * 1024 * 1024
    waiting: int = 10_000
    """Tasks whose program has not come yet."""
    open_tasks: int = 200_000
    inline_bytes: int = 256 * 1024 * 1024
    """Inputs of open tasks that came inline."""
    inputs: int = 4096
    """Of one task."""


@dataclass(slots=True)
class Lab:
    """One laboratory, connected or expected back."""

    id: str
    owner: str
    key: bytes
    local: str
    direct: str
    place: str
    network: str
    address: str
    line: Line | None
    programs: OrderedDict[Digest, bytes] = field(default_factory=OrderedDict)
    needs: dict[Digest, Needs] = field(default_factory=dict)
    """Of each program."""
    program_bytes: int = 0
    waiting: dict[Digest, list[m.SubmitTask]] = field(default_factory=dict)
    waiting_count: int = 0
    inline: dict[str, int] = field(default_factory=dict)
    """Bytes of the inline inputs of each open task that has some."""
    inline_bytes: int = 0

    def hold(self, task: m.SubmitTask, limits: LabLimits) -> bool:
        """Count a task's inline inputs; False when there are too many to take it on."""
        size = sum(len(ref.inline) for ref in task.inputs if ref.inline is not None)
        if size and task.task not in self.inline:
            if self.inline_bytes + size > limits.inline_bytes:
                return False
            self.inline[task.task] = size
            self.inline_bytes += size
        return True

    def refusal(self, task: m.SubmitTask, open_: int, limits: LabLimits) -> m.TaskFailed | None:
        """Why a task is not taken on beside `open_` others; None where it is, and its inline inputs are counted."""
        needs = self.needs.get(task.program, ANYBODY)
        if needs.catalogue > CATALOGUE_VERSION:
            return m.TaskFailed(
                task.task,
                "unsupported",
                f"its program needs version {needs.catalogue} of the operator catalogue and the gateway has version "
                f"{CATALOGUE_VERSION}: a newer goblin-dask there has it",
            )
        if open_ >= limits.open_tasks:
            reason = f"this laboratory has {limits.open_tasks} tasks on the grid: submit fewer at a time"
        elif not self.hold(task, limits):
            reason = f"this laboratory's inline inputs fill {limits.inline_bytes} bytes here: submit fewer at a time"
        else:
            return None
        return m.TaskFailed(task.task, "error", reason)

    def release(self, task: str) -> None:
        """A task ended."""
        self.inline_bytes -= self.inline.pop(task, 0)

    def define(self, message: m.DefineProgram, limits: LabLimits) -> list[m.SubmitTask]:
        """Keep a program; returns the tasks that waited for it.

        Raises
        ------
        WireError
            When it is not a program, or not the one that its name says.
        """
        name, encoded = message.program, message.encoded
        if name not in self.programs:
            if digest(encoded) != name:
                raise WireError("a program's name must be the digest of its bytes, which it is not")
            self.needs[name] = _needs(message)
            self.programs[name] = encoded
            self.program_bytes += len(encoded)
            while len(self.programs) > limits.programs or self.program_bytes > limits.program_bytes:
                gone, dropped = self.programs.popitem(last=False)
                del self.needs[gone]
                self.program_bytes -= len(dropped)
        tasks = self.waiting.pop(name, [])
        self.waiting_count -= len(tasks)
        return tasks

    def admit(self, task: m.SubmitTask, limits: LabLimits) -> bool:
        """Whether a task may go on at once; else it waits for its program.

        Raises
        ------
        WireError
            When it is not what its name says, or too many wait.
        """
        check_task(task, limits)
        if task.program in self.programs:
            self.programs.move_to_end(task.program)
            return True
        if self.waiting_count >= limits.waiting:
            raise WireError(f"more than {limits.waiting} tasks wait for programs that were not defined")
        self.waiting.setdefault(task.program, []).append(task)
        self.waiting_count += 1
        return False

    def routes(self, address: str, network: str, place: str) -> m.Routes:
        """Ways to its blobs for a worker there; ways that cannot work are not named."""
        same_host = bool(place and place == self.place) or address == self.address
        return m.Routes(
            local=self.local if same_host else "",
            direct=self.direct if same_host or network == self.network else "",
            relay=RELAY,
        )

    def work(self, order: Dispatch, program: bytes, routes: m.Routes, expires: float) -> m.Work:
        """The message that hands an attempt, a check or a dispute's question to a worker.

        Parameters
        ----------
        expires : float
            Seconds since the epoch: until then its grant is honoured.
        """
        kind: Literal["lease", "check", "reveal"] = "lease" if order.check is None else "check"
        trace, sizes = False, tuple[int, ...]()
        if order.reveal is not None:
            kind, trace, sizes = "reveal", order.reveal.trace, order.reveal.sizes
        grant = grants.sign(self.key, grants.Grant(order.task, order.attempt, kind, expires, sizes))
        if order.check is None:
            return m.Lease(
                order.attempt, program, order.inputs, grant, routes, order.peak, order.deadline, trace
            )  # fmt: skip
        check = order.check
        return m.Check(
            order.attempt, program, order.inputs, check.outputs, grant, routes, check.method,
            check.replica, check.values,
        )  # fmt: skip


def _needs(message: m.DefineProgram) -> Needs:
    """What a program asks of whoever runs it: what its laboratory says, and what this gateway knows of its operators.

    A program of a later catalogue than the gateway's is not checked here, and so not given to anybody.
    """
    if message.catalogue > CATALOGUE_VERSION:
        return Needs(message.catalogue)
    try:
        program = decode(message.encoded)
    except ProgramError as error:
        raise WireError(f"the gateway does not accept a program of this laboratory: {error}") from error
    return Needs(max(message.catalogue, program.catalogue), program.operators)


def check_ready(message: m.LabReady) -> None:
    """Refuse a laboratory's announcement that cannot be right."""
    if len(message.lab) != IDENTITY or message.lab.strip("0123456789abcdef"):
        raise WireError("a laboratory's identity is 32 hexadecimal characters")
    if len(message.grant_key) != grants.KEY_BYTES:
        raise WireError(f"a grant key has {grants.KEY_BYTES} bytes, not {len(message.grant_key)}")
    if len(message.local) > 100 or len(message.direct) > 300:
        raise WireError("a way to a laboratory's blobs is at most 300 characters long")
    if message.direct and not message.direct.startswith(("http://", "https://")):
        raise WireError("the direct way to a laboratory's blobs is an http:// or https:// URL")


def check_task(task: m.SubmitTask, limits: LabLimits) -> None:
    """Refuse a task that is not what its name says; figures of cost are the dispatcher's business."""
    if len(task.inputs) > limits.inputs or len(task.outputs) > limits.inputs:
        raise WireError(f"a task of {len(task.inputs)} inputs; at most {limits.inputs} are accepted")
    if len(task.job) > 64 or len(task.priority) > 64:
        raise WireError("a job's identity is at most 64 characters long, a priority 64 numbers")
    if not is_digest(task.program):
        raise WireError("a task names its program by digest")
    check_refs(task.inputs)
    if task_digest(task.program, (ref.digest for ref in task.inputs)) != task.task:
        raise WireError("a task's name must be the digest of its program's and inputs' names, which it is not")


def check_refs(refs: Iterable[m.BlobRef]) -> None:
    """Refuse references whose inline bytes are too many, or not as many as they say."""
    for ref in refs:
        if not is_digest(ref.digest):
            raise WireError("a blob is named by 64 hexadecimal characters")
        if ref.inline is not None and not (len(ref.inline) == ref.nbytes <= m.INLINE_LIMIT):
            raise WireError(f"{len(ref.inline)} bytes inline of a blob of {ref.nbytes}; all of it, at most 65536, goes")


class Uploads:
    """How much was handed in through the relay for each attempt: a grant must not fill a laboratory's disk."""

    def __init__(self) -> None:
        self._bytes: OrderedDict[str, int] = OrderedDict()

    def add(self, permit: Permit) -> None:
        """Count one upload, at its longest.

        Raises
        ------
        Refused
            When the attempt has handed in its outputs several times already.
        """
        total = self._bytes.get(permit.bearer, 0) + max(permit.sizes)
        if total > REPEATS * permit.total + max(permit.sizes):
            raise Refused("this attempt has handed in its outputs several times already")
        self._bytes[permit.bearer] = total
        if len(self._bytes) > UPLOADS:
            self._bytes.popitem(last=False)


class TicketOf(Protocol):
    def __call__(self, lab: str, task: str, /) -> Ticket | None: ...


def permit(labs: Iterable[Lab], ticket_of: TicketOf, text: str, name: str, upload: bool) -> Permit:
    """What a grant allows for one blob.

    Parameters
    ----------
    labs : iterable of Lab
        Those whose key may have signed it.
    ticket_of : callable
        ``ticket_of(lab, task)``: the dispatcher's ticket, if the task is open.
    text, name, upload
        The grant, the blob's digest, and whether it is handed in.

    Raises
    ------
    Refused, BlobMissing
    """
    lab, grant = _grant(labs, text)
    ticket = ticket_of(lab.id, grant.task)
    if ticket is None:
        raise Refused("nobody waits for this task any more")
    if upload:
        if grant.kind == "check":
            raise Refused("a grant for a check does not allow uploads")
        sizes_out = grant.sizes or [nbytes(spec) for spec in ticket.life.task.outputs]
        return Permit(lab.id, grant.attempt, frozenset(sizes_out), sum(sizes_out))
    sizes = {ref.digest: ref.nbytes for ref in ticket.life.task.inputs}
    if grant.kind == "check":
        for attempt in ticket.life.attempts.values():
            sizes |= {ref.digest: ref.nbytes for ref in attempt.outputs}
        if ticket.life.dispute is not None:
            sizes |= ticket.life.dispute.refs
    if name not in sizes:
        raise BlobMissing("this attempt has no such input")
    return Permit(lab.id, grant.attempt, frozenset([sizes[name]]))


def _grant(labs: Iterable[Lab], text: str) -> tuple[Lab, grants.Grant]:
    refusal = Refused("the grant was not signed by a laboratory of this gateway")
    for lab in labs:
        try:
            return lab, grants.verify(lab.key, text)
        except Refused as error:
            refusal = error
    raise refusal
