"""What vLLM has made of a model's weights after loading: one engine describes and stores it, and others take it over.

Owns the description that lies in a segment beside the bytes: which tensor is where in a model, and which values
quantization has left on a layer's Python objects. It is JSON and never a pickle, because another program wrote it.
Parameters are used in place; all else gets memory of its own, because vLLM writes to some of it. Nothing here may
process weights, or guess what it was not told.

vLLM's own weight daemon shares only layers that declare that they take processed weights, and restore what they have
besides. Here some others are followed (AWQ, GPTQ, compressed-tensors): a comparison finds all that processing changes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.weight_cache.protocol import UnsupportedQuantForIPCError, check_ipc_quant_support

from ...adapters.torch import stored_tensor
from ...errors import InvalidRequest
from ...segment import Segment
from ..capture import device_lent

METADATA: Final = "membroker.vllm"
"""The key of the description in the segment's metadata."""
LEAVE_OUT: Final = "leave --load-format membroker out"
_PARTS: Final = ("vllm.model_executor.layers.quantization.", "vllm.model_executor.kernels.")
"""Where the classes are whose objects compute with a layer's weights."""
_FOLLOWED: Final = frozenset(
    f"vllm.model_executor.layers.quantization.{name}"
    for name in (
        "auto_awq.AutoAWQLinearMethod",
        "auto_awq.AutoAWQMarlinLinearMethod",
        "auto_gptq.AutoGPTQLinearMethod",
        "compressed_tensors.compressed_tensors.CompressedTensorsLinearMethod",
    )
)
"""Quantization methods whose processing changes their own layer, its parts and nothing else."""
_PLAIN: Final = (bool, int, float, str, type(None))
_ALIGNMENT: Final = 256
_GONE: Final = object()
_Key = tuple[str, ...]
"""An attribute of a module, or of the object that the attributes before it lead to."""


