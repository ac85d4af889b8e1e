"""What the gateway remembers for longer than a process: owners, tokens, hosts, their reputation and the verdicts.

Nothing of the laboratories' data is among it: no blobs, no names, not even the addresses of tasks and no text that a
peer wrote, for a content address of few possible contents gives the content away.

Everything runs in one thread of its own, so that the event loop never waits for a disk; facts are written in batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from goblin_dask.errors import StoreError

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Base(DeclarativeBase):
    """All tables."""


class Owner(Base):
    """Who answers for some computers, or for a laboratory."""

    __tablename__ = "owners"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(128), unique=True)
    created: Mapped[float]


class Token(Base):
    """A secret that admits; only its hash is here."""

    __tablename__ = "tokens"
    id: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    """The token's public part, by which it is found, listed and revoked."""
    owner_id: Mapped[int] = mapped_column(sa.ForeignKey("owners.id"), index=True)
    role: Mapped[str] = mapped_column(sa.String(16))
    hash: Mapped[str] = mapped_column(sa.String(64))
    created: Mapped[float]
    revoked: Mapped[float | None]


class Host(Base):
    """A lent machine with one device, driver and set of library versions: the unit of trust."""

    __tablename__ = "hosts"
    key: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    """Digest over (owner, host, device, driver, versions)."""
    owner: Mapped[str] = mapped_column(sa.String(128), index=True)
    host: Mapped[str] = mapped_column(sa.String(32))
    device: Mapped[str] = mapped_column(sa.String(128))
    driver: Mapped[str] = mapped_column(sa.String(128))
    first_seen: Mapped[float]
    last_seen: Mapped[float]


class Reputation(Base):
    """A `goblin_dask.verify.reputation.Host`, as its `to_rows` writes it."""

    __tablename__ = "reputations"
    key: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    owner: Mapped[str] = mapped_column(sa.String(128), index=True)
    identity: Mapped[str] = mapped_column(sa.String(32))
    accepted: Mapped[int]
    wrong: Mapped[int]
    unproven: Mapped[int]
    late: Mapped[int]
    lost: Mapped[int]
    failed: Mapped[int]
    quota: Mapped[float]
    streak: Mapped[int]
    doubts: Mapped[int]
    flops: Mapped[float]
    """Of accepted results only."""
    quarantined: Mapped[str] = mapped_column(sa.String(200))
    """Why; empty when it is not in quarantine."""


class Pardon(Base):
    """A host in quarantine that may come back: written by the operator, taken up by the gateway."""

    __tablename__ = "pardons"
    key: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    time: Mapped[float]


class Event(Base):
    """One verdict or failure, kept for the latest `Database.keep` of them."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[float] = mapped_column(index=True)
    host_key: Mapped[str] = mapped_column(sa.String(64), index=True)
    kind: Mapped[str] = mapped_column(sa.String(16))
    method: Mapped[str] = mapped_column(sa.String(16))
    ratio: Mapped[float]
    seconds: Mapped[float]
    flops: Mapped[float]


@dataclass(frozen=True, slots=True)
class Fact:
    """A row of `Event`, on its way."""

    host_key: str
    kind: str
    method: str = ""
    ratio: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A host joined."""

    host_key: str
    owner: str
    host: str
    device: str
    driver: str


Row = Mapping[str, Any]
"""One host's reputation."""

_COLUMNS = tuple(column.name for column in Reputation.__table__.columns)


