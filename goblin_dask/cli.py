"""The command line: ``goblin …``, and the same as ``dask goblin …``."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import click
import dask.config

from goblin_dask import __version__, config
from goblin_dask.errors import GoblinError

Role = Literal["volunteer", "validator"]

HOME = Path.home() / ".local/share/goblin-dask"
PORT = click.IntRange(0, 65535)


@click.group()
@click.version_option(__version__, prog_name="goblin-dask")
@click.option("-v", "--verbose", is_flag=True, help="Log what happens.")
def goblin(verbose: bool) -> None:
    """Calculations on lent computers, every piece of the answer verified.

    Data are not encrypted while they are computed on: confidential data do not belong on an open grid.
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s")
    if dask.config.get("logging.distributed", None) is None:  # distributed reads it when it is imported
        dask.config.set({"logging.distributed": logging.getLevelName(level).lower()})
        logging.getLogger("distributed").setLevel(level)


# --- gateway ----------------------------------------------------------------------------------------------------
@goblin.group()
def gateway() -> None:
    """The gateway: where laboratories and volunteers meet."""


def _database(url: str | None) -> str:
    found = config.get("gateway.database", url)
    if found is None:
        HOME.mkdir(parents=True, exist_ok=True)
        found = f"sqlite:///{HOME / 'gateway.sqlite'}"
    return str(found)


_ready = click.option("--ready-fd", type=int, hidden=True, help="Where to write a line of JSON when ready.")
_database_option = click.option("--database", help="SQLAlchemy URL; SQLite in your home directory by default.")


@gateway.command("run")
@click.option("--host", help="Interface to listen on; 127.0.0.1 by default, 0.0.0.0 for the network.")
@click.option("--port", type=PORT, help="8787 by default, 0 for any free one.")
@_database_option
@click.option("--open/--closed", "open_", default=False, help="Admit volunteers without a token.")
@click.option("--trust-owners", is_flag=True, help="Let owners in one network check each other's results.")
@click.option("--certificate", type=click.Path(exists=True, dir_okay=False), help="PEM file, for goblins://.")
@click.option("--key", type=click.Path(exists=True, dir_okay=False), help="PEM file of its key.")
@_ready
def gateway_run(
    host: str | None,
    port: int | None,
    database: str | None,
    open_: bool,
    trust_owners: bool,
    certificate: str | None,
    key: str | None,
    ready_fd: int | None,
) -> None:
    """Run the gateway until it is interrupted."""
    from goblin_dask.gateway.server import Gateway
    from goblin_dask.gateway.settings import GatewayConfig

    tls = _identity(certificate, key)
    server = Gateway(
        GatewayConfig(
            host=config.get("gateway.host", host),
            port=config.get("gateway.port", port),
            database=_database(database),
            open=open_,
            trust_owners=trust_owners,
            tls=tls,
        )
    )

    async def serve() -> None:
        await server.start()
        try:
            await _until_interrupted({"address": server.address, "url": server.url}, ready_fd)
        finally:
            await server.stop()

    _run(serve)


def _identity(certificate: str | None, key: str | None) -> Any:
    """What the gateway shows to whoever dials ``goblins://``; None without TLS."""
    import ssl

    if certificate is None:
        if key is not None:
            raise click.UsageError(f"--key {key} is of use with its --certificate only")
        return None
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        tls.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        files = f"--certificate {certificate} and --key {key}" if key else f"--certificate {certificate} without --key"
        reason = getattr(error, "reason", None) or error.strerror or error
        raise click.UsageError(f"{files}: no certificate in PEM with its private key ({reason})") from error
    return tls


@gateway.command("token")
@click.argument("role", type=click.Choice(["volunteer", "validator", "lab"]))
@click.argument("owner")
@_database_option
def gateway_token(role: str, owner: str, database: str | None) -> None:
    """Make a token that admits OWNER as ROLE, and print it. It is shown once: the database keeps its hash."""
    from goblin_dask.gateway.accounts import create_token
    from goblin_dask.gateway.database import Database

    async def make() -> None:
        base = Database(_database(database))
        await base.start()
        try:
            click.echo(await create_token(base, role, owner))
        finally:
            await base.stop()

    _run(make)


