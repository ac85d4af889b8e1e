"""Certificates: how the parts of a finished array, or of a whole job, were verified."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from goblin_dask.messages import Verdict
from goblin_dask.verify.policy import COLLUDING, UNCHECKED

LABORATORY = "laboratory"
"""Method of parts that the laboratory computed itself."""

LISTED = 1000
"""Parts that a certificate names one by one; with more, it counts them."""

REPLICATED = f"at most {COLLUDING:.0%} of the other owners work together with the owner of a replicated result"

VERSION = 1


@dataclass(slots=True)
class _Method:
    parts: int = 0
    volunteers: set[str] = field(default_factory=set)
    worst_ratio: float = 0.0
    miss: float = 0.0
    """Largest of any part."""
    miss_any: float = 0.0
    """Sum over the parts: bounds the probability that any of them is wrong unnoticed."""
    rejected: int = 0
    check_seconds: float = 0.0
    compute_seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    flops: float = 0.0
    spent: float = 0.0
    names: list[str] = field(default_factory=list)

    def merge(self, other: _Method) -> None:
        self.parts += other.parts
        self.volunteers |= other.volunteers
        self.worst_ratio = max(self.worst_ratio, other.worst_ratio)
        self.miss = max(self.miss, other.miss)
        self.miss_any += other.miss_any
        self.rejected += other.rejected
        self.check_seconds += other.check_seconds
        self.compute_seconds += other.compute_seconds
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out
        self.flops += other.flops
        self.spent += other.spent
        self.names += other.names


class Certificate:
    """How each part was verified: method, distinct volunteers, worst residual over tolerance, miss probability.

    Parameters
    ----------
    policy : str
        How the researcher asked for it to be verified.
    """

    def __init__(self, policy: str = "auto") -> None:
        self._policy = policy
        self._methods: dict[str, _Method] = {}

    def add(self, verdict: Verdict, part: str = "") -> None:
        """Add one verified part, with its name within the array (``0.3``) where it has one."""
        method = self._methods.setdefault(verdict.method, _Method())
        method.merge(
            _Method(
                1, set(verdict.volunteers), verdict.ratio, verdict.miss, verdict.miss,
                verdict.rejected, verdict.check_seconds, verdict.compute_seconds, verdict.bytes_in, verdict.bytes_out,
                verdict.flops, verdict.spent, [part] if part else [],
            )
        )  # fmt: skip

    def add_laboratory(self, parts: int = 1, names: tuple[str, ...] = ()) -> None:
        """Add parts that the laboratory computed itself: nobody had to be trusted."""
        self._methods.setdefault(LABORATORY, _Method()).merge(_Method(parts, names=list(names)))

    def merge(self, other: Certificate) -> None:
        """Take over the parts of another certificate."""
        for name, method in other._methods.items():
            self._methods.setdefault(name, _Method()).merge(method)

    @property
    def parts(self) -> int:
        """Number of parts."""
        return sum(method.parts for method in self._methods.values())

    @property
    def volunteers(self) -> int:
        """Number of distinct volunteers whose results are in it."""
        return len(set().union(*(method.volunteers for method in self._methods.values())))

    @property
    def worst_ratio(self) -> float:
        """Worst residual over its tolerance, of all parts."""
        return max((method.worst_ratio for method in self._methods.values()), default=0.0)

    @property
    def complete(self) -> bool:
        """Whether every part was checked, or computed in the laboratory."""
        return UNCHECKED not in self._methods

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, for Zarr attributes. Volunteers are counted, not named."""
        methods: dict[str, dict[str, Any]] = {}
        for name, method in sorted(self._methods.items()):
            methods[name] = {
                "parts": method.parts,
                "volunteers": len(method.volunteers),
                "worst_ratio": method.worst_ratio,
                "miss_probability": method.miss,
                "miss_probability_any": min(1.0, method.miss_any),
                "rejected": method.rejected,
                "check_seconds": round(method.check_seconds, 6),
                "compute_seconds": round(method.compute_seconds, 6),
                "bytes_in": method.bytes_in,
                "bytes_out": method.bytes_out,
                "flops": method.flops,
                "flops_spent": method.spent,
            }
            if method.names and self.parts <= LISTED:
                methods[name]["names"] = sorted(method.names)
        assumptions = [REPLICATED] if "replicate" in methods else []
        return {
            "version": VERSION,
            "policy": self._policy,
            "assumptions": assumptions,
            "parts": self.parts,
            "volunteers": self.volunteers,
            "worst_ratio": self.worst_ratio,
            "complete": self.complete,
            "summary": self.summary(),
            "methods": methods,
        }

    def summary(self) -> str:
        """A few words for a person."""
        if not self._methods:
            return "nothing was computed"
        ways = ", ".join(
            f"{method.parts} {name}" for name, method in sorted(self._methods.items(), key=lambda item: -item[1].parts)
        )
        text = f"{self.parts} {'part' if self.parts == 1 else 'parts'}: {ways}"
        if self.volunteers:
            word = "volunteer" if self.volunteers == 1 else "volunteers"
            text += f"; {self.volunteers} {word}; worst residual {self.worst_ratio:.2g} of its tolerance"
            text += f"; probability of an unnoticed error at most {self._miss()}"
        return text

    def _miss(self) -> str:
        """In all parts together; in each, where their number makes that a bound of nothing."""
        together = sum(method.miss_any for method in self._methods.values())
        if together < 1:
            return f"{together:.2g}"
        return f"{max(method.miss for method in self._methods.values()):.2g} in each part"

    def __repr__(self) -> str:
        return f"<Certificate: {self.summary()}>"
