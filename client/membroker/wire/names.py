"""Names and limits that library and daemon share. Each one is written here and nowhere else.

Owns the grammar of names, the bounds that both sides check, the place where both meet, the environment variables of
programs, and the keys of gRPC metadata. It imports nothing but `re`, because the pure core and the keeper, which must
start fast, use it too. docs/protocol.md
tells other clients the same numbers; tests/system/library/test_golden_frames.py compares the two.
"""

from __future__ import annotations

import re

PROTOCOL_VERSION = 1
PROTOCOL_REVISION = 4
"""What is understood beyond the first edition of the version; `Welcome.protocol_revision` has the list."""

# Limits

MAX_BYTES = (1 << 63) - 1
"""The largest size in bytes: sizes are int64 on the wire."""
MAX_FRAME_BYTES = 65_536
MAX_DESCRIPTORS = 64
"""Descriptors, and so extents, in one packet. The kernel allows 253; a packet is also the broker's unit of fairness."""
DESCRIPTORS_IN_FLIGHT = 2 * MAX_DESCRIPTORS
"""The window: descriptors of one session that may be unacknowledged. Without a window, a peer that never reads would
fill the kernel's table of descriptors in flight. The kernel counts them per user of the sender, so all sessions would
stop. Two whole packets, so that one is made while the other is mapped."""
MAX_IDS_PER_FRAME = 4_096
"""Ids in one Release, and entries in one Holds."""
MAX_EXTENTS_PER_CALL = 65_536
MAX_CALLS_PER_SESSION = 16
"""Calls of a session that bring descriptors, or wait for memory, and have no answer yet."""
MAX_WAIT_SECONDS = 24 * 3600
"""How long a call may wait for memory, or an attach for a seal."""
MAX_PAGE_ROWS = 1_000
"""Rows in one page of a listing."""
MAX_CLIENT_CHARACTERS = 128
"""Of the name that a client gives itself; the broker cuts off the rest."""
MAX_SOCKET_PATH_BYTES = 107
"""`sockaddr_un` has 108 bytes, and the last is a zero."""

# Places

NODE_VARIABLE = "NODE_NAME"
"""What Kubernetes calls the machine, as deploy/helm tells the daemons' pod; a container's own name says little."""
SYSTEM_DIRECTORY = "/run/membroker"
"""The runtime directory of root's daemons. Programs look there for an endpoint, after the user's own directory."""
SYSTEM_VARIABLE = "MEMBROKER_SYSTEM_DIRECTORY"
"""The environment variable with another directory in its place, for daemons and programs alike."""

ENDPOINT_VARIABLE = "MEMBROKER_ENDPOINT"
"""The environment variable with the directory of the endpoint to enter."""
MODEL_VARIABLE = "MEMBROKER_MODEL"
"""The environment variable with the name of the model that a program registers without a name."""
LIMIT_VARIABLE = "MEMBROKER_LIMIT"
"""The environment variable with the limit of that model."""

# Metadata of gRPC calls

TOKEN_METADATA = "membroker-token"
STATUS_METADATA = "grpc-status-details-bin"

# Names. A tenant's name is also the name of a directory, so its grammar is narrower.

MAX_TENANT_CHARACTERS = 63
"""As of a Kubernetes label. The path of an endpoint's sockets has a bound of its own: MAX_SOCKET_PATH_BYTES."""
MAX_NAME_CHARACTERS = 96
_OWN = f"letters, digits and ._-, begins with a letter, a digit or _, and has at most {MAX_NAME_CHARACTERS} characters"
_RULES = {
    "TENANT": "lower case letters, digits and -, begins with a letter or a digit, and has at most "
    f"{MAX_TENANT_CHARACTERS} characters",
    "MODEL": f"{_OWN}; it may have one slash inside, as in Qwen/Qwen3-8B",
    "SEGMENT": _OWN,
}

_TENANT = f"[a-z0-9][a-z0-9-]{{0,{MAX_TENANT_CHARACTERS - 1}}}"
_SEGMENT = f"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{MAX_NAME_CHARACTERS - 1}}}"
_MODEL = f"{_SEGMENT}(?:/{_SEGMENT})?"
_SESSION_NAME = re.compile("sessions/([0-9a-f]{1,16})")
_TENANT_NAME = re.compile(f"tenants/({_TENANT})")
_MODEL_NAME = re.compile(f"tenants/({_TENANT})/models/({_MODEL})")
_SEGMENT_NAME = re.compile(f"tenants/({_TENANT})/models/({_MODEL}|-)/segments/({_SEGMENT})")


def grammar(*kinds: str) -> str:
    """Return the grammar of these kinds of names in words, for error messages: of TENANT, MODEL or SEGMENT."""
    return "; ".join(f"{kind} is {_RULES[kind]}" for kind in kinds)


def valid_tenant(name: str) -> bool:
    """Say whether a tenant may have this name."""
    return re.fullmatch(_TENANT, name) is not None


def valid_segment(name: str) -> bool:
    """Say whether a segment may have this name."""
    return re.fullmatch(_SEGMENT, name) is not None


def valid_model(name: str) -> bool:
    """Say whether a model may have this name: as a segment's, or two such parts with a slash between them."""
    return len(name) <= MAX_NAME_CHARACTERS and re.fullmatch(_MODEL, name) is not None


def parse_tenant(name: str) -> str | None:
    """Return the tenant of `tenants/{tenant}`, or None for anything else."""
    match = _TENANT_NAME.fullmatch(name)
    return match[1] if match else None


def parse_model(name: str) -> tuple[str, str] | None:
    """Return tenant and model of `tenants/{tenant}/models/{model}`, or None for anything else."""
    match = _MODEL_NAME.fullmatch(name)
    return (match[1], match[2]) if match and valid_model(match[2]) else None


def parse_segment(name: str) -> tuple[str, str, str] | None:
    """Return tenant, model and segment of `tenants/{tenant}/models/{model}/segments/{segment}`, or None.

    The model may be `-`, which stands for the only model that has such a segment.
    """
    match = _SEGMENT_NAME.fullmatch(name)
    return (match[1], match[2], match[3]) if match and (match[2] == "-" or valid_model(match[2])) else None


def parse_session(name: str) -> int | None:
    """Return the session of `sessions/{session}`, or None for anything else."""
    match = _SESSION_NAME.fullmatch(name)
    return int(match[1], 16) if match else None


def session_name(session: int) -> str:
    """Return the resource name of a session."""
    return f"sessions/{session:x}"
