"""What an integration relies on in an engine that it extends, compared with the engine that is installed.

Owns the comparison. Each integration has tables of its own, and says which versions it was written for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

from ..errors import InvalidRequest

_NEEDED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_MEMBER: Final = re.compile(r"(@?)(\w+)(\(([^)]*)\))?")


class Member(NamedTuple):
    """What is used of a class "module:name", or of a module. `parameters` is None for what is not called."""

    place: str
    name: str
    parameters: tuple[str, ...] | None
    is_property: bool


def members(package: str, table: Mapping[str, str]) -> list[Member]:
    """Return what an integration uses of an engine's package, by its table of classes and modules.

    `name(a, b)` is a method or a function that takes these parameters in this order, without `self`, and others only if
    they are optional. `@name` is a property. `name` is an attribute: a field, or assigned in the source of the class.
    """
    return [
        Member(f"{package}.{place}", name, tuple(re.findall(r"\w+", given)) if call else None, bool(at))
        for place, text in table.items()
        for at, name, call, given in _MEMBER.findall(text)
    ]


def differences(used: Iterable[Member]) -> Iterator[str]:
    """Yield what the installed engine lacks, one by one."""
    for place, name, expected, is_property in used:
        kind = load(place)
        found: Any = getattr(kind, name, None)
        if is_property:
            if not isinstance(found, property):
                yield f"{place} has no property {name}"
        elif found is None and (expected is not None or not _has(kind, name)):
            yield f"{place} has no {name}"
        elif expected is not None:
            parameters = inspect.signature(found).parameters.values()
            given = [parameter for parameter in parameters if parameter.name not in ("self", "cls")]
            names = tuple(parameter.name for parameter in given)
            needed = [
                parameter
                for parameter in given[len(expected) :]
                if parameter.default is parameter.empty and parameter.kind in _NEEDED
            ]
            if names[: len(expected)] != expected or needed:
                yield f"{place}.{name} takes ({', '.join(names)}), not ({', '.join(expected)})"


def check(integration: str, written_for: str, installed: str, used: Iterable[Member]) -> None:
    """Raise `InvalidRequest` with the first thing that the installed engine lacks, if there is one."""
    try:
        first = next(differences(used), None)
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
