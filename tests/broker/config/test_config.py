"""A configuration file is either right as a whole, or every mistake in it is named at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.sizes import GIB, MIB

from membroker.wire import ownership
from membrokerd.config import config
from membrokerd.config.config import ConfigError, load
from membrokerd.system.files import MAX_TEXT_BYTES


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "membrokerd.toml"
    path.write_text(text)
    return path


def problems(tmp_path: Path, text: str, **overrides: Any) -> tuple[str, ...]:
    """Return what is wrong with this text, without the file's name, which each sentence begins with."""
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert str(caught.value).splitlines() == list(caught.value.problems)
    return tuple(problem.removeprefix(f"{path}: ") for problem in caught.value.problems)


def test_no_file_at_all_is_a_broker_in_which_each_uid_is_a_tenant() -> None:
    found = load(None, {}, env={"XDG_RUNTIME_DIR": "/run/user/1000"}, uid=1000)
    assert found.runtime_directory == Path("/run/user/1000/membroker")
    assert (found.driver, found.device, found.capacity, found.headroom) == ("auto", 0, None, None)
    assert found.metrics == config.MetricsConfig(True, "127.0.0.1", None)
    assert found.uid_tenants


def test_the_runtime_directory_of_root_is_where_everybody_looks() -> None:
    """A root shell may have an XDG_RUNTIME_DIR that no tenant can enter."""
    assert load(None, {}, env={"XDG_RUNTIME_DIR": "/run/user/0"}, uid=0).runtime_directory == Path("/run/membroker")
    assert load(None, {}, env={"MEMBROKER_SYSTEM_DIRECTORY": "/srv/m"}, uid=0).runtime_directory == Path("/srv/m")
    found = load(None, {}, env={"MEMBROKER_SYSTEM_DIRECTORY": "/srv/m", "XDG_RUNTIME_DIR": "/run/user/1"}, uid=1)
    assert found.runtime_directory == Path("/run/user/1/membroker"), "a user's own stays"


