"""SIGHUP: an operator changes the configuration of a daemon that runs, beside workers that go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.command import check_config, good
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, to_toml, until
from tests.support.sizes import MIB
from tests.support.template import run
from tests.support.workers import Worker, proc_of, worker

import membroker
from membroker.cli.doctor import check_configuration

RED: dict[str, Any] = {"limit": "64MiB"}
BASE: dict[str, Any] = {"tenants": {"red": RED, "blue": {}}, "log": {"level": "info"}}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running(BASE) as one:
        yield one


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Worker]:
    """A worker of red that holds 32 MiB with something written in it."""
    with worker() as one:
        one.connect(daemon)
        one.do("model = client.model('chat'); kept = model.allocate('32MiB'); kept.view()[:4] = b'kept'")
        yield one
        assert one.ask("bytes(kept.view()[:4]).decode()") == "kept"
        one.do("kept.close(); client.close()")


def write(daemon: Daemon, text: str) -> None:
    (daemon.directory / "membrokerd.toml").write_text(text)


def reload(daemon: Daemon, **keys: Any) -> str:
    """Change these keys of the daemon's file, reload it, and return what the log says of it."""
    return hang_up(daemon, to_toml({**written(daemon), **keys}))


def written(daemon: Daemon) -> dict[str, Any]:
    places = {"runtime_directory": str(daemon.directory / "run"), "state_directory": str(daemon.directory / "kept")}
    return {**places, **daemon.config}


def hang_up(daemon: Daemon, text: str, ends: str = "configuration reloaded") -> str:
    write(daemon, text)
    before = daemon.log()
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: ends in daemon.log().removeprefix(before))
    return daemon.log().removeprefix(before)


def lent(daemon: Daemon, tenant: str, size: str) -> bool:
    with membroker.connect(daemon.endpoint(tenant)) as client:
        try:
            client.model("probe").allocate(size).close()
        except membroker.OutOfMemory:
            return False
        return True


def said_before(daemon: Daemon, **keys: Any) -> list[str]:
    """Return what `--check-config` says of the daemon that runs, if these keys of its file were changed."""
    known = ("capacity: the running", "tenants", "a reload of", "the daemon that runs")
    status, said = check_config(daemon.directory / "new.toml", {**written(daemon), **keys})
    assert status == 0
    return [line for line in said if line.startswith(known)]


def test_a_check_says_what_a_reload_would_do(daemon: Daemon, engine: Worker) -> None:
    """It asks the daemon that runs, and a reload then does that. Without one there is nothing to say."""
    assert said_before(daemon) == []
    low = {"red": {"limit": "8MiB", "models": {"chat": {"limit": "4MiB"}}}, "blue": {}}
    assert [line.split(" that are used now")[0] for line in said_before(daemon, tenants=low)] == [
        "tenants.red.limit: 8.0 MiB is less than the 32.0 MiB",
        "tenants.red.models.chat.limit: 4.0 MiB is less than the 32.0 MiB",
    ]
    (removed,) = said_before(daemon, tenants={"blue": {}})
    assert removed.startswith("tenants: red is not in the file any more, and has 32.0 MiB, sessions: 1; a reload")
    more = said_before(daemon, capacity="512MiB", tenants={"red": {"guarantee": "400MiB"}, "blue": {}})
    assert [line.split(",")[0] for line in more] == [
        "capacity: the running daemon lends 256.0 MiB",
        "a reload of the running daemon would change nothing",
    ]
    daemon.kill()
    assert said_before(daemon, tenants={"blue": {}}) == [], "its socket is still there"
    daemon.start_again()
    engine.do("model.available()")


def test_a_tenant_is_removed_once_it_holds_nothing(daemon: Daemon, engine: Worker) -> None:
    """Its worker goes on; when that has ended, the next reload takes the endpoint away."""
    said = reload(daemon, tenants={"blue": {}})
    assert "a removed tenant stays while it has sessions or memory" in said
    assert 'tenant=red sessions=1 charged="32.0 MiB"' in said
    # A restart would take the endpoint away from the worker: nobody is told to restart for a tenant.
    write(daemon, to_toml({**written(daemon), "capacity": "128MiB", "tenants": {"blue": {}}}))
    waiting = "not in force before another reload, the log says why: tenants.red"
    assert ask(daemon) == (0, f"reloaded; not in force before a restart: capacity; {waiting}\n")
    engine.do("model.allocate('2MiB').close()")
    engine.do("kept.close(); client.close()")
    until(lambda: not daemon.sessions())
    assert "endpoint closed tenant=red" in reload(daemon, tenants={"blue": {}})
    assert not list(daemon.endpoint("red").iterdir())
    assert lent(daemon, "blue", "2MiB")
    reload(daemon, tenants={"blue": {}, "red": {}})
    engine.connect(daemon).do("model = client.model('chat'); kept = model.allocate(PAGE); kept.view()[:4] = b'kept'")


def test_users_of_a_tenant_change_and_tenants_are_added(daemon: Daemon, engine: Worker) -> None:
    """`uids` hold for new sessions. A link stands in the place of a new endpoint: the next reload opens that."""
    wrong = daemon.endpoint("green")
    wrong.symlink_to("/nonexistent")
    tenants = {"red": {"uids": [os.geteuid() + 1]}, "blue": {}, "green": {"limit": "16MiB"}}
    said = reload(daemon, tenants=tenants)
    assert "a tenant is not added: its endpoint cannot be opened tenant=green" in said
    with pytest.raises(membroker.AccessDenied):
        membroker.connect(daemon.endpoint())
    engine.do("model.allocate('64MiB').close()")
    wrong.unlink()
    assert "endpoint open tenant=green" in reload(daemon, tenants={**tenants, "red": {"uids": [os.geteuid()]}})
    membroker.connect(daemon.endpoint()).close()
    assert (lent(daemon, "green", "16MiB"), lent(daemon, "green", "18MiB")) == (True, False)


