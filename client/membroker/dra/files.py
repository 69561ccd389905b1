"""Small JSON files that are replaced as a whole: what the agent remembers of each claim, and what the runtime reads.

Owns the record of a claim, which is on disk before the first of its tenants is made and until the last one is deleted.
So an agent that dies at any point finds what it has made, and never takes another's tenant for its own.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import MembrokerError
from ..ext import ownership
from .claims import Allotted, ClaimError, Wanted, check_uid

MAX_FILE_BYTES = 256 << 10
MAX_RECORDS = 1_024
"""Claims that a node has at a time. Each daemon has 64 tenants that were made by command."""
CDI_KIND = "membroker/tenant"
_GPU = re.compile("(GPU|MIG)-[0-9a-f-]{36}")
_CDI_VERSION = "0.5.0"
_MOUNT = ["ro", "nosuid", "nodev", "noexec", "bind"]


def check_directory(path: Path) -> None:
    """Make a directory, and raise `MembrokerError` if somebody else could replace what is in it."""
    try:
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as error:
        raise MembrokerError(f"cannot use {path}: {error.strerror}") from error
    if fault := ownership.stranger_in(path):
        raise MembrokerError(f"cannot use {path}: {fault}")


def replace(path: Path, content: Any) -> None:
    """Write a file that is either the old one or the new one, also after a crash of the machine."""
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class Records:
    """The records of the claims that this node has, as DIRECTORY/UID.json."""

    def __init__(self, directory: Path) -> None:
        check_directory(directory)
        self._directory = directory

    def path(self, uid: str) -> Path:
        """Return where the record of a claim is."""
        return self._directory / f"{check_uid(uid)}.json"

    def read(self, uid: str) -> Wanted | None:
        """Return what a claim has here, or None. Raises `ClaimError` for a file that the agent has not written."""
        path = self.path(uid)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ClaimError(f"{path} is not a file")
            text = file.read(MAX_FILE_BYTES)
        try:
            found = json.loads(text)
            devices = tuple(Allotted(**{**row, "requests": tuple(row["requests"])}) for row in found["devices"])
            tenants = {row.directory: found["tenants"][row.directory] for row in devices}
            namespace, name = found["place"]
            return Wanted(devices, tenants, tuple(found["pods"]), tuple(found["uuids"]), (namespace, name))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ClaimError(
                f"{path} is damaged: delete the claim's tenants by `membroker tenant delete`, then this file"
            ) from error

    def uids(self) -> Iterator[str]:
        """Yield the uids of the claims that have a record."""
        yield from (path.stem for path in sorted(self._directory.glob("*.json")))

    def write(self, uid: str, wanted: Wanted) -> None:
        """Keep what a claim has here. Raises `ClaimError` if there are too many."""
        path = self.path(uid)
        if not path.exists() and sum(1 for _ in self._directory.glob("*.json")) >= MAX_RECORDS:
            raise ClaimError(f"this node has {MAX_RECORDS} claims already")
        replace(path, asdict(wanted))

    def remove(self, uid: str) -> None:
        """Forget a claim."""
        self.path(uid).unlink(missing_ok=True)


class DeviceFiles:
    """The files of the Container Device Interface, one for each claim, from which the runtime takes the mounts.

    `runtime` is the daemons' directory, which has the same path here and on the node.
    """

    def __init__(self, directory: Path, runtime: Path, variable: str) -> None:
        check_directory(directory)
        self._directory = directory
        self._runtime = runtime
        self._variable = variable

    def path(self, uid: str) -> Path:
        """Return where the file of a claim is."""
        return self._directory / f"membroker-{check_uid(uid)}.json"

    def write(self, uid: str, tenant: str, wanted: Wanted) -> None:
        """Let the runtime mount the endpoint of each device's tenant, read-only, and name it to the program.

        NVIDIA's runtime gets told the claim's GPUs, so that the program sees those and no others.
        """
        replace(
            self.path(uid),
            {
                "cdiVersion": _CDI_VERSION,
                "kind": CDI_KIND,
                "devices": [self._device(uid, tenant, directory, wanted.uuids) for directory in wanted.tenants],
            },
        )

    def _device(self, uid: str, tenant: str, directory: str, uuids: Sequence[str]) -> dict[str, Any]:
        endpoint = str(self._runtime / directory / "tenants" / tenant)
        visible = [uuid for uuid in uuids if _GPU.fullmatch(uuid)]
        gpus = [f"NVIDIA_VISIBLE_DEVICES={','.join(visible)}"] if visible else []
        mount = {"hostPath": endpoint, "containerPath": endpoint, "options": _MOUNT}
        return {
            "name": f"{uid}-{directory}",
            "containerEdits": {"env": [f"{self._variable}={endpoint}", *gpus], "mounts": [mount]},
        }

    def remove(self, uid: str) -> None:
        """Take the file of a claim away."""
        self.path(uid).unlink(missing_ok=True)


def cdi_id(uid: str, directory: str) -> str:
    """Return the id by which the kubelet tells the runtime of a device of a claim."""
    return f"{CDI_KIND}={uid}-{directory}"
