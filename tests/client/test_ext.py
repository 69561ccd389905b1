"""The line between the library's kernel and its extensions: what membroker.ext lists is what there is, and is used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import membroker
from membroker import ext

ROOT = Path(membroker.__file__).parent
EXTENSIONS = [path for name in ("kv", "cli", "adapters", "managed") for path in sorted(ROOT.glob(f"{name}/**/*.py"))]
EXTENSIONS += [ROOT / "shared_pool.py"]


def imports(path: Path) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]


def listed() -> dict[str, str]:
    """The names that the type checker sees, with the modules that they are said to come from."""
    return {
        alias.name: node.module or ""
        for node in imports(ROOT / "ext.py")
        if node.level == 1
        for alias in node.names
        if alias.asname == alias.name
    }


def test_the_type_checker_sees_what_is_imported() -> None:
    assert listed() == ext._MODULES
    for name, module in listed().items():
        place = importlib.import_module(f"membroker.{module}".rstrip("."))
        assert getattr(ext, name) is getattr(place, name)


def test_there_is_no_other_name() -> None:
    with pytest.raises(ImportError, match="Session"):
        exec("from membroker.ext import Session")


def test_each_name_is_used_by_an_extension() -> None:
    used = {alias.name for path in EXTENSIONS for node in imports(path) if node.module == "ext" for alias in node.names}
    assert used == set(listed())


def test_a_command_begins_without_the_library() -> None:
    """It has descriptors 0 to 2, and ends quietly on Ctrl-C, before anything slow is imported."""
    script = "import membroker.cli, sys; print(*sorted(name for name in sys.modules if name.startswith('membroker')))"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert found.stdout.split() == [
        "membroker",
        "membroker.cli",
        "membroker.ext",
        "membroker.wire",
        "membroker.wire.standard",
    ]
