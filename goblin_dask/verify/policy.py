"""What a researcher may ask of verification, and what each answer is worth."""

from __future__ import annotations

import math
import random

from goblin_dask.errors import InputError
from goblin_dask.messages import CheckMethod, CheckReport, Policy, SubmitTask

COLLUDING = 0.01
"""Share of the other owners that is assumed to work together with the owner of a result: the chance of a partner who
agrees on a lie. Who knows better multiplies what a certificate says of replicas by the ratio."""

UNCHECKED = "unchecked"
"""Method of a result that ``sample`` accepted without a check."""

REPLICAS = 2
"""Copies that ``replicate`` compares."""


def parse(text: str | Policy) -> Policy:
    """Policy that a text means: ``auto``, ``recompute``, ``replicate`` or ``sample:p`` with ``0 < p <= 1``.

    Raises
    ------
    InputError
        For anything else.
    """
    if isinstance(text, Policy):
        return text
    if not isinstance(text, str):
        raise InputError(f"verify= takes a text such as 'auto' or 'sample:0.1', not {type(text).__name__}")
    name, colon, value = text.strip().partition(":")
    if name in ("auto", "recompute", "replicate") and not colon:
        return Policy(name)  # type: ignore[arg-type]
    if name == "sample":
        try:
            probability = float(value)
        except ValueError:
            probability = math.nan
        if 0.0 < probability <= 1.0:
            return Policy("sample", probability)
        raise InputError(
            f"verify={text!r}: the share of chunks to check must be a number above 0 and at most 1, as in 'sample:0.1'"
        )
    raise InputError(
        f"verify={text!r} is no policy; use 'auto', 'recompute', 'replicate' or 'sample:p', e.g. 'sample:0.1'"
    )


def written(policy: Policy) -> str:
    """The text that `parse` reads as this policy."""
    return f"sample:{policy.probability:g}" if policy.method == "sample" else policy.method


def checked(policy: Policy, *, share: float, rng: random.Random) -> bool:
    """Whether a result that has just been committed and handed in is checked before it is used.

    To be asked after the commitment only: a volunteer that could foresee the draw would lie on the others. With
    ``sample:p`` it is with probability `share`, for its host's sake: 1 for one that is new, or was ever proven wrong.
    The laboratory draws what is sampled among the others, while they are used (`goblin_dask.verify.sampling`).
    """
    return policy.method != "sample" or rng.random() < share


def order(policy: Policy, *, suspicious: bool) -> CheckMethod:
    """Method of a result's first check: trust changes which one, never whether."""
    return "recompute" if policy.method == "recompute" or suspicious else "auto"


def replicates(policy: Policy, task: SubmitTask) -> bool:
    """Whether another owner's replica is the first check of a task's results."""
    return policy.method == "replicate" or (policy.method == "auto" and task.heavy)


def may_replicate(policy: Policy, task: SubmitTask) -> bool:
    """Whether replicas of a task's results may have to be told apart."""
    return policy.method == "replicate" or (policy.method != "recompute" and task.heavy)


def alone(policy: Policy, *, suspicious: bool) -> CheckMethod:
    """Method of the check of a result that is to be replicated, and cannot be."""
    return "recompute" if policy.method == "replicate" else order(policy, suspicious=suspicious)


def demands_more(policy: Policy, method: str) -> bool:
    """Whether a result accepted by `method` does not yet satisfy `policy`."""
    return method == UNCHECKED and policy.method != "sample"


def miss(policy: Policy, report: CheckReport | None, audit: float = 0.0) -> float:
    """Upper bound of the probability that a wrong result is accepted like this one was.

    Parameters
    ----------
    report : CheckReport or None
        None when the result was accepted without a check.
    audit : float
        Probability with which a replica that agrees was recomputed.
    """
    if report is None:
        return 1.0 - policy.probability
    met = COLLUDING * (1.0 - audit) if report.method == "replicate" else 0.0
    return min(1.0, max(0.0, report.miss, met))


def undetected(probability: float, lies: int) -> float:
    """Probability that a volunteer with that many wrong results meets no check at all under ``sample``."""
    return float((1.0 - probability) ** lies)
