"""A client that uses only the generated stubs and recvmsg. It follows docs/protocol.md, on the host driver.

python examples/bare_client.py ENDPOINT     (the directory of a tenant: <runtime>/host/tenants/default)
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import sys

from membroker.v1 import broker_pb2
from membroker.v1.handoff_pb2 import Frame, Goodbye, Hello

CONTROL_BYTES = socket.CMSG_SPACE(64 * 4)  # one packet brings at most 64 descriptors


def ask(broker: socket.socket, frame: Frame) -> tuple[Frame, list[int]]:
    """Send a frame. Return the answer, which has come in one packet, and the descriptors that came with it."""
    broker.send(frame.SerializeToString())
    data, control, flags, _ = broker.recvmsg(65_536, CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
    answer = Frame.FromString(data)
    if not data or flags & socket.MSG_CTRUNC or answer.reply.HasField("error"):
        raise SystemExit(answer.reply.error.message or "the broker is gone, or this process is out of descriptors")
    return answer, list(array.array("i", b"".join(payload for _, _, payload in control)))


def main(endpoint: str) -> None:
    """Open a session, register a model, borrow two pages, write to them, and release everything."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as broker:
        broker.connect(f"{endpoint}/handoff.sock")
        answer, (notices,) = ask(broker, Frame(request_id=1, hello=Hello(protocol_version=1, client="bare")))
        print(f"welcome: {answer.welcome.tenant} on {answer.welcome.driver}")
        size = answer.welcome.granularity_bytes
        register = broker_pb2.RegisterModelRequest(model_id="bare")
        model = ask(broker, Frame(request_id=2, register_model=register))[0].reply.model.name

        allocate = broker_pb2.AllocateExtentsRequest(model=model, extent_bytes=size, count=2)
        answer, descriptors = ask(broker, Frame(request_id=3, allocate=allocate))
        pages = [mmap.mmap(descriptor, size) for descriptor in descriptors]  # MAP_SHARED, readable and writable
        for number, (page, descriptor) in enumerate(zip(pages, descriptors, strict=True)):
            os.close(descriptor)
            page[:6] = b"page %d" % number
        print(f"borrowed {len(pages)} pages for {model}: {', '.join(page[:6].decode() for page in pages)}")

        for page in pages:  # unmap first: a release promises that nothing is mapped any more
            page.close()
        release = broker_pb2.ReleaseExtentsRequest(extent_ids=answer.delivery.extent_ids)
        answer, _ = ask(broker, Frame(request_id=4, acknowledged=1, release=release))  # one packet has been taken
        print(f"released {answer.reply.release.released_bytes} bytes")
        print(f"last answer: {ask(broker, Frame(request_id=5, goodbye=Goodbye()))[0].reply.WhichOneof('result')}")
        os.close(notices)


if __name__ == "__main__":
    main(sys.argv[1])