class Database:
    """Asynchronous face of the database.

    Parameters
    ----------
    url : str
        Of SQLAlchemy, e.g. ``sqlite:////var/lib/goblin/gateway.db`` or ``postgresql+psycopg://…``.
    keep : int
        Events kept; older ones are deleted.
    pending : int
        Facts that may wait to be written; beyond that (a full disk, a lost database) the oldest are given up, counted
        in `dropped`. Reputations are never given up.
    interval : float
        Seconds between batches.
    """

    def __init__(self, url: str, *, keep: int = 1_000_000, pending: int = 100_000, interval: float = 0.5):
        self.url, self.keep, self.interval = url, keep, interval
        self.dropped = 0
        self._facts: deque[Fact] = deque(maxlen=pending)
        self._seen: dict[str, Seen] = {}
        self._rows: dict[str, Row] = {}
        self._wake = asyncio.Event()
        self._stopping = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="goblin-database")
        self._engine: sa.Engine | None = None
        self._writer: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Connect, upgrade the tables to this version of the project, start writing.

        Raises
        ------
        StoreError
            When the database cannot be opened, or was written by a later version.
        """
        await self.call(self._open)
        self._writer = asyncio.create_task(self._write_loop(), name="goblin-database-writer")

    async def stop(self) -> None:
        """Write what waits, and close."""
        self._stopping = True
        self._wake.set()
        if self._writer is not None:
            await self._writer
            try:
                await self.flush()
            except StoreError as error:
                logger.error("%s; %d facts are lost", error, self.pending)
        if self._engine is not None:
            await self.call(self._engine.dispose)
        self._thread.shutdown(wait=False)

    def _open(self) -> None:
        try:
            url = sa.make_url(self.url)
            if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
                Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
            self._engine = engine = sa.create_engine(url)
            if url.get_backend_name() == "sqlite":
                sa.event.listen(engine, "connect", _tune_sqlite)
            with engine.begin() as connection:
                upgrade(connection)
        except CommandError as error:
            raise StoreError(
                f"the gateway's database {_shown(self.url)} was written by another version of goblin-dask ({error}): "
                "install that version, or give an empty database"
            ) from error
        except (sa.exc.SQLAlchemyError, OSError, ImportError) as error:
            raise StoreError(
                f"the gateway's database {_shown(self.url)} cannot be opened ({_first_line(error)}): "
                "check the URL and the rights on it"
            ) from error

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the database's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def transaction(self, function: Callable[[Session], T]) -> T:
        """Run ``function(session)`` in one transaction, in the database's thread.

        Raises
        ------
        StoreError
            When the database fails.
        """
        return await self.call(self._transaction, function)

    def _transaction(self, function: Callable[[Session], T]) -> T:
        if self._engine is None:
            raise StoreError("the gateway's database is not open: start it first")
        try:
            with Session(self._engine) as session, session.begin():
                return function(session)
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"the gateway's database failed: {_first_line(error)}") from error

    # --- facts --------------------------------------------------------------------------------------------------
    def record(self, fact: Fact | Seen) -> None:
        """Remember a fact, soon: nobody waits for it."""
        if isinstance(fact, Seen):
            self._seen[fact.host_key] = fact
        else:
            self.dropped += len(self._facts) == self._facts.maxlen
            self._facts.append(fact)

    def remember(self, row: Row) -> None:
        """Remember a host's reputation as it is now: soon, and at once when it is in quarantine."""
        self._rows[row["key"]] = row
        if row["quarantined"]:
            self._wake.set()

    @property
    def pending(self) -> int:
        """Facts that wait to be written."""
        return len(self._facts) + len(self._seen) + len(self._rows)

    async def flush(self) -> None:
        """Write all facts that wait now."""
        facts, seen, rows = list(self._facts), dict(self._seen), dict(self._rows)
        if not (facts or seen or rows):
            return
        await self.transaction(lambda session: _write(session, facts, seen.values(), rows.values(), self.keep))
        for fact in facts:
            # Facts that came while we wrote may have pushed written ones out of the full queue.
            if self._facts and self._facts[0] is fact:
                self._facts.popleft()
        _forget(self._seen, seen)
        _forget(self._rows, rows)

    async def _write_loop(self) -> None:
        failing = False
        while not self._stopping:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), 10 * self.interval if failing else self.interval)
            self._wake.clear()
            try:
                await self.flush()
            except StoreError as error:
                if not failing:
                    logger.error("%s; %d facts wait and are tried again", error, self.pending)
                failing = True
            else:
                failing = False

    async def reputations(self) -> list[dict[str, Any]]:
        """Rows for `goblin_dask.verify.reputation.Reputation.from_rows`."""

        def read(session: Session) -> list[dict[str, Any]]:
            return [dict(row) for row in session.execute(sa.select(Reputation.__table__)).mappings()]

        return await self.transaction(read)

    async def anybody(self) -> bool:
        """Whether a host has joined before."""
        return await self.transaction(lambda session: session.scalar(sa.select(Host.key).limit(1)) is not None)


def _write(session: Session, facts: list[Fact], seen: Iterable[Seen], rows: Iterable[Row], keep: int) -> None:
    """One batch, in one transaction."""
    now = time.time()
    for s in seen:
        host = session.get(Host, s.host_key)
        if host is None:
            host = Host(key=s.host_key, owner=s.owner, first_seen=now)
            session.add(host)
        host.host, host.device, host.driver, host.last_seen = s.host, s.device[:128], s.driver[:128], now
    for row in rows:
        session.merge(Reputation(**{name: row[name] for name in _COLUMNS}))
    if facts:
        columns = ("host_key", "kind", "method", "ratio", "seconds", "flops")
        rows = [{"time": now} | {column: _storable(getattr(fact, column)) for column in columns} for fact in facts]
        session.execute(sa.insert(Event), rows)
        newest = session.scalar(sa.select(sa.func.max(Event.id))) or 0
        session.execute(sa.delete(Event).where(Event.id <= newest - keep))


def _storable(value: Any) -> Any:
    """Infinity for NaN, which SQLite takes for NULL: one lie with a NaN would keep everything from being written."""
    return math.inf if isinstance(value, float) and math.isnan(value) else value


def _forget(waiting: dict[str, T], written: dict[str, T]) -> None:
    for key, value in written.items():
        if waiting.get(key) is value:
            del waiting[key]


def upgrade(connection: sa.Connection) -> None:
    """Bring the tables of a database to this version's."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _tune_sqlite(connection: Any, record: object) -> None:
    # Write-ahead logging: a reader (a person with the sqlite3 tool) never blocks the gateway's writer.
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _shown(url: str) -> str:
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except sa.exc.ArgumentError:
        return repr(url.partition(":")[0] + ":…")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
