"""The guest of the demo: a program that knows nothing of membroker, and serves from memory that it cannot release.

The memory is a stand-in for a GPU's, which can be suspended from outside. Each connection sends something, and gets the
checksum of all of it. Arguments: its size in bytes, and the port.
"""

from __future__ import annotations

import socket
import sys
import zlib

from ...guest.stand_in import StandInMemory

PATTERN = bytes(range(256)) * 256


def main() -> None:
    """Fill the memory, and serve until a signal ends it."""
    size, port = int(sys.argv[1]), int(sys.argv[2])
    memory = StandInMemory(size)
    for offset in range(0, size, len(PATTERN)):
        memory.write(offset, offset.to_bytes(8, "little") + PATTERN[8:])
    with socket.create_server(("127.0.0.1", port)) as listener:
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"%d\n" % zlib.crc32(memory.read()))


if __name__ == "__main__":
    main()
