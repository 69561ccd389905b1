"""A fake kubelet, a fake API server by HTTPS, and the agent as the process that a pod runs."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.client.dra.claims import NODE
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until, whole_lines
from tests.support.template import PythonProcess

from membroker.dra.v1 import kubelet_pb2 as pb

NODE_UID = "3a3a3a3a-1d2c-4b3a-9e8f-7a6b5c4d3e2f"
GROUP = "/apis/resource.k8s.io"
TOKEN = "the token of the agent's pod"
PLUGIN = "k8s.io.kubelet.pkg.apis.dra"


class ApiServer:
    """Answers GET with what is in `objects`, by path, to callers with the token; `versions` are of resource.k8s.io.

    `raw` is answered instead, by path.
    """

    def __init__(self, directory: Path) -> None:
        self.account = directory / "account"
        self.account.mkdir()
        self._ends = threading.Event()
        self.reset()
        self._key = _certificate(self.account / "ca.crt")
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            do_POST = do_PUT = do_DELETE = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.account / "ca.crt", self._key)
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def reset(self) -> None:
        """Have no object, and answer as an API server does."""
        self.objects: dict[str, Any] = {}
        self.versions = ["v1"]
        self.shares_devices = True
        self.calls: list[tuple[str, str]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.drips = False
        """Whether an answer begins with spaces that never end."""
        self.raw: dict[str, Any] = {}
        (self.account / "token").write_text(f"{TOKEN}\n")

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        method, path = handler.command, handler.path
        body = json.loads(handler.rfile.read(int(handler.headers.get("Content-Length") or 0)) or "null")
        self.calls.append((method, path))
        if "/resourceclaims/" in path:  # and not the slice, which the agent publishes beside its other calls
            self.goes_on.wait(DEADLINE_SECONDS)
        status, text = self.raw.get(path) or self._found(method, path, body)
        if handler.headers["Authorization"] != f"Bearer {TOKEN}":
            status, text = 401, b'{"message": "Unauthorized"}'
        handler.send_response(status)
        # A long answer says that it is much longer: a reader of all of it never comes to the end.
        handler.send_header("Content-Length", str(len(text) if len(text) <= 4 << 20 else 1 << 40))
        handler.end_headers()
        with suppress(OSError):  # the agent may have seen enough
            while self.drips and not self._ends.wait(0.02):
                handler.wfile.write(b" ")
            handler.wfile.write(text)

    def _found(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        if path == GROUP:
            rows = [{"groupVersion": f"resource.k8s.io/{one}", "version": one} for one in self.versions]
            return 200, json.dumps({"kind": "APIGroup", "name": "resource.k8s.io", "versions": rows}).encode()
        if path == f"/api/v1/nodes/{NODE}":
            return 200, json.dumps({"metadata": {"name": NODE, "uid": NODE_UID}}).encode()
        if body is not None:
            path = path if method == "PUT" else f"{path}/{body['metadata']['name']}"
            before = self.objects.get(path)
            if before is not None and before["metadata"]["resourceVersion"] != body["metadata"].get("resourceVersion"):
                return 409, b'{"message": "the object has been modified"}'
            self.objects[path] = self.kept(body)
            self.objects[path]["metadata"]["resourceVersion"] = str(len(self.calls))
        if path not in self.objects:
            details = {"name": path.rpartition("/")[2], "group": "resource.k8s.io"}
            return 404, json.dumps({"kind": "Status", "reason": "NotFound", "message": "", "details": details}).encode()
        return 200, json.dumps(self.objects[path]).encode()

    def kept(self, body: Any) -> Any:
        """Return a ResourceSlice without the fields of features that are off."""
        for device in body["spec"]["devices"]:
            if not self.shares_devices:
                device.get("basic", device).pop("allowMultipleAllocations", None)
        return body

    def add(self, claim: Mapping[str, Any]) -> pb.Claim:
        """Add a claim, and return it as the kubelet names it."""
        place = claim["metadata"]
        path = f"/apis/{claim['apiVersion']}/namespaces/{place['namespace']}/resourceclaims/{place['name']}"
        self.objects[path] = claim
        return pb.Claim(namespace=place["namespace"], name=place["name"], uid=place["uid"])

    def close(self) -> None:
        self._ends.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _certificate(path: Path) -> Path:
    """Make a certificate for 127.0.0.1, and return its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key = path.with_name("key.pem")
    what = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=api"
    where = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(path)]
    subprocess.run(["openssl", *what.split(), *where], check=True, capture_output=True)
    return key


