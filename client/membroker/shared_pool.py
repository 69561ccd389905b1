"""`SharedMemoryPool`: the models of one program, a pool for each, and one limit for all of them.

Owns the table of models, and the total of their memory. It must never hold its lock while it registers a model, maps or
unmaps, so that one model's threads do not wait for another's.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from . import LocalSource, VirtualMemoryPool
from .errors import BrokerUnavailable, ClosedError, InvalidRequest, ModelAlreadyExists, ModelInUse, ModelNotFound
from .ext import Budget, Closing, Placement, Source, arguments, uninterrupted
from .types import GlobalMemoryStats, MemoryStats
from .vmm.driver import Driver, Location
from .vmm.sizes import Size

if TYPE_CHECKING:
    from . import Client, Model
    from .ext import PoolRange


class SharedMemoryPool(Closing):
    """At most `physical_limit` bytes of memory for the models of one program. A context manager.

    `lender` is a `Client`, and then each model is registered with its broker, or a `LocalSource`. The caller closes it.
    With a `physical_limit` of None only the lender's limits apply. Each model has addresses of its own, and pages of
    `page_size` bytes at `location`. Usage is counted in whole pages.

    Thread-safe. Sizes are in bytes, or text such as `"8GiB"`. Raises `InvalidRequest`.
    """

    def __init__(
        self,
        lender: Client | LocalSource,
        physical_limit: Size | None = None,
        page_size: Size = "64MiB",
        location: Location | str = Location.DEVICE,
    ) -> None:
        self._lender = lender
        self._budget = Budget(
            None if physical_limit is None else arguments.bytes_of("physical_limit", physical_limit), "shared pool"
        )
        self._page_size = page_size
        self._location = arguments.location_of(location)
        # The value is None while a model is being registered.
        self._models: dict[str, _Hosted | None] = {}
        self._lock = threading.Lock()
        self._closed = False

    def register_model(self, model_id: str, virtual_capacity: Size, limit: Size | None = None) -> None:
        """Reserve addresses for a model; it holds no memory yet. `limit` is the most that it may hold, in bytes.

        With a client, the model is registered with the broker, or joined there. Raises `ModelAlreadyExists`, and what
        `Client.model` and `VirtualMemoryPool` raise; nothing more is registered then than before. Ctrl-C is
        raised at the end, so the model may be registered after it.
        """
        if not isinstance(model_id, str):
            raise InvalidRequest(f"a model's name is text, not {type(model_id).__name__}")
        self._check_open()
        uninterrupted(lambda: self._register(model_id, virtual_capacity, limit))

    def _register(self, model_id: str, virtual_capacity: Size, limit: Size | None) -> None:
        with self._lock:
            self._check_open()
            if model_id in self._models:
                raise ModelAlreadyExists(f"{model_id!r} is registered already: unregister_model() it first")
            self._models[model_id] = None
        try:
            hosted = self._host(model_id, virtual_capacity, limit)
        except BaseException:
            with self._lock:
                self._models.pop(model_id, None)
            raise
        with self._lock:
            if not self._closed:
                self._models[model_id] = hosted
                return
        hosted.end()
        raise ClosedError("this shared pool was closed meanwhile")

    def _host(self, model_id: str, virtual_capacity: Size, limit: Size | None) -> _Hosted:
        if isinstance(self._lender, LocalSource):
            own = [] if limit is None else [Budget(arguments.bytes_of("limit", limit), "model")]
            return _Hosted(self._pool(self._lender, virtual_capacity, own), None)
        arguments.check_page_size(self._page_size, self._lender.granularity)
        on_device = self._location is Location.DEVICE
        with ExitStack() as undo:
            model = self._lender.model(
                model_id,
                virtual_capacity=virtual_capacity,
                limit=limit if on_device else None,
                host_limit=None if on_device else limit,
            )
            undo.callback(model.leave)
            hosted = _Hosted(self._pool(model, virtual_capacity, []), model)
            undo.pop_all()
        return hosted

    def _pool(self, lender: Model | LocalSource, virtual_capacity: Size, own: list[Budget]) -> VirtualMemoryPool:
        counted = _Counted(lender, [self._budget, *own])
        return VirtualMemoryPool(counted, virtual_capacity, self._page_size, self._location)

    def pool(self, model_id: str) -> VirtualMemoryPool:
        """Return the model's pool, for its base address, views, mappings and all other calls.

        Raises `ModelNotFound` and `ClosedError`.
        """
        return self._hosted(model_id).pool

    def allocate_for_model(self, model_id: str, size: Size, *, timeout: float | None = None) -> PoolRange:
        """Back `size` bytes for a model, and return their range. Its address is constant until they are freed or moved.

        They begin at a page, in the lowest free run of pages that holds them. `timeout` is that of
        `VirtualMemoryPool.allocate`: nothing waits for room within `physical_limit`. Raises `ModelNotFound`,
        `OutOfMemory` with the requested and the available bytes, `OutOfVirtualMemory` if the model has no free
        run of addresses that is long enough, and otherwise what `VirtualMemoryPool.allocate` raises; nothing has
        changed then.
        """
        return self.pool(model_id).allocate_anywhere(size, timeout=timeout)

    def deallocate_for_model(self, model_id: str, offset: int, size: Size) -> None:
        """Release every page that [offset, offset + size) of a model touches.

        `offset` is that of their range (`PoolRange.offset`), in bytes. Raises `ModelNotFound`, and what
        `VirtualMemoryPool.free` raises.
        """
        self.pool(model_id).free(offset, size)

    def get_model_stats(self, model_id: str) -> MemoryStats:
        """Return the figures of a model's pool. Raises `ModelNotFound` and `ClosedError`."""
        return self.pool(model_id).stats()

    def global_stats(self) -> GlobalMemoryStats:
        """Return the figures of all models together."""
        models = sum(hosted is not None for hosted in list(self._models.values()))
        return GlobalMemoryStats(self._budget.limit, self._budget.used, models)

    def unregister_model(self, model_id: str) -> None:
        """Release a model's memory and addresses, and forget the model. With a client, also leave it at the broker.

        The model stays registered at the broker if the broker is unreachable, if this client still holds memory of it,
        or if this client has registered it elsewhere too. It then ends with the client. Raises `ModelNotFound`, and
        `ModelInUse` while a view, a span or a pin of it is alive; nothing has changed then. After a `DeviceFailure` its
        pool is closed, and another `unregister_model` releases the rest.
        """
        hosted = self._hosted(model_id)
        if hosted.in_use:
            raise ModelInUse(f"{model_id!r} has living views, spans or pins: release them first")
        uninterrupted(lambda: self._unregister(model_id, hosted))

    def _unregister(self, model_id: str, hosted: _Hosted) -> None:
        with self._lock:
            if self._models.get(model_id) is not hosted:  # another thread was first
                raise self._not_found(model_id)
            del self._models[model_id]
        try:
            hosted.end()
        except BaseException:
            with self._lock:
                self._models.setdefault(model_id, hosted)  # so that another call retries
            raise

    def close(self) -> None:
        """Release the memory of all models. Idempotent. Memory with living views stays until they are gone.

        Raises `DeviceFailure`.
        """
        if self._closed or self._lender.closed:  # a closed lender ended the pools; after a fork the lock may be held
            self._closed = True
            return
        uninterrupted(self._close)

    def __repr__(self) -> str:
        closed = ", closed" * (self._closed or self._lender.closed)
        return f"<membroker.SharedMemoryPool of {len(self._models)} models{closed}>"

    def _close(self) -> None:
        with ExitStack() as ends:
            with self._lock:
                self._closed = True
                models, self._models = self._models, {}
            for hosted in models.values():
                if hosted is not None:
                    ends.callback(hosted.end)

    def _hosted(self, model_id: str) -> _Hosted:
        self._check_open()
        hosted = self._models.get(model_id)
        if hosted is None:
            raise self._not_found(model_id)
        return hosted

    def _check_open(self) -> None:
        """Raise `ClosedError` if this is closed, or was inherited over a fork. Takes no lock."""
        if self._closed:
            raise ClosedError("this shared pool is closed")
        if self._lender.closed:
            raise ClosedError("the lender of this shared pool is closed, or another process's: make both again")

    def _not_found(self, model_id: object) -> ModelNotFound:
        return ModelNotFound(f"{model_id!r} is not registered with this shared pool: register_model() it first")


