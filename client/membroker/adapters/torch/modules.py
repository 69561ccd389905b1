"""PyTorch modules in segments: weights that are published once and attached by many.

Owns which tensors of a module are stored, by which names, and how they are put into another module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from ... import Model
from ...errors import InvalidRequest
from ...safetensors import TensorIndex
from ...segment import Segment
from ...vmm.driver import Location
from .image import TensorImage, shape_in_torch, stored_tensor
from .package import torch
from .tensors import DTYPES, device_of

_MOST_NAMES = 5


class _Slot(NamedTuple):
    """Where a module keeps a parameter or a buffer: `own` is its name in `owner`, `name` in the whole module."""

    name: str
    owner: torch.nn.Module
    own: str
    is_parameter: bool
    persistent: bool
    value: torch.Tensor


def publish_module(
    model: Model,
    name: str,
    module: torch.nn.Module,
    *,
    metadata: Mapping[str, str] | None = None,
    location: Location | str = Location.DEVICE,
    progress: Callable[[int, int], object] | None = None,
    replace: bool = False,
    timeout: float | None = None,
) -> Segment:
    """Make a segment from a module's parameters and buffers, and seal it. After a failure there is no segment.

    The segment is the image of a safetensors file, as `safetensors.torch.save_model` writes it: a parameter with
    several names, or that shares its memory exactly, is stored once, and `metadata` lists its other names.
    Non-persistent buffers and gradients are not stored. Everything is stored in C order, and each tensor begins at a
    multiple of 256 bytes, which kernels for fp8 and bf16 require. `progress(done, total)` is called with bytes.
    `replace` makes it the newest version of the name. Without it the name is free, or that of a segment that is left,
    which is deleted. For both, and for `timeout`, see `Model.create_segment`.

    The module may be on the GPU or on the host. It keeps its own memory, so during this call both copies exist. Raises
    what `Model.create_segment` raises, and `InvalidRequest` for a parameter on the meta device, of a kind without plain
    bytes, or with a name such as `!1`, which a segment's header has for gaps.
    """
    stored, ties = _contents(module)
    image = TensorImage(stored, {**(metadata or {}), **ties, "format": "pt"})
    segment = model.create_segment(name, image.size, location, replace=replace, replace_left=True, timeout=timeout)
    with ExitStack() as undo:
        undo.callback(segment.close)
        image.write(segment, stored, progress)
        segment.seal()
        undo.pop_all()
    return segment


def attach_module(segment: Segment, module: torch.nn.Module, strict: bool = True) -> torch.nn.Module:
    """Replace a module's parameters and buffers by tensors over a sealed segment, and return the module.

    Nothing is copied: every process that attaches computes with the same bytes. They are read-only, so parameters have
    `requires_grad=False`. The module may be on the meta device (see `without_weights`). Its previous tensors are
    dropped, its other buffers move to the device of the weights, and names that are tied in the segment are tied in the
    module. The segment's memory stays until the last of these tensors is gone, even if the segment is closed before.

    Raises `InvalidRequest`, and changes nothing, if shapes differ. With `strict` it also raises if dtypes differ, if
    the segment lacks a name of the module or has an extra one, or if a buffer that is not in the segment has no memory.
    Without `strict` those names are left as they are, and dtypes are the segment's. Raises `InvalidTensorIndex` for a
    segment without a header.
    """
    if segment.writable:
        raise InvalidRequest(f"{segment.resource_name} is still being written: seal it first")
    index = segment.index()
    slots = list(_slots(module))
    found = _matched(slots, index)
    problems = [problem for slot in slots for problem in _differences(slot, index, found, strict)]
    if strict:
        extra = set(index) - set(found.values())
        problems += [f"{key} is not in the module" for key in index if key in extra]
    if problems:
        more = f", and {len(problems) - _MOST_NAMES} more" if len(problems) > _MOST_NAMES else ""
        raise InvalidRequest(
            f"{segment.resource_name} does not fit the module: {'; '.join(problems[:_MOST_NAMES])}{more}"
        )
    _put(segment, index, slots, found)
    return module


@contextmanager
def without_weights() -> Iterator[None]:
    """In this block, and in this thread, build modules whose parameters take no memory, for `attach_module`.

    The parameters are on torch's meta device. Buffers are computed as usual, including those that are in no checkpoint,
    which `torch.device("meta")` would lose.
    """
    thread = threading.get_ident()

    def on_meta(_module: Any, _name: str, parameter: Any) -> Any:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None
        return torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = torch.nn.modules.module.register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        handle.remove()


def _slots(module: torch.nn.Module) -> Iterator[_Slot]:
    """Yield every slot of a parameter or buffer; those of a shared module once for each of its names."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        before = f"{prefix}." if prefix else ""
        for own, value in owner._parameters.items():
            if value is not None:
                yield _Slot(before + own, owner, own, is_parameter=True, persistent=True, value=value)
        for own, value in owner._buffers.items():
            if value is not None:
                persistent = own not in owner._non_persistent_buffers_set
                yield _Slot(before + own, owner, own, is_parameter=False, persistent=persistent, value=value)


