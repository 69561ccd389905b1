"""How the kubelet finds the agent and calls it: two sockets in its directories, and the services of three names.

Owns the sockets and the lock that keeps a second agent out: gRPC would take over the first one's sockets silently.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from ..errors import MembrokerError
from ..ext import paths
from .agent import Agent
from .claims import DRIVER, ClaimError, shown
from .files import check_directory
from .v1 import kubelet_pb2 as pb

SERVICES = ("k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin")
VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
"""What the kubelet calls these services: it takes the first that it knows."""
REGISTRATION = "pluginregistration.Registration"
MAX_REQUEST_BYTES = 256 << 10
_WORKERS = 8
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.so_reuseport", 0),
)


def data_directory(kubelet: Path) -> Path:
    """Return the directory of the driver in the kubelet's."""
    return kubelet / "plugins" / DRIVER


@contextmanager
def serving(agent: Agent, kubelet: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the kubelet, in threads, until the end of the block."""
    directory, registry = data_directory(kubelet), kubelet / "plugins_registry"
    for each in (directory, registry):
        check_directory(each)
    service, registration = directory / "dra.sock", registry / f"{DRIVER}-reg.sock"
    for socket in (service, registration):
        if fault := paths.socket_fault(socket):
            raise MembrokerError(f"{fault}: choose another --kubelet-directory")
    with _locked(directory / "lock"):
        server = grpc.server(
            ThreadPoolExecutor(_WORKERS, "membroker-dra"), options=_OPTIONS, maximum_concurrent_rpcs=2 * _WORKERS
        )
        calls = {
            "NodePrepareResources": _handler(agent.prepare, pb.ClaimsRequest),
            "NodeUnprepareResources": _handler(agent.unprepare, pb.ClaimsRequest),
        }
        for name in SERVICES:
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, calls),))
        info = pb.PluginInfo(type="DRAPlugin", name=DRIVER, endpoint=str(service), supported_versions=VERSIONS)
        server.add_generic_rpc_handlers((_registration(info, say),))
        before = os.umask(0o077)
        try:
            for socket in (service, registration):  # the kubelet calls as soon as it sees the second
                server.add_insecure_port(f"unix:{socket}")
            server.start()
        except RuntimeError as error:
            raise MembrokerError(f"cannot listen at {service} and {registration}: {error}") from error
        finally:
            os.umask(before)
        try:
            yield
        finally:
            registration.unlink(missing_ok=True)
            server.stop(grace=5).wait()


def _registration(info: pb.PluginInfo, say: Callable[[str], None]) -> grpc.GenericRpcHandler:
    def notified(status: pb.RegistrationStatus) -> pb.Empty:
        if status.plugin_registered:
            say(f"the kubelet has registered the driver {DRIVER}")
        else:
            say(f"the kubelet has not registered the driver {DRIVER}: {shown(status.error)}")
        return pb.Empty()

    calls = {
        "GetInfo": _handler(lambda _: info, pb.Empty),
        "NotifyRegistrationStatus": _handler(notified, pb.RegistrationStatus),
    }
    return grpc.method_handlers_generic_handler(REGISTRATION, calls)


def _handler(answer: Callable[[Any], Any], kind: Any) -> grpc.RpcMethodHandler[Any, Any]:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return answer(request)
        except ClaimError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return grpc.unary_unary_rpc_method_handler(
        call, request_deserializer=kind.FromString, response_serializer=lambda message: message.SerializeToString()
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MembrokerError(f"another agent serves the kubelet here: it has locked {path}") from error
        yield
    finally:
        os.close(descriptor)
