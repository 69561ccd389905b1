"""What a user of `membroker run --guest` has asked for. Owns what is parsed; must never import what a start needs."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for. `memory` is what is declared at least while the program is awake.

    `is_auto`: `memory` is what the program used when it ran last, and what it uses beyond that is declared only while
    it uses it. `sleep_after` is how many seconds without a connection let it sleep.
    """

    memory: int
    is_auto: bool
    on_excess: Literal["sleep", "kill"] = "sleep"
    sleep_after: float | None = None
    can_sleep: bool = True
    has_door: bool = False
    charges_host: bool = False
    """Whether the image is charged to the model's host memory: the broker lends some."""


class Ports(NamedTuple):
    """Where the door listens, and the port of the program on this machine."""

    address: str
    port: int
    program: int


def parse_ports(text: str) -> Ports:
    """Return the ports that [ADDRESS:]PORT:PORT says; raises `ValueError`."""
    *before, port, program = text.rsplit(":", 2)
    address = before[0] if before else "127.0.0.1"
    if ":" in address:
        address = address[1:-1] if address.startswith("[") and address.endswith("]") else address
        IPv6Address(address)
    ports = Ports(address, int(port), int(program))
    if not address or not (0 < ports.port < 1 << 16 and 0 < ports.program < 1 << 16) or ports.port == ports.program:
        raise ValueError
    return ports
