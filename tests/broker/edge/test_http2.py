"""What the proxy passes on to gRPC: all of a stream, however it is cut, but no header block before it is whole."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from tests.support.http2 import CONTINUATION, DATA, HEADERS, PING, PREFACE, frame

from membrokerd.edge.rpc.http2 import MAX_BLOCK_BYTES, MAX_FRAME_BYTES, BrokenStream, FrameReader

END_HEADERS = 4
HEAD = 9
GREETING = PREFACE + frame(4, 0, 0, b"")


def _greeted() -> FrameReader:
    reader = FrameReader()
    assert reader.take(GREETING) == GREETING
    return reader


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_passes_whole_however_it_is_cut(seed: int) -> None:
    chance = random.Random(seed)
    frames = [GREETING]
    for number in range(1, 30, 2):
        block = chance.randbytes(chance.randrange(200))
        parts = sorted(chance.choices(range(len(block) + 1), k=chance.randrange(4)))
        cuts = list(zip([0, *parts], [*parts, len(block)], strict=True))
        for place, (begin, end) in enumerate(cuts):
            kind, flags = CONTINUATION if place else HEADERS, END_HEADERS if place == len(cuts) - 1 else 0
            frames.append(frame(kind, flags, number, block[begin:end]))
        frames.append(frame(DATA, 1, number, chance.randbytes(chance.randrange(300))))
        frames.append(frame(PING, 0, 0, bytes(8)))
    stream = b"".join(frames)
    reader, passed, at = FrameReader(), b"", 0
    while at < len(stream):
        count = chance.choice([1, 2, 9, 50, 1_000])
        passed += reader.take(stream[at : at + count])
        at += count
    assert passed == stream


def test_a_block_waits_until_it_is_whole() -> None:
    reader = _greeted()
    begun, more, last = (
        frame(HEADERS, 0, 1, b"abc"),
        frame(CONTINUATION, 0, 1, b"def"),
        frame(CONTINUATION, END_HEADERS, 1, b"ghi"),
    )
    assert reader.take(begun) == b""
    assert reader.take(more + last[:-1]) == b""
    assert reader.take(last[-1:] + b"\0") == begun + more + last


def test_a_body_passes_as_it_comes() -> None:
    reader, data = _greeted(), frame(DATA, 0, 1, bytes(100))
    assert reader.take(data[: HEAD + 1]) == data[: HEAD + 1]
    assert reader.take(data[HEAD + 1 :]) == data[HEAD + 1 :]


@pytest.mark.parametrize("size", [0, 1, 100, MAX_FRAME_BYTES])
def test_a_block_that_never_ends_is_refused_at_its_bound(size: int) -> None:
    """Also one of frames that have nothing in them: their heads count."""
    longest = frame(HEADERS, END_HEADERS, 1, bytes(MAX_BLOCK_BYTES - HEAD))
    reader, most = _greeted(), MAX_BLOCK_BYTES // (HEAD + size)
    assert reader.take(longest) == longest
    for number in range(most):
        assert reader.take(frame(CONTINUATION if number else HEADERS, 0, 1, bytes(size))) == b""
    with pytest.raises(BrokenStream):
        reader.take(frame(CONTINUATION if most else HEADERS, 0, 1, bytes(size)))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        PREFACE[:-1] + b"x",
        GREETING + frame(DATA, 0, 1, bytes(MAX_FRAME_BYTES + 1))[:HEAD],
        GREETING + frame(HEADERS, 0, 1, b"") + frame(PING, 0, 0, bytes(8)),
    ],
    ids=["HTTP/1.1", "a preface with another end", "a frame that is too long", "a frame within a block"],
)
def test_what_breaks_the_protocol_is_refused(data: bytes) -> None:
    with pytest.raises(BrokenStream):
        FrameReader().take(data)


def test_nothing_is_kept_of_what_has_passed() -> None:
    reader, data = _greeted(), frame(HEADERS, END_HEADERS, 1, bytes(1_000)) + frame(DATA, 0, 1, bytes(10_000))
    tracemalloc.start()
    try:
        for _ in range(100):
            assert reader.take(data) == data
        assert tracemalloc.get_traced_memory()[0] < 2 * len(data)
    finally:
        tracemalloc.stop()
