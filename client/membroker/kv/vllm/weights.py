"""The loader `--load-format membroker`: the first engine loads a model's weights, and the others map the same bytes.

Owns one model's start: find the segment or make it, put it behind the parameters, and let vLLM process them. What vLLM
makes of the weights after loading is more than tensors (kernels, scales as Python numbers, packed copies), so every
engine lets vLLM do that itself, over the shared bytes. They are read-only: nothing here may let vLLM write to them, or
compute with a parameter that is not bound to them.
"""

from __future__ import annotations

import copy
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from vllm.model_executor.model_loader import BaseModelLoader, get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from ... import Client, connect
from ...adapters.torch import TensorImage, device_of, stored_tensor, tensor_names
from ...errors import InvalidRequest, MembrokerError, SegmentExists, SegmentNotFound, SegmentNotSealed, WriterDied
from ...safetensors import TensorIndex
from ...segment import Segment
from ...vmm.sizes import format_size
from ..bounds import say_wait
from ..model_names import model_name
from . import seams
from .identity import digest_of, pinned
from .settings import check_shareable, endpoint_of, weight_settings_of

logger = logging.getLogger("vllm.membroker")  # vLLM shows only loggers below its own

_HOLLOW_BYTES = 64 << 10
"""A parameter of at least so many bytes takes no memory while a model is built for weights that exist already."""
_AGAIN_SECONDS = 0.2
_OUTAGE_SECONDS = 5.0
"""How long the start, and the end, of an engine waits for a broker that is away."""
_building = threading.Lock()
"""Held while a model is built: torch's hooks are the process's, and none may come or go while another thread builds."""