@dataclass
class Node:
    """A node: a daemon, the kubelet's directory and the CDI's, and the agent while it runs."""

    daemon: Daemon
    api: ApiServer
    directory: Path
    agent: PythonProcess | None = None
    version: str = "v1"
    registered: list[Any] = field(default_factory=list)

    @property
    def kubelet(self) -> Path:
        return self.directory / "kubelet"

    @property
    def cdi(self) -> Path:
        return self.directory / "cdi"

    @property
    def records(self) -> Path:
        return self.kubelet / "plugins" / "membroker" / "claims"

    def start(self) -> Any:
        """Start the agent, register it as the kubelet does, and return what it says of itself."""
        with (self.directory / "log").open("ab") as log:
            self.agent = PythonProcess(self.arguments(), stdout=log, stderr=log, env=self.environment())
        registry = self.kubelet / "plugins_registry" / "membroker-reg.sock"
        until(lambda: registry.exists() or self.agent.poll() is not None)  # type: ignore[union-attr]
        assert self.agent.poll() is None, self.log()
        info = self.call(registry, "pluginregistration.Registration/GetInfo", pb.Empty(), pb.PluginInfo)
        told = pb.RegistrationStatus(plugin_registered=True)
        self.call(registry, "pluginregistration.Registration/NotifyRegistrationStatus", told, pb.Empty)
        self.socket = Path(info.endpoint)
        return info

    def arguments(self) -> list[str]:
        return [
            *("-m", "membroker.cli.main", "dra", f"--node={NODE}"),
            f"--runtime-directory={self.daemon.root.parent}",
            f"--kubelet-directory={self.kubelet}",
            f"--cdi-directory={self.cdi}",
            f"--account-directory={self.api.account}",
        ]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.api.port)}

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.agent is not None
        agent, self.agent = self.agent, None
        agent.send_signal(number)
        return agent.wait(DEADLINE_SECONDS)

    def call(self, socket: Path, method: str, request: Any, answer: Any) -> Any:
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            call = channel.unary_unary(
                f"/{method}",
                request_serializer=lambda one: one.SerializeToString(),
                response_deserializer=answer.FromString,
            )
            return call(request, timeout=DEADLINE_SECONDS, wait_for_ready=True)

    def prepare(self, *claims: pb.Claim) -> Mapping[str, pb.Prepared]:
        method, request = f"{PLUGIN}.{self.version}.DRAPlugin/NodePrepareResources", pb.ClaimsRequest(claims=claims)
        answer: pb.PrepareResponse = self.call(self.socket, method, request, pb.PrepareResponse)
        return answer.claims

    def unprepare(self, *claims: pb.Claim) -> Mapping[str, pb.Unprepared]:
        method, request = f"{PLUGIN}.{self.version}.DRAPlugin/NodeUnprepareResources", pb.ClaimsRequest(claims=claims)
        answer: pb.UnprepareResponse = self.call(self.socket, method, request, pb.UnprepareResponse)
        return answer.claims

    def log(self) -> str:
        return whole_lines(self.directory / "log")


@contextmanager
def node(daemon: Daemon) -> Iterator[Node]:
    """Run the agent beside a daemon; at the end it stops with status 0, unless the test has ended it."""
    directory = Path(tempfile.mkdtemp(prefix="mb-"))
    api = None
    try:
        api = ApiServer(directory)
        one = Node(daemon, api, directory)
        one.start()
        try:
            yield one
        finally:
            status = one.stop() if one.agent is not None else 0
        assert status == 0, one.log()
        assert "Traceback" not in one.log(), one.log()
        assert not list(directory.glob("kubelet/**/*.sock")), "its sockets are left"
    finally:
        if api is not None:
            api.close()
        shutil.rmtree(directory, ignore_errors=True)
