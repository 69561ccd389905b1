"""Many extents by one call, with as little Python between the driver's calls as can be.

An interrupt loses nothing: what CUDA returns is stored in the same step of the interpreter, by `list.extend(map(...))`,
as in `wire.descriptors.receive`. An error undoes all that the call has made.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from .gpu import Gpu


class Packets:
    """The calls of one GPU that create, export, import and map extents by the packet."""

    def __init__(self, gpu: Gpu) -> None:
        self._cuda, self._call, self._failure, self._kind = gpu.cuda, gpu.call, gpu.failure, gpu.descriptor_kind

    def lend(self, size: int, count: int, properties: Any) -> list[int]:
        """Create `count` extents, and return a descriptor of each."""
        cuda, kind = self._cuda, self._kind
        created: list[Any] = []
        exported: list[Any] = []
        try:
            for _ in range(count):
                created.extend(map(cuda.cuMemCreate, (size,), (properties,), (0,)))
                result, extent = created[-1]
                if result:
                    raise self._failure("cuMemCreate", result)
                exported.extend(map(cuda.cuMemExportToShareableHandle, (extent,), (kind,), (0,)))
                result, _ = exported[-1]
                if result:
                    raise self._failure("cuMemExportToShareableHandle", result)
                del created[-1]  # no call stands between this and the release
                (released,) = cuda.cuMemRelease(extent)
                if released:
                    raise self._failure("cuMemRelease", released)
            return [int(descriptor) for _, descriptor in exported]
        except BaseException:
            for result, descriptor in exported:
                if not result:
                    os.close(int(descriptor))
            self._release_all(created)
            raise

    def map(self, address: int, descriptors: Sequence[int], size: int, grants: Sequence[Any]) -> None:
        """Map the extents behind `descriptors` side by side from `address` on."""
        cuda, kind, at = self._cuda, self._kind, address
        imported: list[Any] = []
        try:
            for descriptor in descriptors:
                imported.extend(map(cuda.cuMemImportFromShareableHandle, (descriptor,), (kind,)))
                result, extent = imported[-1]
                if result:
                    raise self._failure("cuMemImportFromShareableHandle", result)
                at += size  # before the map: no call stands between them
                (result,) = cuda.cuMemMap(at - size, size, 0, extent, 0)
                if result:
                    at -= size
                    raise self._failure("cuMemMap", result)
                del imported[-1]
                (released,) = cuda.cuMemRelease(extent)
                if released:
                    raise self._failure("cuMemRelease", released)
            self._call("cuMemSetAccess", address, at - address, grants, 1)
        except BaseException:
            self._release_all(imported)
            if at > address:
                self._call("cuMemUnmap", address, at - address)
            raise

    def _release_all(self, made: Sequence[Any]) -> None:
        """Release the extents of an interrupted or failed call: what CUDA returned for each."""
        for result, extent in made:
            if not result:
                self._cuda.cuMemRelease(extent)
