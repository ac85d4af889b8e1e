"""Versions of the catalogue."""

from goblin_dask.digest import digest
from goblin_dask.graphs.builder import Builder
from goblin_dask.graphs.operators import CATALOGUE, CATALOGUE_VERSION
from goblin_dask.graphs.operators.base import added_in
from goblin_dask.graphs.program import Program
from goblin_dask.messages import ArraySpec

FIRST = "abedeb7b351cdcc271dc7d3fa553a22137c7772b7fb6c7a8fac3a9eb72423b60"
"""Digest of the names of version 1."""


def test_the_first_catalogue_is_what_it_was():
    """An operator that is added says so: ``since``, or `added_in` for those of a module."""
    first = sorted(name for name, operator in CATALOGUE.items() if operator.since == 1)
    assert digest(" ".join(first).encode()) == FIRST
    assert max(operator.since for operator in CATALOGUE.values()) <= CATALOGUE_VERSION


def test_operators_of_a_module_say_together_since_when():
    first, second = added_in(7, CATALOGUE["add"], CATALOGUE["matmul"])
    assert (first.since, second.since) == (7, 7)
    assert (first.name, first.kernel, second.flops) == ("add", CATALOGUE["add"].kernel, CATALOGUE["matmul"].flops)


def test_a_program_needs_the_version_of_its_newest_operator(monkeypatch):
    build = Builder()
    x = build.input(ArraySpec((3,), "float32"))
    (y,) = build.add("exp", [x])
    program, _ = build.finish(build.add("add", [x, y]))
    assert program.operators == {"add", "exp"}
    assert program.catalogue == 1
    (exp,) = added_in(5, CATALOGUE["exp"])
    monkeypatch.setattr("goblin_dask.graphs.program.CATALOGUE", {**CATALOGUE, "exp": exp})
    assert program.catalogue == 5
    assert Program((ArraySpec((3,), "float32"),), (), (0,)).catalogue == 1
