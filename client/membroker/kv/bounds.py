"""What a user sets of the cache of a serving engine, and what the start of every such engine checks and says.

Owns the names of the settings that all engines share, and the sentences about too little memory. It knows no engine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, TypeVar, cast

from .. import Client, Model, VirtualMemoryPool
from ..errors import InvalidRequest
from ..ext import arguments, names
from ..vmm.sizes import format_size
from .cache import ElasticCache
from .layout import Layout
from .model_names import model_name
from .ranks import Ranks

START_SECONDS: Final = 300.0
"""How long the start of an engine waits for the memory that it needs."""
Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What all engines can be told. Sizes are in bytes, or text such as "8GiB".

    `model` is the name under which the broker knows this engine; without it, that is MEMBROKER_MODEL, or else the name
    under which the engine serves the model, as `model_name` says. `limit` is the most that it may borrow, as for
    `Client.model`. `floor`, `ahead` and `keep` are as for `membroker.kv.ElasticCache`; without `ahead` one group of
    pages is kept mapped ahead. `page_size` replaces the layout's own.
    """

    model: str | None = None
    limit: int | str | None = None
    floor: int | str = 0
    ahead: int | str | None = None
    keep: int | str = "2GiB"
    page_size: int | str | None = None
    SIZES: ClassVar[tuple[str, ...]] = ("limit", "floor", "ahead", "keep", "page_size")

    def __post_init__(self) -> None:
        if self.model is not None:
            arguments.name_of("model", self.model)
        for name in self.SIZES:
            value = getattr(self, name)
            if value is not None:
                arguments.bytes_of(name, value)

    def name(self, served: object, log: logging.Logger | None = None) -> str:
        """Return the broker's name for an engine that serves `served`. The log tells it where the two differ."""
        name = self.model or os.environ.get(names.MODEL_VARIABLE) or model_name(str(served))
        if log is not None and name != served:
            log.info("membroker: the broker knows what this engine serves as %r by the name %r", served, name)
        return name

    def elastic(self, pool: VirtualMemoryPool | Ranks, layout: Layout) -> ElasticCache:
        """Return a cache within these bounds. Waits up to `START_SECONDS` for the blocks that always have memory."""
        return ElasticCache(
            pool,
            layout,
            floor=self.floor,
            ahead=layout.bytes_of(0) if self.ahead is None else self.ahead,
            keep=self.keep,
            timeout=START_SECONDS,
        )

    def check_fits(
        self,
        size: int,
        tokens: int,
        client: Client,
        model: Model,
        flag: str,
        log: logging.Logger,
        *,
        besides: int = 0,
    ) -> None:
        """Raise `InvalidRequest` if the longest request, of `tokens` and `size` bytes, can never have its memory.

        An engine would let it wait forever. `flag` is what makes its requests shorter. A floor above the limit is
        refused, too: the engine would never release anything. `besides` is what this engine is charged for in the
        model's name beside its cache, such as weights.
        """
        name, available = model.name, model.available()
        limits = client.capacities["device"], available.limit_bytes, available.tenant_limit_bytes
        limit = min(size for size in limits if size is not None) - besides
        may_borrow = f"{name!r} may borrow {max(0, limit)}" + f" beside {besides} for other memory" * bool(besides)
        if size > limit:
            raise InvalidRequest(
                f"a request of {tokens} tokens needs {size} bytes of KV cache, and {may_borrow}: lower {flag}, or "
                "raise the limit"
            )
        if (floor := arguments.bytes_of("floor", self.floor)) > limit:
            raise InvalidRequest(f"a floor of {floor} bytes can never be reached: {may_borrow}")
        if size > (guaranteed := max(0, available.guarantee_bytes - besides)):
            log.warning(
                "membroker: a request of %d tokens needs %d MiB, and model %r is guaranteed %d MiB%s: while others "
                "need the memory, long requests wait",
                tokens,
                size >> 20,
                name,
                guaranteed >> 20,
                f" beside {besides >> 20} MiB for other memory" * bool(besides),
            )


def say_wait(needed: int, model: Model, log: logging.Logger, seconds: float = START_SECONDS) -> None:
    """Say that the start waits `seconds` for `needed` bytes, if the broker cannot lend them now."""
    if needed > (free := model.available().now_bytes):
        log.warning(
            "membroker: waits up to %.0f s for the broker to lend %s, which the start needs: %s are free for model %r. "
            "`membroker status` says what has the rest",
            seconds,
            format_size(needed),
            format_size(free),
            model.name,
        )


def say_cache(pool: VirtualMemoryPool, layout: Layout, model: Model, order: str, of: str, log: logging.Logger) -> None:
    """Say what the cache is like. `order` is how its bytes are ordered, and `of` what its blocks are and have."""
    log.info(
        "membroker: the KV cache of model %r is %s, in %d groups of %d MiB: %d %s, %.1f GiB of addresses",
        model.name,
        order,
        layout.groups,
        layout.bytes_of(0) >> 20,
        layout.blocks,
        of,
        pool.capacity / (1 << 30),
    )


def bytes_of_first(layout: Layout, blocks: int) -> int:
    """Return the bytes of the groups that the first `blocks` blocks touch, or all if there are not so many."""
    last = min(blocks, layout.blocks) - 1
    return sum(layout.bytes_of(group) for group in range(max(layout.touched(last)) + 1))


def settings_from(source: str, given: Any, kind: type[Settings]) -> Settings:
    """Return the dataclass `kind` with what the user has `given` in `source`. Raises `InvalidRequest`."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(f'{source} is an object such as {{"model": "chat"}}, not {given!r}')
    known = [field.name for field in fields(cast("Any", kind))]
    unknown = sorted(str(name) for name in given if name not in known)
    if unknown:
        raise InvalidRequest(f"{source} has {unknown[0]!r}, and membroker knows: {', '.join(known)}")
    return kind(**given)


def refuse(begin: str, refusals: Mapping[str, bool]) -> None:
    """Raise `InvalidRequest` with the first sentence of `refusals` that applies. `begin` are its first words."""
    for sentence, applies in refusals.items():
        if applies:
            raise InvalidRequest(f"{begin} {sentence}")
