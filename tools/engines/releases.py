"""The releases of an engine, from the package index that pip is configured for.

Owns the index and its files. It has no address of an index: pip knows it. A file is used only if it has the digest that
the index says, and nothing of it is run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from time import monotonic
from typing import IO, Any, Final
from urllib.parse import urljoin
from urllib.request import Request, urlopen

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

SECONDS: Final = 60.0
"""How long the index may say nothing."""
MOST_SECONDS: Final = 300.0
"""How long one file may take."""
MOST_INDEX_BYTES: Final = 64 << 20
MOST_FILE_BYTES: Final = 512 << 20
MOST_SOURCE_BYTES: Final = 256 << 20
"""How much Python a release may have in all."""


class Unavailable(Exception):
    """The index or a file cannot be had here. The message says why."""


@dataclass(frozen=True)
class Release:
    """A version of an engine, and the smallest file that has its source."""

    version: Version
    date: datetime
    url: str
    filename: str
    sha256: str


@cache
def index_url() -> str:
    """Return the address of the index that pip uses, which its help says with what was configured."""
    command = [sys.executable, "-m", "pip", "download", "--help"]
    environment = {**os.environ, "COLUMNS": "1000"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    found = re.search(r"--index-url <url>.*?\(default:? (\S+?)\)", done.stdout)
    if found is None:
        raise Unavailable("pip names no index")
    return found[1]


def releases(name: str, index: str) -> list[Release]:
    """Return the releases of the package `name`, the oldest first, without those that were withdrawn or are trials."""
    address = f"{index.rstrip('/')}/{name}/"
    page = _fetch(address, MOST_INDEX_BYTES, accept="application/vnd.pypi.simple.v1+json")
    try:
        return list(read_index(json.loads(page), address))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Unavailable(f"{address} has no list of files with dates and digests: {error!r}") from error


def read_index(document: Any, address: str) -> Iterator[Release]:
    """Yield the releases that an index lists, as JSON. Its format is that of PEP 691 and PEP 700."""
    files: dict[Version, list[Mapping[str, Any]]] = {}
    for file in document["files"]:
        version = _version_of(file["filename"])
        if version is not None and not version.is_prerelease and not file.get("yanked"):
            files.setdefault(version, []).append(file)
    for version in sorted(files):
        smallest = min(files[version], key=lambda file: file["size"])
        date = min(datetime.fromisoformat(file["upload-time"]) for file in files[version])
        url, digest = urljoin(address, smallest["url"]), smallest["hashes"]["sha256"]
        yield Release(version, date, url, PurePosixPath(smallest["filename"]).name, digest)


def _version_of(filename: str) -> Version | None:
    """Return the version of a wheel for Linux or of a source archive. Other files are left out."""
    try:
        if filename.endswith(".whl"):
            _, version, _, tags = parse_wheel_filename(filename)
            return version if any(tag.platform == "any" or "linux" in tag.platform for tag in tags) else None
        return parse_sdist_filename(filename)[1] if filename.endswith(".tar.gz") else None
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None


def chosen(found: list[Release], now: datetime, window: timedelta, listed: Callable[[Version], bool]) -> list[Release]:
    """Return those to compare: the newest, those within the window, and those that membroker lists."""
    return [one for one in found if one is found[-1] or now - one.date <= window or listed(one.version)]


def fetch(release: Release, directory: Path) -> Path:
    """Return the release's file in `directory`, fetched if it is not there. Its digest is checked in either case."""
    path = directory / release.filename
    content = path.read_bytes() if path.exists() else _fetch(release.url, MOST_FILE_BYTES)
    if hashlib.sha256(content).hexdigest() != release.sha256:
        path.unlink(missing_ok=True)
        raise Unavailable(f"{release.filename} has not the digest that the index says")
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_bytes(content)
        part.replace(path)
    return path


def python_of(path: Path, package: str) -> dict[str, str]:
    """Return the source of each Python file of `package` in a wheel or source archive, by its path: `vllm/a.py`."""
    found: dict[str, str] = {}
    total = 0
    try:
        for name, size, read in _wheel(path) if path.suffix == ".whl" else _source_archive(path):
            parts = PurePosixPath(name).parts
            if parts[:1] != (package,) or not name.endswith(".py"):
                continue
            total += size
            if total > MOST_SOURCE_BYTES:
                raise Unavailable(f"{path.name} has more than {MOST_SOURCE_BYTES >> 20} MiB of Python")
            found["/".join(parts)] = read().decode(errors="replace")
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise Unavailable(f"{path.name} cannot be unpacked: {error}") from error
    if not found:
        raise Unavailable(f"{path.name} has no Python package {package}")
    return found


_Members = Iterable[tuple[str, int, Callable[[], bytes]]]


def _wheel(path: Path) -> _Members:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            yield member.filename, member.file_size, partial(archive.read, member)


def _source_archive(path: Path) -> _Members:
    with tarfile.open(path, "r|gz") as archive:
        for member in archive:
            file: IO[bytes] | None = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                # The package is in a directory with the release's name, or in `src` or `python` of it.
                inner = re.sub(r"^[^/]*/((src|python)/)?", "", member.name)
                yield inner, member.size, file.read


def _fetch(address: str, most: int, accept: str = "*/*") -> bytes:
    try:
        with urlopen(Request(address, headers={"Accept": accept}), timeout=SECONDS) as answer:
            deadline = monotonic() + MOST_SECONDS
            content = bytearray()
            while (part := answer.read(1 << 20)) and len(content) <= most and monotonic() < deadline:
                content += part
    except (OSError, HTTPException, ValueError) as error:  # no network, no such page, no address at all
        raise Unavailable(f"{address}: {error}") from error
    if part:
        raise Unavailable(f"{address} has more than {most >> 20} MiB, or takes more than {MOST_SECONDS:.0f} s")
    return bytes(content)
