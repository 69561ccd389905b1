"""DLPack: tensors over borrowed memory for every framework that speaks it. See `membroker.memory.dlpack`.

Owns the public name only.
"""

from ..memory.dlpack import DlpackTensor, Exportable, export, is_numpys, size_of

__all__ = ["DlpackTensor", "Exportable", "export", "is_numpys", "size_of"]
