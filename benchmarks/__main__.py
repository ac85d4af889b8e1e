"""``make bench``: every benchmark, one after the other, each in a process of its own.

Settings that slow a current NumPy down on some machines are taken out of the environment, for the benchmarks only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    wanted = sys.argv[1:] or sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))
    failed = 0
    for name in wanted:
        print(f"== {name}", flush=True)
        failed += (
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], env=environment, check=False).returncode != 0
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
