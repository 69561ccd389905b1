"""A transformers model that generates in borrowed memory, with transformers' own classes unchanged.

python examples/transformers_torch_memory.py     (MEMBROKER_ENDPOINT, or the default endpoint)

On a GPU torch borrows all that it allocates: weights, KV cache and workspaces. With the host driver, where torch has no
pools, the weights are in a segment. The model is a tiny Llama with random weights, so nothing is downloaded.
"""

from typing import Any

import membroker

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from membroker.adapters.torch import TorchMemory, attach_module, publish_module
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch and transformers: {error}") from None

SIZE: Any = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def build() -> Any:
    """Return the model; the same weights each time."""
    torch.manual_seed(0)
    config: Any = LlamaConfig(**SIZE, num_attention_heads=4, initializer_range=0.5, eos_token_id=None)
    return LlamaForCausalLM(config).train(mode=False)


def answer(module: Any) -> list[int]:
    """Return the tokens that follow a prompt."""
    prompt = torch.tensor([[11, 7, 42, 3]], device=module.device)
    return list(module.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 4:].tolist())


def main() -> None:
    """Compare the answer in borrowed memory with the one in torch's own."""
    with membroker.connect() as client:
        model, module = client.model("transformers", limit="1GiB"), build()
        expected = answer(module.to("cpu" if client.driver_kind == "host" else "cuda"))
        if client.driver_kind == "host":
            with publish_module(model, "weights", module) as segment:
                attach_module(segment, module)
                borrowed, used = answer(module), model.used_bytes
                del module
            client.delete_segment("transformers/weights")
        else:
            with TorchMemory(model) as memory, memory.use():
                module = build().to(memory.device)
                borrowed, used = answer(module), memory.lent_bytes
                del module
        print(f"{used >> 20} MiB are borrowed; the same tokens: {borrowed == expected}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
