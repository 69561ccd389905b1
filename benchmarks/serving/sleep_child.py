"""The engine of one way to sleep: vLLM's keywords on the first line, then a command a line. For `sleep` alone."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from ..harness.child import answering


def main() -> None:
    """Answer each command with a line that has the seconds that it took."""
    tell = answering()  # vLLM logs to stdout: answers go where it cannot write
    from vllm import LLM

    llm = LLM(**json.loads(sys.stdin.readline()))
    tell({"started": True})
    for line in sys.stdin:
        command, begun, tokens = json.loads(line), time.perf_counter(), None
        if command["do"] == "generate":
            tokens = _generate(llm, command)
        elif command["do"] == "sleep":
            llm.sleep(level=1)
        else:
            llm.wake_up()
        tell({"seconds": time.perf_counter() - begun, "tokens": tokens})


def _generate(llm: Any, command: dict[str, Any]) -> list[list[int]]:
    from vllm import SamplingParams

    parameters = SamplingParams(detokenize=False, temperature=0, ignore_eos=True, max_tokens=command["tokens"])
    prompts = [{"prompt_token_ids": one} for one in command["prompts"]]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, parameters, use_tqdm=False)]


if __name__ == "__main__":  # the engine's process imports this file
    main()
