"""Serve a model with vLLM, for another process: a line of JSON in, a line of JSON out. Run with `-m`.

The first argument is the keywords of `vllm.LLM` as JSON. A request is `{"prompts": [[token, ...], ...], "tokens": n}`,
and its answer the generated tokens, greedily and always n of each. The engine itself runs in a process of its own, as
under `vllm serve`.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    # vLLM logs to stdout: answers go where it cannot write.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        done = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in asked["prompts"]],
            SamplingParams(max_tokens=asked["tokens"], ignore_eos=True, detokenize=False, temperature=0),
            use_tqdm=False,
        )
        print(json.dumps([list(one.outputs[0].token_ids) for one in done]), file=answers, flush=True)


if __name__ == "__main__":  # the engine's process imports this file
    main()
