"""Zarr arrays that a job writes: all of one or nothing of it.

Blocks are written into an array beside the one that is meant, which takes its place when the last block is there and
the certificate is written. So a job that fails leaves nothing, and an array that is replaced is whole until then.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import LocalStore

from goblin_dask.errors import InputError, StoreError
from goblin_dask.graphs.capture.dask_internals import Task
from goblin_dask.labnode.jobs import Target
from goblin_dask.labnode.plan import Key, LabTask, Plan, Region
from goblin_dask.messages import ArraySpec
from goblin_dask.store.arrays import certify, create_array


class Writing:
    """One target while its job runs. Makes the array, and adds the tasks that write it to the plan."""

    def __init__(self, target: Target, plan: Plan):
        self._target = target
        self._final = self._location()
        shape = tuple(sum(lengths) for lengths in target.chunks)
        chunks = tuple(lengths[0] if lengths else 1 for lengths in target.chunks)
        self._aside = self._final.with_name(f".{self._final.name}.{secrets.token_hex(4)}") if self._final else None
        if self._final is not None and self._final.exists() and not target.overwrite:
            raise InputError(f"{self._final} is there already: choose another path, or pass overwrite=True")
        spec = ArraySpec(shape, target.dtype)
        try:
            if self._aside is not None:
                self._aside.parent.mkdir(parents=True, exist_ok=True)
                self.array = create_array(self._aside, spec, chunks, **target.options)
            else:
                self.array = create_array(
                    target.store, spec, chunks, path=target.path, overwrite=target.overwrite, **target.options
                )
        except OSError as error:
            raise InputError(f"{self._final or target.store} cannot be written ({error.strerror}): check it") from error
        plan.lab.extend(self._tasks())
        plan.keys = tuple(task.key for task in plan.lab if task.kind == "sink" and _is_ours(task.key))

    def _location(self) -> Path | None:
        """Directory of the array, where it is one of this machine."""
        store = self._target.store
        if isinstance(store, LocalStore):
            store = store.root
        if isinstance(store, Store) or (isinstance(store, str) and "://" in store):
            return None
        return Path(store) / self._target.path if self._target.path else Path(store)

    def _tasks(self) -> list[LabTask]:
        starts = [[sum(lengths[:i]) for i in range(len(lengths))] for lengths in self._target.chunks]
        tasks = []

        def visit(keys: Any, index: tuple[int, ...]) -> None:
            if isinstance(keys, list):
                for position, each in enumerate(keys):
                    visit(each, (*index, position))
                return
            region = tuple(
                slice(starts[axis][i], starts[axis][i] + self._target.chunks[axis][i]) for axis, i in enumerate(index)
            )
            key = ("goblin-write", index)
            node = Task(key, _never)
            tasks.append(LabTask(key, node, (keys,), "sink", region=Region(self.array, region)))

        visit(self._target.keys, ())
        return tasks

    def finish(self, certificate: dict[str, Any]) -> None:
        """Everything is written: certify it and put it where it is meant to be."""
        certify(self.array, certificate)
        if self._aside is None or self._final is None:
            return
        try:
            if self._final.exists():
                old = self._final.with_name(f".{self._final.name}.{secrets.token_hex(4)}")
                self._final.rename(old)
                self._aside.rename(self._final)
                shutil.rmtree(old)
            else:
                self._aside.rename(self._final)
        except OSError as error:
            raise StoreError(f"{self._final} could not be put in its place ({error.strerror})") from error

    def abandon(self) -> None:
        """Leave nothing behind."""
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
        else:
            sync(self.array.store_path.delete_dir())


def _is_ours(key: Key) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and key[0] == "goblin-write"


def _never() -> None:
    raise AssertionError("a block is written by reference, its task is never called")
