"""Rounds so far, early stops, metrics and the bar, told of hand-made rounds."""

import json
import math
import os
import resource
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from goblin_dask.errors import ConnectionLost, InputError
from goblin_dask.training.history import EarlyStop, History, Metrics
from goblin_dask.training.pictures import smoothed
from goblin_dask.training.progress import FitBar

CERTIFICATE = {"parts": 7, "methods": {"replicate": {"rejected": 2}, "algebraic": {"rejected": 1}}}


def done(number, loss, rate=0.1, verified=True, norm=None):
    return SimpleNamespace(
        number=number, loss=loss, seconds=0.5, verified=verified, certificate=CERTIFICATE, learning_rate=rate,
        gradient_norm=norm,
    )  # fmt: skip


def history(losses, rates=None):
    rates = rates or [0.1] * len(losses)
    return History(done(n, loss, rate) for n, (loss, rate) in enumerate(zip(losses, rates, strict=True), 1))


# --- history ----------------------------------------------------------------------------------------------------------
def test_a_history_is_a_sequence():
    rounds = history([3.0, 2.0, math.nan])
    rounds.append(done(4, 1.0, norm=5.0))
    assert [each.number for each in rounds] == [1, 2, 3, 4]
    assert repr(rounds[:2]) == "<History of 2 rounds, loss 3 → 2>"
    assert repr(History()) == "<History of 0 rounds>"
    np.testing.assert_array_equal(rounds.values("gradient_norm"), [math.nan, math.nan, math.nan, 5.0])


def test_smoothing_leaves_out_what_is_missing():
    np.testing.assert_allclose(smoothed(np.array([1.0, math.nan, 3.0])), [2.0, 2.0, 2.0])
    assert np.isnan(smoothed(np.full(3, math.nan))).all()
    np.testing.assert_allclose(smoothed(np.arange(100.0))[10:90], np.arange(10.0, 90.0))


def test_pictures_of_losses(tmp_path):
    pytest.importorskip("matplotlib")
    from goblin_dask.training import pictures

    for losses, lines, scale in (([3.0, 2.0, 1.0], 1, "linear"), ([100.0, 1.0], 1, "log"), ([1.0] * 70, 2, "linear")):
        (axes,) = pictures.losses(history(losses)).axes
        assert (len(axes.lines), axes.get_yscale()) == (lines, scale)
    assert pictures.losses(history([100.0, 1.0]), log=False).axes[0].get_yscale() == "linear"
    assert len(pictures.losses(history([2.0, 1.0, 1.0], [0.1, 0.2, math.nan])).axes) == 2
    history([2.0, math.nan, 1.0]).save(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png" in history([2.0])._repr_html_()
    History().save(tmp_path / "empty.svg")


def test_without_matplotlib_notebooks_get_a_table(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert history([2.0])._repr_png_() is None
    html = history(range(1, 8))._repr_html_()
    assert "<img" not in html
    assert html.count("<tr>") == 6
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="pip install matplotlib"):
        history([2.0]).save(tmp_path / "loss.png")


# --- early stop -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("losses", "over"),
    [
        ([3, 2, 1], False), ([3, 3, 3], True), ([3, 3, 2, 2], False), ([3, 2.95, 2.92], True), ([3, math.nan, 4], True),
        ([math.nan, math.nan], True), ([-math.inf, -math.inf], True), ([3, 4, 2.8, 2.8], False),
    ],
)  # fmt: skip
def test_early_stop(losses, over):
    stop = EarlyStop(patience=2, min_delta=0.1)
    for each in history(losses):
        stop = stop.told(each)
    assert stop.over is over


def test_early_stop_of_other_measures():
    assert EarlyStop(1, measure="gradient_norm").told(done(1, 1.0, norm=2.0)).best == 2.0
    assert EarlyStop(1).told(2.0).told(2.0).over
    with pytest.raises(InputError, match="'accuracy'"):
        EarlyStop(measure="accuracy").told(done(1, 1.0))
    for wrong in ({"patience": 0}, {"min_delta": -1.0}, {"min_delta": math.nan}):
        with pytest.raises(InputError, match="patience is at least"):
            EarlyStop(**wrong)


