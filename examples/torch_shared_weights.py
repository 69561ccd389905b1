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


class Small(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """A model that answers with tokens. Its output weights are tied to its input weights, as in a small Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 32)
        self.block = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        self.head = torch.nn.Linear(32, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def generate(self, tokens: Any, max_new_tokens: int, **_options: Any) -> Any:
        """Append the most likely token, repeatedly."""
        for _ in range(max_new_tokens):
            state = self.block(torch.sin(3 * self.embed(tokens).sum(1)))
            tokens = torch.cat([tokens, self.head(state).argmax(-1, keepdim=True)], 1)
        return tokens


def build() -> Any:
    """Return the model with random weights, or without weights inside `without_weights`."""
    torch.manual_seed(0)
    if LlamaForCausalLM is None:
        return Small().eval()
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.5,  # far above the usual 0.02, so that random weights give varied answers
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def answer(module: Any, device: Any) -> list[int]:
    """Return the tokens that follow the prompt."""
    tokens = torch.tensor(PROMPT, device=device)
    with torch.no_grad():
        said = module.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False, use_cache=True
        )
    answered: list[int] = said[0].tolist()
    return answered


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