def _contents(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors to store, by their first names, and their other names."""
    stored: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    names: dict[Any, str] = {}
    # The metadata key "format" says what wrote the file, so it cannot be used for a tie.
    for slot in sorted(_slots(module), key=lambda slot: slot.name != "format"):
        if not slot.persistent:
            continue
        _check_plain(slot.name, slot.value)
        first = names.setdefault(_identity(slot.value), slot.name)
        if first == slot.name:
            stored[slot.name] = slot.value
        else:
            ties[slot.name] = first
    return stored, ties


def _identity(value: torch.Tensor) -> Any:
    """Return a key that is equal for tensors over the same bytes in the same form."""
    if not value.numel():
        return id(value)
    # A conjugated or negated view changes the elements on reading: the same bytes, but other numbers.
    seen = value.is_conj(), value.is_neg()
    return value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), seen


def _check_plain(name: str, value: torch.Tensor) -> None:
    if value.is_meta or isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
        raise InvalidRequest(f"{name} has no memory yet (it is on the meta device, or lazy): load the module first")
    # Quantized wrappers and the like consist of several tensors; their type shows it.
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.layout != torch.strided:
        what = f"{type(value).__name__} of layout {value.layout}"
        raise InvalidRequest(f"{name} is a {what}: only plain tensors have bytes that another process can use")


def _matched(slots: Sequence[_Slot], index: TensorIndex) -> dict[str, str]:
    """Return the stored name for each name of a module: its own, one tied to it in the segment, or in the module."""
    found: dict[str, str] = {}
    here: dict[int, str] = {}
    for slot in slots:
        key = slot.name if slot.name in index else index.metadata.get(slot.name)
        if key is not None and key in index and slot.persistent:
            found[slot.name] = key
            here.setdefault(id(slot.value), key)
    for slot in slots:
        if slot.persistent and slot.name not in found and id(slot.value) in here:
            found[slot.name] = here[id(slot.value)]
    return found


def _differences(slot: _Slot, index: TensorIndex, found: Mapping[str, str], strict: bool) -> Iterator[str]:
    """Yield a sentence for each difference between a slot and the segment."""
    if slot.name not in found:
        if strict and slot.persistent:
            yield f"{slot.name} is not in the segment"
        elif strict and slot.value.is_meta:
            yield (
                f"{slot.name} is in no segment (a buffer that is not persistent), and on the meta device: "
                "build the module with without_weights()"
            )
        return
    info = index[found[slot.name]]
    if info.dtype not in DTYPES:
        yield f"{slot.name} is {info.dtype} in the segment, which this torch does not have"
    elif tuple(slot.value.shape) != shape_in_torch(info):
        here, there = list(slot.value.shape), list(shape_in_torch(info))
        yield f"{slot.name} has the shape {here} in the module and {there} in the segment"
    elif strict and slot.value.dtype != DTYPES[info.dtype]:
        yield f"{slot.name} is {slot.value.dtype} in the module and {DTYPES[info.dtype]} in the segment"


def _put(segment: Segment, index: TensorIndex, slots: Sequence[_Slot], found: Mapping[str, str]) -> None:
    """Set the tensors, one object for all names of the same tensor."""
    made: dict[tuple[str, bool], torch.Tensor] = {}
    views: dict[str, torch.Tensor] = {}
    place = device_of(segment.span(0, segment.size).device)
    for slot in slots:
        key = found.get(slot.name)
        if key is None:
            if not slot.is_parameter and not slot.value.is_meta:
                slot.owner._buffers[slot.own] = slot.value.to(place)
            continue
        if key not in views:
            views[key] = stored_tensor(segment, index[key])
        value = made.get((key, slot.is_parameter))
        if value is None:
            value = torch.nn.Parameter(views[key], requires_grad=False) if slot.is_parameter else views[key]
            made[key, slot.is_parameter] = value
        # By setattr, as torch's own load_state_dict does: an RNN keeps a second list of its weights.
        setattr(slot.owner, slot.own, value)
