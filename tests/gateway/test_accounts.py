"""Admission."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from goblin_dask.errors import InputError, Refused
from goblin_dask.gateway.accounts import admit, create_token, list_tokens, network_of, revoke_token
from goblin_dask.gateway.database import Database, Token


@pytest.fixture
async def database():
    database = Database("sqlite://")
    await database.start()
    yield database
    await database.stop()


async def test_a_token_admits_to_its_role_only(database):
    token = await create_token(database, "volunteer", "Ada Lovelace")
    account = await admit(database, token, "volunteer", "net", open_to_all=False)
    assert (account.owner, account.role) == ("Ada Lovelace", "volunteer")
    assert (await admit(database, token, "nanny", "net", open_to_all=False)).owner == "Ada Lovelace"
    for role in ("lab", "validator"):
        with pytest.raises(Refused, match=f"for a volunteer, not for a {role}"):
            await admit(database, token, role, "net", open_to_all=False)


async def test_the_database_holds_no_secret(database):
    token = await create_token(database, "lab", "Bohr")
    rows = await database.transaction(lambda s: [(t.id, t.hash) for t in s.scalars(sa.select(Token))])
    secret = token.rsplit("_", 1)[1]
    assert secret not in repr(rows)
    [info] = await list_tokens(database)
    assert secret not in repr(info)


@pytest.mark.parametrize(
    "token",
    [
        "x",
        "goblin_",
        "goblin_" + "0" * 16 + "_" + "0" * 48,
        "goblin_0_0",
        "é" * 100,
        "goblin_' OR 1=1 --",
        "a" * 100_000,
    ],
)
async def test_unknown_tokens_are_refused_even_on_an_open_grid(database, token):
    with pytest.raises(Refused, match="does not know that token") as caught:
        await admit(database, token, "volunteer", "net", open_to_all=True)
    assert len(str(caught.value)) < 300


async def test_a_token_with_a_changed_secret_is_refused(database):
    token = await create_token(database, "lab", "Bohr")
    changed = token[:-1] + ("0" if token[-1] != "0" else "1")
    with pytest.raises(Refused, match="does not know"):
        await admit(database, changed, "lab", "net", open_to_all=False)


async def test_revoked_tokens(database):
    token = await create_token(database, "lab", "Bohr")
    await revoke_token(database, token)
    with pytest.raises(Refused, match="revoked"):
        await admit(database, token, "lab", "net", open_to_all=False)
    [info] = await list_tokens(database)
    assert info.revoked is not None
    with pytest.raises(InputError, match="there is no token"):
        await revoke_token(database, "0" * 16)


async def test_open_grids_admit_volunteers_without_token_and_nobody_else(database):
    account = await admit(database, "", "volunteer", "10.0.0.0/24", open_to_all=True)
    assert account.owner == "anonymous-10.0.0.0/24"
    for role in ("lab", "validator"):
        with pytest.raises(Refused, match="with a token only"):
            await admit(database, "", role, "net", open_to_all=True)
    with pytest.raises(Refused, match="goblin gateway token volunteer"):
        await admit(database, "", "volunteer", "net", open_to_all=False)


@pytest.mark.parametrize(("role", "owner"), [("king", "a"), ("lab", ""), ("lab", "a\nb"), ("lab", "anonymous-x")])
async def test_bad_requests_for_tokens(database, role, owner):
    with pytest.raises(InputError, match="got"):
        await create_token(database, role, owner)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.77", "192.0.2.0/24"),
        ("2001:db8:1:2::3", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80::/48"),
        ("::ffff:192.0.2.77", "192.0.2.0/24"),
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("../../etc", "unknown"),
        ("", "unknown"),
    ],
)
def test_networks(address, network):
    assert network_of(address) == network
