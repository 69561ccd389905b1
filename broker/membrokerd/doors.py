"""The doors: the open endpoints of the tenants and of the operator, each with its sockets and servers.

Opens and closes them, at the start, at a reload and at the end. It must never decide which tenants there are: the
configuration does.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from membroker.v1 import admin_pb2_grpc, broker_pb2_grpc

from .config.config import TenantConfig
from .edge.dispatch import Dispatcher
from .edge.handoff.entrance import Entrance
from .edge.handoff.listener import Listener
from .edge.handoff.outbox import Traffic
from .edge.listings import Views
from .edge.rpc.admin_service import AdminService
from .edge.rpc.broker_service import BrokerService
from .edge.rpc.interceptor import Calls
from .edge.rpc.server import serve
from .home import Home, Ownership
from .observe import logs
from .restart.process_watch import Watch

STOP_SECONDS = 1.0
"""How long the gRPC calls of an endpoint that closes may take to end."""


@dataclass(frozen=True, slots=True)
class _Door:
    """An open endpoint of a tenant; `parts` close it."""

    listener: Listener
    parts: AsyncExitStack


class Doors:
    """The endpoints that are open."""

    def __init__(
        self,
        home: Home,
        dispatcher: Dispatcher,
        views: Views,
        traffic: Traffic,
        watch: Watch,
    ) -> None:
        self._home = home
        self._dispatcher = dispatcher
        self._views = views
        self._traffic = traffic
        self._watch = watch
        self._open: dict[str, _Door] = {}
        self._calls = Calls(lambda: len(self._open) + 1)  # the operator's endpoint is not among the doors

    async def open(self, name: str, tenant: str | None, config: TenantConfig) -> None:
        """Open the endpoint of a tenant; with `tenant=None` each uid is a tenant.

        Raises `HomeError`, `OSError`, and `RuntimeError` for gRPC.
        """
        directory = self._home.endpoint("tenants", name)
        ownership = Ownership(
            -1 if config.owner is None else config.owner,
            -1 if config.group is None else config.group,
            0o660 if config.mode is None else config.mode,
            f"tenants.{name}",
        )
        service = BrokerService(name, self._dispatcher, self._views)
        async with AsyncExitStack() as stack:
            stack.callback(self._home.close, directory)
            server = await serve(
                self._home,
                directory / "grpc.sock",
                ownership,
                "membroker.v1.BrokerService",
                lambda server: broker_pb2_grpc.add_BrokerServiceServicer_to_server(service, server),
                self._dispatcher,
                self._calls,
            )
            stack.push_async_callback(server.stop, STOP_SECONDS)
            sock = self._home.listen(directory / "handoff.sock", ownership)
            device = self._views.plan.driver.device
            entrance = Entrance(name, tenant, self._dispatcher, device, self._traffic, self._watch)
            listener = Listener(sock, entrance, config.uids)
            stack.callback(listener.close)
            self._open[name] = _Door(listener, stack.pop_all())
        logs.log("endpoint open", tenant=tenant or "each uid", directory=str(directory))

    async def open_admin(self, service: AdminService, stack: AsyncExitStack) -> None:
        """Open the operator's endpoint, which `stack` closes."""
        directory = self._home.endpoint("admin", mode=0o700)
        stack.callback(self._home.close, directory)
        server = await serve(
            self._home,
            directory / "grpc.sock",
            Ownership(mode=0o600),
            "membroker.v1.AdminService",
            lambda server: admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server),
            self._dispatcher,
            self._calls,
        )
        stack.push_async_callback(server.stop, STOP_SECONDS)

    def admit(self, name: str, uids: frozenset[int]) -> None:
        """Let only these users open sessions at a tenant's endpoint from now on. Open sessions stay."""
        self._open[name].listener.admit(uids)

    async def close_one(self, name: str) -> None:
        """Close the endpoint of a tenant."""
        await self._open.pop(name).parts.aclose()
        logs.log("endpoint closed", tenant=name)

    async def close(self) -> None:
        """Close the endpoints of all tenants, the latest first."""
        while self._open:
            _, door = self._open.popitem()
            await door.parts.aclose()
