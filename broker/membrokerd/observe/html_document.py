"""The frame of an HTML page: its head, its style, and how often the browser loads it again.

Owns the style of all pages. It must never know what a page shows: the parent of several daemons has a page, too, and
needs none of their books.
"""

from __future__ import annotations

import os
import socket
from html import escape

from membroker.wire.names import NODE_VARIABLE

REFRESH_SECONDS = 5
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2126; --paper: #fbfbfa; --faint: #6a7078; --line: #d9dce0;
  --bad: #b3261e; --free: #dcf2de; --rest: #c4c8d0; --unaccounted: #3a3a3a; --guarantee: #0a7d33; --limit: #b3261e;
  --refused: #7a1f5e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --paper: #17191c; --faint: #9aa1a9; --line: #33383e;
  --bad: #ff8a80; --free: #1d5230; --rest: #3f444b; --unaccounted: #f4f4f4; --guarantee: #3ddc6b; --limit: #ff4d3d;
  --refused: #d83a7a; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 24px auto;
  max-width: 960px; padding: 0 16px; }
h1 { font-size: 20px; margin: 0; } h2 { font-size: 16px; margin: 28px 0 8px; }
p { margin: 4px 0; color: var(--faint); } .bad, .bad a, .bad td { color: var(--bad); font-weight: 600; }
svg { display: block; width: 100%; } svg.bar { height: 34px; box-shadow: 0 0 0 1px var(--line); }
svg.chart text { font: 12px system-ui, sans-serif; fill: var(--faint); }
.grid { stroke: var(--line); stroke-width: .5; } .capacity { fill: none; stroke: var(--ink); stroke-dasharray: 4 3; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 6px 0; margin: 0; list-style: none; font-size: 13px; }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; border-radius: 2px; }
.key svg { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: right; padding: 3px 8px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--faint); font-weight: 500; } .name { text-align: left; overflow-wrap: anywhere; white-space: normal; }
.wide { overflow-x: auto; }
"""


def host_name() -> str:
    """Return the name of this machine: in Kubernetes that of its node."""
    return os.environ.get(NODE_VARIABLE) or socket.gethostname()


def document(title: str, body: str) -> str:
    """Return HTML around a page's body, which has only safe text."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>"
    )
