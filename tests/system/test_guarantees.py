"""Guarantees with real daemons and workers: memory that is kept for a tenant or a model, used or not."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.command import check_config
from tests.support.daemons import Daemon, running, until
from tests.support.raw import Session, allocation
from tests.support.sizes import MIB
from tests.support.template import run as run_python
from tests.system.test_reload import reload

import membroker
from membroker import Client, MembrokerError, OutOfMemory
from membroker.admin import Admin, QuotaStatus
from membroker.cli import doctor
from membroker.types import Available
from membroker.v1 import handoff_pb2 as pb
from membroker.vmm import Location

DEVICE = Location.DEVICE
TENANTS: dict[str, Any] = {
    "red": {"guarantee": "96MiB", "models": {"chat": {"guarantee": "64MiB", "limit": "128MiB"}}},
    "blue": {},
}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running({"tenants": TENANTS}) as one:  # of 256 MiB
        yield one


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where a configuration is written."""
    return tmp_path / "membrokerd.toml"


@pytest.fixture
def admin(daemon: Daemon) -> Iterator[Admin]:
    one = Admin(daemon.admin / "grpc.sock")
    yield one
    one.close()


def test_the_rest_is_for_everybody_and_the_guarantee_for_its_owner(daemon: Daemon, red: Client, blue: Client) -> None:
    """Blue gets all but what is kept, and is told why; red gets its guarantee although the rest is lent."""
    with membroker.connect(daemon.endpoint("blue")) as client:
        batch = client.model("batch")
        assert batch.available().now_bytes == 160 * MIB
        with pytest.raises(OutOfMemory) as caught:
            batch.allocate("162MiB")
        assert (caught.value.level, caught.value.available_bytes) == ("capacity", 160 * MIB)
        assert caught.value.metadata["reserved_bytes"] == str(96 * MIB)
        with batch.allocate("160MiB"):
            chat = red.model("chat", limit="128MiB")
            assert chat.available() == Available(96 * MIB, 128 * MIB, 64 * MIB, 96 * MIB, 96 * MIB)
            other = red.model("other")
            assert other.available().now_bytes == 32 * MIB, "the model's own 64 are kept for it in its tenant, too"
            with other.allocate("32MiB"), chat.allocate("64MiB"):
                assert batch.available().now_bytes == 0
    until(lambda: blue.model("batch").available().now_bytes == 160 * MIB)


def test_an_operator_sees_what_is_kept(daemon: Daemon, red: Client, admin: Admin) -> None:
    with red.model("chat").allocate("16MiB"):
        books = admin.device().locations["device"]
        assert (books.reserved_bytes, books.guarantee_shortfall_bytes) == (80 * MIB, 0)
        assert [one.books["device"].guarantee_bytes for one in admin.tenants()] == [0, 96 * MIB]
        assert [one.books["device"].guarantee_bytes for one in red.models()] == [64 * MIB]
        scrape = {
            (one.name, tuple(one.labels[key] for key in ("tenant", "model") if key in one.labels)): one.value
            for family in text_string_to_metric_families(daemon.metrics())
            for one in family.samples
            if one.labels.get("location") == "device"
        }
        assert scrape["membroker_device_reserved_bytes", ()] == 80 * MIB
        assert scrape["membroker_device_guarantee_shortfall_bytes", ()] == 0
        assert scrape["membroker_tenant_guarantee_bytes", ("red",)] == 96 * MIB
        assert scrape["membroker_model_guarantee_bytes", ("red", "chat")] == 64 * MIB


def test_a_command_outlives_the_daemon_and_takes_nothing_back(daemon: Daemon, blue: Client, admin: Admin) -> None:
    """What stands in its way is told, and is kept as it is released."""
    batch = blue.model("batch")
    first, second = batch.allocate("100MiB"), batch.allocate("60MiB")
    quota = admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": 128 * MIB})
    assert (quota.guarantee_bytes, quota.limit_bytes, quota.shortfall_bytes) == (128 * MIB, None, 32 * MIB)
    assert batch.available().now_bytes == 0
    second.close()
    until(lambda: admin.device().locations["device"].guarantee_shortfall_bytes == 0)
    assert batch.available().now_bytes == 28 * MIB
    admin.close()
    assert daemon.stop() == 0
    daemon.start_again()
    again = Admin(daemon.admin / "grpc.sock")
    assert again.quotas() == [QuotaStatus("tenants/red", "device", None, 0, 128 * MIB)]
    until(lambda: batch.available().now_bytes == 28 * MIB)
    again.set_quota("tenants/red", DEVICE, {"guarantee_bytes": None})
    assert again.quotas() == []
    assert batch.available().now_bytes == 60 * MIB, "the configured 96 are in force again"
    again.close()
    first.close()


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