def test_a_broken_file_changes_nothing(daemon: Daemon, engine: Worker) -> None:
    """By a signal, or by `membrokerd --reload`, which fails, and looks where the options say."""
    where = ("--driver", "host", "--runtime-directory", str(daemon.directory / "run"))
    for text, problem in (("tenants = [", "is not TOML"), ('[tenants.red]\nlimitt = "1GiB"', "limitt")):
        said = hang_up(daemon, text, problem)
        assert "the configuration was not reloaded and stays as it is" in said
        assert "Traceback" not in said
        until(lambda: daemon.figure("membroker_config_last_reload_successful") == 0)
        status, said = ask(daemon, *where)
        assert status == 1
        assert problem in said
        engine.do("model.allocate('2MiB').close()")
        assert "configuration reloaded" in reload(daemon)


def test_a_file_that_cannot_be_read_changes_nothing(daemon: Daemon, engine: Worker) -> None:
    """A pipe would be waited for, or be empty at the second reading, and an empty file has no tenant."""
    path = daemon.directory / "membrokerd.toml"
    text = path.read_text()
    for make in (lambda: None, path.mkdir, lambda: os.mkfifo(path), lambda: path.touch(0o000)):
        path.unlink()
        make()
        if path.is_file() and os.access(path, os.R_OK):  # root reads every file
            continue
        before = daemon.log()
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda before=before: "was not reloaded and stays as it is" in daemon.log().removeprefix(before))
        engine.do("model.allocate('2MiB').close()")
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        hang_up(daemon, text)


def ask(daemon: Daemon, *options: str) -> tuple[int, str]:
    """Run `membrokerd --reload`, as the unit does; return its status and what it says."""
    command = ["-m", "membrokerd.cli", *(options or ("--driver", "host"))]
    command += ["--config", str(daemon.directory / "membrokerd.toml"), "--reload"]
    done = run(command, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def test_a_reload_that_is_asked_for_fails_if_it_is_refused(daemon: Daemon, engine: Worker) -> None:
    """`systemctl reload` returned 0 for a guarantee of 900 GiB, and weeks later the daemon could not start again.

    Until the file is put right, metrics and status say so; a key that needs a restart is named, too.
    """
    begun = daemon.figure("membroker_config_last_reload_success_timestamp_seconds")
    write(daemon, to_toml({**written(daemon), "tenants": {"red": {"guarantee": "900GiB"}, "blue": {}}}))
    status, said = ask(daemon)
    assert (status, "900" in said) == (1, True)
    until(lambda: 'method=Reload request="" result=REFUSED' in daemon.log())
    assert "900" in " ".join(daemon.device().reload_problems)
    with membroker.connect(daemon.endpoint("blue")) as client:
        assert not client.device().reload_problems, "a tenant sees no other tenant's name"
    until(lambda: daemon.figure("membroker_config_last_reload_successful") == 0)
    assert daemon.figure("membroker_config_last_reload_success_timestamp_seconds") == begun
    check = check_configuration(str(daemon.admin), {})
    assert (check.status, "900" in check.found) == ("warn", True)
    write(daemon, to_toml({**written(daemon), "capacity": "128MiB"}))
    assert ask(daemon) == (0, "reloaded; not in force before a restart: capacity\n")
    assert check_configuration(str(daemon.admin), {}).found == "not in force: capacity"
    assert "not in force  capacity" in good("status", "--admin", at=daemon.endpoint())
    until(lambda: daemon.figure("membroker_config_last_reload_successful") == 1)
    assert daemon.figure("membroker_config_last_reload_success_timestamp_seconds") > begun
    daemon.kill()
    status, said = ask(daemon)
    assert (status, "no daemon answers here" in said) == (1, True)
    write(daemon, to_toml(written(daemon)))
    daemon.start_again()
    assert check_configuration(str(daemon.admin), {}).status == "ok"


def test_many_at_once_and_during_the_start(daemon: Daemon, engine: Worker) -> None:
    """A script sends one after another; the last file that was written is in force. Nothing ends the daemon."""
    for number in range(1, 30):
        tenants = {"red": {"limit": f"{64 + 2 * number}MiB"}, "blue": {}}
        write(daemon, to_toml({**written(daemon), "tenants": tenants}))
        daemon.process.send_signal(signal.SIGHUP)
    until(lambda: engine.ask("model.available().tenant_limit_bytes") == (64 + 2 * 29) * MIB)
    command = [sys.executable, "-m", "membrokerd.cli", "--config", "/nonexistent/membrokerd.toml"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as starting:
        ignored = re.compile(r"^SigIgn:\t\w+[13579bdf]$", re.MULTILINE)  # SIGHUP is the lowest bit
        until(lambda: ignored.search(proc_of(starting.pid, "status")) or starting.poll() is not None)
        starting.send_signal(signal.SIGHUP)
        assert starting.wait(DEADLINE_SECONDS) == 1, "it ended by the signal, not by its own sentence"
