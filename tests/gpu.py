"""``make gpu``: operators, PyTorch's samples and models on the GPU backends that are here, or why there are none."""

from __future__ import annotations

import sys

import pytest

from goblin_dask.errors import InputError
from goblin_dask.graphs.backends.choice import backend_named

MODULES = ("tests/graphs/test_backends.py", "tests/graphs/test_op_db.py", "tests/graphs/test_models.py")
GPUS = ("torch:cuda", "cupy")


def here() -> list[str]:
    """Names of the GPU backends of this machine; says of each other why it is none."""
    found = []
    for name in GPUS:
        try:
            backend = backend_named(name)
        except InputError as error:
            print(f"{name}: skipped, for {error}")
        else:
            print(f"{name}: {backend.device}, driver {backend.driver}")
            found.append(name)
    return found


def main() -> int:
    if not here():
        print("no GPU backend is here: operators and models were not run on one")
        return 0
    return int(pytest.main(["-q", "--full", "-p", "no:cacheprovider", *MODULES]))


if __name__ == "__main__":
    sys.exit(main())
