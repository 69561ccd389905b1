"""What real engines leave behind goes with the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def sockets_of_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM leaves the sockets of its processes in the directory for temporary files: give them one of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path_factory.mktemp("vllm")))
        yield
