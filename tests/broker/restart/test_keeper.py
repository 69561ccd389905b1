"""The keeper of descriptors: it keeps what it was given over daemons' restarts, and ends when it is not needed."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.keepers import LOOK_SECONDS, Client, Keeper, memfd

from membroker.wire.descriptors import close_all
from membrokerd.restart import keeper as fdstore

_STRANGER = """
import os, pathlib, sys
from tests.support.keepers import Client
os.setgid(65534)
os.setuid(65534)
try:
    client = Client(pathlib.Path(sys.argv[1]))
    client.contents()
except (EOFError, ConnectionError):
    print("turned away")
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory of mode 0700, with a path short enough for a socket."""
    made = Path(tempfile.mkdtemp(prefix="mb-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def keeper(directory: Path) -> Iterator[Keeper]:
    with Keeper(directory / "keeper.sock") as one:
        assert one.said == fdstore.LISTENING
        yield one


@pytest.fixture
def client(keeper: Keeper) -> Iterator[Client]:
    with Client(keeper.path) as one:
        assert one.contents() == {}
        yield one


def test_who_sees_the_socket_can_connect(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An init container waits until the socket is there. Killed keepers have left one under either name."""
    path, listen, there = directory / "keeper.sock", socket.socket.listen, list[bool]()
    monkeypatch.setattr(socket.socket, "listen", lambda one: [there.append(path.exists()), listen(one)])
    for left in (path, directory / ".new"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(left))
    mask = os.umask(0o077)
    try:
        one = fdstore.Keeper(str(path))
    finally:
        os.umask(mask)
    with Client(path):
        assert there == [False]
        assert list(directory.iterdir()) == [path]
    one.leave()
    one._listener.close()
    os.close(one._directory)


# --- what is kept ---


def test_what_is_replaced_or_dropped_is_closed(keeper: Keeper, client: Client) -> None:
    """A restarted daemon puts a name again, and a deleted segment's memory is free only when the keeper has closed it.

    Dropping a name twice is not an error.
    """
    client.put({"driver.watch": b"old", "segment.1.1": b"one", "segment.1.2": b"stays"})
    before = keeper.descriptors()
    client.put({"driver.watch": b"new"})
    assert client.contents() == {"driver.watch": b"new", "segment.1.1": b"one", "segment.1.2": b"stays"}
    assert keeper.descriptors() == before
    for _ in range(2):
        assert client.ask(7, drop=["segment.1.1", "driver.watch"]) == {"number": 7}
    assert client.contents() == {"segment.1.2": b"stays"}
    assert keeper.descriptors() == before - 2


def test_five_thousand_names(keeper: Keeper, client: Client) -> None:
    """More than the segments that a daemon may have. They go in and come out in packets of 64, with the right files."""
    names = [f"segment.{number // 100 + 1:x}.{number + 1:x}" for number in range(5_000)]
    for first in range(0, len(names), 64):
        client.put({name: name.encode() for name in names[first : first + 64]})
    assert client.contents() == {name: name.encode() for name in names}
    for first in range(0, len(names), 64):
        assert client.ask(3, drop=names[first : first + 64]) == {"number": 3}
    assert client.contents() == {}


def test_a_full_keeper_takes_all_of_a_packet_or_nothing(directory: Path) -> None:
    """An operator's ulimit leaves room for five names: what is kept stays, and may still be replaced."""
    with Keeper(directory / "keeper.sock", fdstore.RESERVED + 5) as keeper, Client(keeper.path) as client:
        client.put({f"segment.1.{extent}": b"kept" for extent in range(1, 5)})
        open_before = keeper.descriptors()
        files = [memfd(b"more"), memfd(b"more")]
        refused = client.ask(9, files, put=["segment.2.1", "segment.2.2"])
        close_all(files)
        assert refused["number"] == 9
        assert "it has 4 descriptors and may have 5" in refused["error"]
        assert keeper.descriptors() == open_before
        client.put({"segment.1.1": b"again", "segment.2.1": b"the fifth"})
        assert len(client.contents()) == 5


