"""`make check-engines` compares what membroker relies on with the engines that the package index has today."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tests.support.ports import reserved_port
from tools.engines.releases import python_of
from tools.engines.sources import Sources

from membroker.kv import seams
from membroker.kv.sglang import seams as sglang
from membroker.kv.vllm import seams as vllm

ROOT = Path(__file__).parents[2]

SMALL = {
    "small/__init__.py": """
        from .lazy import Loader
        from .star import *
        from small import queue as q
        class Late(q.Queue): pass
    """,
    "small/lazy.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nowhere import Loader\n"
    "from .base.loader import Loader",
    "small/base/__init__.py": "",
    "small/base/loader.py": """
        from abc import ABC, abstractmethod
        class Loader(ABC):
            size: int
            @abstractmethod
            def load(self, model, *, device=None): ...
            @classmethod
            def make(cls, kind, /, other=1, *rest, needed, **more): ...
    """,
    "small/star.py": """
        from typing import overload
        import small.queue
        try:
            import fast
        except ImportError:
            def outside(tokens, size=4): ...
        @overload
        def both(one: int): ...
        @overload
        def both(one: str): ...
        def both(one, two): ...
        class Kind(small.queue.Queue):
            @property
            def layout(self): return 1
            @layout.setter
            def layout(self, value): ...
            def grow(self, count): super().grow(count)
    """,
    "small/queue.py": """
        from typing import Generic, TypeVar
        T = TypeVar("T")
        class Queue(Generic[T]):
            limit = 3
            def __init__(self, first, second=None): self.blocks, (self.free, _) = [], (1, 2)
            def grow(self, count): self.grown = True
            def free_blocks(self, ordered): ...
        class Small(Queue[int]): pass
    """,
}


def used(table: Mapping[str, str]) -> list[seams.Member]:
    """What a table says, by places outside of any package."""
    return [one._replace(place=one.place.removeprefix("x.")) for one in seams.members("x", table)]


MEMBERS = used(
    {
        "small:Loader": "load(model) load(model, device) make(kind, other) gone() size blocks",
        "small": "outside(tokens) outside(size) both(one) both(one, two)",
        "small:Kind": (
            "__init__(first) __init__(first, second, third) free_blocks(ordered) limit blocks free grown layout "
            "nothing @layout @limit @gone"
        ),
        "small:Late": "grow(count)",
        "small.queue:Small": "grow() blocks free_blocks",
    }
)


def test_a_source_is_read_as_the_engine_itself_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tables, once by importing the package and once by reading it: re-exports, bases, `if`, overloads."""
    files = {name: textwrap.dedent(source) for name, source in SMALL.items()}
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    imported = list(seams.differences(MEMBERS))
    assert list(Sources(files).differences(MEMBERS)) == imported
    assert len(imported) == 10, imported


def package(name: str, table: object, leave_out: str = "") -> dict[str, str]:
    """The source of an engine that has what the table of its seams names, without the attribute `leave_out`."""
    modules: dict[str, dict[str, list[str]]] = {}
    for place, member, given, is_property in table.MEMBERS:
        module, _, kind = place.partition(":")
        lines = modules.setdefault(module, {}).setdefault(kind, [])
        if is_property:
            lines += ["@property", f"def {member}(self): ..."]
        elif given is not None:
            lines.append(f"def {member}({'self, ' if kind else ''}{', '.join(given)}): ...")
        elif member != leave_out:
            lines.append(f"{member} = 1")
    files = {}
    for module, kinds in modules.items():
        lines = [*kinds.pop("", [])]
        for kind, members in kinds.items():
            lines += [f"class {kind}:", *(f"    {one}" for one in members or ["..."])]
        is_package = any(other.startswith(f"{module}.") for other in modules)
        files[module.replace(".", "/") + ("/__init__.py" if is_package else ".py")] = "\n".join(lines)
    return files


