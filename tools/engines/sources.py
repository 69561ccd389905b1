"""The source of a release, read without importing it: what a class has, and which parameters a function takes.

Owns the reading. The tables are those of `membroker.kv.*.seams`, and what is yielded are the sentences that
`membroker.kv.seams.differences` yields of an engine that is installed. Where only running the module would tell, a name
counts as missing: a false difference costs a look, and one that is not seen breaks a user's engine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from membroker.kv.seams import Member

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = ast.Module | ast.ClassDef | ast.If | ast.Try | ast.With | ast.ExceptHandler
_MOST_STEPS: Final = 20
"""How many imports lead from the place of a name to its definition, at most."""


@dataclass(frozen=True)
class Found:
    """A class, a function or a value, and the module that defines it."""

    module: Module
    node: ast.AST


class Module:
    """One file: what it defines at its top, and what it imports from where."""

    def __init__(self, name: str, tree: ast.Module, is_package: bool) -> None:
        self.name = name
        self.tree = tree
        self.is_package = is_package

    @cached_property
    def definitions(self) -> Mapping[str, ast.AST]:
        """Classes, functions and values by name."""
        return definitions(self.tree)

    @cached_property
    def imports(self) -> tuple[Mapping[str, tuple[str, str | None]], tuple[str, ...]]:
        """By the name here: the module, and the name in it or None for the module; and the modules of each `*`."""
        named: dict[str, tuple[str, str | None]] = {}
        stars: list[str] = []
        for node in statements(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    named[alias.asname or first] = (alias.name if alias.asname else first, None)
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(node)
                for alias in node.names:
                    if alias.name == "*":
                        stars.append(origin)
                    else:
                        named[alias.asname or alias.name] = (origin, alias.name)
        return named, tuple(stars)

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])


class Sources:
    """The modules of one release."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """Take the source of each file by its path, such as `vllm/v1/request.py`."""
        self._files = files
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """Return a module, or None if the release does not have it or it is no Python."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def _parse(self, name: str) -> Module | None:
        path = name.replace(".", "/")
        for file, is_package in ((f"{path}.py", False), (f"{path}/__init__.py", True)):
            if file in self._files:
                try:
                    return Module(name, ast.parse(self._files[file]), is_package)
                except (SyntaxError, ValueError, RecursionError):
                    return None
        return None

    def find(self, module: str, name: str, steps: int = _MOST_STEPS) -> Found | Module | None:
        """Return what `module` has under `name`, wherever it comes from within the release."""
        place = self.module(module)
        if place is None or steps == 0:
            return None
        if name in place.definitions and not isinstance(place.definitions[name], ast.expr):
            return Found(place, place.definitions[name])
        named, stars = place.imports
        if name in named:
            origin, inner = named[name]
            return self.module(origin) if inner is None else self.find(origin, inner, steps - 1)
        for origin in stars:
            if (found := self.find(origin, name, steps - 1)) is not None:
                return found
        if name in place.definitions:
            return Found(place, place.definitions[name])
        return self.module(f"{module}.{name}")

    def differences(self, used: Iterable[Member]) -> Iterator[str]:
        """Yield what this release lacks, one by one, as `membroker.kv.seams.differences` does."""
        for place, name, expected, is_property in used:
            member = self.member(place, name)
            if is_property:
                if not isinstance(member, _Function) or "property" not in map(_last_name, member.decorator_list):
                    yield f"{place} has no property {name}"
            elif expected is None:
                if member is None and not any(name in _assigned(one.node) for one in self.bases(place)):
                    yield f"{place} has no {name}"
            elif not isinstance(member, _Function):
                yield f"{place} has no {name}"
            else:
                names, needed = parameters(member)
                if names[: len(expected)] != expected or needed & set(names[len(expected) :]):
                    yield f"{place}.{name} takes ({', '.join(names)}), not ({', '.join(expected)})"

    def member(self, place: str, name: str) -> ast.AST | None:
        """Return what a class "module:name", or a module, has under a name: in a base class too."""
        module, _, kind = place.partition(":")
        if not kind:
            found = self.find(module, name)
            return found.node if isinstance(found, Found) else None
        return next((own[name] for own in (definitions(one.node) for one in self.bases(place)) if name in own), None)

    def bases(self, place: str) -> Iterator[Found]:
        """Yield the class "module:name" and those of its bases that are in this release, the nearest first."""
        module, _, kind = place.partition(":")
        waiting, seen = [self.find(module, kind)], set[int]()
        while waiting:
            found = waiting.pop(0)
            if not isinstance(found, Found) or not isinstance(found.node, ast.ClassDef) or id(found.node) in seen:
                continue
            seen.add(id(found.node))
            yield found
            waiting += [self._named(found.module, base) for base in (*found.node.bases, *parts_of(found))]

    def _named(self, module: Module, node: ast.expr) -> Found | Module | None:
        """Return what an expression such as `base.Loader` or `Queue[int]` names in a module."""
        if isinstance(node, ast.Subscript):
            return self._named(module, node.value)
        if isinstance(node, ast.Name):
            return self.find(module.name, node.id)
        if isinstance(node, ast.Attribute):
            owner = self._named(module, node.value)
            return self.find(owner.name, node.attr) if isinstance(owner, Module) else None
        return None


def parts_of(kind: Found) -> Iterator[ast.expr]:
    """Yield the classes that a class is assembled from: its module sets an attribute of it to a list of classes.

    So SGLang makes `ServerArgs`, by `ServerArgs._NAMESPACES = _INPUT_NAMESPACES`.
    """
    lists: dict[str, list[ast.expr]] = {}
    for node in kind.module.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            lists |= {one.id: node.value.elts for one in node.targets if isinstance(one, ast.Name)}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            for one in node.targets:
                if isinstance(one, ast.Attribute) and _last_name(one.value) == getattr(kind.node, "name", None):
                    yield from lists.get(node.value.id, ())


def statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, those under `if`, `try` and `with` too."""
    for field in ("body", "orelse", "finalbody", "handlers"):
        for node in getattr(scope, field, ()):
            yield node
            if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from statements(node)


def definitions(scope: ast.AST) -> dict[str, ast.AST]:
    """Return what a module or class defines, by name. A class or function counts before a value of the same name."""
    found: dict[str, ast.AST] = {}
    values: dict[str, ast.AST] = {}
    for node in statements(scope):
        if isinstance(node, ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, _Function):
            # The setter of a property has its name, and tells nothing of it.
            if not {"overload", "setter", "deleter"} & set(map(_last_name, node.decorator_list)):
                found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                values |= {one.id: target for one in ast.walk(target) if isinstance(one, ast.Name)}
    return values | found


def parameters(function: _Function) -> tuple[tuple[str, ...], set[str]]:
    """Return the names of a function's parameters without `self`, and those of them that must be given."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    optional = {one.arg for one in positional[len(positional) - len(given.defaults) :]}
    optional |= {
        one.arg for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is not None
    }
    stars = [[one] if one is not None else [] for one in (given.vararg, given.kwarg)]
    needed = {one.arg for one in (*given.args, *given.kwonlyargs)} - optional
    names = [one.arg for one in (*positional, *stars[0], *given.kwonlyargs, *stars[1])]
    return tuple(name for name in names if name not in ("self", "cls")), needed


def _assigned(kind: ast.AST) -> set[str]:
    """Return the attributes of `self` that a class assigns."""
    return {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def _last_name(node: ast.expr) -> str:
    """Return `setter` of `size.setter`, and `overload` of `overload`."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
