"""Modules of torch in segments: weights that several processes share, and the examples."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.support.daemons import Daemon, until
from tests.support.sizes import MIB
from tests.support.torch_workers import run, start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_stand_once_for_several_processes(daemon: Daemon, dtype: str) -> None:
    """Three workers compute with the bytes of a fourth, and answer alike to the bit; the model is charged once."""
    publisher = start(
        daemon,
        f"""
        model = client.model("gpu")
        torch.manual_seed(0)
        net = Net(torch.{dtype}, 1024).cuda().requires_grad_(False)
        with publish_module(model, "weights", net) as segment:
            assert used() == segment.size < 2 * sum(weight.nbytes for weight in net.parameters()) + 2 * MIB
        print(digest(net), flush=True)
        sys.stdin.readline()
        charged = used()
        client.delete_segment("gpu/weights")
        print(charged // MIB)
        """,
    )
    expected = publisher.stdout.readline().strip()
    assert expected, publisher.communicate()[1]
    code = f"""
        with without_weights():
            net = Net(torch.{dtype}, 1024)
        with client.attach("gpu/weights") as segment:
            attach_module(segment, net)
        assert net.head.weight is net.embed.weight and net.shift.is_cuda
        assert not client.closed
        print(digest(net), flush=True)
        sys.stdin.readline()
        print(digest(net))
        """
    workers = [start(daemon, code) for _ in range(3)]
    for worker in workers:
        found = worker.stdout.readline().strip()
        assert found == expected, worker.communicate()[1]
    used = daemon.books().lent_bytes
    out, err = publisher.communicate("\n", timeout=60)
    assert publisher.returncode == 0, err
    assert int(out) == used // MIB
    assert daemon.books().lent_bytes == used, "deleted, and still mapped by three"
    for worker in workers:
        out, err = worker.communicate("\n", timeout=60)
        assert (worker.returncode, out.strip()) == (0, expected), err
    until(lambda: daemon.books().lent_bytes + daemon.books().releasing_bytes == 0)


def test_fp8_weights_are_multiplied_where_they_stand(daemon: Daemon) -> None:
    """cuBLAS takes fp8 at 16 bytes only: small scales that stand before the weights do not push them off."""
    run(
        daemon,
        """
        model = client.model("gpu")
        def build():
            net = torch.nn.Module()
            net.scale = torch.nn.Parameter(torch.tensor(0.5, device="cuda"))
            weight = torch.randn(256, 256, device="cuda").to(torch.float8_e4m3fn)
            net.weight = torch.nn.Parameter(weight, requires_grad=False)
            return net
        torch.manual_seed(0)
        net = build()
        publish_module(model, "weights", net).close()
        copy = build()
        with client.attach("gpu/weights") as segment:
            attach_module(segment, copy)
        assert copy.weight.data_ptr() % 256 == 0
        assert torch.equal(copy.weight.view(torch.uint8), net.weight.view(torch.uint8))
        if torch.cuda.get_device_capability() >= (8, 9):
            sample, one = torch.randn(64, 256, device="cuda").to(torch.float8_e4m3fn), torch.tensor(1.0, device="cuda")
            @torch.no_grad()
            def multiply(net):
                scales = dict(scale_a=one, scale_b=net.scale)
                return torch._scaled_mm(sample, net.weight.t(), out_dtype=torch.bfloat16, **scales)
            assert torch.equal(multiply(copy), multiply(net))
        client.delete_segment("gpu/weights")
        """,
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch_training.py", ["every gradient is in borrowed memory: True", "refused: the model"]),
        ("growable_torch.py", ["2200 tokens, 6 MiB are charged", "where they were: True"]),
        ("sparse_torch.py", ["two requests on cuda: 32 MiB", "a third is refused: 16 MiB asked", "unchanged: True"]),
        ("torch_turns.py", ["worker 2 is refused", "worker 2 serves with 32 MiB"]),
        ("torch_shared_weights.py", ["3 of 3 workers answer", "once for all"]),
        pytest.param(
            "transformers_torch_memory.py",
            ["the same tokens: True"],
            marks=pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed here"),
        ),
    ],
)
def test_the_examples(daemon: Daemon, name: str, words: list[str]) -> None:
    """As on the host twin, on the daemon."""
    environment = {**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint())}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(word in done.stdout for word in words), done.stdout
    until(lambda: not daemon.sessions() and daemon.books().lent_bytes == 0)
