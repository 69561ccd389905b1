"""connect() that fails says which of the possible things is wrong, and the command that mends it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import membroker
from membroker.errors import BrokerUnavailable, InvalidRequest
from membroker.session import endpoint
from membroker.session.session import Session


@pytest.fixture
def place() -> Iterator[Path]:
    """A short directory that every user can enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def directories(place: Path) -> dict[str, str]:
    """Return the variables with which a user's own directory and root's are below this one."""
    return {"XDG_RUNTIME_DIR": str(place), "MEMBROKER_SYSTEM_DIRECTORY": str(place / "system")}


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    return listener


def why(directory: Path, timeout: float = 5.0) -> str:
    with pytest.raises(BrokerUnavailable) as caught:
        Session(directory, timeout=timeout)
    return str(caught.value)


class TestChoice:
    """Which endpoint, when nobody says."""

    def test_the_argument_comes_first_then_the_variable(self, place: Path) -> None:
        """gRPC and the handoff must mean the same place, also after the program changes its directory."""
        env = {"MEMBROKER_ENDPOINT": "/run/x/tenants/t", "XDG_RUNTIME_DIR": "/nowhere"}
        assert endpoint.find_endpoint(place / "a", env) == place / "a"
        assert endpoint.find_endpoint("here", env) == Path.cwd() / "here"
        assert endpoint.find_endpoint(None, env) == Path("/run/x/tenants/t")

    def test_what_a_dead_broker_left_hides_no_living_one(self, place: Path) -> None:
        """A twin was tried out and killed, in the user's own directory and in root's; the card's broker runs."""
        env = directories(place)
        card = place / "system" / "gpu-1234abcd" / "tenants" / "default"
        for left in (place / "membroker" / "host", place / "system" / "host"):
            (left / "tenants" / "default").mkdir(parents=True)
            listening(left / "tenants" / "default" / "handoff.sock").close()
        card.mkdir(parents=True)
        with listening(card / "handoff.sock") as listener:
            assert endpoint.find_endpoint(None, env) == card
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
        assert "the broker is dead" in why(endpoint.find_endpoint(None, env)), (
            "the user's own is the one that is missed"
        )

    def test_a_directory_that_others_can_change_is_passed_over(self, place: Path) -> None:
        """After `sudo -E` the variable is another user's: the broker of this machine is found, and no other."""
        for directory in (place / "membroker", place / "system"):
            (directory / "host" / "tenants" / "default").mkdir(parents=True)
        (place / "membroker").chmod(0o777)
        assert endpoint.find_endpoint(None, directories(place)) == place / "system" / "host" / "tenants" / "default"
        assert endpoint.find_device("host", directories(place)) == place / "system" / "host"
        shutil.rmtree(place / "system")
        said = rf"{place}/membroker was passed over: {place}/membroker "
        for find in (endpoint.find_endpoint, lambda _, env: endpoint.find_device("0", env)):
            with pytest.raises(BrokerUnavailable, match=said):
                find(None, directories(place))

    @pytest.mark.root
    @pytest.mark.parametrize("user", [0, 60_002])
    def test_another_users_directory_is_passed_over(self, place: Path, user: int) -> None:
        """Root, and a user after `su`: neither is led into it. If nothing is found, the error says whose it is."""
        own, system = place / "own", place / "system"
        (own / "membroker" / "host" / "tenants" / "default").mkdir(parents=True)
        os.chown(own, 60_001, 60_001)
        own.chmod(0o755 if user == 0 else 0o700)
        env = {"XDG_RUNTIME_DIR": str(own), "MEMBROKER_SYSTEM_DIRECTORY": str(system)}
        os.seteuid(user)
        try:
            with pytest.raises(BrokerUnavailable, match=f"{own} .*uid 60001"):
                endpoint.find_endpoint(None, env)
            os.seteuid(0)
            (system / "host" / "tenants" / "default").mkdir(parents=True)
            os.seteuid(user)
            assert endpoint.find_endpoint(None, env) == system / "host" / "tenants" / "default"
        finally:
            os.seteuid(0)

    @pytest.mark.root
    def test_root_is_not_led_into_another_users_directory_by_the_other_variable(self, place: Path) -> None:
        theirs = place / "theirs"
        (theirs / "system" / "host" / "tenants" / "default").mkdir(parents=True)
        os.chown(theirs, 60_001, 60_001)
        with pytest.raises(BrokerUnavailable, match=f"{theirs} .*uid 60001"):
            endpoint.find_endpoint(None, {"MEMBROKER_SYSTEM_DIRECTORY": str(theirs / "system")})

    def test_no_device_at_all(self, place: Path) -> None:
        with pytest.raises(BrokerUnavailable, match="`membrokerd`") as caught:
            endpoint.find_endpoint(None, directories(place))
        assert "If `pgrep -a membrokerd` shows one, its directory was removed" in str(caught.value)