def test_a_unit_of_a_user_has_the_directory_that_systemd_made() -> None:
    env = {"RUNTIME_DIRECTORY": "/run/membroker:/run/more", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert load(None, {}, env=env, uid=7).runtime_directory == Path("/run/membroker")
    assert load(None, {}, env=env, uid=0).runtime_directory == Path("/run/membroker"), "where everybody looks"
    assert load(None, {}, env={**env, "RUNTIME_DIRECTORY": "no path"}, uid=7).runtime_directory == Path(
        "/run/user/7/membroker"
    )


def test_a_user_without_a_runtime_directory_is_told_what_to_set() -> None:
    with pytest.raises(ConfigError, match="runtime_directory: XDG_RUNTIME_DIR"):
        load(None, {}, env={}, uid=1000)
    with pytest.raises(ConfigError, match=r"^command line: runtime_directory") as caught:
        load(None, {"runtime_directory": "here"}, env={}, uid=1000)
    assert len(caught.value.problems) == 1, "one mistake, one sentence"


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    text = """
        driver = "host"
        capacity = "256MiB"
        host_driver_total = "1GiB"
        headroom = "64MiB"
        gate_reserve = 1048576
        settle_seconds = 2
        max_sessions = 40
        stock = "96MiB"
        stock_extents = 0
        [metrics]
        port = 0
        [log]
        format = "json"
        [tenants.acme]
        limit = "128MiB"
        uids = [0, 1000]
        owner = "root"
        group = 7
        mode = "0660"
        [tenants.acme.models."llama-7b.q4"]
        limit = "64MiB"
        [tenants.other]
    """
    found = load(write(tmp_path, text), {})
    assert (found.driver, found.capacity, found.host_driver_total) == ("host", 256 * MIB, GIB)
    assert (found.headroom, found.gate_reserve, found.settle_seconds, found.max_sessions) == (64 * MIB, MIB, 2.0, 40)
    assert (found.stock, found.stock_extents) == (96 * MIB, 0)
    assert found.metrics.port == 0
    assert found.log == config.LogConfig("json", "info")
    assert not found.uid_tenants
    acme = found.tenants["acme"]
    assert (acme.limit, acme.uids, acme.owner, acme.group, acme.mode) == (128 * MIB, {0, 1000}, 0, 7, 0o660)
    assert acme.models["llama-7b.q4"].limit == 64 * MIB
    assert found.tenants["other"] == config.TenantConfig()


@pytest.mark.parametrize("prefix", ["", "GPU-", "MIG-"])
def test_a_device_may_be_named_by_its_uuid(prefix: str) -> None:
    """As `nvidia-smi -L` writes it, or without its first letters; one of the host driver has a number for each."""
    uuid = f"{prefix}66616b65-2D63-7564-612d-636172642d30"
    assert load(None, {"device": uuid}, env={}, uid=0).device == uuid
    for device, number in (("host", 0), ("host-12", 12), ("1", 1), (2, 2)):
        assert load(None, {"device": device, "driver": "host"}, env={}, uid=0).device == number


def test_the_command_line_wins_and_is_named_when_it_is_wrong(tmp_path: Path) -> None:
    path = write(tmp_path, 'capacity = "256MiB"\n[metrics]\nport = 1\n')
    found = load(path, {"capacity": "512MiB", "metrics.port": 2, "device": "3", "driver": None})
    assert (found.capacity, found.metrics.port, found.device, found.driver) == (512 * MIB, 2, 3, "auto")
    with pytest.raises(ConfigError, match=r"^command line: metrics\.port: .* 0, .*-1"):
        load(path, {"metrics.port": -1})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('driver = "cdua"', "driver: should be 'auto', 'host' or 'cuda', not 'cdua'"),
        ("device = -1", "device: write a GPU's number from 0 or its UUID"),
        ("capacity = 1.5", "capacity: a size is an int of bytes or text"),
        ('capacity = "8 gigs"', "capacity: cannot read '8 gigs' as a size"),
        ("capacity = -2097152", "capacity: a size must be between 0 and 2^63-1"),
        ("capacity = 0", "capacity: 0 bytes are nothing to lend"),
        ('capacity = "5MB"', "capacity: '5MB' is not a multiple of 2MiB; the nearest that fits is \"4MiB\""),
        ("capacity = 1", 'the nearest that fits is "2MiB"; a number alone is bytes: write a unit, such as "8GiB"'),
        ('default_limit = "2GiB"\ncapacity = "1GiB"', 'default_limit: "2GiB" is more than capacity, "1GiB"'),
        ('default_host_limit = "2MiB"', 'default_host_limit: "2MiB" is more than host_capacity, 0'),
        ('device = "host-0"', "device: write a GPU's number from 0 or its UUID"),
        ('keeper_socket = "/k\\u0000"', "keeper_socket: a path has no NUL in it"),
        ('keeper_socket = "/run/{gpu}/s"', "keeper_socket: only {device} and {index} may stand in braces"),
        ("audit_seconds = 0", "audit_seconds: should be greater than or equal to 0.01, not 0"),
        ('model_grace_seconds = "60"', "model_grace_seconds: should be a valid number, not '60'"),
        ('idle_sleep = "at-once"', "idle_sleep: should be 'when-wanted' or 'always', not 'at-once'"),
        ('runtime_directory = "run"', "runtime_directory: write an absolute path"),
        ("metrics.port = 65536", "metrics.port: should be less than or equal to 65535, not 65536"),
        ("[tenant.acme]", "tenant: is not a known key; did you mean 'tenants'?"),
        ("zzz = 1", "zzz: is not a known key; known are audit_seconds, capacity,"),
        ("tenants = 1", "tenants: is a table of tables: write [tenants.NAME]"),
        ("[tenants.Acme]", "tenants.Acme: a tenant's name is [a-z0-9] and then at most 62 of [a-z0-9-]"),
        ('[tenants."../up"]', 'tenants."../up": a tenant\'s name is [a-z0-9] and then at most 62 of [a-z0-9-]'),
        ("[tenants.a]\nuids = [1, true]", "tenants.a.uids: write a list of user ids"),
        ('[tenants.a]\nowner = "nobody-at-all"', "tenants.a.owner: this machine has no user 'nobody-at-all'"),
        ("[tenants.a]\nmode = 660", "tenants.a.mode: write the mode as octal text"),
        ('[tenants.a.models."a/b/c"]', 'tenants.a.models."a/b/c": a model\'s name is letters, digits and ._-'),
        ('"[key]" = 1', '"[key]": is not a known key'),
        (f"max_sessions = 0x{'f' * 5_000}", "max_sessions: should be less than or equal to 100000"),
    ],
)
def test_a_mistake_is_named_with_what_to_write(tmp_path: Path, text: str, problem: str) -> None:
    (found,) = problems(tmp_path, text)
    assert problem in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('capacity = "1GiB"\n[tenants.a]\nlimit = "2GiB"', 'tenants.a.limit: "2GiB" is more than capacity, "1GiB"'),
        (
            'capacity = "4GiB"\n[tenants.a]\nlimit = "1GiB"\n[tenants.a.models.m]\nlimit = "2GiB"',
            'tenants.a.models.m.limit: "2GiB" is more than tenants.a.limit, "1GiB"',
        ),
        ('default_limit = "8MiB"\n[tenants.a.models.m]\nlimit = "16MiB"', "tenants.a.models.m.limit: "),
        (
            'host_capacity = "2MiB"\n[tenants.a.models.m]\nhost_limit = 3000000',
            'tenants.a.models.m.host_limit: 3000000 (2.9 MiB) is more than host_capacity, "2MiB"',
        ),
        (
            'headroom = "1GiB"\ngate_reserve = "2GiB"',
            'gate_reserve: "2GiB" is more than headroom, "1GiB"; write at most that',
        ),
        (
            'capacity = "512MiB"\nhost_driver_total = "1GiB"\nheadroom = "512MiB"',
            'capacity: "512MiB" is more than host_driver_total less headroom and anchor, "510MiB"',
        ),
        (
            'capacity = "8MiB"\nhost_driver_total = "64MiB"\nheadroom = "128MiB"',
            'headroom: "128MiB" is more than host_driver_total less anchor and one granule, "60MiB"',
        ),
    ],
)
def test_sizes_that_do_not_fit_each_other(tmp_path: Path, text: str, problem: str) -> None:
    (found,) = problems(tmp_path, text)
    assert found.startswith(problem)


