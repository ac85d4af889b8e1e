"""Placement: which tasks are worth sending to volunteers, and whether they fit one."""

from __future__ import annotations

from typing import Literal

from goblin_dask.errors import InputError, TooLarge
from goblin_dask.labnode.plan import Plan
from goblin_dask.labnode.price import TASK_SECONDS, Price, Prices, transfer_seconds
from goblin_dask.messages import GridOffer

Offload = Literal["auto", "always", "never"]


def place(plan: Plan, offer: GridOffer, offload: Offload = "auto", prices: Prices | None = None) -> Plan:
    """Decide for every grid task where it runs.

    Parameters
    ----------
    plan : Plan
        Changed in place, and returned.
    offer : GridOffer
        What the volunteers offer.
    offload : {"auto", "always", "never"}
        ``auto`` keeps a task in the laboratory when moving its bytes takes longer than doing its arithmetic there.

    Raises
    ------
    TooLarge
        When a task that is to go to the grid fits no volunteer.
    InputError
        For another `offload`.
    """
    if offload not in ("auto", "always", "never"):
        raise InputError(f'offload must be "auto", "always" or "never", got {offload!r}')
    prices = prices or Prices()
    for task in plan.grid:
        price = prices(task.program)
        task.reason = _reason(price, offer, offload)
        task.offload = not task.reason
        if task.offload and offer.memory and price.peak > offer.memory[0]:
            raise TooLarge(price.peak, offer.memory[0], "rechunk its operands into smaller blocks")
    return plan


def _reason(price: Price, offer: GridOffer, offload: Offload) -> str:
    """Why a task stays in the laboratory; empty when it does not."""
    if offload == "always":
        return ""
    if offload == "never":
        return 'offload="never"'
    if not offer.volunteers:
        return "there are no volunteers"
    if price.seconds <= transfer_seconds(price, offer) + TASK_SECONDS:
        return "moving its data takes longer than computing it"
    return ""
