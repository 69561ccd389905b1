"""GetModel: one model's books by its name, without a walk over the tenant's other models."""

from __future__ import annotations

import pytest
from google.rpc.code_pb2 import Code
from tests.support import raw
from tests.support.daemons import Daemon
from tests.support.sizes import MIB
from tests.support.workers import worker

from membroker.v1 import broker_pb2 as bpb

pytestmark = pytest.mark.shared_daemon


def test_a_worker_looks_up_a_model_of_its_tenant(daemon: Daemon, transport: str) -> None:
    """An autoscaler reads one model's usage, by the name that it was registered under; it has not registered it."""
    with worker() as one, worker() as scaler:
        one.connect(daemon, transport=transport)
        one.do("model = client.register_model('Qwen/Qwen3-8B', limit='16MiB'); held = model.allocate('4MiB')")
        one.do("for number in range(40): client.register_model(f'other{number}')")
        scaler.connect(daemon, transport=transport)
        for name in ("Qwen/Qwen3-8B", "tenants/red/models/Qwen/Qwen3-8B"):
            scaler.do(f"found = client.model({name!r})")
            assert scaler.ask("[found.name, found.sessions]") == ["tenants/red/models/Qwen/Qwen3-8B", 1]
            assert scaler.ask("[found.books['device'].used_bytes, found.books['device'].limit_bytes]") == [
                4 * MIB,
                16 * MIB,
            ]
        assert scaler.refused("client.model('absent')").error == "ModelNotFound"
        assert scaler.refused("client.model('no such name')").error == "InvalidRequest"
        assert scaler.refused("client.model(7)").error == "InvalidRequest"


@pytest.mark.shared_daemon(False)  # it looks at counters
def test_stats_is_one_call(daemon: Daemon) -> None:
    """A tenant may have 256 models; a worker that reads its own figures every second asks for its own model alone."""
    with worker() as one:
        one.connect(daemon)
        one.do("model = client.register_model('m'); held = model.allocate('2MiB')")
        assert one.ask("model.stats().books['device'].used_bytes") == 2 * MIB
        one.do("held.close(); model.unregister()")
        assert one.refused("model.stats()").error == "ModelNotFound"
    requests = daemon.metrics()
    assert 'method="GetModel"' in requests
    assert 'method="ListModels"' not in requests


def test_bad_names_are_refused(daemon: Daemon) -> None:
    """Another tenant's model is not found, as one that does not exist."""
    for name, reason in [
        ("tenants/red/models/other", "MODEL_NOT_FOUND"),
        ("tenants/blue/models/m", "MODEL_NOT_FOUND"),
        ("tenants/red/models/-", "INVALID_NAME"),
        ("m", "INVALID_NAME"),
        ("", "INVALID_NAME"),
        ("x" * 60_000, "INVALID_NAME"),
    ]:
        with raw.Session(daemon.endpoint("red")) as red, raw.Session(daemon.endpoint("blue")) as blue:
            red.register("m")
            blue.register("m")
            before = daemon.device().revision
            answer = raw.grpc_call(red.endpoint, red.token, "GetModel", bpb.GetModelRequest(name=name))
            assert raw.reason(answer) == reason
            assert answer.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND)
            assert daemon.device().revision == before
