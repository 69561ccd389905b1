"""What the library and the daemon must agree on: names and limits, frames, and descriptors on a socket.

Only protobuf and the standard library may be imported here. No decision about memory, sessions or tenants.
"""
