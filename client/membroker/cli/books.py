"""The endpoint at which a command reads the books: a tenant's own, or the admin endpoint for those of all tenants.

Owns the choice between the two. It must never print.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TypeVar

from .. import AccessDenied, BrokerUnavailable, Client, InvalidRequest
from ..admin import Admin
from ..errors import MembrokerError
from ..ext import endpoint as endpoints
from ..ext import enter, names
from ..vmm.driver import DriverError

Read = TypeVar("Read")


@contextmanager
def open_books(
    endpoint: str | None, admin: bool, env: Mapping[str, str] = os.environ, *, observer: bool = True
) -> Iterator[Client | Admin]:
    """Yield the books of a tenant's endpoint; with `admin`, or at an admin endpoint, those of the whole device.

    A user that can enter the admin endpoint and no tenant's gets the admin's. An `observer` only reads. Raises the
    library's errors.
    """
    found = Admin(admin_socket(endpoint, env)) if is_admin(endpoint, admin, env) else _enter(endpoint, env, observer)
    with closing(found):
        yield found


def read_on(
    enter: Callable[[], AbstractContextManager[Client | Admin]], read: Callable[[Client | Admin], Read], interval: float
) -> Iterator[Read | MembrokerError | DriverError | OSError]:
    """Yield what `read` returns of the books, again and again, every `interval` seconds; or why it cannot be read now.

    So a broker that goes away ends nothing: the books are opened again.
    """
    while True:
        try:
            with enter() as books:
                while True:
                    yield read(books)
                    time.sleep(interval)
        except (MembrokerError, DriverError, OSError) as error:
            yield error
        time.sleep(interval)


def is_admin(endpoint: str | None, admin: bool, env: Mapping[str, str] = os.environ) -> bool:
    """Return whether the admin endpoint was chosen: by --admin, or by its directory."""
    chosen = _chosen(endpoint, env)
    return admin or (chosen is not None and chosen.name == "admin")


def _chosen(endpoint: str | None, env: Mapping[str, str]) -> Path | None:
    """Return the directory that was given, by option or variable."""
    chosen = endpoint or env.get(names.ENDPOINT_VARIABLE, "")
    return Path(chosen).absolute() if chosen else None


def _enter(endpoint: str | None, env: Mapping[str, str], observer: bool) -> Client | Admin:
    chosen = _chosen(endpoint, env)
    whole = chosen is None or endpoints.is_device(chosen)
    directory = endpoints.find_endpoint(endpoint, env)
    try:
        return enter(directory, observer=observer, client="membroker (command)")
    except (BrokerUnavailable, AccessDenied):
        if not whole:
            raise
        try:
            return Admin(admin_socket(endpoint, env))
        except AccessDenied:
            pass  # an ordinary user: report the first error
        except BrokerUnavailable:
            if not directory.exists():  # there are named tenants, and the broker is dead or stopped
                raise
        raise


@contextmanager
def open_admin(endpoint: str | None, env: Mapping[str, str] = os.environ) -> Iterator[Admin]:
    """Yield the admin endpoint of the device whose tenant's endpoint this is. Raises the library's errors."""
    with closing(Admin(admin_socket(endpoint, env))) as found:
        yield found


@contextmanager
def open_device(endpoint: str | None, env: Mapping[str, str] = os.environ) -> Iterator[Admin]:
    """As `open_admin`, for commands about the whole device: a tenant's endpoint is refused."""
    chosen = _chosen(endpoint, env)
    if chosen is not None and chosen.parent.name == "tenants":
        raise InvalidRequest(
            f"{chosen} is the endpoint of one tenant, and this command is about the whole device: give the admin "
            f"endpoint, --endpoint {chosen.parent.with_name('admin')}"
        )
    with open_admin(endpoint, env) as found:
        yield found


def admin_socket(endpoint: str | None, env: Mapping[str, str] = os.environ) -> Path:
    """Return the admin socket of the device of `endpoint`, which may also be the device's or the admin directory."""
    directory = _chosen(endpoint, env) or endpoints.default_device(env)
    if endpoints.is_device(directory):
        directory = directory / "admin"
    if directory.name != "admin":
        if directory.parent.name != "tenants":
            raise InvalidRequest(
                f"{directory} is not an endpoint in a device's directory, so its admin endpoint is unknown: "
                "name that with --endpoint, as in /run/membroker/gpu-12345678/admin"
            )
        directory = directory.parent.parent / "admin"
    return directory / "grpc.sock"
