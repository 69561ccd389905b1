"""A worker's driver on the fake GPU, and the host driver."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator

import pytest

from membroker.vmm import Driver, open_driver

_PRELUDE = """
import ctypes, gc, os, threading
import pytest
import cuda.bindings.driver as bindings
from membroker.errors import *
from membroker.managed.hints import *
from membroker.vmm import *
MIB = 1 << 20
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_cuda_asked.restype = ctypes.c_char_p

def asked():
    return fake.fake_cuda_asked().decode().splitlines()

def attribute(name, address, size):
    kind = getattr(bindings.CUmem_range_attribute, f"CU_MEM_RANGE_ATTRIBUTE_{name}")
    result, value = bindings.cuMemRangeGetAttribute(8 if name == "ACCESSED_BY" else 4, kind, address, size)
    assert int(result) == 0, result
    return value

HOST, NOWHERE = -1, -2
driver = open_driver("cuda", context=True)
"""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(beside_fake_cuda: Run) -> Run:
    """Run a piece of code beside the fake libraries; it has a worker's `driver`, and `asked()`."""
    return lambda code, **environment: beside_fake_cuda(_PRELUDE + textwrap.dedent(code), **environment)


@pytest.fixture
def host() -> Iterator[Driver]:
    driver = open_driver("host")
    yield driver
    driver.close()
