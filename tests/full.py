"""``make full``: every expensive table, whole, one after the other, resumable.

Each test module with a test marked ``full`` is a table. Its output is kept under ``results/full/`` together with the
digest of the code that it ran; a table whose code has not changed since it passed is printed, not run again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from goblin_dask.digest import digest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "full"


def code_digest(*modules: Path) -> str:
    """Digest of the package and of some test modules."""
    files = [*sorted((ROOT / "goblin_dask").rglob("*.py")), *modules]
    return digest("\n".join(digest(path.read_bytes()) for path in files).encode())


def main() -> int:
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed = []
    for module in sorted((ROOT / "tests").rglob("test_*.py")):
        if "mark.full" not in module.read_text():
            continue
        name = module.relative_to(ROOT / "tests").with_suffix("").as_posix().replace("/", ".")
        log, stamp = RESULTS / f"{name}.txt", RESULTS / f"{name}.passed"
        code = code_digest(module)
        if stamp.exists() and stamp.read_text() == code:
            print(f"== {name}: passed before, its code is the same\n{log.read_text()}", flush=True)
            continue
        print(f"== {name}", flush=True)
        started = time.monotonic()
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--full", "-m", "full", "--timeout=5400", str(module)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        log.write_text(run.stdout)
        print(run.stdout, f"({time.monotonic() - started:.0f} s)", flush=True)
        if run.returncode == 0:
            stamp.write_text(code)
        else:
            failed.append(name)
    print(f"== {len(failed)} tables failed{': ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