def test_a_check_says_when_it_could_not_ask(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is for a machine with a GPU, and is checked on another one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    keys = {"driver": "cuda", "capacity": None, "tenants": {"red": {"guarantee": "64GiB"}}}
    status, said = check_config(path, keys)
    assert status == 0
    assert any(line.startswith("the guarantees were not added up") for line in said)


def test_a_check_adds_what_was_set_by_command(path: Path) -> None:
    """Without `capacity` in the file, too."""
    kept = path.with_name("kept") / "host" / "quotas.toml"
    kept.parent.mkdir(parents=True)
    kept.write_text('[tenants.blue]\nguarantee = "768MiB"\n')
    keys = {"capacity": None, "tenants": {"red": {"guarantee": "512MiB"}, "blue": {}}}
    status, said = check_config(path, {"state_directory": str(path.with_name("kept")), **keys})
    assert status == 0
    assert any(line.startswith(f"{kept}: ") and "1280.0 MiB of device memory" in line for line in said)


def test_a_check_of_the_configuration_counts_contexts(path: Path) -> None:
    """Each guaranteed model needs room for its CUDA context, which the broker does not lend."""
    models = {"a": {"guarantee": "1GiB"}, "b": {"guarantee": "1GiB"}}
    keys = {"driver": "cuda", "capacity": None, "headroom": "1GiB", "tenants": {"red": {"models": models}}}
    status, said = check_config(path, keys)
    assert status == 0
    assert any(line.startswith("headroom: 2 models have a guarantee") for line in said)


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


def test_the_doctor_looks_at_guarantees(daemon: Daemon, blue: Client, admin: Admin) -> None:
    def check() -> doctor.Check:
        return doctor.check_guarantees(str(daemon.admin), {})

    assert check().advice.startswith("make it a multiple of 64.0 MiB"), "96 MiB is not"
    admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": 64 * MIB})
    assert (check().status, check().found) == ("ok", "2 set, all of them can be kept")
    with blue.model("batch").allocate("128MiB"):
        admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": 192 * MIB})
        assert (check().status, check().found) == (
            "warn",
            "64.0 MiB of the device guarantees are neither free nor recallable now",
        )
    assert doctor.check_guarantees(str(daemon.endpoint("nobody")), {}).status == "ok", "it is not this user's to ask"


def test_nothing_is_lent_under_a_number_that_cannot_be_written(daemon: Daemon, admin: Admin) -> None:
    """The disk that outlives a reboot has a fault: the operator learns where, and the numbers stay what they were.

    A request waits that would be granted by the command.
    """
    kept = daemon.directory / "kept" / "host" / "quotas.toml"
    admin.set_quota("tenants/blue", DEVICE, {"limit_bytes": 200 * MIB})
    kept.with_name("quotas.toml.new").mkdir(parents=True)
    with Session(daemon.endpoint("blue")) as blue:
        request = allocation(blue.register("m"), 16 * MIB, 11)
        request.wait.seconds = 3_600
        blue.send(pb.Frame(request_id=100, allocate=request))
        until(lambda: daemon.books().waiting_requests == 1)
        for name, numbers in (
            ("red", {"guarantee_bytes": 0}),
            ("blue", {"limit_bytes": 8 * MIB}),
            ("blue", {"limit_bytes": None}),
        ):
            with pytest.raises(MembrokerError) as caught:
                admin.set_quota(f"tenants/{name}", DEVICE, numbers)
            assert caught.value.reason == "INTERNAL"
            for words in (f"cannot be kept in {kept}: Is a directory", "state_directory", "the books are unchanged"):
                assert words in str(caught.value)
        books = daemon.books()
        assert (books.waiting_requests, books.lent_bytes, books.reserved_bytes) == (1, 0, 96 * MIB)
        assert [(quota.name, quota.limit_bytes) for quota in admin.quotas()] == [("tenants/blue", 200 * MIB)]
        kept.with_name("quotas.toml.new").rmdir()
        admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": 0})
        granted, ids = blue.answer(100)
        assert (granted.count, len(ids)) == (11, 11)
    until(lambda: daemon.log().count("quota set") >= 2)
    assert daemon.log().count("quota set") == 2, "the others were never in force"
    assert "a fault of the broker" not in daemon.log()


def test_memory_that_is_kept_for_nobody_is_told_and_can_be_freed(daemon: Daemon, red: Client, admin: Admin) -> None:
    """A tenant that was guaranteed something, by the file and by command, is no longer configured.

    What it holds stays; what was configured for it may have been given to others by the same reload.
    """
    with red.model("other").allocate("2MiB"):
        said = reload(daemon, tenants={"blue": {"guarantee": "192MiB"}})
        assert "a removed tenant stays" in said
        books = admin.device().locations["device"]
        assert (books.reserved_bytes, books.guarantee_shortfall_bytes) == (192 * MIB, 0)
        reload(daemon)
    red.close()
    until(lambda: not daemon.sessions())
    admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": 128 * MIB, "limit_bytes": 200 * MIB})
    said = reload(daemon, tenants={"blue": {}})
    assert "memory is kept for a tenant that is not configured" in said
    assert "`membroker quota set red --guarantee none` ends that" in said
    assert admin.device().locations["device"].reserved_bytes == 128 * MIB
    admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": None})
    assert admin.device().locations["device"].reserved_bytes == 0
    with pytest.raises(MembrokerError) as caught:
        admin.set_quota("tenants/red", DEVICE, {"guarantee_bytes": MIB})
    assert caught.value.reason == "TENANT_NOT_FOUND"
    admin.set_quota("tenants/red", DEVICE, {"limit_bytes": None})


def test_numbers_that_no_memory_has(daemon: Daemon, admin: Admin) -> None:
    """A file that was changed by hand does not break the listings."""
    kept = daemon.directory / "kept" / "host" / "quotas.toml"
    admin.close()
    assert daemon.stop() == 0
    kept.parent.mkdir(parents=True, exist_ok=True)
    size = (1 << 63) - 1
    kept.write_text(f"[tenants.red]\nguarantee = {size}\n[tenants.blue]\nguarantee = {size}\n")
    daemon.start_again()
    again = Admin(daemon.admin / "grpc.sock")
    assert again.device().locations["device"].reserved_bytes == size
    assert [quota.guarantee_bytes for quota in again.quotas()] == [size, size]
    again.close()
