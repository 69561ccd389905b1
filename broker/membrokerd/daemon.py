"""Builds all parts of the daemon, starts them in order, and stops them in the other.

The only module that knows every other. It decides nothing about memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from membroker.handoff import close_all
from membroker.v1 import admin_pb2_grpc, broker_pb2_grpc
from membroker.vmm import format_size

from . import __version__, logs, quotas
from .config import Config, TenantConfig
from .core import events as ev
from .core import facts as ft
from .core import snapshot
from .core.broker import Broker
from .core.events import Location
from .core.story import story
from .device import Plan
from .dispatch import Dispatcher
from .drain import Drain
from .executor import Executor
from .handoff.listener import Listener, Traffic
from .handoff.watch import Watch
from .home import Home, HomeError, Ownership, clear_private
from .inheritance import condense, hold_what_is_lent, take_descriptors, watch_processes
from .journal import Binding, Journal, boot_id
from .limits import (
    descriptors_for,
    in_flight_is_bounded,
    raise_descriptor_limit,
    segment_extents_for,
    sessions_for,
)
from .loop import Loop, seen
from .metrics import Metrics, MetricsView
from .metrics_server import MetricsServer
from .mirrors import open_keeper
from .notify import keep_watchdog_quiet, notify
from .rpc.admin_service import AdminService
from .rpc.broker_service import BrokerService
from .rpc.server import serve
from .rpc.views import Views
from .store import Kept, Mirror, Store
from .suspects import CONTEXT_BYTES, command_of
from .systemd import open_systemd, started_by_systemd, systemd_available
from .turns import Turns, spare_collections

METRICS_PORT = 9710
VIEW_SECONDS = 0.5
"""How long a scrape waits for the event loop before it answers with the view before."""
STOP_SECONDS = 5.0
DEFAULT_MAX_SESSIONS = 1024


class Daemon:
    """One device's broker, from start to stop."""

    def __init__(self, config: Config, plan: Plan, turns: Turns) -> None:
        self._config = config
        self._turns = turns
        self._plan = plan
        self._traffic = Traffic()
        self._endpoints: list[Path] = []
        self._last_view: MetricsView | None = None
        self._metrics = Metrics(self)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        stop = asyncio.Event()
        async with AsyncExitStack() as stack:
            await self._start(stack, stop.set)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            notify(f"READY=1\nSTATUS=lending {format_size(self._plan.capacities['device'])}")
            logs.log("ready", pid=os.getpid(), metrics=self._views.metrics_url or "off")
            keep_watchdog_quiet(asyncio.get_running_loop())
            spare_collections()
            self._turns.begin()  # what the start took is nobody's turn
            await stop.wait()
            notify("STOPPING=1")
            logs.log("stopping")
            await self._loop.stop(STOP_SECONDS)
        logs.log("stopped")

    # --- start, in order; the stack stops in the other ---

    async def _start(self, stack: AsyncExitStack, stop: Callable[[], None]) -> None:
        config = self._config
        self._home = Home(config.runtime_directory, self._plan.directory)
        clear_private(self._home)
        for name in self._config.tenants or ("default",):  # a path that no socket can have is told before all else
            self._home.endpoint("tenants", name)
        journal = Journal(self._home.state / "journal", Binding(boot_id(), self._plan.driver.device.uuid))
        stack.callback(journal.close)
        (condensed, charged), kept = self._read_journal(journal), await self._open_store(stack)
        plan = self._plan = self._take_driver(kept, charged)
        stack.callback(plan.driver.close)
        executor = Executor(plan.driver, plan.gate_reserve, self._observe_driver)
        stack.callback(executor.stop)
        anchor = executor.drop_anchor()
        for name, descriptor in plan.driver.survivors().items():
            self._store.keep_driver(name, descriptor)
        rules = plan.rules(config, anchor, *self._bounds(), hold_what_is_lent(plan.capacities, charged))
        broker = Broker(rules, self._home.next_epoch(), [*condensed, *self._commanded()])
        self._begin_journal(journal, broker)
        self._loop = Loop(
            broker,
            executor,
            self._store,
            config.audit_seconds,
            self._metrics.steps.observe,
            CONTEXT_BYTES[plan.driver.device.driver],
            journal,
            self._metrics.journal.observe,
            self._turns,
        )
        self._loop.figures = executor.figures()
        self._dispatcher = Dispatcher(self._loop, self._observe_request)
        self._views = Views(
            self._loop, plan.driver.device, {str(where): size for where, size in plan.headroom.items()}, __version__
        )
        self._drain = Drain(lambda: not any(total.charged for total in broker.ledger.totals.values()), stop)
        stack.callback(self._drain.end)
        stack.callback(lambda: self._home.close(self._endpoints))
        executor.start(asyncio.get_running_loop())
        self._watch = Watch(self._store, self._loop.process_died, self._turns)
        stack.callback(self._watch.close)
        self._loop.on_forget.append(self._watch.forget)
        self._take_over(executor, kept)
        self._start_metrics(stack)
        self._loop.start()
        try:
            await self._open_endpoints(stack)
        except BaseException:
            await self._loop.stop(0)  # else it asks a closed driver
            raise

    def _commanded(self) -> list[ft.Fact]:
        """Return the limits that an operator commanded, at whatever daemon of this device."""
        configured, device = self._config.state_directory, self._plan.directory
        directory = configured / device if configured else quotas.state_directory(device)
        if trouble := quotas.trouble(directory):
            logs.warn(trouble)
        self._quotas_path = directory / "quotas.toml"
        return [ft.QuotaSet(*key, limit) for key, limit in quotas.read(self._quotas_path).items()]

    def _read_journal(self, journal: Journal) -> tuple[list[ft.Fact], Mapping[Location, int]]:
        """Return the books of the daemon before this one, as a story, and what is charged in them."""
        try:
            told, notes = journal.read()
        except OSError as error:
            raise HomeError(f"cannot read {error.filename}: {error.strerror}") from error
        try:
            books = condense(told)
        except (AssertionError, KeyError) as error:  # each fact is one, and together they make no books
            notes = [*notes, f"the journal contradicts itself ({error}); it is kept as {journal.set_aside('broken')}"]
            books = condense(told := [])
        for note in notes:
            logs.warn(note)
        if not told:
            self._warn_of_predecessor()
        return books

    def _begin_journal(self, journal: Journal, broker: Broker) -> None:
        try:
            journal.begin(story(broker.ledger))
        except OSError as error:
            raise HomeError(
                f"cannot write the journal in {self._home.state}: {error.strerror}; make room there. "
                "What is lent stays with its workers meanwhile"
            ) from error

    async def _open_store(self, stack: AsyncExitStack) -> Kept:
        kind, most = self._config.descriptor_store, self._config.systemd_descriptors
        mirror: Mirror | None = None
        kept = Kept()
        if kind == "auto":
            kind = "systemd" if systemd_available(most) else "keeper"
            if kind == "keeper" and started_by_systemd():
                logs.warn(
                    "systemd started this daemon and does not say that it keeps descriptors: a keeper ends together "
                    "with the service, and so would segments; set FileDescriptorStoreMax= in the unit and, before "
                    "systemd 254, systemd_descriptors to the same"
                )
        try:
            if kind == "systemd":
                mirror, kept = open_systemd(most)
            elif kind == "keeper":
                mirror, kept = await open_keeper(self._config.keeper_socket or self._home.state / "fdstore.sock")
        except OSError as error:
            key = "keeper_socket" if kind == "keeper" and self._config.keeper_socket else "descriptor_store"
            raise HomeError(f"there is no descriptor store ({kind}): {error}; choose another with `{key}`") from error
        self._store = Store(mirror)
        stack.callback(lambda: close_all(self._store.close()))
        self._store.adopt(kept)
        logs.log("descriptor store", kind=kind, segments=len(kept.segments), processes=len(kept.processes))
        return kept

    def _take_driver(self, kept: Kept, charged: Mapping[Location, int]) -> Plan:
        """Return the plan with a driver that knows what an earlier daemon's has lent."""
        if not kept.driver:
            return self._plan
        self._plan.driver.close()
        survivors = {name: os.dup(one) for name, one in kept.driver.items()}
        return replace(self._plan, driver=self._plan.reopen(survivors, charged))

    def _take_over(self, executor: Executor, kept: Kept) -> None:
        """Go on with the books of the daemon before this one."""
        ledger = self._loop.broker.ledger
        lost = take_descriptors(ledger, self._store, executor, kept)
        self._loop.tell(ev.Restarted(lost, seen(self._loop.figures)))
        watch_processes(ledger, self._watch, kept)
        if ledger.sessions or ledger.segments:
            charged = sum(total.charged for total in ledger.totals.values())
            logs.log("taken over", sessions=len(ledger.sessions), segments=len(ledger.segments), charged_bytes=charged)

    def _bounds(self) -> tuple[int, int]:
        """Return how many sessions there may be, and how many extents segments may have together."""
        descriptors = raise_descriptor_limit()
        bounded = in_flight_is_bounded()
        possible = sessions_for(descriptors, bounded=bounded)
        wanted = self._config.max_sessions
        if wanted is not None and wanted > possible:
            needed = descriptors_for(wanted, bounded=bounded)
            raise HomeError(
                f"max_sessions = {wanted} needs a limit of {needed} descriptors and this process may have "
                f"{descriptors}: raise it (LimitNOFILE=, ulimit -n), or set max_sessions = {possible}"
            )
        sessions = min(possible, DEFAULT_MAX_SESSIONS) if wanted is None else wanted
        extents = segment_extents_for(descriptors, sessions, self._plan.stock_extents)
        logs.log("limits", descriptors=descriptors, max_sessions=sessions, max_segment_extents=extents)
        return sessions, extents

    def _warn_of_predecessor(self) -> None:
        """Say who may still hold memory that an earlier daemon lent: these books begin empty."""
        if not self._home.had_predecessor():
            return
        for pid, size in self._plan.driver.processes():
            if pid != os.getpid():
                logs.warn(
                    "an earlier daemon's worker may still hold memory; until it ends it counts as unaccounted",
                    pid=pid,
                    command=command_of(pid),
                    holds=format_size(size),
                )

    def _start_metrics(self, stack: AsyncExitStack) -> None:
        metrics = self._config.metrics
        if not metrics.enabled:
            return
        port = METRICS_PORT + self._plan.driver.device.index if metrics.port is None else metrics.port
        try:
            server = MetricsServer(metrics.address, port, self._metrics.registry, lambda: "", self._unready)
        except OSError as error:
            other = "port with --metrics-port (0 for a free one)"
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                other = "metrics.address, of this machine"
            raise HomeError(
                f"cannot serve metrics on {_authority(metrics.address, port)}: {error.strerror}; "
                f"choose another {other}, or metrics.enabled = false"
            ) from error
        server.start()
        stack.callback(server.close)
        self._views.metrics_url = f"http://{_authority(metrics.address, server.port)}/metrics"

    async def _open_endpoints(self, stack: AsyncExitStack) -> None:
        if self._config.uid_tenants:
            mode = 0o666 if os.geteuid() == 0 else 0o660
            await self._open_tenant(stack, "default", None, TenantConfig(mode=mode))
        for name, tenant in self._config.tenants.items():
            await self._open_tenant(stack, name, name, tenant)
        admin = self._home.endpoint("admin", mode=0o700)
        self._endpoints.append(admin)
        service = AdminService(
            self._loop,
            self._views,
            frozenset(self._config.tenants),
            lambda: quotas.write(self._quotas_path, self._loop.broker.ledger.quotas),
            self._drain,
        )
        server = await serve(
            self._home,
            admin / "grpc.sock",
            Ownership(mode=0o600),
            "membroker.v1.AdminService",
            lambda server: admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server),
            self._observe_request,
            self._loop.broker.rules.max_sessions,
            self._turns,
            len(self._config.tenants or ("default",)) + 1,
        )
        stack.push_async_callback(server.stop, 1.0)

    async def _open_tenant(self, stack: AsyncExitStack, name: str, tenant: str | None, config: TenantConfig) -> None:
        directory = self._home.endpoint("tenants", name)
        self._endpoints.append(directory)
        ownership = Ownership(
            -1 if config.owner is None else config.owner,
            -1 if config.group is None else config.group,
            0o660 if config.mode is None else config.mode,
            f"tenants.{name}",
        )
        service = BrokerService(name, self._dispatcher, self._views)
        server = await serve(
            self._home,
            directory / "grpc.sock",
            ownership,
            "membroker.v1.BrokerService",
            lambda server: broker_pb2_grpc.add_BrokerServiceServicer_to_server(service, server),
            self._observe_request,
            self._loop.broker.rules.max_sessions,
            self._turns,
            len(self._config.tenants or ("default",)) + 1,
        )
        stack.push_async_callback(server.stop, 1.0)
        sock = self._home.listen(directory / "handoff.sock", ownership)
        device = self._plan.driver.device
        listener = Listener(sock, name, tenant, config.uids, self._dispatcher, device, self._traffic, self._watch)
        stack.callback(listener.close)
        logs.log("endpoint open", tenant=tenant or "each uid", directory=str(directory))

    # --- metrics ---

    def view(self) -> MetricsView:
        """Return what a scrape shows; called on the HTTP server's threads, so the event loop is asked for it."""
        answer: concurrent.futures.Future[MetricsView] = concurrent.futures.Future()
        self._loop.call_threadsafe(lambda: answer.set_result(self._take_view()))
        try:
            self._last_view = answer.result(VIEW_SECONDS)
        except TimeoutError:
            if self._last_view is None:
                raise
        return self._last_view

    def _take_view(self) -> MetricsView:
        return MetricsView(
            snapshot=snapshot.take(self._loop.broker),
            memory={where: self._loop.figures.get(where) for where in self._loop.broker.rules.capacities},
            memory_descriptors_open=self._traffic.descriptors + len(self._store) + self._loop.stocked + 1,
            device=self._plan.driver.device,
            version=__version__,
            refused=dict(self._traffic.refused),
            notices_dropped=self._traffic.notices_dropped,
            stock_changes=dict(self._loop.broker.stock.changes),
            headroom=dict(self._plan.headroom),
            gate_reserve={"device": self._plan.gate_reserve},
            draining=self._loop.broker.draining,
            longest_turn_seconds=self._turns.longest,
            longest_turn_cpu_seconds=self._turns.longest_cpu,
            slow_turns=self._turns.slow,
        )

    def _unready(self) -> str:
        return "stopping" if self._loop.broker.stopping else ""

    def _observe_driver(self, call: str, seconds: float) -> None:
        self._metrics.driver_calls.observe(seconds, call)

    def _observe_request(self, method: str, transport: str, seconds: float) -> None:
        self._metrics.requests.observe(seconds, method, transport)


def _authority(address: str, port: int) -> str:
    """Return address and port as a URL has them."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
