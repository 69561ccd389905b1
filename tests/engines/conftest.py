"""What real engines leave behind goes with the run; and what vLLM's tests share."""

from __future__ import annotations

import os

import pytest
from tests.support.vllm_engine import BUILDS, Build, write_plugins
from tests.support.vllm_engine import sockets_of_vllm as sockets_of_vllm


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def build(request: pytest.FixtureRequest) -> Build:
    """vLLM's CPU build on the host driver, or the one for a GPU: each runs where it is installed."""
    from vllm.platforms import current_platform

    build = BUILDS[request.param]
    if build.on_gpu == current_platform.is_cpu():
        pytest.skip("this vLLM was built for another device")
    return build


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of an engine that computes with the weights in place, as those on a GPU do. It can be held up."""
    plugins = {name: f"tests.support.vllm_{name}:register" for name in ("torch_linear", "held")}
    directory = write_plugins(tmp_path_factory.mktemp("plugins"), **plugins)
    return {"PYTHONPATH": os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])}
