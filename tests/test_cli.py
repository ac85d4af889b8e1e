"""The command line."""

import asyncio
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from goblin_dask.cli import goblin
from goblin_dask.gateway.database import Database, Seen
from goblin_dask.graphs.operators import CATALOGUE, CATALOGUE_VERSION
from goblin_dask.testing.inprocess import InProcessGrid
from goblin_dask.testing.strategies import STRATEGIES
from goblin_dask.verify.reputation import Host


def run(*arguments):
    return CliRunner().invoke(goblin, list(arguments))


def test_helps():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("demo", "gateway", "lab", "ops", "simulate", "status", "validator", "volunteer"):
        assert command in result.output
    assert "not encrypted" in result.output


def test_operators_are_listed():
    lines = run("ops").output.splitlines()
    assert lines[0].split() == ["name", "kinds", "operands", "attributes", "check", "since", "summary"]
    assert [line.split()[0] for line in lines[1:]] == sorted(CATALOGUE)
    (row,) = [line for line in lines if line.startswith("matmul ")]
    assert row.split()[1:4] == ["contraction", "2", "-"]
    assert row.endswith(CATALOGUE["matmul"].summary)
    assert row.index(CATALOGUE["matmul"].summary) == lines[0].index("summary")


def test_operators_are_found_by_a_part_of_their_name_or_a_pattern():
    named = run("ops", "matr").output.splitlines()
    assert [line.split()[0] for line in named[1:]] == ["matrix_power", "matrix_rank"]
    matched = json.loads(run("ops", "a*n", "--json").output)
    assert matched["catalogue"] == CATALOGUE_VERSION
    found = {row["name"]: row for row in matched["operators"]}
    assert {"atan", "asin"} <= found.keys() == {name for name in CATALOGUE if name[0] == "a" and name[-1] == "n"}
    assert found["asin"] == {
        "name": "asin",
        "kinds": ["elementwise"],
        "operands": 1,
        "attributes": [],
        "check": "recompute",
        "since": 1,
        "summary": "Inverse sine.",
    }
    assert json.loads(run("ops", "concat", "--json").output)["operators"][0]["operands"] is None
    refused = run("ops", "frobnicate")
    assert refused.exit_code == 1
    assert refused.output.startswith("Error: no operator matches 'frobnicate'")


def test_is_a_command_of_dask():
    done = subprocess.run(
        [sys.executable, "-m", "dask", "goblin", "--help"], capture_output=True, text=True, check=True
    )
    assert "volunteer" in done.stdout


def test_tokens(tmp_path):
    database = f"sqlite:///{tmp_path / 'g.sqlite'}"
    made = run("gateway", "token", "volunteer", "Ada", "--database", database)
    assert made.exit_code == 0
    assert made.output.startswith("goblin_")
    refused = run("gateway", "token", "volunteer", "", "--database", database)
    assert refused.exit_code == 1
    assert refused.output.startswith("Error: an owner's name is")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["lab", "--port", "0"], "goblin.gateway.url is not set: say where the gateway is"),
        (["lab", "goblin://127.0.0.1:9", "--port", "0"], "cannot be reached"),
        (["status", "--url", "http://127.0.0.1:9"], "cannot be reached"),
        (["status"], "goblin.lab.url is not set"),
    ],
)
def test_says_what_is_wrong(tmp_path, arguments, sentence):
    if arguments[0] == "lab":
        arguments = [*arguments, "--directory", str(tmp_path)]
    result = run(*arguments)
    assert result.exit_code == 1
    assert sentence in result.output
    assert "Traceback" not in result.output


def test_hosts_and_pardons(tmp_path):
    database = f"sqlite:///{tmp_path / 'g.sqlite'}"
    key = "ab" * 32

    async def remember():
        base = Database(database)
        await base.start()
        base.record(Seen(key, "Ada", "f" * 32, "cpu x86_64", ""))
        host = Host(key, "Ada", "1" * 16, accepted=7, wrong=3, quarantined="3 results that were proven wrong")
        base.remember(dataclasses.asdict(host))
        await base.stop()

    asyncio.run(remember())
    (row,) = [line for line in run("gateway", "hosts", "--database", database).output.splitlines() if key[:16] in line]
    assert all(cell in row for cell in ("Ada", "cpu x86_64", " 7 ", " 3 ", "3 results that were proven wrong"))
    assert (
        "host abababababababab of Ada may join again" in run("gateway", "pardon", "abab", "--database", database).output
    )
    assert "wrong (pardoned)" in run("gateway", "hosts", "--database", database).output
    refused = run("gateway", "pardon", "cdcd", "--database", database)
    assert (refused.exit_code, "no host has a key that begins with 'cdcd'" in refused.output) == (1, True)