class TestDevices:
    """Which broker of several, by `membroker --device`."""

    UUID = "GPU-1234abcd-0000-1111-2222-333344445555"

    @pytest.fixture
    def env(self, place: Path) -> dict[str, str]:
        """Two GPUs, and two devices of the host driver that an older daemon, and a broken disk, left a file of."""
        devices = {"gpu-1234abcd": "0\n", "gpu-99999999": "1\n", "host": None, "host-7": "\xff seven"}
        for device, index in devices.items():
            directory = place / "membroker" / device
            (directory / "tenants" / "red").mkdir(parents=True)
            if index is not None:
                (directory / "index").write_text(index)
        return directories(place)

    @pytest.mark.parametrize(
        ("name", "device"),
        [
            ("0", "gpu-1234abcd"),
            (UUID, "gpu-1234abcd"),
            (UUID.removeprefix("GPU-"), "gpu-1234abcd"),
            ("host", "host"),
            ("host-7", "host-7"),
        ],
    )
    def test_it_is_found(self, env: dict[str, str], place: Path, name: str, device: str) -> None:
        assert endpoint.find_device(name, env) == place / "membroker" / device

    @pytest.mark.parametrize("name", ["2", "gpu-00000000", "GPU-99999998-0000-1111-2222-333344445555", "host-1"])
    def test_there_is_none(self, env: dict[str, str], name: str) -> None:
        with pytest.raises(BrokerUnavailable) as caught:
            endpoint.find_device(name, env)
        said = str(caught.value)
        assert ", only of gpu-1234abcd (0), gpu-99999999 (1), host (?), host-7 (?)" in said
        assert f"`membrokerd --device {name}`" in said
        assert "XDG_RUNTIME_DIR is not set here" not in said

    @pytest.mark.parametrize("name", ["", "../..", "-1", "0x1", "a" * 65, "gpu 1", "12345"])
    def test_what_names_no_device(self, env: dict[str, str], name: str) -> None:
        with pytest.raises(InvalidRequest):
            endpoint.find_device(name, env)


