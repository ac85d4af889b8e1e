"""The examples that train, run as a user runs them; what they print is what is held to.

By default the CNN is; the others with ``--full``.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

import goblin_dask as goblin

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, *arguments):
    """What a script prints; its last lines go by their names."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def figure(output, name):
    """The first number after a name."""
    return float(re.search(rf"^{name} +([\d.]+)", output, re.MULTILINE)[1])


def seconds(output):
    return float(re.search(r"rounds in ([\d.]+) s", output)[1])


def losses(output):
    """Of the rounds, every one of which has to be verified."""
    rounds = re.findall(r"^ *(\d+) +([\d.]+) +[\d.]+  (yes|no)$", output, re.MULTILINE)
    assert [int(number) for number, _, _ in rounds] == list(range(1, len(rounds) + 1))
    assert {verified for _, _, verified in rounds} == {"yes"}
    return [float(loss) for _, loss, _ in rounds]


def test_a_cnn_reads_digits(report):
    output = run("train_digits.py")
    assert len(losses(output)) == 40
    accuracy = figure(output, "accuracy")
    assert accuracy >= 97
    assert figure(output, "accuracy here") == pytest.approx(accuracy, abs=0.3)  # one picture, whose scores are tied
    report(f"digits, CNN: accuracy {accuracy} %, seconds of training {seconds(output)}")


@pytest.fixture
def whole(full):
    if not full:
        pytest.skip("make full runs it")


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_a_vit_reads_digits_for_a_laboratory(whole, report):
    """The laboratory is one that runs already."""
    with goblin.LocalGrid(volunteers=2) as grid:
        output = run("train_digits.py", "--model", "vit", "--lab", grid.lab.url, "--token", grid.lab._token)
    found = losses(output)
    accuracy = figure(output, "accuracy")
    assert figure(output, "accuracy here") == pytest.approx(accuracy, abs=0.3)
    assert accuracy >= 95
    report(f"digits, ViT: accuracy {accuracy} % after {len(found)} rounds, seconds of training {seconds(output)}")


@pytest.mark.full
@pytest.mark.parametrize("size", [["--small"], []], ids=["small", "large"])
@pytest.mark.timeout(5400)
def test_a_gpt_writes_python(whole, report, size):
    """It knows more than how frequent bytes are."""
    output = run("train_gpt.py", *size)
    found = losses(output)
    entropy = figure(output, "unigram entropy")
    assert sum(found[-10:]) / 10 < entropy - 0.2
    tested = figure(output, "loss of the test")
    assert tested < entropy - 0.1
    assert figure(output, "loss of the test here") == pytest.approx(tested, rel=1e-3)
    assert "\ndef " in output
    report(f"GPT: loss {found[-1]}, of the test {tested}, unigram {entropy}; {len(found)} rounds, {seconds(output)} s")
