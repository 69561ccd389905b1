"""A program with a spawned DataLoader whose dataset is a segment: `python -m tests.support.spawned_loader ENDPOINT`.

It prints the sum of all rows, and the number of batches.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

import membroker
from membroker.checkpoint import publish_arrays


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of a segment. Its tensors are made where they are used."""

    def __init__(self, segment: membroker.Segment) -> None:
        self.segment = segment

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> Any:
        return self.segment.tensors("torch")["rows"][row].clone()


def main(endpoint: str) -> None:
    """Publish rows, and read them by two workers."""
    with membroker.connect(endpoint) as client:
        model = client.model("data")
        rows = np.repeat(np.arange(20, dtype="f4")[:, None], 1, axis=1)
        with publish_arrays(model, "rows", {"rows": rows}) as segment:
            loader = torch.utils.data.DataLoader(
                Rows(segment), batch_size=5, num_workers=2, multiprocessing_context="spawn"
            )
            batches = [batch.sum().item() for batch in loader]
            print(sum(batches), len(batches))
            segment.delete()


if __name__ == "__main__":
    main(sys.argv[1])
