"""Many extents by one call, with as little Python between the driver's calls as can be.

An interrupt loses nothing: what CUDA returns is stored in the same step of the interpreter, by `list.extend(map(...))`,
as in `wire.descriptors.receive`. An error undoes all that the call has made.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .gpu import Gpu


def lend(gpu: Gpu, size: int, count: int, properties: Any) -> list[int]:
    """Create `count` extents, and return a descriptor of each."""
    cuda, kind = gpu.cuda, gpu.descriptor_kind
    created: list[Any] = []
    exported: list[Any] = []
    try:
        for _ in range(count):
            created.extend(map(cuda.cuMemCreate, (size,), (properties,), (0,)))
            result, extent = created[-1]
            if result:
                raise gpu.failure("cuMemCreate", result)
            exported.extend(map(cuda.cuMemExportToShareableHandle, (extent,), (kind,), (0,)))
            result, _ = exported[-1]
            if result:
                raise gpu.failure("cuMemExportToShareableHandle", result)
            del created[-1]  # no call stands between this and the release
            (released,) = cuda.cuMemRelease(extent)
            if released:
                raise gpu.failure("cuMemRelease", released)
        return [int(descriptor) for _, descriptor in exported]
    except BaseException:
        for result, descriptor in exported:
            if not result:
                os.close(int(descriptor))
        _release_all(gpu, created)
        raise


def map_side_by_side(gpu: Gpu, address: int, descriptors: Sequence[int], size: int, grants: Sequence[Any]) -> None:
    """Map the extents behind `descriptors` side by side from `address` on."""
    cuda, kind, at = gpu.cuda, gpu.descriptor_kind, address
    imported: list[Any] = []
    try:
        for descriptor in descriptors:
            imported.extend(map(cuda.cuMemImportFromShareableHandle, (descriptor,), (kind,)))
            result, extent = imported[-1]
            if result:
                raise gpu.failure("cuMemImportFromShareableHandle", result)
            at += size  # before the map: no call stands between them
            (result,) = cuda.cuMemMap(at - size, size, 0, extent, 0)
            if result:
                at -= size
                raise gpu.failure("cuMemMap", result)
            del imported[-1]
            (released,) = cuda.cuMemRelease(extent)
            if released:
                raise gpu.failure("cuMemRelease", released)
        gpu.call("cuMemSetAccess", address, at - address, grants, 1)
    except BaseException:
        _release_all(gpu, imported)
        if at > address:
            gpu.call("cuMemUnmap", address, at - address)
        raise


def _release_all(gpu: Gpu, made: Sequence[Any]) -> None:
    """Release the extents of an interrupted or failed call: what CUDA returned for each."""
    for result, extent in made:
        if not result:
            gpu.cuda.cuMemRelease(extent)