# --- metrics ----------------------------------------------------------------------------------------------------------
def test_a_function_is_told():
    events = []
    metrics = Metrics(events.append)
    metrics.tell("begin", rounds=np.int64(3))
    metrics.told(done(1, math.nan))
    assert events[0].pop("time") <= events[1].pop("time")
    assert events == [
        {"event": "begin", "rounds": 3},
        {
            "event": "round", "number": 1, "loss": None, "seconds": 0.5, "tasks": 7, "rejected": 3, "verified": True,
            "learning_rate": 0.1, "gradient_norm": None,
        },
    ]  # fmt: skip


def test_what_a_function_raises_is_the_callers():
    def fails(event):
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        Metrics(fails).told(done(1, 1.0))


def test_lines_are_added_to_a_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for loss in (1.0, math.inf):
        Metrics(path).told(done(1, loss))
    Metrics(str(path)).tell("saved", path=tmp_path)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(each["event"], each.get("loss")) for each in found] == [("round", 1.0), ("round", None), ("saved", None)]
    with pytest.raises(InputError, match="cannot be written"):
        Metrics(tmp_path / "nowhere" / "metrics.jsonl")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_full_disk_costs_a_line():
    with pytest.warns(RuntimeWarning, match="an event is missing in /dev/full"):
        Metrics("/dev/full").told(done(1, 1.0))


def test_no_line_is_written_in_part(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.tell("begin")
    whole = path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, before[1]))
    try:
        with pytest.warns(RuntimeWarning, match="an event is missing"):
            metrics.told(done(1, 1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == whole
    metrics.tell("stopped")
    assert path.read_bytes().count(b"\n") == 2


# --- the bar ----------------------------------------------------------------------------------------------------------
class Job:
    """One that has done 3 of 4 tasks, and then ends, or is lost."""

    def __init__(self, lost=False):
        self.lost = lost

    def events(self):
        yield {"progress": {"done": 3, "total": 4}}
        if self.lost:
            raise ConnectionLost("gone")


def fit(bar):
    with bar:
        for number in (1, 2):
            with bar.beside(Job(lost=number == 2)):
                pass
            bar.told(done(number, 1.0 / number, verified=number == 1))
            print("the caller's own")


def test_nobody_watches(capsys):
    fit(FitBar(2))
    assert capsys.readouterr() == ("the caller's own\n" * 2, "")


def test_a_log_that_was_asked_for(capsys):
    fit(FitBar(2, True))
    out, err = capsys.readouterr()
    assert out == "the caller's own\n" * 2
    assert err.splitlines() == [
        "1 of 2 rounds, loss 1, 120 rounds/min, verified", "2 of 2 rounds, loss 0.5, 120 rounds/min, not all verified",
    ]  # fmt: skip


def test_a_terminal_is_left_clean(capsys, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(FitBar(2))
    out, err = capsys.readouterr()
    assert out == "the caller's own\n" * 2, "what is printed between rounds goes where it went"
    assert "0 of 2 rounds" in err
    assert err.endswith("\x1b[1A\x1b[2K2 of 2 rounds, loss 0.5, 120 rounds/min, not all verified\n")
    fit(FitBar(2, False))
    assert capsys.readouterr().err == ""


def test_tasks_are_a_part_of_a_round():
    bar = FitBar(2)
    bar.told(done(1, 1.0))
    bar.tasks = (3, 4)
    assert bar.share == 1.75
    assert bar.text == "1 of 2 rounds, 3 of 4 tasks, loss 1, 120 rounds/min, verified"


def test_a_notebook_has_one_place(monkeypatch):
    shown = []

    class Place:
        def update(self, look):
            shown.append(look)

    def display(look, display_id):
        shown.append(look)
        return Place()

    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    fit(FitBar(2))
    assert 'value="0.000" max="2"' in shown[0]
    assert shown[-1].endswith("2 of 2 rounds, loss 0.5, 120 rounds/min, not all verified")