class Loader(BaseModelLoader):  # type: ignore[misc]
    """Loads with another of vLLM's loaders and publishes, or attaches what another engine of the tenant published."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        seams.check()
        self._settings = settings = weight_settings_of(load_config.model_loader_extra_config)
        inner = copy.copy(load_config)
        inner.load_format, inner.model_loader_extra_config = settings.load_format, dict(settings.extra_config)
        self._inner = get_model_loader(inner)
        if type(self._inner).load_model is not BaseModelLoader.load_model:
            raise InvalidRequest(
                f"load_format {settings.load_format!r} does more than to load weights: membroker cannot share them"
            )

    def download_model(self, model_config: Any) -> None:
        """Download what the other loader needs."""
        self._inner.download_model(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load into a model with memory of its own."""
        self._inner.load_weights(model, model_config)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Return the model, with its parameters in a segment.

        Raises `InvalidRequest` for an engine or a model whose weights cannot be shared, and what `Client.attach` and
        `Model.create_segment` raise.
        """
        check_shareable(vllm_config)
        begun, settings = time.monotonic(), self._settings
        endpoint = endpoint_of(settings.endpoint, vllm_config.parallel_config)
        target = torch.device(self.load_config.device or vllm_config.device_config.device)
        with ExitStack() as undo, ExitStack() as claim:
            client = undo.enter_context(connect(endpoint, outage=_OUTAGE_SECONDS))
            files = pinned(model_config)
            book = settings.model or model_name(str(files.model))
            digest = digest_of(vllm_config, files, settings, prefix)
            shared = _Shared(client, book, digest, settings.wait)
            segment = shared.find(claim)
            with set_default_torch_dtype(model_config.dtype):
                hollow = _Hollow()
                with _building, target, nullcontext() if segment is None else hollow:
                    model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                if segment is None:
                    segment = shared.publish(_stored(model), lambda: self._load(model, files))
                undo.callback(segment.close)
                try:
                    _bind(_stored(model), segment, hollow.parameters)
                    hollow.parameters.clear()
                    with _ReadOnly(segment):
                        kept = _process(model, model_config, target, _addresses(segment))
                except BaseException:
                    if shared.is_publisher:
                        segment.delete()  # no engine can use it
                    raise
            Finalize(model, _leave, (client, segment, settings.keep), exitpriority=0)
            undo.pop_all()
        logger.info(
            "membroker: %s the weights %s, %s, in %.2f s; %s of them are used in place, read-only",
            "published" if shared.is_publisher else "attached",
            shared.name,
            format_size(segment.size),
            time.monotonic() - begun,
            format_size(kept),
        )
        return model.eval()

    def _load(self, model: Any, model_config: Any) -> None:
        """Load, and make sure that nothing but the tensors that are stored has changed."""
        before = _facts(model)
        self._inner.load_weights(model, model_config)
        after = _facts(model)
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        if changed:
            raise InvalidRequest(
                f"loading changes {changed[0]} of this model, not only its weights: leave --load-format membroker out"
            )


class _Shared:
    """The segment of one model's weights, which this engine finds or makes. All waits end `wait` seconds from now.

    An engine that makes it first claims that, by a small segment which it never seals: so no other engine takes memory
    for weights meanwhile, and a claim ends with its engine.
    """

    def __init__(self, client: Client, book: str, digest: str, wait: float) -> None:
        self.name = f"{book}/weights-{digest}"
        self.is_publisher = False
        self._claim_name = f"{book}/loading-{digest}"
        self._client, self._model = client, client.register_model(book)
        self._deadline = time.monotonic() + wait

    def find(self, undo: ExitStack) -> Segment | None:
        """Attach the segment, and wait while another engine makes it. None: this one has a claim on it until `undo`."""
        waits = False
        while True:
            if (found := self._attach()) is not None:
                return found
            with suppress(SegmentExists):
                claim = undo.enter_context(self._model.create_segment(_own(self._claim_name), 1, wait=self._left()))
                if (found := self._attach()) is not None:
                    claim.close()
                return found
            if not waits:
                logger.info("membroker: waiting up to %.0f s for the engine that loads %s", self._left(), self.name)
            waits = True
            with suppress(SegmentNotFound, WriterDied):
                self._client.attach(self._claim_name, timeout=self._left())
            self._pause()

    def publish(self, tensors: Mapping[str, Any], load: Callable[[], None]) -> Segment:
        """Make the segment, then `load`, store the tensors and seal."""
        image = TensorImage(tensors, {"format": "pt"}, align_from=1)
        with ExitStack() as undo:
            segment = undo.enter_context(self._create(image.size))
            load()
            image.write(segment, tensors)
            segment.seal()
            undo.pop_all()
        self.is_publisher = True
        return segment

    def _attach(self) -> Segment | None:
        with suppress(SegmentNotFound, SegmentNotSealed, WriterDied):
            return self._client.attach(self.name, timeout=0)
        return None

    def _create(self, size: int) -> Segment:
        say_wait(size, self._model, logger, self._left())
        while True:
            with suppress(SegmentExists):
                return self._model.create_segment(_own(self.name), size, wait=self._left())
            self._pause()

    def _pause(self) -> None:
        """Wait a moment: a name is free once the memory of its dead or deleted segment is."""
        if not self._left():
            raise SegmentNotSealed(f"{self.name} was not there in time: see `membroker segments`")
        time.sleep(_AGAIN_SECONDS)

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _own(name: str) -> str:
    return name.rpartition("/")[2]


class _ReadOnly(TorchDispatchMode):  # type: ignore[misc]
    """Raise before an operation of torch that writes to a segment, which would end the process."""

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self._addresses = _addresses(segment)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for written in _written(func, args, kwargs or {}):
            if written.data_ptr() in self._addresses:
                raise InvalidRequest(
                    f"vLLM writes to a weight of {list(written.shape)} after loading ({func}), which other engines "
                    "would see: leave --load-format membroker out"
                )
        return func(*args, **(kwargs or {}))


class _Hollow(TorchDispatchMode):  # type: ignore[misc]
    """Build a model whose large parameters have one element of memory, for weights that exist already.

    They keep their class, their attributes and their device, which vLLM's layers rely on. Initial values are not
    written. `parameters` are those without memory. Only models that this thread builds are meant.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.parameters: list[Any] = []
        self._addresses: set[int] = set()

    def __enter__(self) -> Any:
        hook = torch.nn.modules.module.register_module_parameter_registration_hook
        self._handle = hook(self._empty)
        return super().__enter__()

    def __exit__(self, *about: object) -> Any:
        self._handle.remove()
        return super().__exit__(*about)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for written in _written(func, args, kwargs or {}):
            if written.untyped_storage().data_ptr() in self._addresses:
                return written
        return func(*args, **(kwargs or {}))

    def _empty(self, _module: Any, _name: str, parameter: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if parameter is None or parameter.is_meta or not parameter.is_contiguous():
            return
        if parameter.numel() * parameter.itemsize >= _HOLLOW_BYTES:
            parameter.data = parameter.data.new_empty(()).expand(parameter.shape)
            self.parameters.append(parameter)
            self._addresses.add(parameter.untyped_storage().data_ptr())


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tensors that an operation of torch writes to, as its schema says."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_meta)


def _addresses(segment: Segment) -> range:
    return range(segment.address, segment.address + segment.size)


def _stored(model: Any) -> dict[str, Any]:
    """Return what a checkpoint can set: parameters, each once, and persistent buffers.

    Raises `InvalidRequest` for a tensor that is more than bytes, or that has none yet.
    """
    stored = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        before = f"{prefix}." if prefix else ""
        for own, value in module._buffers.items():
            if value is not None and own not in module._non_persistent_buffers_set:
                stored[before + own] = value
    for name, value in stored.items():
        is_lazy = value.is_meta or isinstance(value, torch.nn.parameter.UninitializedTensorMixin)
        if is_lazy or value.layout != torch.strided or is_traceable_wrapper_subclass(value):
            raise InvalidRequest(
                f"{name} is a {type(value).__name__} that is quantized while it is loaded, or more than one tensor: it "
                "cannot be shared. Leave --load-format membroker out"
            )
    return stored


def _facts(model: Any) -> dict[str, Any]:
    """Return all that a model has besides the values of its stored tensors: attributes, shapes, other tensors."""
    stored = _stored(model)
    facts: dict[str, Any] = {name: (value.shape, value.dtype, id(value)) for name, value in stored.items()}
    known = {id(value) for value in stored.values()}
    for prefix, module in model.named_modules():
        facts[prefix] = type(module)
        for own, value in {**vars(module), **module._buffers}.items():
            if isinstance(value, bool | int | float | str | None):
                facts[f"{prefix}.{own}"] = value
            elif isinstance(value, torch.Tensor) and id(value) not in known:
                facts[f"{prefix}.{own}"] = (value.data_ptr(), value._version)
    return facts


def _bind(stored: Mapping[str, Any], segment: Segment, hollow: Sequence[Any]) -> None:
    """Put the segment behind the parameters. Buffers get a copy, because vLLM writes to some.

    Raises `InvalidRequest` if the segment has other tensors, or if something still refers to the memory that a
    parameter had: it would be a second copy, or one without contents.
    """
    index = segment.index()
    _check_same(stored, index, segment)
    lent, own = device_of(segment.driver.device), next(iter(stored.values())).device
    if lent != own:
        raise InvalidRequest(f"this engine computes on {own}, and the broker lends memory of {lent}")
    without_memory = {id(tensor) for tensor in hollow}
    before: dict[str, Any] = {}
    with torch.no_grad():
        for name, value in stored.items():
            shared = stored_tensor(segment, index[name])
            is_parameter = isinstance(value, torch.nn.Parameter)
            if is_parameter and (id(value) in without_memory or value.is_contiguous()):
                before[name] = StorageWeakRef(value.untyped_storage())
                value.data = shared
            else:
                value.copy_(shared)
    if not all(reference.expired() for reference in before.values()):
        gc.collect()
    left = [name for name, reference in before.items() if not reference.expired() and stored[name].numel()]
    if left:
        raise InvalidRequest(
            f"vLLM keeps a second reference to {left[0]}, which cannot be shared: leave --load-format membroker out"
        )
    if next(iter(stored.values())).is_cuda:
        torch.cuda.empty_cache()  # the memory that the parameters had


def _check_same(stored: Mapping[str, Any], index: TensorIndex, segment: Segment) -> None:
    wanted = TensorImage(stored, {}, align_from=1).index
    names, found = tensor_names(wanted), tensor_names(index)
    problems = [f"{name} is on one side only" for name in sorted(names ^ found)]
    for name in sorted(names & found):
        here, there = wanted[name], index[name]
        if (here.dtype, here.shape) != (there.dtype, there.shape):
            problems.append(
                f"{name} is {here.dtype} {list(here.shape)} here and {there.dtype} {list(there.shape)} there"
            )
    if problems:
        raise InvalidRequest(
            f"{segment.resource_name} does not fit this model: {problems[0]} ({len(problems)} differences). If it is "
            "left over from something else, delete it with `membroker segments delete`"
        )


def _process(model: Any, model_config: Any, target: Any, addresses: range) -> int:
    """Let vLLM process the weights, and return how many of their bytes are still used in place.

    Raises `InvalidRequest` if that is less than half: then each engine has a copy of its own.
    """
    storages = [value.untyped_storage() for value in model.parameters() if value.data_ptr() in addresses]
    sizes = [(reference.nbytes(), StorageWeakRef(reference)) for reference in storages]
    del storages
    process_weights_after_loading(model, model_config, target)
    kept, total = sum(size for size, reference in sizes if not reference.expired()), sum(size for size, _ in sizes)
    if 2 * kept < total:
        raise InvalidRequest(
            f"vLLM repacks the weights of this model after loading: {total - kept} of {total} bytes would be a copy "
            "of each engine's own. Leave --load-format membroker out"
        )
    return int(kept)


def _leave(client: Client, segment: Segment, keep: bool) -> None:
    """End this engine's use, at its end. The last engine deletes the segment, unless it is to be kept."""
    with suppress(MembrokerError):  # the broker may be away: the hold ends with this process
        if not keep:
            mine = [held for held in client.segments() if held.generation == segment.generation]
            if mine and mine[0].sessions <= 1:
                segment.delete()
        segment.close()
        client.close()
