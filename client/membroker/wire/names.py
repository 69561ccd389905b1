"""Resource names that the daemon, its logs and the library write alike.

Owns their form only. It must never parse what a stranger sent.
"""

from __future__ import annotations


def session_name(session: int) -> str:
    """Return the resource name of a session."""
    return f"sessions/{session:x}"