def test_a_keeper_has_a_directory_of_its_own(tmp_path: Path) -> None:
    """The runtime directory is entered by every tenant; closed for the keeper's sake it would shut them all out."""
    text = 'runtime_directory = "/run/membroker"\nkeeper_socket = "/run/membroker{}/fdstore.sock"\n'
    (found,) = problems(tmp_path, text.format(""))
    assert found.startswith("keeper_socket: is in the runtime directory itself")
    example = load(write(tmp_path, text.format("-keeper")), {}).keeper_socket
    assert example is not None
    assert str(example) in found


def test_all_mistakes_are_shown_at_once(tmp_path: Path) -> None:
    """One start, one list: nobody restarts a daemon once for each typing error."""
    text = 'capasity = 1\nheadroom = "1GiB"\ngate_reserve = "2GiB"\naudit_seconds = 0\n[tenants.a]\nlimit = []\n'
    found = problems(tmp_path, text)
    assert [problem.split(":")[0] for problem in found] == [
        "capasity",
        "audit_seconds",
        "tenants.a.limit",
        "gate_reserve",
    ]


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("capacity = 8GiB", '; write capacity = "8GiB"'),
        ("capacity = 8 GiB  # all of it", '; write capacity = "8 GiB"'),
        ("record = True", "; write record = true"),
        ("device = 1", ""),  # a second time
        ("capacity =", ""),
    ],
)
def test_what_is_not_toml_is_shown_with_its_line_and_as_it_was_meant(tmp_path: Path, line: str, meant: str) -> None:
    """Quotes are missing, or it is Python."""
    (found,) = problems(tmp_path, f"device = 0\n{line}\nstock_extents = 3\n")
    assert found.startswith("is not TOML")
    assert "line 2" in found
    assert found.partition(")")[2] == meant


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: .*No such file"):
        load(tmp_path / "nowhere.toml", {})
    with pytest.raises(ConfigError, match="directory"):
        load(tmp_path, {})
    os.mkfifo(tmp_path / "fifo.toml")
    with pytest.raises(ConfigError, match=r"fifo\.toml: .*FIFO"):
        load(tmp_path / "fifo.toml", {})
    long = tmp_path / "long.toml"
    long.touch()
    os.truncate(long, MAX_TEXT_BYTES + 1)
    with pytest.raises(ConfigError, match=r"long\.toml: "):
        load(long, {})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"driver = '\xff'")
    with pytest.raises(ConfigError, match=r"binary\.toml.* UTF-8"):
        load(binary, {})


@pytest.mark.parametrize("key", ["uids = [1000]", "owner = 1000", "group = 1000", 'owner = "root"'])
def test_a_user_that_means_nobody_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """In a user namespace that does not map it no worker can have that id, and no socket can be given to it."""
    for name in ("uid", "gid"):
        for file, text in ((f"self/{name}_map", "5 1000 10\n"), (f"sys/kernel/overflow{name}", "65534\n")):
            (tmp_path / "proc" / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "proc" / file).write_text(text)
    monkeypatch.setattr(ownership, "_PROC", tmp_path / "proc")
    with pytest.raises(ConfigError, match=key.partition(" ")[0]):
        load(write(tmp_path, f"[tenants.red]\n{key}\n"), {}, {"XDG_RUNTIME_DIR": "/run/user/1"}, 1)
    fits = load(write(tmp_path, "[tenants.red]\nuids = [5, 14]\n"), {}, {"XDG_RUNTIME_DIR": "/run/user/1"}, 1)
    assert fits.tenants["red"].uids == {5, 14}
