"""Serve a model with vLLM, for another process: a line of JSON in, a line of JSON out. Run with `-m`.

The first argument is the keywords of `vllm.LLM` as JSON. A request is `{"prompts": [[token, ...], ...], "tokens": n}`,
and its answer the generated tokens, greedily and always n of each; with `"lora"`, by the adapter in that directory.
With `"answers"` instead of `"tokens"` it is, for each prompt and the answer that is given, by how much some token of
the answer was less likely than the likeliest one at its place, as the largest difference of logarithms. `{"call":
name, "keywords": {...}}` calls a method of each worker, and its answer is null. The engine itself runs in a process of
its own, as under `vllm serve`. It is a fork if the second argument is "fork".
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from typing import Any


def main() -> None:
    # vLLM logs to stdout: answers go where it cannot write.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM

    if sys.argv[2:] == ["fork"]:
        tempfile.tempdir = None  # a fork of the template has another one
        _fork()
    llm = LLM(**json.loads(sys.argv[1]))
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(_answer(llm, asked)), file=answers, flush=True)


def _fork() -> None:
    """Let vLLM fork its processes. Its CPU build sets this variable with each configuration, to "spawn"."""
    from vllm.platforms import current_platform

    update = current_platform.check_and_update_config

    def and_fork(config: Any) -> None:
        update(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    current_platform.check_and_update_config = and_fork
    for one in logging.getLogger("vllm").handlers:  # a fork of the template has another stdout than the template
        assert isinstance(one, logging.StreamHandler)
        one.setStream(sys.stdout)


def _answer(llm: Any, asked: dict[str, Any]) -> Any:
    if "call" in asked:
        llm.collective_rpc(asked["call"], kwargs=asked["keywords"])
        return None
    return _gaps(llm, asked) if "answers" in asked else _tokens(llm, asked)


def _tokens(llm: Any, asked: dict[str, Any]) -> list[list[int]]:
    done = _generate(llm, asked["prompts"], asked.get("lora"), max_tokens=asked["tokens"], ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in done]


def _gaps(llm: Any, asked: dict[str, Any]) -> list[float]:
    whole = [prompt + answer for prompt, answer in zip(asked["prompts"], asked["answers"], strict=True)]
    done = _generate(llm, whole, None, max_tokens=1, prompt_logprobs=1)
    gaps = []
    for prompt, tokens, one in zip(asked["prompts"], whole, done, strict=True):
        places = [
            ({token: found.logprob for token, found in place.items()}, token)
            for place, token in zip(one.prompt_logprobs[len(prompt) :], tokens[len(prompt) :], strict=True)
        ]
        gaps.append(max(max(likely.values()) - likely[token] for likely, token in places))
    return gaps


def _generate(llm: Any, prompts: list[list[int]], lora: str | None, **options: Any) -> Any:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    parameters = SamplingParams(detokenize=False, temperature=0, **options)
    adapter = LoRARequest("adapter", 1, lora) if lora else None
    tokens = [{"prompt_token_ids": one} for one in prompts]
    return llm.generate(tokens, parameters, use_tqdm=False, lora_request=adapter)


if __name__ == "__main__":  # the engine's process imports this file
    main()
