"""`membroker run`: a program starts with its endpoint, its model and its limit, or not at all."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import Daemon
from tests.support.sizes import MIB

import membroker
from membroker.errors import InvalidRequest

pytestmark = pytest.mark.shared_daemon

SHOW = (
    "import json, os, sys\n"
    "json.dump([sys.argv[1:], {k: v for k, v in os.environ.items() if 'MEMBROKER_' in k}], sys.stdout)"
)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command in an interpreter of its own, since it becomes another program."""
    command = [sys.executable, "-m", "membroker.cli.main", "run", *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)


def shown(done: subprocess.CompletedProcess[str]) -> Any:
    assert (done.returncode, done.stderr) == (0, "")
    arguments, environment = json.loads(done.stdout)
    return arguments, {key: value for key, value in environment.items() if key not in os.environ}


def test_a_program_gets_its_endpoint_model_and_limit(daemon: Daemon) -> None:
    """The endpoint is absolute, since the program may change its directory; its options are its own."""
    at = os.path.relpath(daemon.endpoint("red"))
    done = run("--endpoint", at, "--model", "chat", "--limit", "8MiB", "--", sys.executable, "-c", SHOW, "--json", "--")
    arguments, environment = shown(done)
    assert arguments == ["--json", "--"]
    endpoint = environment.pop("MEMBROKER_ENDPOINT")
    assert os.path.isabs(endpoint)
    assert os.path.samefile(endpoint, daemon.endpoint("red"))
    assert environment == {"MEMBROKER_MODEL": "chat", "MEMBROKER_LIMIT": str(8 * MIB)}
    around = {"MEMBROKER_ENDPOINT": str(daemon.endpoint("blue")), "MEMBROKER_MODEL": "x", "MEMBROKER_LIMIT": "1MiB"}
    _, environment = shown(run("--", sys.executable, "-c", SHOW, **around))
    assert environment == {"MEMBROKER_ENDPOINT": str(daemon.endpoint("blue"))}, "another program's model is not meant"


def test_the_limit_is_of_that_model_and_a_programs_own_goes_first(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMBROKER_MODEL", "chat")
    monkeypatch.setenv("MEMBROKER_LIMIT", "8MiB")
    with membroker.connect(daemon.endpoint("red")) as client:
        model = client.model()
        assert (model.name, model.limit) == ("chat", 8 * MIB)
        model.unregister()
        assert client.model("draft").limit is None
        assert client.model("chat", limit="4MiB").limit == 4 * MIB
        monkeypatch.setenv("MEMBROKER_LIMIT", "much")
        with pytest.raises(InvalidRequest, match=r"MEMBROKER_LIMIT: .*'much'"):
            client.model()
        monkeypatch.delenv("MEMBROKER_MODEL")
        with pytest.raises(InvalidRequest, match="membroker run --model"):
            client.model()


def test_an_engine_gets_the_options_of_its_elastic_cache(daemon: Daemon, tmp_path: Path) -> None:
    """The command adds arguments and says which. It keeps the user's own."""
    script = tmp_path / "vllm"
    script.write_text(f"#!{sys.executable}\n{SHOW}\n")
    script.chmod(0o755)
    at = ("--endpoint", str(daemon.endpoint("red")), "--model", "chat")
    done = run(*at, "--limit", "8MiB", "--", str(script), "serve", "m", "--worker-cls", "mine.Worker")
    arguments, environment = json.loads(done.stdout)
    assert arguments[:4] == ["serve", "m", "--worker-cls", "mine.Worker"]
    assert "--worker-cls" not in arguments[4:]
    assert arguments[arguments.index("--kv-cache-memory-bytes") + 1] == str(8 * MIB)
    assert environment["MEMBROKER_MODEL"] == "chat"
    assert done.stderr == f"membroker: vLLM also gets {shlex.join(arguments[4:])}\n"
    done = run(*at, "--engine", "none", "--", str(script), "serve", "m")
    assert (json.loads(done.stdout)[0], done.stderr) == (["serve", "m"], "")


def test_without_a_broker_nothing_is_started(tmp_path: Path) -> None:
    """One sentence at once, with what to do: not an error of the program, minutes later."""
    done = run("--endpoint", str(tmp_path / "tenants/red"), "--", "touch", str(tmp_path / "started"))
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("membroker: ")
    assert "start one with `membrokerd`" in line
    assert not (tmp_path / "started").exists()


def test_it_becomes_the_program(daemon: Daemon) -> None:
    """The program has no descriptor of the command's, default signals, and its exit status is the command's."""
    at = ("--endpoint", str(daemon.endpoint("red")), "--")
    # Python itself ignores SIGPIPE (13) and SIGXFSZ (25), so programs of another language tell.
    ignored = int(run(*at, "grep", "SigIgn", "/proc/self/status").stdout.split()[1], 16)
    assert not ignored & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)
    assert run(*at, "sh", "-c", "exec ls /proc/self/fd").stdout.split() == ["0", "1", "2", "3"], (
        "3 is the listing's own"
    )
    assert run(*at, "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM


def test_a_program_that_cannot_start_is_a_sentence(daemon: Daemon, tmp_path: Path) -> None:
    """The kernel says of an environment that was moved "No such file or directory", as of a script that is missing."""
    moved = tmp_path / "vllm"
    moved.write_text("#!/no/such/venv/bin/python\n")
    moved.chmod(0o755)
    for program, status, why in [
        ("no-such-program", 127, "there is no such program on PATH"),
        ("/etc/passwd", 126, "Permission denied"),
        (str(moved), 126, "the interpreter that its first line names does not exist"),
    ]:
        done = run("--endpoint", str(daemon.endpoint("red")), "--", program)
        assert done.returncode == status
        assert done.stderr == f"membroker: cannot start '{program}': {why}\n"
