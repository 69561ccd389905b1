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

HEADS, WIDTH = 8, 64
ENTRY = 2 * HEADS * WIDTH
"""How many numbers a token has: its keys and its values."""
LONGEST = 1_000_000
"""How many tokens have addresses. Addresses cost nothing."""


class Cache:
    """Keys and values of all tokens so far, in bfloat16."""

    def __init__(self, model: membroker.Model) -> None:
        self.buffer = model.growable_buffer(0, LONGEST * ENTRY * 2, page_size="2MiB")
        self.tokens = 0

    def append(self, entries: torch.Tensor) -> None:
        """Copy the entries of some tokens, (tokens, 2, heads, width), to the end."""
        offset = self.buffer.grow(entries.numel() * 2)
        tensor(self.buffer, torch.bfloat16, entries.shape, offset).copy_(entries)
        self.tokens += len(entries)

    def every(self) -> torch.Tensor:
        """Return all entries: a tensor over the buffer's own bytes."""
        return tensor(self.buffer, torch.bfloat16, (self.tokens, 2, HEADS, WIDTH))

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """Return what a query, (heads, 1, width), finds in the cache."""
        keys, values = self.every().movedim(0, 2)
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values)

    def forget(self, tokens: int) -> None:
        """Keep the first `tokens`, and release the memory of the others."""
        self.buffer.resize(tokens * ENTRY * 2)
        self.tokens = tokens


def main() -> None:
    """Read a prompt, answer token by token, fork where the prompt ended, and answer again."""
    torch.manual_seed(0)
    with membroker.connect() as client:
        model = client.model("conversation")
        device = device_of(model.driver.device)
        prompt = torch.randn(1000, 2, HEADS, WIDTH, dtype=torch.bfloat16, device=device)
        query = torch.randn(HEADS, 1, WIDTH, dtype=torch.bfloat16, device=device)
        cache = Cache(model)
        cache.append(prompt)
        beginning, found = cache.every(), cache.attend(query)
        for _ in range(1200):
            cache.append(torch.randn(1, 2, HEADS, WIDTH, dtype=torch.bfloat16, device=device))
        charged = cache.buffer.physical_usage_bytes >> 20
        print(f"{cache.tokens} tokens, {charged} MiB are charged")
        print(
            f"the prompt's entries are unchanged: {torch.equal(beginning, prompt)}; a query now gets another answer: ",
            end="",
        )
        print(not torch.equal(cache.attend(query), found))
        cache.forget(len(prompt))
        charged = cache.buffer.physical_usage_bytes >> 20
        print(f"{cache.tokens} tokens, {charged} MiB are charged")
        print(f"the query gets its first answer again: {torch.equal(cache.attend(query), found)}")
        del beginning
        cache.buffer.close()


if __name__ == "__main__":
    try:
        main()
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
