"""The file for the container runtime, by GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.client.dra.claims import NODE, UID

from membroker.dra import slices
from membroker.dra.claims import Allotted, Wanted
from membroker.dra.files import DeviceFiles, check_directory
from membroker.errors import MembrokerError

ONE, OTHER = (f"GPU-{digit * 8}-1111-2222-3333-444444444444" for digit in "ab")


def edits(directory: Path, *uuids: str) -> list[dict[str, list[str]]]:
    names = [f"gpu-{number}" for number in range(len(uuids))]
    devices = tuple(Allotted(("gpu",), NODE, name, name) for name in names)
    files = DeviceFiles(directory, Path("/run/membroker"), "MEMBROKER_ENDPOINT")
    files.write(UID, "t", Wanted(devices, {name: {} for name in names}, (), uuids))
    return [device["containerEdits"] for device in json.loads(files.path(UID).read_text())["devices"]]


def test_a_program_sees_the_gpus_of_its_claim_alone(tmp_path: Path) -> None:
    first, second = edits(tmp_path, ONE, OTHER)
    assert first["env"] == [
        "MEMBROKER_ENDPOINT=/run/membroker/gpu-0/tenants/t",
        f"NVIDIA_VISIBLE_DEVICES={ONE},{OTHER}",
    ]
    assert second["env"][1] == first["env"][1]
    (alone,) = edits(tmp_path, "HOST-1")
    assert alone["env"] == ["MEMBROKER_ENDPOINT=/run/membroker/gpu-0/tenants/t"]


def test_a_directory_that_others_can_write_to(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(MembrokerError, match="open"):
        check_directory(tmp_path / "open" / "cdi")


def test_nvidias_name_of_a_gpu_is_an_attribute() -> None:
    """By `matchAttribute` a claim gets NVIDIA's device and membroker's of the same GPU."""
    (device,) = slices._devices("gpu-0", {"uuid": ONE, "product": "H200", "capacity": 1}, shared=True)
    assert device["attributes"]["gpu.nvidia.com/uuid"] == {"string": ONE}
    (device,) = slices._devices("host", {"uuid": "HOST-1", "product": "", "capacity": 1}, shared=True)
    assert set(device["attributes"]) == {"uuid"}
