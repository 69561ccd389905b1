"""gRPC: the calls of BrokerService at one endpoint, with their errors as the library's.

Owns a channel, made at the first call, and the translation of an RpcError. It must never stream (a streaming call
that races the interpreter's exit can hang for ever), never retry, and never touch the channel in a forked child.
A channel finds the next broker by itself: what is lost with the one before is its caller's to make anew.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status

from ..errors import BrokerUnavailable, DescriptorLimit, MembrokerError, from_status
from ..interrupts import uninterrupted
from .endpoint import DESCRIPTORS_SHORT, check_path

if TYPE_CHECKING:
    import grpc

    from .call import Outcome

logger = logging.getLogger("membroker")

CONTROL_SECONDS = 30.0
"""How long a call that moves no memory may take."""
PATIENT_SECONDS = 5.0
"""How long the first of them may take over a channel that has to find a new broker."""

TOKEN_METADATA = "membroker-token"
STATUS_METADATA = "grpc-status-details-bin"
_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Named for a pause, it is how long one attempt to connect may take: 50 ms failed calls on a busy machine.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 200),
)
_ENDED = {
    "UNAVAILABLE": "is gone, or ended under the call",
    "DEADLINE_EXCEEDED": "did not answer in time",
    "CANCELLED": "has not answered a call that was cancelled",
}
"""What gRPC's own codes say of a broker, where it has not answered."""
_LOOK = "see that it runs (`pgrep -a membrokerd`), or start it with `membrokerd`"
_DESCRIPTORS_OF_A_CHANNEL = 8
# Channels of a forked child's parent: never collected here, because ending one runs gRPC's code.
_inherited: list[object] = []


class GrpcCalls:
    """Unary calls at `<endpoint>/grpc.sock` with a session's token; `service` makes the stub of a channel."""

    def __init__(
        self, socket_path: Path, token: str = "", service: Callable[[grpc.Channel], Any] | None = None
    ) -> None:
        self._path = socket_path
        self._metadata = ((TOKEN_METADATA, token),) if token else ()
        self._service = service
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stub: Any = None
        self.patient = False
        """Whether a call waits until a broker is there: up to the first answer, where its handoff socket was there."""

    def call(self, method: str, request: Message, timeout: float | None = None) -> Any:
        """Make the call and return its response; `timeout` in seconds.

        Raises the broker's refusal, typed, and `BrokerUnavailable` when no broker answers.
        """
        # An interrupt inside gRPC's own code would leave its channel locked for every other thread, for ever.
        return uninterrupted(lambda: self._call(method, request, timeout), patience=0)

    def _call(self, method: str, request: Message, timeout: float | None) -> Any:
        import grpc

        try:
            ask = getattr(self._open(), method)
            options: dict[str, Any] = {"metadata": self._metadata, "timeout": timeout}
            if self.patient:
                options.update(wait_for_ready=True, timeout=PATIENT_SECONDS)
            response = ask(request, **options)
        except grpc.RpcError as error:
            raise self._translate(error) from error
        self.patient = False
        return response

    def start(self, method: str, request: Message, finish: Callable[[Outcome], None]) -> None:
        """Begin the call; `finish` gets the response or the error, in a thread of gRPC's."""
        uninterrupted(lambda: self._start(method, request, finish))

    def _start(self, method: str, request: Message, finish: Callable[[Outcome], None]) -> None:
        future = getattr(self._open(), method).future(
            request, metadata=self._metadata, wait_for_ready=self.patient or None
        )
        future.add_done_callback(lambda done: finish(self._outcome(done)))

    def _outcome(self, future: Any) -> Outcome:
        import grpc

        try:
            response: Message = future.result()
        except grpc.RpcError as error:
            return self._translate(error)
        except grpc.FutureCancelledError:
            return BrokerUnavailable(f"the call at {self._path} was cancelled: its client is closed")
        return response

    def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        with self._lock:
            channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()

    def abandon(self) -> None:
        """In a forked child: let go without a call into gRPC, which does not survive a fork."""
        _inherited.extend((self._channel, self._stub))
        self._channel = self._stub = None

    def _open(self) -> Any:
        with self._lock:
            if self._stub is None:
                import grpc

                check_path(self._path)
                _check_descriptors()
                self._channel = grpc.insecure_channel(f"unix:{self._path}", options=_OPTIONS)
                self._stub = (self._service or _broker_service)(self._channel)
            return self._stub

    def _translate(self, error: Any) -> MembrokerError:
        import grpc

        for key, value in error.trailing_metadata() or ():
            if key == STATUS_METADATA:
                try:
                    return from_status(Status.FromString(value))
                except DecodeError:
                    break
        # gRPC's words are of its addresses and channels: for who looks into it, and nobody else.
        code, details = error.code(), error.details()
        logger.debug("a call at %s ended with gRPC's %s: %s", self._path, code.name, details)
        what = _ENDED.get(code.name)
        if what is not None:
            return BrokerUnavailable(f"the broker at {self._path} {what}: {_LOOK}")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return MembrokerError(
                f"the broker at {self._path} does not know this call: it is of another version, or serves it elsewhere"
            )
        return MembrokerError(f"the call at {self._path} failed in gRPC itself, with {code.name}: {details}")


def _check_descriptors() -> None:
    """Raise `DescriptorLimit` before gRPC would end the process: it aborts when it cannot have what it begins with."""
    with ExitStack() as taken:
        try:
            for _ in range(_DESCRIPTORS_OF_A_CHANNEL):
                taken.callback(os.close, os.eventfd(0))
        except OSError as error:
            raise DescriptorLimit(DESCRIPTORS_SHORT) from error


def _broker_service(channel: grpc.Channel) -> Any:
    from ..v1.broker_pb2_grpc import BrokerServiceStub

    return BrokerServiceStub(channel)
