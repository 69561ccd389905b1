"""What an extension may use of the daemon's kernel: these names, and no others.

The kernel is `core`, `edge`, `restart`, `config`, `system`, `device` and `runtime`. Extensions are `observe`, `replay`
and `all_gpus`: nothing of the kernel knows them, and a newcomer may leave them out. An import contract in
pyproject.toml keeps both so. A name here is a promise to extensions; what has none may change freely.

A name is imported when an extension asks for it: `python -m membrokerd.replay` needs neither the configuration's
pydantic nor an event loop, and `--all` neither protobuf nor the core's machine. So each name stands twice, for the type
checker and in `_MODULES`; tests/broker/test_ext.py compares the two. This module must have nothing of its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # The core, which is pure.
    # For a parent of daemons.
    from .config.config import Config as Config  # the configuration, checked

    # Around the core, for a trace.
    from .config.guarantees import misfit_sentences as misfit_sentences  # which guarantees cannot be kept
    from .core import effects as effects  # what the core says is to be done: answers, recalls, waits that ended
    from .core import events as events  # what the core is asked and told
    from .core import facts as facts  # what changes the ledger: all books can be made from these alone
    from .core import lifecycles as lifecycles  # the states of sessions, extents and segments, as tables
    from .core import policy as policy  # the rules: capacities, limits, guarantees, times
    from .core import snapshot as snapshot  # views of the books that stay as they are
    from .core.books import Step as Step  # what one event led to
    from .core.checkpoint import checkpoint_facts as checkpoint_facts  # the facts that make the books of this moment
    from .core.denied import Denied as Denied  # a refusal
    from .core.denied import Reason as Reason  # why something was refused
    from .core.machine import Broker as Broker  # the core itself: `step(event, now)`, the ledger, the rules in force
    from .core.names import Location as Location  # "device" or "host"
    from .core.names import ModelName as ModelName  # tenant and model
    from .core.names import QuotaKey as QuotaKey  # what has a limit, guarantee or weight
    from .core.names import SegmentName as SegmentName  # tenant, model and the segment's own name
    from .core.rows import SessionRow as SessionRow  # a session in the ledger
    from .restart import records as records  # the format of facts in a journal
    from .system import files as files  # files that nobody else could have put there
    from .system import logs as logs  # the daemon's log
    from .system.device_directory import DeviceDirectory as DeviceDirectory  # a directory that one process owns
    from .system.device_directory import DirectoryError as DirectoryError  # why that is not possible
    from .system.sd_notify import Heartbeat as Heartbeat  # tells systemd that the event loop turns
    from .system.sd_notify import notify as notify  # tells systemd this process's state
    from .system.sd_notify import started_by_systemd as started_by_systemd  # whether this process is a service

_MODULES = {
    "Broker": "core.machine",
    "Config": "config.config",
    "Denied": "core.denied",
    "DeviceDirectory": "system.device_directory",
    "DirectoryError": "system.device_directory",
    "Heartbeat": "system.sd_notify",
    "Location": "core.names",
    "ModelName": "core.names",
    "QuotaKey": "core.names",
    "Reason": "core.denied",
    "SegmentName": "core.names",
    "SessionRow": "core.rows",
    "Step": "core.books",
    "checkpoint_facts": "core.checkpoint",
    "effects": "core",
    "events": "core",
    "facts": "core",
    "files": "system",
    "lifecycles": "core",
    "logs": "system",
    "misfit_sentences": "config.guarantees",
    "notify": "system.sd_notify",
    "policy": "core",
    "records": "restart",
    "snapshot": "core",
    "started_by_systemd": "system.sd_notify",
}
"""Where each name comes from. In a package it is a module."""


if not TYPE_CHECKING:  # else mypy would take any name for one of this module

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"no name for extensions: {name}")
        place = f"{__package__}.{_MODULES[name]}"
        found = import_module(f"{place}.{name}") if "." not in _MODULES[name] else getattr(import_module(place), name)
        globals()[name] = found
        return found
