"""A directory with a keeper, and the daemon's limit of descriptors in this process. Tests may be coroutines."""

from __future__ import annotations

import inspect
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.keepers import end_keeper
from tests.support.mirrors import play


@pytest.fixture(autouse=True)
def descriptor_limit() -> Iterator[None]:
    """The daemon's side runs in this process here, and the daemon raises its soft limit when it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory of mode 0700; the keeper in it ends with the test."""
    made = Path(tempfile.mkdtemp(prefix="mb-"))
    yield made
    end_keeper(made / "keeper.sock")
    shutil.rmtree(made)


@pytest.fixture
def path(directory: Path) -> Path:
    return directory / "keeper.sock"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Play a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    play(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}))
    return True
