"""Which device's broker a process enters: `connect(device=…)`, CUDA_VISIBLE_DEVICES, and torchrun's LOCAL_RANK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import membroker
from membroker.errors import BrokerUnavailable, InvalidRequest
from membroker.session import endpoint

UUIDS = [f"GPU-{number}1111111-2222-3333-4444-555566667777" for number in range(4)]


class TorchDevice:
    """As `str` shows a `torch.device`."""

    def __str__(self) -> str:
        return "cuda:1"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Four GPUs, each with the endpoints of two tenants."""
    for number in range(4):
        device = tmp_path / "membroker" / f"gpu-{number}1111111"
        for tenant in ("default", "red"):
            (device / "tenants" / tenant).mkdir(parents=True)
            (device / "tenants" / tenant / "handoff.sock").touch()
        (device / "index").write_text(f"{number}\n")
    return tmp_path


def environment(place: Path, **more: str) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(place), "MEMBROKER_SYSTEM_DIRECTORY": str(place / "none"), **more}


@pytest.mark.parametrize(
    ("device", "variables", "number"),
    [
        ("2", {}, 2),
        ("cuda:2", {}, 2),
        ("cuda", {"LOCAL_RANK": "3"}, 3),
        (TorchDevice(), {}, 1),
        (UUIDS[3], {"CUDA_VISIBLE_DEVICES": "0"}, 3),
        (0, {"CUDA_VISIBLE_DEVICES": "3,1"}, 3),
        (TorchDevice(), {"CUDA_VISIBLE_DEVICES": " 3, 1 "}, 1),
        (1, {"CUDA_VISIBLE_DEVICES": f"{UUIDS[2]},{UUIDS[0]}"}, 0),
    ],
)
def test_a_device_as_the_process_names_it(place: Path, device: Any, variables: dict[str, str], number: int) -> None:
    found = endpoint.endpoint_of_device(device, environment(place, **variables))
    assert found == place / "membroker" / f"gpu-{number}1111111" / "tenants" / "default"


def test_the_tenant_is_that_of_the_endpoint(place: Path) -> None:
    """`membroker run` gave the program an endpoint of its tenant; the program names another device."""
    given = str(place / "membroker" / "gpu-01111111" / "tenants" / "red")
    found = endpoint.endpoint_of_device(2, environment(place, MEMBROKER_ENDPOINT=given))
    assert found == place / "membroker" / "gpu-21111111" / "tenants" / "red"


@pytest.mark.parametrize(
    ("device", "variables", "kind", "says"),
    [
        (2, {"CUDA_VISIBLE_DEVICES": "3,1"}, InvalidRequest, r"no device 2: CUDA_VISIBLE_DEVICES=3,1 shows .* 2"),
        (0, {"CUDA_VISIBLE_DEVICES": ""}, InvalidRequest, "shows this process 0"),
        (7, {}, BrokerUnavailable, "no broker of device 7"),
        (True, {}, InvalidRequest, "not True"),
        ("cpu:../..", {}, InvalidRequest, "is not a device"),
    ],
)
def test_what_names_no_device(
    place: Path, device: Any, variables: dict[str, str], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        endpoint.endpoint_of_device(device, environment(place, **variables))


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": UUIDS[1]}, 1),
        ({"LOCAL_RANK": "3"}, 3),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,3"}, 3),
    ],
)
def test_of_several_the_one_of_the_process(
    place: Path, variables: dict[str, str], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of torchrun's processes says `connect()`, and enters the broker of its own GPU."""
    monkeypatch.setattr(endpoint, "_may_live", lambda _: True)
    found = endpoint.find_endpoint(None, environment(place, **variables))
    assert found == place / "membroker" / f"gpu-{number}1111111" / "tenants" / "default"


@pytest.mark.parametrize(
    "variables",
    [{}, {"CUDA_VISIBLE_DEVICES": "2,3"}, {"LOCAL_RANK": "x"}, {"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "2,3"}],
)
def test_where_nothing_says_which(place: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_may_live", lambda _: True)
    with pytest.raises(InvalidRequest, match=r"has 4 devices: name one with connect\(device=…\)"):
        endpoint.find_endpoint(None, environment(place, **variables))


def test_an_endpoint_is_not_searched(place: Path) -> None:
    given = str(place / "membroker" / "gpu-01111111" / "tenants" / "red")
    assert endpoint.find_endpoint(None, environment(place, MEMBROKER_ENDPOINT=given, LOCAL_RANK="2")) == Path(given)
    with pytest.raises(InvalidRequest, match="an endpoint or a device"):
        membroker.connect(given, device=0)
