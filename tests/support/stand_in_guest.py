"""A program that knows nothing of membroker: it fills memory that can be suspended, checks it, and serves lines.

Arguments: the size in MiB, and a port or 0. Each line that a connection sends is answered by the sum of its memory. It
prints `ready` when it has its memory, and `alive` for each line of its standard input, after it has checked the memory.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
import sys

from membroker.guest.stand_in import StandInMemory

MIB = 1 << 20


def main() -> None:
    size, port = int(sys.argv[1]) * MIB, int(sys.argv[2])
    memory = StandInMemory(size)
    content = os.urandom(4096)
    memory.write(0, content)
    memory.write(size - 4096, content)
    wanted = hashlib.sha256(memory.read()).hexdigest()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ, "line")
    if port:
        listener = socket.create_server(("127.0.0.1", port))
        selector.register(listener, selectors.EVENT_READ, "connection")
    os.write(1, b"ready %d\n" % os.getpid())  # whole, also beside another process
    while True:
        for key, _ in selector.select():
            if key.data == "connection":
                connection, _ = listener.accept()
                with connection, connection.makefile("rw") as lines:
                    for _ in lines:
                        lines.write(hashlib.sha256(memory.read()).hexdigest() + "\n")
                        lines.flush()
            else:
                line = sys.stdin.readline()
                if not line or line.startswith("exit"):
                    sys.exit(int(line.split()[1]) if line.split()[1:] else 0)
                assert hashlib.sha256(memory.read()).hexdigest() == wanted
                print("alive", flush=True)


main()
