"""The handoff sockets: who is at the other end, frames in, frames and descriptors out. No decision is taken here."""
