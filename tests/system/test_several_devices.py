"""Several daemons on one machine, one for each device, under one configuration: none is in another's way.

The devices are the host driver's; tests/gpu/test_two_gpus.py does the same with two GPUs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support import raw
from tests.support.command import run
from tests.support.daemons import DEADLINE_SECONDS, Daemon, hold_still, running, until
from tests.support.template import run as run_python
from tests.support.workers import PAGE

import membroker
from membroker.v1 import admin_pb2

pytestmark = pytest.mark.deep

KEEPERS: Mapping[str, str | None] = {
    "default": None,
    "by the device's name": "keepers/{device}/fdstore.sock",
    "by its number": "keepers/{index}/fdstore.sock",
}
"""Where the keeper listens, below the test's directory; None is the default."""


def configuration(place: Path, keeper: str | None) -> dict[str, Any]:
    where = {"keeper_socket": str(place / keeper)} if keeper else {}
    return {"runtime_directory": str(place / "run"), "state_directory": str(place / "kept"), **where}


@contextmanager
def daemon_of(place: Path, device: int, keeper: str | None = None) -> Iterator[Daemon]:
    """Run the daemon of a device; only its log is its own."""
    directory = place / f"daemon-{device}"
    directory.mkdir(exist_ok=True)
    one = Daemon(directory, configuration(place, keeper), device=device)
    try:
        yield one
        assert one.stop() == 0, one.log()
        assert "Traceback" not in one.log(), one.log()
    finally:
        with suppress(ProcessLookupError):
            one.process.kill()
        one.process.wait(DEADLINE_SECONDS)


def publish(daemon: Daemon, text: bytes) -> None:
    with membroker.connect(daemon.endpoint()) as client, client.model("m").create_segment("weights", PAGE) as segment:
        segment.write(0, text)
        segment.seal()


def published(daemon: Daemon, length: int) -> bytes:
    with membroker.connect(daemon.endpoint()) as client, client.attach("m/weights") as segment:
        return segment.read(0, length)


@pytest.mark.parametrize("keeper", KEEPERS.values(), ids=KEEPERS.keys())
def test_segments_of_two_devices_outlive_both_daemons(place: Path, keeper: str | None) -> None:
    """One configuration for both, sealed segments in each, and each daemon is killed: every byte is still there."""
    with daemon_of(place, 0, keeper) as first, daemon_of(place, 1, keeper) as second:
        assert (first.device().uuid, second.device().uuid) == ("host", "host-1")
        publish(first, b"first")
        publish(second, b"second")
        for _ in range(2):
            for daemon in (first, second):
                daemon.kill()
                daemon.start_again()
                assert (published(first, 5), published(second, 6)) == (b"first", b"second")
        assert [daemon.books().lent_bytes for daemon in (first, second)] == [PAGE, PAGE]
        for daemon in (first, second):
            assert "the connection to the keeper of descriptors is lost" not in daemon.log()


def test_one_keeper_for_two_devices_is_refused_and_harms_nobody(place: Path) -> None:
    """A keeper_socket without {device}: the second daemon says what to write, also when the first one is dead."""
    keeper = "keepers/own/fdstore.sock"
    with daemon_of(place, 0, keeper) as first:
        publish(first, b"first")
        assert_refused(first, place)
        first.kill()
        assert_refused(first, place)
        first.start_again()
        assert published(first, 5) == b"first"
        assert "the connection to the keeper of descriptors is lost" not in first.log()


def assert_refused(first: Daemon, place: Path) -> None:
    """Start a daemon of another device by the first one's configuration, which must end with one sentence."""
    command = ["-m", "membrokerd.cli", "--config", str(first.directory / "membrokerd.toml")]
    done = run_python([*command, "--device", "1"])
    assert done.returncode == 1
    assert f"it keeps the descriptors of {place}/run/host: give each device a keeper of its own" in done.stderr
    assert "Traceback" not in done.stderr


def command(place: Path, *words: str) -> tuple[int, str, str]:
    """Run `membroker` as the user whose runtime directory this is."""
    (place / "membroker").exists() or (place / "membroker").symlink_to(place / "run")
    return run(*words, env={"XDG_RUNTIME_DIR": str(place)})


def states(out: str) -> dict[str, str]:
    """Return what the first table of `membroker status` says of each device."""
    _, *rows = out.partition("\n\n")[0].splitlines()
    return {row.split()[0]: re.split(r"  +", row)[-1] for row in rows}


def test_one_command_for_all_devices_and_one_for_each(place: Path) -> None:
    """`status` shows both, as tables and as a JSON document for each; the others are told which with --device."""
    with daemon_of(place, 0) as first, daemon_of(place, 1) as second:
        with membroker.connect(second.endpoint()) as client:
            kept = client.model("llama").allocate("2MiB")
            assert states(command(place, "status")[1]) == {"host": "lends", "host-1": "lends"}
            _, out, _ = command(place, "status", "--json")
            assert [json.loads(line)["pid"] for line in out.splitlines()] == [first.process.pid, second.process.pid]
            for device, there in (("0", False), ("host", False), ("1", True), ("host-1", True)):
                status, out, err = command(place, "models", "--device", device)
                assert (status, "llama" in out, err) == (0, there, "")
            status, _, err = command(place, "models")
            assert (status, "has 2 devices: name one with" in err) == (1, True)
            assert command(place, "drain", "--device", "1", "--timeout", "0")[0] == 0
            assert (first.device().draining, second.device().draining) == (False, True)
            kept.close()
        with hold_still(first):
            assert states(command(place, "status")[1]) == {"host": "does not answer", "host-1": "drained"}
            status, out, _ = command(place, "status", "--json")
            assert status == 1
            assert [json.loads(line)["uuid"] for line in out.splitlines()] == ["host-1"], "the other is shown"


def test_two_daemons_with_one_state_directory(place: Path) -> None:
    """Each has its own runtime directory. What the first was commanded and records is not the second's to change."""
    shared = {"state_directory": str(place / "kept"), "record": True}
    with running(shared) as first, running(shared) as second:
        assert raw.admin_call(first.admin, "SetQuota", limit("red")).limit_bytes == PAGE
        second.kill()
        second.start_again()
        assert not raw.admin_call(second.admin, "ListQuotas", admin_pb2.ListQuotasRequest()).quotas, "the first one's"
        refused = raw.admin_call(second.admin, "SetQuota", limit("blue"))
        assert raw.reason(refused) == "INTERNAL"
        assert "another membrokerd of this device uses it" in refused.message
        first.kill()
        first.start_again()
        (kept,) = raw.admin_call(first.admin, "ListQuotas", admin_pb2.ListQuotasRequest()).quotas
        assert kept.name == "tenants/red"
        until(lambda: "set another state_directory" in second.log())


def limit(tenant: str) -> admin_pb2.SetQuotaRequest:
    return admin_pb2.SetQuotaRequest(name=f"tenants/{tenant}", limit_bytes=PAGE)
