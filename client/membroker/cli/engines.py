"""What `membroker run` adds to the command of an engine, so that its KV cache is elastic.

Owns how such a command is recognized, and what the user is told. What an engine needs is in
`membroker.kv.command`. It never changes an option or a variable that the user has given.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Final

ENGINES: Final = {"vllm": "vLLM", "sglang": "SGLang"}
_COMMANDS: Final = {("vllm", "serve"): "vllm", ("sglang", "serve"): "sglang"}
_MODULES: Final = {"vllm.entrypoints.openai.api_server": "vllm", "sglang.launch_server": "sglang"}


def engine_of(command: Sequence[str]) -> str | None:
    """Return the engine that a command starts, also by another program, as in `numactl -N 0 vllm serve …`."""
    for first, second in pairwise(command):
        if found := _MODULES.get(second) if first == "-m" else _COMMANDS.get((os.path.basename(first), second)):
            return found
    return None


def add(
    engine: str, command: Sequence[str], environment: Mapping[str, str], capacity: int
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment with what the engine needs, and tell the user.

    `capacity` is how many bytes of addresses its cache gets. Raises `InvalidRequest` if the command's own options keep
    the cache from being elastic.
    """
    module = import_module("membroker.kv.command")  # takes longer than the rest of `membroker run`
    words, wanted = getattr(module, engine)(command, capacity)
    variables = {name: value for name, value in wanted.items() if name not in environment}
    added_words = [
        *(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
        *map(shlex.quote, words),
    ]
    if added_words:
        print(f"membroker: {ENGINES[engine]} also gets {' '.join(added_words)}", file=sys.stderr)
    return [*command, *words], {**environment, **variables}
