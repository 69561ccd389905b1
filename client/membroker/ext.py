"""What an extension may use of the library besides its public names and modules: these names, and no others.

The kernel is `wire`, `vmm`, `testing`, `session`, `memory`, `pool` and the modules beside them. Extensions are `kv`,
`cli`, `adapters`, `managed` and `shared_pool`: nothing of the kernel knows them, and a newcomer may leave them out.
They use what any program uses: the names of `membroker`, and its modules `admin`, `dlpack`, `errors`, `safetensors`,
`segment`, `types` and `vmm`. Import contracts in pyproject.toml keep both so. A name here is a promise to extensions,
also to yours; what has none may change freely.

A name is imported when an extension asks for it: a command needs no pool, and a KV cache no endpoint. So each name
stands twice, for the type checker and in `_MODULES`; tests/client/test_import.py compares the two. This module must
have nothing of its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import arguments as arguments  # checks of sizes, offsets, names and times, with the library's sentences
    from .client import enter as enter  # `connect` for a command: it waits for no broker, and can be repeated
    from .closing import Closing as Closing  # an object that the end of a `with` block closes
    from .dtypes import word_of as word_of  # the name in safetensors of a dtype of any framework
    from .interrupts import device_failures as device_failures  # a block in which a driver's errors are `DeviceFailure`
    from .interrupts import uninterrupted as uninterrupted  # a call that ends before Ctrl-C is raised
    from .memory.lender import Placement as Placement  # takes the extents of one borrowing as they arrive
    from .memory.lender import Source as Source  # lends extents, and charges what a process allocates itself
    from .memory.local_source import Budget as Budget  # a limit within this process
    from .pool.range import PoolRange as PoolRange  # what an allocation of a pool returns
    from .session import endpoint as endpoint  # where brokers have their endpoints, and which one is meant
    from .threads import start_thread as start_thread  # a thread, or `ThreadLimit`
    from .views import Span as Span  # bytes that stay mapped while it lives
    from .views import Views as Views  # which views of some memory are alive
    from .wire import build as build  # of which commit this installation is
    from .wire import help_text as help_text  # the help of a command at the width of its terminal
    from .wire import names as names  # the grammar of names, the limits that both sides check, environment variables
    from .wire import ownership as ownership  # whose a path is, and which ids stand for many users
    from .wire import paths as paths  # which paths a socket can have, and how they are shown
    from .wire import standard as standard  # how a command begins
    from .wire import system_calls as system_calls  # what a broker needs of the kernel, tried once
    from .wire.sessions import OPEN_PER_SESSION as OPEN_PER_SESSION  # descriptors that a daemon needs for a session
    from .wire.sessions import sessions_for as sessions_for  # how many sessions a limit of descriptors allows

_MODULES = {
    "Budget": "memory.local_source",
    "Closing": "closing",
    "OPEN_PER_SESSION": "wire.sessions",
    "Placement": "memory.lender",
    "PoolRange": "pool.range",
    "Source": "memory.lender",
    "Span": "views",
    "Views": "views",
    "arguments": "",
    "build": "wire",
    "device_failures": "interrupts",
    "endpoint": "session",
    "enter": "client",
    "help_text": "wire",
    "names": "wire",
    "ownership": "wire",
    "paths": "wire",
    "sessions_for": "wire.sessions",
    "standard": "wire",
    "start_thread": "threads",
    "system_calls": "wire",
    "uninterrupted": "interrupts",
    "word_of": "dtypes",
}
"""Where each name comes from. What is not an attribute there is a module."""

if not TYPE_CHECKING:  # a type checker would take every name from it

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"no name for extensions: {name}")
        place = f"{__package__}.{_MODULES[name]}".rstrip(".")
        home = import_module(place)
        found = getattr(home, name) if name in vars(home) else import_module(f"{place}.{name}")
        globals()[name] = found
        return found
