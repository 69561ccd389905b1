"""SGLang's allocation kernels of Triton, on a CPU: a plugin of SGLang, for its own tests' sake there is no other way.

SGLang's attention in plain torch runs on a CPU, and its pages of more than one token are given out by Triton alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    paged = "sglang.srt.mem_cache.allocator.paged"
    HookRegistry.register(f"{paged}.alloc_extend_kernel", _Extend, HookType.REPLACE)
    HookRegistry.register(f"{paged}.alloc_decode_kernel", _Decode, HookType.REPLACE)


class _Extend:
    def __class_getitem__(cls, grid: tuple[int]) -> Callable[..., None]:
        return _extend


class _Decode:
    def __class_getitem__(cls, grid: tuple[int]) -> Callable[..., None]:
        return _decode


def _extend(before: Any, after: Any, last: Any, free: Any, out: Any, _upper: int, page: int) -> None:
    at = used = 0
    for start, stop, place in zip(before.tolist(), after.tolist(), last.tolist(), strict=True):
        for token in range(start, stop):
            if token % page == 0:
                if used == len(free):
                    return  # the caller sees that there were too few
                place = int(free[used]) * page - 1
                used += 1
            place += 1
            out[at] = place
            at += 1


def _decode(lengths: Any, last: Any, free: Any, out: Any, _upper: int, page: int) -> None:
    used = 0
    for at, (length, place) in enumerate(zip(lengths.tolist(), last.tolist(), strict=True)):
        if length % page == 1:
            if used == len(free):
                return
            out[at] = int(free[used]) * page
            used += 1
        else:
            out[at] = place + 1
