"""Serve a model with SGLang, for another process: a line of JSON in, a line of JSON out. Run with `-m`.

The first argument is the keywords of `sglang.Engine` as JSON. The requests and the answers are those of
`vllm_serve.py`. SGLang's scheduler runs in a process of its own, as under `python -m sglang.launch_server`. It is a
fork if the second argument is "fork": SGLang takes an interpreter 10 s to import, and has three.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # answers go where nothing else is written
    if sys.argv[2:] == ["fork"]:
        multiprocessing.set_start_method("fork")
        multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    tempfile.tempdir = os.environ["TMPDIR"]  # a fork of the template has the template's
    from sglang.srt.entrypoints.engine import Engine

    with Engine(**json.loads(sys.argv[1])) as engine:
        print("null", file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            found = _gaps(engine, asked) if "answers" in asked else _tokens(engine, asked)
            print(json.dumps(found), file=answers, flush=True)


def _tokens(engine: Any, asked: dict[str, Any]) -> list[list[int]]:
    return [one["output_ids"] for one in _generate(engine, asked["prompts"], asked["tokens"])]


def _gaps(engine: Any, asked: dict[str, Any]) -> list[float]:
    pairs = list(zip(asked["prompts"], asked["answers"], strict=True))
    starts = [max(0, len(prompt) - 1) for prompt, _ in pairs]
    options = {"return_logprob": True, "logprob_start_len": starts, "top_logprobs_num": 1}
    gaps = []
    for (_, answer), one in zip(pairs, _generate(engine, [a + b for a, b in pairs], 1, **options), strict=True):
        found = one["meta_info"]
        likely = found["input_top_logprobs"][-len(answer) :]
        taken = found["input_token_logprobs"][-len(answer) :]
        places = zip(answer, likely, taken, strict=True)
        # SGLang looks up token 0 in place of the last one of the vocabulary: such a place says nothing.
        gaps.append(max((best[0][0] - own for token, best, (own, same, _) in places if token == same), default=0.0))
    return gaps


def _generate(engine: Any, prompts: list[list[int]], tokens: int, **options: Any) -> Any:
    parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return engine.generate(input_ids=prompts, sampling_params=parameters, **options)


if __name__ == "__main__":  # SGLang's other processes import this file
    main()
