"""``make test``: the tests that start processes, and beside them the others.

The first half mostly waits, the second mostly computes: together they take little longer than the longer one. Each
half's output is shown when it has ended.
"""

from __future__ import annotations

import compileall
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parent.parent
HALVES = ("system", "not system")


def run(half: str) -> tuple[str, subprocess.CompletedProcess[str], float]:
    """One half's result, and its seconds."""
    started = time.monotonic()
    # Reading all modules takes longer than many a test: this half reads those that have such tests.
    where = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.system" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", half, "-p", "no:cacheprovider", *sys.argv[1:]]
    command += map(str, where if half == "system" else [])
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return half, result, time.monotonic() - started


def main() -> int:
    # Many processes that tests start import it, and some environments keep no bytecode of their own accord.
    compileall.compile_dir(ROOT / "goblin_dask", quiet=1)
    failed = []
    with ThreadPoolExecutor(len(HALVES)) as pool:
        for done in as_completed([pool.submit(run, half) for half in HALVES]):
            half, result, seconds = done.result()
            print(f"== tests that are {half}: {seconds:.0f} s\n{result.stdout}", flush=True)
            if result.returncode:
                failed.append(half)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