@gateway.command("hosts")
@_database_option
def gateway_hosts(database: str | None) -> None:
    """List the computers that were lent: what became of their results, and which are in quarantine."""
    import time

    from rich.console import Console
    from rich.table import Table

    from goblin_dask.gateway.database import Database
    from goblin_dask.gateway.hosts import list_hosts

    async def show() -> None:
        base = Database(_database(database))
        await base.start()
        try:
            hosts = await list_hosts(base)
        finally:
            await base.stop()
        table = Table("host", "owner", "device", "last seen", "accepted", "wrong", "unproven", "failed", "quarantine")
        for host in hosts:
            seen = time.strftime("%Y-%m-%d %H:%M", time.localtime(host.last_seen)) if host.last_seen else ""
            why = f"{host.quarantined} (pardoned)" if host.pardoned else host.quarantined
            counts = (host.accepted, host.wrong, host.unproven, host.failed)
            table.add_row(host.key[:16], host.owner, host.device, seen, *map(str, counts), why)
        Console(width=None if sys.stdout.isatty() else 200).print(table)

    _run(show)


@gateway.command("pardon")
@click.argument("host")
@_database_option
def gateway_pardon(host: str, database: str | None) -> None:
    """Let HOST (of `goblin gateway hosts`) out of quarantine. It begins anew, as one that nobody knows."""
    from goblin_dask.gateway.database import Database
    from goblin_dask.gateway.hosts import pardon

    async def let_out() -> None:
        base = Database(_database(database))
        await base.start()
        try:
            found = await pardon(base, host)
        finally:
            await base.stop()
        click.echo(f"host {found.key[:16]} of {found.owner} may join again: its owner starts `goblin volunteer` anew")

    _run(let_out)


# --- laboratory ---------------------------------------------------------------------------------------------------
@goblin.command()
@click.argument("gateway_address", metavar="[GATEWAY]", required=False)
@click.option("--token", help="The laboratory's token for the gateway; goblin.token by default.")
@click.option("--host", help="Interface for researchers; 127.0.0.1 by default.")
@click.option("--port", type=PORT, help="8788 by default, 0 for any free one.")
@click.option("--directory", type=click.Path(file_okay=False), help="For blobs and the ledger.")
@_ready
def lab(
    gateway_address: str | None,
    token: str | None,
    host: str | None,
    port: int | None,
    directory: str | None,
    ready_fd: int | None,
) -> None:
    """Run a laboratory's node, connected to GATEWAY (goblin://HOST:PORT), until it is interrupted."""
    from goblin_dask.labnode.node import LabNode

    async def serve() -> None:
        node = LabNode(gateway_address, token, host=host, port=port, directory=directory)
        async with node:
            await _until_interrupted({"url": node.url, "token": node.token}, ready_fd)

    _run(serve)


@goblin.command()
@click.option("--url", help="The lab node's; goblin.lab.url by default.")
@click.option("--token", help="The laboratory's; goblin.lab.token by default.")
def status(url: str | None, token: str | None) -> None:
    """Show what the volunteers offer, and the lab node's jobs."""
    from rich.console import Console
    from rich.table import Table

    from goblin_dask.labnode.client import connect
    from goblin_dask.labnode.progress import note

    with _sentences(), connect(url, token=token) as connection:
        offer = connection.offer
        table = Table("job", "state", "tasks", "where", "seconds")
        for job in connection.jobs():
            progress = job["progress"]
            table.add_row(
                job["name"], job["state"], f"{progress['done']}/{progress['total']}", note(job), f"{job['seconds']:.1f}"
            )
        console = Console()
        console.print(f"{offer.volunteers} volunteers, {offer.validators} validators, {offer.flops / 1e9:.1f} GFLOP/s")
        console.print(table)


