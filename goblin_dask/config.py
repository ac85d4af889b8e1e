"""Configuration: `goblin.yaml` under ``goblin`` in Dask's own configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.config
from dask.utils import parse_bytes, parse_timedelta

from goblin_dask.errors import InputError

_MISSING = object()


def load_defaults() -> None:
    """Put the defaults of `goblin.yaml` below whatever the user has configured."""
    for defaults in dask.config.collect_yaml([str(Path(__file__).parent / "goblin.yaml")]):
        dask.config.update_defaults(defaults)


def get(name: str, override: Any = None) -> Any:
    """Value of ``goblin.<name>``, or `override` where that is not None.

    Raises
    ------
    InputError
        For a name that `goblin.yaml` does not have.
    """
    if override is not None:
        return override
    value = dask.config.get(f"goblin.{name}", _MISSING)
    if value is _MISSING:
        raise InputError(f"there is no configuration goblin.{name}; goblin.yaml lists what there is")
    return value


def need(name: str, override: Any, hint: str) -> Any:
    """Like `get`, for what must be given.

    Raises
    ------
    InputError
        When it is given nowhere; `hint` says how.
    """
    value = get(name, override)
    if value is None:
        raise InputError(f"goblin.{name} is not set: {hint}")
    return value


def get_bytes(name: str, override: Any = None) -> int | None:
    """A number of bytes, written as Dask's are (``2GB``)."""
    value = get(name, override)
    try:
        return None if value is None else int(parse_bytes(value))
    except ValueError as error:
        raise InputError(f"goblin.{name} is {value!r}; a number of bytes is needed, such as 2GB") from error


def get_seconds(name: str, override: Any = None) -> float:
    """A time, written as Dask's are (``60s``)."""
    value = get(name, override)
    try:
        return float(parse_timedelta(value))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"goblin.{name} is {value!r}; a time is needed, such as 60s") from error


load_defaults()
