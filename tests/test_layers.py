"""Imports go down: the layer table of docs/design.md, held by reading every import (lazy ones too) of the package."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "goblin_dask"
DESIGN = ROOT / "docs" / "design.md"


def layer_table() -> dict[str, int]:
    """Module or package name directly under `goblin_dask` -> layer, from the table in the design page."""
    rows = re.findall(r"^\| L(\d) \| (.+?) \|", DESIGN.read_text(), flags=re.MULTILINE)
    table = {name: int(level) for level, names in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", names)}
    assert len(table) >= 12, f"the layer table of {DESIGN} was not found: got {table}"
    return table


def imports(path: Path) -> set[tuple[int, str]]:
    """(line, room) of each import of one of our own modules; room is the name directly under the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the absolute name"
            module = node.module or ""
            names = [f"{module}.{a.name}" for a in node.names] if module == "goblin_dask" else [module]
        else:
            continue
        found |= {(node.lineno, name.split(".")[1]) for name in names if name.startswith("goblin_dask.")}
        found -= {(node.lineno, "__version__")}
    return found


def test_imports_go_down():
    table = layer_table()
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue  # the root's lazy public names
        assert room in table, f"goblin_dask/{room} has no row in the layer table of docs/design.md"
        for line, other in imports(path):
            assert other in table, f"{path}:{line} imports goblin_dask.{other}, which has no layer"
            if other != room and table[other] >= table[room] and not (table[room] == 0 and table[other] == 0):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: L{table[room]} {room} imports L{table[other]} {other}")
    assert not wrong, "\n".join(wrong)


def test_dask_internals_are_kept_in_few_files():
    """Private names of Dask are touched only in files named so, where the next release of Dask can break them."""
    private = re.compile(r"(?:from|import) (?:dask|distributed)(?:\.\w+)*\._|(?:dask|distributed)\._\w+")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if "internals" not in path.name
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_are_not_too_long():
    """Near 300 lines, looked at again at 500."""
    sizes = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    long = {str(path.relative_to(ROOT)): n for path, n in sizes.items() if n > 500}
    assert not long, long
