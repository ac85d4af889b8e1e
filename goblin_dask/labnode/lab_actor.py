"""`LabActor`: an actor in the laboratory, as the researcher who started it has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from goblin_dask.errors import InputError
from goblin_dask.labnode import parcels
from goblin_dask.labnode.line import Releases
from goblin_dask.labnode.residents import ActorRef

if TYPE_CHECKING:
    from goblin_dask.labnode.client import Lab


class LabActor(Releases):
    """An actor in the laboratory. Thread-safe; a context manager, which releases it at the end.

    It lives until it is released, as `goblin_dask.labnode.residents` tells. Pickled, as an argument of a task for
    instance, it is an `ActorRef`, by which a task that runs in the laboratory calls the very same actor.

    Parameters
    ----------
    lab : Lab
    key : str
        Of an actor that was started, by whomever.
    """

    def __init__(self, lab: Lab, key: str):
        self.lab, self.key = lab, key

    @classmethod
    def start(cls, lab: Lab, kind: Callable[..., Any], args: tuple[Any, ...], name: str = "") -> LabActor:
        """Start one, as `Lab.actor` does."""
        pieces = _packed((kind, args, name), f"the actor {getattr(kind, '__qualname__', kind)}")
        with lab._line.response("POST", "/actors", pieces, once=True) as response:
            return cls(lab, json.loads(response.read())["key"])

    def __repr__(self) -> str:
        return f"<LabActor {self.key}>"

    def __reduce__(self) -> tuple[type[ActorRef], tuple[str]]:
        return ActorRef, (self.key,)

    def __dask_tokenize__(self) -> tuple[str, str]:
        return "goblin-actor", self.key

    def call(self, method: str, *args: Any) -> Any:
        """Call a method and wait for what it returns.

        Arrays are sent from where they lie and received where they stay. A call is sent once: after `ConnectionLost`
        it may have been done or not.

        Raises
        ------
        ActorLost
            When the actor is not there any more.
        ConnectionLost
            When the lab node is not.
        Exception
            Whatever the method raises.
        """
        pieces = _packed(args, f"an argument of {method}")
        path = f"/actors/{quote(self.key, safe='')}/{quote(method, safe='')}"
        with self.lab._line.response("POST", path, pieces, once=True) as response:
            return parcels.read(response)

    def release(self) -> None:
        """Let go of it, and of what it holds; one that is gone already is no error."""
        self.lab._line.request("DELETE", f"/actors/{quote(self.key, safe='')}")


def _packed(value: Any, what: str) -> parcels.Pieces:
    try:
        return parcels.pack(value)
    except Exception as error:
        raise InputError(f"{what} cannot be sent to the lab node, for it cannot be pickled: {error}") from error
