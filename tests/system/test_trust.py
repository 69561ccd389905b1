"""Who may enter where, as the kernel enforces it. These take other users and mount namespaces, so they need root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until

pytestmark = pytest.mark.root

ALICE, BOB = 60_001, 60_002
"""Users that no machine has: a uid is all that the kernel asks for."""

_ENTER = """
import os, sys
# All that is imported later too: the other user may not be able to read where Python is.
import encodings.ascii, google.rpc.error_details_pb2, grpc, membroker, membroker.client, membroker.vmm.host.driver
import membroker.v1.broker_pb2_grpc
grpc.insecure_channel("unix:/nonexistent").close()  # grpc 1.85 imports parts of itself on the first use
uid = int(sys.argv[2])
os.setgroups([]); os.setgid(uid); os.setuid(uid)
try:
    with membroker.connect(sys.argv[1]) as client:
        model = client.register_model("chat")
        with model.allocate("2MiB") as buffer:
            buffer.view()[:2] = b"hi"
            print(client.tenant, [row.name for row in client.models()])
except membroker.MembrokerError as error:
    print(type(error).__name__, error.reason)
"""


def enter(endpoint: Path, uid: int) -> str:
    """Let a user borrow at an endpoint, and return what it says."""
    done = subprocess.run(
        [sys.executable, "-c", _ENTER, str(endpoint), str(uid)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def owned() -> Iterator[Daemon]:
    """A root's daemon with an endpoint for Alice alone, one for her by uid, and one that is root's."""
    tenants = {
        "alice": {"owner": ALICE, "mode": "0600"},
        "listed": {"mode": "0666", "uids": [ALICE]},
        "root": {},
    }
    with running({"tenants": tenants}) as daemon:
        daemon.directory.chmod(0o755)
        yield daemon


def test_the_sockets_owner_decides(owned: Daemon) -> None:
    """Alice's endpoint belongs to her: she enters, Bob does not, and nobody but root enters root's."""
    assert enter(owned.endpoint("alice"), ALICE) == "tenants/alice ['tenants/alice/models/chat']"
    assert enter(owned.endpoint("alice"), BOB).startswith("AccessDenied")
    assert enter(owned.endpoint("root"), ALICE).startswith("AccessDenied")
    assert enter(owned.endpoint("root"), 0) == "tenants/root ['tenants/root/models/chat']"


def test_the_configured_uids_decide_behind_an_open_socket(owned: Daemon) -> None:
    """The socket lets everybody connect; the broker lets Alice in and tells Bob why not."""
    assert enter(owned.endpoint("listed"), ALICE) == "tenants/listed ['tenants/listed/models/chat']"
    assert enter(owned.endpoint("listed"), BOB) == "AccessDenied ENDPOINT_FORBIDDEN"
    until(lambda: "reason=ENDPOINT_FORBIDDEN" in owned.log())


def test_nobody_else_reaches_the_operators_door_or_the_state(owned: Daemon) -> None:
    """Quotas and the books of all are behind `admin/`, the epoch and the lock in `state/`: root's alone."""
    for name in ("admin", "state"):
        looked = subprocess.run(["ls", str(owned.root / name)], user=ALICE, capture_output=True, text=True, check=False)
        assert "Permission denied" in looked.stderr


def test_each_user_of_the_default_endpoint_is_a_tenant() -> None:
    """With nothing configured a root's daemon takes everybody, as /dev/nvidia0 does, and keeps them apart."""
    with running({"tenants": {}}) as daemon:
        daemon.directory.chmod(0o755)
        endpoint = daemon.endpoint("default")
        assert enter(endpoint, ALICE) == f"tenants/uid-{ALICE} ['tenants/uid-{ALICE}/models/chat']"
        assert enter(endpoint, BOB) == f"tenants/uid-{BOB} ['tenants/uid-{BOB}/models/chat']"


_IN_A_CONTAINER = """
set -e
mkdir "$2/mounted"
mount --bind "$1" "$2/mounted"
[ "$3" = rw ] || mount -o remount,ro,bind "$2/mounted"
"$4" -c "$5" "$2/mounted" 0
mv "$2/mounted/handoff.sock" "$2/mounted/stolen" 2>/dev/null && echo replaced || echo kept
"""


@pytest.mark.parametrize(("mode", "outcome"), [("ro", "kept"), ("rw", "replaced")])
def test_a_containers_root_cannot_replace_a_socket_that_is_mounted_read_only(
    owned: Daemon, mode: str, outcome: str
) -> None:
    """Root of another mount namespace works at a read-only endpoint; mounted writable, it could pose as the broker."""
    inside = owned.directory / mode
    inside.mkdir()
    endpoint = str(owned.endpoint("root"))
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _IN_A_CONTAINER, "sh", endpoint, str(inside), mode, sys.executable, _ENTER],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.stdout.splitlines() == ["tenants/root ['tenants/root/models/chat']", outcome], done.stderr
    if mode == "rw":
        os.rename(owned.endpoint("root") / "stolen", owned.endpoint("root") / "handoff.sock")
