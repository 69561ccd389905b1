"""gRPC servers, one for each endpoint: a server cannot tell its sockets apart, and the socket is the identity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from membroker.wire.paths import grpc_target

from .health import Health
from .interceptor import MAX_STREAMS, Guard

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


async def serve(path: Path, service: str, register: Callable[[grpc.aio.Server], None], guard: Guard) -> grpc.aio.Server:
    """Start a server at `path` with one of our services, health and reflection, and return it.

    `guard` wraps its calls. Only the proxy of the endpoint connects to it.
    """
    server = grpc.aio.server(interceptors=[guard], options=_OPTIONS)
    register(server)
    status = Health([service])
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    server.add_insecure_port(grpc_target(path))
    await server.start()
    await status.start()
    return server