# --- clients ---

JUNK = {
    "not JSON": b"\xff\x00junk",
    "not an object": b"[1, 2]",
    "deep": b"[" * 30_000,
    "no number": b'{"list": 0}',
    "a boolean as the number": b'{"number": true, "list": 0}',
    "a negative number": b'{"number": -1, "list": 0}',
    "no request": b'{"number": 5}',
    "list from nowhere": b'{"number": 5, "list": 99999999999999999999}',
    "names that are no list": b'{"number": 5, "drop": "segment.1.1"}',
    "a name with a colon": b'{"number": 5, "drop": ["segment:1"]}',
    "an empty name": b'{"number": 5, "drop": [""]}',
    "a name of half a pair": b'{"number": 5, "drop": ["\\ud800"]}',
    "a long name": json.dumps({"number": 5, "drop": ["x" * 256]}).encode(),
    "many names": json.dumps({"number": 5, "drop": [f"x{number}" for number in range(65)]}).encode(),
    "a name twice": b'{"number": 5, "drop": ["x", "x"]}',
    "an owner that is no text": b'{"number": 5, "own": null}',
    "a long owner": json.dumps({"number": 5, "own": "x" * 256}).encode(),
    "a long packet": b'{"number": 5, "drop": ["' + b"x" * fdstore.MAX_PACKET_BYTES + b'"]}',
}


def test_junk_is_refused_and_changes_nothing(keeper: Keeper, client: Client) -> None:
    """A daemon with a bug sends junk, with a descriptor or without: it gets an error, and nothing leaks or is lost."""
    client.put({"segment.1.1": b"kept"})
    before = keeper.descriptors()
    for what, junk in JUNK.items():
        for descriptors in ([], [0]):
            client.say(junk, descriptors)
            answer, none = client.hear()
            assert answer["number"] in (5, None), what
            assert answer["error"], what
            assert not none
    assert keeper.descriptors() == before
    assert client.contents() == {"segment.1.1": b"kept"}


def test_a_put_without_a_descriptor_for_each_name_is_refused_whole(keeper: Keeper, client: Client) -> None:
    """If the kernel cut off descriptors, or a daemon forgot one, a name would get the wrong file.

    And only a put has descriptors.
    """
    client.put({"segment.2.1": b"kept"})
    before = keeper.descriptors()
    for names, descriptors in ((1, 0), (0, 1), (2, 1), (1, 2), (64, 65), (64, 253), (0, 253)):
        put = [f"segment.1.{extent:x}" for extent in range(1, names + 1)]
        answer = client.ask(6, [0] * descriptors, put=put)
        assert answer["number"] == 6
        assert ("descriptors were lost" in answer["error"]) == (descriptors > 64)
    for request in ({"drop": ["segment.2.1"]}, {"list": 0}):
        assert "has 1 descriptors and needs 0" in client.ask(6, [0], **request)["error"]
    assert keeper.descriptors() == before
    assert client.contents() == {"segment.2.1": b"kept"}


def test_an_empty_packet_with_a_descriptor_is_the_end_of_a_connection(keeper: Keeper) -> None:
    """SEQPACKET cannot tell an empty packet from the end of the connection. Its descriptor is closed."""
    with Client(keeper.path) as client:
        client.put({"segment.1.1": b"kept"})
        before = keeper.descriptors()
        client.say(b"", [0])
        with pytest.raises(EOFError):
            client.hear()
    with Client(keeper.path) as client:
        assert client.contents() == {"segment.1.1": b"kept"}
        assert keeper.descriptors() == before


def test_a_newer_connection_replaces_the_older(keeper: Keeper) -> None:
    """A child that the daemon forked still has its connection: the next daemon does not wait for it."""
    with Client(keeper.path) as older, Client(keeper.path) as newer:
        newer.put({"segment.1.1": b"kept"})
        with pytest.raises((EOFError, ConnectionError)):
            older.hear()
        assert newer.contents() == {"segment.1.1": b"kept"}


