"""Torch's tensors in a segment, as the image of a safetensors file.

Owns how torch and safetensors count and name the same elements. Must never decide which tensors these are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...errors import InvalidRequest
from ...safetensors import ALIGNMENT, TensorIndex, TensorInfo, write_index
from ...segment import Segment, check_header, write_tensors
from .package import torch
from .tensors import DTYPES, TEXTS, tensor


class TensorImage:
    """The image of a safetensors file for tensors of these names, dtypes and shapes: `size` bytes, laid out in `index`.

    Each begins at a multiple of 256 bytes. The values may come later, in `write`. Raises `InvalidRequest` for a dtype
    or a name that safetensors does not have.
    """

    index: TensorIndex

    def __init__(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        entries = {key: (_text_of(key, value), _stored_shape(value)) for key, value in tensors.items()}
        self._header, self.index = write_index(entries, metadata, alignment=ALIGNMENT)
        check_header(self._header)
        self.size: int = self.index.size

    def write(
        self,
        segment: Segment,
        tensors: Mapping[str, torch.Tensor],
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write the header and the values, in C order, to the segment's start. `progress` gets bytes: done, total."""
        segment.write(0, self._header)
        write_tensors(segment, self.index, tensors, progress)


def stored_tensor(segment: Segment, info: TensorInfo) -> torch.Tensor:
    """Return a tensor of a segment's index, as torch shapes it; nothing is copied. Raises what `tensor` raises."""
    if info.dtype not in DTYPES:
        raise InvalidRequest(f"{info.name} is of {info.dtype}, which this torch does not have")
    return tensor(segment, shape_in_torch(info), DTYPES[info.dtype], info.offset)


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
