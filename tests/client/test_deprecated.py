"""Old spellings of the public API work for one release, and each warns with the new one."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from tests.support.daemons import Daemon
from tests.support.sizes import MIB

import membroker
from membroker import LocalSource, VirtualMemoryPool, errors, types
from membroker.cli import admin, tables

pytestmark = pytest.mark.shared_daemon

PAGE = 2 * MIB


@pytest.fixture
def client(daemon: Daemon) -> Iterator[membroker.Client]:
    with membroker.connect(daemon.endpoint("red")) as client:
        yield client


def test_a_pool_by_position(client: membroker.Client) -> None:
    """Page size first was the other way round than VirtualMemoryPool's order: by position it keeps its old meaning."""
    model = client.register_model("m", virtual_capacity="64MiB")
    with pytest.warns(
        DeprecationWarning, match=r"Model.pool .* use the keywords page_size=, virtual_capacity="
    ) as seen:
        pool = model.pool("2MiB", "16MiB")
    assert seen[0].filename == __file__
    assert (pool.page_size, pool.capacity) == (PAGE, 16 * MIB)
    with pytest.warns(DeprecationWarning, match="use the keywords page_size=$"):
        assert model.pool(PAGE, spare_pages=1).capacity == 64 * MIB
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.pool(virtual_capacity="16MiB", page_size=PAGE).capacity == 16 * MIB
        for wrong in (lambda: model.pool(PAGE, page_size=PAGE), lambda: model.pool(1, 2, 3, 4, 5)):
            with pytest.raises(TypeError):
                wrong()


def test_progress_of_a_step(client: membroker.Client) -> None:
    """A bar of steps still gets the size of each step; a function of two numbers gets what is done, of how many."""
    data = bytes(130 * MIB)
    steps, told = [], []
    with client.register_model("m").create_segment("weights", len(data)) as segment:
        with pytest.warns(DeprecationWarning, match=r"use progress\(done, total\)") as seen:
            segment.write(0, data, steps.append)
        assert seen[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            segment.write(0, data, lambda done, total: told.append((done, total)))
        with pytest.raises(membroker.InvalidRequest):
            segment.write(0, data, 7)  # type: ignore[arg-type]
    assert steps == [64 * MIB, 64 * MIB, 2 * MIB]
    assert told == [(64 * MIB, len(data)), (128 * MIB, len(data)), (len(data), len(data))]


def test_attributes_of_living_objects(client: membroker.Client) -> None:
    with pytest.warns(DeprecationWarning, match=r"Client.driver is deprecated: use Client.driver_kind") as seen:
        assert client.driver == client.driver_kind == "host"  # type: ignore[attr-defined]
    assert seen[0].filename == __file__
    model = client.register_model("m", virtual_capacity="64MiB")
    with LocalSource("host") as source, VirtualMemoryPool(source, 8 * PAGE, PAGE) as pool:
        pool.allocate(0, PAGE)
        array = model.sparse_array((1024, 1024), "float32")
        for holder in (pool, source, array, model.growable_buffer("4MiB", "64MiB", PAGE)):
            with pytest.warns(
                DeprecationWarning, match="physical_memory_usage is deprecated: use .*physical_usage_bytes"
            ):
                assert holder.physical_memory_usage == holder.physical_usage_bytes


CLASSES = [
    *(value for value in vars(types).values() if hasattr(value, "__old_spellings__")),
    *(admin.QuotaStatus, admin.TenantBooks, admin.ProcessStatus),
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_fields_of_status_values(kind: Any) -> None:
    """Each old name gives the new one's value, and `--json` prints both."""
    value = kind(*range(len(fields(kind))))
    printed = io.StringIO()
    tables.print_json(value, printed)
    document = json.loads(printed.getvalue())
    for old, new in kind.__old_spellings__.items():
        assert new.endswith("_bytes")
        with pytest.warns(DeprecationWarning, match=f"{kind.__name__}.{old} is deprecated: use {kind.__name__}.{new}$"):
            assert getattr(value, old) == getattr(value, new)
        assert document[old] == document[new] == getattr(value, new)
    assert pickle.loads(pickle.dumps(value)) == value


def test_every_field_in_bytes_says_so() -> None:
    """The wire's names: a field that carries bytes ends in _bytes; `size` and `offset` of a pool's ranges stay."""
    assert {kind.__name__ for kind in CLASSES} >= {"MemoryStats", "ModelBooks", "LocationBooks", "SegmentStatus"}
    for kind in CLASSES:
        assert not {field.name for field in fields(kind)} & {*kind.__old_spellings__, "size"}


def test_errors() -> None:
    numbers = {"requested_bytes": "8", "asked_bytes": "7", "available_bytes": "5", "limit_bytes": "100"}
    refused = errors.OutOfMemory("no", "MODEL_LIMIT", numbers)
    for name, value in {"requested": 8, "asked": 7, "available": 5, "limit": 100}.items():
        with pytest.warns(DeprecationWarning, match=f"OutOfMemory.{name} is deprecated: use OutOfMemory.{name}_bytes"):
            assert getattr(refused, name) == getattr(refused, f"{name}_bytes") == value
    full = errors.OutOfVirtualMemory(8, 5)
    for name, value in {"requested": 8, "available": 5}.items():
        with pytest.warns(DeprecationWarning, match=f"use OutOfVirtualMemory.{name}_bytes"):
            assert getattr(full, name) == value


def test_torch_memory() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    from membroker.adapters.torch import TorchMemory

    assert TorchMemory.__old_spellings__ == {"lent": "lent_bytes"}  # type: ignore[attr-defined]
