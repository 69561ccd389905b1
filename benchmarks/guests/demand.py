"""What callers of a program do and see: a request at random moments, and whether its answer is the expected one.

Owns the protocols of the programs: lines, and vLLM's HTTP. It never tries again: a refused connection is a failure.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

SEEDS = 10
ANSWER_SECONDS = 600.0
Ask = Callable[[int], str]
"""Returns the answer for a seed; raises `OSError` or `http.client.HTTPException`."""


def line_at(port: int) -> Ask:
    """Ask a program that answers lines."""

    def ask(seed: int) -> str:
        with socket.create_connection(("127.0.0.1", port), ANSWER_SECONDS) as connection:
            connection.sendall(b"%d\n" % seed)
            with connection.makefile() as lines:
                answer = lines.readline().strip()
        if not answer:
            raise ConnectionError("the connection was closed without an answer")
        return answer

    return ask


def completion_at(port: int, words: int = 300, tokens: int = 64) -> Ask:
    """Ask a `vllm serve` for the most likely words after a prompt of a seed."""

    def ask(seed: int) -> str:
        prompt = " ".join(f"w{(7919 * seed + 31 * place) % 1000 + 3}" for place in range(words))
        asked = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
        try:
            connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise ConnectionError(f"{response.status}: {body[:300]!r}")
        answer: str = json.loads(body)["choices"][0]["text"]
        return answer

    return ask


def burst_at(port: int, requests: int) -> Ask:
    """Ask a `vllm serve` for much at once, and then for one answer, which is the one that counts."""
    one, many = completion_at(port), completion_at(port, 1000, 128)

    def ask(seed: int) -> str:
        with ThreadPoolExecutor(requests) as pool:
            list(pool.map(many, range(requests)))
        return one(seed)

    return ask


def until_answered(ask: Ask, is_alive: Callable[[], bool], seconds: float = ANSWER_SECONDS) -> str:
    """Ask a program that still starts until it answers, and return that. Raises `TimeoutError`."""
    end = time.monotonic() + seconds
    while is_alive() and time.monotonic() < end:
        with suppress(OSError, http.client.HTTPException):
            return ask(0)
        time.sleep(0.2)
    raise TimeoutError("it has ended" if not is_alive() else f"it did not answer in {seconds:.0f} seconds")


@dataclass
class Demand:
    """Callers of one program, one after the other, with pauses of `pause` seconds on average."""

    ask: Ask
    pause: float
    count: int = 0
    """How many answers there were."""
    seconds: list[float] = field(default_factory=list)
    """How long each answer took but the first, which waits for the start of the program."""
    answers: dict[int, list[str]] = field(default_factory=dict)
    """By seed; what is expected is known later."""
    failures: list[str] = field(default_factory=list)

    def run(self, stop: threading.Event, number: int) -> None:
        """Ask until `stop`."""
        chance = random.Random(number)
        while not stop.is_set():
            seed, begun = chance.randrange(SEEDS), time.monotonic()
            try:
                answer = self.ask(seed)
                if self.count:
                    self.seconds.append(time.monotonic() - begun)
                self.answers.setdefault(seed, []).append(answer)
                self.count += 1
            except (OSError, http.client.HTTPException) as error:
                if not stop.is_set():
                    self.failures.append(f"{type(error).__name__}: {error}")
                    stop.wait(1.0)
            if self.pause:
                stop.wait(chance.expovariate(1 / self.pause))

    def wrong(self, expected: Mapping[int, str]) -> int:
        """Return how many answers are others than expected."""
        return sum(answer != expected[seed] for seed, answers in self.answers.items() for answer in answers)
