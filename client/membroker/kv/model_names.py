"""The broker's name for what an engine serves, if nobody has given it one.

Owns what becomes of a name that the broker's grammar does not allow. Two models must never get one name by it: they
would have one limit and one guarantee. The same model must get the same name in each of an engine's processes and after
each start, because the operator's configuration has it. It knows no engine.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress

from ..ext import names

_DIGITS = 8
_IN_HUB = re.compile(r"models--([^/]+)/snapshots/[^/]+")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".npz", ".gguf", ".json")
_SAMPLES = 64
"""About how many pieces of a checkpoint are read. Each may be a request to a network's storage."""
_PIECE_BYTES = 4096


def model_name(served: str) -> str:
    """Return the broker's name for a served name, which may be the path of a checkpoint.

    A name that the broker allows stays as it is. A snapshot in the cache of Hugging Face has its name there. Anything
    else is the last part of the path, with `-` for what is not allowed, and a digest of all of it, and of the
    checkpoint if it is there: containers have theirs at the same path, such as /mnt/models.
    """
    if names.valid_model(served):
        return served
    path = os.path.realpath(served) if os.path.exists(served) else served
    hub = _IN_HUB.fullmatch("/".join(path.split("/")[-3:]))
    if hub and names.valid_model(known := hub[1].replace("--", "/", 1)):
        return known
    contents: list[tuple[str, int, str]] = []
    with suppress(OSError, ValueError):  # it is not on this machine
        contents = [(os.path.basename(file), stat.st_size, found) for file, stat, found in files_of(path)]
    digest = hashlib.sha256(repr((path, contents)).encode(errors="surrogateescape")).hexdigest()[:_DIGITS]
    last = re.sub(r"[^A-Za-z0-9._-]+", "-", path.rstrip("/").rpartition("/")[2])[
        : names.MAX_NAME_CHARACTERS - _DIGITS - 1
    ]
    return f"{last.strip('-.') or 'model'}-{digest}"


def files_of(path: str) -> list[tuple[str, os.stat_result, str]]:
    """Return the path, the status and a sample of each file of a checkpoint: a directory, or one file.

    Raises `OSError`.
    """
    files = [path]
    if not os.path.isfile(path):
        files = [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(_WEIGHTS)]
    stats = [os.stat(file) for file in files]
    return [(file, stat, _sample(file, stat.st_size, len(files))) for file, stat in zip(files, stats, strict=True)]


def _sample(path: str, size: int, files: int) -> str:
    """Return a digest of pieces of a file of `size` bytes, at equal distances, for a checkpoint of so many files.

    Fine-tuned models of one base have the same sizes, and differ in these pieces.
    """
    digest, pieces = hashlib.sha256(), max(2, _SAMPLES // files)
    with open(path, "rb", buffering=0) as file:
        for number in range(pieces):
            file.seek((2 * number + 1) * max(0, size - _PIECE_BYTES) // (2 * pieces))
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
