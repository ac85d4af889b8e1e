"""A classifier of handwritten digits, trained on volunteers: a small CNN, or a vision transformer.

The 1,797 pictures of 8 × 8 pixels that scikit-learn ships are split once, a fifth of each digit for the test. In every
round volunteers compute the gradients of micro-batches, each of which is checked before it is added to the others. At
the end volunteers count the digits that the network reads right, and so does the ordinary module here.

    python examples/train_digits.py
    python examples/train_digits.py --model vit
    python examples/train_digits.py --lab http://lab:8788 --token goblin_…
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import goblin_dask as goblin
from goblin_dask.testing.models import ViT

MICRO_BATCH, BATCH = 64, 256


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures to train and to test on, shape (n, 1, 8, 8), values from 0 to 1; and which digits they show."""
    data = load_digits()
    pictures = torch.tensor(data.images[:, None] / 16, dtype=torch.float32)
    train, test = train_test_split(torch.arange(len(pictures)), test_size=0.2, stratify=data.target, random_state=0)
    shown = torch.tensor(data.target)
    return pictures[train], shown[train], pictures[test], shown[test]


def cnn() -> nn.Module:
    """Two convolutions, each normalized over its batch and halved, and a linear head."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


class Grey(nn.Module):
    """One channel, shown to a network for three."""

    def __init__(self, coloured: nn.Module):
        super().__init__()
        self.coloured = coloured

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.coloured(x.expand(-1, 3, -1, -1))


MODELS = {
    # What makes it, the largest learning rate, and rounds.
    "cnn": (cnn, 2e-2, 40),
    "vit": (lambda: Grey(ViT(size=8, patch=2, width=48, heads=4, layers=2)), 3e-3, 200),
}


def right(scores: torch.Tensor, shown: torch.Tensor) -> tuple[torch.Tensor, int]:
    """How many are right, and of how many: their accuracy."""
    return (scores.argmax(1) == shown).sum(), len(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--rounds", type=int, help="steps of the optimizer; 40 for the CNN, 200 for the ViT")
    parser.add_argument("--volunteers", type=int, default=2, help="processes on this machine")
    parser.add_argument("--lab", help="address of a laboratory's node; by default everything is on this machine")
    parser.add_argument("--token", help="the laboratory's")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make, rate, rounds = MODELS[options.model]
    rounds = options.rounds or rounds
    torch.manual_seed(options.seed)
    x, y, x_test, y_test = digits()

    with contextlib.ExitStack() as stack:
        if options.lab:
            lab = stack.enter_context(goblin.connect(options.lab, token=options.token))
        else:
            lab = stack.enter_context(goblin.LocalGrid(volunteers=options.volunteers)).lab
        trainer = goblin.training.Trainer(
            make(),
            loss=nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.AdamW(p, lr=rate),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=rounds),
            lab=lab,
            micro_batch=MICRO_BATCH,
            seed=options.seed,
        )
        print(trainer)
        print("round    loss  seconds  verified")
        started, verified = time.perf_counter(), Counter()
        for round in trainer.fit((x, y), rounds=rounds, batch=BATCH, shuffle=True):
            print(f"{round.number:5} {round.loss:7.4f} {round.seconds:8.2f}  {'yes' if round.verified else 'no'}")
            verified[round.verified] += 1
        seconds = time.perf_counter() - started
        accuracy = trainer.evaluate((x_test, y_test), measure=right)
        module = trainer.module().eval()

    with torch.no_grad():
        correct, count = right(module(x_test), y_test)
    print(f"training              {rounds} rounds in {seconds:.1f} s, {verified[True]} of them verified")
    print(f"last round            {round.certificate['summary']}")
    print(f"accuracy              {accuracy:.2%} of {count} pictures not trained on, by volunteers")
    print(f"accuracy here         {int(correct) / count:.2%}, by the ordinary module")


if __name__ == "__main__":
    main()
