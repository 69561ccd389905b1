"""A daemon that gets bad input, and an honest worker of another tenant, which must not notice."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.support.daemons import Daemon
from tests.support.sizes import PAGE

CONFIG = {"max_models_per_tenant": 4}
TAKES_DESCRIPTORS = "tests.support.faulty_daemon take_descriptors"
"""The module of a daemon to which a peer can pass descriptors, as to any before Linux 6.16."""


class Scene(NamedTuple):
    """A daemon, and an honest worker of the tenant blue that is connected all the while."""

    daemon: Daemon
    worker: Any
    model: Any

    @property
    def revision(self) -> int:
        return int(self.daemon.device().revision)

    def unharmed(self) -> None:
        """The honest worker borrows, writes and releases."""
        with self.model.allocate(PAGE) as buffer:
            buffer.view()[:5] = b"hello"
            assert bytes(buffer.view()[:5]) == b"hello"
