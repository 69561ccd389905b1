"""The programs of the guests' benchmark, which know nothing of membroker: `python -m benchmarks.guests.programs KIND`.

KIND is `images`, which answers lines at a port; `training`, which prints lines; `weights`, which writes a checkpoint of
a small model with random weights for vLLM; or `bus`, which measures copies to the device and back. On a GPU they are
PyTorch programs. On a machine without one their memory is a stand-in. Each checks all of its memory for each line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 32768
WORDS = 1 << 20
"""How many numbers a step of `images` reads, and from how far into the memory."""
STEPS = 20


def main() -> None:
    """Be one program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("images", "training", "weights", "bus"))
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    if options.kind == "weights":
        write_weights(options.to)
    elif options.kind == "bus":
        print(json.dumps(bus()))
    elif options.kind == "images":
        answer = images_on_host(options.bytes) if options.device == "host" else images(options.bytes)
        serve(answer, options.port)
    else:
        training_on_host(options.bytes) if options.device == "host" else training(options.bytes)


def serve(answer: Callable[[int], str], port: int) -> None:
    """Answer each line of each connection, one at a time."""
    lock = threading.Lock()

    class Lines(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                with lock:
                    self.wfile.write(answer(int(line)).encode() + b"\n")

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True

    Server(("127.0.0.1", port), Lines).serve_forever()


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


# --- without a GPU ---


def images_on_host(size: int) -> Callable[[int], str]:
    """Return what answers from a stand-in's memory."""
    from membroker.guest.stand_in import StandInMemory

    memory = StandInMemory(size)
    memory.write(size - 8, b"the last")
    wanted = _digest(memory.read())

    def answer(seed: int) -> str:
        is_whole = _digest(memory.read()) == wanted
        return _digest(b"%d" % seed) if is_whole else "its memory has changed"

    return answer


def training_on_host(size: int) -> None:
    """Print a line as soon as the last one is read from the memory."""
    answer = images_on_host(size)
    seed = 0
    while True:
        print(answer(seed), flush=True)
        seed += 1
        time.sleep(0.01)


# --- with PyTorch ---


def _torch() -> Any:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch


def _held(torch: Any, size: int) -> tuple[Any, int]:
    """Return numbers of this many bytes, and their sum. They are of 64 bits: a sum makes a copy of smaller ones."""
    held = torch.arange(size // 8, dtype=torch.int64, device="cuda")
    return held, int(held.sum())


def images(size: int) -> Callable[[int], str]:
    """Return what makes a picture of a seed by steps of denoising, as diffusion does, and answers with its digest."""
    torch = _torch()
    torch.manual_seed(0)
    weights = torch.randn(2 * WORDS, device="cuda", dtype=torch.bfloat16)
    held, total = _held(torch, max(WORDS, size - weights.nbytes))

    def answer(seed: int) -> str:
        picture = torch.randn(1024, 1024, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
        for step in range(STEPS):
            begin = step * WORDS // STEPS
            weight = weights[begin : begin + WORDS].view(1024, 1024).float()
            picture = torch.nn.functional.layer_norm(picture + torch.tanh(picture @ weight), (1024,))
        is_whole = int(held.sum()) == total
        return _digest(picture.cpu().numpy().tobytes()) if is_whole else "its memory has changed"

    answer(0)
    return answer


def training(size: int) -> None:
    """Train a small network with Adam without an end; print a digest of its losses and of its memory now and then."""
    torch = _torch()
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (torch.nn.Linear(2048, 2048), torch.nn.GELU())]
    network = torch.nn.Sequential(*layers).cuda()
    adam = torch.optim.Adam(network.parameters(), lr=1e-4)
    data = torch.Generator("cuda").manual_seed(1)
    held, total = _held(torch, max(WORDS, size - 16 * sum(one.nbytes for one in network.parameters())))
    losses: list[float] = []
    while True:
        for _ in range(50):
            batch = torch.randn(256, 2048, generator=data, device="cuda")
            loss = (network(batch) - batch.roll(1, dims=1)).square().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
        losses.append(float(loss.detach()))
        is_whole = int(held.sum()) == total
        print(_digest(repr(losses[-1]).encode()) if is_whole else "its memory has changed", flush=True)


def bus(size: int = 1 << 30) -> dict[str, float]:
    """Return how many bytes a second a copy of pinned memory moves to the device and from it: the best of five."""
    torch = _torch()
    here, there = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device="cuda"),
    )
    found = {}
    for name, target, source in (("to the device", there, here), ("from the device", here, there)):
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        found[name] = size / min(times)
    return found


def write_weights(to: Path) -> None:
    """Write a checkpoint that `vllm serve` reads: Qwen3's kind, with random weights and a tokenizer of words."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(to)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (to / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    (to / "tokenizer_config.json").write_text(json.dumps(about))


if __name__ == "__main__":
    sys.exit(main())
