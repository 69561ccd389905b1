"""Workers that use PyTorch on a GPU, each in a process of its own: an allocator is a process's for good.

A hang or a fault of one must not be the others'. A worker that hangs says where each of its threads stood.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping

from .daemons import Daemon, until

SECONDS = 120

_PRELUDE = f"""
import contextlib, faulthandler, gc, hashlib, sys, threading
faulthandler.dump_traceback_later({SECONDS}, exit=True)
import torch
import membroker
from membroker.adapters.torch import TorchMemory, attach_module, publish_module, tensor, without_weights
MIB = 1 << 20
client = membroker.connect(sys.argv[1])

def used():
    return model.stats().books["device"].used_bytes

def digest(net):
    tokens = torch.arange(64, device="cuda").view(4, 16)
    return hashlib.sha256(net(tokens).float().cpu().numpy().tobytes()).hexdigest()

class Net(torch.nn.Module):
    def __init__(self, dtype=torch.float32, width=256):
        super().__init__()
        self.embed = torch.nn.Embedding(64, width, dtype=dtype)
        self.inner = torch.nn.Linear(width, width, dtype=dtype)
        self.head = torch.nn.Linear(width, 64, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.full((width,), 0.5), persistent=False)
    def forward(self, tokens):
        state = self.embed(tokens)
        return self.head(torch.relu(self.inner(state + self.shift.to(state.dtype))))
"""


def start(daemon: Daemon, code: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a worker of tenant red that runs `code` after the prelude."""
    command = [sys.executable, "-c", _PRELUDE + textwrap.dedent(code), str(daemon.endpoint())]
    env = {**os.environ, **(environment or {})}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def finish(worker: subprocess.Popen[str]) -> list[str]:
    """Return the lines that a worker wrote; it ended with status 0."""
    out, err = worker.communicate(timeout=SECONDS + 60)
    assert worker.returncode == 0, f"{out}\n{err}"
    return out.splitlines()


def run(daemon: Daemon, code: str, environment: Mapping[str, str] | None = None) -> list[str]:
    lines = finish(start(daemon, code, environment))
    until(lambda: not daemon.sessions())
    until(lambda: daemon.books().lent_bytes + daemon.books().releasing_bytes == 0)
    return lines
