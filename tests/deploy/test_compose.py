"""The Compose file, by our own parsers, and its broker as a real process. There is no Docker here.

A user changes models, sizes and the GPU in it, so what belongs together is compared: mounts, names and ports.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.test_chart import one
from tests.deploy.test_deploy import load_yaml
from tests.support.command import good
from tests.support.daemons import running

import membrokerd.cli
from membroker.cli import engines, launch, main
from membrokerd.config.config import Config, load

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "compose.yaml"
PAGE = ROOT / "docs" / "docker.md"


@pytest.fixture
def compose() -> Any:
    (found,) = load_yaml(FILE.read_text())
    return found


@pytest.fixture
def config(compose: Any, tmp_path: Path) -> Config:
    """The broker's configuration, which its command line names."""
    broker = compose["services"]["membrokerd"]
    (mount,) = broker["configs"]
    given = membrokerd.cli._parser().parse_args(broker["command"])
    assert str(given.config) == mount["target"]
    path = tmp_path / "membrokerd.toml"
    path.write_text(compose["configs"][mount["source"]]["content"])
    return load(path, {}, env={}, uid=0)


def engines_of(compose: Any) -> dict[str, Any]:
    return {name: service for name, service in compose["services"].items() if name != "membrokerd"}


def test_each_engine_is_a_model_of_the_broker_at_the_endpoint_that_it_mounts(compose: Any, config: Config) -> None:
    ((tenant, known),) = config.tenants.items()
    endpoint = f"{config.runtime_directory}/0/tenants/{tenant}"
    assert f"{config.runtime_directory}:/run/membroker" in compose["services"]["membrokerd"]["volumes"]
    models = []
    for service in engines_of(compose).values():
        given = main._parser().parse_args([*service["entrypoint"][1:], *service["command"]])
        program = given.program[1:]
        assert (service["entrypoint"][0], given.command, program[:2]) == ("membroker", launch.run, ["vllm", "serve"])
        assert engines.engine_of(program) == "vllm"
        assert program[program.index("--served-model-name") + 1] == given.model
        models.append(given.model)
        assert service["environment"]["MEMBROKER_ENDPOINT"] == endpoint
        bind = next(volume for volume in service["volumes"] if isinstance(volume, dict))
        assert (bind["source"], bind["target"], bind["read_only"]) == (endpoint, endpoint, True)
        assert not bind["bind"]["create_host_path"], "a directory of Docker's would be in the broker's way"
        assert service["depends_on"] == {"membrokerd": {"condition": "service_healthy"}}
    assert sorted(models) == sorted(known.models) == sorted(engines_of(compose))
    assert config.driver == "cuda"


def test_nothing_is_privileged_and_all_see_one_gpu(compose: Any) -> None:
    services = compose["services"]
    (devices,) = {str(service["deploy"]["resources"]["reservations"]["devices"]) for service in services.values()}
    assert "'device_ids': ['0']" in devices
    for service in services.values():
        assert service.keys().isdisjoint({"privileged", "network_mode", "ipc", "pid", "userns_mode", "devices"})
    named = {str(mount).partition(":")[0] for each in services.values() for mount in each["volumes"]}
    assert {name for name in named if name.isalpha()} == set(compose["volumes"])
    ports = [port for service in engines_of(compose).values() for port in service["ports"]]
    assert len({port.split(":")[1] for port in ports}) == len(ports)
    assert all(port.startswith("127.0.0.1:") and port.endswith(":8000") for port in ports)
    for name, service in engines_of(compose).items():
        assert f"{name} on port {service['ports'][0].split(':')[1]}" in PAGE.read_text()


def test_the_broker_has_the_capabilities_of_the_chart(compose: Any) -> None:
    pod = one({}, "DaemonSet", "membrokerd")["spec"]["template"]["spec"]
    capabilities = pod["containers"][0]["securityContext"]["capabilities"]
    broker = compose["services"]["membrokerd"]
    assert (broker["cap_drop"], broker["cap_add"]) == (capabilities["drop"], capabilities["add"])


def test_the_images_are_built_of_what_is_in_the_repository(compose: Any) -> None:
    """The engines' image installs the library as the broker's does, from the same files and without an extra."""
    here = FILE.parent
    broker, *others = compose["services"].values()
    assert (here / broker["build"]["context"] / broker["build"]["dockerfile"]).is_file()
    for service in others:
        lines = service["build"]["dockerfile_inline"].splitlines()
        sources = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
        ours = re.findall(r"^COPY (?!--)(.*) \S+$", (here / "Dockerfile").read_text(), re.MULTILINE)
        assert sources == " ".join(ours).split()
        assert all((here / service["build"]["context"] / source).exists() for source in sources)
        assert lines[-1] == "RUN uv pip install --system /source", "and no extra, which would change torch's packages"


def test_the_commands_of_the_page_and_of_the_file_run(compose: Any, config: Config) -> None:
    """The health check and what a user asks inside the broker's container, beside a broker with this configuration."""
    asked = re.findall(
        r"^docker compose -f deploy/compose.yaml exec membrokerd membroker (.*)$", PAGE.read_text(), re.M
    )
    marker, command, *check = compose["services"]["membrokerd"]["healthcheck"]["test"]
    assert (marker, command, len(asked)) == ("CMD", "membroker", 1)
    tenants = {
        name: {"models": {model: {"guarantee": each.guarantee} for model, each in tenant.models.items()}}
        for name, tenant in config.tenants.items()
    }
    with running({"capacity": config.capacity, "tenants": tenants, "driver": "host"}) as daemon:
        for words in (check, shlex.split(asked[0])):
            good(*words, at=daemon.endpoint("serving"))
    for command in re.findall(
        r"^docker compose -f deploy/compose.yaml up .*?--\w+ (\w+)(?: |$)", PAGE.read_text(), re.M
    ):
        assert command in compose["services"]
