"""Several torch workers share one copy of a module's weights, and all answer the same.

python examples/torch_shared_weights.py     (MEMBROKER_ENDPOINT, or the default endpoint; a GPU or the host driver)
"""

from __future__ import annotations

import multiprocessing

import membroker

try:
    import torch

    from membroker.adapters.torch import attach_module, device_of, publish_module, without_weights
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch: {error}") from None

WORKERS = 3


def build() -> torch.nn.Module:
    """Return the model, with random weights or, inside `without_weights`, with none."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))


def answer(module: torch.nn.Module) -> int:
    """Return what the model says."""
    weight = next(module.parameters())
    with torch.no_grad():
        return int(module(torch.linspace(-1, 1, 64, device=weight.device)).argmax())


def worker(number: int) -> int:
    """Attach the weights, and answer. As the module lives, so does the memory, also when the segment is closed."""
    with without_weights():
        module = build()
    with membroker.connect(client=f"worker-{number}") as client, client.attach("shared/weights") as segment:
        return answer(attach_module(segment, module))


def main() -> None:
    """Publish the weights, start the workers, and compare."""
    with membroker.connect() as client, client.model("shared") as model:
        publish_module(model, "weights", build()).close()
        expected = answer(build().to(device_of(model.driver.device)))
        with multiprocessing.get_context("spawn").Pool(WORKERS) as workers:  # no session survives a fork
            answers = workers.map(worker, range(WORKERS), chunksize=1)
        print(f"{answers.count(expected)} of {WORKERS} workers answer {expected}")
        print(f"the model is charged {model.used_bytes >> 20} MiB, once for all")
        client.delete_segment("shared/weights")


if __name__ == "__main__":
    try:
        main()
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