class Created:
    """A model as vLLM has created it, before it loads the weights. Raises `InvalidRequest` if it cannot be shared.

    `facts` are what two engines must have in common: their tensors, and the kernels that vLLM has chosen for them.
    `size` is how many bytes the parameters have. `parts` and `states` have what processing may change besides.
    """

    def __init__(self, model: Any) -> None:
        with followed(model):
            try:
                check_ipc_quant_support(model)
            except UnsupportedQuantForIPCError as error:
                raise InvalidRequest(f"vLLM's weights of this kind cannot be shared ({error}): {LEAVE_OUT}") from error
        self.facts: dict[str, str] = {}
        self.parts: dict[str, list[tuple[_Key, Any]]] = {}
        self.states: dict[str, dict[_Key, Any]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            for leaf, value in _registered(module):
                self.facts[_dotted(name, leaf)] = _fact(_dotted(name, leaf), value)
            self.parts[name] = parts = list(_parts(module))
            if kernels := " ".join(type(part).__name__ for path, part in parts if path):
                self.facts[f"the kernel of {name}"] = kernels
            self.states[name] = _state(parts)
        self.size: int = sum(value.nbytes for value in model.parameters())


@contextmanager
def followed(model: Any) -> Iterator[None]:
    """Have vLLM take followed layers for ready for processed weights, and process nothing of them, during a block."""
    methods = {id(module.quant_method): module.quant_method for module in model.modules() if _is_followed(module)}
    for method in methods.values():
        method.supports_pre_processed_weights, method.process_weights_after_loading = True, lambda layer: None
    try:
        yield
    finally:
        for method in methods.values():
            del method.supports_pre_processed_weights, method.process_weights_after_loading


def describe(model: Any, created: Created) -> tuple[dict[str, torch.Tensor], str]:
    """Return the bytes behind a processed model's tensors, by name, and the description of all that it has.

    Tensors that share memory will share it in other engines, too. Raises `InvalidRequest` if processing has made more
    than tensors and plain values, or made most of the weights each engine's own.
    """
    objects: dict[int, tuple[int, str, torch.Tensor]] = {}
    places: list[Any] = []
    values: list[Any] = []
    none: list[str] = []

    def place(module: str, key: _Key, kind: str, value: torch.Tensor) -> None:
        number, _, _ = objects.setdefault(id(value), (len(objects), _dotted(module, *key), value))
        places.append([module, key, kind, number])

    for name, module in model.named_modules(remove_duplicate=False):
        if name not in created.parts or created.parts[name][0][1] is not module:
            raise InvalidRequest(f"vLLM makes another layer of {name or 'the model'} while it loads: {LEAVE_OUT}")
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for leaf, value in table.items():
                if value is not None:
                    place(name, (leaf,), kind, value)
                elif _dotted(name, leaf) in created.facts:
                    none.append(_dotted(name, leaf))
        parts, before, follows = created.parts[name], created.states[name], _is_followed(module)
        after, paths = _state(parts), {id(part): path for path, part in parts}
        for key in {**before, **after}:
            old, value = before.get(key, _GONE), after.get(key, _GONE)
            if isinstance(value, torch.Tensor) and not value.is_meta:
                if isinstance(old, torch.Tensor) and not (follows and old is not value):
                    place(name, key, "constant", value)
                elif follows:
                    place(name, key, "attribute", value)
            elif _same(old, value):
                continue
            elif type(value) in _PLAIN:
                values.append([name, key, value])
            elif follows and value is _GONE:
                values.append([name, key])
            elif follows and id(value) in paths:
                values.append([name, key, paths[id(value)]])
            elif follows:
                raise InvalidRequest(
                    f"vLLM makes a {type(value).__name__} of the weights of {_dotted(name, *key)}, which cannot be "
                    f"shared: {LEAVE_OUT}"
                )
    storages, tensors = _pack([(name, value) for _, name, value in objects.values()])
    shared = {tensors[number][0] for _, _, kind, number in places if kind == "parameter"}
    check_kept(sum(storage.nbytes for name, storage in storages.items() if name in shared), created)
    about = {
        "facts": created.facts,
        "shared": sorted(shared - {None}),
        "tensors": tensors,
        "places": places,
        "values": values,
        "none": none,
    }
    return storages, json.dumps(about)


def take_over(model: Any, created: Created, segment: Segment, device: torch.device) -> dict[str, Any]:
    """Put what a segment has into a model that was created on the meta device, and return the description.

    `finish` belongs to it, once vLLM has restored what it has besides. Raises `InvalidRequest` if the segment has
    something else than the processed weights of this model.
    """
    lent = device_lent(segment.driver, device)
    index = segment.index()
    try:
        about: dict[str, Any] = json.loads(index.metadata.get(METADATA, ""))
    except ValueError:
        about = {"facts": {}}
    _check_same(created.facts, about["facts"], segment)
    storages = {name: stored_tensor(segment, info) for name, info in index.items()}
    tensors = _unpack(storages, about["tensors"], set(about["shared"]), lent)
    for number in {number for _, _, kind, number in about["places"] if kind == "parameter"}:
        tensors[number] = torch.nn.Parameter(tensors[number], requires_grad=False)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, key, kind, number in about["places"]:
        owner, leaf = _owner(modules[name], key), key[-1]
        if kind == "constant":
            now = vars(owner).get(leaf)
            if not (isinstance(now, torch.Tensor) and now.is_meta):
                continue  # it chose its device itself
        if isinstance(owner, torch.nn.Module):
            owner._parameters.pop(leaf, None)
            owner._buffers.pop(leaf, None)
        vars(owner).pop(leaf, None)
        table = {"parameter": "_parameters", "buffer": "_buffers"}.get(kind)
        (getattr(owner, table) if table else vars(owner))[leaf] = tensors[number]
    for name, key, *value in about["values"]:
        attributes = vars(_owner(modules[name], key))
        attributes.pop(key[-1], None)
        for only in value:  # a list says which part of the module it is
            attributes[key[-1]] = _owner(modules[name], [*only, ""]) if isinstance(only, list) else only
    return about


def finish(model: Any, about: dict[str, Any]) -> None:
    """Remove the tensors that the engine which processed the weights does not have, so that nothing can read them.

    Raises `InvalidRequest` if the model keeps another tensor without contents.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        for leaf, value in list(_registered(module)):
            if value.is_meta:
                table = module._parameters if leaf in module._parameters else module._buffers
                if _dotted(name, leaf) in about["none"]:
                    table[leaf] = None
                else:
                    del table[leaf]
        for key, value in _state(list(_parts(module))).items():
            if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(value)):
                raise InvalidRequest(
                    f"vLLM keeps weights in {_dotted(name, *key)} beside parameters and buffers, which cannot be "
                    f"shared: {LEAVE_OUT}"
                )


def check_kept(kept: int, created: Created) -> None:
    """Raise `InvalidRequest` if less than half of the parameters' bytes are `kept` where engines can share them."""
    if 2 * kept < created.size:
        raise InvalidRequest(
            f"vLLM repacks the weights of this model after loading: {created.size - kept} of {created.size} bytes "
            f"would be a copy of each engine's own. {LEAVE_OUT.capitalize()}"
        )


# --- A module's parts ---


def _is_followed(module: Any) -> bool:
    method = vars(module).get("quant_method")
    is_known = f"{type(method).__module__}.{type(method).__qualname__}" in _FOLLOWED
    # It may declare it by now. If it processes weights while they are loaded, there is no state before.
    return is_known and not method.supports_pre_processed_weights and not method.uses_meta_device


def _parts(module: Any) -> Iterator[tuple[_Key, Any]]:
    """Yield the module, and vLLM's objects that compute with its weights, with the attributes that lead there."""
    queue: list[tuple[_Key, Any]] = [((), module)]
    seen: set[int] = set()
    for path, part in queue:  # it grows meanwhile
        yield path, part
        for name, value in vars(part).items():
            if (
                type(value).__module__.startswith(_PARTS)
                and hasattr(value, "__dict__")
                and not isinstance(value, torch.nn.Module | QuantizationConfig)
                and id(value) not in seen
            ):
                seen.add(id(value))
                queue.append(((*path, name), value))


def _state(parts: list[tuple[_Key, Any]]) -> dict[_Key, Any]:
    """Return the attributes of a module's parts, without what is registered with the module."""
    return {
        (*path, name): copy.copy(value) if isinstance(value, list | dict | set) else value
        for path, part in parts
        for name, value in vars(part).items()
        if path or name not in ("_parameters", "_buffers", "_modules", "training")
    }


def _same(old: Any, new: Any) -> bool:
    if old is new or type(old) is not type(new):
        return old is new
    if isinstance(new, list | tuple):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(new, dict):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in new)
    return bool(isinstance(new, bool | int | float | str | set | torch.dtype) and old == new)


