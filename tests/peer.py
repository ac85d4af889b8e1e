"""``make peer-tests``: Dask's own array tests, with the lab as their scheduler and everything offloaded.

Each test file of the installed Dask is a shard. It runs once with Dask's ``sync`` scheduler, which tells what passes
here at all, and once on a grid in one process. Results lie in ``results/peer``; shards whose code has not changed since
they were finished are not run again, so the run can be resumed. A test that passes with ``sync`` must pass on the grid
unless `EXCEPTIONS` says why it cannot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask
import dask.array.tests
import numpy as np

from tests.full import code_digest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "peer"
SHARE = 0.6
"""Of the array tasks, at least so many are to be accepted from volunteers."""

_STORES = "it stores into an array in its own process's memory; the laboratory has a copy"
_LOCKS = "its tasks hold a lock, or something that counts calls, of its own process, which cannot be sent to another"
_WARNS = "it wants a warning that NumPy gives where it computes, which is on another machine"

EXCEPTIONS: dict[str, str] = {
    "test_array_core.py::test_from_array_getitem[False-True]": _LOCKS,
    "test_array_core.py::test_from_array_getitem[True-True]": _LOCKS,
    "test_array_core.py::test_from_array_with_lock": _LOCKS,
    "test_array_core.py::test_memmap": _STORES,
    "test_array_core.py::test_store": _STORES,
    "test_array_core.py::test_store_compute_false": _STORES,
    "test_array_core.py::test_store_delayed_target": _STORES,
    "test_array_core.py::test_store_locks_count_calls": _LOCKS,
    "test_array_core.py::test_store_locks_dont_assume_threadsafe": _LOCKS,
    "test_array_core.py::test_store_locks_failure_lock_released": _LOCKS,
    "test_array_core.py::test_store_locks_no_lock": _LOCKS,
    "test_array_core.py::test_store_locks_one_lock_two_stores": _LOCKS,
    "test_array_core.py::test_store_regions": _STORES,
    "test_array_core.py::test_store_sources_unoptimized_nocompute": _LOCKS,
    "test_array_core.py::test_zarr_existing_array": _STORES,
    "test_array_core.py::test_zarr_regions": _STORES,
    "test_array_core.py::test_zarr_to_zarr_shards": _STORES,
    "test_reductions.py::test_array_cumreduction_axis[blelloch-None-False-cumprod]": _WARNS,
    "test_reductions.py::test_array_cumreduction_axis[blelloch-None-False-nancumprod]": _WARNS,
    "test_reductions.py::test_array_cumreduction_axis[blelloch-None-True-cumprod]": _WARNS,
    "test_reductions.py::test_array_cumreduction_axis[blelloch-None-True-nancumprod]": _WARNS,
    "test_routines.py::test_average_raises": _WARNS,
    "test_ufunc.py::test_frompyfunc": "a ufunc that was made by numpy.frompyfunc cannot be sent to another process",
    "test_xarray.py::test_shared_tasks": _LOCKS,
}
"""Tests that pass with ``sync`` and cannot pass on a scheduler in another process, with the reason."""


def excuse(name: str) -> str | None:
    """Why a test need not pass: it, or its function with all parameters, is among the exceptions."""
    return EXCEPTIONS.get(name, EXCEPTIONS.get(name.partition("[")[0]))


def run(path: Path, mode: str) -> dict[str, dict[str, object]]:
    """Outcomes of one test file in one mode."""
    result, stamp = (RESULTS / f"{path.stem}.{mode}.{kind}" for kind in ("json", "code"))
    versions = f"{dask.__version__} {np.__version__} {sys.version}"
    code = versions if mode == "sync" else versions + code_digest(Path(__file__).with_name("peer_plugin.py"))
    if not (result.exists() and stamp.exists() and stamp.read_text() == code):
        RESULTS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            partial = Path(folder) / "result.json"
            environment = os.environ | {
                "GOBLIN_PEER_MODE": mode,
                "GOBLIN_PEER_RESULT": str(partial),
                "PYTHONPATH": str(ROOT),
            }
            log = RESULTS / f"{path.stem}.{mode}.txt"
            with log.open("w") as stream:
                subprocess.run(
                    f"{sys.executable} -m pytest -q -p tests.peer_plugin -p no:cacheprovider -c {os.devnull} "
                    f"--timeout=600 --tb=native --rootdir {path.parent} {path}".split(),
                    cwd=folder,
                    env=environment,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            if not partial.exists():
                return {"outcomes": {}, "reasons": {}, "counts": {}}
            result.write_text(partial.read_text())
            stamp.write_text(code)
    return json.loads(result.read_text())


def main() -> int:
    started = time.monotonic()
    files = sorted(Path(dask.array.tests.__path__[0]).glob("test_*.py"))
    if wanted := sys.argv[1:]:
        files = [path for path in files if path.stem in wanted]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda path: (path.stem, run(path, "sync"), run(path, "lab")), files))
    print(
        f"{'file':28} {'sync':>6} {'lab':>6} {'wrong':>6} {'excused':>8} {'grid tasks':>11} {'array tasks':>12} share"
    )
    wrong: list[tuple[str, str]] = []
    excuses: dict[str, str] = {}
    grid_total = array_total = passed_total = 0
    for stem, sync, lab in both:
        passed = [name for name, outcome in sync["outcomes"].items() if outcome == "passed"]
        failed = [name for name in passed if lab["outcomes"].get(name) != "passed"]
        excused = {name: reason for name in failed if (reason := excuse(name)) is not None}
        excuses |= excused
        bad = [name for name in failed if name not in excused]
        grid, array = (int(lab["counts"].get(key, 0)) for key in ("grid", "array"))
        print(
            f"{stem:28} {len(passed):6} {len(passed) - len(failed):6} {len(bad):6} {len(excused):8} {grid:11} "
            f"{array:12} "
            f"{grid / array if array else float('nan'):5.1%}"
        )
        wrong += [(name, lab["reasons"].get(name, lab["outcomes"].get(name, "did not run"))) for name in bad]
        grid_total, array_total, passed_total = grid_total + grid, array_total + array, passed_total + len(passed)
    share = grid_total / array_total if array_total else 0.0
    print(f"{passed_total} tests pass with sync; {len(wrong)} of them fail on the grid without an excuse")
    print(f"{grid_total} of {array_total} array tasks accepted from volunteers: {share:.1%} (bar {SHARE:.0%})")
    print(f"{time.monotonic() - started:.0f} s")
    for name, reason in excuses.items():
        print(f"excused: {name}: {reason}")
    for name, reason in wrong:
        print(f"--- {name}\n{reason[-400:]}")
    needless = [
        test
        for test in EXCEPTIONS
        if any(test.startswith(f"{stem}.py::") for stem, _, _ in both)
        and not any(test in (name, name.partition("[")[0]) for name in excuses)
    ]
    for test in needless:
        print(f"needs no excuse any more: {test}")
    return 1 if wrong or needless or share < SHARE else 0


if __name__ == "__main__":
    sys.exit(main())
