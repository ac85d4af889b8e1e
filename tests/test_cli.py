"""The command line."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from goblin_dask.cli import goblin
from goblin_dask.testing.inprocess import InProcessGrid


def run(*arguments):
    return CliRunner().invoke(goblin, list(arguments))


def test_helps():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("demo", "gateway", "lab", "status", "validator", "volunteer"):
        assert command in result.output
    assert "not encrypted" in result.output


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


def test_status_of_a_lab():
    with InProcessGrid(volunteers=1) as grid:
        result = run("status", "--url", grid.node.url, "--token", grid.node.token)
    assert result.exit_code == 0, result.output
    assert "1 volunteers, 1 validators" in result.output
