"""A state of training as a Zarr group: arrays as arrays, all else as JSON.

A new state is written beside the old one and becomes the current one by one write of the group's attributes, so that
whoever is killed meanwhile leaves a state that is whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr

from goblin_dask.errors import InputError
from goblin_dask.graphs.capture.torch_internals import to_numpy, to_tensor

VERSION = 1
NAME = "goblin_training"
"""Attribute of the group that tells where the current state is."""


def save(path: str | Path, state: dict[str, Any]) -> None:
    """Write a state: dicts, lists, tuples, numbers, texts and tensors."""
    root = zarr.open_group(str(path), mode="a")
    before = dict(root.attrs.get(NAME, {}))
    number = int(before.get("state", 0)) + 1
    name = f"state-{number}"
    arrays: list[torch.Tensor] = []
    tree = _plain(state, arrays)
    group = root.create_group(name, overwrite=True)
    for index, tensor in enumerate(arrays):
        array = to_numpy(tensor)
        if array.dtype.name == "bfloat16":
            array = array.view(np.uint16)
        group.create_array(f"array-{index}", data=array)
    group.attrs["tree"] = tree
    group.attrs["bfloat16"] = [i for i, tensor in enumerate(arrays) if tensor.dtype == torch.bfloat16]
    root.attrs[NAME] = {"version": VERSION, "state": number}
    for other in list(root.group_keys()):
        if other != name and other.startswith("state-"):
            del root[other]


def load(path: str | Path) -> dict[str, Any]:
    """Read the current state.

    Raises
    ------
    InputError
        When there is none, or one of a later version.
    """
    try:
        root = zarr.open_group(str(path), mode="r")
    except (FileNotFoundError, KeyError, ValueError) as error:
        raise InputError(f"there is no state of training at {path}") from error
    found: Any = root.attrs.get(NAME)
    if not isinstance(found, dict):
        raise InputError(f"{path} is a Zarr group, but holds no state of training")
    if found["version"] > VERSION:
        raise InputError(f"the state of training at {path} is of a later version of goblin-dask: {found['version']}")
    group: Any = root[f"state-{found['state']}"]
    halves = set(group.attrs["bfloat16"])
    arrays = []
    for index in range(len(list(group.array_keys()))):
        tensor = to_tensor(group[f"array-{index}"][...])
        arrays.append(tensor.view(torch.bfloat16) if index in halves else tensor)
    state: dict[str, Any] = _filled(group.attrs["tree"], arrays)
    return state


def _plain(value: Any, arrays: list[torch.Tensor]) -> Any:
    """JSON: containers are pairs of their kind and their items, for keys may be numbers and tuples are not lists."""
    if isinstance(value, torch.Tensor):
        arrays.append(value)
        return ["array", len(arrays) - 1]
    if isinstance(value, dict):
        return ["dict", [[_plain(key, arrays), _plain(each, arrays)] for key, each in value.items()]]
    if isinstance(value, (list, tuple)):
        return ["tuple" if isinstance(value, tuple) else "list", [_plain(each, arrays) for each in value]]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, np.floating)):
        return ["float", float(value).hex()]
    if isinstance(value, np.integer):
        return int(value)
    raise InputError(f"the state of training holds a {type(value).__name__}, which cannot be kept")


def _filled(tree: Any, arrays: list[torch.Tensor]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, value = tree
    match kind:
        case "array":
            return arrays[value]
        case "float":
            return float.fromhex(value)
        case "dict":
            return {_filled(key, arrays): _filled(each, arrays) for key, each in value}
        case "tuple":
            return tuple(_filled(each, arrays) for each in value)
        case _:
            return [_filled(each, arrays) for each in value]
