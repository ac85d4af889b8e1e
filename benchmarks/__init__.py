"""Benchmarks: each prints a ratio against a peer, or against a limit, that was measured in the same run."""
