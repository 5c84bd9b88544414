"""Data flows one way: which module may import which, and what must never be loaded early."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchgdu

TORCH_FREE = {"groups", "config", "options", "shapes"}
SOURCE = Path(torchgdu.__file__).parent


def documented() -> dict[str, set[str]]:
    """Return the table of docs/layout.md: each module and what it may import, in its order."""
    layout = (SOURCE.parents[1] / "docs" / "layout.md").read_text(encoding="utf-8")
    table: dict[str, set[str]] = {}
    for line in layout.splitlines():
        if line.startswith("| `") and line.count("|") == 4:
            name, names, _ = (cell.strip() for cell in line.strip("|").split("|"))
            table[name.strip("`")] = {part.strip("`") for part in names.split(", ")} - {"–"}
    return table


ALLOWED = documented()


def top_level_imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """All imports but those for type checkers only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    return [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]


def imported(path: Path) -> set[str]:
    """Return the modules of torchgdu that ``path`` imports, anywhere in it."""
    found: set[str] = set()
    for node in top_level_imports(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = (
                [alias.name for alias in node.names]
                if node.module == "torchgdu"
                else [f"{node.module}".removeprefix("torchgdu.")]
                if f"{node.module}".startswith("torchgdu.")
                else []
            )
        else:
            names = [
                alias.name.removeprefix("torchgdu.")
                for alias in node.names
                if alias.name.startswith("torchgdu.")
            ]
        found |= {name.split(".")[0] for name in names}
    return found


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path.name != "__main__.py")


def room(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return "contents" if parts == ("__init__",) else parts[0]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_flow_one_way(path: Path) -> None:
    name = room(path)
    if name in ("contents", "cli"):
        return  # the table of contents and the command line load everything, late
    assert name in ALLOWED, f"{path.name} has no row in the table: see docs/layout.md"
    inner = {name} if path.parent != SOURCE else set()
    extra = imported(path) - ALLOWED[name] - inner
    assert not extra, f"{path.name} may not import {sorted(extra)}"


def test_the_table_points_one_way_and_is_complete() -> None:
    above: set[str] = set()
    for name, names in ALLOWED.items():
        if name != "cli":
            assert names <= above, f"{name} imports from below: {sorted(names - above)}"
        above.add(name)
    assert above == {room(path) for path in modules()} - {"contents"}


def test_the_core_is_as_narrow_as_promised() -> None:
    """The rows that carry the design; the others may grow as long as they point upwards."""
    assert ALLOWED["groups"] == ALLOWED["tasks"] == set()
    assert ALLOWED["functional"] == {"groups"}
    assert ALLOWED["ops"] == {"functional"}
    assert "functional" not in ALLOWED["layers"] | ALLOWED["cells"] | ALLOWED["parameters"]
    assert ALLOWED["models"] == {"layers"}
    assert ALLOWED["paper"] == {"config"}


def test_only_ops_loads_the_engine() -> None:
    for path in modules():
        names = {
            alias.name.split(".")[0]
            for node in top_level_imports(path)
            for alias in node.names
            if isinstance(node, ast.Import)
        }
        assert "ctypes" not in names or room(path) == "ops", path


@pytest.mark.parametrize("name", sorted(TORCH_FREE))
def test_starts_without_torch(name: str) -> None:
    code = (
        f"import sys, torchgdu.{name}; assert 'torch' not in sys.modules and "
        "'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_contents_are_complete_and_real() -> None:
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        for line in node.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    assert set(torchgdu._HOME) <= typed
    for name in torchgdu.__all__:
        assert getattr(torchgdu, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'GDV'"):
        _ = torchgdu.GDV
