"""What the tests on a GPU share: the GPU itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from membroker.vmm import DriverUnavailable
from membroker.vmm.cuda.driver import CudaDriver


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of pytest-timeout where it is not installed. There the marker has no effect."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): for pytest-timeout, which is not installed here")


@pytest.fixture(scope="session")
def gpu() -> Iterator[CudaDriver]:
    """The first GPU as a broker sees it, without a context: its figures are NVML's."""
    try:
        driver = CudaDriver()
    except DriverUnavailable as error:
        pytest.skip(f"no NVIDIA GPU to test on: {error}")
    yield driver
    driver.close()
