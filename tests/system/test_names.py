"""A model's name, as Hugging Face writes it, is the same everywhere: no place shows or wants another spelling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.command import good, run
from tests.support.daemons import Daemon, running, until
from tests.support.sizes import MIB
from tests.support.workers import worker
from tests.system.cli.test_segments import write_file

from membroker.v1 import admin_pb2 as apb

pytestmark = pytest.mark.shared_daemon

NAME = "Qwen/Qwen3-8B"
FULL = f"tenants/red/models/{NAME}"


def test_the_name_is_the_users_in_the_books_the_metrics_and_the_log() -> None:
    """A worker registers what it downloads from Hugging Face, under the limit that is configured for that name.

    The journal and the file of commanded limits have it, and the next daemon goes on with both.
    """
    tenants = {"red": {"models": {NAME: {"limit": "8MiB"}}}, "blue": {}}
    with running({"tenants": tenants}) as daemon, worker() as one:
        one.connect(daemon)
        one.do(f"model = client.model('{NAME}'); pool = model.pool(page_size='2MiB')")
        one.do("pool.allocate(0, 8 * MIB)")
        assert one.ask("[model.name, model.resource_name]") == [NAME, FULL]
        assert one.ask("client.sessions()[0].models") == [FULL]
        refused = one.refused("pool.grow(PAGE)")
        assert refused.reason == "MODEL_LIMIT"
        assert NAME in refused.message
        assert f'model="{NAME}",tenant="red"' in daemon.metrics()
        until(lambda: FULL in daemon.log())
        with daemon.admin_stub() as admin:
            admin.SetQuota(apb.SetQuotaRequest(name=FULL, limit_bytes=6 * MIB))
        daemon.kill()
        daemon.start_again()
        assert one.refused("pool.grow(PAGE)").reason == "MODEL_LIMIT"
        (model,) = daemon.models()
        assert (model.name, model.books[0].used_bytes, model.books[0].limit_bytes) == (FULL, 8 * MIB, 6 * MIB)


def test_the_command_takes_and_shows_the_name(daemon: Daemon, tmp_path: Path) -> None:
    """An operator limits the model, a script loads its weights, lists, shows and deletes them."""
    file = tmp_path / "model.safetensors"
    write_file(file, {"embed": ("F32", (512, 1024))})
    red = daemon.endpoint("red")
    assert run("segments", "load", file, f"{NAME}/weights", at=red)[0] == 0
    assert f"\nred/{NAME} " in good("models", at=red)
    assert f"\nred/{NAME}/weights " in good("segments", at=red)
    for name in (f"{NAME}/weights", f"red/{NAME}/weights"):
        assert json.loads(good("segments", "show", name, "--json", at=red))["name"] == f"{FULL}/segments/weights"
    good("quota", "set", f"red/{NAME}", "--limit", "64MiB", at=daemon.admin)
    good("segments", "delete", f"red/{NAME}/weights", "--admin", at=daemon.admin)
    until(lambda: not daemon.books().lent_bytes)
