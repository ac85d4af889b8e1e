"""``make bench``: every benchmark that takes minutes, one after the other, each in a process of its own.

One that takes an hour is run by its name only: ``python -m benchmarks detection``.

Settings that slow a current NumPy down on some machines are taken out of the environment, for the benchmarks only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LONG = {"detection"}


def main() -> int:
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    found = {path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_")}
    wanted = sys.argv[1:] or sorted(found - LONG)
    failed = 0
    for name in wanted:
        print(f"== {name}", flush=True)
        failed += (
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], env=environment, check=False).returncode != 0
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
