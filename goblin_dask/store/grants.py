"""Grants: signed, short-lived permissions to move the blobs of one attempt.

The gateway signs with a key that only it and the lab share; the volunteer carries the grant to the lab, which
verifies it without asking anybody. A grant names no blobs: the lab knows a task's blobs itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from typing import Literal

import msgspec

from goblin_dask.errors import Refused
from goblin_dask.messages import encode

KEY_BYTES = 32
LONGEST = 2048
"""Longest grant that is looked at, in characters."""


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What is permitted to the bearer."""

    task: str
    attempt: str
    kind: Literal["lease", "check", "reveal"]
    """``lease``: read the task's inputs, hand in its outputs; ``check``: read its inputs and what was uploaded for it;
    ``reveal``: read its inputs, hand in values that its program has on the way."""
    expires: float
    """Seconds since the epoch."""
    sizes: tuple[int, ...] = ()
    """Bytes of what is handed in, for ``reveal``."""


_decoder = msgspec.msgpack.Decoder(Grant)


def _signature(key: bytes, payload: bytes) -> bytes:
    return hmac.new(key, b"goblin-grant-1\n" + payload, hashlib.sha256).digest()


def sign(key: bytes, grant: Grant) -> str:
    """Text of a grant: URL-safe characters, to be sent as ``Authorization: Bearer``.

    Parameters
    ----------
    key : bytes
        The lab's grant key, `KEY_BYTES` long.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a grant key has {KEY_BYTES} bytes, this one has {len(key)}")
    payload = encode(grant)
    return base64.urlsafe_b64encode(_signature(key, payload) + payload).decode()


def verify(key: bytes, text: str, *, now: float | None = None) -> Grant:
    """The grant that `text` carries.

    Raises
    ------
    Refused
        When it was not signed with `key`, or has expired.
    """
    if not text:
        raise Refused("a grant is needed to move this blob, none came with the request")
    if len(text) > LONGEST:
        raise Refused(f"a grant of {len(text)} characters; none is longer than {LONGEST}")
    try:
        raw = base64.urlsafe_b64decode(text.encode("ascii"))
    except (binascii.Error, UnicodeEncodeError) as error:
        raise Refused("the grant is not written as grants are") from error
    if base64.urlsafe_b64encode(raw).decode() != text:
        raise Refused("the grant is not written as grants are")
    signature, payload = raw[:32], raw[32:]
    if not hmac.compare_digest(signature, _signature(key, payload)):
        raise Refused("the grant was not signed for this laboratory")
    try:
        grant = _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise Refused("the grant was signed by a version that this laboratory does not understand") from error
    late = (time.time() if now is None else now) - grant.expires
    if not late <= 0:
        raise Refused(f"the grant expired {late:.0f} s ago: the attempt was given to somebody else")
    return grant
