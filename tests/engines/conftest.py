"""What real engines leave behind goes with the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def sockets_of_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM leaves files and sockets in the directory for temporary files: give it one of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("VLLM_RPC_BASE_PATH", "TMPDIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp("vllm")))
        yield
