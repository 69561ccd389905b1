"""The pod of a process, from its cgroup: as kubelets of each kind name it, and as a hostile container would."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from membrokerd.system import pods, process

UID = "0b9c8f7e-1d2c-4b3a-9e8f-7a6b5c4d3e2f"
OTHER = f"1{UID[1:]}"
SLICE = UID.replace("-", "_")
STATIC = "0123456789abcdef" * 2
CONTAINER = "c" * 64


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(process, "PROC", tmp_path)
    (tmp_path / "7").mkdir()
    return tmp_path


@pytest.fixture
def alive() -> Iterator[int]:
    pidfd = os.pidfd_open(os.getpid())
    yield pidfd
    os.close(pidfd)


@pytest.mark.parametrize(
    "path",
    [
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE}.slice/cri-containerd-{CONTAINER}.scope",
        f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{SLICE}.slice",
        f"/kubepods/burstable/pod{UID}/{CONTAINER}",
        f"/kubelet/kubepods/besteffort/pod{UID}/{CONTAINER}",
        f"/../../kubepods-besteffort-pod{SLICE}.slice/cri-containerd-{CONTAINER}.scope",
        f"/../../pod{UID}/{CONTAINER}",
        # A container has made a cgroup with another pod's name below its own.
        f"/kubepods/pod{UID}/{CONTAINER}/kubepods/pod{OTHER}",
        f"/kubepods.slice/kubepods-pod{SLICE}.slice/x.scope/kubepods-pod{OTHER.replace('-', '_')}.slice",
    ],
)
def test_a_kubelets_cgroup(proc: Path, alive: int, path: str) -> None:
    (proc / "7" / "cgroup").write_text(f"0::{path}\n")
    assert process.pod_of(7, alive) == UID


def test_the_hierarchies_of_version_1_must_agree(proc: Path, alive: int) -> None:
    """A static pod has a hash instead of a uid."""
    ours, file = f"/kubepods/burstable/pod{UID}/x", proc / "7" / "cgroup"
    file.write_text(f"12:cpu,cpuacct:{ours}\n3:memory:{ours}\n1:name=systemd:/system.slice/a:b\n0::/\n")
    assert process.pod_of(7, alive) == UID
    file.write_text(f"3:memory:{ours}\n2:freezer:/kubepods/pod{OTHER}\n")
    assert process.pod_of(7, alive) == ""
    file.write_text(f"0::/kubepods/burstable/pod{STATIC}/x\n")
    assert process.pod_of(7, alive) == STATIC


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0::/user.slice/user-1000.slice/session-1.scope",
        f"0::/user.slice/user-1000.slice/user@1000.service/kubepods.slice/kubepods-pod{SLICE}.slice/x",  # a user's own
        f"0::/system.slice/docker-{CONTAINER}.scope/kubepods/pod{UID}",
        f"0::/kubepods/pod{UID}x/y",
        f"0::/kubepods/pod{UID.upper()}/y",
        f"0::/kubepods/x/pod{UID}",
        f"0::/../x.scope/kubepods/pod{UID}",
        f"0::kubepods/pod{UID}",
        "0::" + "/.." * 6_000 + f"/pod{UID}",  # more than is read
        f"\n\n::\n:::{UID}\x00\xff\n",
        "1:a:/\n" * 65 + f"0::/kubepods/pod{UID}",
    ],
)
def test_no_pod(proc: Path, alive: int, text: str) -> None:
    (proc / "7" / "cgroup").write_bytes(text.encode("latin-1"))
    assert process.pod_of(7, alive) == ""


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kubelet's directory of pods' logs."""
    monkeypatch.setattr(pods, "POD_LOGS", tmp_path / "logs")
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def test_a_pods_name_is_that_of_its_directory(logs: Path) -> None:
    (logs / f"web_api-7f9c.blue_{UID}").mkdir()
    (logs / f"kube-system_etcd-node-1_{STATIC}").mkdir()
    assert pods.read_names() == {UID: "web/api-7f9c.blue", STATIC: "kube-system/etcd-node-1"}


@pytest.mark.parametrize(
    "name",
    [
        f"web_a_{UID.upper()}",
        f"web_a_{UID}\n",
        f"Web_a_{UID}",
        f"web_a_b_{UID}",
        f"_a_{UID}",
        f"web__{UID}",
        f"web_a..b_{UID}",
        f"web_\x1b[2J_{UID}",
        f"{'w' * 64}_a_{UID}",
        UID,
    ],
)
def test_another_name_is_no_pods(logs: Path, name: str) -> None:
    (logs / name).mkdir()
    assert pods.read_names() == {}


def test_what_only_looks_like_a_pods_directory_names_none(logs: Path) -> None:
    """Nor has a uid with two names one."""
    (logs / f"web_a_{UID}").symlink_to(logs)
    (logs / f"web_b_{OTHER}").touch()
    assert pods.read_names() == {}
    for name in ("c", "d", "e"):
        (logs / f"web_{name}_{UID}").mkdir()
    assert pods.read_names() == {UID: ""}


def test_names_are_read_once_for_each_new_pod(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that connects again and again does not have the directory read each time, also if it has no name."""
    reads: list[dict[str, str]] = []
    read = pods.read_names

    def counted() -> dict[str, str]:
        reads.append(read())
        return reads[-1]

    monkeypatch.setattr(pods, "read_names", counted)

    async def found(names: pods.PodNames, uid: str) -> str:
        name: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        names.find(uid, name.set_result)
        return await name

    async def asked() -> list[str]:
        names = pods.PodNames()
        together = await asyncio.gather(*(found(names, uid) for uid in (UID, UID, OTHER)))
        assert len(reads) <= 2, "what is asked while the directory is read is read once more, all together"
        before = len(reads)
        again = [await found(names, uid) for uid in (UID, OTHER) * 3]
        assert len(reads) == before
        (logs / f"web_late_{STATIC}").mkdir()
        return [*together, *again, await found(names, STATIC)]

    (logs / f"web_a_{UID}").mkdir()
    assert asyncio.run(asked()) == ["web/a", "web/a", "", *["web/a", ""] * 3, "web/late"]


def test_a_process_that_cannot_be_seen(proc: Path, alive: int) -> None:
    """In another pid namespace, ended, or a pid that has become another process's."""
    (proc / "7" / "cgroup").write_text(f"0::/kubepods/pod{UID}\n")
    assert [process.pod_of(pid, alive) for pid in (0, -1, 8)] == [""] * 3
    ended = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(ended.pid)
    ended.wait()
    assert process.pod_of(7, pidfd) == ""
    os.close(pidfd)
