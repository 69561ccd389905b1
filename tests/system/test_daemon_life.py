"""The daemon's own life: it starts in any of its ways, ends in any of its ways, and workers compute on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS, DEFAULTS, Daemon, to_toml, until
from tests.support.sizes import MIB, PAGE
from tests.support.template import run as run_python
from tests.support.workers import ANCHOR_BYTES, Worker, as_user, worker, workers

import membroker
from membroker.v1 import broker_pb2

NOBODY = 65_534


def borrow(one: Worker, daemon: Daemon, outage: float = 0.0) -> Worker:
    """Have a worker hold 24 MiB in a pool and 6 in a buffer, with something written in both."""
    one.do(f"client = membroker.connect({str(daemon.endpoint())!r}, outage={outage})")
    one.do("model = client.model('m', virtual_capacity='1GiB'); pool = model.pool(page_size='2MiB')")
    one.do("pool.allocate(0, 24 * MIB); buffer = model.allocate('6MiB')")
    one.do("view = pool.view(0, 24 * MIB); view[:4] = b'mine'; view[-4:] = b'last'; buffer.view()[:4] = b'also'")
    return one


def check_that_it_computes_on(one: Worker) -> None:
    """The broker is away: what is mapped is read and written, calls say so, closing says nothing."""
    assert one.ask("[bytes(view[:4]).decode(), bytes(view[-4:]).decode()]") == ["mine", "last"]
    one.do("view[:] = bytes(range(256)) * (24 * MIB // 256); buffer.view()[:] = b'x' * (6 * MIB)")
    assert one.ask("bytes(view[1000 : 1003]) == bytes([232, 233, 234])")
    for call in ("pool.grow(PAGE)", "model.declare(PAGE)", "client.model('n')", "client.device()"):
        refused = one.refused(call)
        assert refused.error == "BrokerUnavailable", f"{call}: {refused}"
        assert "membrokerd" in refused.message, "it does not say how to mend it"
    assert one.ask("pool.physical_usage_bytes") == 24 * MIB
    one.do("view.release(); pool.free(20 * MIB, 4 * MIB); assert not pool.is_mapped(20 * MIB)")
    maps = "membroker.vmm.host.extents.EXTENT_NAME in open('/proc/self/maps').read()"
    assert one.ask(maps)
    one.do("pool.close(); buffer.close(); client.close(); client.close()")
    assert not one.ask(maps)


def refuse_to_start(*arguments: str, user: int | None = None, warns: bool = False, **environment: str) -> str:
    """Run a membrokerd that must not start: it says why in a sentence, and exits 1. Returns the sentence.

    That is all that it complains of, unless it `warns` before. `user` runs it, None for this one.
    """
    command = ["-m", "membrokerd.cli", "--driver", "host", *arguments]
    env = {**os.environ, **environment}
    if user is None:
        ran = run_python(command, DEADLINE_SECONDS, env=env)
    else:
        command = [*as_user(user), sys.executable, *command]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, env=env, check=False)
    assert ran.returncode == 1, f"status {ran.returncode}: {ran.stderr}"
    assert "Traceback" not in ran.stderr
    assert warns or "WARNING" not in ran.stderr, ran.stderr
    return ran.stderr.strip().splitlines()[-1]


# Its end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_and_workers_compute_on(daemon: Daemon, number: signal.Signals) -> None:
    """It is stopped, or crashes, under two engines, one of them with half of an answer unread."""
    with workers(2) as (engine, reader):
        borrow(engine, daemon)
        reader.do(f"raw = Raw({str(daemon.endpoint('blue'))!r}, 'handoff'); raw.hello(); raw.send_allocate(4)")
        reader.do("raw.read_delivery(); raw.import_all(); raw.map_all()")
        daemon.process.send_signal(number)
        assert daemon.process.wait(DEADLINE_SECONDS) == (0 if number == signal.SIGTERM else -number)
        if number == signal.SIGTERM:
            left = [path.name for path in daemon.root.rglob("*.sock")]
            assert left == ["fdstore.sock"], "it left sockets behind"  # the keeper's, which outlives it
        check_that_it_computes_on(engine)
        assert reader.ask("raw.driver.read(raw.addresses[3], 4).decode()") == "mine"
        assert engine.finish() == 0


# A new one in its place


def test_a_new_daemon_without_the_books_names_the_old_ones_workers(daemon: Daemon) -> None:
    """Somebody removed the journal: the log names the worker that maps memory. An old worker's session is lost."""
    with workers(2) as (holder, idle):
        borrow(holder, daemon, outage=30.0)
        idle.connect(daemon)
        first_session = holder.ask("client.session")
        daemon.kill()
        (daemon.root / "state" / "journal").unlink()
        before = daemon.log()
        daemon.start_again()
        # The lines about holders stand before it.
        until(lambda: " ready " in daemon.log().removeprefix(before))
        said = re.findall(r"a worker of an earlier daemon.* pid=(\d+) .*", daemon.log().removeprefix(before))
        assert str(holder.pid) in said
        assert str(idle.pid) not in said
        assert daemon.books().lent_bytes == 0
        assert holder.ask("bytes(view[:4]).decode()") == "mine"
        assert holder.refused("pool.grow(PAGE)").error == "SessionLost"
        holder.do("view.release(); pool.close(); buffer.close(); client.close()")
        until(lambda: daemon.books().unaccounted_bytes == 0)
        borrow(holder, daemon)
        assert holder.ask("client.session") != first_session
        assert daemon.books().lent_bytes == 30 * MIB
        holder.kill()
        until(lambda: daemon.books().device_used_bytes == ANCHOR_BYTES)


