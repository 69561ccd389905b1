"""The small engine with weights in a pool, as a process that an operator puts to sleep: a line is a command.

`serve` prints a digest of the tokens. `long` does so slowly, and prints `begun` before.
"""

from __future__ import annotations

import hashlib
import json
import sys

import membroker
from membroker.adapters.torch import device_of, move_to_pool
from membroker.kv import Sleeper
from tests.support.small_engine import Engine, Model, elastic_engine, kv_tensor, serve


def _digest(tokens: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def main() -> None:
    with membroker.connect() as client, membroker.connect() as other:
        lender = client.model("chat", virtual_capacity="64MiB")
        device = device_of(lender.driver.device)
        model = Model(device)
        expected = _digest(serve(Engine(model, kv_tensor(device))))
        weights = None
        if "--plain" not in sys.argv:
            weights = move_to_pool(model.weights(), other.model("chat"))
        engine, elastic = elastic_engine(lender, model, device)
        with elastic, Sleeper(elastic, weights) as sleeper:
            elastic.rest()
            print(expected, flush=True)
            for line in sys.stdin:
                if line.strip() == "hold":
                    with sleeper.awake():
                        print("begun", flush=True)
                        sys.stdin.readline()
                print(_digest(serve(engine, elastic, sleeper)), flush=True)


if __name__ == "__main__":
    main()
