"""A small model that trains within a limit, and reaches the limit: its weights and gradients are borrowed.

python examples/torch_training.py     (MEMBROKER_ENDPOINT, or the default endpoint; a GPU or the host driver)

`TorchMemory` (docs/frameworks.md) borrows all that torch allocates on a GPU, activations and workspaces too.
"""

from __future__ import annotations

import membroker

try:
    import torch

    from membroker.adapters.torch import device_of, move_to_pool
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch: {error}") from None


def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Train one step: it learns to add. Return the loss."""
    numbers = torch.randn(64, 8, device=next(module.parameters()).device)
    loss = torch.nn.functional.mse_loss(module(numbers), numbers.sum(1, keepdim=True))
    optimizer.zero_grad(set_to_none=False)  # the gradients stay where they are
    loss.backward()
    optimizer.step()
    return float(loss.item())


def main() -> None:
    """Train inside a limit."""
    torch.manual_seed(0)
    with membroker.connect() as client, client.model("training", limit="256MiB") as model:
        module = torch.nn.Sequential(torch.nn.Linear(8, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
        module.to(device_of(model.driver.device))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
        first = step(module, optimizer)  # from here on there are gradients
        gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
        pool = move_to_pool([*module.parameters(), *gradients], model)
        last = [step(module, optimizer) for _ in range(50)][-1]
        print(f"loss {first:.3f} to {last:.3f}; {model.used_bytes >> 20} MiB are borrowed")
        borrowed = range(pool.base_address, pool.base_address + pool.capacity)
        print(f"every gradient is in borrowed memory: {all(one.data_ptr() in borrowed for one in gradients)}")
        try:
            model.allocate("1GiB")
        except membroker.OutOfMemory as error:
            print(f"refused: {error}")
        print(f"training goes on, loss {step(module, optimizer):.3f}")
        del module, optimizer, gradients  # else its tensors would keep the memory
        pool.close()


if __name__ == "__main__":
    try:
        main()
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
