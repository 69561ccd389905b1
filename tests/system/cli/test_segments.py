"""`membroker segments`, as people and scripts use it: files in, tables out, and nothing left behind by what failed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support import command
from tests.support.command import rows
from tests.support.daemons import Daemon, running, until
from tests.support.sizes import MIB
from tests.support.template import run as run_python
from tests.support.workers import state_of

import membroker
from membroker.cli import main as cli
from membroker.safetensors import read_index, write_index
from membroker.v1 import broker_pb2, resources_pb2

pytestmark = pytest.mark.shared_daemon

COMMAND = (*command.COMMAND, "segments")


def run(*arguments: str) -> tuple[int, str, str]:
    return command.run("segments", *arguments)


def good(*arguments: str) -> str:
    status, out, err = run(*arguments)
    assert status == 0, err
    return out


def refused(*arguments: str, status: int = 1) -> str:
    return command.refused("segments", *arguments, status=status)


def at(daemon: Daemon, tenant: str = "red") -> tuple[str, str]:
    return "--endpoint", str(daemon.endpoint(tenant))


def write_hollow(path: Path, size: int) -> None:
    """Write a well-formed file of `size` bytes of zeros that takes no room on the disk."""
    header, index = write_index({"x": ("U8", (size,))})
    with path.open("wb") as file:
        file.write(header)
        file.truncate(index.size)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file of 3 MiB and a little, with two tensors, each of a byte of its own, and metadata."""
    tensors = {"embed": ("F32", (512, 1024)), "norm": ("BF16", (512, 1024))}
    header, index = write_index(tensors, {"format": "pt", "made_by": "a test"})
    content = bytearray(header.ljust(index.size, b"\0"))
    for number, info in enumerate(index.values(), 1):
        content[info.offset : info.offset + info.size] = bytes([number]) * info.size
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return path


def states(daemon: Daemon) -> list[str]:
    """Return the state of each segment, as the operator sees it."""
    with daemon.admin_stub() as stub:
        listed = stub.ListSegments(broker_pb2.ListSegmentsRequest()).segments
    return [resources_pb2.Segment.State.Name(one.state) for one in listed]


def is_clean(daemon: Daemon) -> bool:
    """Say whether nothing is charged, held or open, and the device shows the anchor alone."""
    books = daemon.books()
    return not (states(daemon) or daemon.sessions() or books.lent_bytes) and books.device_used_bytes == 2 * MIB


# --- Each command ---


def test_a_file_is_loaded_listed_shown_attached_and_deleted(daemon: Daemon, model: Path) -> None:
    """The whole way. A worker attaches the file's tensors, byte for byte, and the loader need not be there any more."""
    assert good(*at(daemon)) == "there are no segments\n"
    out = good("load", str(model), "Qwen/Qwen3-8B/weights", *at(daemon))
    assert out.splitlines()[0].startswith("red/Qwen/Qwen3-8B/weights: 4.0 MiB at the device, 2 tensors, in ")
    code = "import membroker\n" + "".join(f"{line[2:]}\n" for line in out.splitlines() if line.startswith("  "))
    done = run_python(["-c", code], env={**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint())})
    assert (done.returncode, done.stderr, "embed" in done.stdout) == (0, "", True), "what one is told to type works"
    until(lambda: daemon.sessions() == [])
    header, row = rows(good(*at(daemon)))
    assert header == ["segment", "state", "size", "sessions", "age"]
    assert row[:-1] == ["red/Qwen/Qwen3-8B/weights", "sealed", "4.0 MiB", "0"]
    assert re.fullmatch(r"\d+[sm]", row[-1])
    (listed,) = json.loads(good("--json", *at(daemon)))
    assert (listed["state"], listed["size_bytes"], listed["sessions"]) == ("sealed", 4 * MIB, 0)
    told = json.loads(good("show", "red/Qwen/Qwen3-8B/weights", "--json", *at(daemon)))
    assert (told["generation"], [one["name"] for one in told["tensors"]]) == (listed["generation"], ["embed", "norm"])
    shown = good("show", "Qwen/Qwen3-8B/weights", *at(daemon))
    assert re.search(r"^format +pt$\n^made_by +a test$", shown, re.MULTILINE)
    assert re.search(r"^embed +F32 +\[512, 1024\] +2.0 MiB +\d+$\n^norm +BF16 +\[512, 1024\]", shown, re.MULTILINE)
    with membroker.connect(daemon.endpoint()) as client, client.attach("weights") as segment:
        header, row, *_ = rows(command.good("sessions", *at(daemon)))
        assert (row[header.index("segments")], row[header.index("used")]) == ("1", "0 B")
        content, index = model.read_bytes(), segment.index()
        for name, info in read_index(content).items():
            assert segment.read(index[name].offset, info.size) == content[info.offset : info.offset + info.size]
        told = good("delete", "weights", *at(daemon))
        assert told.splitlines() == [
            "red/Qwen/Qwen3-8B/weights is deleted: it can no longer be attached",
            "its 4.0 MiB become free when the last session closes it: 1 session now",
        ]
        assert rows(good(*at(daemon)))[1][1] == "ending"
        assert segment.read(index["embed"].offset, 2) == b"\1\1", "it stays mapped where it is"
    until(lambda: is_clean(daemon))


