"""Plans and rounds as text, for terminals, logs and notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from goblin_dask.training.plan import Plan

_TEXTS = ("stage", "task")
"""Columns that are no numbers."""
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def amount(value: float, unit: str) -> str:
    """A quantity in a few characters: ``1.23 MB``."""
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_PREFIXES[power]}{unit}"


def counted(number: int, one: str, several: str = "") -> str:
    """A number of things: ``1 task``, ``2 tasks``."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def text_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns beside each other, without lines or colours."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if head in _TEXTS else cell.rjust(width)
            for head, cell, width in zip(heads, row, widths, strict=True)
        )
        for row in [heads, *rows]
    ]
    return "\n".join(line.rstrip() for line in lines)


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for notebooks."""
    head = "".join(f"<th>{html.escape(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


# --- plans ------------------------------------------------------------------------------------------------------------
def plan_text(plan: Plan) -> str:
    """A plan as its table, its sums, and the first and last parameters of each stage."""
    lines = []
    for number, names in enumerate(plan.stages, 1):
        some = f"{names[0]} … {names[-1]}" if len(names) > 3 else ", ".join(names)
        lines.append(f"Stage {number} reads {counted(len(names), 'parameter')}{': ' * bool(some)}{some}.")
    return "\n".join([text_table(*_plan_table(plan)), "", *_plan_sentences(plan), *lines])


def plan_html(plan: Plan) -> str:
    """The same for notebooks, with all parameters."""
    names = "".join(
        f"<details><summary>Stage {number} reads {counted(len(names), 'parameter')}</summary>"
        f"{html.escape(', '.join(names))}</details>"
        for number, names in enumerate(plan.stages, 1)
    )
    sums = "<br>".join(map(html.escape, _plan_sentences(plan)))
    return f"{html_table(*_plan_table(plan))}<p>{sums}</p>{names}"


def _plan_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    heads = ["stage", "task", "operators", "work", "peak memory", "parameters", "reads", "gives", "tasks a round"]
    rows = []
    for each in plan.entries:
        sizes = [amount(size, "B") for size in (each.peak, each.parameters, each.reads, each.gives)]
        if plan.memory is not None:
            sizes[0] += f" ({each.peak / plan.memory:.0%})"
        number = f"{plan.micro_batches * each.copies * each.blocks:,}"
        rows.append(
            [str(each.stage + 1), each.title, f"{each.operators:,}", amount(each.flops, "FLOP"), *sizes, number]
        )
    return heads, rows


def _plan_sentences(plan: Plan) -> list[str]:
    copies = {each.copies for each in plan.entries}
    compared = f", each computed by {max(copies)} volunteers" if len(copies) == 1 and copies != {1} else ""
    if len(copies) > 1:
        compared = f", of which some are computed by {max(copies)} volunteers each"
    sentences = [
        f"A round is {counted(plan.micro_batches, 'micro-batch', 'micro-batches')}: "
        f"{counted(plan.tasks, 'task')}{compared}.",
        f"Work: {amount(plan.flops, 'FLOP')}; a micro-batch takes {plan.recomputation:.2f} times what it would if "
        "nothing were computed again on the way back.",
        f"Bytes moved: {amount(plan.moved(), 'B')}, or {amount(plan.moved(held=False), 'B')} if volunteers held no "
        "parameters for the round.",
    ]
    if plan.memory is not None:
        limit = f"volunteers with {amount(plan.memory, 'B')}"
        large = ", ".join(f"stage {each.stage + 1} {each.title}" for each in plan.too_large)
        sentences.append(f"Too large for {limit}: {large}." if large else f"Every task fits {limit}.")
    return sentences
