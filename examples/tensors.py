"""Tensors of a model within a limit: one that frees itself, many in a pool, and their memory lent to others meanwhile.

python examples/tensors.py     (MEMBROKER_ENDPOINT, or the default endpoint; the broker needs host_capacity)
"""

from __future__ import annotations

import membroker

try:
    import torch

    from membroker.adapters.torch import empty
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch: {error}") from None


def main() -> None:
    """Borrow by the tensor, be refused, and put the rest to sleep."""
    with membroker.connect() as client, client.model("tensors", limit="64MiB") as model:
        one = empty(model, (1024, 1024), torch.float32)  # borrowed, and CUDA or CPU as the broker's device is
        print(f"one tensor: {model.used_bytes >> 20} MiB")
        del one  # the last reference: the memory is the broker's again

        with model.pool("1GiB", page_size="2MiB") as pool:
            rows = [empty(pool, (512, 1024), torch.float32, timeout=5.0).fill_(number) for number in range(4)]
            print(f"four in a pool: {pool.physical_usage_bytes >> 20} MiB")
            try:
                pool.allocate_anywhere("128MiB")
            except membroker.OutOfMemory as error:
                print(f"refused: {error}")
            with model.limited("16MiB"):  # within what the operator allows; for all sessions of the model
                print(f"for now at most {model.available().limit_bytes or 0:,} bytes")

            pool.offload(despite_views=True)  # the tensors stay valid, and nothing may use them now
            print(f"asleep: {pool.physical_usage_bytes >> 20} MiB on the device")
            pool.restore()
            print(f"awake: the last tensor has {rows[-1].mean().item():.0f}")
            print(pool)
            rows.clear()


if __name__ == "__main__":
    try:
        main()
    except membroker.MembrokerError as error:
        raise SystemExit(f"not borrowed: {error}") from None
