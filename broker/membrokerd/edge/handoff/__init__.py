"""The handoff sockets: accept, attest the peer, read frames, deliver descriptors.

It must never touch the books; events go through the dispatcher.
"""
