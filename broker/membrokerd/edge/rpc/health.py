"""The health service of one endpoint. A name that is not served is refused: no peer can make the broker keep names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from .interceptor import refuse


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """Reports SERVING for the services of this endpoint, and refuses every other name."""

    def __init__(self, served: Iterable[str]) -> None:
        super().__init__()
        self._served = frozenset(("", *served))

    async def start(self) -> None:
        """Start to report all services as serving."""
        for name in self._served:
            await self.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Stream the health of a name that is served here; any other ends the call with NOT_FOUND, as Check does."""
        if request.service not in self._served:
            refuse(context, grpc.StatusCode.NOT_FOUND)
        else:
            await super().Watch(request, context)
