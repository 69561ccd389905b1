"""Torch's tensors in a segment, as the image of a safetensors file.

Owns their layout: large tensors are aligned, and the gaps before them are filled by tensors whose names end with
`PADDING`. Must never decide which tensors these are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ...errors import InvalidRequest
from ...safetensors import TensorIndex, TensorInfo, write_index
from ...segment import Segment, check_header
from .package import torch
from .tensors import DTYPES, TEXTS, tensor

_ALIGNMENT = 256
_LARGE_BYTES = 4096
PADDING: Final = "!"


class TensorImage:
    """The image of a safetensors file for tensors of these names, dtypes and shapes: `size` bytes, laid out in `index`.

    Tensors of `align_from` bytes and more begin at a multiple of 256 bytes. The values may come later, in `write`.
    Raises `InvalidRequest` for a dtype that safetensors does not have.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], *, align_from: int = _LARGE_BYTES
    ) -> None:
        entries = {key: (_text_of(key, value), _stored_shape(value)) for key, value in tensors.items()}
        self._header, self.index = _layout(entries, metadata, align_from)
        check_header(self._header)
        self.size = self.index.size

    def write(self, segment: Segment, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the header and the values, in C order, to the segment's start."""
        segment.write(0, self._header)
        for key, value in tensors.items():
            _copy(value, segment, self.index[key])


def stored_tensor(segment: Segment, info: TensorInfo) -> torch.Tensor:
    """Return a tensor of a segment's index, as torch shapes it; nothing is copied. Raises what `tensor` raises."""
    if info.dtype not in DTYPES:
        raise InvalidRequest(f"{segment.resource_name} has a tensor of {info.dtype}, which this torch does not have")
    return tensor(segment, DTYPES[info.dtype], shape_in_torch(info), info.offset)


def tensor_names(index: TensorIndex) -> set[str]:
    """Return the names of the tensors in an index, without those that fill a gap."""
    return {name for name in index if not name.endswith(PADDING)}


def _text_of(name: str, value: torch.Tensor) -> str:
    if value.dtype not in TEXTS:
        raise InvalidRequest(f"{name} is of {value.dtype}, which safetensors does not have")
    return TEXTS[value.dtype]


def _stored_shape(value: torch.Tensor) -> tuple[int, ...]:
    """Return the shape in safetensors' elements: torch counts a pair of float4 as one."""
    shape = tuple(value.shape)
    return (*shape[:-1], 2 * shape[-1]) if TEXTS.get(value.dtype) == "F4" else shape


def shape_in_torch(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape that torch gives to a stored tensor."""
    return (*info.shape[:-1], info.shape[-1] // 2) if info.dtype == "F4" else info.shape


def _layout(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str], align_from: int
) -> tuple[bytes, TensorIndex]:
    """Return a header in which large tensors are aligned: the format allows no gaps, so dummy tensors fill them."""
    _, index = write_index(tensors, metadata, alignment=_ALIGNMENT)
    filled, shift, before = dict(tensors), 0, ""
    for name, info in index.items():
        gap = -(info.offset + shift) % _ALIGNMENT
        if gap and before and info.size >= align_from:
            # The dummy has the dtype of the tensor before it, and a name that is sorted directly after it.
            dtype = index[before].dtype
            elements = gap * 2 if dtype == "F4" else gap // DTYPES[dtype].itemsize
            filled[before + PADDING] = (dtype, (elements,))
            shift += gap
        before = name
    return write_index(filled, metadata, alignment=_ALIGNMENT)


def _copy(value: torch.Tensor, segment: Segment, info: TensorInfo) -> None:
    if info.size:
        with torch.no_grad():
            tensor(segment, value.dtype, tuple(value.shape), info.offset).copy_(value.detach())
