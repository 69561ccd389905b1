"""What a value of the configuration may be: one check for each kind, and the table of keys that uses them.

A check returns the value as the daemon wants it, or raises `ValueError` with what to write instead. It sees one
value alone; what must fit together is checked in `config`.
"""

from __future__ import annotations

import difflib
import grp
import pwd
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from membroker.vmm.sizes import MIB, format_size, parse_size

CAPACITY_STEP = 2 * MIB
"""The granularity of every card so far, and of the twin: capacity is a multiple of it."""

MODEL_NAME = (
    "a model's name is letters, digits and ._-, begins with a letter, a digit or _, may have one slash inside, and has "
    "at most 96 characters; quote dots and slashes in TOML"
)
"""What to write instead of a name that no model may have."""
MAX_DEVICE = 9_999

_UUID = re.compile(r"(GPU-|MIG-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)

Check = Callable[[Any], Any]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def size(value: Any) -> int:
    """Bytes, as a number or as text."""
    try:
        return parse_size(value)
    except TypeError as error:
        raise ValueError(str(error)) from error


def capacity(value: Any) -> int:
    """Bytes that can be lent: a multiple of the granularity."""
    found = size(value)
    if found % CAPACITY_STEP:
        fitting = max(1, round(found / CAPACITY_STEP)) * CAPACITY_STEP
        raise ValueError(f"{value!r} is not a multiple of 2MiB; the nearest that fits is {size_text(fitting)}")
    return found


def positive_capacity(value: Any) -> int:
    """As `capacity`, and more than nothing."""
    if not (found := capacity(value)):
        raise ValueError('0 bytes are nothing to lend; write a size, such as "8GiB", or leave the key out')
    return found


def choice(*choices: str) -> Check:
    """One of these words."""

    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"write one of {', '.join(map(repr, choices))}, not {value!r}")
        return str(value)

    return check


def integer(low: int, high: int) -> Check:
    """A whole number in [low, high]."""

    def check(value: Any) -> int:
        if not _is_int(value) or not low <= value <= high:
            raise ValueError(f"write a whole number from {low} to {high:,}, not {value!r}")
        return int(value)

    return check


def seconds(low: float) -> Check:
    """Seconds, from `low` to a day."""

    def check(value: Any) -> float:
        number = _is_int(value) or isinstance(value, float)
        if not number or not low <= value <= 86_400:
            raise ValueError(f"write a number of seconds from {low:g} to 86400, not {value!r}")
        return float(value)

    return check


def boolean(value: Any) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"write true or false, not {value!r}")


def text(value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f'write text, such as "127.0.0.1", not {value!r}')
    return value


def device(value: Any) -> int | str:
    """A device's number, or its UUID; the host driver's are `host`, `host-1` and so on."""
    if isinstance(value, str) and (match := re.fullmatch(r"host(?:-([1-9][0-9]{0,3}))?", value)):
        return int(match[1] or 0)
    if isinstance(value, str) and value.isdecimal() and len(value) <= len(str(MAX_DEVICE)):
        value = int(value)
    if isinstance(value, str) and _UUID.fullmatch(value):
        return value
    if _is_int(value) and 0 <= value <= MAX_DEVICE:
        return int(value)
    raise ValueError(f'write a card\'s number from 0 or its UUID, such as "GPU-…" from `nvidia-smi -L`, not {value!r}')


def directory(value: Any) -> Path:
    """An absolute path."""
    if not isinstance(value, str | Path) or not Path(value).is_absolute():
        raise ValueError(f'write an absolute path, such as "/run/membroker", not {value!r}')
    return Path(value)


def keeper_socket(value: Any) -> Path:
    """An absolute path, in which {device} and {index} stand for the daemon's device."""
    found = directory(value)
    if re.search("[{}]", re.sub(r"\{(device|index)\}", "", str(found))):
        raise ValueError(f"{{device}} and {{index}} are all that may stand in braces, not as in {value!r}")
    return found


def uids(value: Any) -> frozenset[int]:
    """A list of user ids."""
    if not isinstance(value, list) or not all(_is_int(uid) and 0 <= uid < 2**32 - 1 for uid in value):
        raise ValueError(f"write a list of user ids, such as [1000, 1001], not {value!r}")
    return frozenset(value)


def owner(value: Any) -> int:
    """The id of a user that is given by id or name."""
    return _named_id(value, "user", lambda name: pwd.getpwnam(name).pw_uid)


def group(value: Any) -> int:
    """The id of a group that is given by id or name."""
    return _named_id(value, "group", lambda name: grp.getgrnam(name).gr_gid)


def _named_id(value: Any, kind: str, find: Callable[[str], int]) -> int:
    if _is_int(value) and 0 <= value < 2**32 - 1:
        return int(value)
    try:
        return find(str(value))
    except KeyError:
        raise ValueError(f"this machine has no {kind} {value!r}; write an id, or create the {kind} first") from None


def mode(value: Any) -> int:
    """A file's mode, as octal text."""
    if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
        raise ValueError(f'write the mode as octal text, such as "0660", not {value!r}')
    return int(value, 8)


KEYS: Mapping[str, Mapping[str, Check]] = {
    "": {
        "driver": choice("auto", "host", "cuda"),
        "device": device,
        "runtime_directory": directory,
        "capacity": positive_capacity,
        "host_capacity": capacity,
        "headroom": size,
        "gate_reserve": size,
        "host_driver_total": positive_capacity,
        "default_limit": size,
        "default_host_limit": size,
        "settle_seconds": seconds(0),
        "audit_seconds": seconds(0.01),
        "model_grace_seconds": seconds(0),
        "max_sessions": integer(1, 100_000),
        "max_models_per_tenant": integer(1, 100_000),
        "stock": size,
        "stock_extents": integer(0, 4_096),
        "descriptor_store": choice("auto", "systemd", "keeper", "memory"),
        "systemd_descriptors": integer(0, 1_000_000),
        "keeper_socket": keeper_socket,
        "state_directory": directory,
    },
    "metrics": {"enabled": boolean, "address": text, "port": integer(0, 65_535)},
    "log": {"format": choice("text", "json"), "level": choice("debug", "info", "warning", "error")},
    "tenants.NAME": {
        "limit": size,
        "host_limit": size,
        "uids": uids,
        "owner": owner,
        "group": group,
        "mode": mode,
    },
    "tenants.NAME.models.MODEL": {"limit": size, "host_limit": size},
}
"""Every key by its table, with its check. The defaults are the dataclasses'."""


def nearest(key: Any, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown key: the known one that was probably meant, or all."""
    found = difflib.get_close_matches(str(key), list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; known are {', '.join(sorted(known))}"


def size_text(size: int) -> str:
    """Return a size as it can be written into the file: exact where the unit allows it."""
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size and size % step == 0:
            return f'"{size // step}{unit}"'
    return f"{size} ({format_size(size)})" if size >= 1024 else str(size)
