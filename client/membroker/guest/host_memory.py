"""How much host memory the image of a guest may still take: of the machine, and of the control groups around it.

Guests that fall asleep at the same time would all find the same memory free. So each claims what its image will take in
a file that the guests of one user share, until the image is made. The claims are met in the order of the file: a large
image would otherwise wait behind each small one that comes later.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..vmm.sizes import format_size
from .tree import start_of

_GROUPS = Path("/sys/fs/cgroup")
CLAIMS = Path("/dev/shm")
CLAIM_SECONDS = 60.0
"""How long a guest waits until others have made their images."""
LOOK_SECONDS = 0.05
LOCK_TRIES = 40
MOST_CLAIM_BYTES = 1 << 16
"""A file of claims that is larger is not one."""


@contextmanager
def claimed(size: int) -> Iterator[str]:
    """Claim what an image takes while it is made. Yield why there is too little, as half a sentence, or "".

    What others have claimed may be taken already or not, so one that finds too little beside it waits for those that
    came before it.
    """
    end, me = time.monotonic() + CLAIM_SECONDS, (os.getpid(), start_of(os.getpid()))
    lacking, may_wait = _claim(size, me)
    while may_wait and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
        lacking, may_wait = _claim(size, me)
    try:
        yield lacking
    finally:
        with _claims() as claims:
            claims.pop(me, None)


def _claim(size: int, me: tuple[int, str]) -> tuple[str, bool]:
    """Claim so much beside the claims before. Return why that is too much, or "", and whether a wait may help."""
    with _claims() as claims:
        claims[me] = size  # in its place, if it waits already
        free, others = free_bytes(), sum(claims[other] for other in itertools.takewhile(me.__ne__, claims))
        if free is None or size + others <= free:
            return "", False
        may_wait = bool(others) and size <= free
        if not may_wait:  # those behind it are not to wait for it
            del claims[me]
    beside = f" beside {format_size(others)} for images of others" if others else ""
    return (
        f"the machine has {format_size(free)} of memory free, and its image needs {format_size(size)}{beside}",
        may_wait,
    )


@contextmanager
def _claims() -> Iterator[dict[tuple[int, str], int]]:
    """Yield what the living guests of this user claim, by pid and start, and write it down at the end.

    Without such a file, as in a container without /dev/shm, each guest knows its own claim alone.
    """
    path = CLAIMS / f"membroker-images-{os.geteuid()}"
    file = _locked(path)
    if file is None:
        yield {}
        return
    try:
        claims = _parsed(os.read(file, MOST_CLAIM_BYTES))
        yield claims
        with suppress(OSError):  # no room: the others do not know of it
            os.ftruncate(file, 0)
            os.pwrite(file, "".join(f"{pid} {start} {size}\n" for (pid, start), size in claims.items()).encode(), 0)
        if not claims:
            path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _locked(path: Path) -> int | None:
    """Open the file and lock it. Return None if that cannot be done, as when its holder has been stopped."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    for _ in range(LOCK_TRIES):
        try:
            file = os.open(path, flags, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(file)
            if found.st_uid == os.geteuid() and found.st_nlink:  # else it is another user's, or the last one's no more
                return file
        except BlockingIOError:
            pass
        os.close(file)
        time.sleep(LOOK_SECONDS)
    return None


def _parsed(text: bytes) -> dict[tuple[int, str], int]:
    found = {}
    for line in text.splitlines():
        with suppress(ValueError):
            pid, start, size = line.decode().split()
            if start_of(int(pid)) == start:
                found[int(pid), start] = max(0, int(size))
    return found


def free_bytes() -> int | None:
    """Return what is free, or None if nothing says so. A program that takes more is killed by the kernel."""
    return min((size for size in (_of_machine(), *of_groups()) if size is not None), default=None)


def _of_machine() -> int | None:
    return _field(Path("/proc/meminfo"), "MemAvailable:", 1024)


def of_groups(groups: Path = _GROUPS, file: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Yield what this process's control group, and each around it, leaves free. Memory of files can be taken back."""
    try:
        own = next(line for line in file.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    path = groups / own.removeprefix("0::").strip("/")
    while path.is_relative_to(groups):
        try:
            limit, used = (path / "memory.max").read_text().strip(), int((path / "memory.current").read_text())
        except (OSError, ValueError):
            limit, used = "max", 0  # the root has no limit, and neither has a group without this controller
        if limit.isdecimal():
            yield max(0, int(limit) - used + (_field(path / "memory.stat", "inactive_file", 1) or 0))
        path = path.parent


def _field(file: Path, name: str, unit: int) -> int | None:
    try:
        for line in file.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * unit
    except (OSError, ValueError):
        pass
    return None
