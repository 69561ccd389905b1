"""`python -m benchmarks.serving.kinds`: plain vLLM beside membroker for each kind of model, in one run.

Each engine is a process of its own, over random weights, and answers alone: a small request, a burst that fills its
cache for the first time, the same burst again, and a request after a rest. Shown are the times, how many answers have
the same tokens and how likely they are, and what the cache has at the start, at most and at rest.

A burst that grows the cache is composed otherwise than plain vLLM's, and kernels round by that. The burst that comes
again finds its memory, and is composed as plain vLLM's. With --turns the two, a plain vLLM with the same layout of its
cache, and one over membroker that keeps its memory answer bursts in turn: what of the time is the layout's, and what
the growth's. These have vLLM's prefix cache, as they have by default: without one plain vLLM hashes no prompt, and vLLM
with a connector hashes all. Each burst has new prompts, and what is cached does not stay.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from membroker import connect
from membroker.vmm import Location, open_driver

from ..harness import command, machine
from ..harness.child import Child, ChildFailed, answering
from ..harness.daemon import TENANT, configuration, running
from ..harness.report import write_json
from . import shapes

_CHILD: Final = "BENCH_KINDS_CHILD"
START_SECONDS, ANSWER_SECONDS, REST_SECONDS = 300.0, 120.0, 2.0
PLAIN, ELASTIC = "plain", "membroker"
SAME_LAYOUT, KEPT = "plain in membroker's layout", "membroker that keeps its memory"
AHEAD: Final = 2
"""How many pairs of engines start while one answers."""
_BASE: Mapping[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "vocab_size": 32768,
}
_QWEN3 = shapes.SHAPES["qwen3-0.6b"]
CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3": _QWEN3,
    "draft": {**_QWEN3, "num_hidden_layers": 2},
    "gemma3": {
        **_BASE,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 32768,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
    "gpt-oss": {
        **_BASE,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "experts_per_token": 2,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "attention_bias": True,
        "pad_token_id": 0,
    },
    "deepseek": {
        **_BASE,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "softmax",
        "rope_theta": 10000,
        "max_position_embeddings": 16384,
    },
    "qwen3-next": {
        **_BASE,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "full_attention_interval": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "max_position_embeddings": 65536,
        "mlp_only_layers": [],
    },
}


@dataclass(frozen=True)
class Kind:
    """A model, what vLLM is told besides, and how many requests of 1,000 tokens a burst has."""

    config: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    requests: int = 64
    kv: int = 8 << 30


_EAGER: Mapping[str, Any] = {"enforce_eager": True}
_GRAPHS: Mapping[str, Any] = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
KINDS: Final[Mapping[str, Kind]] = {
    "qwen3": Kind("qwen3", _EAGER, 150, 19 << 30),
    "qwen3, graphs": Kind("qwen3", _GRAPHS),
    "gemma3": Kind("gemma3", _EAGER),
    "gpt-oss": Kind("gpt-oss", _EAGER),
    "deepseek": Kind("deepseek", _EAGER),
    "qwen3, FP8": Kind("qwen3", {**_EAGER, "kv_cache_dtype": "fp8"}),
    "qwen3, draft": Kind(
        "qwen3", {**_EAGER, "speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}}
    ),
    "qwen3-next": Kind("qwen3-next", {**_EAGER, "additional_config": {"gdn_prefill_backend": "triton"}}),
}
HOST: Final = Kind("qwen3", _EAGER, 8, 1 << 30)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = command.parser("benchmarks.serving.kinds", __doc__.splitlines()[0], outputs=["json"])
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--turns", type=int, default=0, metavar="N", help="then N bursts of each in turn")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no further kind after so many seconds")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the engines' logs there")
    options = command.parse(parser, arguments)
    begun, rows = time.monotonic(), list[dict[str, Any]]()
    print(", ".join(f"{name} {value}" for name, value in machine.facts().items()), file=sys.stderr)
    with closing(open_driver("cuda")) as driver, ExitStack() as ending:
        memory = driver.memory(Location.DEVICE)
        assert memory is not None
        capacity = memory.free * 9 // 10 // (64 << 20) * (64 << 20)
        daemon = ending.enter_context(running(configuration("cuda", capacity=capacity)))
        books = ending.enter_context(connect(daemon.endpoint(TENANT), observer=True))
        logs = options.logs or Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="mb-kinds-")))
        logs.mkdir(parents=True, exist_ok=True)
        started: dict[str, list[Child]] = {}

        def start(name: str) -> None:
            started[name] = [
                ending.enter_context(
                    closing(_child(KINDS[name], way, name, daemon.endpoint(TENANT), logs, bool(options.turns)))
                )
                for way in (PLAIN, ELASTIC, *((SAME_LAYOUT, KEPT) if options.turns else ()))
            ]

        for number, name in enumerate(options.kinds):
            if time.monotonic() - begun > options.seconds:
                print(f"{name} is left out: the time is over", file=sys.stderr)
                continue
            for other in options.kinds[number : number + 1 + AHEAD * bool(number)]:
                if other not in started:
                    start(other)
            row: dict[str, Any] = {"kind": name}
            try:
                for way, child in zip((PLAIN, ELASTIC), started[name], strict=False):
                    row[way] = _measure(child, KINDS[name], books if way == ELASTIC else None, _model(name))
                row["same"] = _compare(row[PLAIN], row[ELASTIC])
                for child in started[name][2:]:
                    child.hear(START_SECONDS)
                row["turns"] = [_turn(started[name], KINDS[name]) for _ in range(options.turns)]
            except ChildFailed as error:
                row["failed"] = str(error)
            for child in started[name]:
                child.close()
            rows.append(row)
            print(_line(row), flush=True)
            if options.json is not None:
                write_json(options.json, facts=machine.facts(), rows=rows)
    return int(any("failed" in row for row in rows))


def _model(name: str) -> str:
    return name.replace(", ", "-").lower()


def _child(kind: Kind, way: str, name: str, endpoint: Path, logs: Path, caches: bool) -> Child:
    keywords: dict[str, Any] = {
        "model": _written(kind.config, logs),
        "skip_tokenizer_init": True,
        "load_format": "bench-random",
        "worker_extension_cls": "benchmarks.serving.weights.Extension",
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.02,
        "kv_cache_memory_bytes": kind.kv,
        "enable_prefix_caching": caches,
        "disable_log_stats": True,
        **kind.engine,
    }
    if "speculative_config" in keywords:
        keywords["speculative_config"] = {**keywords["speculative_config"], "model": _written("draft", logs)}
    layout = {"VLLM_KV_CACHE_LAYOUT": "BLNHC"} if way == SAME_LAYOUT else {}
    if way in (ELASTIC, KEPT):
        keywords["kv_transfer_config"] = {
            "kv_connector": "Membroker",
            "kv_connector_module_path": "membroker.kv.vllm",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "model": _model(name) + "-kept" * (way == KEPT),
                "endpoint": str(endpoint),
                "floor": kind.kv if way == KEPT else 0,
                "keep": 0,
            },
        }
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        **layout,
        _CHILD: "1",
    }
    return Child("benchmarks.serving.kinds", keywords, environment, logs / f"{_model(name)}-{way.split()[-1]}.log")


def _written(config: str, logs: Path) -> str:
    place = logs / "models" / config
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(CONFIGS[config]))
    return str(place)


def _measure(child: Child, kind: Kind, books: Any, model: str) -> dict[str, Any]:
    """Return the times and the answers of one engine; and what its cache has, if that is in a broker's books."""
    child.hear(START_SECONDS)

    def has() -> int:
        return (
            sum(one.books["device"].used_bytes for one in books.models() if one.name.endswith(f"/{model}"))
            if books
            else 0
        )

    def peak() -> int:
        return (
            sum(one.books["device"].peak_bytes for one in books.models() if one.name.endswith(f"/{model}"))
            if books
            else 0
        )

    def ask(requests: int, prompt: int, tokens: int) -> dict[str, Any]:
        child.tell({"requests": requests, "prompt": prompt, "tokens": tokens})
        return child.hear(ANSWER_SECONDS)

    found: dict[str, Any] = {"warm": ask(1, 200, 16)}
    time.sleep(REST_SECONDS)
    found["start_bytes"] = has()
    found["first"] = ask(kind.requests, 1000, 128)
    found["again"] = ask(kind.requests, 1000, 128)
    found["third"] = ask(kind.requests, 1000, 128)
    found["peak_bytes"] = peak()
    time.sleep(REST_SECONDS)
    found["rest_bytes"] = has()
    found["lone"] = ask(1, 1000, 128)
    time.sleep(REST_SECONDS)
    found["lone again"] = ask(1, 1000, 128)
    return found


