"""`record`: a timeline of the memory that this process maps: how much, when, and which lines of the program asked.

    import membroker

    with membroker.record("timeline.html"):
        ...

Owns the recording that is on, if one is, and the page that it writes. Memory that is mapped or unmapped tells it
(`memory`, `segment`). It must never keep a frame, an object of the program, or more than a fixed number of events.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from .errors import InvalidRequest
from .interrupts import here
from .vmm.sizes import format_size

MOST_EVENTS: Final = 20_000
"""Older events are forgotten: with the stacks, this is at most some 40 MB."""
MOST_FRAMES: Final = 16
_OURS = frozenset({__name__.partition(".")[0], *sys.stdlib_module_names})
"""The modules whose lines are not the program's: this library, and the standard library."""


class MemoryChange(NamedTuple):
    """Memory that was mapped or unmapped, `size` bytes more or less, and the bytes that the recording counts since.

    `seconds` count from the beginning of the recording. `stack` has the program's lines, the innermost first, as
    "function file:line"; the call of the library stands before them.
    """

    seconds: float
    size: int
    total: int
    what: str
    stack: tuple[str, ...]


class Timeline:
    """The last events of this process since the recording began. Thread-safe."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._lock = threading.RLock()  # a signal's handler may allocate
        self._events: deque[MemoryChange] = deque(maxlen=MOST_EVENTS)
        self._total = 0
        self._count = 0
        self.peak_bytes: int = 0
        """The most bytes more than at the beginning that were mapped at any time."""

    def changed(self, what: str, size: int) -> None:
        """Note that `size` bytes more are mapped, or less."""
        stack = _stack(sys._getframe(1))
        with self._lock:
            self._total += size
            self._count += 1
            self.peak_bytes = max(self.peak_bytes, self._total)
            self._events.append(MemoryChange(time.monotonic() - self._begun, size, self._total, what, stack))

    def events(self) -> list[MemoryChange]:
        """Return the events that are not forgotten, the oldest first."""
        with self._lock:
            return list(self._events)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as an HTML file that opens alone. Raises `OSError`."""
        events, left_out = self.events(), self._count - len(self._events)
        stacks: dict[tuple[str, ...], int] = {}
        rows = [
            [round(event.seconds, 6), event.size, event.total, event.what, stacks.setdefault(event.stack, len(stacks))]
            for event in events
        ]
        head = f"membroker: pid {os.getpid()}, {self._count} events, at most {format_size(self.peak_bytes)} more"
        data = json.dumps({"head": head, "leftOut": left_out, "stacks": list(stacks), "rows": rows})
        # "<" does not occur outside of texts: so no text ends the script.
        Path(path).write_text(_PAGE.replace("DATA", data.replace("<", "\\u003c")), encoding="utf-8")


class State:
    """The recording that is on in this process. Read it once: it may end in another thread meanwhile."""

    recording: Timeline | None = None


def _forget() -> None:
    """Record nothing in a forked child, which has none of the memory."""
    State.recording = None


os.register_at_fork(after_in_child=_forget)


@contextmanager
def record(path: str | os.PathLike[str] | None = None) -> Iterator[Timeline]:
    """Record during a block which memory this process maps and unmaps, and write the timeline to `path` at its end.

    It shows the memory of pools, buffers, arrays and segments, in bytes that are charged: a spare page that a pool uses
    again is no event. The last `MOST_EVENTS` events are kept. Without a `path`, `Timeline.save` writes one. Raises
    `InvalidRequest` if another recording is on, and at the end what `Timeline.save` raises.
    """
    if State.recording is not None:
        raise InvalidRequest("another recording is on in this process: end it first")
    recording = State.recording = Timeline()
    try:
        yield recording
    finally:
        State.recording = None
        if path is not None:
            recording.save(path)


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    """Return the call of the library, and the program's lines above it, as text: a frame would keep its variables."""
    call = ""
    found: list[str] = []
    waiting = here.task.caller if here.task is not None else None
    while frame is not None and len(found) < MOST_FRAMES:
        code, module = frame.f_code, str(frame.f_globals.get("__name__")).partition(".")[0]
        if module not in _OURS:
            found.append(f"{code.co_qualname} {code.co_filename}:{frame.f_lineno}")
        elif not found and module == __name__.partition(".")[0] and "<locals>" not in code.co_qualname:
            call = code.co_qualname
        frame = frame.f_back
        if frame is None:  # this thread works for the main thread, which waits
            frame, waiting = waiting, None
    return (call, *found)


_PAGE = """<!doctype html><meta charset="utf-8"><title>membroker: a timeline</title>
<style>body{font:14px sans-serif;margin:2em}svg{width:100%;height:320px;background:#f4f4f4}
#line{fill:#9ec5e8;stroke:#1f5f99;vector-effect:non-scaling-stroke}#at{stroke:#c33;vector-effect:non-scaling-stroke}
pre{background:#f4f4f4;padding:1em;min-height:14em;overflow:auto}td{padding:0 1em 0 0;vertical-align:top}</style>
<h3 id="head"></h3>
<svg viewBox="0 0 1000 300" preserveAspectRatio="none"><path id="line"/><line id="at" y2="300"/></svg>
<pre id="one">Move over the line: what was mapped or unmapped then, and by which lines.</pre>
<h3>Bytes that each line has mapped in all</h3><table id="sites"></table>
<script>
const d=DATA,r=d.rows,$=i=>document.getElementById(i),size=n=>{let u=["B","KiB","MiB","GiB","TiB"],i=0,s=n<0?"-":"+";
n=Math.abs(n);while(n>=1024&&i<4){n/=1024;i++}return s+n.toFixed(i?1:0)+" "+u[i]};
$("head").textContent=d.head+(d.leftOut?", the first "+d.leftOut+" forgotten":"");
if(r.length){const t0=r[0][0],t1=Math.max(r[r.length-1][0],t0+1e-6),b0=r[0][2]-r[0][1];
let top=1,bottom=Math.min(0,b0);for(const e of r){top=Math.max(top,e[2]);bottom=Math.min(bottom,e[2])}
const x=t=>(t-t0)/(t1-t0)*1000,y=n=>295-(n-bottom)/(top-bottom)*290;
let p="M0 300V"+y(b0);for(const e of r)p+="H"+x(e[0])+"V"+y(e[2]);$("line").setAttribute("d",p+"H1000V300Z");
document.querySelector("svg").onmousemove=m=>{const b=m.currentTarget.getBoundingClientRect(),
t=t0+(m.clientX-b.left)/b.width*(t1-t0);let a=0,z=r.length-1;while(a<z){const c=a+z+1>>1;r[c][0]<=t?a=c:z=c-1}
const e=r[a];for(const k of["x1","x2"])$("at").setAttribute(k,x(e[0]));
$("one").textContent=[e[0].toFixed(3)+" s: "+size(e[1])+" of a "+e[3]+", then "+size(e[2]),
...d.stacks[e[4]]].join("\\n")};
const sites=new Map();for(const e of r)if(e[1]>0)sites.set(e[4],(sites.get(e[4])||0)+e[1]);
for(const[s,n]of[...sites].sort((a,b)=>b[1]-a[1]).slice(0,50)){const row=$("sites").insertRow();
row.insertCell().textContent=size(n);row.insertCell().textContent=d.stacks[s].slice(0,2).join("  ")}}
</script>
"""
