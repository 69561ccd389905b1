"""A sandbox that refuses system calls: `python -m tests.support.sandbox CALL[,CALL] -m MODULE …`, or `-c CODE …`.

A seccomp filter, which needs no privilege, answers these calls with EPERM, as a container's profile does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

_NUMBERS = {
    "x86_64": {"socket": 41, "socketpair": 53, "flock": 73, "fallocate": 285, "eventfd2": 290, "memfd_create": 319},
    "aarch64": {"socket": 198, "socketpair": 199, "flock": 32, "fallocate": 47, "eventfd2": 19, "memfd_create": 279},
}
_EVERYWHERE = {"pidfd_send_signal": 424, "pidfd_open": 434}
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2


def can_refuse() -> bool:
    """Say whether the numbers of this machine's system calls are known here."""
    return platform.machine() in _NUMBERS


def refuse(calls: list[str]) -> None:
    """Refuse these system calls to this process, and to all that it starts."""
    known = _NUMBERS[platform.machine()] | _EVERYWHERE
    lines = [(_LOAD_NUMBER, 0, 0, 0)]
    for call in calls:
        lines += [(_JUMP_IF_EQUAL, 0, 1, known[call]), (_RETURN, 0, 0, _REFUSE)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse(sys.argv[1].split(","))
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
