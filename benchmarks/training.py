"""Rounds of training on volunteers beside plain PyTorch: ``python -m benchmarks.training [--rounds 4]``.

A GPT of 10.8 million parameters on sequences of 256 tokens, in three stages, two volunteers with one thread each that
compute with PyTorch, everything on this machine. The peer accumulates the gradients of the same micro-batches in one
process with two threads. Rounds of the peer and of the grid alternate; printed are the medians' ratios, and the bytes
that moved over those of the results, of what pieces read of each other, and of parameters, once for each volunteer.

Volunteers that are new are checked always, whatever share was asked for, and their replicas are audited more often: so
that what is asked for is measured, the gateway's database is told first that these have delivered much.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import time

import dask.array as da
import torch
from torch.nn import functional as F

from goblin_dask.local import LocalGrid
from goblin_dask.testing.models import GPT
from goblin_dask.training import Trainer

POLICIES = {"sample:0.000001": 1.6, "sample:0.1": 2.0, "replicate": 3.2}
"""And the most that a round may take, in rounds of the peer. The first is as good as none."""
BYTES = 1.5
LENGTH, BATCH, MICRO_BATCH, STAGES, VOLUNTEERS = 256, 32, 8, 3, 2


def language(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=3e-4)


def model():
    torch.manual_seed(0)
    return GPT(256, LENGTH, dropout=0.0)


def data():
    tokens = torch.randint(0, 256, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


class Peer:
    """The loop as everybody writes it."""

    def __init__(self):
        self.model, self.data = model(), data()
        self.optimizer = optimizer(self.model.parameters())

    def round(self):
        started = time.perf_counter()
        for x, y in zip(*(each.split(MICRO_BATCH) for each in self.data), strict=True):
            (language(self.model(x), y) * len(x) / BATCH).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def trusted(grid):
    """Let the volunteers have a long history: they are known after a few blocks of a product."""
    x = da.ones((2048, 2048), chunks=512, dtype="f4")
    grid.lab.compute(x @ x, offload="always", verify="auto")
    grid.gateway.stop()
    with sqlite3.connect(grid.directory / "gateway.sqlite") as database:
        changed = database.execute("UPDATE reputations SET flops = 1e30, accepted = 1000").rowcount
    assert changed, "the gateway knows no host yet"
    grid.restart_gateway()
    grid.wait(VOLUNTEERS, 1)


def moved(certificate):
    methods = [each for name, each in certificate["methods"].items() if name != "laboratory"]
    return sum(each["bytes_in"] + each["bytes_out"] for each in methods)


def expected(plan):
    """Bytes of results, of what pieces read of each other, and of parameters, once for each volunteer."""
    crossing = plan.micro_batches * sum(each.reads + each.gives for each in plan.entries)
    vectors = {names: size for each in plan.entries for names, size in each.vectors}
    return crossing + VOLUNTEERS * sum(vectors.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--routes", default="auto", help="as for LocalGrid: direct has blobs go over HTTP")
    options = parser.parse_args()
    torch.set_num_threads(2)
    os.environ["DASK_GOBLIN__VOLUNTEER__BACKEND"] = "torch"
    for policy, bar in POLICIES.items():
        with LocalGrid(VOLUNTEERS, 1, progress=False, verify=policy, routes=options.routes) as grid:
            trainer = Trainer(
                model(), lab=grid.lab, loss=language, optimizer=optimizer, micro_batch=MICRO_BATCH, stages=STAGES
            )
            plan = trainer.plan(data(), batch=BATCH)
            peer = Peer()
            ours = trainer.fit(data(), rounds=options.rounds + 1, batch=BATCH)
            trusted(grid)
            next(ours), peer.round()  # what is done once
            rounds, peers = [], []
            for done in ours:
                rounds.append(done)
                peers.append(peer.round())
            ratio = statistics.median(each.seconds for each in rounds) / statistics.median(peers)
            bytes_ = statistics.median(moved(each.certificate) for each in rounds)
            methods = {name: each["parts"] for name, each in rounds[-1].certificate["methods"].items()}
            print(
                f"{policy}: {statistics.median(each.seconds for each in rounds):.2f} s a round, PyTorch "
                f"{statistics.median(peers):.2f} s: {ratio:.2f} × (bar {bar}); {bytes_ / 1e6:.0f} MB of results that "
                f"were used, {bytes_ / expected(plan):.2f} of what is expected (bar {BYTES}); {methods}",
                flush=True,
            )


if __name__ == "__main__":
    main()