def test_a_keeper_refuses_a_second_owner_until_the_first_has_nothing_there(keeper: Keeper) -> None:
    """Another device's daemon would list and drop descriptors that are not its own.

    It is refused and changes nothing.
    """
    refusal = {
        "number": 1,
        "error": "it keeps the descriptors of /run/a: give each device a keeper of its own, "
        'as keeper_socket = "/run/membroker-keeper/{device}/fdstore.sock" does, '
        f"or end this keeper (process {keeper.process.pid}) if that device's daemon will not run again",
        "owner": "/run/a",
    }
    with Client(keeper.path) as first:
        assert first.ask(1, own="/run/a") == {"number": 1}
        first.put({"segment.1.1": b"kept", "driver.x": b"the host driver's"})
        with Client(keeper.path) as second:
            assert second.ask(1, own="/run/b") == refusal
            assert second.ask(1, list=0) == refusal, "an unnamed owner is another owner"
            assert second.ask(1, drop=["segment.1.1"]) == refusal
        assert first.contents() == {"segment.1.1": b"kept", "driver.x": b"the host driver's"}
    with Client(keeper.path) as second:
        assert second.ask(1, own="/run/b") == refusal, "a dead daemon's segment is worth keeping"
    with Client(keeper.path) as first:
        assert first.ask(1, own="/run/a") == {"number": 1}
        assert first.ask(1, drop=["segment.1.1"]) == {"number": 1}
    with Client(keeper.path) as second:
        assert second.ask(1, own="/run/b") == {"number": 1}
        assert second.contents() == {}, "the first owner's driver is of no use to it"


def test_a_client_that_reads_no_answers_is_disconnected(keeper: Keeper) -> None:
    """A daemon that is stopped in a debugger before it reads answers must not block the keeper for its successor."""
    with Client(keeper.path) as deaf:
        deaf.put({"segment.1.1": b"kept"})
        with suppress(ConnectionError):
            while True:
                deaf.say(b'{"number": 1, "list": 0}')
        with Client(keeper.path) as client:
            assert client.contents() == {"segment.1.1": b"kept"}


@pytest.mark.root
def test_another_user_is_turned_away(keeper: Keeper) -> None:
    """Modes keep other users out. If an operator opened them, the keeper refuses other users, and its daemon stays."""
    with Client(keeper.path) as client:
        client.put({"segment.1.1": b"kept"})
        keeper.path.parent.chmod(0o755)
        keeper.path.chmod(0o666)
        told = subprocess.check_output([sys.executable, "-c", _STRANGER, str(keeper.path)], text=True)
        assert told == "turned away\n"
        assert client.contents() == {"segment.1.1": b"kept"}


def test_an_open_directory_is_refused(directory: Path) -> None:
    """Another user that can rename files in it could replace the keeper."""
    with Keeper(directory / "keeper.sock") as keeper:
        assert keeper.path.stat().st_mode & 0o777 == 0o600
    directory.chmod(0o750)
    with Keeper(directory / "keeper.sock") as keeper:
        status, complaint = keeper.ended()
    assert status == 1
    assert f"{directory} is not this user's alone" in complaint
    assert "chmod" not in complaint, "it may be a directory that tenants enter"


def test_there_is_one_keeper_in_a_directory(keeper: Keeper, client: Client) -> None:
    """Two keepers would each have half of the descriptors. The second says so, and the first stays."""
    client.put({"segment.1.1": b"kept"})
    with Keeper(keeper.path) as second:
        status, complaint = second.ended()
    assert status == 1
    assert f"another keeper uses {keeper.path.parent}" in complaint
    assert client.contents() == {"segment.1.1": b"kept"}


# --- the end of a keeper ---


def test_it_ends_when_its_directory_is_removed(keeper: Keeper, client: Client) -> None:
    """An operator removes the runtime directory: the keeper cannot be found any more, so it ends."""
    client.put({"segment.1.1": b"kept"})
    shutil.rmtree(keeper.path.parent)
    keeper.look()
    assert keeper.ended() == (0, "")


