"""Plans and losses as pictures. They need matplotlib, which is asked for when one is drawn."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.training.tables import amount, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from goblin_dask.training.history import History
    from goblin_dask.training.plan import Plan

Array = np.ndarray[Any, Any]
COLOURS = {"forward": "#4c78a8", "backward": "#e08a3c"}
MANY = 60
"""More rounds than this are also shown as a smooth line."""
STEEP = 50.0
"""Losses whose largest is so many times the smallest are drawn on a logarithmic scale."""


def figure(width: float, height: float) -> Figure:
    """An empty figure; inches.

    Raises
    ------
    InputError
        Without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("a picture needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def write(drawn: Figure, path: str | Path) -> None:
    """Write a figure; the ending of the path chooses the format: png, svg or pdf.

    Raises
    ------
    InputError
        For a path that cannot be written.
    """
    try:
        drawn.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(f"the picture cannot be written to {str(path)!r}: {error}") from error


def png(drawn: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    file = io.BytesIO()
    drawn.savefig(file, format="png", dpi=100)
    return file.getvalue()


# --- plans ------------------------------------------------------------------------------------------------------------
def plan(planned: Plan) -> Figure:
    """Stages as columns: boxes from the batch to the loss, and below them memory and work of their tasks."""
    stages = planned.stages
    drawn = figure(min(max(1.7 * len(stages) + 2, 7), 40), 6.5)
    boxes, memory, work = drawn.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [1, 1.5, 1.2]})
    _boxes(boxes, planned)
    _bars(memory, planned, [each.peak / 1e6 for each in planned.entries])
    _bars(work, planned, [each.flops / 1e9 for each in planned.entries])
    if planned.memory is not None:
        memory.axhline(planned.memory / 1e6, color="#c0392b", linestyle="--", linewidth=1.2)
        memory.annotate(
            f"volunteer: {amount(planned.memory, 'B')}", (0.995, planned.memory / 1e6), xytext=(0, 3),
            textcoords="offset points", xycoords=("axes fraction", "data"), ha="right", color="#c0392b",
            fontsize="small",
        )  # fmt: skip
    memory.set(ylabel="peak memory / MB")
    memory.margins(y=0.15)
    work.set(ylabel="work / GFLOP", xticks=range(len(stages)))
    work.set_xticklabels([f"stage {number + 1}" for number in range(len(stages))])
    tasks = counted(planned.tasks, "task")
    drawn.suptitle(
        f"A round: {counted(planned.micro_batches, 'micro-batch', 'micro-batches')}, {tasks}, "
        f"{amount(planned.flops, 'FLOP')}, {amount(planned.moved(), 'B')} moved"
    )
    return drawn


def _boxes(axes: Axes, planned: Plan) -> None:
    last = len(planned.stages) - 1
    for number, names in enumerate(planned.stages):
        entries = {each.direction: each for each in planned.entries if each.stage == number}
        size = max((each.parameters for each in entries.values()), default=0)
        blocks = max((each.blocks for each in entries.values()), default=1)
        words = f"{counted(len(names), 'parameter')}\n{amount(size, 'B')}" + f"\nin {blocks} blocks" * (blocks > 1)
        style = {"boxstyle": "round,pad=0.5", "facecolor": "#f3f3f3", "edgecolor": "#555555"}
        axes.text(number, 0.5, words, ha="center", va="center", fontsize="small", bbox=style, zorder=3)
        for direction, height, there, wanted in (("forward", 0.62, 1, number < last), ("backward", 0.38, -1, number)):
            if wanted and direction in entries:
                arrow = {"arrowstyle": "->", "color": COLOURS[direction]}
                ends = (number + 0.68 * there, height), (number + 0.32 * there, height)
                axes.annotate("", *ends, arrowprops=arrow, zorder=1)
    axes.set(xlim=(-0.6, last + 0.6), ylim=(0, 1))
    axes.axis("off")


def _bars(axes: Axes, planned: Plan, heights: list[float]) -> None:
    for direction, shift in (("forward", -0.2), ("backward", 0.2)):
        found = [(each, height) for each, height in zip(planned.entries, heights, strict=True)]
        found = [(each, height) for each, height in found if each.direction == direction]
        if found:
            places = [each.stage + shift for each, _ in found]
            bars = axes.bar(places, [h for _, h in found], 0.36, color=COLOURS[direction], label=direction)
            for (each, _), bar in zip(found, bars, strict=True):
                if each.blocks > 1:
                    bar.set(hatch="//", edgecolor="white")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


# --- losses -----------------------------------------------------------------------------------------------------------
def losses(history: History, log: bool | None = None) -> Figure:
    """The loss over the rounds, and the learning rate where it varies.

    Parameters
    ----------
    history : History
    log : bool, optional
        Whether the scale is logarithmic; by default where the losses differ much, and all are positive.
    """
    numbers, values, rates = (history.values(name) for name in ("number", "loss", "learning_rate"))
    drawn = figure(7, 4)
    axes = drawn.subplots()
    many = len(numbers) > MANY
    axes.plot(numbers, values, ".-" if len(numbers) <= MANY else ".", markersize=4, alpha=0.35 if many else 1.0,
              color=COLOURS["forward"], label="loss")  # fmt: skip
    if many:
        axes.plot(numbers, smoothed(values), color=COLOURS["forward"], linewidth=1.8, label="mean of rounds around")
        axes.legend(fontsize="small")
    finite = values[np.isfinite(values)]
    if log is None:
        log = bool(finite.size and finite.min() > 0 and finite.max() > STEEP * finite.min())
    axes.set(xlabel="round", ylabel="loss", yscale="log" if log else "linear")
    axes.locator_params(axis="x", integer=True)
    if len(np.unique(rates[np.isfinite(rates)])) > 1:
        beside = axes.twinx()
        beside.plot(numbers, rates, color="#888888", linewidth=0.8)
        beside.set_ylabel("learning rate", color="#888888")
        beside.tick_params(axis="y", colors="#888888")
    return drawn


def smoothed(values: Array) -> Array:
    """Means over a window around each value, of those that are finite; NaN where there is none."""
    reach = max(len(values) // 50, 2)
    window, here = np.ones(2 * reach + 1), slice(reach, reach + len(values))
    there = np.isfinite(values)
    counts = np.convolve(there, window)[here]
    sums = np.convolve(np.where(there, values, 0.0), window)[here]
    means: Array = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0.5)
    return means
