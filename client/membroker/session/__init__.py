"""One conversation of this process with one broker: handshake, calls, reconnecting, resume, what is held.

It must never map memory itself or know pools and buffers: descriptors are passed on to a placement.
"""