def test_it_ends_when_another_keeper_has_its_path(keeper: Keeper, client: Client) -> None:
    """The directory was moved away and created again: the new keeper's socket stays when the old keeper ends."""
    client.put({"segment.1.1": b"kept"})
    aside = keeper.path.parent.with_suffix(".aside")
    keeper.path.parent.rename(aside)
    keeper.path.parent.mkdir(mode=0o700)
    try:
        with Keeper(keeper.path) as other:
            assert other.said == fdstore.LISTENING
            with Client(other.path) as connected:
                keeper.look()
                assert keeper.ended() == (0, "")
                assert connected.contents() == {}
    finally:
        shutil.rmtree(aside)


def test_it_ends_when_nothing_is_worth_keeping(keeper: Keeper) -> None:
    """The daemon and the last worker are dead: the driver's descriptors alone are of no use."""
    with subprocess.Popen(["sleep", "60"]) as dead, subprocess.Popen(["sleep", "60"]) as alive:
        pidfds = [os.pidfd_open(dead.pid), os.pidfd_open(alive.pid)]
        with Client(keeper.path) as client:
            client.put({"driver.watch": b"", "segment.1.1": b""})
            client.ask(3, pidfds, put=["process.1", "process.2"])
            client.ask(4, drop=["segment.1.1"])
        keeper.look()
        dead.kill()
        assert select.select([pidfds[0]], [], [], DEADLINE_SECONDS)[0]
        with pytest.raises(subprocess.TimeoutExpired):  # it has checked several times, and one worker lives
            keeper.process.wait(10 * LOOK_SECONDS)
        alive.kill()
        assert keeper.ended() == (0, "")
        close_all(pidfds)
    assert not keeper.path.exists()


def test_it_stays_for_a_segment_and_for_a_daemon(keeper: Keeper) -> None:
    """A sealed segment outlives every worker and the daemon. A daemon without a segment is still connected."""
    with Client(keeper.path) as client:
        assert client.contents() == {}, "it may look before it has accepted"
        keeper.look()
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.process.wait(10 * LOOK_SECONDS)
        client.put({"segment.1.1": b"kept"})
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.process.wait(10 * LOOK_SECONDS)
    with Client(keeper.path) as client:
        client.ask(1, drop=["segment.1.1"])
    assert keeper.ended() == (0, "")


def test_it_ends_when_no_daemon_connects(keeper: Keeper) -> None:
    """The daemon that started it died before it connected."""
    keeper.look()
    assert keeper.ended() == (0, "")


def test_it_stays_where_it_is_told_to(tmp_path: Path) -> None:
    """In a container it would be started again, and later each time, until the daemon finds none."""
    with Keeper(tmp_path / "keeper" / "fdstore.sock", 0, "--stay") as keeper:
        keeper.look()
        pidfd = os.pidfd_open(keeper.process.pid)
        assert not select.select([pidfd], [], [], 20 * LOOK_SECONDS)[0], "it has ended"
        os.close(pidfd)
        with Client(keeper.path) as client:
            assert client.contents() == {}
        keeper.process.terminate()
        assert keeper.ended() == (0, "")
        assert not keeper.path.exists()


def test_it_waits_for_another_keeper_where_it_is_told_to_stay(tmp_path: Path) -> None:
    """A daemon has started its own while the container of this one was started again."""
    path = tmp_path / "keeper" / "fdstore.sock"
    with Keeper(path) as keeper:
        second = subprocess.Popen(
            [sys.executable, "-m", "membrokerd.restart.keeper", "--stay", str(path)], stdout=subprocess.PIPE, text=True
        )
        with second, Client(path) as client:
            assert client.contents() == {}
            waits = re.compile(rf"-> FLOCK .* {second.pid} ")
            until(lambda: waits.search(Path("/proc/locks").read_text()) or second.poll() is not None)
            keeper.process.terminate()
            assert second.stdout.readline() == "listening\n"
            second.terminate()
            assert second.wait(DEADLINE_SECONDS) == 0
