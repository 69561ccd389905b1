"""What an integration relies on in an engine that it extends, compared with the engine that is installed.

Owns the comparison. Each integration has tables of its own, and says which versions it was written for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, Final

from ..errors import InvalidRequest

_NEEDED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

Methods = Iterable[tuple[str, str, tuple[str, ...]]]
"""Class and method, or module and function, and its parameters in order, without `self`. It may have optional ones."""
Attributes = Iterable[tuple[str, tuple[str, ...]]]
"""Class, and attributes that are read: fields, properties, or assigned in the source of the class."""


def differences(methods: Methods, attributes: Attributes, properties: Iterable[tuple[str, str]] = ()) -> Iterator[str]:
    """Yield what the installed engine lacks, one by one. A class is written "module:name", and a module "module"."""
    for place, method, expected in methods:
        found = getattr(load(place), method, None)
        if found is None:
            yield f"{place} has no {method}"
            continue
        parameters = [
            parameter for name, parameter in inspect.signature(found).parameters.items() if name not in ("self", "cls")
        ]
        names = tuple(parameter.name for parameter in parameters)
        rest = parameters[len(expected) :]
        if names[: len(expected)] != expected or any(
            parameter.default is parameter.empty and parameter.kind in _NEEDED for parameter in rest
        ):
            yield f"{place}.{method} takes ({', '.join(names)}), not ({', '.join(expected)})"
    for place, name in properties:
        if not isinstance(getattr(load(place), name, None), property):
            yield f"{place} has no property {name}"
    for place, names in attributes:
        kind = load(place)
        for name in names:
            if not _has(kind, name):
                yield f"{place} has no {name}"


def check(integration: str, written_for: str, installed: str, found: Iterator[str]) -> None:
    """Raise `InvalidRequest` with the first difference, if there is one."""
    try:
        first = next(found, None)
    except (ImportError, AttributeError) as error:
        first = str(error)
    if first is not None:
        raise InvalidRequest(f"{integration} was written for {written_for}, and {installed} differs: {first}")


def load(place: str) -> Any:
    """Return the class that "module:name" says, or the module. Raises `ImportError` or `AttributeError`."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)


def _has(kind: Any, name: str) -> bool:
    if hasattr(kind, name) or any(name in getattr(base, "__annotations__", ()) for base in kind.__mro__):
        return True
    return any(f"self.{name}" in inspect.getsource(base) for base in kind.__mro__ if base is not object)
