"""The command `membroker top`: all brokers of this machine live on a terminal, by model or by tenant.

`readers` reads their books, and `screen` shows them.
"""

from __future__ import annotations

import argparse
import os
import sys

from . import commands
from .commands import Commands
from .readers import Readers

_NOTES = """
Each line is a model or, after you press t, a tenant. `share` is what a model gets, by weight, while requests wait.
`recalled` is what its programs are asked to release, and `late` what they did not release in time or keep whole.
`rate` is how many extents were borrowed and released per second. `refused` is how many requests were refused since
the model or the daemon began. In Kubernetes, if the broker can see a pod, `pod` is the first one that the line has
sessions in, and how many others there are. A line is red while something of it is late, and yellow for a minute after
a refusal. A narrow terminal has no room for the columns on the right: 125 characters show all but the pods. If a
broker does not answer, its last numbers stay for a while, with their time; then the reason replaces them until the
broker answers again.

keys:
  u g s w r d n    sort by used, guarantee, share, waiting, rate, refused, name
  R                reverse the order
  t                tenants or models
  /                show only names and pods that contain a text: type it, Enter; an empty one shows all
  up down          scroll
  h                show or hide the keys
  q                quit (or Ctrl-C)

It needs a terminal. In a script use `membroker models --json`."""


def add_command(subparsers: Commands) -> None:
    """Add `top`."""
    parser = commands.add(
        subparsers,
        "top",
        run,
        "tenants and models of all devices, live on a terminal",
        "top\ntop --interval 0.5\ntop --device 1",
        _NOTES,
        admin=True,
        lists=False,
    )
    parser.add_argument(
        "--interval", metavar="SECONDS", type=commands.seconds, default=1.0, help="how often the books are read"
    )


def run(options: argparse.Namespace) -> int:
    """Show the books until a key or a signal ends it."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        options.parser.error("there is no terminal: use `membroker models`, with --json for a program")
    readers = Readers(options.endpoint, options.interval, admin=options.admin)
    readers.first()
    commands.leave_at_signals()  # the terminal is put back at an exit, and not at a kill
    from .screen import show  # not every Python has curses

    try:
        status = show(readers.snapshots)
    except SystemExit as leaving:  # a signal
        status = int(leaving.code or 0)
    except KeyboardInterrupt:
        status = 130
    sys.stdout.flush()
    # The readers' threads may be inside gRPC. Python can crash if it ends its interpreter meanwhile.
    os._exit(status)
