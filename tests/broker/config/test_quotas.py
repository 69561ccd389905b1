"""The quotas: what an operator commanded holds after a reboot, to the byte, or the daemon says what is wrong."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.sizes import GIB

from membrokerd.config.config import Config, load
from membrokerd.config.quotas import Quotas, StateDirectory, read, state_directory, trouble, write
from membrokerd.core import policy
from membrokerd.core.names import LOCATIONS
from membrokerd.core.rows import Quota
from membrokerd.system.device_directory import DirectoryError

QUOTAS: Quotas = {
    ("acme", None, "device"): Quota(32 * GIB),
    ("acme", None, "host"): Quota(0, 0),
    ("acme", "llama-7b.q4", "device"): Quota(1536 << 20, GIB, 2),
    ("acme", "llama-7b.q4", "host"): Quota(weight=0),
    ("acme", "m_1", "host"): Quota(12_345),
    ("uid-1000", "m1", "device"): Quota(guarantee=(1 << 63) - 1),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "host" / "quotas.toml"


@pytest.mark.parametrize("examples", [10, pytest.param(60, marks=pytest.mark.deep)])
def test_any_quotas_are_read_again(path: Path, examples: int) -> None:
    tenants, models = (
        st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True),
        st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,46}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,46})?", fullmatch=True),
    )
    keys = st.tuples(tenants, st.none() | models, st.sampled_from(LOCATIONS))
    sizes = st.none() | st.integers(0, (1 << 63) - 1) | st.integers(0, 99).map(lambda n: n << 20)
    weights = st.none() | st.integers(0, policy.MAX_WEIGHT)

    @settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.dictionaries(
            keys, st.builds(Quota, sizes, sizes, weights).filter(lambda quota: quota != Quota()), max_size=8
        )
    )
    def again(quotas: Quotas) -> None:
        write(path, quotas)
        assert read(path) == quotas

    again()


def test_the_configuration_has_the_same_keys(path: Path) -> None:
    """What was commanded for a while can be copied into the configuration as it stands."""
    write(path, {key: limit for key, limit in QUOTAS.items() if key[0] == "acme" and key[1] != "m_1"})
    tenant = load(path, {}, {"XDG_RUNTIME_DIR": "/run/user/1"}, 1).tenants["acme"]
    assert (tenant.limit, tenant.host_limit) == (32 * GIB, 0)
    model = tenant.models["llama-7b.q4"]
    assert (model.limit, model.guarantee, model.weight, model.host_weight) == (1536 << 20, GIB, 2, 0)


WRONG = {
    "no TOML": ("[tenants", "is not TOML"),
    "lists in each other": ("x = " + "[" * 10_000, "is not TOML"),
    "another key": ("limit = 5", "limit: is not a known key"),
    "a misspelt key": ('[tenants.acme]\nlimits = "1GiB"', "tenants.acme.limits: is not a known key; did you mean"),
    "no table": (b"tenants = 5", "tenants: is a table of tables: write [tenants.NAME]"),
    "a tenant's name": ('[tenants."Acme/x"]', 'tenants."Acme/x": a tenant\'s name is [a-z0-9] and then at most'),
    "a model's name": ('[tenants.acme.models."../m"]', 'tenants.acme.models."../m": a model\'s name is'),
    "a dot that makes two": ("[tenants.acme.models.m.1]\nlimit = 5", "tenants.acme.models.m.1: is not a known key"),
    "a size": ('[tenants.acme]\nlimit = "8 apples"', "tenants.acme.limit: cannot read '8 apples' as a size"),
    "too much": ("[tenants.acme]\nlimit = 9223372036854775808", "tenants.acme.limit: a size must be between"),
    "too much weight": ("[tenants.acme]\nhost_weight = 1001", "tenants.acme.host_weight: should be less than"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_is_wrong_is_refused_whole(path: Path, case: str) -> None:
    """An operator edited it: the daemon says where and what, and guesses no limit."""
    content, said = WRONG[case]
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else f'{content}\n[tenants.fine]\nlimit = "1GiB"\n'.encode())
    with pytest.raises(DirectoryError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: {said}"), caught.value
    assert "put it right, or remove the file" in str(caught.value)


def test_a_fifo_is_not_waited_for(path: Path) -> None:
    """Nobody ever writes to it: an ordinary open would hang the start of the daemon. A directory is named, too."""
    path.mkdir(parents=True)
    with pytest.raises(DirectoryError, match=r"quotas.toml: .*directory"):
        read(path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(DirectoryError, match=r"quotas.toml: .*FIFO"):
        read(path)


def test_a_command_is_on_the_disk_or_did_not_happen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced before it has its name, and its name before the operator is told; a failure leaves the old."""
    write(path, QUOTAS)
    before = path.read_bytes()
    order: list[str] = []
    sync, rename = os.fsync, Path.rename

    def watched_sync(descriptor: int) -> None:
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        assert os.fstat(descriptor).st_size, "what is synced is in the file already"
        sync(descriptor)

    def watched_rename(self: Path, target: Path) -> Path:
        assert tomllib.loads(self.read_text()) == {}
        order.append("renamed")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    write(path, {})
    assert order == ["quotas.toml.new", "renamed", "host"]
    write(path, {})

    def broken(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path.write_bytes(before)
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError) as caught:
        write(path, {})
    assert (caught.value.errno, caught.value.filename) == (28, path)
    assert path.read_bytes() == before