def test_a_second_daemon_for_the_device_refuses_and_names_the_first(daemon: Daemon) -> None:
    """Somebody starts it twice. The second says whose device it is and harms nothing of the first."""
    with worker() as engine:
        borrow(engine, daemon)
        for _ in range(2):
            said = refuse_to_start("--config", str(daemon.directory / "membrokerd.toml"))
            assert f"process {daemon.process.pid}; stop it first (kill {daemon.process.pid})" in said
        engine.do("pool.grow(PAGE); client.device()")
        assert daemon.books().lent_bytes == 32 * MIB


# Its start


def script(name: str) -> str:
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    return f"import sys; from {scripts[name].replace(':', ' import ')} as run; sys.exit(run())"


STRIKES = """
import os, signal, sys
class Strikes:
    def find_spec(self, name, *_):
        if name == "argparse":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Strikes())
"""


def test_ctrl_c_is_quiet_while_a_command_is_imported() -> None:
    """Somebody has thought better of it at once: the signal comes where the command imports one of its modules."""
    program = [sys.executable, "-c", STRIKES + script("membrokerd"), "--version"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert ended.returncode in (130, -signal.SIGINT)
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr, ended.stderr


def test_ctrl_c_is_quiet_while_it_waits_for_its_keeper(tmp_path: Path) -> None:
    """The keeper can't be started, and is tried again; the operator has seen why, and does not wait."""
    shared, path = tmp_path / "shared", tmp_path / "membrokerd.toml"
    shared.mkdir(mode=0o755)
    runtime = tempfile.mkdtemp(prefix="mb-")
    path.write_text(to_toml({**DEFAULTS, "runtime_directory": runtime, "keeper_socket": str(shared / "s")}))
    program = [sys.executable, "-c", script("membrokerd"), "--config", str(path)]
    try:
        with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
            assert any("cannot reach or start a keeper of descriptors" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            _, complained = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 130, complained
        assert "Traceback" not in complained, complained
    finally:
        shutil.rmtree(runtime)


def test_where_it_cannot_serve_is_told_with_what_to_change(tmp_path: Path) -> None:
    """A port that another one has, an address of no machine, a keeper's directory that others enter, too."""
    path = tmp_path / "membrokerd.toml"
    with socket.create_server(("127.0.0.1", 0)) as other, tempfile.TemporaryDirectory(prefix="mb-") as runtime:
        port, shared = other.getsockname()[1], Path(runtime, "shared")
        shared.mkdir(mode=0o755)
        cases: list[tuple[dict[str, Any], str, str]] = [
            ({"metrics": {"port": port}}, f"127.0.0.1:{port}", "--metrics-port"),
            ({"metrics": {"port": 0, "address": "192.0.2.1"}}, "192.0.2.1:0", "choose another metrics.address"),
            ({"keeper_socket": str(shared / "s")}, f"{shared} is not this user's alone", "choose another"),
        ]
        for number, (keys, what, advice) in enumerate(cases):
            path.write_text(to_toml({**DEFAULTS, "runtime_directory": f"{runtime}/{number}", **keys}))
            said = refuse_to_start("--config", str(path), warns="keeper_socket" in keys)
            assert what in said
            assert advice in said


def test_who_takes_the_port_of_a_dead_daemon_does_not_stop_the_next(daemon: Daemon) -> None:
    """Any user can, between two daemons. The workers go on, and the metrics are at another port, as the log says."""
    with membroker.connect(daemon.endpoint()) as client, client.model("m").allocate(PAGE) as buffer:
        daemon.kill()
        with socket.create_server(("127.0.0.1", 0)) as squatter:
            port = squatter.getsockname()[1]
            daemon.config = {**daemon.config, "metrics": {"port": port}}
            daemon.start_again()
            buffer.close()
            client.model("m").allocate(PAGE).close()
            assert f"127.0.0.1:{port}/" not in daemon.device().metrics_url
            assert "membroker_build_info" in daemon.metrics()
        assert f" port={port} " in daemon.log()


def test_an_owner_that_the_daemon_may_not_give_is_told_in_a_sentence() -> None:
    """An ordinary user tries a tenant's `owner`, which takes root. Nothing of it is left where tenants look."""
    with an_ordinary_user() as (user, runtime):
        path = runtime / "membrokerd.toml"
        places = {"runtime_directory": str(runtime / "run"), "state_directory": str(runtime / "kept")}
        path.write_text(to_toml({**DEFAULTS, **places, "tenants": {"red": {"owner": 0}}}))
        said = refuse_to_start("--config", str(path), user=user)
        assert said.startswith("membrokerd: tenants.red.owner = 0: ")
        assert list((runtime / "run" / "host" / "tenants" / "red").iterdir()) == []


@contextmanager
def an_ordinary_user() -> Iterator[tuple[int | None, Path]]:
    """Yield a user that is not root, None for this one, and a directory of that user's."""
    user = NOBODY if os.geteuid() == 0 else None
    if user is not None and shutil.which("setpriv") is None:
        pytest.skip("no setpriv (util-linux) to become an ordinary user with")
    with tempfile.TemporaryDirectory(prefix="mb-", ignore_cleanup_errors=True) as directory:
        if user is not None:
            os.chown(directory, user, user)
        yield user, Path(directory)


def test_without_any_configuration_each_user_is_a_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """`membrokerd` and nothing else, as a developer starts it; a worker needs to be told nothing either.

    Started by root this runs as an ordinary user, because root's directory is /run/membroker: then two users enter.
    """
    monkeypatch.delenv("MEMBROKER_ENDPOINT", raising=False)
    with an_ordinary_user() as (user, runtime), ExitStack() as stack:
        environment = {"XDG_RUNTIME_DIR": str(runtime), "CUDA_VISIBLE_DEVICES": ""}
        log = stack.enter_context((runtime / "log").open("wb"))
        process = stack.enter_context(
            subprocess.Popen(
                [*as_user(user), sys.executable, "-m", "membrokerd.cli", "--driver", "host", "--metrics-port", "0"],
                stderr=log,
                env={**os.environ, **environment},
            )
        )
        stack.callback(process.kill)
        root = runtime / "membroker" / "host"
        until(lambda: " ready " in (runtime / "log").read_text() or process.poll() is not None)
        assert process.poll() is None, (runtime / "log").read_text()
        assert sorted(path.name for path in (root / "tenants").iterdir()) == ["default"]
        uids = {user or os.geteuid(), os.geteuid()}
        for uid in uids:
            one = stack.enter_context(closing(Worker(uid if uid != os.geteuid() else None, environment)))
            # Root passes over a directory of another user, until it is named.
            named = "" if uid == user or user is None else repr(str(root / "tenants" / "default"))
            one.do(f"client = membroker.connect({named}); buffer = client.model('m').allocate('4MiB')")
            assert one.ask("[client.tenant, len(client.models())]") == [f"tenants/uid-{uid}", 1]
        models = raw.admin_call(root / "admin", "ListModels", broker_pb2.ListModelsRequest()).models
        assert {model.name for model in models} == {f"tenants/uid-{uid}/models/m" for uid in uids}
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0