def _registered(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module itself."""
    for leaf, value in (*module._parameters.items(), *module._buffers.items()):
        if value is not None:
            yield leaf, value


def _owner(module: Any, key: list[str]) -> Any:
    for name in key[:-1]:
        module = vars(module)[name]
    return module


def _dotted(*names: str) -> str:
    return ".".join(name for name in names if name)


def _fact(name: str, value: torch.Tensor) -> str:
    is_lazy = isinstance(value, torch.nn.parameter.UninitializedTensorMixin)
    if is_lazy or value.layout != torch.strided or is_traceable_wrapper_subclass(value):
        raise InvalidRequest(
            f"{name} is a {type(value).__name__} that is quantized while it is loaded, or more than one tensor: it "
            f"cannot be shared. {LEAVE_OUT.capitalize()}"
        )
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _check_same(here: dict[str, str], there: dict[str, str], segment: Segment) -> None:
    problems = [f"{name} is on one side only" for name in sorted(here.keys() ^ there.keys())]
    problems += [
        f"{name} is {here[name]} here and {there[name]} there"
        for name in sorted(here.keys() & there.keys())
        if here[name] != there[name]
    ]
    if problems:
        raise InvalidRequest(
            f"{segment.resource_name} does not fit this model: {problems[0]} ({len(problems)} differences). If it is "
            "left over from something else, delete it with `membroker segments delete`"
        )


# --- Memory ---


def _pack(named: list[tuple[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], list[list[Any]]]:
    """Return the bytes of each storage that the tensors use, and of each tensor where it lies in them."""
    used: dict[tuple[str, int], tuple[str, int, int, torch.Tensor]] = {}
    for name, value in named:
        _fact(name, value)
        if value.is_meta:
            raise InvalidRequest(f"{name} has no contents after loading, and cannot be shared: {LEAVE_OUT}")
        if value.numel():
            first = value.storage_offset() * value.itemsize
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            end, key = first + (last + 1) * value.itemsize, (value.device.type, value.untyped_storage().data_ptr())
            known, low, high, _ = used.get(key, (name, first, end, value))
            used[key] = known, min(low, first // _ALIGNMENT * _ALIGNMENT), max(high, end), value
    tensors: list[list[Any]] = []
    for _, value in named:
        own, low, _, _ = used.get((value.device.type, value.untyped_storage().data_ptr()), (None, 0, 0, value))
        own = own if value.numel() else None
        offset = value.storage_offset() * value.itemsize - low if own else 0
        dtype = str(value.dtype).removeprefix("torch.")
        tensors.append([own, value.device.type, dtype, offset, list(value.shape), list(value.stride())])
    return {
        name: torch.empty(0, dtype=torch.uint8, device=value.device).set_(
            value.untyped_storage(), low, (high - low,), (1,)
        )
        for name, low, high, value in used.values()
    }, tensors


def _unpack(
    storages: dict[str, torch.Tensor], tensors: list[list[Any]], shared: set[str], lent: torch.device
) -> list[torch.Tensor]:
    """Return the tensors: over the segment's own bytes what is `shared`, and over a copy what is not."""
    memory: dict[tuple[str, str], torch.Tensor] = {}
    found = []
    for name, where, dtype, offset, shape, stride in tensors:
        kind, device = getattr(torch, dtype), lent if where == lent.type else torch.device(where)
        if name is None:
            found.append(torch.empty_strided(shape, stride, dtype=kind, device=device))
            continue
        if (name, where) not in memory:
            stored = storages[name]
            memory[name, where] = stored if name in shared and device == lent else stored.to(device, copy=True)
        storage = memory[name, where].untyped_storage()
        found.append(torch.empty(0, dtype=kind, device=device).set_(storage, offset // kind.itemsize, shape, stride))
    return found
