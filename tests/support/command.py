"""The commands `membroker` and `membrokerd --check-config`, as a shell would run them: in a process of their own."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.daemons import DEFAULTS, to_toml
from tests.support.template import run as run_python

COMMAND = ("-m", "membroker.cli.main")


def run(*arguments: object, at: Path | None = None, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run `membroker`, at this endpoint if one is given; return its exit status and what it wrote."""
    where = () if at is None else ("--endpoint", str(at))
    done = run_python([*COMMAND, *map(str, arguments), *where], env={**os.environ, **(env or {})})
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def good(*arguments: object, at: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run what must succeed without a complaint, and return what it shows."""
    status, out, err = run(*arguments, at=at, env=env)
    assert (status, err) == (0, "")
    return out


def refused(*arguments: object, at: Path | None = None, env: Mapping[str, str] | None = None, status: int = 1) -> str:
    """Run what must fail with one sentence, and return that. A wrong command line (2) shows its usage before it."""
    found, out, err = run(*arguments, at=at, env=env)
    assert (found, out) == (status, ""), err
    *before, sentence = err.splitlines()
    assert status == 2 or not before, err
    assert sentence.startswith("membroker"), err
    return sentence


def rows(out: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line) for line in out.splitlines()]


def check_config(path: Path, keys: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Check a configuration above DEFAULTS, without what is None there.

    Return the exit status, and each complaint without the name of the file.
    """
    with tempfile.TemporaryDirectory(prefix="mb-") as runtime:  # pytest's paths are too long for a socket
        given = {**DEFAULTS, "runtime_directory": f"{runtime}/run", **keys}
        path.write_text(to_toml({key: value for key, value in given.items() if value is not None}))
        done = run_python(["-m", "membrokerd.cli", "--config", str(path), "--check-config"])
    assert done.stdout == ("" if done.returncode else f"{path}: good\n"), done.stderr
    return done.returncode, [line.removeprefix(f"{path}: ") for line in done.stderr.splitlines()]
