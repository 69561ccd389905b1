"""A conversation's cache of keys and values: it grows in place, token by token, and is cut back at a fork.

python examples/growable_torch.py        (MEMBROKER_ENDPOINT, or the default endpoint; a GPU or the host driver)

A usual cache makes a new tensor for each token by `torch.cat`, which copies everything. This one copies only the token.
"""

from __future__ import annotations

import membroker

try:
    import torch

    from membroker.adapters.torch import device_of, tensor
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch: {error}") from None

TOKEN = (2, 8, 64)
"""The keys and values of a token: heads, and the width of each, in bfloat16."""
TOKEN_BYTES = 2 * 8 * 64 * 2
LONGEST = 1_000_000
"""How many tokens have addresses. Addresses cost nothing."""


def append(cache: membroker.GrowableBuffer, entries: torch.Tensor) -> None:
    """Copy the entries of some tokens to the end."""
    offset = cache.grow(entries.nbytes)
    tensor(cache, entries.shape, torch.bfloat16, offset).copy_(entries)


def every(cache: membroker.GrowableBuffer) -> torch.Tensor:
    """Return all entries: a tensor over the cache's own bytes."""
    return tensor(cache, (cache.size // TOKEN_BYTES, *TOKEN), torch.bfloat16)


def main() -> None:
    """Read a prompt, answer token by token, and forget the answer."""
    with membroker.connect() as client, client.model("conversation") as model:
        cache = model.growable_buffer(0, LONGEST * TOKEN_BYTES, page_size="2MiB")
        prompt = torch.randn(1000, *TOKEN, device=device_of(model.driver.device)).bfloat16()
        append(cache, prompt)
        beginning = every(cache)
        for _ in range(1200):
            append(cache, torch.randn(1, *TOKEN, device=prompt.device).bfloat16())
        print(f"{len(every(cache))} tokens, {model.used_bytes >> 20} MiB are charged")
        print(f"the prompt's entries are where they were: {torch.equal(beginning, prompt)}")
        cache.resize(prompt.nbytes)
        print(f"{len(every(cache))} tokens, {model.used_bytes >> 20} MiB are charged")


if __name__ == "__main__":
    try:
        main()
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
