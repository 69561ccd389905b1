"""What the tests on a GPU share: the GPU itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from membroker.vmm import DriverUnavailable
from membroker.vmm.cuda.driver import CudaDriver


def pytest_configure(config: pytest.Config) -> None:
    """Know the marker of pytest-timeout where that is not installed: there it means nothing, and harms nothing."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): for pytest-timeout, which is not installed here")


@pytest.fixture(scope="session")
def card() -> Iterator[CudaDriver]:
    """The first card as a broker sees it, without a context: its figures are NVML's."""
    try:
        driver = CudaDriver()
    except DriverUnavailable as error:
        pytest.skip(f"no NVIDIA card to test on: {error}")
    yield driver
    driver.close()
