"""Who may join: tokens, owners, and what counts as one network."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from goblin_dask.errors import InputError, Refused
from goblin_dask.gateway.database import Database, Owner, Token

ROLES = ("volunteer", "validator", "lab")
"""Roles of tokens; a nanny comes with its worker's."""

_TOKEN = re.compile(r"goblin_([0-9a-f]{16})_([0-9a-f]{48})", re.ASCII)
_OWNER = re.compile(r"[\w.@ +-]{1,100}")
_DECOY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Account:
    """Result of admission."""

    owner: str
    role: str
    token: str = ""
    """Public part of the token that was shown; empty for anonymous volunteers."""


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """What may be shown of a token."""

    id: str
    role: str
    owner: str
    created: float
    revoked: float | None


async def create_token(database: Database, role: str, owner: str) -> str:
    """Make a token; it is returned here and never again, the database keeps its hash.

    Parameters
    ----------
    database : Database
        Started.
    role : {"volunteer", "validator", "lab"}
        What it admits to.
    owner : str
        Who answers for it; made when new.
    """
    if role not in ROLES:
        raise InputError(f"a token's role is one of {', '.join(ROLES)}; got {role!r}")
    if not _OWNER.fullmatch(owner) or owner.startswith("anonymous"):
        raise InputError(
            "an owner's name is 1 to 100 letters, digits, spaces or any of . _ @ + -, and does not begin with "
            f"'anonymous'; got {owner[:120]!r}"
        )
    public, secret = secrets.token_hex(8), secrets.token_hex(24)

    def insert(session: Session) -> None:
        row = session.scalar(sa.select(Owner).where(Owner.name == owner))
        if row is None:
            row = Owner(name=owner, created=time.time())
            session.add(row)
            session.flush()
        session.add(Token(id=public, owner_id=row.id, role=role, hash=_hash(secret), created=time.time(), revoked=None))

    await database.transaction(insert)
    return f"goblin_{public}_{secret}"


async def list_tokens(database: Database) -> list[TokenInfo]:
    """All tokens, oldest first."""

    def read(session: Session) -> list[TokenInfo]:
        query = sa.select(Token, Owner.name).join(Owner, Owner.id == Token.owner_id).order_by(Token.created)
        return [TokenInfo(t.id, t.role, name, t.created, t.revoked) for t, name in session.execute(query)]

    return await database.transaction(read)


async def revoke_token(database: Database, token: str) -> None:
    """Revoke a token, given whole or by its public part; who is connected stays until the session ends."""
    match = _TOKEN.fullmatch(token)
    public = match[1] if match else token

    def update(session: Session) -> bool:
        row = session.get(Token, public)
        if row is not None and row.revoked is None:
            row.revoked = time.time()
        return row is not None

    if not await database.transaction(update):
        raise InputError(f"there is no token {public[:64]!r}: list them to see those that exist")


async def admit(database: Database, token: str, role: str, network: str, open_to_all: bool) -> Account:
    """Decide on a peer that wants to join.

    Parameters
    ----------
    database : Database
        Started.
    token : str
        As the peer sent it; believed in nothing.
    role : str
        What it wants to be; a ``nanny`` needs what its volunteer or validator needs.
    network : str
        Where it comes from; the owner of those without a token.
    open_to_all : bool
        Whether volunteers without a token are welcome.

    Raises
    ------
    Refused
        With a sentence for the person at the other end.
    """
    wanted = ("volunteer", "validator") if role == "nanny" else (role,)
    if not token:
        if open_to_all and "volunteer" in wanted:
            return Account(f"anonymous-{network}", role)
        raise Refused(
            f"this gateway admits a {wanted[0]} with a token only: ask its operator for one "
            f"(goblin gateway token {wanted[0]} OWNER) and give it as --token or DASK_GOBLIN__TOKEN"
        )
    match = _TOKEN.fullmatch(token)
    public, secret = (match[1], match[2]) if match else ("", "")

    def find(session: Session) -> tuple[str, str, str] | None:
        query = sa.select(Token.hash, Token.role, Owner.name).join(Owner, Owner.id == Token.owner_id)
        row = session.execute(query.where(Token.id == public, Token.revoked.is_(None))).first()
        return (row[0], row[1], row[2]) if row else None

    found = await database.transaction(find)
    stored, granted, owner = found or (_DECOY, "", "")
    # An unknown token is compared too: how long the answer takes says nothing.
    if not hmac.compare_digest(_hash(secret), stored) or found is None:
        raise Refused("this gateway does not know that token, or has revoked it: ask its operator for a new one")
    if granted not in wanted:
        raise Refused(f"that token is for a {granted}, not for a {wanted[0]}: ask the gateway's operator for another")
    return Account(owner, role, public)


def network_of(address: str) -> str:
    """Network of an IP address: its /24 for IPv4, its /48 for IPv6, ``loopback`` for this machine.

    The default of `Gateway`'s ``network`` parameter. Owners of one network are not taken for independent.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    mapped = getattr(ip, "ipv4_mapped", None)
    ip = mapped or ip
    if ip.is_loopback:
        return "loopback"
    return str(ipaddress.ip_network(f"{ip}/{24 if ip.version == 4 else 48}", strict=False))


def _hash(secret: str) -> str:
    # The secret has 192 random bits: a slow password hash would protect nothing and cost every admission.
    return hashlib.sha256(secret.encode()).hexdigest()
