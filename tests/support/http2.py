"""A bare HTTP/2 client, for calls that no gRPC library would make: begun, filled, never ended.

`Peer` keeps the server's rules of flow and knows nothing else: it decodes no header and reads no answer.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from tests.support.daemons import DEADLINE_SECONDS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
INITIAL_WINDOW = 4
"""The setting of a stream's first window."""
FRAME_BYTES = 16_384


class Peer:
    """One connection to an endpoint's gRPC socket."""

    def __init__(self, endpoint: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_SECONDS)
        self.sock.connect(str(endpoint / "grpc.sock"))
        self.sock.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        self.ended: set[int] = set()
        """Streams that the server has ended."""
        self._heard = b""
        self._next = 1
        self._window = self._first = 65_535
        self._windows: defaultdict[int, int] = defaultdict(lambda: self._first)

    def begin(self, path: str, metadata_bytes: int, token: str = "") -> int:
        """Begin a call with so much metadata, and the token of a session, and return its stream."""
        stream, fields = self._fields(path, metadata_bytes)
        fields += b"\x00" + _text("membroker-token") + _text(token) if token else b""
        self.sock.sendall(frame(HEADERS, 0x4, stream, fields))
        return stream

    def begin_block(self, path: str, metadata_bytes: int) -> None:
        """Begin the header block of a call with so much metadata, and do not end it: nothing else may follow."""
        stream, fields = self._fields(path, metadata_bytes)
        self.sock.sendall(frame(HEADERS, 0, stream, fields))

    def close_windows(self) -> None:
        """Take no byte of any answer from now on."""
        self.sock.sendall(frame(SETTINGS, 0, 0, struct.pack("!HI", INITIAL_WINDOW, 0)))

    def ask(self, path: str, token: str, request: bytes) -> int:
        """Make a whole call, with the token of a session, and return its stream."""
        stream, fields = self._fields(path, 0)
        fields += b"\x00" + _text("membroker-token") + _text(token)
        message = b"\0" + len(request).to_bytes(4, "big") + request
        self.sock.sendall(frame(HEADERS, 0x4, stream, fields) + frame(DATA, 0x1, stream, message))
        return stream

    def _fields(self, path: str, metadata_bytes: int) -> tuple[int, bytes]:
        stream, self._next = self._next, self._next + 2
        fields = b"\x83\x86\x04" + _text(path) + b"\x01" + _text("localhost")
        fields += b"\x0f\x10" + _text("application/grpc")
        fields += b"\x00" + _text("te") + _text("trailers") + b"\x00" + _text("x-filler") + _text("x" * metadata_bytes)
        return stream, fields

    def fill(self, stream: int, data: bytes) -> int:
        """Send as much of the data as the server allows now, and return how much that was."""
        count = max(0, min(len(data), self._window, self._windows[stream], FRAME_BYTES))
        if count:
            self._window -= count
            self._windows[stream] -= count
            self.sock.sendall(frame(DATA, 0, stream, data[:count]))
        return count

    def hear(self, seconds: float = 0) -> None:
        """Take what the server says, for windows that it opens and streams that it ends."""
        while select.select([self.sock], [], [], seconds)[0]:
            data = b""
            with suppress(ConnectionResetError):
                data = self.sock.recv(65_536)
            assert data, "the server ended the connection"
            self._heard += data
            seconds = 0
        while len(self._heard) >= 9:
            length = int.from_bytes(self._heard[:3], "big")
            if len(self._heard) < 9 + length:
                return
            kind, flags, stream = self._heard[3], self._heard[4], int.from_bytes(self._heard[5:9], "big")
            body, self._heard = self._heard[9 : 9 + length], self._heard[9 + length :]
            self._take(kind, flags, stream, body)

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        assert kind != GOAWAY, body
        if kind == SETTINGS and not flags & 1:
            for number, value in struct.iter_unpack("!HI", body):
                if number == INITIAL_WINDOW:
                    for one in self._windows:
                        self._windows[one] += value - self._first
                    self._first = value
            self.sock.sendall(frame(SETTINGS, 1, 0, b""))
        elif kind == PING and not flags & 1:
            self.sock.sendall(frame(PING, 1, 0, body))
        elif kind == WINDOW_UPDATE and stream:
            self._windows[stream] += int.from_bytes(body, "big")
        elif kind == WINDOW_UPDATE:
            self._window += int.from_bytes(body, "big")
        elif kind == RST_STREAM or (kind in (HEADERS, DATA) and flags & 1):
            self.ended.add(stream)

    def close(self) -> None:
        self.sock.close()


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def _text(text: str) -> bytes:
    """Encode a string as HPACK does without Huffman: its length in seven bits and more, and its bytes."""
    length, data = len(text), text.encode()
    if length < 127:
        return bytes([length]) + data
    rest, encoded = length - 127, bytearray([127])
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    return bytes(encoded) + bytes([rest]) + data