def _turn(children: Sequence[Child], kind: Kind) -> dict[str, list[float]]:
    """Return how long a burst takes in each engine, and how long a lone request after a rest."""
    found: dict[str, list[float]] = {"burst": [], "lone": []}
    for name, requests in (("burst", kind.requests), ("lone", 1)):
        for child in children:
            child.tell({"requests": requests, "prompt": 1000, "tokens": 128})
            found[name].append(child.hear(ANSWER_SECONDS)["seconds"])
        time.sleep(REST_SECONDS * (name == "burst"))
    return found


def _compare(plain: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return for each batch how many of the answers have the same tokens, and how likely the answers are on average."""
    same = {}
    for name in ("warm", "first", "again", "third", "lone", "lone again"):
        here, there = plain[name]["answers"], ours[name]["answers"]
        same[name] = [sum(map(list.__eq__, here, there)), len(here), plain[name]["likely"], ours[name]["likely"]]
    for one in (plain, ours):
        for batch in one.values():
            if isinstance(batch, dict):
                batch.pop("answers")
    return same


def _line(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"{row['kind']}: FAILED: {row['failed']}"
    plain, ours, same = row[PLAIN], row[ELASTIC], row["same"]
    parts = [f"{row['kind']}:"]
    for name in ("first", "again", "third", "lone", "lone again"):
        alike, of, here, there = same[name]
        parts.append(
            f"{name} {plain[name]['seconds']:.2f} / {ours[name]['seconds']:.2f} s, {alike} of {of} same, "
            f"{here:.3f} / {there:.3f};"
        )
    for name in ("burst", "lone") if row["turns"] else ():
        each = zip(*[turn[name] for turn in row["turns"]], strict=True)
        medians = " / ".join(f"{statistics.median(times):.3f}" for times in each)
        parts.append(f"{len(row['turns'])} turns, {name} {medians} s;")
    sizes = [ours[name] / (1 << 20) for name in ("start_bytes", "peak_bytes", "rest_bytes")]
    return " ".join([*parts, "MiB at the start, at most, at rest: " + ", ".join(f"{size:.0f}" for size in sizes)])


def _serve() -> None:
    """Be an engine: vLLM's keywords on the first line, then a batch a line."""
    tell = answering()
    first = sys.stdin.readline()
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(first))
    tell({"started": True})
    numbers = itertools.count()
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [
            {"prompt_token_ids": [(7919 * number + 31 * place) % 9973 + 3 for place in range(asked["prompt"])]}
            for number in itertools.islice(numbers, asked["requests"])
        ]
        parameters = SamplingParams(
            max_tokens=asked["tokens"], logprobs=0, ignore_eos=True, detokenize=False, temperature=0
        )
        begun = time.perf_counter()
        done = llm.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - begun
        answers = [list(one.outputs[0].token_ids) for one in done]
        likely = sum(one.outputs[0].cumulative_logprob for one in done) / len(done)
        tell({"seconds": seconds, "likely": likely, "answers": answers})


if __name__ == "__main__":  # the engine's process imports this file
    if _CHILD in os.environ:
        _serve()
    else:
        sys.exit(main())
