"""Which processes use the device: what the driver lists, compared with what the books say.

Runs on the event loop's thread. It names suspects for an operator, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from membroker.vmm import format_size

from ..core import effects as fx
from ..core import snapshot
from ..core.denied import Denied
from ..core.machine import Broker
from ..system import logs
from ..system.pods import Pod, PodNames
from ..system.process import pod_of_pid
from ..system.turns import gather, in_portions
from . import suspects
from .executor import Executor
from .suspects import SeenProcess

Holders = Mapping[int, snapshot.HolderView]


class Processes:
    """The processes of one device. A process may use `context_bytes` beyond its charge before it is a suspect."""

    def __init__(self, broker: Broker, executor: Executor, context_bytes: int, names: PodNames) -> None:
        self._broker = broker
        self._executor = executor
        self._context_bytes = context_bytes
        self._names = names

    def find(self, done: Callable[[list[SeenProcess] | Denied], None]) -> None:
        """Give `done` the processes that the driver lists, with what the books say of them, largest excess first."""

        def list_then_compare(before: Holders) -> None:
            def listed(found: list[tuple[int, int]] | Denied) -> None:
                if isinstance(found, Denied):
                    done(found)
                else:
                    self._take_holders(
                        lambda after: done(suspects.compare(found, before, after, suspects.ancestors_of))
                    )

            self._executor.list_processes(listed)

        self._take_holders(list_then_compare)

    def _take_holders(self, done: Callable[[Holders], None]) -> None:
        in_portions(gather(snapshot.each_holder(self._broker)), lambda holders: done(dict(holders)))

    def _warn(self, process: SeenProcess, uid: str = "", name: str = "") -> None:
        fields = suspects.fields(process, Pod(uid, name))
        logs.warn("a process uses more of the device than it is charged", **fields)

    def name_suspects(self, rise: fx.NameSuspects) -> None:
        """Log the processes that use more than they are charged, after a rise of the unaccounted bytes."""
        self.find(lambda found: self._name(rise, found))

    def _name(self, rise: fx.NameSuspects, found: list[SeenProcess] | Denied) -> None:
        if isinstance(found, Denied):
            return  # the executor has logged it
        named = [process for process in found if process.excess > self._context_bytes]
        for process in named[: suspects.MOST_NAMED]:
            if uid := pod_of_pid(process.pid):
                self._names.find(uid, partial(self._warn, process, uid))
            else:
                self._warn(process)
        # A context is not suspicious, but it can explain the rise.
        if not named and sum(process.excess for process in found) < rise.risen:
            logs.warn(
                "more device memory is in use that is not in the books, and the driver names no process that uses it: "
                "the process has only a descriptor and no context, or is in a namespace that the driver cannot see",
                risen=format_size(rise.risen),
                unaccounted=format_size(rise.unaccounted),
            )
