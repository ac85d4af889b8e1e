"""Conformance suites, liars, faults and an in-process grid, for this project's tests and for users' own (layer 5)."""
