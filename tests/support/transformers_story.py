"""A process that serves with transformers over a broker, on the device that the broker lends. Run with `-m`.

Its arguments are the endpoints of two tenants, the second of which is guaranteed 96 of 128 MiB, and "eager" or
"graphs". Anything that is wrong ends it with an error. A process of its own, because its CUDA context ends with it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import membroker
from membroker.adapters.torch import device_of
from tests.support.daemons import until
from tests.support.sizes import MIB
from tests.support.tiny_transformers import AT_REST, BATCHES, answer, collect, serving, stock, tiny_model

MODES: dict[str, dict[str, Any]] = {"eager": {}, "graphs": {"use_cuda_graph": True, "use_async_batching": True}}


def main(red: str, blue: str, mode: str) -> None:
    batching = MODES[mode]
    with membroker.connect(Path(red)) as client, membroker.connect(Path(blue)) as other:
        device = device_of(client.register_model("look").driver.device)
        model = tiny_model(str(device))
        expected = stock(model, BATCHES, **batching)

        def used() -> int:
            return int(client.model("chat").books["device"].used_bytes)

        with serving(Path(red), model, "chat", keep=0, batching=batching) as manager:
            for name in ("one", "burst", "shared", "few", "long", "burst"):
                assert answer(manager, name) == expected[name], name
            assert client.model("chat").books["device"].peak_bytes > 48 * MIB
            until(lambda: used() <= AT_REST)
            prompts, tokens = BATCHES["deep"]
            for _ in range(3):  # recalls amid the steps of a request that has more than what is left
                asked = manager.add_requests(prompts, max_new_tokens=tokens)
                until(lambda: used() > 28 * MIB or not manager.batch_processor.has_pending_requests())
                with other.register_model("owner").allocate("96MiB", wait=60.0):
                    assert used() <= 32 * MIB
                assert collect(manager, asked) == expected["deep"]
            assert answer(manager, "burst") == expected["burst"]
        with serving(Path(red), model, "tight", limit="32MiB", batching=batching) as manager:
            for name in ("long", "burst"):
                assert answer(manager, name) == expected[name], name
    print("the same tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