# --- workers --------------------------------------------------------------------------------------------------------
@goblin.command(context_settings={"ignore_unknown_options": True})
@click.argument("gateway_address", metavar="GATEWAY")
@click.option("--token", help="What the gateway's operator gave to you; goblin.token by default.")
@click.option("--backend", help="What computes: numpy (the default), torch, torch:DEVICE or cupy.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def volunteer(gateway_address: str, token: str | None, backend: str | None, options: tuple[str, ...]) -> None:
    """Lend this computer to GATEWAY (HOST, HOST:PORT or goblin://…). OPTIONS are those of `dask worker`."""
    from goblin_dask.graphs.backends.choice import backend_named

    with _sentences():
        chosen = backend_named(config.get("volunteer.backend", backend)).name
    os.environ["DASK_GOBLIN__VOLUNTEER__BACKEND"] = chosen
    _worker(gateway_address, token, options, "volunteer")


@goblin.command(context_settings={"ignore_unknown_options": True})
@click.argument("gateway_address", metavar="GATEWAY")
@click.option("--token", help="The validator's token for the gateway; goblin.token by default.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def validator(gateway_address: str, token: str | None, options: tuple[str, ...]) -> None:
    """Check results for GATEWAY, beside a laboratory or at its operator's. OPTIONS are those of `dask worker`."""
    _worker(gateway_address, token, options, "validator")


def _worker(address: str, token: str | None, options: tuple[str, ...], role: Role) -> None:
    """Become the stock ``dask worker`` that a volunteer could have typed."""
    environment = {**os.environ, "DASK_GOBLIN__VOLUNTEER__ROLE": role}
    if token:
        environment["DASK_GOBLIN__TOKEN"] = token
    where = address if "://" in address else f"goblin://{address}"
    if "--help" not in options:
        _run(lambda: _admitted(where, role, token))
    command = [sys.executable, "-m", "dask", "worker", where, "--preload", "goblin_dask.volunteer", *options]
    os.execve(sys.executable, command, environment)  # noqa: S606 what replaces this process has no shell


async def _admitted(address: str, role: Role, token: str | None) -> None:
    """Find out in one sentence, before Dask does in a traceback, that there is no gateway or that it refuses."""
    from goblin_dask.wire.client import dial
    from goblin_dask.wire.process import Visitor, trust, url_of

    session = await dial(url_of(address), Visitor(role, str(config.get("token", token) or "")), ssl=trust(address))
    await session.close("only asked whether it may")


@goblin.command()
@click.option("--size", type=click.IntRange(min=1), default=2048, show_default=True, help="Side of the matrices.")
@click.option("--volunteers", type=click.IntRange(min=1), default=2, show_default=True)
def demo(size: int, volunteers: int) -> None:
    """A verified matrix product on this machine: a gateway, a laboratory, a validator and volunteers."""
    import time

    import numpy as np

    from goblin_dask.labnode.progress import note
    from goblin_dask.local import LocalGrid

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=np.float32) for _ in range(2))
    with _sentences(), LocalGrid(volunteers=volunteers, offload="always") as grid:
        start = time.perf_counter()
        with grid.lab.submit(grid.lab.matmul(a, b), name="demo") as job:
            result = job.result()
            seconds = time.perf_counter() - start
            difference = float(np.abs(result - a @ b).max())
            click.echo(f"{size} x {size} product in {seconds:.2f} s; largest difference from NumPy {difference:.2g}")
            click.echo(note(job._refresh()))


