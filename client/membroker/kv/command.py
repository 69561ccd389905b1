"""What the command that starts an engine lacks for an elastic KV cache. docs/vllm.md and docs/sglang.md say why.

Owns how a command line is read, and what each engine needs in it and in its environment. It imports no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Final

from ..errors import InvalidRequest
from .sglang.settings import VARIABLE

TRANSFER: Final = '{"kv_connector":"Membroker","kv_connector_module_path":"membroker.kv.vllm","kv_role":"kv_producer"}'
PAGE_TOKENS: Final = "64"
_KEY: Final = re.compile(r"^([\w-]+)[ \t]*:(.*(?:\n[ \t#].*|\n)*)", re.MULTILINE)
"""A key of a YAML file that is not in another, and all that is behind it."""


def vllm(command: Sequence[str], capacity: int) -> tuple[list[str], dict[str, str]]:
    """Return what a command of vLLM lacks: words at its end, and no variables.

    `capacity` is how many bytes of addresses its cache gets. Raises `InvalidRequest` if the command's own options keep
    the cache from being elastic.
    """
    given = _Options(command)
    transfer = given.text_of("kv-transfer-config")
    if transfer is not None and "Membroker" not in transfer:
        raise InvalidRequest(
            "--kv-transfer-config names another connector, so this KV cache would not be elastic: name Membroker in it "
            "too (a MultiConnector has both), or give `membroker run` --engine none"
        )
    needed = {
        "kv-transfer-config": TRANSFER,
        "worker-cls": "membroker.kv.vllm.Worker",
        "kv-cache-memory-bytes": str(capacity),
        "gpu-memory-utilization": "0.05",  # vLLM does not start unless this part of the GPU is free
    }
    lacking = [(f"--{name}", value) for name, value in needed.items() if given.text_of(name) is None]
    return list(chain.from_iterable(lacking)), {}


def sglang(command: Sequence[str], capacity: int) -> tuple[list[str], dict[str, str]]:
    """Return what a command of SGLang lacks: words at its end, and variables. `capacity` is as for vLLM."""
    words = [] if _Options(command).text_of("page-size") else ["--page-size", PAGE_TOKENS]
    return words, {VARIABLE: json.dumps({"capacity": capacity})}


class _Options:
    """The options in a command, and in the file that `--config` names. Of `--a.b c`, the option is `a`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._texts: dict[str, str] = {}
        for word, after in zip(command, [*command[1:], ""], strict=True):
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
                self._add(name.partition(".")[0], value if equals or after.startswith("--") else after)
        if file := self._texts.get("config"):
            try:
                text = Path(file).read_text(errors="replace")
            except (OSError, ValueError):
                return  # the engine says what is wrong with it
            for name, value in _KEY.findall(text):
                self._add(name, value)

    def text_of(self, name: str) -> str | None:
        """Return what was given for the option of this name, which may be abbreviated; None if it was not given."""
        found = [text for given, text in self._texts.items() if given and name.startswith(given)]
        return " ".join(found) if found else None

    def _add(self, name: str, value: str) -> None:
        name = name.replace("_", "-")
        self._texts[name] = " ".join([self._texts[name], value] if name in self._texts else [value])
