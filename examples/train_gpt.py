"""A language model of Python: a GPT on the text of Python's own standard library, trained on volunteers.

Tokens are bytes. The model has 10.8 million parameters; with its gradients and what a micro-batch leaves for them it
needs 222 MB of memory. Every twentieth file is kept for the test. The unigram entropy of the text is the loss of
who knows how frequent bytes are, and nothing else.

    python examples/train_gpt.py
    python examples/train_gpt.py --small
    python examples/train_gpt.py --lab http://lab:8788 --token goblin_…
"""

from __future__ import annotations

import argparse
import contextlib
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import goblin_dask as goblin
from goblin_dask.testing.models import GPT


@dataclass(frozen=True)
class Size:
    """Of the model, and of its training."""

    length: int
    """Bytes that it sees at once."""
    width: int
    heads: int
    layers: int
    batch: int
    """Rows of a round."""
    micro_batch: int
    """Rows of a task."""
    rate: float
    """The largest learning rate."""
    rounds: int


LARGE = Size(128, width=384, heads=6, layers=6, batch=16, micro_batch=4, rate=2e-3, rounds=100)
SMALL = Size(32, width=64, heads=4, layers=1, batch=64, micro_batch=32, rate=1e-2, rounds=60)
TESTED = 32
"""Rows of the test."""


def library() -> tuple[np.ndarray, np.ndarray]:
    """The modules of the standard library, one after the other, as bytes: to train on, and to test on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    files = [file for file in files if not {"site-packages", "test", "tests"} & {*file.parts}]
    tested = set(files[::20])
    train, test = ([file.read_bytes() for file in files if (file in tested) is wanted] for wanted in (False, True))
    return np.frombuffer(b"".join(train), np.uint8), np.frombuffer(b"".join(test), np.uint8)


class Windows(torch.utils.data.Dataset):
    """Pieces of a text, none of which overlap: `length` bytes, and the bytes that follow each."""

    def __init__(self, text: np.ndarray, length: int):
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = number * self.length
        piece = torch.from_numpy(self.text[start : start + self.length + 1].astype("int64"))
        return piece[:-1], piece[1:]


def entropy(text: np.ndarray) -> float:
    """Of its bytes, each for itself, in nats."""
    share = np.bincount(text, minlength=256) / len(text)
    share = share[share > 0]
    return float(-(share * np.log(share)).sum())


def loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of a byte, in nats."""
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def model(size: Size) -> GPT:
    """As large as asked for, with the first weights of GPT-2 (Radford et al., 2019)."""
    made = GPT(256, size.length, size.width, size.heads, size.layers, dropout=0.0)
    for module in made.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            torch.nn.init.zeros_(module.bias)
    return made


@torch.no_grad()
def written(module: GPT, start: bytes, count: int, length: int, temperature: float = 0.8) -> str:
    """What the model goes on with."""
    tokens = list(start)
    for _ in range(count):
        scores = module(torch.tensor([tokens[-length:]]))[0, -1] / temperature
        tokens.append(int(torch.multinomial(scores.softmax(0), 1)))
    return bytes(tokens).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="a model of 0.07 million parameters, of pieces of 32 bytes"
    )
    parser.add_argument("--rounds", type=int, help="steps of the optimizer")
    parser.add_argument("--volunteers", type=int, default=2, help="processes on this machine")
    parser.add_argument("--memory", default="256 MB", help="what each of them may take")
    parser.add_argument("--lab", help="address of a laboratory's node; by default everything is on this machine")
    parser.add_argument("--token", help="the laboratory's")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    size = SMALL if options.small else LARGE
    rounds, length = options.rounds or size.rounds, size.length
    torch.manual_seed(options.seed)
    text, test = library()
    print(f"text                  {len(text):,} bytes to train on, {len(test):,} to test on")
    print(f"unigram entropy       {entropy(text):.4f}")

    with contextlib.ExitStack() as stack:
        if options.lab:
            lab = stack.enter_context(goblin.connect(options.lab, token=options.token))
        else:
            lab = stack.enter_context(goblin.LocalGrid(volunteers=options.volunteers, memory=options.memory)).lab
        trainer = goblin.training.Trainer(
            model(size),
            loss=loss,
            optimizer=lambda p: torch.optim.AdamW(p, lr=size.rate, betas=(0.9, 0.98)),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
                optimizer, size.rate, total_steps=rounds, cycle_momentum=False
            ),
            clip_norm=1.0,
            lab=lab,
            micro_batch=size.micro_batch,
            seed=options.seed,
        )
        print(trainer)
        print("round    loss  seconds  verified")
        started, verified = time.perf_counter(), 0
        for round in trainer.fit(Windows(text, length), rounds=rounds, batch=size.batch, shuffle=True):
            print(f"{round.number:5} {round.loss:7.4f} {round.seconds:8.2f}  {'yes' if round.verified else 'no'}")
            verified += round.verified
        seconds = time.perf_counter() - started
        windows = Windows(test, length)
        some = torch.utils.data.Subset(windows, np.linspace(0, len(windows) - 1, TESTED).astype(int))
        tested = trainer.evaluate(some)
        module = trainer.module().eval()

    with torch.no_grad():
        tokens, following = torch.utils.data.default_collate(list(some))
        here = float(loss(module(tokens), following))
    print(f"training              {rounds} rounds in {seconds:.1f} s, {verified} of them verified")
    print(f"last round            {round.certificate['summary']}")
    print(f"loss of the test      {tested:.4f}, by volunteers")
    print(f"loss of the test here {here:.4f}, by the ordinary module")
    print(written(module, b"def ", 300, length))


if __name__ == "__main__":
    main()
