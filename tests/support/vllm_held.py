"""A plugin of vLLM for tests: the load format `held` stops in the middle of loading, until a file exists."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.daemons import until

GATE = "MEMBROKER_TEST_GATE"


def register() -> None:
    from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

    class Held(DefaultModelLoader):
        def __init__(self, load_config: Any) -> None:
            load_config.load_format = "auto"
            super().__init__(load_config)

        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            until(Path(os.environ[GATE]).exists, 240.0)

    register_model_loader("held")(Held)
