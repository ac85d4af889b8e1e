"""How far `Trainer.fit` is, for whoever watches a terminal, a notebook, or a log that was asked for."""

from __future__ import annotations

import html
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from goblin_dask.errors import GoblinError
from goblin_dask.labnode.progress import seen
from goblin_dask.training.history import RoundLike

RECENT = 10
"""Rounds, the last ones, whose mean time is the speed."""
OFTEN = 0.2
"""Seconds between two looks of a notebook."""


class Watched(Protocol):
    """As `goblin_dask.labnode.client.Job`."""

    def events(self) -> Iterator[Mapping[str, Any]]:
        """Its status whenever that changes, until it has ended."""


class FitBar:
    """A progress bar beside rounds of training.

    In a terminal it is there while a round is computed (`beside`) and gone when it is the caller's turn, whose own
    lines stay whole. A notebook has one place for it. Where it is wanted and nobody watches, each round is a line.

    Parameters
    ----------
    rounds : int
        How many there will be.
    wanted : bool, optional
        As for `Lab`: None is where somebody sees it.
    """

    def __init__(self, rounds: int, wanted: bool | None = None):
        self.rounds, self.done = rounds, 0
        self.tasks = (0, 0)
        """Of the round that is computed: tasks done, and all."""
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._loss, self._verified = 0.0, True
        self._screen: _Terminal | _Notebook | _Log | None = None
        if seen(wanted):
            self._screen = _Terminal() if sys.stderr.isatty() else _Notebook() if "ipykernel" in sys.modules else _Log()

    def __enter__(self) -> FitBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._screen is not None and self.done:
            self._screen.end(self)

    @contextmanager
    def beside(self, job: Watched) -> Iterator[None]:
        """Show the tasks of a job while its result is waited for."""
        if self._screen is None:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._follow, args=(job, over), daemon=True)
        with self._screen.shown(self):
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join(1.0)  # an interrupted job may not stir for a while

    def told(self, round: RoundLike) -> None:
        """A round is done."""
        self.done, self.tasks = self.done + 1, (0, 0)
        self._seconds.append(round.seconds)
        self._loss, self._verified = round.loss, self._verified and round.verified
        if self._screen is not None:
            self._screen.told(self)

    def _follow(self, job: Watched, over: threading.Event) -> None:
        try:
            for status in job.events():
                if over.is_set():
                    return
                self.tasks = status["progress"]["done"], status["progress"]["total"]
                if self._screen is not None:
                    self._screen.update(self)
        except GoblinError:
            return  # whoever waits for the result is told

    # --- what there is to see -----------------------------------------------------------------------------------------
    @property
    def share(self) -> float:
        """Rounds done, the present one in part."""
        done, total = self.tasks
        return self.done + (done / total if total else 0.0)

    @property
    def text(self) -> str:
        """One line: rounds, tasks, loss, speed, whether all rounds were verified."""
        words = [f"{self.done} of {self.rounds} rounds"]
        if self.tasks[1]:
            words.append(f"{self.tasks[0]} of {self.tasks[1]} tasks")
        if self.done:
            pace = 60.0 * len(self._seconds) / max(sum(self._seconds), 1e-9)
            words += [f"loss {self._loss:.4g}", f"{pace:.3g} rounds/min"]
            words.append("verified" if self._verified else "not all verified")
        return ", ".join(words)


class _Terminal:
    """A line of the standard error, while it is shown; it stays when all is over."""

    def __init__(self) -> None:
        self._paint: Any = None

    @contextmanager
    def shown(self, bar: FitBar) -> Iterator[None]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = BarColumn(20), TextColumn("{task.description}", markup=False)
        # warnings go above the bar; what goes elsewhere than to this terminal is left where it goes
        with Progress(
            *columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()
        ) as progress:
            task = progress.add_task("", total=bar.rounds)
            self._paint = lambda: progress.update(task, description=bar.text, completed=bar.share)
            self._paint()
            yield

    def update(self, bar: FitBar) -> None:
        self._paint()

    def told(self, bar: FitBar) -> None:
        """Nothing: it's the caller's turn."""

    def end(self, bar: FitBar) -> None:
        print(bar.text, file=sys.stderr, flush=True)


class _Log:
    """A line for each round."""

    @contextmanager
    def shown(self, bar: FitBar) -> Iterator[None]:
        yield

    def update(self, bar: FitBar) -> None:
        """Nothing: tasks are too many lines."""

    def told(self, bar: FitBar) -> None:
        print(bar.text, file=sys.stderr, flush=True)

    def end(self, bar: FitBar) -> None:
        """Nothing: the last round was told."""


class _Notebook:
    """A place in the output of a cell, which is painted anew."""

    def __init__(self) -> None:
        self._place: Any = None
        self._last = 0.0

    @contextmanager
    def shown(self, bar: FitBar) -> Iterator[None]:
        self.told(bar)
        yield

    def update(self, bar: FitBar) -> None:
        if time.monotonic() - self._last > OFTEN:
            self.told(bar)

    def told(self, bar: FitBar) -> None:
        from IPython.display import HTML, display

        look = HTML(
            f'<progress value="{bar.share:.3f}" max="{bar.rounds}" style="width:20em"></progress> '
            f"{html.escape(bar.text)}"
        )
        self._last = time.monotonic()
        if self._place is None:
            self._place = display(look, display_id=True)
        else:
            self._place.update(look)

    def end(self, bar: FitBar) -> None:
        self.told(bar)
