"""What a gRPC peer sends, cut into frames of HTTP/2: how much of it may be passed on.

gRPC takes in a header block that never ends for as long as it comes, and keeps memory for all of it. So a block waits
here until it is whole, and has a bound. Everything else passes as it comes: gRPC bounds the bodies of calls itself. It
decodes no header, and must never look into a body.
"""

from __future__ import annotations

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_FRAME_BYTES = 16 * 1024
"""The most that a frame may have, by the settings of our server: the default of HTTP/2."""
MAX_BLOCK_BYTES = 16 * 1024
"""The most that a header block may have, with the heads of its frames. Its metadata may have as much when unpacked."""
_HEAD_BYTES = 9
_HEADERS, _CONTINUATION, _END_HEADERS = 1, 9, 4


class BrokenStream(Exception):
    """The peer broke the protocol, or a bound. The message says how."""


class FrameReader:
    """Reads what one peer sends. It keeps a header block that is not whole, the head of a frame, and nothing else."""

    def __init__(self) -> None:
        self._kept = b""
        """What has come and may not be passed on yet."""
        self._read = 0
        """How much of it is read."""
        self._left = len(PREFACE)
        """How much of the frame is still to come, or of the preface."""
        self._greeted = False
        self._in_block = True
        """Whether what is kept begins with a header block that is not whole, or with the preface."""
        self._ends_block = True
        """Whether that ends with this frame."""

    def take(self, data: bytes) -> bytes:
        """Return what may be passed on now that this has come; raises `BrokenStream`."""
        kept = self._kept = self._kept + data
        passed = 0
        while True:
            step = min(self._left, len(kept) - self._read)
            self._read += step
            self._left -= step
            if not self._greeted:
                if kept[: len(PREFACE)] != PREFACE[: len(kept)]:
                    raise BrokenStream("it does not begin as HTTP/2 does")
                self._greeted = not self._left
            if not self._left and self._ends_block:
                self._in_block = self._ends_block = False
            if not self._in_block:
                passed = self._read
            if self._left or len(kept) - self._read < _HEAD_BYTES:
                break
            self._begin_frame(passed)
        self._read -= passed
        self._kept = kept[passed:]
        return kept[:passed]

    def _begin_frame(self, passed: int) -> None:
        """Read the head of a frame. `passed` is where its header block began, if it belongs to one."""
        head = self._kept[self._read : self._read + _HEAD_BYTES]
        length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        if length > MAX_FRAME_BYTES:
            raise BrokenStream(f"a frame has {length} bytes, more than {MAX_FRAME_BYTES}")
        if self._in_block and kind != _CONTINUATION:
            raise BrokenStream("a header block is interrupted by another frame")
        self._read += _HEAD_BYTES
        self._left = length
        if kind in (_HEADERS, _CONTINUATION):
            self._in_block, self._ends_block = True, bool(flags & _END_HEADERS)
            if self._read + length - passed > MAX_BLOCK_BYTES:
                raise BrokenStream(f"a header block has more than {MAX_BLOCK_BYTES} bytes")