TLS = Path(__file__).parent / "tls"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gateway", "run", "--port", "99999"], "99999 is not in the range 0<=x<=65535"),
        (["gateway", "run", "--certificate", "{empty}", "--key", str(TLS / "key.pem")], "empty.pem and --key"),
        (["gateway", "run", "--certificate", str(TLS / "certificate.pem")], "certificate.pem without --key"),
        (["gateway", "run", "--key", str(TLS / "key.pem")], "with its --certificate only"),
        (["lab", "goblin://127.0.0.1:9", "--port", "-1"], "-1 is not in the range"),
        (["lab", "goblin://127.0.0.1:9", "--directory", "/proc/x"], "directory /proc/x cannot be used"),
        (["demo", "--size", "-3"], "-3 is not in the range x>=1"),
    ],
)
def test_says_what_is_wrong_with_an_option(tmp_path, arguments, sentence):
    empty = tmp_path / "empty.pem"
    empty.touch()
    result = run(*(argument.format(empty=empty) for argument in arguments))
    assert result.exit_code in (1, 2)
    assert sentence in result.output
    assert "Traceback" not in result.output


def serve(*arguments):
    """A command as a process of its own, and its first line: what is up, and where."""
    command = [sys.executable, "-m", "goblin_dask.cli", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    words = process.stdout.readline().split()
    return process, dict(zip(words[::2], words[1::2], strict=True))


def test_servers_say_where_they_are_and_listen_nowhere_else(tmp_path):
    database = f"sqlite:///{tmp_path / 'g.sqlite'}"
    token = run("gateway", "token", "lab", "Ada", "--database", database).output.strip()
    gateway, at = serve("gateway", "run", "--port", 0, "--database", database)
    lab, lab_at = serve("lab", at["address"], "--token", token, "--port", 0, "--directory", tmp_path / "lab")
    confused = run("status", "--url", at["address"].replace("goblin:", "http:"))
    assert (confused.exit_code, "no lab node: is it the gateway's address?" in confused.output) == (1, True)
    listening = [
        {c.laddr.port for c in psutil.Process(one.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN}
        for one in (gateway, lab)
    ]
    said = []
    for one in (lab, gateway):
        one.terminate()
        said.append(one.communicate(timeout=20))
        assert one.returncode == 0
    assert listening[0] == {int(at["address"].rpartition(":")[2])}
    assert int(lab_at["url"].rpartition(":")[2]) in listening[1]
    assert len(listening[1]) == 2  # for researchers, and for volunteers' blobs
    (_, lab_errors), (_, gateway_errors) = said
    assert "NOT encrypted" in lab_errors
    assert "distributed" not in lab_errors + gateway_errors


def test_a_volunteer_learns_in_one_sentence_why_it_may_not(tmp_path):
    """Before Dask's own worker starts, which would say it in a traceback."""
    database = f"sqlite:///{tmp_path / 'g.sqlite'}"
    token = run("gateway", "token", "lab", "Ada", "--database", database).output.strip()
    gateway, at = serve("gateway", "run", "--port", 0, "--database", database)
    try:
        for arguments, sentence in (
            ([at["address"]], "admits a volunteer with a token only"),
            ([at["address"], "--token", token], "that token is for a lab, not for a volunteer"),
            ([at["address"], "--token", "goblin_no_one"], "does not know that token"),
            ([at["address"].replace("goblin:", "goblins:")], "without TLS the address begins with goblin://"),
            (["goblin://127.0.0.1:9"], "cannot be reached"),
            (["goblin://nobody at home"], "is not the address of a gateway"),
        ):
            refused = run("volunteer", *arguments)
            assert refused.exit_code == 1
            assert sentence in refused.output
            assert "Traceback" not in refused.output
    finally:
        gateway.terminate()
        gateway.communicate(timeout=20)


def test_a_grid_is_simulated(tmp_path):
    grid = ("simulate", "--liars", "reckless:10%:5,tf32:2", "--volunteers", "50", "--days", "4")
    said = run(*grid, "--policy", "replicate", "--plot", str(tmp_path / "grid.svg")).output
    assert "replicate: 50 volunteers, 4 days, 100 tasks" in said
    assert "two of a ring at one task" in said
    assert (tmp_path / "grid.svg").read_text().count("reckless") == 2
    found = json.loads(run(*grid, "--json").output)
    assert found["strategies"]["reckless"]["members"] == 5
    assert found["work"]["product"]["multiplier"] < 1.5
    listed = run("simulate", "--strategies").output
    for name in STRATEGIES:
        assert name in listed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--liars", "saint:1%"], "Error: no strategy is called 'saint'"),
        (["--policy", "trust"], "Error: verify='trust' is no policy"),
        (["--volunteers", "1"], "Error: volunteers must be at least 2, not 1"),
        (["--volunteers", "9", "--days", "1", "--plot", "/nowhere/grid.svg"], "Error: the plot cannot be written"),
    ],
)
def test_a_grid_that_cannot_be_simulated(arguments, sentence):
    refused = run("simulate", "--liars", "always:1", *arguments)
    assert refused.exit_code == 1
    assert sentence in refused.output
    assert "Traceback" not in refused.output


def test_a_plot_needs_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refused = run("simulate", "--liars", "always:1", "--volunteers", "9", "--days", "1", "--plot", "grid.svg")
    assert refused.exit_code == 1
    assert "Error: a plot needs matplotlib: pip install matplotlib" in refused.output


def test_status_of_a_lab():
    with InProcessGrid(volunteers=1) as grid:
        result = run("status", "--url", grid.node.url, "--token", grid.node.token)
    assert result.exit_code == 0, result.output
    assert "1 volunteers, 1 validators" in result.output