@goblin.command()
@click.argument("pattern", default="*")
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def ops(pattern: str, as_json: bool) -> None:
    """List the operators that volunteers compute: all, those whose names contain PATTERN, or match it (conv*, *3d)."""
    from fnmatch import fnmatchcase

    from goblin_dask.graphs.operators import CATALOGUE, CATALOGUE_VERSION

    glob = pattern if any(mark in pattern for mark in "*?[") else f"*{pattern}*"
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "kinds": sorted(kind.name.lower() for kind in operator.kinds),
            "operands": operator.arity,
            "attributes": list(operator.attributes),
            "check": operator.check,
            "since": operator.since,
            "summary": operator.summary,
        }
        for name, operator in sorted(CATALOGUE.items())
        if fnmatchcase(name, glob)
    ]
    if not rows:
        raise click.ClickException(f"no operator matches {pattern!r}: `goblin ops` lists all {len(CATALOGUE)}")
    if as_json:
        click.echo(json.dumps({"catalogue": CATALOGUE_VERSION, "operators": rows}, indent=1))
        return
    lines = [["name", "kinds", "operands", "attributes", "check", "since", "summary"]]
    for row in rows:
        row["operands"] = "any" if row["operands"] is None else row["operands"]
        lines.append([" ".join(cell) or "-" if isinstance(cell, list) else str(cell) for cell in row.values()])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(map(str.ljust, line, widths)).rstrip())


@goblin.command()
@click.option("--policy", default="auto", show_default=True, help="auto, recompute, replicate or sample:p.")
@click.option(
    "--liars", default="colluders:5%:50,always:1%,sleeper:1%,tf32:2%", show_default=True,
    help="STRATEGY:SHARE[:RING][:OPTION=VALUE],… (--strategies lists them).",
)  # fmt: skip
@click.option("--strategies", is_flag=True, help="List the liars' strategies and end.")
@click.option("--volunteers", default=1000, show_default=True)
@click.option("--days", default=30.0, show_default=True)
@click.option("--tasks-per-day", default=0.5, show_default=True, help="Of an average volunteer.")
@click.option("--job", default=100, show_default=True, help="Tasks of a job, whose results are used together.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
@click.option("--plot", type=click.Path(dir_okay=False), help="A picture, e.g. grid.svg or grid.png; needs matplotlib.")
def simulate(liars: str, strategies: bool, as_json: bool, plot: str | None, **what: Any) -> None:
    """Find out what liars would achieve on a grid with a policy of verification, without a grid."""
    from rich.console import Console
    from rich.table import Table

    from goblin_dask.testing.simulation import Settings, parse_liars, plot_result
    from goblin_dask.testing.simulation import simulate as simulated
    from goblin_dask.testing.strategies import STRATEGIES

    console = Console()
    if strategies:
        table = Table("strategy", "what it does", "options")
        for name, one in sorted(STRATEGIES.items()):
            own = {"ring": one.ring, "hosts": one.hosts, "rejoins": one.rejoins}
            options = dict(one.options) | {key: value for key, value in own.items() if value > (key != "rejoins")}
            table.add_row(name, one.summary, ", ".join(f"{key}={value:g}" for key, value in options.items()))
        console.print(table)
        return
    with _sentences():
        result = simulated(Settings(liars=parse_liars(liars), **what))
        if as_json:
            click.echo(json.dumps(result.to_dict(), indent=1))
        else:
            result.print(console)
        if plot:
            plot_result(result, plot)


# --- helpers ----------------------------------------------------------------------------------------------------------
class _sentences:
    """Turns the project's errors into one sentence and exit status 1."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, GoblinError):
            raise click.ClickException(str(error)) from error


def _run(main: Callable[[], Awaitable[None]]) -> None:
    async def call() -> None:
        await main()

    with _sentences():
        asyncio.run(call())


async def _until_interrupted(ready: dict[str, str], ready_fd: int | None) -> None:
    """Say that all is up, then wait for an interrupt or a request to end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if ready_fd is not None:
        with os.fdopen(ready_fd, "w") as file:
            file.write(json.dumps(ready) + "\n")
    else:
        click.echo("  ".join(f"{name} {value}" for name, value in ready.items()))
    await stop.wait()


def main() -> None:
    """Entry point of ``goblin``."""
    goblin()


if __name__ == "__main__":
    main()
