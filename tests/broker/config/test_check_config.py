"""`membrokerd --check-config`: what the daemon would not start with, or should not; and the start says the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.support.command import check_config
from tests.support.daemons import to_toml
from tests.support.honest_worker import other_user
from tests.support.template import run as run_python
from tests.support.workers import as_user

from membroker.wire.sessions import descriptors_for, sessions_for


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where a configuration is written."""
    return tmp_path / "membrokerd.toml"


def test_a_check_says_what_the_daemon_would_not_start_with_or_should_not() -> None:
    """More sessions than this user's descriptors are enough for, and a whole device for every local user."""
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        os.chmod(directory, 0o755)
        path = Path(directory, "membrokerd.toml")
        path.write_text(to_toml({"runtime_directory": str(Path(directory, "run")), "max_sessions": 5}))
        limit = (
            "import resource,sys,os;resource.setrlimit(resource.RLIMIT_NOFILE,(800,)*2);"
            "os.execv(sys.argv[1],sys.argv[1:])"
        )
        check = [sys.executable, "-m", "membrokerd.cli", "--config", str(path), "--check-config"]
        command = [*as_user(other_user()), sys.executable, "-c", limit, *check]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == (0, f"{path}: good\n")
        sessions, tenants = ran.stderr.splitlines()
        found = re.search(
            r"max_sessions = 5 needs a limit of (\d+) .* may have 800: .* max_sessions = (\d+)$", sessions
        )
        assert found is not None, sessions
        assert (int(found[1]), int(found[2])) == (descriptors_for(5), sessions_for(800))
        assert tenants.startswith(f"{path}: there are no tenants and no default_limit: ")


def test_a_check_warns_of_numbers_that_do_not_go_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time that was forgotten when another was raised for a slow engine, or sizes of another machine.

    A machine without the GPU cannot add up its guarantees, and each guaranteed model needs room for a CUDA context.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    models = {"a": {"guarantee": "1GiB"}, "b": {"guarantee": "1GiB"}}
    of_a_gpu = {"driver": "cuda", "capacity": None, "headroom": "1GiB", "tenants": {"red": {"models": models}}}
    for values, told in [
        ({"recall_seconds": 3.5}, "guarantee_wait_seconds: 10 is less than 3 times recall_seconds, 10.5"),
        ({"recall_seconds": 3.0}, ""),  # as docs/vllm.md has it
        ({"guarantee_wait_seconds": 2.5}, "guarantee_wait_seconds: 2.5 is less than 3 times recall_seconds, 3"),
        ({"guarantee_wait_seconds": 0}, ""),  # nothing waits unless it says so
        ({"capacity": "1PiB"}, "capacity: 1.0 PiB of host memory is more than the "),
        ({"host_capacity": "1PiB"}, "capacity and host_capacity: 1.0 PiB of host memory is more than the "),
        ({"driver": "cuda", "host_capacity": "1PiB"}, "host_capacity: 1.0 PiB of host memory is more than the "),
        ({"driver": "cuda", "capacity": "1PiB"}, ""),  # of a GPU
        (of_a_gpu, "the guarantees were not added up"),
        (of_a_gpu, "headroom: 2 models have a guarantee"),
    ]:
        status, said = check_config(path, values)
        assert status == 0
        assert any(line.startswith(told) for line in said) if told else not said


def test_a_check_tries_each_place(tmp_path: Path) -> None:
    """Another user could put an endpoint, quotas or a keeper there: the start refuses it, and the check says so."""
    opened = tmp_path / "opened"
    opened.mkdir()
    opened.chmod(0o777)
    file = tmp_path / "membrokerd.toml"
    good = {"runtime_directory": tmp_path / "run", "state_directory": tmp_path / "kept"}
    for key in (*good, "keeper_socket"):
        places = {**good, key: opened / "inner" / "place"}
        text = "".join(f'{name} = "{path}"\n' for name, path in places.items())
        file.write_text(f'{text}driver = "host"\ndescriptor_store = "keeper"\n[metrics]\nport = 0\n')
        for more in (["--check-config"], []):
            told = run_python(["-m", "membrokerd.cli", "--config", str(file), *more])
            assert told.returncode == 1, (key, more)
            assert f"{opened} can be changed by other users" in told.stderr.splitlines()[-1], (key, more)
            assert not list(opened.iterdir()), "nothing was made there"


def test_a_configuration_that_cannot_be_kept_is_wrong(path: Path) -> None:
    for keys, key, size in (
        ({"limit": "4MiB", "guarantee": "8MiB"}, "tenants.red.guarantee", "8MiB"),
        ({"guarantee": "512MiB"}, "tenants", "512MiB"),
    ):
        status, said = check_config(path, {"tenants": {"red": keys}})
        assert status == 1
        assert re.search(rf'^(membrokerd: {path}: )?{re.escape(key)}: .* would be "{size}"', said[-1]), said


def test_a_check_asks_the_device_how_much_it_has(path: Path) -> None:
    """`capacity` is commented out, as in the file that is delivered: the sum of the guarantees is the device's to say.

    The start and the check refuse the same file.
    """
    keys = {"capacity": None, "tenants": {"red": {"guarantee": "900GiB"}}}
    with tempfile.TemporaryDirectory(prefix="mb-") as runtime:
        status, checked = check_config(path, {"runtime_directory": f"{runtime}/run", **keys})
        started = run_python(["-m", "membrokerd.cli", "--config", str(path)])
    for code, said in ((status, checked[-1]), (started.returncode, started.stderr.splitlines()[-1])):
        assert code == 1
        assert re.search(r"900\.0 GiB of device memory, more than the capacity, 1\.0", said)


def test_a_check_of_the_configuration_looks_at_guarantees(path: Path) -> None:
    """One that pages do not fill, and quotas by command that were fine with the configuration of before."""
    models = {"a": {"guarantee": "96MiB"}, "b": {"guarantee": "128MiB", "limit": "1GiB"}}
    places = {"state_directory": str(path.with_name("kept"))}
    keys = {**places, "driver": "cuda", "capacity": "2GiB", "tenants": {"red": {"models": models}}}
    kept = path.with_name("kept") / "gpu-12345678" / "quotas.toml"
    kept.parent.mkdir(parents=True)
    kept.write_text('[tenants.red.models.b]\nguarantee = "512MiB"\n')
    status, (odd,) = check_config(path, keys)
    assert status == 0
    assert odd.startswith("tenants.red.models.a.guarantee: 96.0 MiB is not a multiple of 64.0 MiB")
    kept.write_text('[tenants.red.models.b]\nguarantee = "2GiB"\n')
    status, (first, *more) = check_config(path, keys)
    assert (status, first) == (0, odd)
    for line, numbers in zip(more, (("2.0 GiB", "limit, 1.0"), ("2144.0 MiB", "capacity, 2.0")), strict=True):
        assert re.search(rf"^{kept}: .* {numbers[0]} .* {numbers[1]} GiB: .*`membroker quota set`", line)
    kept.write_text("[tenants.red]\nguarantees = 1\n")
    status, said = check_config(path, keys)
    assert status == 1
    assert f"{kept}: tenants.red.guarantees" in said[-1]
