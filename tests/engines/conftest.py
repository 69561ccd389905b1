"""What real engines leave behind goes with the run."""

from __future__ import annotations

from tests.support.vllm_engine import sockets_of_vllm as sockets_of_vllm
