"""`import membroker` costs nothing that is not used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import membroker

HEAVY = ("grpc", "google", "torch", "cuda", "numpy", "cupy", "rich")


def modules_after(program: str) -> set[str]:
    script = f"{program}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_import_is_light() -> None:
    """A launcher imports membroker to catch its errors; it must not pay for gRPC, protobuf or a framework."""
    program = "import membroker; membroker.OutOfMemory; membroker.Resumed; membroker.__version__; dir(membroker)"
    assert not modules_after(program) & set(HEAVY)


def test_connecting_needs_no_grpc() -> None:
    """The error for an absent broker comes before gRPC would be loaded, which takes a tenth of a second."""
    program = "import membroker, contextlib\nwith contextlib.suppress(membroker.BrokerUnavailable): "
    program += "membroker.connect('/nowhere', timeout=0.01)"
    assert not modules_after(program) & {"grpc", "torch", "cuda", "numpy"}


def test_about_fifty_names_are_enough_for_a_program() -> None:
    """What only calls return, or only an operator or an extension needs, is in a module of its own."""
    assert len(membroker.__all__) <= 50


@pytest.mark.parametrize("name", membroker.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(membroker, name) is not None
    assert name in dir(membroker)


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="Pool"):
        membroker.Pool