class TestDiagnosis:
    """Each way in which an endpoint can be unusable."""

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda path: None, ["{path} does not exist", "Is membrokerd running", "`membrokerd`"]),
            (lambda path: path.mkdir(), ["{path} has no handoff.sock"]),
            (lambda path: path.symlink_to("gone"), ["{path} is a symbolic link to nothing"]),
            (lambda path: path.touch(), ["{path} is not a directory"]),
            (lambda path: (path.mkdir(), (path / "handoff.sock").touch()), ["{path}/handoff.sock is not a socket"]),
            (
                lambda path: (path / "gpu-1" / "tenants").mkdir(parents=True),
                ["{path} is not an endpoint but the directory of these devices: gpu-1. Name one", "as in {path}/gpu-1"],
            ),
            (
                lambda path: (path.mkdir(), listening(path / "handoff.sock").close()),  # kill -9: the file remained
                ["the broker is dead", "`membrokerd`"],
            ),
        ],
    )
    def test_what_is_no_endpoint(self, place: Path, make: Callable[[Path], object], says: list[str]) -> None:
        make(path := place / "it")
        message = why(path)
        assert all(each.format(path=path) in message for each in says), message

    def test_a_device_with_named_tenants(self, place: Path) -> None:
        """A program that names no tenant, on a machine whose configuration does."""
        tenants = place / "0" / "tenants"
        for name in ("red", "blue"):
            (tenants / name).mkdir(parents=True)
        message = why(tenants / "default")
        assert message.startswith(f"no broker is alive at {place / '0'}: start one with `membrokerd`")
        assert f"{place / '0'} has no tenant 'default', but has blue, red: name one's endpoint" in message
        assert f"MEMBROKER_ENDPOINT={tenants / 'red'}" in why(tenants / "rde"), "a slip of the keys"
        assert f"{tenants} is not an endpoint but the directory of these tenants: blue, red. Name one" in why(tenants)
        with listening(tenants / "red" / "handoff.sock"):
            assert "no broker is alive" not in why(tenants / "default")

    def test_the_daemon_is_stopped(self, place: Path) -> None:
        """kill -STOP, or a debugger: the kernel accepts for it and nothing is ever said."""
        with listening(place / "handoff.sock"):
            assert "with `kill -CONT PID`" in why(place, timeout=0.05)

    def test_a_path_that_is_too_long(self, place: Path) -> None:
        long = place / ("x" * 110)
        long.mkdir()
        with pytest.raises(InvalidRequest, match=" 107 "):
            membroker.connect(long)


class TestTimes:
    """How long to wait for a broker: any number that can be waited for, and a plain word for the others."""

    NONE = (-1, -1e-9, float("nan"), float("inf"), None, "5", 1e30, 10**400, True, 7 * 24 * 3600 + 1)

    def test_times_that_are_none(self, place: Path) -> None:
        """A 0 would wait for ever in the kernel, a text fail somewhere in it: the caller is told before it is tried."""
        wrong: list[tuple[str, Any]] = [("timeout", 0), ("timeout", 0.0), *product(("timeout", "outage"), self.NONE)]
        with listening(place / "handoff.sock") as listener:
            for name, seconds in wrong:
                least = {"timeout": "more than 0", "outage": "0 or more"}[name]
                with pytest.raises(InvalidRequest, match=f"^{name} .* {least} "):
                    membroker.connect(place, **{name: seconds})
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()

    @pytest.mark.parametrize("seconds", [1e-300, 9.9e-7, Fraction(1, 1000)])
    def test_a_tiny_timeout_is_one(self, place: Path, seconds: Any) -> None:
        """Less than the kernel's microsecond is no 0, which would be for ever."""
        with listening(place / "handoff.sock"), pytest.raises(BrokerUnavailable, match="does not answer"):
            membroker.connect(place, timeout=seconds)


class TestDenied:
    """Another tenant's endpoint, seen by a user who may not enter."""

    def denied(self, *arguments: Path, call: str = "membroker.connect(*sys.argv[1:])", **env: str) -> str:
        """Return what an ordinary user is told: ourselves, or as root user nobody."""
        script = (
            "import os, sys, membroker, membroker.cli.doctor\n"
            "if os.geteuid() == 0:\n"
            "    os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)\n"
            f"try:\n    print({call})\n"
            "except membroker.AccessDenied as error:\n    print(error)\n"
        )
        command = [sys.executable, "-c", script, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **env})
        return done.stdout

    def test_a_socket_of_others(self, place: Path) -> None:
        """Mode 0660, and the user is not in its group: he learns which group, and how to join it."""
        with listening(place / "handoff.sock"):
            os.chmod(place / "handoff.sock", 0o060 if os.geteuid() else 0o660)
            os.chown(place / "handoff.sock", -1, group := os.getegid() or 1)
            message = self.denied(place)
        assert f"permission denied: {place / 'handoff.sock'} belongs to" in message
        for said in (f"uid {os.geteuid()}", f"gid {group}", "mode 0", "usermod -aG"):
            assert said in message
