"""The open endpoints of the tenants and of the operator, each with its sockets and servers.

Opens and closes them, at the start, at a reload and at the end. It must never decide which tenants there are: the
configuration does.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc

from membroker.v1 import admin_pb2_grpc, broker_pb2_grpc

from ..config.config import TenantConfig
from ..core.denied import Denied
from ..restart.process_watch import Watch
from ..system import logs
from ..system.device_directory import DeviceDirectory, Ownership
from .acceptor import Refusals
from .dispatch import Dispatcher
from .handoff.endpoint import HandoffEndpoint
from .handoff.listener import Listener
from .handoff.outbox import OutboxCounters
from .listings import BookMessages
from .rpc.broker_service import BrokerService
from .rpc.interceptor import CallCount, Guard
from .rpc.proxy import CONNECTIONS_BESIDE, Proxy
from .rpc.server import serve

STOP_SECONDS = 1.0
"""How long the gRPC calls of an endpoint that closes may take to end."""


@dataclass(frozen=True, slots=True)
class _OpenEndpoint:
    """An open endpoint of a tenant; `parts` close it."""

    listener: Listener
    parts: AsyncExitStack


class Endpoints:
    """The endpoints that are open."""

    def __init__(
        self,
        directory: DeviceDirectory,
        dispatcher: Dispatcher,
        views: BookMessages,
        traffic: OutboxCounters,
        watch: Watch,
    ) -> None:
        self._directory = directory
        self._dispatcher = dispatcher
        self._views = views
        self._traffic = traffic
        self._watch = watch
        self._open: dict[str, _OpenEndpoint] = {}
        self._calls = CallCount(lambda: len(self._open) + 1)  # the operator's endpoint is not among the open ones

    def check(self, name: str) -> None:
        """Raise `DirectoryError` if a tenant's sockets cannot have their place."""
        self._directory.check(name)

    async def open(self, name: str, tenant: str | None, config: TenantConfig) -> None:
        """Open the endpoint of a tenant; with `tenant=None` each uid is a tenant.

        Raises `DirectoryError`, `OSError`, and `RuntimeError` for gRPC.
        """
        directory = self._directory.endpoint("tenants", name)
        ownership = Ownership(
            -1 if config.owner is None else config.owner,
            -1 if config.group is None else config.group,
            0o660 if config.mode is None else config.mode,
            f"tenants.{name}",
        )
        service = BrokerService(name, self._dispatcher, self._views)
        device = self._views.plan.driver.device
        endpoint = HandoffEndpoint(
            name=name,
            tenant=tenant,
            dispatcher=self._dispatcher,
            views=self._views,
            device=device,
            traffic=self._traffic,
            watch=self._watch,
            refusals=Refusals(name, self._traffic.refused),
        )
        async with AsyncExitStack() as stack:
            stack.callback(self._directory.close, directory)
            await self._serve(
                directory / "grpc.sock",
                ownership,
                endpoint.tenant_of,
                endpoint.refusals,
                "membroker.v1.BrokerService",
                lambda server: broker_pb2_grpc.add_BrokerServiceServicer_to_server(service, server),
                stack,
                has_users=tenant is None,
            )
            sock = self._directory.listen(directory / "handoff.sock", ownership)
            listener = Listener(sock, endpoint, config.uids)
            stack.callback(listener.close)
            self._open[name] = _OpenEndpoint(listener, stack.pop_all())
        logs.log("endpoint open", tenant=tenant or "each uid", directory=str(directory))

    async def open_admin(self, service: admin_pb2_grpc.AdminServiceServicer, stack: AsyncExitStack) -> None:
        """Open the operator's endpoint, which `stack` closes."""
        directory = self._directory.endpoint("admin", mode=0o700)
        stack.callback(self._directory.close, directory)
        await self._serve(
            directory / "grpc.sock",
            Ownership(mode=0o600),
            lambda _: directory.name,
            Refusals(directory.name, self._traffic.refused),
            "membroker.v1.AdminService",
            lambda server: admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server),
            stack,
            is_admin=True,
        )

    async def _serve(
        self,
        public: Path,
        ownership: Ownership,
        tenant_of: Callable[[int], str],
        refusals: Refusals,
        service: str,
        register: Callable[[grpc.aio.Server], None],
        stack: AsyncExitStack,
        *,
        has_users: bool = False,
        is_admin: bool = False,
    ) -> None:
        """Start a gRPC server with one of our services, and a proxy in front of it at `public`; `stack` ends both."""
        loop = self._dispatcher.loop
        private = self._directory.private("grpc")
        stack.callback(self._directory.discard, private)
        guard = Guard(self._dispatcher, self._calls, refusals.endpoint, has_users=has_users, is_admin=is_admin)
        sock = self._directory.listen(public, ownership, socket.SOCK_STREAM)
        stack.callback(sock.close)
        server = await serve(private, service, register, guard)
        proxy = Proxy(
            sock,
            private,
            tenant_of=tenant_of,
            max_connections=loop.broker.books.rules.max_sessions + CONNECTIONS_BESIDE,
            turns=loop.turns,
            refusals=refusals,
            announces=is_admin,
        )
        stack.callback(proxy.close)
        stack.push_async_callback(server.stop, STOP_SECONDS)

    def close_to_new(self, name: str, why: Denied) -> None:
        """Open no session at a tenant's endpoint from now on; tell those that are open to release all."""
        self._open[name].listener.close_to_new(why)

    def admit(self, name: str, uids: frozenset[int]) -> None:
        """Let only these users open sessions at a tenant's endpoint from now on. Open sessions stay."""
        self._open[name].listener.admit(uids)

    async def close_one(self, name: str) -> None:
        """Close the endpoint of a tenant."""
        await self._open.pop(name).parts.aclose()
        logs.log("endpoint closed", tenant=name)

    async def remove(self, name: str) -> None:
        """Close the endpoint of a tenant for good: its directory goes, too. It may be closed already."""
        if name in self._open:
            await self.close_one(name)
        self._directory.remove(self._directory.root / "tenants" / name)

    async def close(self) -> None:
        """Close the endpoints of all tenants, the latest first."""
        while self._open:
            _, endpoint = self._open.popitem()
            await endpoint.parts.aclose()
