"""Generated pages: ``docs/operators.md``, the catalogue as a table. ``make docs`` writes them, a test compares them."""

from __future__ import annotations

from pathlib import Path

from goblin_dask.graphs.operators import CATALOGUE

HERE = Path(__file__).parent


def operators() -> str:
    """The page of the catalogue."""
    lines = [
        "# Operators",
        "",
        f"The catalogue has {len(CATALOGUE)} operators; a volunteer computes nothing else. This page is generated from",
        "their declarations (`make docs`).",
        "",
        "| operator | what it gives | kinds | operands | attributes | check |",
        "|---|---|---|---|---|---|",
    ]
    for name, operator in sorted(CATALOGUE.items()):
        kinds = ", ".join(sorted(kind.name.lower() for kind in operator.kinds))
        attributes = ", ".join(f"`{attribute}`" for attribute in operator.attributes) or "–"
        operands = "any" if operator.arity is None else str(operator.arity)
        lines.append(f"| `{name}` | {operator.summary} | {kinds} | {operands} | {attributes} | {operator.check} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    (HERE / "operators.md").write_text(operators())


if __name__ == "__main__":
    main()
