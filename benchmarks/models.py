"""Forward passes of captured models on NumPy and PyTorch backends, against eager PyTorch: one thread each.

The peer is the module itself under `torch.inference_mode`. Rounds alternate between all three, so that whatever else
the machine does falls on all; printed are the best times and their ratios.

    python -m benchmarks.models [--repeat 5] [--batch 8]
"""

from __future__ import annotations

import argparse
import time

import torch
from threadpoolctl import threadpool_limits

import goblin_dask as goblin
from goblin_dask.graphs.backends.choice import backend_named
from goblin_dask.graphs.execute import execute
from goblin_dask.testing.models import MODELS

BARS = {"GPT": (3.0, 1.15), "ResNet-18": (None, 1.15), "ViT": (None, 1.15), "U-Net": (None, 1.15)}
"""Of NumPy and of PyTorch's kernels, over eager; none is asked for where it is None."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    backends = {name: backend_named(name) for name in ("numpy", "torch")}
    with threadpool_limits(1):
        for name, (numpy_bar, torch_bar) in BARS.items():
            make, example = MODELS[name]
            torch.manual_seed(0)
            model = make().eval()
            captured = goblin.capture(model, example(2))
            x = example(options.batch)
            program, inputs = captured.bound(x)
            best = dict.fromkeys(("eager", *backends), float("inf"))
            for _ in range(options.repeat):
                started = time.perf_counter()
                with torch.inference_mode():
                    model(x)
                best["eager"] = min(best["eager"], time.perf_counter() - started)
                for kind, backend in backends.items():
                    started = time.perf_counter()
                    execute(program, inputs, backend=backend)
                    best[kind] = min(best[kind], time.perf_counter() - started)
            bars = {"numpy": numpy_bar, "torch": torch_bar}
            print(
                f"{name:10} batch {options.batch}: eager {best['eager'] * 1e3:.1f} ms; "
                + "; ".join(
                    f"{kind} {best[kind] * 1e3:.1f} ms, {best[kind] / best['eager']:.2f} × eager"
                    + (f" (bar {bars[kind]})" if bars[kind] else "")
                    for kind in backends
                )
            )


if __name__ == "__main__":
    main()