def test_a_link_to_the_file_stays(path: Path, tmp_path: Path) -> None:
    """An operator keeps the file elsewhere, as on the only disk that outlives a container."""
    persistent = tmp_path / "persistent" / "quotas-of-gpu-0.toml"
    write(persistent, QUOTAS)
    path.parent.mkdir()
    path.symlink_to(persistent)
    assert read(path) == QUOTAS
    fewer = {key: limit for key, limit in QUOTAS.items() if key[1]}
    write(path, fewer)
    assert path.is_symlink()
    assert read(persistent) == fewer
    assert list(path.parent.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_told_before_a_command_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not be there yet: what counts is the first part of it that is."""
    assert trouble(tmp_path / "kept" / "host") == ""
    (tmp_path / "file").touch()
    said = trouble(tmp_path / "file" / "host")
    assert f"kept in {tmp_path / 'file' / 'host'} and {tmp_path / 'file'} is not a directory" in said
    assert "state_directory" in said
    assert read(tmp_path / "file" / "host" / "quotas.toml") == {}, "the daemon starts"
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert f"{tmp_path} cannot be written, because this user cannot" in trouble(tmp_path / "kept" / "host")


def test_where_it_is_kept(tmp_path: Path) -> None:
    """The place belongs to the runtime directory: /var/lib to root's, an XDG directory to a user's own."""
    env = {"XDG_RUNTIME_DIR": "/run/user/7", "XDG_STATE_HOME": "/home/me/state", "HOME": "/home/me"}

    def place(runtime: str | Path, env: Mapping[str, str], **more: Path) -> Path:
        return state_directory(Config(runtime_directory=Path(runtime), **more), "gpu-1", env)

    assert place("/run/membroker", env) == Path("/var/lib/membroker/gpu-1")
    assert place("/run/user/7/membroker", env) == Path("/home/me/state/membroker/gpu-1")
    at_home = Path("/home/me/.local/state/membroker/gpu-1")
    assert place("/run/user/7/membroker", {**env, "XDG_STATE_HOME": ""}) == at_home
    unit = {"RUNTIME_DIRECTORY": "/run/mine", "STATE_DIRECTORY": "/var/lib/mine:/var/lib/more"}
    assert place("/run/mine", unit) == Path("/var/lib/mine/gpu-1")
    assert place("/run/other", unit) == Path("/run/other/gpu-1/state/kept"), "it was told another place"
    assert place("/run/user/7/membroker", {**env, "XDG_STATE_HOME": "state"}) == at_home
    with pytest.raises(DirectoryError, match="XDG_STATE_HOME"):
        place("/run/user/7/membroker", {"XDG_RUNTIME_DIR": "/run/user/7"})
    for runtime in ("/run/membroker-b", "/run/user/7/other", "/run/user/7"):
        assert place(runtime, env) == Path(runtime, "gpu-1", "state", "kept")
    assert place("/run/user/7/membroker", {}) == Path("/run/user/7/membroker/gpu-1/state/kept")
    assert place("/run/membroker", env, state_directory=Path("/srv/m")) == Path("/srv/m/gpu-1")
    (tmp_path / "link").symlink_to("/run/membroker")
    assert place(tmp_path / "link", env) == Path("/var/lib/membroker/gpu-1"), "the same place by another name"


def test_a_home_that_others_can_change_is_passed_over(tmp_path: Path) -> None:
    """After `su` it is another user's; if no other is left, the daemon says so instead of writing there."""
    runtime, state = tmp_path / "membroker", tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(state), "HOME": str(tmp_path)}
    config = Config(runtime_directory=runtime)
    assert state_directory(config, "gpu-1", env) == tmp_path / ".local" / "state" / "membroker" / "gpu-1"
    with pytest.raises(DirectoryError, match=rf"XDG_STATE_HOME or HOME .*; {state} "):
        state_directory(config, "gpu-1", {**env, "HOME": ""})


def test_a_place_that_others_can_change_is_refused(tmp_path: Path) -> None:
    """Anybody could put quotas there: the daemon does not start, and says so before it reads any."""
    opened = tmp_path / "opened"
    opened.mkdir()
    opened.chmod(0o1777)
    with pytest.raises(DirectoryError, match=rf"{opened}: {opened} "):
        StateDirectory(opened)
    opened.chmod(0o777)
    with pytest.raises(DirectoryError, match=rf"{opened} .* state_directory"):
        StateDirectory(opened / "host")
    assert not list(opened.iterdir())


def test_a_link_out_of_our_hands_is_neither_read_nor_written(path: Path, tmp_path: Path) -> None:
    """Who can write to the directory behind it decides what is in force, and which file is overwritten."""
    write(path, {})
    opened = tmp_path / "opened"
    opened.mkdir()
    (opened / "victim").write_text("a file of root's")
    opened.chmod(0o777)
    path.unlink()
    path.symlink_to(opened / "victim")
    with pytest.raises(DirectoryError, match=str(opened)):
        read(path)
    with pytest.raises(OSError, match=str(opened)):
        write(path, QUOTAS)
    assert (opened / "victim").read_text() == "a file of root's"


@pytest.mark.root
def test_another_users_quotas_are_not_in_force(path: Path) -> None:
    """The directory is root's, and the file in it another user's, as after a mistaken chown -R."""
    write(path, QUOTAS)
    os.chown(path, 60_001, 60_001)
    with pytest.raises(DirectoryError, match=r"quotas\.toml .*uid 60001"):
        read(path)