class _Hosted:
    """A model of a shared pool: its pool, and its registration with the broker, if there is one."""

    def __init__(self, pool: VirtualMemoryPool, model: Model | None) -> None:
        self.pool = pool
        self._model = model

    @property
    def in_use(self) -> bool:
        """Whether a view, a span or a pin of the pool is alive."""
        return not self.pool.closed and any(mapping.state == "pinned" for mapping in self.pool.mappings())

    def end(self) -> None:
        """Close the pool, and leave the model at the broker."""
        self.pool.close()
        if self._model is not None:
            with suppress(BrokerUnavailable, ClosedError, ModelInUse):
                self._model.leave()


class _Counted:
    """A source whose extents count against budgets (a `Source`)."""

    def __init__(self, lender: Model | LocalSource, budgets: Sequence[Budget]) -> None:
        self.lender = lender
        self._source: Source = lender if isinstance(lender, LocalSource) else lender.source
        self._budgets = budgets
        source = self._source
        self.track, self.untrack, self.later = source.track, source.untrack, source.later
        # The budgets count memory of extents: what the process allocates itself is charged by the lender only.
        self.charge, self.credit = source.charge, source.credit

    @property
    def driver(self) -> Driver:
        return self._source.driver

    def borrow(
        self,
        extent_bytes: int,
        count: int,
        location: Location,
        placement: Placement,
        until: float | None,
        **hints: Any,
    ) -> None:
        """Debit the budgets, then borrow. Only the lender lets it wait: the budgets refuse at once."""
        key = Budget.key()
        try:
            for budget in self._budgets:
                budget.debit(extent_bytes * count, key)
            counted = _CountedPlacement(placement, key, self._budgets)
            self._source.borrow(extent_bytes, count, location, counted, until, **hints)
        finally:
            for budget in self._budgets:
                budget.credit([key])

    def give_back(self, extent_ids: Sequence[int]) -> None:
        """Release the extents, then credit the budgets."""
        self._source.give_back(extent_ids)
        for budget in self._budgets:
            budget.credit(extent_ids)

    def interrupted(self) -> None:
        """Credit the rest of this thread's interrupted borrowing."""
        for budget in self._budgets:
            budget.credit([Budget.key()])
        self._source.interrupted()


class _CountedPlacement:
    """A placement that assigns each extent its part of the debit."""

    def __init__(self, placement: Placement, key: int, budgets: Sequence[Budget]) -> None:
        self._placement = placement
        self._key = key
        self._budgets = budgets
        self._ids: list[int] = []

    def place(self, extent_ids: Sequence[int], descriptors: Sequence[int], extent_bytes: int) -> None:
        self._ids += extent_ids
        for budget in self._budgets:
            budget.assign(self._key, extent_ids, extent_bytes)
        self._placement.place(extent_ids, descriptors, extent_bytes)

    def undo(self) -> None:
        self._placement.undo()
        for budget in self._budgets:
            budget.unassign(self._key, self._ids)
