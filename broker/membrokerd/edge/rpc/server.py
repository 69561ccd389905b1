"""gRPC servers, one for each endpoint: a server cannot tell its sockets apart, and the socket is the identity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ...system.device_directory import DeviceDirectory, Ownership
from ..dispatch import Dispatcher
from .health import Health
from .interceptor import MAX_STREAMS, Calls, Guard

CONNECTIONS_BESIDE = 16
"""Connections of an endpoint beyond one for each session: health checks, and connections that are just closing."""
MAX_MESSAGE_BYTES = 64 * 1024
"""Like MAX_STREAMS, it is far above what a worker needs (its largest request has 4,096 ids, 41 KiB), and bounds the
memory that a peer can take by requests that it begins and never ends."""
WINDOW_BYTES = 16 * 1024
"""What a peer may send of a call before the broker reads it; gRPC would let it grow with the peer's speed."""
MAX_PENDING = 1_024
"""Calls of an endpoint that have arrived and that the event loop has not taken yet; above half of it, gRPC refuses
some of them at random."""

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.server.max_pending_requests", MAX_PENDING // 2),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
    ("grpc.so_reuseport", 0),
]


async def serve(
    directory: DeviceDirectory,
    public: Path,
    ownership: Ownership,
    service: str,
    register: Callable[[grpc.aio.Server], None],
    dispatcher: Dispatcher,
    calls: Calls,
) -> grpc.aio.Server:
    """Start a server at `public` with one of our services, health and reflection.

    Connections are bounded: one tenant's idle ones could otherwise take every descriptor from all others. `calls`
    bounds the calls of all endpoints: one that is begun and never ended keeps memory.
    """
    max_connections = dispatcher.loop.broker.books.rules.max_sessions + CONNECTIONS_BESIDE
    server = grpc.aio.server(
        interceptors=[Guard(dispatcher.times_of, dispatcher.loop.turns, calls, public.parent.name)],
        options=[*_OPTIONS, ("grpc.max_allowed_incoming_connections", max_connections)],
    )
    register(server)
    status = Health([service])
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    private = directory.private("grpc")
    server.add_insecure_port(f"unix:{private}")
    await server.start()
    try:
        directory.publish(private, public, ownership)
    except BaseException:
        await server.stop(None)
        raise
    await status.start()
    return server
