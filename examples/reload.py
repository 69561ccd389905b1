"""A checkpoint that processes share, and a server that takes its next version while it serves.

python examples/reload.py CHECKPOINT     (MEMBROKER_ENDPOINT, or the default endpoint)

CHECKPOINT is a safetensors file, a directory of shards, their index, or a model in the cache of Hugging Face.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import membroker
from membroker.checkpoint import publish_checkpoint

NAME = "reload/current"


def told(done: int, total: int) -> None:
    """Show the progress, once at the end."""
    if done == total:
        print(f"loaded {total:,} bytes")


def main(path: str) -> None:
    """Publish a version, serve it, and go on with the next one."""
    with membroker.connect() as client, client.model("reload") as model, ThreadPoolExecutor(1) as threads:
        publish_checkpoint(model, "current", path, progress=told, replace=True).close()
        with client.attach(NAME) as serving:  # in each server; their models read it in place
            print(f"{serving.name} has {len(serving.index())} tensors")
            newer = threads.submit(client.attach, NAME, newer_than=serving)  # waits, and the server goes on
            publish_checkpoint(model, "current", path, replace=True).close()  # as `membroker segments load --replace`
            with newer.result() as latest:
                print(f"then {latest.name}")
        client.delete_segment(NAME)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "model.safetensors")
    except membroker.MembrokerError as error:
        raise SystemExit(f"not loaded: {error}") from None
