"""Models of the common kinds, written out: for tests and benchmarks, and as examples of what can be captured.

Needs PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two convolutions and what goes past them (He et al., 2015)."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.one = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm_one = nn.BatchNorm2d(after)
        self.two = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm_two = nn.BatchNorm2d(after)
        self.past: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.past = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm_one(self.one(x)))
        return F.relu(self.norm_two(self.two(y)) + self.past(x))


class ResNet18(nn.Module):
    """ResNet-18 for images of three channels."""

    def __init__(self, classes: int = 100):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        widths = (64, 64, 128, 256, 512)
        blocks = []
        for number, (before, after) in enumerate(itertools.pairwise(widths)):
            blocks += [Block(before, after, 2 if number else 1), Block(after, after, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class Attention(nn.Module):
    """Attention of several heads, causal or not."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float):
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.inner(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=dropout)
        return self.outer(y.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """A transformer's layer, normalized before (Radford et al., 2019)."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float):
        super().__init__()
        self.norm_one, self.norm_two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal, dropout)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_one(x)))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm_two(x)))))


class GPT(nn.Module):
    """A language model whose last layer is its embedding."""

    def __init__(
        self,
        vocabulary: int = 256,
        length: int = 64,
        width: int = 384,
        heads: int = 6,
        layers: int = 6,
        dropout: float = 0.1,
    ):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads, True, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.layers(self.tokens(tokens) + self.places(places))))


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al., 2020)."""

    def __init__(
        self, size: int = 32, patch: int = 4, width: int = 288, heads: int = 6, layers: int = 6, classes: int = 10
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.layers = nn.Sequential(*(Layer(width, heads, False, 0.1) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.first.expand(y.shape[0], -1, -1), y], 1) + self.places
        return self.head(self.norm(self.layers(y))[:, 0])


class Twice(nn.Sequential):
    """Two convolutions of a U-Net."""

    def __init__(self, before: int, after: int):
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
            nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Down, up, and across (Ronneberger et al., 2015)."""

    def __init__(self, channels: int = 1, width: int = 16):
        super().__init__()
        self.down_one, self.down_two = Twice(channels, width), Twice(width, 2 * width)
        self.bottom = Twice(2 * width, 4 * width)
        self.rise_two = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up_two, self.up_one = Twice(4 * width, 2 * width), Twice(3 * width, width)
        self.head = nn.Conv2d(width, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.down_one(x)
        two = self.down_two(F.max_pool2d(one, 2))
        y = self.rise_two(self.bottom(F.max_pool2d(two, 2)))
        y = self.up_two(torch.cat([y, two], 1))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(self.up_one(torch.cat([y, one], 1)))


class Recurrent(nn.Module):
    """An LSTM or GRU of two layers, and a linear head on its last state."""

    def __init__(self, kind: Callable[..., nn.Module], width: int = 48):
        super().__init__()
        self.layers: Any = kind(16, width, 2, batch_first=True, bidirectional=kind is nn.GRU)
        self.head = nn.Linear(width * (2 if kind is nn.GRU else 1), 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0][:, -1])


class Attends(nn.Module):
    """`torch.nn.MultiheadAttention` of a sequence with itself, with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, weights = self.attention(x, x, x)
        return y, weights


def mlp() -> nn.Module:
    """A perceptron of three layers with batch normalization and dropout."""
    layers: list[nn.Module] = []
    for before, after in ((30, 200), (200, 100)):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(100, 3))


def encoder() -> nn.Module:
    """`torch.nn.TransformerEncoder`."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)


def _normal(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randn(batch, *shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "ResNet-18": (ResNet18, _normal(3, 64, 64)),
    "ViT": (ViT, _normal(3, 32, 32)),
    "GPT": (GPT, lambda batch: torch.randint(0, 256, (batch, 64))),
    "LSTM": (lambda: Recurrent(nn.LSTM), _normal(6, 16)),
    "GRU": (lambda: Recurrent(nn.GRU), _normal(6, 16)),
    "U-Net": (UNet, _normal(1, 32, 32)),
    "MLP with BatchNorm": (mlp, _normal(30)),
    "TransformerEncoder": (encoder, _normal(10, 64)),
    "MultiheadAttention": (Attends, _normal(10, 64)),
}
"""By name: how the model is made, and an example of a batch."""
