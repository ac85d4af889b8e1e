"""What the documentation says is run, or compared with what it is generated from."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from goblin_dask.graphs.operators import CATALOGUE

ROOT = Path(__file__).parent.parent


def test_the_generated_pages_are_current():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / "operators.md").read_text() == generate.operators(), "run `make docs`"
    assert (ROOT / "docs" / "array-api.md").read_text() == generate.array_api(), "run `make docs`"
    assert len(CATALOGUE) >= 70


def run(arguments, folder):
    environment = {**os.environ, "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def readme():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.system
def test_the_readme_examples_run(tmp_path):
    first, second, _ = readme()
    (tmp_path / "example.py").write_text(first)
    assert "algebraic" in run(["example.py"], tmp_path)
    assert (tmp_path / "c.zarr").is_dir()
    (tmp_path / "networks.py").write_text(f"{second}\nprint(scores.shape, scores.dtype)\n")
    assert "(4000, 10) float32" in run(["-W", "error", "networks.py"], tmp_path)


@pytest.mark.system
def test_the_readme_trains(tmp_path):
    *_, third = readme()
    (tmp_path / "training.py").write_text(f"{third}\nprint(right > 0.8, type(net).__name__)\n")
    output = run(["-W", "ignore", "training.py"], tmp_path)
    assert output.count(" True\n") == 20  # rounds that were verified
    assert "True Sequential" in output


@pytest.mark.system
def test_the_main_job_at_a_small_size(tmp_path):
    output = run([ROOT / "examples" / "eigenpatches.py", "--size", "2048", "--output", str(tmp_path)], tmp_path)
    assert "volunteers" in output
    picture = (tmp_path / "eigenpatches.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


@pytest.mark.system
def test_the_climatology(tmp_path):
    output = run([ROOT / "examples" / "climatology.py", "--years", "3"], tmp_path)
    months = re.findall(r"^ +(\d+) +(-?\d+\.\d+)$", output, re.MULTILINE)
    assert [int(month) for month, _ in months] == list(range(1, 13))