def test_a_newer_version_takes_the_name(daemon: Daemon, model: Path) -> None:
    for number in (1, 2):
        out = good("load", str(model), "chat/current", "--replace", *at(daemon))
        assert out.startswith(f"red/chat/current.version-{number}: ")
    until(lambda: [row[0] for row in rows(good(*at(daemon)))[1:]] == ["red/chat/current.version-2"])
    assert "2 tensors" in good("show", "chat/current", *at(daemon))
    good("delete", "chat/current", *at(daemon))
    assert "no segment" in refused("show", "chat/current", *at(daemon))


def test_the_operator_sees_and_deletes_what_a_tenant_cannot(daemon: Daemon, model: Path) -> None:
    """Blue's endpoint knows nothing of red's segment, by whatever name; the admin endpoint knows all."""
    good("load", str(model), "m/weights", *at(daemon))
    blue, admin = at(daemon, "blue"), ("--endpoint", str(daemon.admin))
    assert good(*blue) == "there are no segments\n"
    for name in ("weights", "red/m/weights"):
        assert "there is no segment" in refused("show", name, *blue)
        assert "there is no segment" in refused("delete", name, *blue)
    assert states(daemon) == ["SEALED"]
    assert rows(good("--admin", *blue))[1][0] == "red/m/weights"
    assert "TENANT/MODEL/SEGMENT" in refused("delete", "m/weights", "--admin", *admin, status=2)
    device = ("--endpoint", str(daemon.admin.parent))  # the name of three parts has the tenant
    said = refused("show", "red/m/weights", *device)
    assert f"are read at its tenant's endpoint: give --endpoint {daemon.endpoint('red')}" in said
    assert "red/m/weights is deleted" in good("delete", "red/m/weights", *device)
    until(lambda: is_clean(daemon))


def test_at_the_host_and_with_the_models_own_numbers(model: Path) -> None:
    """The first to register a model says its numbers, and here that is the loader: its workers must fit."""
    with running({"host_capacity": "64MiB"}) as daemon:
        sizes = ("--limit", "128MiB", "--virtual-capacity", "64GiB")
        good("load", str(model), "m/weights", "--location", "host", *sizes, *at(daemon))
        assert rows(good(*at(daemon)))[1][0] == "red/m/weights (host)"
        with membroker.connect(daemon.endpoint()) as client:
            worker = client.model("m", virtual_capacity="64GiB", limit="128MiB")
            books = worker.stats().books["host"]
            assert (books.used_bytes, books.segment_bytes) == (4 * MIB, 4 * MIB)


# --- What cannot be loaded ---


def test_the_brokers_refusals_are_sentences(daemon: Daemon, model: Path) -> None:
    """A name that is taken, a segment that is written or says nothing: status 1, and nothing changes."""
    good("load", str(model), "m/weights", *at(daemon))
    with membroker.connect(daemon.endpoint()) as client, client.attach("m/weights"):
        err = refused("load", str(model), "m/weights", *at(daemon))
        assert "segments/weights exists and is sealed: attach it, publish its next version" in err
        assert states(daemon) == ["SEALED"]
        with client.model("m").create_segment("raw", "2MiB") as segment:
            assert "is still being written" in refused("show", "raw", *at(daemon))
            segment.seal()
            assert "has no readable header: the header's length is 0" in refused("show", "raw", *at(daemon))


def test_a_load_that_is_refused_leaves_no_model_behind(daemon: Daemon, model: Path) -> None:
    """Too small a limit, and then the right one: the first try's must not stand in the second one's way."""
    assert "may hold 2.0 MiB" in refused("load", str(model), "m/weights", "--limit", "2MiB", *at(daemon))
    good("load", str(model), "m/weights", "--limit", "64MiB", *at(daemon))
    # A model that others use keeps its numbers.
    with membroker.connect(daemon.endpoint()) as worker:
        with worker.attach("m/weights"):
            refused("load", str(model), "m/weights", *at(daemon))
        worker.model("m", limit="64MiB")
        assert "is registered with" in refused("load", str(model), "m/w", "--limit", "8MiB", *at(daemon))
    good("delete", "m/weights", *at(daemon))


# --- How far it is, and what a failure leaves ---


def test_a_large_file(daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is not copied into memory. Without a terminal, at most ten lines show the progress."""
    path = tmp_path / "x.safetensors"
    write_hollow(path, 200 * MIB)
    tracemalloc.start()
    try:
        assert cli.main(("segments", "load", str(path), "m/w", *at(daemon))) == 0
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 10
    assert re.fullmatch(r"m/w: +10%, 20\.0 MiB of 200\.0 MiB, [\d.]+ .iB/s", told[0])


def test_ctrl_c_in_mid_load_leaves_nothing(daemon: Daemon, tmp_path: Path) -> None:
    """The load is held up in the middle: nobody reads its progress, and that pipe is full."""
    path = tmp_path / "x.safetensors"
    write_hollow(path, 200 * MIB)
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writable, b"." * 4096)
    os.set_blocking(writable, True)
    load = [sys.executable, *COMMAND, "load", str(path), "m/w", *at(daemon)]
    with subprocess.Popen(load, stderr=writable) as process:
        os.close(writable)
        until(lambda: states(daemon) == ["WRITING"])
        until(lambda: state_of(process.pid) == "S")  # its main thread waits for something, which a copy never does
        process.send_signal(signal.SIGINT)
        with os.fdopen(readable) as stream:
            said = stream.read()
    assert process.returncode == 130
    assert said.endswith("membroker: interrupted: no segment was made\n")
    until(lambda: daemon.models() == [])
    until(lambda: is_clean(daemon))
