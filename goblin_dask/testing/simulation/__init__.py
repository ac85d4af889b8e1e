"""Grids with liars, simulated: what a policy of verification is worth before anybody has to find out.

``goblin simulate`` prints what `simulate` finds.
"""

from goblin_dask.testing.simulation.figures import Deeds, Meetings, Result, Work
from goblin_dask.testing.simulation.grid import Settings, Simulation, simulate
from goblin_dask.testing.simulation.plot import plot_result
from goblin_dask.testing.simulation.population import Liars, parse_liars

__all__ = [
    "Deeds", "Liars", "Meetings", "Result", "Settings", "Simulation", "Work", "parse_liars", "plot_result", "simulate",
]  # fmt: skip
