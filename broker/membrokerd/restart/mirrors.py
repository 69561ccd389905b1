"""Which mirror a daemon has: systemd's descriptor store, a keeper, or none."""

from __future__ import annotations

from pathlib import Path

from ..config.config import Config
from ..system import files, logs
from ..system.device_directory import DirectoryError
from ..system.sd_notify import started_by_systemd
from .descriptor_store import Mirror, StoredDescriptors
from .keeper_client import open_keeper
from .keeper_connection import OwnedElsewhere
from .systemd import open_systemd, systemd_available


def check_keeper(config: Config) -> None:
    """Raise `DirectoryError` if another user could listen where a keeper is configured, which need not exist yet."""
    if config.keeper_socket is not None and config.descriptor_store in ("auto", "keeper"):
        try:
            files.check_owner(config.keeper_socket.parent)
        except OSError as error:
            raise DirectoryError(f"keeper_socket = {config.keeper_socket}: {error.strerror}") from error


async def open_mirror(config: Config, keeper_socket: Path, owner: str) -> tuple[Mirror | None, StoredDescriptors]:
    """Return the mirror that the configuration chose, and the descriptors that a predecessor left there.

    `owner` names the daemons of one device to a keeper. Raises `DirectoryError`, which says what to configure.
    """
    kind, most = config.descriptor_store, config.systemd_descriptors
    if kind == "auto":
        kind = "systemd" if systemd_available(most) else "keeper"
        if kind == "keeper" and started_by_systemd():
            logs.warn(
                "systemd started this daemon but does not say that it keeps descriptors, and a keeper would end "
                "with the service and lose all segments; set FileDescriptorStoreMax= in the unit and, before "
                "systemd 254, systemd_descriptors to the same number"
            )
    mirror: Mirror | None = None
    kept = StoredDescriptors()
    try:
        if kind == "systemd":
            mirror, kept = open_systemd(most)
        elif kind == "keeper":
            mirror, kept = await open_keeper(keeper_socket, owner)
    except OwnedElsewhere as error:
        raise DirectoryError(f"keeper_socket = {keeper_socket}: {error}") from error
    except OSError as error:
        key = "keeper_socket" if kind == "keeper" and config.keeper_socket else "descriptor_store"
        raise DirectoryError(
            f"cannot open the descriptor store ({kind}): {error}; choose another with `{key}`"
        ) from error
    logs.log("descriptor store", kind=kind, segments=len(kept.segments), processes=len(kept.processes))
    return mirror, kept
