"""What training has been like: rounds so far, when to stop, and events for others."""

from __future__ import annotations

import base64
import errno
import importlib.util
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np

from goblin_dask.errors import InputError
from goblin_dask.training import pictures
from goblin_dask.training.tables import counted, html_table

Array = np.ndarray[Any, Any]
SHOWN = 5
"""Rounds that notebooks list, the last ones."""


class RoundLike(Protocol):
    """As `goblin_dask.training.Round`."""

    @property
    def number(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def verified(self) -> bool: ...
    @property
    def certificate(self) -> Mapping[str, Any]: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def gradient_norm(self) -> float | None: ...


class History(Sequence[RoundLike]):
    """Rounds so far; notebooks show it as its losses.

    Parameters
    ----------
    rounds : iterable of Round
    """

    def __init__(self, rounds: Iterable[RoundLike] = ()):
        self._rounds = list(rounds)

    def __len__(self) -> int:
        return len(self._rounds)

    def __iter__(self) -> Iterator[RoundLike]:
        return iter(self._rounds)

    @overload
    def __getitem__(self, index: int) -> RoundLike: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...
    def __getitem__(self, index: int | slice) -> RoundLike | History:
        return History(self._rounds[index]) if isinstance(index, slice) else self._rounds[index]

    def __repr__(self) -> str:
        losses = f", loss {self[0].loss:.4g} → {self[-1].loss:.4g}" if self._rounds else ""
        return f"<History of {counted(len(self), 'round')}{losses}>"

    def append(self, round: RoundLike) -> None:
        """Add what was done last."""
        self._rounds.append(round)

    def values(self, measure: str) -> Array:
        """One measure of all rounds, such as ``"loss"``, as float64; NaN where there is none."""
        found = [getattr(each, measure) for each in self._rounds]
        return np.array([math.nan if each is None else each for each in found], np.float64)

    def save(self, path: str | Path, *, log: bool | None = None) -> None:
        """Draw the losses; the ending of the path chooses the format, such as png or svg. Needs matplotlib.

        Parameters
        ----------
        path : path
        log : bool, optional
            Whether the scale is logarithmic; by default where the losses differ much.
        """
        pictures.write(pictures.losses(self, log), path)

    def _repr_png_(self) -> bytes | None:
        if importlib.util.find_spec("matplotlib") is None:
            return None  # a notebook then shows something else
        return pictures.png(pictures.losses(self))

    def _repr_html_(self) -> str:
        drawn = self._repr_png_()
        image = f'<img src="data:image/png;base64,{base64.b64encode(drawn).decode()}">' if drawn else ""
        rows = [
            [str(each.number), f"{each.loss:.6g}", f"{each.seconds:.2f}", "yes" if each.verified else "no"]
            for each in self[-SHOWN:]
        ]
        return html_table(["round", "loss", "seconds", "verified"], rows) + image


@dataclass(frozen=True)
class EarlyStop:
    """Says when to stop: when a measure has not become smaller for some rounds. A value, which `told` makes anew.

    NaN, and what is infinite, is no improvement.

    Parameters
    ----------
    patience : int
        Rounds in a row without an improvement after which it is over.
    min_delta : float
        An improvement is by more than this.
    measure : str
        Of a round: ``"loss"``, ``"gradient_norm"``, or another of its attributes.

    Examples
    --------
    >>> stop = EarlyStop(patience=2)
    >>> for loss in (3.0, 2.0, 2.5, 2.1):
    ...     stop = stop.told(loss)
    >>> stop.over, stop.best
    (True, 2.0)
    """

    patience: int = 10
    min_delta: float = 0.0
    measure: str = "loss"
    best: float = math.inf
    """The smallest so far."""
    waited: int = 0
    """Rounds since."""

    def __post_init__(self) -> None:
        if self.patience < 1 or not self.min_delta >= 0:
            raise InputError(
                f"patience is at least 1 and min_delta at least 0, not {self.patience} and {self.min_delta}"
            )

    def told(self, round: RoundLike | float) -> EarlyStop:
        """After another round, or another value of what is measured, such as the loss on data of a test."""
        value = round if isinstance(round, (int, float)) else getattr(round, self.measure, None)
        if value is None:
            raise InputError(f"a round has no {self.measure!r} to stop by")
        if math.isfinite(value) and value < self.best - self.min_delta:
            return replace(self, best=float(value), waited=0)
        return replace(self, waited=self.waited + 1)

    @property
    def over(self) -> bool:
        """Whether to stop."""
        return self.waited >= self.patience


class Metrics:
    """Tells somebody of what happens, as JSON-able dicts.

    Each has an ``event``, which is ``begin``, ``round``, ``evaluated``, ``saved`` or ``stopped``, and the ``time`` in
    seconds since 1970. Numbers that JSON lacks (NaN, infinity) are null.

    Parameters
    ----------
    to : callable or path
        A function of one dict, or a file, to which a line is added for each. What the function raises ends the
        training where it is, as an error of the loop around `Trainer.fit` does: the round that it was told of is done.
        A file that was there and cannot be written to now, for the disk is full, costs lines, of which a warning
        tells, and no training.

    Raises
    ------
    InputError
        When there can be no such file.
    """

    def __init__(self, to: Callable[[dict[str, Any]], object] | str | Path):
        self._to: Callable[[dict[str, Any]], object] = to if callable(to) else _Lines(to)

    def tell(self, event: str, **what: Any) -> None:
        """Tell of an event: names, numbers, texts."""
        self._to({"event": event, "time": time.time(), **{name: _plain(value) for name, value in what.items()}})

    def told(self, round: RoundLike) -> None:
        """Tell of a round."""
        methods = round.certificate.get("methods", {}).values()
        self.tell(
            "round",
            number=round.number,
            loss=round.loss,
            seconds=round.seconds,
            tasks=round.certificate.get("parts", 0),
            rejected=sum(method["rejected"] for method in methods),
            verified=round.verified,
            learning_rate=round.learning_rate,
            gradient_norm=round.gradient_norm,
        )


class _Lines:
    """A file of JSON lines, each of which is written whole or not at all."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.path.open("ab").close()
        except OSError as error:
            raise InputError(f"metrics cannot be written to {str(path)!r}: {error}") from error

    def __call__(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, allow_nan=False).encode() + b"\n"
        try:
            with self.path.open("ab", buffering=0) as file:
                size = file.tell()
                if file.write(line) != len(line):
                    file.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            warnings.warn(f"an event is missing in {self.path}: {error}", RuntimeWarning, stacklevel=4)


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    value = value.item() if hasattr(value, "item") else value  # a number of NumPy's or PyTorch's
    return None if isinstance(value, float) and not math.isfinite(value) else value
