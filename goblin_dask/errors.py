"""Every error that a user of the project or a peer on the wire can meet.

::

    GoblinError
    ├── InputError (ValueError)          what the user gave cannot be computed
    │   └── ProgramError                 a program that the check refuses
    ├── NotTraceable                     a function that cannot be recorded; its task runs in the laboratory
    ├── StoreError
    │   ├── BlobMissing (KeyError)       no such blob in this store
    │   ├── StoreFull                    no room is left for a blob; says how much is used and how much is needed
    │   └── DigestMismatch               bytes that are not what their address says
    ├── WireError                        a peer broke the protocol: its connection is closed
    │   └── Refused                      the other side will not talk to us, and says why
    ├── ConnectionLost (OSError)         a peer cannot be reached
    ├── TooLarge                         no volunteer is large enough; carries the numbers
    ├── VerificationError                a result that was asked for could not be verified
    └── JobError
        ├── JobFailed                    a job ended with an error
        ├── JobTimeout (TimeoutError)    a job has not ended in the time that was allowed for it, and goes on
        ├── JobCancelled                 a job was cancelled
        └── ActorLost                    an actor in the laboratory is not there any more, nor is what it held

A message says what is wrong, what was expected, what was given and what to do about it, in one sentence
where one suffices. Errors of libraries are translated once, where the library is called, with ``raise … from``.
"""

from __future__ import annotations


class GoblinError(Exception):
    """Root of all errors that the project raises on purpose."""


class InputError(GoblinError, ValueError):
    """What the user gave cannot be computed."""


class ProgramError(InputError):
    """A program that `goblin_dask.graphs.check` refuses."""


class NotTraceable(GoblinError):
    """A function that cannot be recorded as a program."""


class StoreError(GoblinError):
    """A store did not do what it must."""


class BlobMissing(StoreError, KeyError):
    """No blob of that digest is in the store."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class StoreFull(StoreError):
    """No room is left, on the disk or under the cap that the owner set."""


class DigestMismatch(StoreError):
    """Bytes whose digest is not the one they were announced under."""


class WireError(GoblinError):
    """A peer broke the protocol; its connection is closed with this reason."""


class Refused(WireError):
    """The other side will not talk to us; the message is its reason."""


class ConnectionLost(GoblinError, OSError):
    """A peer cannot be reached, or went away for good."""


def _size(count: int) -> str:
    """Bytes, in a unit in which they are a readable number."""
    if count >= 10_000_000:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.2f} MB" if count >= 10_000 else f"{count} bytes"


class TooLarge(GoblinError):
    """A task that fits no volunteer.

    Parameters
    ----------
    needs, offers : int
        Bytes that the task needs, and that the largest volunteer offers.
    advice : str
        What to do about it.
    """

    def __init__(self, needs: int, offers: int, advice: str = "rechunk into smaller blocks"):
        self.needs, self.offers, self.advice = needs, offers, advice
        super().__init__(
            f"a task needs {_size(needs)} of memory, the largest volunteer offers {_size(offers)}: {advice}"
        )

    def __reduce__(self) -> tuple[type[TooLarge], tuple[int, int, str]]:
        return type(self), (self.needs, self.offers, self.advice)


class VerificationError(GoblinError):
    """A result could not be verified."""


class JobError(GoblinError):
    """A job did not end with a result."""


class JobFailed(JobError):
    """A job ended with an error."""


class JobTimeout(JobError, TimeoutError):
    """A job has not ended yet."""


class JobCancelled(JobError, RuntimeError):
    """A job was cancelled."""


class ActorLost(JobError):
    """An actor in the laboratory was released, or went with the lab node or the Dask worker that held it."""
