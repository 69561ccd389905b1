"""Builds all parts of the daemon, starts them in order, and stops them in reverse order.

This is the only module that knows every other. It must never decide about memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import functools
import os
import signal
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

from membroker.vmm import format_size
from membroker.wire.frames import close_all
from membroker.wire.sessions import sessions_for

from . import __version__
from .config import quotas
from .config.checks import OF_USERS
from .config.config import Config, ConfigError, TenantConfig, without_guarantees
from .config.descriptor_limits import raise_descriptor_limit, segment_extents_for, trouble
from .core import effects as fx
from .core import events as ev
from .core import facts as ft
from .core import snapshot
from .core.checkpoint import checkpoint_facts
from .core.denied import Denied
from .core.machine import Broker
from .core.names import Location
from .core.rows import SessionRow
from .device.executor import Executor
from .device.plan import DeviceError, Plan, changed_rules, check_guarantees, warn_of_guarantees
from .device.suspects import CONTEXT_BYTES
from .edge.convert import Refused
from .edge.dispatch import Dispatcher
from .edge.endpoints import Endpoints
from .edge.handoff.outbox import OutboxCounters
from .edge.listings import BookMessages
from .edge.rpc.admin_service import AdminService
from .edge.tenants import Tenants
from .observe import catalog, status_page
from .observe.cached_text import CachedText
from .observe.history import History
from .observe.html_document import host_name
from .observe.metrics import Metrics, MetricsView, PodView
from .observe.metrics_server import METRICS_PORT, MetricsServer, authority
from .replay.recorder import Recorder
from .restart.descriptor_store import Store, StoredDescriptors
from .restart.journal import Binding, Journal, boot_id
from .restart.mirrors import open_mirror
from .restart.process_watch import Watch
from .restart.takeover import (
    PredecessorBooks,
    cover_lent,
    last_epoch,
    rebuild_books,
    take_descriptors,
    warn_of_holders,
    warn_of_removed_tenants,
    watch_processes,
)
from .runtime.decisions import Decisions
from .runtime.drain import Drain
from .runtime.eviction import Evictions
from .runtime.file_watch import FileWatch
from .runtime.idle_sleep import rules_of
from .runtime.journal_writer import JournalWriter
from .runtime.loop import Loop, clock, seen
from .runtime.reload import Reloader, compare
from .system import logs
from .system.device_directory import DeviceDirectory, DirectoryError
from .system.pods import Pod
from .system.sd_notify import Heartbeat, notify
from .system.turns import Turns, gather, in_portions, spare_collections

VIEW_SECONDS = 2.0
"""How long a scrape waits for the event loop before it fails."""
STOP_SECONDS = 5.0
DEFAULT_MAX_SESSIONS = 1024


class Daemon:
    """One device's broker, from start to stop."""

    def __init__(self, config: Config, plan: Plan, reloader: Reloader, turns: Turns) -> None:
        self._config = config
        self._turns = turns
        self._plan = plan
        self._reloader = reloader
        self._traffic = OutboxCounters()
        self._metrics = Metrics(self.view, plan.driver.device.uuid, model_reasons=config.metrics.model_reasons)
        self._decisions, self._history = Decisions(), History()
        self._recorder: Recorder | None = None
        self._tenants: Tenants | None = None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        stop = asyncio.Event()
        async with AsyncExitStack() as stack:
            await self._start(stack, stop.set)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reloader.ask)
            self._reloader.begin(self._reload)
            size, url = format_size(self._plan.capacities["device"]), self._views.metrics_url
            notify(f"READY=1\nSTATUS=lending {size}\nX_METRICS_URL={url}")  # systemd ignores names with X_
            logs.log("ready", pid=os.getpid(), metrics=self._views.metrics_url or "off")
            spare_collections()
            self._turns.start_over()
            await stop.wait()
            self._reloader.close()
            notify("STOPPING=1")
            logs.log("stopping")
            await self._loop.stop(STOP_SECONDS)
        logs.log("stopped")

    # --- start, in order; the stack stops the parts in reverse order ---

    async def _start(self, stack: AsyncExitStack, stop: Callable[[], None]) -> None:
        commanded = self._open_directory()
        config = self._config
        journal = Journal(self._directory.state / "journal", Binding(boot_id(), self._plan.driver.device.uuid))
        stack.callback(journal.close)
        (books, is_whole), kept = self._read_journal(journal), await self._open_store(stack)
        plan = self._plan = self._take_driver(kept, books.charged)
        stack.callback(plan.driver.close)
        executor = Executor(plan.driver, plan.gate_reserve, self._observe_driver)
        if not is_whole and not isinstance(listed := executor.processes(), Denied):
            warn_of_holders([row for row in listed if row[0] != os.getpid()], books.by_pid)
        stack.callback(executor.stop)
        anchor = executor.drop_anchor()
        self._store.keep_driver(plan.driver.survivors())
        rules = plan.rules(config, anchor, *self._bounds(), cover_lent(plan.capacities, books.charged))
        journal.epoch = self._directory.next_epoch(max(journal.epoch, books.epoch, last_epoch(kept)))
        # More may be lent already than is configured now: that must not hide what the next start would refuse.
        check_guarantees(replace(rules, capacities=plan.capacities))
        broker = Broker(rules, journal.epoch, [*books.facts, *commanded])
        warn_of_guarantees(broker.ledger.quotas, rules, config)
        self._begin_journal(journal, broker)
        writer = JournalWriter(broker, journal, self._metrics.journal.observe, self._directory.is_in_place)
        writer.look()
        self._loop = Loop(
            broker,
            executor,
            self._store,
            audit_seconds=config.audit_seconds,
            figures=executor.figures(),
            context_bytes=CONTEXT_BYTES[plan.driver.device.driver],
            writer=writer,
            turns=self._turns,
            on_audit=self._audited,
            on_step=self._metrics.steps.observe,
            on_wait=self._observe_wait,
            on_recall=self._observe_recall,
        )
        self._loop.idle_sleep.rules = rules_of(config)
        self._dispatcher = Dispatcher(self._loop, functools.cache(self._request_noted), self._decisions)
        self._views = BookMessages(self._loop, plan, self._decisions)
        self._drain = Drain(lambda: not any(total.charged for total in broker.ledger.totals.values()), stop)
        stack.callback(self._drain.end)
        executor.start(asyncio.get_running_loop())
        self._watch = Watch(self._store, self._loop.process_died, self._turns, self._loop.pod_names)
        stack.callback(self._watch.close)
        self._views.pod_of = self._watch.pod
        self._loop.on_forget.append(self._watch.forget)
        self._evictions = Evictions(self._watch)
        stack.callback(self._evictions.close)
        self._take_over(executor, kept)
        if config.record and not self._kept.is_shared:
            self._recorder = Recorder(broker, self._kept.path, clock)
            stack.callback(self._recorder.close)
        self._heartbeat = Heartbeat(asyncio.get_running_loop(), self._directory.state)
        self._start_metrics(stack)
        self._loop.start(None if self._recorder is None else self._recorder.take)
        try:
            await self._open_endpoints(stack)
        except BaseException:
            await self._loop.stop(0)  # else it would use a closed driver
            raise
        stack.callback(FileWatch(self._directory, journal, writer.compact).close)

    def _commanded(self) -> list[ft.Fact]:
        """Return the quotas that an operator set by command, at any daemon of this device, and take the tenants."""
        self._kept = quotas.StateDirectory(quotas.state_directory(self._config, self._plan.directory))
        if trouble := self._kept.trouble():
            logs.warn(trouble)
        kept = self._kept.read().beside(self._config)
        self._config = self._config.with_created(kept.tenants)
        return [
            ft.QuotaSet(tenant, model, location, quota.limit, quota.guarantee, quota.weight)
            for (tenant, model, location), quota in kept.quotas.items()
        ]

    def _read_journal(self, journal: Journal) -> tuple[PredecessorBooks, bool]:
        """Return the predecessor's books, and False if some of them are missing."""
        try:
            books, notes = journal.read(rebuild_books)
        except OSError as error:
            raise DirectoryError(
                f"cannot read {error.filename}: {error.strerror}; fix that, or move the file away: "
                "the books then start empty"
            ) from error
        for note in notes:
            logs.warn(note)
        return books, not notes and bool(books.facts or not self._directory.had_predecessor())

    def _begin_journal(self, journal: Journal, broker: Broker) -> None:
        try:
            journal.begin(checkpoint_facts(broker.ledger))
        except OSError as error:
            raise DirectoryError(
                f"cannot write the journal in {self._directory.state}: {error.strerror}; free some disk space. "
                "Workers keep the memory they have meanwhile"
            ) from error

    def _open_directory(self) -> list[ft.Fact]:
        """Make the directory this daemon's, and return the quotas that were set by command."""
        self._directory = DeviceDirectory(self._config.runtime_directory, self._plan.directory)
        self._directory.clear_private()
        device = self._plan.driver.device
        if not self._directory.write_index(device.index, yields=device.driver == "host"):
            logs.warn(
                "a GPU's daemon has this number already: `membroker --device` needs this device's name",
                number=device.index,
                name=self._plan.directory,
            )
        commanded = self._commanded()
        names = self._config.endpoints
        for name in names:  # report a path that is too long for a socket first
            self._directory.endpoint("tenants", name)
        self._directory.clear_endpoints(names)
        return commanded

    async def _open_store(self, stack: AsyncExitStack) -> StoredDescriptors:
        owner = os.path.realpath(self._directory.root)
        mirror, kept = await open_mirror(self._config, self._keeper_socket(), owner)
        self._store = Store(mirror)
        stack.callback(lambda: close_all(self._store.close()))
        self._store.adopt(kept)
        return kept

    def _keeper_socket(self) -> Path:
        configured = self._config.keeper_socket
        if configured is None:
            return self._directory.state / "fdstore.sock"
        index = str(self._plan.driver.device.index)
        return Path(str(configured).replace("{device}", self._plan.directory).replace("{index}", index))

    def _take_driver(self, kept: StoredDescriptors, charged: Mapping[Location, int]) -> Plan:
        """Return the plan with a driver that knows what an earlier daemon's driver has lent."""
        if not kept.driver:
            return self._plan
        if kept.driver.keys() != self._plan.driver.survivors().keys():
            logs.warn(
                "the descriptor store has only some of the driver's descriptors, or another driver's: dropped them",
                names=" ".join(sorted(kept.driver)),
            )
            self._store.forget_driver()
            return self._plan
        self._plan.driver.close()
        survivors = {name: os.dup(descriptor) for name, descriptor in kept.driver.items()}
        return replace(self._plan, driver=self._plan.reopen(survivors, charged))

    def _take_over(self, executor: Executor, kept: StoredDescriptors) -> None:
        """Continue with the predecessor's books."""
        ledger = self._loop.broker.ledger
        lost = take_descriptors(ledger, self._store, executor, kept)
        self._loop.tell(ev.Restarted(lost, seen(self._loop.figures)))
        watch_processes(ledger, self._watch, kept)
        for row in ledger.sessions.values():
            pod = self._watch.pod(row.session)
            logs.know_session(row.session, row.tenant, row.pid, row.client, row.began_at, pod)
        warn_of_removed_tenants(ledger, self._config.endpoints)
        if ledger.sessions or ledger.segments:
            charged = sum(total.charged for total in ledger.totals.values())
            logs.log(
                "took over the books",
                sessions=len(ledger.sessions),
                segments=len(ledger.segments),
                charged_bytes=charged,
            )

    def _bounds(self) -> tuple[int, int]:
        """Return the maximum number of sessions, and of extents that all segments have together."""
        descriptors = raise_descriptor_limit()
        wanted = self._config.max_sessions
        if wanted is not None and (why := trouble(wanted, descriptors)):
            raise DirectoryError(why)
        sessions = min(sessions_for(descriptors), DEFAULT_MAX_SESSIONS) if wanted is None else wanted
        extents = segment_extents_for(descriptors, sessions, self._plan.stock_extents)
        logs.log("limits", descriptors=descriptors, max_sessions=sessions, max_segment_extents=extents)
        return sessions, extents

    def _start_metrics(self, stack: AsyncExitStack) -> None:
        metrics = self._config.metrics
        if not metrics.enabled:
            return
        port = METRICS_PORT + self._plan.driver.device.index if metrics.port is None else metrics.port
        states = {"/healthz": self._heartbeat.health, "/readyz": self._readiness}
        page = CachedText(lambda: status_page.page(self.view(), self._metrics.waits_ended()).encode())

        def listen(port: int) -> MetricsServer:
            return MetricsServer(metrics.address, port, self._metrics.render, states, page.get)

        try:
            try:
                server = listen(port)
            except OSError as error:
                # Any user can take the port of a daemon that has ended. Its workers wait for this one.
                if error.errno != errno.EADDRINUSE or not self._loop.broker.ledger.sessions:
                    raise
                server = listen(0)
                logs.warn(
                    "another process has the port of the metrics: they are at another port until the next start",
                    port=port,
                    metrics=server.server_port,
                )
        except OSError as error:
            other = "port with --metrics-port (0 for a free one)"
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                other = "metrics.address that this machine has"
            raise DirectoryError(
                f"cannot serve metrics on {authority(metrics.address, port)}: {error.strerror}; "
                f"choose another {other}, or metrics.enabled = false"
            ) from error
        server.start()
        stack.callback(server.close)
        self._views.metrics_url = f"http://{authority(server.server_name, server.server_port)}/metrics"

    async def _open_endpoints(self, stack: AsyncExitStack) -> None:
        self._endpoints = Endpoints(self._directory, self._dispatcher, self._views, self._traffic, self._watch)
        stack.push_async_callback(self._endpoints.close)
        if self._config.uid_tenants:
            mode = 0o666 if os.geteuid() == 0 else 0o660
            await self._endpoints.open(OF_USERS, None, TenantConfig(mode=mode))
        for name, tenant in self._config.tenants.items():
            await self._endpoints.open(name, name, tenant)
        tenants = Tenants(self._loop, lambda: self._config, self._apply, self._kept.write, self._endpoints)
        stack.callback(tenants.close)
        await tenants.resume()
        self._tenants = tenants
        service = AdminService(self._loop, self._views, tenants, self._drain, self._evictions, self._reloader)
        await self._endpoints.open_admin(service, stack)

    def _apply(self, config: Config) -> None:
        """Put into force what a configuration says of the rules of lending and of sleep."""
        self._config = config
        self._loop.broker.change_rules(changed_rules(self._loop.broker.books.rules, config))
        self._loop.idle_sleep.rules = rules_of(config)
        if self._recorder is not None:
            self._recorder.begin("the rules have changed")

    # --- reload ---

    async def _reload(self, config: Config) -> list[str]:
        """Apply the changes that need no restart; log and return the keys that are not in force."""
        assert self._tenants is not None, "the daemon runs"
        async with self._tenants.lock:
            return await self._reload_tenants(config, self._tenants)

    async def _reload_tenants(self, config: Config, commands: Tenants) -> list[str]:
        changes, created = compare(self._config.of_file, config), self._config.created
        made_by_command = len(created)
        try:
            check_guarantees(changed_rules(self._loop.broker.books.rules, changes.config))
        except DeviceError as error:
            raise ConfigError([str(error)]) from error
        tenants, pending = dict(changes.config.tenants), list(changes.fixed)
        for name in changes.removed:
            holds = commands.holdings(name)
            if any(holds.values()):
                tenants[name] = without_guarantees(self._config.tenants[name])
                pending.append(f"tenants.{name}")
                logs.warn(
                    "a removed tenant stays while it has sessions or memory: end them, then reload again",
                    tenant=name,
                    sessions=holds["sessions"],
                    charged=format_size(holds["charged_bytes"]),
                )
            else:
                await self._endpoints.close_one(name)
        for name in changes.added:
            try:
                if name not in created:
                    await self._endpoints.open(name, name, tenants[name])
                elif created[name].deleting:
                    raise DirectoryError("a tenant of that name is being deleted: reload again when it is gone")
                else:
                    del created[name]
                    logs.log("a tenant that was made by command is in the configuration now", tenant=name)
            except (DirectoryError, OSError, RuntimeError) as error:  # gRPC raises RuntimeError
                del tenants[name]
                pending.append(f"tenants.{name}")
                logs.warn("a tenant is not added: its endpoint cannot be opened", tenant=name, error=str(error))
        self._apply(replace(changes.config, tenants=tenants).with_created(created))
        if len(created) < made_by_command:
            with suppress(Refused):  # the configuration goes before what the file of quotas has
                await commands.keep_quotas({})
        for name, tenant in tenants.items():
            self._endpoints.admit(name, tenant.uids)
        warn_of_guarantees(self._loop.broker.ledger.quotas, self._loop.broker.books.rules, self._config)
        logs.set_level(self._config.log.level)
        if changes.fixed:
            logs.warn("these keys have changed and need a restart of the daemon", keys=list(changes.fixed))
        logs.log("configuration reloaded", tenants=list(tenants))
        return pending

    # --- metrics ---

    def view(self) -> MetricsView:
        """Return the values for a scrape. Runs on the HTTP server's threads and gets them from the event loop."""
        answer: concurrent.futures.Future[MetricsView] = concurrent.futures.Future()

        self._loop.call_threadsafe(lambda: in_portions(self._take_view(), answer.set_result))
        return answer.result(VIEW_SECONDS)

    def _take_view(self) -> Generator[None, None, MetricsView]:
        """Return the view of a scrape, as work for `in_portions`. The sums are as of its last step."""
        loop, plan, broker = self._loop, self._plan, self._loop.broker
        models = yield from gather(snapshot.each_model(broker))
        segments = yield from gather(snapshot.each_segment(broker))
        sessions = snapshot.count_sessions(broker)
        return MetricsView(
            locations=snapshot.take_locations(broker),
            tenants=snapshot.take_tenants(broker, self._config.tenants),
            models=tuple(models),
            segments=tuple(segments),
            sessions=sessions,
            memory={where: loop.figures.get(where) for where in broker.books.rules.capacities},
            device=plan.driver.device,
            version=__version__,
            figures={
                catalog.DEVICE_GRANULARITY: plan.driver.device.granularity,
                catalog.DRAINING: broker.books.draining,
                catalog.JOURNAL_FULL: bool(broker.books.cannot_write),
                catalog.DEVICE_LOST: bool(broker.books.device_lost),
                catalog.DRIVER_FALLBACK: plan.fell_back,
                catalog.RELOADED: not self._reloader.state.problems,
                catalog.RELOADED_AT: self._reloader.state.at,
                catalog.DESCRIPTORS: self._traffic.descriptors + len(loop.store) + loop.packets.stocked + 1,
                catalog.NOTICES_DROPPED: self._traffic.notices_dropped,
                catalog.EVICTIONS: self._evictions.count,
                catalog.LOG_DROPPED: logs.dropped(),
                catalog.OBSERVERS: len(broker.ledger.sessions) - sessions.total(),
                catalog.SESSIONS_LIMIT: broker.books.rules.max_sessions,
                catalog.SCRAPE_TIME: time.time(),
                catalog.LONGEST_TURN: loop.turns.longest,
                catalog.LONGEST_TURN_CPU: loop.turns.longest_cpu,
                catalog.SLOW_TURNS: loop.turns.slow,
            },
            unproven_releases=dict(broker.releasing.unproven),
            refused=dict(self._traffic.refused),
            denials=dict(broker.books.device_denials),
            stock_changes=dict(broker.stock.changes),
            asleep={row.name: sleep.asleep for row in models if (sleep := loop.idle_sleep.of_model(row.name))},
            guests={row.name: found for row in models if (found := loop.guests.of_model(row.name, 0))},
            pods=self._pods(),
            headroom=plan.headroom,
            gate_reserve=plan.gate_reserve,
            history=self._history.samples,
            host=host_name(),
        )

    def _pods(self) -> tuple[PodView, ...]:
        """Return the pods that have sessions, with what these are charged."""
        found: dict[tuple[str, Pod], list[SessionRow]] = {}
        for row in self._loop.broker.ledger.sessions.values():
            if pod := self._watch.pod(row.session):
                found.setdefault((row.tenant, pod), []).append(row)
        places = self._loop.broker.books.rules.capacities
        return tuple(
            PodView(
                pod.uid,
                pod.name,
                tenant,
                len(rows),
                {where: sum(row.charged(where) for row in rows) for where in places},
            )
            for (tenant, pod), rows in sorted(found.items())
        )

    def _readiness(self) -> tuple[bool, str]:
        alive, sentence = self._heartbeat.health()
        if not alive:
            return False, sentence
        if self._loop.broker.books.stopping:
            return False, "stopping"
        if lost := self._loop.broker.books.device_lost:
            return False, f"the device does not answer: {lost}"
        if self._plan.fell_back:
            return True, 'ok, but no usable GPU was found (driver = "auto"): this broker lends host memory'
        return True, "ok"

    def _audited(self) -> None:
        self._metrics.count()
        if self._tenants is not None:
            self._tenants.look()
        self._history.look(self._loop.broker)

    def _request_noted(self, method: str, transport: str) -> Callable[[float], None]:
        return self._metrics.request(method, transport).observe

    def _observe_driver(self, call: str, seconds: float) -> None:
        self._metrics.driver_call(call).observe(seconds)

    def _observe_wait(self, waited: fx.Waited) -> None:
        self._metrics.waits[waited.result, waited.guaranteed].observe(waited.waited_ns / 1e9)
        self._decisions.waited(waited)
        logs.log_wait(waited)

    def _observe_recall(self, recalled: fx.Recalled) -> None:
        self._metrics.recalls[recalled.result].observe(recalled.after_ns / 1e9)
        self._decisions.recalled(recalled)
        logs.log_recall(recalled)
