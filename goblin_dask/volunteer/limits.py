"""What the owner of a lent machine allows: ``goblin.volunteer.*`` of the configuration."""

from __future__ import annotations

import datetime
import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from goblin_dask import config
from goblin_dask.errors import InputError

_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds set by the owner."""

    memory: int
    """Bytes that tasks may take together."""
    cache: int
    """Bytes of fetched blobs that are kept."""
    threads: int
    prefetch: int = 1
    hours: tuple[datetime.time, datetime.time] | None = None
    """From, to; may go over midnight."""
    busy: float | None = None
    """Share of the CPUs, used by others, above which no work is begun."""

    @classmethod
    def configured(cls, *, threads: int, memory: int) -> Limits:
        """From the configuration; `threads` and `memory` are the worker's own.

        Raises
        ------
        InputError
            For a value that cannot be meant.
        """
        memory = min(config.get_bytes("volunteer.memory") or int(0.8 * memory), int(0.9 * total_memory()))
        threads = _whole("threads", config.get("volunteer.threads", None) or threads, 1)
        busy = config.get("volunteer.busy")
        if busy is not None and not 0 < float(busy) <= 1:
            raise InputError(f"goblin.volunteer.busy is {busy!r}; a share between 0 and 1 is needed")
        return cls(
            memory,
            config.get_bytes("volunteer.cache") or 0,
            threads,
            _whole("prefetch", config.get("volunteer.prefetch"), 0),
            _hours(config.get("volunteer.hours")),
            None if busy is None else float(busy),
        )

    def closed(self, now: datetime.datetime, others: float) -> str:
        """Why no work may begin at this time, with others using this share of the CPUs; empty when it may."""
        if self.hours is not None:
            start, end = self.hours
            inside = start <= now.time() < end if start <= end else now.time() >= start or now.time() < end
            if not inside:
                return f"the owner lends this machine from {start:%H:%M} to {end:%H:%M} only"
        if self.busy is not None and others > self.busy:
            return f"the owner uses {others:.0%} of this machine; above {self.busy:.0%} it is not lent"
        return ""


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"goblin.volunteer.{name} is {value!r}; a whole number of at least {least} is needed")
    return value


def _hours(text: Any) -> tuple[datetime.time, datetime.time] | None:
    if text is None:
        return None
    match = _HOURS.fullmatch(str(text).strip())
    if match is None:
        raise InputError(f"goblin.volunteer.hours is {text!r}; two times are needed, such as 20:00-07:00")
    a, b, c, d = map(int, match.groups())
    return datetime.time(a, b), datetime.time(c, d)


def _control_group() -> tuple[int, int] | None:
    """Limit and use of the control group (a container's) in bytes, when it has one."""
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = (root / "memory.max").read_text().strip(), int((root / "memory.current").read_text())
        return None if limit == "max" else (int(limit), used)
    except (OSError, ValueError):
        return None


def total_memory() -> int:
    """Bytes of this machine, or of the container that it is."""
    group = _control_group()
    total = int(psutil.virtual_memory().total)
    return min(total, group[0]) if group else total


def data_is_limited() -> bool:
    """Whether the kernel refuses this process more than some bytes of data."""
    return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY


def free_memory() -> int:
    """Bytes that can be had now: another program may hold what was offered."""
    free = int(psutil.virtual_memory().available)
    group = _control_group()
    if group:
        free = min(free, group[0] - group[1])
    if data_is_limited():
        soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
        free = min(free, soft - psutil.Process().memory_info().data)
    return max(0, free)
