"""Count accesses to private attributes of other objects, and fail if there are any: `python -m tools.private_access`.

A private name begins with one underscore. Only the module that defines it may use it on another object than `self`, as
an attribute, by `getattr` or by an import: what another module needs gets a public name, and a docstring. ALLOWED lists
what other people's packages and the standard library offer in no other way, each with its reason.

It does not know types: a name that two modules define may be used by both on the objects of each other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("client/membroker", "broker/membrokerd")
_TORCH = "torch has no public name for it; tests/gpu and tests/adapters run it with the versions that are supported"
_ENGINE = "the engine has no public name for it; kv/*/seams.py compares it with the engine that is installed"
ALLOWED: Mapping[str, Mapping[str, str]] = {
    "": {
        "_exit": "os documents it",
        "_getframe": "sys documents it",
        "_replace": "namedtuple documents it, and has the underscore so that a field can have the name",
    },
    "client/membroker/adapters/torch/memory.py": dict.fromkeys(
        (
            "_C",
            "_accelerator_setAllocatorSettings",
            "_cuda_clearCublasWorkspaces",
            "_cuda_customAllocator",
            "_set_allocator_settings",
            "_snapshot",
        ),
        _TORCH,
    ),
    "client/membroker/adapters/torch/mempool.py": dict.fromkeys(
        ("_C", "_cuda_beginAllocateToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"), _TORCH
    ),
    "client/membroker/adapters/torch/modules.py": dict.fromkeys(
        ("_buffers", "_non_persistent_buffers_set", "_parameters"), _TORCH
    ),
    "client/membroker/cli/commands.py": {
        "_SubParsersAction": "argparse has no public name for what add_subparsers returns",
        "_option_string_actions": "argparse lists a parser's options nowhere else",
    },
    "client/membroker/interrupts.py": {"_is_owned": "threading.Condition asks a lock by it, and RLock has no other"},
    "client/membroker/kv/sglang/": dict.fromkeys(
        ("_evict_device_leaf", "_patched"),
        _ENGINE,
    ),
    "client/membroker/kv/vllm/swap.py": {"_custom_ops": _ENGINE},
    "client/membroker/kv/vllm/processed.py": dict.fromkeys(("_buffers", "_parameters"), _TORCH),
    "client/membroker/kv/vllm/weights.py": {"_schema": _TORCH},
}
"""By the beginning of the file's path: the names that may be used there, and why."""


def is_private(name: object) -> bool:
    """Return whether this is a private name. Names with two underscores are Python's own protocols."""
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name.isidentifier()


def defined(tree: ast.Module) -> set[str]:
    """Return the private names that a module defines: functions, classes, variables, attributes of `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
    return set(filter(is_private, found))


def accesses(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield each access to a private name that the module does not define: its line, the name, and the source."""
    own = defined(tree)
    for node in ast.walk(tree):
        for name in _names_used(node):
            if is_private(name) and name not in own:
                yield node.lineno, name, ast.unparse(node)  # type: ignore[attr-defined]  # these nodes have a line


def _names_used(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and not _is_own(node.value):
        yield node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        name = node.args[1]
        if node.func.id in ("getattr", "hasattr", "setattr", "delattr") and isinstance(name, ast.Constant):
            yield from [name.value] * (isinstance(name.value, str) and not _is_own(node.args[0]))


def _is_own(node: ast.expr) -> bool:
    """Return whether this is `self`, `cls` or `super()`."""
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def main() -> int:
    """Print each access that is not allowed, each allowance that nothing needs, and their number."""
    wrong: list[str] = []
    unused = {(place, name) for place, names in ALLOWED.items() for name in names}
    for path in sorted(path for source in SOURCES for path in (ROOT / source).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if "/v1/" in file:  # generated
            continue
        for line, name, source in accesses(ast.parse(path.read_text())):
            allowances = {(place, name) for place, names in ALLOWED.items() if file.startswith(place) and name in names}
            unused -= allowances
            if not allowances:
                wrong.append(f"{file}:{line}: {source}")
    wrong += [
        f"tools/private_access.py: nothing needs {name} in {place or 'any file'}" for place, name in sorted(unused)
    ]
    print(*wrong, f"{len(wrong)} accesses to private attributes of other objects", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
