"""gRPC servers, one for each endpoint: a server cannot tell its sockets apart, and the socket is the identity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..home import Home, Ownership
from .guard import Guard

CONNECTIONS_BESIDE = 16
"""Connections of an endpoint above one for each session: health checks, and those that are just going."""
MAX_MESSAGE_BYTES = 64 * 1024
MAX_STREAMS = 32
"""Both far above what a worker needs (its largest request has 4,096 ids, 41 KiB), and both bound what those can have of
the daemon's memory who begin a request and never end it."""

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.so_reuseport", 0),
]


async def serve(
    home: Home,
    public: Path,
    ownership: Ownership,
    service: str,
    register: Callable[[grpc.aio.Server], None],
    observe: Callable[[str, str, float], None],
    max_sessions: int,
) -> grpc.aio.Server:
    """Start a server at `public` with one of our services, health and reflection.

    Connections are bounded: one tenant's idle ones could otherwise take every descriptor from all others.
    """
    bound = ("grpc.max_allowed_incoming_connections", max_sessions + CONNECTIONS_BESIDE)
    server = grpc.aio.server(interceptors=[Guard(observe)], options=[*_OPTIONS, bound])
    register(server)
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    private = home.private("grpc")
    server.add_insecure_port(f"unix:{private}")
    await server.start()
    try:
        home.publish(private, public, ownership)
    except BaseException:
        await server.stop(None)
        raise
    for name in ("", service):
        await status.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server
