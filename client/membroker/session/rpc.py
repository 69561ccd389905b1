"""gRPC: the calls of a service at one socket, with their errors as the library's, and frames sent as such calls.

Owns a channel, made at the first call, and the translation of an RpcError. It must never stream (a streaming call that
races the interpreter's exit can hang forever), never retry, and never touch the channel in a forked child. A channel
finds the next broker by itself; a call that the last one did not answer is the caller's to repeat.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status

from ..errors import BrokerUnavailable, MembrokerError, from_status
from ..interrupts import uninterrupted
from ..threads import check_threads
from ..v1.handoff_pb2 import Frame
from ..wire.names import MAX_PAGE_ROWS, STATUS_METADATA, TOKEN_METADATA
from ..wire.paths import grpc_target
from .endpoint import call_failed, check_path

if TYPE_CHECKING:
    import grpc

logger: logging.Logger = logging.getLogger("membroker")

CONTROL_SECONDS = 30.0
"""How long a call that moves no memory may take."""
PATIENT_SECONDS = 5.0
"""How long the first of them may take over a channel that has to find a new broker."""

Outcome = Message | MembrokerError
"""The end of a call: the response, or the refusal as it will be raised."""

METHODS = {
    "allocate": ("AllocateExtents", "count"),
    "create_segment": ("CreateSegment", "extents"),
    "attach_segment": ("AttachSegment", "extents"),
    "seal_segment": ("SealSegment", ""),
    "delete_segment": ("DeleteSegment", ""),
    "register_model": ("RegisterModel", ""),
    "unregister_model": ("UnregisterModel", ""),
    "get_device": ("GetDevice", ""),
    "get_available": ("GetAvailable", ""),
    "get_model": ("GetModel", ""),
    "list_models": ("ListModels", ""),
    "list_sessions": ("ListSessions", ""),
    "list_segments": ("ListSegments", ""),
    "list_decisions": ("ListDecisions", ""),
}
"""The frames that can be sent by gRPC instead: the method, and the field of its answer that counts the extents.

Releases, detaches and declarations have no place here. They are frames on the handoff socket in any session: a broker
that does not answer in time still reads them later, once.
"""

READS = ("get_device", "get_available", "get_model", "list_models", "list_sessions", "list_segments", "list_decisions")
"""Those of them that only read the books: their requests have no ids."""

_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Despite its name, how long one attempt to connect may take: with 50 ms, calls failed on a busy machine.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 200),
)
_ENDED = {
    "UNAVAILABLE": "is gone, or ended under the call",
    "DEADLINE_EXCEEDED": "did not answer in time",
    "CANCELLED": "has not answered a call that was cancelled",
}
"""What gRPC's own codes say of a broker that has not answered."""
_LOOK = "see that it runs (`pgrep -a membrokerd`), or start it with `membrokerd`"
_DESCRIPTORS_OF_A_CHANNEL = 8
_THREADS_OF_A_CHANNEL = min(16, max(4, os.cpu_count() or 1)) + 4
"""gRPC ends the process (SIGABRT) where a thread cannot start. At its first call it starts about so many."""
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
        self._frames: set[Any] = set()
        """The calls of frames that have no answer yet."""
        self.patient: bool = False
        """Whether a call waits until a broker is there: after a resume, up to the first answer."""

    def call(self, method: str, request: Message, timeout: float | None = None) -> Any:
        """Make the call and return its response; `timeout` in seconds.

        Raises the broker's refusal, typed, and `BrokerUnavailable` when no broker answers.
        """
        # Ctrl-C inside gRPC would leave its channel locked for every other thread.
        return uninterrupted(lambda: self._call(method, request, timeout), patience=0)

    def _call(self, method: str, request: Message, timeout: float | None) -> Message:
        outcome = self._outcome(self._begin(method, request, PATIENT_SECONDS if self.patient else timeout))
        if isinstance(outcome, MembrokerError):
            raise outcome
        return outcome

    def start(
        self, frame: Frame, finish: Callable[[Outcome, int], None], timeout: float | None
    ) -> Callable[[], object]:
        """Send the request of a frame as a call, and return what cancels it.

        `finish` gets the response or the error, and how many extents come with it on the handoff socket, in any thread.
        """
        kind = str(frame.WhichOneof("kind"))
        method, count = METHODS[kind]
        request = getattr(frame, kind)
        if kind not in READS:
            request.request_id = frame.request_id

        def answered(future: Any) -> None:
            self._frames.discard(future)
            outcome = self._outcome(future)
            finish(outcome, 0 if isinstance(outcome, MembrokerError) or not count else getattr(outcome, count))

        def begin() -> Callable[[], object]:
            future = self._begin(method, request, timeout)
            self._frames.add(future)
            future.add_done_callback(answered)
            return cast("Callable[[], object]", future.cancel)

        return uninterrupted(begin)

    def cancel_frames(self) -> None:
        """Cancel the calls of frames: a broker that reads them later would deliver to the session's next connection."""
        for future in list(self._frames):
            future.cancel()

    def _begin(self, method: str, request: Message, timeout: float | None) -> Any:
        call = getattr(self._open(), method)
        try:
            return call.future(request, metadata=self._metadata, timeout=timeout, wait_for_ready=self.patient or None)
        except ValueError as error:  # the channel is closed
            raise BrokerUnavailable(f"the call at {self._path} could not begin: {error}") from error

    def _outcome(self, future: Any) -> Outcome:
        import grpc

        try:
            response: Message = future.result()
        except grpc.RpcError as error:
            return self._translate(error)
        except grpc.FutureCancelledError:
            return BrokerUnavailable(f"the call at {self._path} was cancelled: its client is closed")
        self.patient = False
        return response

    def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        with self._lock:
            channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()

    def abandon(self) -> None:
        """In a forked child: drop the channel without a call into gRPC, which does not survive a fork."""
        _inherited.extend((self._channel, self._stub))
        self._channel = self._stub = None

    def _open(self) -> Any:
        with self._lock:
            if self._stub is None:
                import grpc

                check_path(self._path)
                check_threads(_THREADS_OF_A_CHANNEL)
                _check_descriptors()
                self._channel = grpc.insecure_channel(grpc_target(self._path), options=_OPTIONS)
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
        # gRPC's text is about channels and addresses; keep it for the debug log.
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


def rows_of(call: Callable[[str, Any], Any], method: str, request: Any, name: str) -> Iterator[Any]:
    """Yield the rows of a listing, page by page: what each answer of `method` has under `name`."""
    request.page_size = MAX_PAGE_ROWS
    while True:
        page = call(method, request)
        yield from getattr(page, name)
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def _check_descriptors() -> None:
    """Raise `DescriptorLimit` before gRPC would end the process: it aborts when it cannot open what it starts with."""
    with ExitStack() as taken:
        try:
            for _ in range(_DESCRIPTORS_OF_A_CHANNEL):
                taken.callback(os.close, os.eventfd(0))
        except OSError as error:
            raise call_failed("eventfd2", error) from error


def _broker_service(channel: grpc.Channel) -> Any:
    from ..v1.broker_pb2_grpc import BrokerServiceStub

    return BrokerServiceStub(channel)
