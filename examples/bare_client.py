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
from membroker.v1.handoff_pb2 import Ack, Delivery, Frame, Goodbye, Hello

CONTROL_BYTES = socket.CMSG_SPACE(64 * 4)  # one packet brings at most 64 descriptors


def receive(broker: socket.socket) -> tuple[Frame, list[int]]:
    """Return the next frame and the descriptors that came with it, which the caller must close."""
    data, control, flags, _ = broker.recvmsg(65_536, CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i", b"".join(payload for _, _, payload in control))
    frame = Frame.FromString(data)
    if not data or flags & socket.MSG_CTRUNC or frame.reply.HasField("error"):
        for descriptor in descriptors:
            os.close(descriptor)
        raise SystemExit(frame.reply.error.message or "the broker is gone, or this process is out of descriptors")
    return frame, list(descriptors)


def borrow(broker: socket.socket, request: Frame) -> tuple[list[int], list[mmap.mmap], int]:
    """Ask for extents. Return their ids, their mappings, and how many packets of this connection were taken so far.

    `request.acknowledged` is how many packets were taken before.
    """
    taken = request.acknowledged
    ids: list[int] = []
    mappings: list[mmap.mmap] = []
    broker.send(request.SerializeToString())
    while True:
        frame, descriptors = receive(broker)
        delivery: Delivery = frame.delivery
        for extent_id, descriptor in zip(delivery.extent_ids, descriptors, strict=True):
            mappings.append(mmap.mmap(descriptor, delivery.extent_bytes))  # MAP_SHARED, readable and writable
            os.close(descriptor)
            ids.append(extent_id)
        taken += 1
        if delivery.HasField("reply"):  # the call's last delivery: the next frame acknowledges it
            return ids, mappings, taken
        broker.send(Frame(acknowledged=taken, ack=Ack()).SerializeToString())  # the broker may wait for it


def main(endpoint: str) -> None:
    """Open a session, register a model, borrow two pages, write to them, and release everything."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as broker:
        broker.connect(f"{endpoint}/handoff.sock")
        broker.send(Frame(request_id=1, hello=Hello(protocol_version=1, client="bare")).SerializeToString())
        frame, (notices,) = receive(broker)
        welcome = frame.welcome
        print(f"welcome: {welcome.tenant} on {welcome.driver}, granularity {welcome.granularity_bytes}")
        register = broker_pb2.RegisterModelRequest(model_id="bare")
        broker.send(Frame(request_id=2, register_model=register).SerializeToString())
        model = receive(broker)[0].reply.model.name
        allocate = broker_pb2.AllocateExtentsRequest(model=model, extent_bytes=welcome.granularity_bytes, count=2)
        ids, pages, taken = borrow(broker, Frame(request_id=3, allocate=allocate))
        for number, page in enumerate(pages):
            page[:6] = b"page %d" % number
        print(f"borrowed {len(ids)} pages for {model}: {', '.join(page[:6].decode() for page in pages)}")
        for page in pages:  # unmap first: a release promises that nothing is mapped any more
            page.close()
        release = broker_pb2.ReleaseExtentsRequest(extent_ids=ids)
        broker.send(Frame(request_id=4, acknowledged=taken, release=release).SerializeToString())
        print(f"released {receive(broker)[0].reply.release.released_bytes} bytes")
        broker.send(Frame(request_id=5, goodbye=Goodbye()).SerializeToString())
        print(f"last answer: {receive(broker)[0].reply.WhichOneof('result')}")
        os.close(notices)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python examples/bare_client.py ENDPOINT     (see the top of the file)", file=sys.stderr)
        sys.exit(2)
    try:
        main(sys.argv[1])
    except OSError as error:
        raise SystemExit(f"no broker at {sys.argv[1]}: {error}") from None
