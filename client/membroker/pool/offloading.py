"""`Offloading`: the public calls that move a pool's bytes to the host, and back.

It checks the requests and converts them to pages. `offload` knows where the bytes lie.
"""

from __future__ import annotations

from ..arguments import Progress, check_progress, deadline_of
from ..interrupts import uninterrupted
from ..safetensors import segment_size
from .page_store import PageStore, check_segment, runs_in, shapes
from .paged import Paged


class Offloading(Paged):
    """Pages whose memory can be released while their bytes lie on the host."""

    def offload(
        self,
        offset: int = 0,
        size: int | str | None = None,
        *,
        to: PageStore | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Copy the bytes of the pages that [offset, offset + size) touches to the host, and release their memory.

        Without a range it offloads the whole pool. It skips pages that are not allocated or are offloaded already, and
        releases spare pages without a copy; a pool that borrows ahead does so again from the next allocation on. The
        pages stay allocated and keep their addresses, but have no memory until `restore`. Returns the number of bytes
        copied. `progress(done, total)` is called with bytes, and an exception that it raises stops the copying. If the
        main thread calls `offload`, `progress` runs in another thread, so no interrupt is raised in it. Ctrl-C stops
        the copying between two chunks.

        The bytes go to pinned host memory of this process. The model is charged for it at the location `host`, as a
        declaration. With `to`, they go to a segment at that location that this process has created and not sealed. The
        segment is sealed at the end, and then outlives the process (`restore_from`). `offload_size` returns the size
        that it needs. After an `offload` to a segment has stopped half way, that segment takes no other pages until
        these are restored.

        Waits for the work that this process has submitted to the device. Raises `OutOfMemory` when the host's limit
        refuses, `BufferError` while a view of a page or of `to` is alive, `NotMapped` when another call is changing a
        page, `InvalidOffset`, `InvalidRequest`, and what a segment raises; nothing has changed then. `DeviceFailure`,
        `ClosedError`, and an exception of `progress` may stop it half way: the pages copied until then are offloaded,
        the rest is unchanged, and the error's `metadata` has the bytes of both. If only the seal fails, because the
        broker is unreachable or a view of `to` was taken meanwhile, everything is offloaded, and `to.seal()` retries.
        """
        self._holding.check_open()
        check_progress(progress)
        pages = self._touched_or_all(offset, size)
        return uninterrupted(lambda: self._backing.offload(pages, to, progress), self._holding.interrupted)

    def offload_size(self, offset: int = 0, size: int | str | None = None) -> int:
        """Return the bytes that a segment needs, header included, for an `offload` of this range now.

        Raises `NotMapped` when another call is changing a page, `InvalidOffset`, `InvalidRequest` and `ClosedError`.
        """
        self._holding.check_open()
        pages = self._touched_or_all(offset, size)
        return segment_size(shapes(self._backing.used_runs(pages), self._page_size))

    def restore(
        self,
        offset: int = 0,
        size: int | str | None = None,
        *,
        progress: Progress | None = None,
        keep_pinned: bool = False,
        wait: float | None = None,
    ) -> int:
        """Borrow memory for the offloaded pages of [offset, offset + size), and copy their bytes back.

        The pages keep their addresses and their access. Without a range it restores the whole pool. It skips pages that
        are not offloaded. Pinned memory is freed and no longer declared. With `keep_pinned` it stays for the next
        `offload`, because pinning memory takes far longer than copying it. A segment stays as it is. Returns the number
        of bytes copied; `progress` is that of `offload`, and `wait` that of `allocate`, in total for all pages.

        Raises `OutOfMemory` when there is not enough memory: the pages restored until then stay restored, the rest
        stays offloaded, and `metadata` has `restored_bytes` and `offloaded_bytes`. The same is true for every error
        half way. Also raises the other errors of `allocate`, and `NotMapped` when another call is changing a page.
        """
        until = deadline_of(wait)
        self._holding.check_open()
        check_progress(progress)
        pages = self._touched_or_all(offset, size)
        return uninterrupted(
            lambda: self._backing.restore(pages, progress, until, keep_pinned=keep_pinned), self._holding.interrupted
        )

    def restore_from(self, segment: PageStore, *, progress: Progress | None = None, wait: float | None = None) -> int:
        """Restore pages that another pool, possibly of another process, has offloaded to `segment`.

        The pages keep their offsets, and nothing may be allocated there. The page size must divide their offsets and
        sizes. Afterwards the pages are as if this pool had offloaded and restored them, also after an error half way.
        `wait` is that of `restore`. Returns the number of bytes copied. Raises `InvalidRequest` if `segment` is not a
        sealed segment of offloaded pages, or its pages do not fit this pool, `InvalidTensorIndex`, `AlreadyMapped`, and
        what `restore` raises.
        """
        until = deadline_of(wait)
        self._holding.check_open()
        check_progress(progress)
        check_segment(segment, self._holding.source.driver)
        found = runs_in(segment, self._page_size, self._capacity)
        return uninterrupted(
            lambda: self._backing.restore_from(segment, found, progress, until), self._holding.interrupted
        )
