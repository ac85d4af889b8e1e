"""How a job looks: a bar in terminals and notebooks, a table in Jupyter."""

from __future__ import annotations

import html
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from goblin_dask.errors import GoblinError
from goblin_dask.messages import GridOffer

if TYPE_CHECKING:
    from goblin_dask.labnode.client import Job

NO_VOLUNTEER = "waits for a volunteer: there is none that the gateway trusts"
NO_VALIDATOR = "waits for a validator: there is none"
NO_GATEWAY = "waits for the gateway: there is no connection to it"
NO_PARTNER = "waits for a result of a second owner"

PATIENCE = 0.5
"""Seconds that a job may take before it is worth a bar."""


def seen(wanted: bool | None) -> bool:
    """Whether to show how far something is: as it was asked for, or else where there is somebody to see it."""
    return wanted if wanted is not None else sys.stderr.isatty() or "ipykernel" in sys.modules


class Bar:
    """A progress bar beside a blocking call, drawn from the job's events.

    Parameters
    ----------
    job : Job
    wanted : bool, optional
        None: where the standard error is a terminal, or a notebook.
    """

    def __init__(self, job: Job, wanted: bool | None):
        self._job = job
        self._wanted = seen(wanted)
        self._timer: threading.Timer | None = None
        self._over = threading.Event()

    def __enter__(self) -> Bar:
        if self._wanted:
            self._timer = threading.Timer(PATIENCE, self._draw)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join(1.0)  # an interrupted job may not stir for a while; its thread is a daemon

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
            task = bar.add_task(self._job.name, total=None, note="")
            try:
                for status in self._job.events():
                    done, total = status["progress"]["done"], status["progress"]["total"]
                    bar.update(
                        task, description=status["state"], completed=done, total=total or None, note=note(status)
                    )
                    if self._over.is_set():
                        return
            except GoblinError as error:
                bar.update(task, note=str(error))


def waits(states: Mapping[str, int], offer: GridOffer, connected: bool) -> dict[str, int]:
    """What a job's tasks on the grid wait for that is not there, and how many.

    Parameters
    ----------
    states : mapping of str to int
        How many tasks are in each state.
    offer : GridOffer
        Who is there.
    connected : bool
        Whether the gateway is.
    """
    found = {NO_PARTNER: states.get("uploaded", 0)}
    if not connected:
        found[NO_GATEWAY] = sum(states.values())
    elif not offer.volunteers:
        found[NO_VOLUNTEER] = states.get("queued", 0)
    if connected and not offer.validators:
        found[NO_VALIDATOR] = states.get("checking", 0)
    return {reason: count for reason, count in found.items() if count}


def stands_still(status: dict[str, Any]) -> str:
    """Why nothing happens before somebody comes; empty where something may."""
    reasons = status["progress"].get("reasons", {})
    return "; ".join(
        f"{why} ({reasons[why]} tasks)" for why in (NO_VOLUNTEER, NO_VALIDATOR, NO_GATEWAY) if why in reasons
    )


def note(status: dict[str, Any]) -> str:
    """A few words on where a job's tasks ran and how they were verified."""
    progress = status["progress"]
    still = stands_still(status)
    if not progress.get("grid") and not progress.get("lab"):
        return still
    methods = ", ".join(f"{count} {name}" for name, count in sorted(progress["methods"].items()))
    where = f"grid {progress['grid']} ({methods}), laboratory {progress['lab']}, volunteers {progress['volunteers']}"
    return f"{where}; {still}" if still else where


def job_html(status: dict[str, Any]) -> str:
    """A job for notebooks."""
    progress = status["progress"]
    total = progress["total"] or 1
    share = round(100 * progress["done"] / total)
    rows = {
        "state": status["state"],
        "tasks": f"{progress['done']} of {progress['total']}",
        "where": note(status) or "–",
        "seconds": f"{status['seconds']:.1f}",
    }
    if progress.get("grid"):
        rows["worst residual / tolerance"] = f"{progress['worst_ratio']:.2g}"
        rows["moved"] = f"{progress['bytes_moved'] / 1e6:.1f} MB"
    if status["error"]:
        rows["error"] = status["error"]
    cells = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(str(v))}</td></tr>" for k, v in rows.items())
    return (
        f"<b>Job {html.escape(status['name'])}</b>"
        f'<div style="border:1px solid #888;width:20em;height:0.8em"><div style="background:#4a8;height:100%;'
        f'width:{share}%"></div></div><table>{cells}</table>'
    )
