"""The loader `--load-format membroker`: the first engine loads a model's weights, and the others map the same bytes.

Owns one model's start: find the segment or make it, and build the model over it, as vLLM's own weight daemon has its
engines do: on the meta device, and with the weights as processing has left them in the first engine (`processed.py`).
The first engine does that, too, with a model of its own beside the one that it has loaded. The shared bytes are
read-only: nothing here may let vLLM write to them.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import CompilationMode
from vllm.model_executor.model_loader import BaseModelLoader, get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import set_default_torch_dtype

from ... import Client, connect
from ...adapters.torch import TensorImage
from ...errors import InvalidRequest, SegmentExists, SegmentNotFound, SegmentNotSealed, WriterDied
from ...segment import Segment
from ...vmm.sizes import format_size
from ..bounds import say_wait, settings_from
from ..model_names import model_name
from . import logger, processed, seams
from .identity import digest_of, pinned
from .settings import WeightSettings, check_shareable, endpoint_of

_AGAIN_SECONDS = 0.2
_OUTAGE_SECONDS = 5.0
"""How long the start, and the end, of an engine waits for a broker that is away."""


class Loader(BaseModelLoader):  # type: ignore[misc]
    """Loads with another of vLLM's loaders and publishes, or attaches what another engine of the tenant published."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        seams.check()
        given = load_config.model_loader_extra_config
        self._settings = settings = settings_from("--model-loader-extra-config", given, WeightSettings)
        inner = copy.copy(load_config)
        inner.load_format, inner.model_loader_extra_config = settings.load_format, dict(settings.extra_config)
        self._inner = get_model_loader(inner)
        self._files: Any = None
        """The commit of the model that is published now."""
        self._created: Any = None
        if type(self._inner).load_model is not BaseModelLoader.load_model:
            raise InvalidRequest(
                f"load_format {settings.load_format!r} does more than to load weights: membroker cannot share them"
            )

    def download_model(self, model_config: Any) -> None:
        """Download what the other loader needs."""
        self._inner.download_model(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load into a model with memory of its own. Before it is published, note what it was, and load that commit."""
        if self._files is not None:
            self._created, model_config = processed.Created(model), self._files
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
            shared = _Shared(client, book, digest, settings)
            segment = shared.find(claim)
            if segment is None:
                segment = self._publish(shared, files, vllm_config, model_config, prefix)
            undo.callback(segment.close)
            try:
                with set_default_torch_dtype(model_config.dtype):
                    with torch.device("meta"):
                        model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
                    created = processed.Created(model)
                    about = processed.take_over(model, created, segment, torch.empty(0, device=target).device)
                    with _ReadOnly(segment), processed.followed(model), weights_already_processed():
                        process_weights_after_loading(model, model_config, target)
                    processed.finish(model, about)
                    kept = _bytes_in(_addresses(segment), model)
                    processed.check_kept(kept, created)
            except BaseException:
                if shared.is_publisher:
                    segment.delete()  # no engine can use it
                raise
            Finalize(model, client.close, exitpriority=0)
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

    def _publish(self, shared: _Shared, files: Any, vllm_config: Any, model_config: Any, prefix: str) -> Segment:
        """Load and process the model as vLLM does, store what has become of it, and drop it."""
        self._files = files
        model = super().load_model(_apart(vllm_config), model_config, prefix)
        storages, about = processed.describe(model, self._created)
        self._files = self._created = None
        image = TensorImage(storages, {processed.METADATA: about})
        segment = shared.publish(image, storages)
        try:
            before = {name: StorageWeakRef(value.untyped_storage()) for name, value in model.named_parameters()}
            del model, storages
            gc.collect()
            if left := [name for name, reference in before.items() if not reference.expired()]:
                raise InvalidRequest(
                    f"vLLM keeps a second reference to {left[0]}, one of {len(left)} of {len(before)} parameters that "
                    f"would be in memory twice: {processed.LEAVE_OUT}"
                )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        except BaseException:
            segment.delete()
            segment.close()
            raise
        return segment


def _apart(vllm_config: Any) -> Any:
    """Return a copy with which a model can be created that is dropped: vLLM registers each layer once.

    What would be compiled at its first step is kept by torch, for each of its classes that vLLM has decorated: so with
    this copy nothing would be.
    """
    own = copy.copy(vllm_config)
    own.compilation_config = copy.copy(vllm_config.compilation_config)
    own.compilation_config.mode = CompilationMode.NONE
    for name, value in vars(own.compilation_config).items():
        if isinstance(value, dict | list | set):
            setattr(own.compilation_config, name, copy.copy(value))
    return own


class _Shared:
    """The segment of one model's weights, which this engine finds or makes. All waits end `wait` seconds from now.

    An engine that makes it first claims that, by a small segment which it never seals: so no other engine takes memory
    for weights meanwhile, and a claim ends with its engine.
    """

    def __init__(self, client: Client, book: str, digest: str, settings: WeightSettings) -> None:
        self.name = f"{book}/weights-{digest}"
        self.is_publisher = False
        self._digest, self._claim_name = digest, f"{book}/loading-{digest}"
        self._client, self._model = client, client.model(book)
        self._deadline = time.monotonic() + settings.wait
        self._keep = settings.keep

    def find(self, undo: ExitStack) -> Segment | None:
        """Attach the segment, and wait while another engine makes it. None: this one has a claim on it until `undo`."""
        waits = False
        while True:
            if (found := self._attach()) is not None:
                return found
            with suppress(SegmentExists):
                claim = undo.enter_context(
                    self._model.create_segment(f"loading-{self._digest}", 1, timeout=self._left())
                )
                if (found := self._attach()) is not None:
                    claim.close()
                return found
            if not waits:
                logger.info("membroker: waiting up to %.0f s for the engine that loads %s", self._left(), self.name)
            waits = True
            with suppress(SegmentNotFound, WriterDied):
                self._client.attach(self._claim_name, timeout=self._left())
            self._pause()

    def publish(self, image: TensorImage, tensors: Mapping[str, Any]) -> Segment:
        """Make the segment, store the tensors and seal. The broker deletes it with the last engine, or it is kept."""
        with ExitStack() as undo:
            segment = undo.enter_context(self._create(image.size))
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
                return self._model.create_segment(
                    f"weights-{self._digest}", size, timeout=self._left(), delete_when_left=not self._keep
                )
            self._pause()

    def _pause(self) -> None:
        """Wait a moment: a name is free once the memory of its dead or deleted segment is."""
        if not self._left():
            raise SegmentNotSealed(f"{self.name} was not there in time: see `membroker segments`")
        time.sleep(_AGAIN_SECONDS)

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


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
                    f"would see: {processed.LEAVE_OUT}"
                )
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tensors that an operation of torch writes to, as its schema says."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_meta)


def _addresses(segment: Segment) -> range:
    return range(segment.address, segment.address + segment.size)


def _bytes_in(addresses: range, model: Any) -> int:
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in model.parameters()}
    return sum(size for address, size in storages.items() if address in addresses)
