"""What a value in a configuration file may be, and a sentence for each thing that is wrong in a file.

pydantic checks a document against annotated dataclasses. Owns the kinds of values that pydantic does not have (sizes,
owners, modes, names) and the translation of its errors. It sees one value at a time; what must fit together is
checked in `config`.
"""

from __future__ import annotations

import difflib
import functools
import grp
import json
import pwd
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, Strict, TypeAdapter, ValidationError

from membroker.vmm.sizes import MIB, format_size, parse_size
from membroker.wire.names import MAX_TENANT_CHARACTERS, valid_model, valid_tenant
from membroker.wire.ownership import is_mapped

from ..core import policy

CAPACITY_STEP = 2 * MIB
"""The granularity of every GPU so far, and of the host driver: capacity is a multiple of it."""
MAX_DEVICE = 9_999
OF_USERS = "default"
"""The endpoint in which each user is a tenant."""

_UUID = re.compile(r"(GPU-|MIG-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_Table = TypeVar("_Table")
KeyPath = tuple[str, ...]


class Table:
    """A dataclass of keys: a key that it does not have is an error."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(extra="forbid")


# --- Kinds of values ---


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _size(value: Any) -> int:
    try:
        return parse_size(value)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _capacity(value: Any) -> int:
    found = _size(value)
    if found % CAPACITY_STEP:
        fitting = max(1, round(found / CAPACITY_STEP)) * CAPACITY_STEP
        no_unit = '; a number alone is bytes: write a unit, such as "8GiB"' if str(value).isdecimal() else ""
        raise ValueError(f"{value!r} is not a multiple of 2MiB; the nearest that fits is {size_text(fitting)}{no_unit}")
    return found


def _positive(size: int) -> int:
    if not size:
        raise ValueError('0 bytes are nothing to lend; write a size, such as "8GiB", or leave the key out')
    return size


def _device(value: Any) -> int | str:
    if isinstance(value, str) and (match := re.fullmatch(r"host(?:-([1-9][0-9]{0,3}))?", value)):
        return int(match[1] or 0)
    if isinstance(value, str) and value.isdecimal() and len(value) <= len(str(MAX_DEVICE)):
        value = int(value)
    if isinstance(value, str) and _UUID.fullmatch(value):
        return value
    if _is_int(value) and 0 <= value <= MAX_DEVICE:
        return int(value)
    raise ValueError(f'write a GPU\'s number from 0 or its UUID, such as "GPU-…" from `nvidia-smi -L`, not {value!r}')


def _directory(value: Any) -> Path:
    if not isinstance(value, str | Path) or not Path(value).is_absolute():
        raise ValueError(f'write an absolute path, such as "/run/membroker", not {value!r}')
    if "\0" in str(value):
        raise ValueError(f"a path has no NUL in it, as in {value!r}")
    return Path(value)


def _keeper_socket(path: Path) -> Path:
    if re.search("[{}]", re.sub(r"\{(device|index)\}", "", str(path))):
        raise ValueError(f"only {{device}} and {{index}} may stand in braces, not as in '{path}'")
    return path


def _uids(value: Any) -> frozenset[int]:
    if not isinstance(value, list) or not all(_is_int(uid) and 0 <= uid < 2**32 - 1 for uid in value):
        raise ValueError(f"write a list of user ids, such as [1000, 1001], not {value!r}")
    for uid in value:
        _mapped("user", uid)
    return frozenset(value)


def _named_id(kind: str, find: Callable[[str], int], value: Any) -> int:
    if _is_int(value) and 0 <= value < 2**32 - 1:
        return _mapped(kind, int(value))
    try:
        return _mapped(kind, find(str(value)))
    except KeyError:
        raise ValueError(f"this machine has no {kind} {value!r}; write an id, or create the {kind} first") from None


def _mapped(kind: str, number: int) -> int:
    """Return an id that a process can have here; in a user namespace others may mean many users, or none."""
    letter = kind[0]
    if not is_mapped("uid" if letter == "u" else "gid", number):
        raise ValueError(
            f"{kind} {number} means nobody in this user namespace, which does not map it (/proc/self/{letter}id_map); "
            f"start the daemon where the {kind} is mapped"
        )
    return number


def _mode(value: Any) -> int:
    if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
        raise ValueError(f'write the mode as octal text, such as "0660", not {value!r}')
    return int(value, 8)


def _tenant_name(name: str) -> str:
    if valid_tenant(name):
        return name
    most = MAX_TENANT_CHARACTERS - 1
    raise ValueError(
        f"a tenant's name is [a-z0-9] and then at most {most} of [a-z0-9-], because it names a directory too"
    )


def _created_name(name: str) -> str:
    if name == OF_USERS or of_user(name):
        raise ValueError(f"{OF_USERS!r} and 'uid-N' are the names of endpoint and tenants where each user is a tenant")
    return _tenant_name(name)


def of_user(name: str) -> bool:
    """Say whether this is the name of a user's tenant, where each user is one."""
    return re.fullmatch("uid-(0|[1-9][0-9]{0,9})", name) is not None


def _model_name(name: str) -> str:
    if valid_model(name):
        return name
    raise ValueError(
        "a model's name is letters, digits and ._-, begins with a letter, a digit or _, may have one slash inside, and "
        "has at most 96 characters; quote dots and slashes in TOML"
    )


Size = Annotated[int, PlainValidator(_size)]
"""Bytes, as a number or as text."""
Capacity = Annotated[int, PlainValidator(_capacity)]
"""A size that is a multiple of the granularity."""
PositiveCapacity = Annotated[int, PlainValidator(_capacity), AfterValidator(_positive)]
Seconds = Annotated[float, Strict(), Field(ge=0, le=86_400, allow_inf_nan=False)]
Count = Annotated[int, Strict(), Field(ge=1, le=100_000)]
Weight = Annotated[int, Strict(), Field(ge=0, le=policy.MAX_WEIGHT)]
Device = Annotated[int | str, PlainValidator(_device)]
"""A device's number, or its UUID; the host driver's are `host`, `host-1` and so on."""
Directory = Annotated[Path, PlainValidator(_directory)]
KeeperSocket = Annotated[Path, PlainValidator(_directory), AfterValidator(_keeper_socket)]
"""An absolute path, in which {device} and {index} stand for the daemon's device."""
Uids = Annotated[frozenset[int], PlainValidator(_uids)]
Owner = Annotated[int, PlainValidator(functools.partial(_named_id, "user", lambda name: pwd.getpwnam(name).pw_uid))]
"""The id of a user, given by id or name."""
Group = Annotated[int, PlainValidator(functools.partial(_named_id, "group", lambda name: grp.getgrnam(name).gr_gid))]
Mode = Annotated[int, PlainValidator(_mode)]
"""A file's mode, as octal text."""
TenantName = Annotated[str, AfterValidator(_tenant_name)]
CreatedName = Annotated[str, AfterValidator(_created_name)]
"""The name of a tenant that is made by command."""
ModelName = Annotated[str, AfterValidator(_model_name)]


# --- A document ---


def check(kind: type[_Table], document: dict[str, Any]) -> tuple[_Table, dict[str, str]]:
    """Return the document as `kind` without its wrong values, and a sentence for each of those, by key.

    Wrong values are removed from `document`. `kind` has a default for each key.
    """
    problems: dict[str, str] = {}
    adapter: TypeAdapter[_Table] = _adapter(kind)  # type: ignore[arg-type]  # a type is hashable
    try:
        return adapter.validate_python(document), problems
    except ValidationError as error:
        for path, sentence in _problems(kind, error):
            problems[joined(path)] = sentence
            table = document
            for key in path[:-1]:
                table = table.get(key, {})
            table.pop(path[-1], None)
    return adapter.validate_python(document), problems


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    """Return the adapter of a kind: made once, because that takes longer than to check a document with it."""
    return TypeAdapter(kind)


def _problems(kind: type, error: ValidationError) -> Iterator[tuple[KeyPath, str]]:
    """Yield key path and sentence of each error: keys that do not exist first."""
    found = error.errors(include_url=False)
    for each in sorted(found, key=lambda each: each["type"] != "unexpected_keyword_argument"):
        path = tuple(map(str, each["loc"]))
        match each["type"]:
            case "value_error" if path[-1] == "[key]":  # pydantic's mark for an error in the key itself
                yield path[:-1], str(each["ctx"]["error"])
            case "unexpected_keyword_argument":
                yield path, "is not a known key" + _nearest(path[-1], _keys(kind, path[:-1]))
            case "value_error":
                yield path, str(each["ctx"]["error"])
            case "dataclass_type":
                yield path, f"is a table: write [{joined(path)}] and its keys below"
            case "dict_type" | "mapping_type":
                yield path, f"is a table of tables: write [{joined(path)}.NAME] and its keys below"
            case "bool_type":
                yield path, "should be true or false" + _but_found(each["input"])
            case _:
                yield path, each["msg"].partition(" ")[2] + _but_found(each["input"])  # without its "Input"


def _but_found(value: Any) -> str:
    try:
        return f", not {value!r}"
    except ValueError:  # a number of more digits than Python shows
        return ""


def _keys(kind: Any, path: KeyPath) -> list[str]:
    """Return the keys of the table at a key path."""
    for key in path:
        kind = get_type_hints(kind)[key] if is_dataclass(kind) else get_args(kind)[1]
    return [each.name for each in fields(kind)]


def _nearest(key: str, known: list[str]) -> str:
    """Return the end of a sentence about an unknown key: the known one that was probably meant, or all."""
    found = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; known are {', '.join(sorted(known))}"


def joined(path: KeyPath) -> str:
    """Return the key path as TOML writes it: a key that is not bare is quoted."""
    return ".".join(key if _BARE_KEY.fullmatch(key) else json.dumps(key) for key in path)


def exact_size(size: int) -> str:
    """Return a size as TOML: text with a unit if that is exact, else a number of bytes."""
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size and size % step == 0:
            return f'"{size // step}{unit}"'
    return str(size)


def size_text(size: int) -> str:
    """Return a size for a sentence: as it can be written into the file, and rounded besides if it has no unit."""
    text = exact_size(size)
    return f"{text} ({format_size(size)})" if text.isdecimal() and size >= 1024 else text
