"""Arrays in a segment: published, found by name, and checked before use."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.daemons import Daemon, until
from tests.support.processes import is_settled, mapped_extents
from tests.support.segments import SickDriver, holders, one_transport, sealed
from tests.support.sizes import MIB, PAGE

import membroker
from membroker.checkpoint import publish_arrays
from membroker.safetensors import InvalidTensorIndex, segment_size

pytestmark = one_transport

WEIGHTS = {
    "layer.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layer.bias": np.array([1, -2], dtype=np.int64),
    "flag": np.array([True, False, True]),
    "scalar": np.float16(1.5).reshape(()),
    "nothing": np.empty((0, 7), dtype=np.uint8),
}


class TestTensors:
    def test_published_and_read_by_name(self, client: membroker.Client, model: membroker.Model) -> None:
        """One process publishes a model's weights, another finds them by name, shape and dtype, without a copy."""
        with publish_arrays(model, "weights", WEIGHTS, metadata={"step": "7"}) as published:
            assert not published.writable
            attached = client.attach("weights")
        index = attached.index()
        assert index.metadata == {"step": "7"}
        arrays = attached.tensors()
        for name, array in WEIGHTS.items():
            assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
            assert np.array_equal(arrays[name], array)
            assert not arrays[name].flags.writeable
        place = arrays["layer.weight"].__array_interface__["data"][0]
        assert place == attached.address + index["layer.weight"].offset
        attached.close()
        assert arrays["layer.weight"][2, 3] == 11, "an array keeps the segment that it lies in"
        assert holders(client) == {"weights": 1}
        del arrays
        until(lambda: holders(client) == {"weights": 0})

    def test_laid_out_first_and_filled_later(self, client: membroker.Client, model: membroker.Model) -> None:
        """A loader that streams: it says what will be there, and copies tensor by tensor into arrays over it."""
        tensors = {"a": ("F32", [2, 3]), "b": ("BF16", (4,))}
        segment = model.create_segment("weights", segment_size(tensors))
        index = segment.lay_out(tensors)
        arrays = segment.tensors(raw=True)
        arrays["a"][:] = 2.5
        segment.write(index["b"].offset, b"\x80\x3f" * 4)
        with pytest.raises(BufferError):
            segment.seal()
        del arrays
        segment.seal()
        with client.attach("weights") as attached:
            read = attached.tensors(raw=True)
            assert (read["a"].tolist(), read["b"].tolist()) == ([[2.5] * 3] * 2, [0x3F80] * 4)
            with pytest.raises(ValueError, match="read-only"):
                read["a"][0, 0] = 1
            del read

    def test_on_any_failure_there_is_no_segment(self, daemon: Daemon, transport: str) -> None:
        driver = SickDriver()
        with membroker.connect(daemon.endpoint(), transport=transport, driver=driver) as client:
            model = client.model("m")
            for array in (np.array(["text"]), np.zeros(3, ">f4")):
                with pytest.raises(membroker.InvalidRequest):
                    publish_arrays(model, "weights", {**WEIGHTS, "bad": array})
            raised = []  # their tracebacks keep the segment: it must not be left to the garbage collector
            for fault, well in (("writes", True), ("lost", False)):
                setattr(driver, fault, not well)
                with pytest.raises(membroker.DeviceFailure) as failure:
                    publish_arrays(model, "weights", WEIGHTS)
                raised.append(failure)
                setattr(driver, fault, well)
                until(lambda: not client.segments() and is_settled(daemon))
                assert mapped_extents() == 0
            with publish_arrays(model, "weights", WEIGHTS), pytest.raises(membroker.SegmentExists):
                publish_arrays(model, "weights", WEIGHTS)
            assert holders(client) == {"weights": 0}

    def test_a_hostile_header(
        self, client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first bytes are another process's: whatever they say, it is refused in words, and no more than the
        longest header is copied. `tests/client/test_safetensors.py` has more of them.
        """
        longest = 16 * MIB
        sizes = [0]
        behind_the_end = b'{"a":{"dtype":"U8","shape":[2097152],"data_offsets":[0,2097152]}}'
        for name, size, length, start, says in (
            ("too-long", 18 * MIB, longest + 1, b"{" * 64, "more than 16777216"),
            ("deep", 18 * MIB, longest, b'{"a":' + b"[" * (longest - 5), "nested too deeply"),
            ("longer-than-its-segment", PAGE, 3 * MIB, b"", " 2097144 "),
            ("behind-the-end", PAGE, len(behind_the_end), behind_the_end, " 2097152"),
        ):
            sealed(model, name, size, length.to_bytes(8, "little") + start)
            with client.attach(name) as segment, monkeypatch.context() as patch:
                read = segment.read
                patch.setattr(segment, "read", lambda at, size, read=read: sizes.append(size) or read(at, size))
                with pytest.raises(InvalidTensorIndex, match=says):
                    segment.tensors()
        assert max(sizes) <= 8 + longest
        assert mapped_extents() == 0
