"""Bisection: two owners' results of one program differ. At which node do they part, and who is wrong there?

Both sides have committed to their results before they knew that somebody else has the same task. Now that they differ,
both compute them again and commit to the digests of the values of all nodes, before either knows where it is asked:
whoever has lied cannot name values that lead from the inputs to its results without a lie at some node. Cut by cut,
halfway between one at which they agree and one at which they differ, both reveal what is live there and a validator
compares it by the sigma rule (or finds the same digests, and nothing is moved). What is left is one node, of which both
have revealed operands and results: a validator checks it for either side. Who is wrong there is proven wrong, whatever
went before; who is right there may have been wrong elsewhere, and waits for another partner.

The idea is Canetti, Riva and Rothblum's refereed delegation of computation (2011), with tensors for words.
"""

from __future__ import annotations

from dataclasses import dataclass

from goblin_dask import messages as m
from goblin_dask.digest import Digest, is_digest
from goblin_dask.graphs.outline import Outline
from goblin_dask.graphs.program import encode
from goblin_dask.verify.commitments import mismatch
from goblin_dask.verify.effects import Attempt, Question

Refs = tuple[m.BlobRef, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """This side has to reveal what is live at a cut; at the last one, the digests of all values."""

    attempt: Attempt
    cut: int


@dataclass(frozen=True, slots=True)
class Compare:
    """A validator has to compare both sides' values."""

    question: Question


@dataclass(frozen=True, slots=True)
class Settle:
    """A validator has to check one node of either side."""

    questions: tuple[Question, Question]


Move = Ask | Compare | Settle

WIDEST = 64
"""Values that are revealed at a time; a program with more of them live at some cut is not bisected."""


class Dispute:
    """The state of one bisection.

    Parameters
    ----------
    outline : Outline
        Of the program; of two nodes at least.
    inputs : tuple of BlobRef
        The task's.
    pair : pair of Attempt
        With outputs.
    """

    def __init__(self, outline: Outline, inputs: Refs, pair: tuple[Attempt, Attempt]):
        self.outline, self.inputs, self.pair = outline, inputs, pair
        self.agree, self.differ = 0, outline.nodes
        """Cuts at which the sides agree, and at which they do not."""
        self.cut = (self.agree + self.differ) // 2
        """The cut that is being looked at."""
        self.verdicts: dict[str, m.CheckReport] = {}
        """Of the node, for either side."""
        self._asked: set[tuple[str, int]] = set()
        self._digests: dict[str, tuple[Digest, ...]] = {}
        self._values: dict[str, dict[int, Refs]] = {one.name: {0: (), outline.nodes: self._final(one)} for one in pair}

    @staticmethod
    def possible(outline: Outline) -> bool:
        """Whether there is anything between a program's inputs and its outputs, and not too much."""
        return outline.nodes > 1 and all(len(outline.live(cut)) <= WIDEST for cut in range(outline.nodes + 1))

    def _final(self, attempt: Attempt) -> Refs:
        place = {value: number for number, value in enumerate(self.outline.program.outputs)}
        return tuple([attempt.outputs[place[value]] for value in self.outline.live(self.outline.nodes)])

    # --- facts ------------------------------------------------------------------------------------------------------
    def revealed(self, attempt: Attempt, cut: int, outputs: Refs, digests: tuple[Digest, ...]) -> str:
        """A side says what its values at a cut are, or all of them; why that does not hold, or empty."""
        outline, first = self.outline, len(self.outline.program.inputs)
        whole = cut == outline.nodes
        values = outline.program.outputs if whole else outline.live(cut)
        if reason := mismatch(outputs, outline.specs(values)):
            return f"what it revealed: {reason}"
        if whole and not (len(digests) == outline.values and all(map(is_digest, digests))):
            return f"it did not reveal the digests of {outline.values} values"
        if whole and [ref.digest for ref in outputs] != [ref.digest for ref in attempt.outputs]:
            return "it does not compute the same results again"
        known = digests if whole else self._digests[attempt.name]
        if any(
            ref.digest != known[value - first] for value, ref in zip(values, outputs, strict=True) if value >= first
        ):
            return "it does not compute the same values again"
        if whole:
            self._digests[attempt.name] = digests
        else:
            self._values[attempt.name][cut] = outputs
        return ""

    def compared(self, agreed: bool) -> None:
        """The validator has compared the values at the cut."""
        self._narrow(agreed)

    # --- what follows -----------------------------------------------------------------------------------------------
    def moves(self) -> list[Move]:
        """What is needed now; empty while an answer is awaited from one side."""
        if len(self._digests) < len(self.pair):
            return self._ask([one for one in self.pair if one.name not in self._digests], self.outline.nodes)
        while self.differ - self.agree > 1 and self._same(self.cut):
            self._narrow(True)
        if self.differ - self.agree == 1:
            self.cut = self.agree
        missing = [one for one in self.pair if self.cut not in self._values[one.name]]
        if missing:
            return self._ask(missing, self.cut)
        if self.differ - self.agree == 1:
            one, other = self.pair
            return [Settle((self._node(one), self._node(other)))]
        outputs, replica = (self._values[side.name][self.cut] for side in self.pair)
        return [Compare(Question(self.inputs, outputs, replica, self.outline.live(self.cut)))]

    def _ask(self, sides: list[Attempt], cut: int) -> list[Move]:
        asked = [Ask(one, cut) for one in sides if (one.name, cut) not in self._asked]
        self._asked.update((ask.attempt.name, cut) for ask in asked)
        return list(asked)

    def _narrow(self, agreed: bool) -> None:
        if agreed:
            self.agree = self.cut
        else:
            self.differ = self.cut
        self.cut = (self.agree + self.differ) // 2

    def _same(self, cut: int) -> bool:
        """Whether both sides committed to the same bits at a cut."""
        one, other = (self._digests[side.name] for side in self.pair)
        first = len(self.outline.program.inputs)
        return all(one[value - first] == other[value - first] for value in self.outline.live(cut))

    def _node(self, attempt: Attempt) -> Question:
        program, operands, results = self.outline.node(self.agree)
        held = self._values[attempt.name]
        values = dict(enumerate(self.inputs))
        values |= dict(zip(self.outline.live(self.agree), held[self.agree], strict=True))
        values |= dict(zip(self.outline.live(self.differ), held[self.differ], strict=True))
        return Question(
            tuple([values[value] for value in operands]), tuple([values[value] for value in results]),
            encoded=encode(program),
        )  # fmt: skip

    @property
    def refs(self) -> dict[str, int]:
        """Blobs that have been revealed, with their sizes."""
        return {ref.digest: ref.nbytes for held in self._values.values() for refs in held.values() for ref in refs}
