"""What the documentation says is run, or compared with what it is generated from."""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import goblin_dask as goblin
from goblin_dask.graphs.operators import CATALOGUE

ROOT = Path(__file__).parent.parent


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_generated_pages_are_current():
    generate = module(ROOT / "docs" / "generate.py")
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


@pytest.fixture(scope="module")
def address():
    """A laboratory for all of them: a grid for each would take longer than what they compute."""
    with goblin.LocalGrid(volunteers=2) as grid:
        yield grid.lab.url, grid.lab._token


@pytest.fixture
def here(address, tmp_path, monkeypatch):
    """A program that begins a grid of two volunteers finds it begun."""
    url, token = address

    @contextlib.contextmanager
    def begun(volunteers, offload="auto"):
        assert volunteers == 2
        with goblin.Lab(url, token, offload=offload) as lab:
            yield SimpleNamespace(lab=lab)

    monkeypatch.setattr(goblin, "LocalGrid", begun)
    monkeypatch.chdir(tmp_path)


def readme(number):
    """Run one of README's programs; what it leaves in its variables."""
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(programs) == 3
    left = {"__name__": "__main__"}
    exec(compile(programs[number], "README.md", "exec"), left)
    return left


@pytest.mark.system
def test_the_readme_computes(here, tmp_path, capsys):
    readme(0)
    assert "algebraic" in capsys.readouterr().out
    assert (tmp_path / "c.zarr").is_dir()


@pytest.mark.system
def test_the_readme_captures(here):
    pytest.importorskip("torch")
    scores = readme(1)["scores"]
    assert (scores.shape, scores.dtype) == ((4000, 10), "float32")


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")
def test_the_readme_trains(here, capsys):
    pytest.importorskip("torch")
    left = readme(2)
    assert capsys.readouterr().out.count(" True\n") == 20  # rounds that were verified
    assert left["right"] > 0.8
    assert type(left["net"]).__name__ == "Sequential"


@pytest.mark.system
def test_the_main_job_at_a_small_size(tmp_path):
    output = run([ROOT / "examples" / "eigenpatches.py", "--size", "2048", "--output", str(tmp_path)], tmp_path)
    assert "volunteers" in output
    picture = (tmp_path / "eigenpatches.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")
def test_the_climatology(here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["climatology.py", "--years", "1"])
    climatology = module(ROOT / "examples" / "climatology.py")
    climatology.LATITUDES, climatology.LONGITUDES = 6, 12
    climatology.main()
    months = re.findall(r"^ +(\d+) +(-?\d+\.\d+)$", capsys.readouterr().out, re.MULTILINE)
    assert [int(month) for month, _ in months] == list(range(1, 13))
