"""The API server of the cluster, as a pod sees it: HTTPS, the pod's own token, and answers of a bounded size.

Owns the versions of resource.k8s.io. It must never write to an object that is not this node's.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import MembrokerError
from .claims import ClaimError, check_place, shown

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
GROUP = "/apis/resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")
"""The versions that are understood, the newest first."""
CALL_SECONDS = 10.0
MAX_ANSWER_BYTES = 4 << 20
"""More than any object may have."""
MAX_TOKEN_BYTES = 64 << 10


class ApiError(ClaimError):
    """A call that the API server did not answer, or refused; `status` is that of HTTP, or 0.

    `missing` is the name of the object that does not exist, if that is the reason.
    """

    def __init__(self, message: str, status: int = 0, missing: object = None) -> None:
        super().__init__(message)
        self.status = status
        self.missing = missing


class ClaimGone(ApiError):
    """There is no ResourceClaim of that name: the API server itself says so, about this object."""


class ApiServer:
    """The API server at this address. `account` is the directory with the token and the certificate of the CA."""

    def __init__(self, host: str, port: int, account: Path = ACCOUNT) -> None:
        self._address = host, port
        self._account = account
        try:
            self._tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except (OSError, ssl.SSLError) as error:
            raise MembrokerError(f"cannot read the CA's certificate {account / 'ca.crt'}: {error}") from error
        self._version = ""

    def claim(self, namespace: str, name: str) -> Any:
        """Return a ResourceClaim. Raises `ApiError`, and `ClaimGone` if it surely does not exist."""
        check_place(namespace, name)
        path = f"namespaces/{namespace}/resourceclaims/{name}"
        for _ in VERSIONS:
            version = self.version()
            try:
                return self.call("GET", f"{GROUP}/{version}/{path}")
            except ApiError as error:
                if error.status != 404:
                    raise
                self._version = ""  # the cluster may have been upgraded, or taken back
                if self.version() == version:
                    kind = ClaimGone if error.missing == name else ApiError
                    raise kind(f"the API server has no ResourceClaim {namespace}/{name}", 404) from error
        raise ApiError("the API server changes its versions of resource.k8s.io: ask again")

    def version(self) -> str:
        """Return the newest version of resource.k8s.io that both sides know. Raises `ApiError`."""
        if not self._version:
            group = self.call("GET", GROUP)
            rows = group.get("versions")
            rows = rows if isinstance(rows, list) else []
            served = {str(row.get("version")) for row in rows if isinstance(row, dict)}
            found = [version for version in VERSIONS if version in served]
            if not found:
                raise ApiError(f"the API server has none of resource.k8s.io {', '.join(VERSIONS)}: it needs DRA")
            self._version = found[0]
        return self._version

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPSConnection]:
        """Yield a connection, which ends after CALL_SECONDS. A timeout is for each read, and each may bring a byte."""
        host, port = self._address
        sock = socket.create_connection((host, port), CALL_SECONDS)
        with sock.dup() as twin, sock:
            end = threading.Timer(CALL_SECONDS, _shut, [twin])
            end.daemon = True
            end.start()
            try:
                connection = http.client.HTTPSConnection(host, port, context=self._tls)
                connection.sock = self._tls.wrap_socket(sock, server_hostname=host)
                with closing(connection):
                    yield connection
            finally:
                end.cancel()

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Return the object that the server answers. Raises `ApiError`."""
        headers = {"Accept": "application/json"}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        try:
            with (self._account / "token").open() as file:  # it changes every hour
                headers["Authorization"] = f"Bearer {file.read(MAX_TOKEN_BYTES).strip()}"
            with self._connected() as connection:
                connection.request(method, path, data, headers)
                answer = connection.getresponse()
                text = answer.read(MAX_ANSWER_BYTES + 1)
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
            RuntimeError,
        ) as error:  # RuntimeError: no thread is left
            raise ApiError(f"the API server does not answer: {shown(str(error) or type(error).__name__)}") from error
        if len(text) > MAX_ANSWER_BYTES:
            raise ApiError(f"the API server's answer has more than {MAX_ANSWER_BYTES} bytes")
        try:
            found = json.loads(text) if text else {}
        except (ValueError, RecursionError) as error:
            found = {}
            if answer.status < 300:
                raise ApiError("the API server's answer is not JSON", answer.status) from error
        if answer.status >= 300:
            said = found if isinstance(found, dict) else {}
            details = said.get("details") if said.get("reason") == "NotFound" else None
            raise ApiError(
                f"the API server refuses it ({answer.status}): {shown(said.get('message'))}",
                answer.status,
                details.get("name") if isinstance(details, dict) else None,
            )
        if not isinstance(found, dict):
            raise ApiError(f"the API server's answer is not an object but {shown(found)}")
        return found


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)
