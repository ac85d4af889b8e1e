"""A picture of a simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.testing.simulation.figures import Result


def plot_result(result: Result, path: str | Path) -> None:
    """Draw when liars came into quarantine, when their results were used, and what verification costs.

    Parameters
    ----------
    path : path
        Its ending chooses the format: svg, png or pdf.

    Raises
    ------
    InputError
        Without matplotlib, or for a path that cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("a plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(13, 4), layout="constrained")
    caught, used, costs = figure.subplots(1, 3)
    for name, deeds in result.strategies.items():
        days = np.sort(deeds.days_until)
        steps = np.arange(1, len(days) + 1) / max(deeds.names, 1)
        caught.step([0, *days, result.days], [0, *steps, steps[-1] if len(days) else 0], where="post", label=name)
        days = np.sort([day for day, _, liar in result.used if liar == name])
        used.step([0, *days, result.days], [0, *range(1, len(days) + 1), len(days)], where="post", label=name)
    caught.set(xlabel="days after joining", ylabel="share in quarantine", ylim=(-0.02, 1.02), title=result.policy)
    used.set(xlabel="days", ylabel="wrong results used", title=f"{result.used_above} of {result.lies_above} lies")
    names = list(result.work)
    bottom = np.zeros(len(names))
    for part in ("volunteers", "validators", "laboratory"):
        heights = np.array([getattr(work, part) / work.needed if work.needed else 0.0 for work in result.work.values()])
        costs.bar(names, heights, bottom=bottom, label=part)
        bottom += heights
    costs.axhline(1.0, color="black", linewidth=0.8)
    costs.tick_params(axis="x", labelrotation=20)
    costs.set(ylabel="FLOPs spent over FLOPs needed", title="work multiplied by")
    for axes in (caught, used, costs):
        axes.legend(fontsize="small")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(f"the plot cannot be written to {str(path)!r}: {error}") from error
