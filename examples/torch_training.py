"""A torch worker that trains a small model within a limit, and reaches the limit.

python examples/torch_training.py [STEPS]     (MEMBROKER_ENDPOINT, or the default endpoint)

On a GPU torch borrows all that it allocates: weights, activations, gradients and workspaces. With the host driver,
where torch has no pools, the weights and gradients are in a borrowed buffer.
"""

from __future__ import annotations

import argparse
from typing import Any

import membroker

try:
    import torch

    from membroker.adapters.torch import TorchMemory, tensor
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch: {error}") from None

LIMIT = "256MiB"


def small_model() -> Any:
    """Return the model that is trained: it learns to add."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))


def train(module: Any, device: Any, steps: int) -> tuple[float, float]:
    """Train, and return the first loss and the last."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        numbers = torch.randn(64, 8, device=device)
        loss = torch.nn.functional.mse_loss(module(numbers), numbers.sum(1, keepdim=True))
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def on_a_gpu(model: membroker.Model, steps: int) -> None:
    """Train in the broker's memory, then ask for more than the limit."""
    with TorchMemory(model) as memory:
        with memory.use():
            module = small_model().to(memory.device)
            first, last = train(module, memory.device, steps)
            print(f"trained {steps} steps, loss {first:.3f} to {last:.3f}; torch has {memory.lent_bytes >> 20} MiB")
            brokered = all(memory.owns(weight.grad) for weight in module.parameters())
            print(f"every gradient is in borrowed memory: {brokered}", flush=True)
            try:
                torch.empty(1 << 30, dtype=torch.uint8, device=memory.device)
            except torch.OutOfMemoryError:
                print(f"torch refused it; the broker said: {memory.last_denial}", flush=True)
            again, last = train(module, memory.device, 1)
            print(f"training goes on, loss {again:.3f}", flush=True)
        del module


def on_the_host(model: membroker.Model, steps: int) -> None:
    """Train with weights and gradients in one borrowed buffer, then ask for more than the limit."""
    module = small_model()
    size = sum(2 * weight.nbytes for weight in module.parameters())
    with model.allocate(size) as buffer:
        offset = 0
        for weight in module.parameters():
            weight.data = tensor(buffer, weight.dtype, weight.shape, offset).copy_(weight.data)
            weight.grad = tensor(buffer, weight.dtype, weight.shape, offset + weight.nbytes)
            offset += 2 * weight.nbytes
        first, last = train(module, "cpu", steps)
        print(f"trained {steps} steps, loss {first:.3f} to {last:.3f}; in {buffer.extent_size >> 20} MiB")
        places = [weight.grad.data_ptr() - buffer.address for weight in module.parameters()]
        print(f"every gradient is in borrowed memory: {all(0 <= place < size for place in places)}", flush=True)
        try:
            model.allocate("1GiB")
        except membroker.OutOfMemory as error:
            print(f"refused: {error}", flush=True)
        again, last = train(module, "cpu", 1)
        print(f"training goes on, loss {again:.3f}", flush=True)
        del module, weight


def main(steps: int) -> None:
    """Train inside a limit."""
    with membroker.connect() as client:
        model = client.register_model("training", limit=LIMIT)
        (on_the_host if client.driver_kind == "host" else on_a_gpu)(model, steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train inside a limit.")
    parser.add_argument("steps", nargs="?", metavar="STEPS", type=int, default=200, help="default: 200")
    try:
        main(parser.parse_args().steps)
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
