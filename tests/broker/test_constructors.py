"""How the daemon makes its values: nobody can check the order of seven arguments by reading."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import membrokerd

MOST_BY_POSITION = 6
TREES = {path: ast.parse(path.read_text()) for path in Path(membrokerd.__file__).parent.rglob("*.py")}
CLASSES = {node.name: node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def name_of(node: ast.expr) -> str:
    """The last word of a name, as `Make` of `fx.Make`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def fields_of(name: str) -> list[str]:
    """The fields of a class in their order, those of its bases first."""
    if name not in CLASSES:
        return []
    inherited = [field for base in CLASSES[name].bases for field in fields_of(name_of(base))]
    own = [one.target for one in CLASSES[name].body if isinstance(one, ast.AnnAssign)]
    return inherited + [target.id for target in own if isinstance(target, ast.Name)]


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Each call of a class of the daemon that has fields, and where it is."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and fields_of(name_of(node.func)):
                yield f"{path.name}:{node.lineno}", node


def test_the_calls_are_found() -> None:
    assert fields_of("Allocate")[:4] == ["call", "session", "request_id", "name"]
    assert len(list(calls())) > 200


def test_seven_arguments_are_keywords_or_have_the_names_of_the_fields() -> None:
    """By position is for the few that one extent makes: there each variable is named as its field."""
    for place, call in calls():
        if len(call.args) > MOST_BY_POSITION:
            given = list(map(name_of, call.args))
            assert given == fields_of(name_of(call.func))[: len(given)], place


def test_no_tuple_is_splatted_into_many_fields() -> None:
    for place, call in calls():
        splatted = any(isinstance(argument, ast.Starred) for argument in call.args)
        assert not splatted or len(fields_of(name_of(call.func))) <= 3, place
