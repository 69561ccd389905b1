"""Checkpoints published by a program: where their tensors lie, several readers, and what a failure leaves."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.processes import is_settled, mapped_extents
from tests.support.segments import SickDriver, one_transport
from tests.support.sizes import MIB

import membroker
from membroker.checkpoint import InvalidCheckpoint, open_checkpoint, publish_checkpoint
from membroker.dlpack import export

pytestmark = one_transport

ODD = {
    "flag": np.array([True, False, True]),
    "half": np.arange(5, dtype=ml_dtypes.bfloat16),
    "weight": np.arange(15, dtype="f4").reshape(3, 5),
    "scalar": np.array(2.5, "f4"),
    "nothing": np.zeros((0, 7), "i8"),
}


def unaligned(path: Path) -> None:
    """Write a file as other writers do: a header of an odd length, and BOOL before BF16 before F32."""
    index, content = {}, b""
    for (name, array), dtype in zip(ODD.items(), ("BOOL", "BF16", "F32", "F32", "I64"), strict=True):
        offsets = [len(content), len(content) + array.nbytes]
        index[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        content += array.tobytes()
    header = json.dumps(index).encode()
    header += b" " * (1 - len(header) % 2)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)


def large(path: Path) -> dict[str, Any]:
    """Write shards of several pieces each, so that several readers share them."""
    random, found = np.random.default_rng(11), {}
    for number in (1, 2):
        arrays = {f"w{number}.{part}": random.integers(0, 255, 20 * MIB + part, "u1") for part in (1, 2)}
        safetensors.numpy.save_file(arrays, path / f"model-0000{number}-of-00002.safetensors")
        found |= arrays
    return found


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("membroker-reader")]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_each_tensor_lies_at_256_bytes(client: membroker.Client, model: membroker.Model, tmp_path: Path) -> None:
    """Such a file was loaded, and then `tensor`, `attach_module` and `export` refused what was in it."""
    unaligned(tmp_path / "odd.safetensors")
    publish_checkpoint(model, "weights", tmp_path / "odd.safetensors", metadata={"step": "7"}).close()
    with client.attach("weights") as segment:
        index = segment.index()
        assert index.keys() == ODD.keys()
        assert index.metadata == {"step": "7"}
        assert {(segment.address + info.offset) % 256 for info in index.values()} == {0}
        for name, info in index.items():
            assert export(segment, info.shape, info.dtype, info.offset).shape == ODD[name].shape
        tensors = segment.tensors()
        assert same(tensors, ODD)
        assert all(array.flags.aligned for array in tensors.values())
        del tensors, name, info
        with pytest.raises(membroker.InvalidRequest, match="'numpy', 'torch', 'jax', not 'tensorflow'"):
            segment.tensors("tensorflow")


def test_shards_and_several_readers(
    client: membroker.Client, model: membroker.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads copy at the same time; the progress comes in this thread, rises, and ends with the whole."""
    arrays, told, threads, met = large(tmp_path), [], set(), threading.Barrier(4)
    write, waited = membroker.Segment.write, set()

    def meet(segment: membroker.Segment, offset: int, data: Any, progress: Any = None) -> None:
        if threading.current_thread() is not threading.main_thread() and threading.get_ident() not in waited:
            waited.add(threading.get_ident())
            met.wait(DEADLINE_SECONDS)
        write(segment, offset, data, progress)

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.current_thread())

    monkeypatch.setattr(membroker.Segment, "write", meet)

    with publish_checkpoint(model, "weights", tmp_path, progress=progress) as segment:
        assert not segment.writable
        assert same(segment.tensors(), arrays)
    total = sum(array.nbytes for array in arrays.values())
    assert told == sorted(told)
    assert told[-1] == (total, total)
    assert threads == {threading.current_thread()}
    assert len(waited) == 4
    assert not readers()


def _raise(error: BaseException) -> Callable[..., Any]:
    def raises(*_: object) -> Any:
        raise error

    return raises


FAILURES: dict[str, tuple[type[BaseException], str]] = {
    "Ctrl-C": (KeyboardInterrupt, "^$"),
    # Somebody downloads it again meanwhile. A mapped file would end the process here, by SIGBUS.
    "shorter": (InvalidCheckpoint, "has become shorter while it was read: byte "),
    "disk": (membroker.InvalidRequest, "cannot be read: Input/output error"),
    "device": (membroker.DeviceFailure, "write"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_what_ends_it_half_way_leaves_nothing(
    daemon: Daemon, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Beside several readers: nothing is held, mapped or charged, although the traceback keeps frames."""
    large(tmp_path)
    error, says = FAILURES[what]
    driver = SickDriver()
    driver.writes = what != "device"
    with (
        membroker.connect(daemon.endpoint(), transport=transport, driver=driver) as client,
        open_checkpoint(tmp_path) as checkpoint,
    ):
        if what == "shorter":
            for file in tmp_path.iterdir():
                os.truncate(file, 600)
        if what == "disk":
            monkeypatch.setattr(os, "preadv", _raise(OSError(errno.EIO, os.strerror(errno.EIO))))
        progress = _raise(error()) if what == "Ctrl-C" else None
        with pytest.raises(error, match=says) as failure:
            publish_checkpoint(client.model("m"), "weights", checkpoint, progress=progress)
        assert not readers()
        until(lambda: not client.segments() and is_settled(daemon))
        assert mapped_extents() == 0
        assert failure.value.__traceback__ is not None


def test_it_waits_for_its_readers(
    client: membroker.Client, model: membroker.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is in the middle of a copy as the progress raises: the segment must not be closed under it."""
    large(tmp_path)
    released, write, join = threading.Event(), membroker.Segment.write, threading.Thread.join

    def stay(segment: membroker.Segment, offset: int, data: Any, progress: Any = None) -> None:
        if threading.current_thread().name == "membroker-reader-1":
            assert released.wait(DEADLINE_SECONDS)
        write(segment, offset, data, progress)

    def release(thread: threading.Thread, timeout: float | None = None) -> None:
        released.set()
        join(thread, timeout)

    monkeypatch.setattr(membroker.Segment, "write", stay)
    monkeypatch.setattr(threading.Thread, "join", release)
    try:
        with pytest.raises(ZeroDivisionError):
            publish_checkpoint(model, "weights", tmp_path, progress=_raise(ZeroDivisionError()))
        assert not readers()
    finally:
        released.set()
