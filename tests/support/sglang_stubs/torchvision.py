"""A torchvision that does nothing: SGLang and transformers import it, and a text model never uses it.

The one on PyPI needs torch for CUDA.
"""

import sys
from unittest.mock import MagicMock

__path__: list[str] = []
__version__ = "0"
for _name in ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{_name}"] = MagicMock()