class Index:
    """A package index in a directory, which an HTTP server shows."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files: dict[str, list[Mapping[str, object]]] = {"vllm": [], "sglang": []}

    def add(self, name: str, version: str, source: Mapping[str, str], days: float, **more: object) -> None:
        filename = f"{name}-{version}-py3-none-manylinux_2_28_x86_64.whl"
        with zipfile.ZipFile(self.directory / filename, "w") as archive:
            for path, text in source.items():
                archive.writestr(path, text)
        content = (self.directory / filename).read_bytes()
        self.files[name].append(
            {
                "filename": filename,
                "url": f"../../{filename}",
                "size": len(content),
                "hashes": {"sha256": hashlib.sha256(content).hexdigest()},
                "upload-time": (datetime.now(UTC) - timedelta(days=days)).isoformat().replace("+00:00", "Z"),
                **more,
            }
        )

    @contextmanager
    def served(self) -> Iterator[str]:
        for name, files in self.files.items():
            page = self.directory / "simple" / name / "index.html"  # what the server sends for the directory
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(json.dumps({"files": files}))

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *arguments: object) -> None: ...

        with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(self.directory))) as server:
            thread = Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/simple"
            finally:
                server.shutdown()
                thread.join()


def a_version_of(table: object) -> str:
    """A version that the engine's table lists."""
    listed = getattr(table, "TESTED")  # noqa: B009  # each table has it
    newest = listed if isinstance(listed, str) else listed[-1]
    return f"{newest}0" if newest.endswith(".") else str(newest)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    (tmp_path / "index").mkdir()
    made = Index(tmp_path / "index")
    made.add("vllm", a_version_of(vllm), package("vllm", vllm), days=500)
    made.add("sglang", a_version_of(sglang), package("sglang", sglang), days=500)
    return made


def check_engines(index: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.engines", *arguments]
    environment = {**os.environ, "PIP_INDEX_URL": index, "PIP_NO_INDEX": "0", "NO_PROXY": "*", "no_proxy": "*"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_tree_that_nobody_changed_passes_whatever_is_published(index: Index, tmp_path: Path) -> None:
    """A line for what is new, and nothing of what is old, a trial or withdrawn."""
    index.add("vllm", "900.1.0", package("vllm", vllm), days=70)
    index.add("vllm", "900.2.0", package("vllm", vllm), days=50)
    index.add("vllm", "900.3.0", package("vllm", vllm, leave_out="null_block"), days=1)
    index.add("vllm", "900.4.0rc1", {}, days=1)
    index.add("vllm", "900.5.0", {}, days=1, yanked="it was broken")
    with index.served() as url:
        done = check_engines(url, "--keep", str(tmp_path / "kept"))
        strict = check_engines(url, "--keep", str(tmp_path / "kept"), "--strict")
    assert done.stderr == strict.stderr == ""
    assert (done.returncode, strict.returncode) == (0, 1)
    assert strict.stdout == done.stdout
    rows = [line.split(maxsplit=4) for line in done.stdout.splitlines()[1:5]]
    assert [(row[0], row[1], row[3], row[4]) for row in rows] == [
        ("vllm", a_version_of(vllm), "0", "tested, and as it was then"),
        ("vllm", "900.2.0", "0", "not tested; has all that is used"),
        ("vllm", "900.3.0", "1", "NOT TESTED, AND DIFFERS"),
        ("sglang", a_version_of(sglang), "0", "tested, and as it was then"),
    ]
    assert done.stdout.splitlines()[5:] == ["vllm 900.3.0: vllm.v1.core.block_pool:BlockPool has no null_block"]
    assert len(list((tmp_path / "kept").iterdir())) == 4


def test_a_tested_release_that_differs_is_a_failure(index: Index) -> None:
    """Somebody added an attribute to a table, and this release does not have it."""
    index.files["vllm"].clear()
    index.add("vllm", a_version_of(vllm), package("vllm", vllm, leave_out="null_block"), days=500)
    with index.served() as url:
        done = check_engines(url)
    assert done.returncode == 1
    assert "TESTED, AND DIFFERS" in done.stdout


def test_a_machine_without_an_index_leaves_it_out_with_a_line() -> None:
    url = f"http://127.0.0.1:{reserved_port()}/simple"
    done, strict = check_engines(url), check_engines(url, "--strict")
    assert (done.returncode, strict.returncode, done.stderr) == (0, 1, "")
    assert done.stdout.count("left out") == 2
    assert f"vllm ?: {url}/vllm/: " in done.stdout


def test_the_python_of_a_source_archive(tmp_path: Path) -> None:
    """Of the package, and not of tests or other languages beside it."""
    path = tmp_path / "vllm-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("vllm/a.py", "tests/vllm/b.py", "python/vllm/c.py", "vllm/d.cu", "../vllm/e.py"):
            member = tarfile.TarInfo(f"vllm-1.0/{name}")
            member.size = 1
            archive.addfile(member, io.BytesIO(b"1"))
    assert python_of(path, "vllm") == {"vllm/a.py": "1", "vllm/c.py": "1"}
