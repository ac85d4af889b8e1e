"""The gateway's memory: migrations, batches, failures."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from goblin_dask.errors import StoreError
from goblin_dask.gateway.database import Base, Database, Event, Fact, Host, Seen, upgrade
from goblin_dask.messages import Machine
from goblin_dask.verify.reputation import Reputation


@pytest.fixture
async def database(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/sub/gateway.db", keep=50)
    await database.start()
    yield database
    await database.stop()


def test_migrations_make_exactly_the_declared_tables():
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        upgrade(connection)
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    engine.dispose()


async def test_upgrade_is_repeatable_and_data_stay(tmp_path):
    url = f"sqlite:///{tmp_path}/gateway.db"
    for i in range(2):
        database = Database(url)
        await database.start()
        database.record(Seen(f"{i:064x}", "Ada", "f" * 32, "cpu", ""))
        await database.stop()
    database = Database(url)
    await database.start()
    assert await database.transaction(lambda s: s.scalar(sa.select(sa.func.count()).select_from(Host))) == 2
    assert await database.anybody()
    await database.stop()


async def test_facts_are_written_in_batches_and_old_ones_go(database):
    for i in range(120):
        database.record(Fact(f"{i % 3:064x}", "wrong" if i % 3 else "accepted", "algebraic", 0.5, 1.0, 10.0))
    for _ in range(2):
        database.record(Seen("0" * 64, "Ada", "f" * 32, "cpu", "d" * 500))
    await database.flush()
    assert database.pending == 0
    rows, host = await database.transaction(
        lambda s: ([(e.kind, e.flops) for e in s.scalars(sa.select(Event))], s.get(Host, "0" * 64).owner)
    )
    assert (len(rows), host) == (50, "Ada")
    assert set(rows) == {("wrong", 10.0), ("accepted", 10.0)}


async def test_a_ratio_that_is_no_number_is_written(database):
    """A volunteer that hands in NaN gets one."""
    database.record(Fact("0" * 64, "wrong", "algebraic", math.nan))
    await database.flush()
    ratios = await database.transaction(lambda s: list(s.scalars(sa.select(Event.ratio))))
    assert ratios == [math.inf]


def standing():
    reputation = Reputation(random.Random(1))
    good = reputation.host("Ada", Machine("a" * 32))
    bad = reputation.host("Eve", Machine("b" * 32))
    reputation.accepted(good, 5.0)
    reputation.wrong(bad, 1e9, structural=False, now=0.0)
    return reputation, good, bad


async def test_reputations_come_back_as_they_were(database):
    reputation, good, bad = standing()
    for row in reputation.to_rows():
        database.remember(row)
    await database.flush()
    for row in reputation.to_rows():
        database.remember(row)  # again: written over, not doubled
    await database.flush()
    again = Reputation.from_rows(await database.reputations(), random.Random(2))
    assert again.to_rows() == reputation.to_rows()
    assert again.hosts[good.key].flops == 5.0
    assert again.hosts[bad.key].quarantined


async def test_quarantine_survives_without_any_flush(tmp_path):
    url = f"sqlite:///{tmp_path}/gateway.db"
    first = Database(url, interval=3600)
    await first.start()
    for row in standing()[0].to_rows():
        first.remember(row)
    async with asyncio.timeout(10):
        while first.pending:
            await first.call(lambda: None)  # behind the writer in the one thread
    second = Database(url)
    await second.start()
    assert [bool(row["quarantined"]) for row in sorted(await second.reputations(), key=lambda row: row["owner"])] == [
        False,
        True,
    ]
    await second.stop()
    await first.stop()


async def test_a_database_that_fails_keeps_the_facts(database, caplog):
    await database.transaction(lambda s: s.execute(sa.text("ALTER TABLE events RENAME TO gone")))
    database.record(Fact("a" * 64, "accepted"))
    with pytest.raises(StoreError, match="database failed"):
        await database.flush()
    assert database.pending == 1
    await database.transaction(lambda s: s.execute(sa.text("ALTER TABLE gone RENAME TO events")))
    await database.flush()
    assert await database.transaction(lambda s: s.scalar(sa.select(Event.kind))) == "accepted"


async def test_facts_that_wait_are_bounded_and_reputations_never_dropped(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/g.db", pending=10)
    reputation = Reputation(random.Random(1))
    for i in range(25):
        database.record(Fact("a" * 64, "lost"))
        reputation.host("x", Machine(f"{i:032x}"))
    for row in reputation.to_rows():
        database.remember(row)
    assert (database.dropped, database.pending) == (15, 10 + 25)
    await database.stop()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("nonsense", "cannot be opened"),
        ("sqlite:////proc/nowhere/gateway.db", "cannot be opened"),
        ("postgresql+nosuchdriver://user:secret@localhost/x", "cannot be opened"),
    ],
)
async def test_an_unusable_url_is_one_sentence_without_the_password(url, text):
    database = Database(url)
    with pytest.raises(StoreError, match=text) as caught:
        await database.start()
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    await database.stop()


async def test_a_database_of_a_later_version_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/g.db"
    database = Database(url)
    await database.start()
    await database.transaction(lambda s: s.execute(sa.text("UPDATE alembic_version SET version_num = '9999'")))
    await database.stop()
    later = Database(url)
    with pytest.raises(StoreError, match="another version"):
        await later.start()
    await later.stop()
