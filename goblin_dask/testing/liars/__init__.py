"""Ways to hand in a wrong result: what lying, broken or hurried volunteers do.

Each is a pure function of a program, its inputs and its right outputs; `corrupt` picks one of `LIARS` by name. Tests of
policies and of whole grids use them, and so can users who want to see their own grid refuse a lie. *When* somebody lies
is a matter of strategy: `goblin_dask.testing.strategies`.
"""

from goblin_dask.testing.liars import damage, precision, shortcuts
from goblin_dask.testing.liars.registry import LIARS, Liar, Outputs, corrupt, liar

__all__ = ["LIARS", "Liar", "Outputs", "corrupt", "damage", "liar", "precision", "shortcuts"]
