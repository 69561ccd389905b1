"""Several torch workers share one copy of the weights of a transformers model, and all answer the same.

python examples/torch_shared_weights.py [WORKERS]     (MEMBROKER_ENDPOINT, or the default endpoint; GPU or host driver)

The model is a tiny Llama with random weights, so nothing is downloaded. Without transformers, a small
model made with torch alone is used.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from typing import Any

import membroker

try:
    import torch

    from membroker.adapters.torch import attach_module, device_of, publish_module, without_weights
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch: {error}") from None

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    LlamaForCausalLM = None

PROMPT = [[11, 7, 42, 3]]
WORDS = 64


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


def worker(number: int, answers: Any) -> None:
    """Attach the weights, answer, and print the tokens."""
    with membroker.connect(client=f"worker-{number}") as client:
        with without_weights():
            module = build()
        with client.attach("shared/weights") as segment:
            attach_module(segment, module)
            device = device_of(segment.span(0, 1).device)
        answers.put((number, answer(module, device)))


def main(count: int) -> None:
    """Publish the weights, start the workers, and compare."""
    print(f"the model is {build().__class__.__name__}", flush=True)
    with membroker.connect() as client:
        model = client.model("shared")
        with publish_module(model, "weights", build()) as segment:
            print(f"published {len(segment.index())} tensors in {segment.size >> 20} MiB", flush=True)
            expected = answer(build().to(device_of(segment.span(0, 1).device)), device_of(segment.span(0, 1).device))
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        workers = [context.Process(target=worker, args=(number, answers)) for number in range(count)]
        for one in workers:
            one.start()
        alike = [answers.get(timeout=300)[1] == expected for _ in workers]
        for one in workers:
            one.join()
        print(f"{sum(alike)} of {count} workers answer {expected[len(PROMPT[0]) :]}", flush=True)
        used = model.used_bytes
        print(f"the model is charged {used >> 20} MiB, once for all workers", flush=True)
        client.delete_segment("shared/weights")
    sys.exit(0 if all(alike) else 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Publish weights once, and attach them in WORKERS processes.")
    parser.add_argument("workers", nargs="?", metavar="WORKERS", type=int, default=3, help="default: 3")
    try:
        main(parser.parse_args().workers)
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
