"""What a module `ext` lists for the extensions of its package, as the type checker sees it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def imports(path: Path) -> list[ast.ImportFrom]:
    """Return the statements `from … import …` of a file."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]


def listed(root: Path) -> dict[str, str]:
    """Return the names that the type checker sees, with the modules that they are said to come from."""
    return {
        alias.name: node.module or ""
        for node in imports(root / "ext.py")
        if node.level == 1
        for alias in node.names
        if alias.asname == alias.name
    }


def check_names(ext: ModuleType, root: Path) -> None:
    """Compare what the type checker sees with what is imported."""
    assert listed(root) == ext._MODULES
    for name, module in listed(root).items():
        place = importlib.import_module(f"{ext.__package__}.{module}".rstrip("."))
        assert getattr(ext, name) is getattr(place, name)


def used_names(extensions: Iterable[Path]) -> set[str]:
    """Return the names that extensions import from `ext`."""
    return {alias.name for path in extensions for node in imports(path) if node.module == "ext" for alias in node.names}
