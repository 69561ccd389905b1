"""The Helm chart, as Helm renders it: by the schemas of Kubernetes, by our own parsers, and as real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.test_deploy import load_yaml
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.workers import as_user, worker
from tools import manifests

import membroker
from membrokerd import cli
from membrokerd.config.config import ConfigError, load

helm = pytest.importorskip("helm_python", reason="Helm is not installed (pip install helm-python-sdk)")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kubernetes" / "tenant.yaml"
OPTIONS: Mapping[str, Any] = {
    name: {"enabled": True} for name in ("podMonitor", "networkPolicy", "openshift", "admissionPolicy")
}
NOT_OF_KUBERNETES = {"PodMonitor", "SecurityContextConstraints"}
TENANTS = {"acme": {"group": 10001, "limit": "8GiB", "uids": [7], "models": {"a.b": {"limit": "1GiB", "weight": 2}}}}


def documents(values: Mapping[str, Any]) -> list[Any]:
    return [document for text in manifests.render(values).values() for document in load_yaml(text)]


def one(values: Mapping[str, Any], kind: str, name: str = "") -> Any:
    (found,) = [
        document
        for document in documents(values)
        if document["kind"] == kind and document["metadata"]["name"] in (name or document["metadata"]["name"])
    ]
    return found


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    for path, text in manifests.manifests().items():
        assert path.read_text() == text, "make manifests"


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("version", ["1.30", "1.33", "1.36"])
def test_kubernetes_accepts_what_is_rendered(gpus: int, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for values in ({"gpus": gpus}, {"gpus": gpus, **OPTIONS}, {"gpus": gpus, "keeper": {"enabled": False}}):
        report = helm.lint(manifests.CHART, dict(values), strict=True)
        assert not report["errors"], report
        for document in documents(values):
            if document["kind"] not in NOT_OF_KUBERNETES:
                validate.validate(document, version, strict=True)
    for document in load_yaml(EXAMPLE.read_text()):
        validate.validate(document, version, strict=True)


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_each_gpu_has_a_keeper_and_its_share_of_the_limit(gpus: int) -> None:
    daemons = one({"gpus": gpus}, "DaemonSet", "membrokerd")["spec"]["template"]["spec"]
    keepers = one({"gpus": gpus}, "DaemonSet", "membroker-keeper")["spec"]["template"]["spec"]
    assert daemons["containers"][0]["resources"]["limits"] == {"memory": f"{2048 * gpus}Mi"}
    commands = [container["command"] for container in keepers["containers"]]
    where = "/run/membroker-keeper/{}/fdstore.sock"
    assert commands == [["membroker-fdstore", "--stay", where.format(number)] for number in range(gpus)]
    assert f"seq 0 {gpus - 1})" in daemons["initContainers"][0]["command"][2]


def test_our_own_parsers_accept_what_is_rendered(tmp_path: Path) -> None:
    """The command line and the configuration, with tenants, models and more keys."""
    values = {"tenants": TENANTS, "config": 'headroom = "4GiB"', "runtimeDirectory": "/run/mb", "metrics": {"port": 9}}
    daemonset = one(values, "DaemonSet", "membrokerd")
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    given = cli._parser().parse_args(container["args"])
    assert given.all == 0
    path = tmp_path / given.config.name
    path.write_text(one(values, "ConfigMap")["data"][given.config.name])
    found = load(path, {}, env={}, uid=0)
    assert (found.driver, found.headroom, found.metrics.port) == ("cuda", 4 << 30, 9)
    assert str(found.runtime_directory) == "/run/membroker"  # where `kubectl exec … membroker status` looks
    assert found.tenants["acme"].models["a.b"].weight == 2
    assert found.tenants["acme"].uids == {7}
    assert {"name": "runtime", "mountPath": "/run/membroker"} in container["volumeMounts"]
    (volume,) = [one for one in daemonset["spec"]["template"]["spec"]["volumes"] if one["name"] == "runtime"]
    assert volume["hostPath"]["path"] == "/run/mb"
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"metrics": 9}
    strategy = daemonset["spec"]["updateStrategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}}


def test_no_pod_needs_a_privilege_of_the_host() -> None:
    for name in ("membrokerd", "membroker-keeper"):
        pod = one({}, "DaemonSet", name)["spec"]["template"]["spec"]
        assert {"hostPID", "hostIPC", "hostNetwork"}.isdisjoint(pod)
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            security = container["securityContext"]
            assert security["capabilities"]["drop"] == ["ALL"]
            assert not security["allowPrivilegeEscalation"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= {one["name"] for one in pod["volumes"]}
    policy = one(OPTIONS, "SecurityContextConstraints")
    capabilities = one({}, "DaemonSet", "membrokerd")["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert policy["allowedCapabilities"] == capabilities["capabilities"]["add"]


@pytest.mark.parametrize(
    "values",
    [
        *({"gpus": 0}, {"tenants": {"Upper": {}}}, {"driver": "gpu"}),
        # A misspelled option would be off, and nothing would say so.
        *({"gpu": 2}, {"admissionPolicies": {"enabled": True}}, {"networkPolicy": {"enable": True}}),
        *({"resources": {"limits": {"memory": "1Gi"}}}, {"image": {"tag": 1.0}}),
        {"networkPolicy": {"enabled": True, "from": []}},  # everybody, to Kubernetes
    ],
)
def test_wrong_values_are_refused(values: Mapping[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        manifests.render(values)


def test_the_schema_knows_every_value() -> None:
    """With their own values, and those that Helm adds for a chart that contains this one."""
    (values,) = load_yaml((manifests.CHART / "values.yaml").read_text())
    manifests.render({**values, "global": {"registry": "x"}})


def test_a_number_is_not_rounded_on_its_way_into_the_configuration(tmp_path: Path) -> None:
    """A weight of 0.5 is refused by the daemon; as 0 it would wait for all others."""
    path = tmp_path / "membrokerd.toml"
    for weight, limit in ((0.5, 1 << 33), (2, float(1 << 33))):  # Helm has a large number of a values file as a float
        values = {"tenants": {"red": {"weight": weight, "limit": limit}}}
        path.write_text(one(values, "ConfigMap")["data"]["membrokerd.toml"])
        if weight == 2:
            assert load(path, {}, env={}, uid=0).tenants["red"].limit == 1 << 33
        else:
            with pytest.raises(ConfigError, match="weight"):
                load(path, {}, env={}, uid=0)


# --- As real processes ---


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="mb-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


class Node:
    """The processes of both pods, with the host driver and the node's directories below the test's own."""

    def __init__(self, stack: ExitStack, place: Path, tenants: Mapping[str, Any]) -> None:
        self._stack, self.place = stack, place
        values = {"gpus": 2, "driver": "host", "config": 'capacity = "256MiB"', "tenants": tenants}
        text = one(values, "ConfigMap")["data"]["membrokerd.toml"].replace('"0.0.0.0"', '"127.0.0.1"')
        state = f'state_directory = "{place}/var"\n'
        (place / "membrokerd.toml").write_text(state + self._here(text).replace("port = 9710", "port = 0"))
        keepers = one(values, "DaemonSet", "membroker-keeper")["spec"]["template"]["spec"]["containers"]
        for container in keepers:
            _, *arguments = container["command"]
            self._run("membrokerd.restart.keeper", *map(self._here, arguments))
        sockets = [place / "membroker-keeper" / str(number) / "fdstore.sock" for number in range(2)]
        until(lambda: all(path.is_socket() for path in sockets))
        pod = one(values, "DaemonSet", "membrokerd")["spec"]["template"]["spec"]
        wait = [self._here(part) for part in pod["initContainers"][0]["command"]]
        subprocess.run(wait, check=True, timeout=DEADLINE_SECONDS)
        self._arguments = [part.replace("/etc/membroker", str(place)) for part in pod["containers"][0]["args"]]
        self.start()

    def _here(self, text: str) -> str:
        return text.replace("/run/membroker", f"{self.place}/membroker")

    def _run(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.place / "log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=log, stderr=log)
        self._stack.callback(process.wait, DEADLINE_SECONDS)
        self._stack.callback(process.terminate)
        return process

    def start(self) -> None:
        """Start the daemons' pod; the host driver must be told how many devices there are."""
        ready = self.log().count('"a daemon is ready"')
        self.daemons = self._run("membrokerd.cli", *self._arguments, "2")
        until(lambda: self.log().count('"a daemon is ready"') == ready + 2 or self.daemons.poll() is not None)
        assert self.daemons.poll() is None, self.log()

    def endpoint(self, number: int) -> Path:
        return self.place / "membroker" / str(number) / "tenants" / "acme"

    def log(self) -> str:
        path = self.place / "log"
        return path.read_text() if path.exists() else ""


LOAD = """
import threading, time
done, errors, stop = [], [], threading.Event()
def call():
    while not stop.is_set():
        try:
            model.allocate('2MiB').close()
        except Exception as error:
            errors.append(repr(error))
            return
        done.append(time.monotonic())
thread = threading.Thread(target=call)
thread.start()
"""


@pytest.mark.deep
def test_an_upgrade_ends_no_segment_and_refuses_no_call(place: Path) -> None:
    """Both pods as rendered; the daemons' is replaced while workers allocate on both devices without a pause."""
    with ExitStack() as stack:
        node = Node(stack, place, {"acme": {"group": None}})  # only root can give a socket to another group
        workers = [stack.enter_context(worker()) for _ in range(2)]
        for number, each in enumerate(workers):
            each.do(f"client = membroker.connect({str(node.endpoint(number))!r})")
            each.do("model = client.register_model('m'); segment = model.create_segment('weights', PAGE)")
            each.do(f"segment.view()[:1] = bytes([{number} + 65]); segment.seal(); segment.close()")
            each.do("kept = model.allocate('4MiB'); kept.view()[:4] = b'kept'")
            each.do(LOAD)
        for _ in range(2):
            node.daemons.send_signal(signal.SIGTERM)
            assert node.daemons.wait(DEADLINE_SECONDS) == 0, node.log()
            node.start()
            for each in workers:
                calls = each.ask("len(done)")
                until(lambda each=each, calls=calls: each.ask(f"len(done) > {calls} or errors"))
        for number, each in enumerate(workers):
            each.do("stop.set(); thread.join()")
            assert each.ask("errors") == []
            assert each.ask("bytes(kept.view()[:4]).decode()") == "kept"
            with (
                membroker.connect(node.endpoint(number)) as client,
                client.attach("m/weights", timeout=DEADLINE_SECONDS) as segment,
            ):
                assert bytes(segment.view()[:1]) == bytes([number + 65])
            each.do("kept.close(); client.close()")
        assert "keeper of descriptors started" not in node.log(), "a daemon has started one of its own"
        assert "Traceback" not in node.log()


@pytest.mark.root
def test_the_example_tenant_runs_as_an_ordinary_user(place: Path) -> None:
    """Its doctor passes and its worker borrows, with the user, group and endpoint of the example."""
    if os.geteuid() != 0:
        pytest.skip("takes root")
    (deployment,) = [document for document in load_yaml(EXAMPLE.read_text()) if document["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (volume,) = pod["volumes"]
    uid, (group,) = pod["securityContext"]["runAsUser"], pod["securityContext"]["supplementalGroups"]
    with ExitStack() as stack:
        node = Node(stack, place, {"acme": {"group": group, "mode": "0660"}})
        endpoint = volume["hostPath"]["path"].replace("/run/membroker", f"{place}/membroker")
        user = [*as_user(uid), f"--groups={group}"]
        user.remove("--clear-groups")
        environment = {**os.environ, "MEMBROKER_ENDPOINT": endpoint}
        (init,) = pod["initContainers"]
        assert init["command"] == ["membroker", "doctor"]
        doctor = [*user, sys.executable, "-m", "membroker.cli.main", "doctor"]
        done = subprocess.run(
            doctor, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr + node.log()
        (container,) = pod["containers"]
        command = [*user, sys.executable, *container["command"][1:]]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "borrowed 64 MiB of host\n"
            process.terminate()
            assert process.wait(DEADLINE_SECONDS) == 0


# --- The admission policy ---


def verdicts(pod: Mapping[str, Any], namespace: str, labels: Mapping[str, str]) -> list[bool]:
    """Return what each validation of the policy says, as CEL evaluates it."""
    celpy = pytest.importorskip("celpy", reason="pip install cel-python")
    spec = one(OPTIONS, "ValidatingAdmissionPolicy")["spec"]
    environment = celpy.Environment()

    def evaluate(expression: str, known: dict[str, Any]) -> Any:
        return environment.program(environment.compile(expression)).evaluate(known)

    known = {
        "object": celpy.json_to_cel({"spec": pod}),
        "namespaceObject": celpy.json_to_cel({"metadata": {"labels": dict(labels)} if labels else {}}),
        "request": celpy.json_to_cel({"namespace": namespace}),
    }
    variables = celpy.celtypes.MapType()
    for each in spec["variables"]:
        variables[celpy.celtypes.StringType(each["name"])] = evaluate(each["expression"], known)
    known["variables"] = variables
    return [bool(evaluate(each["expression"], known)) for each in spec["validations"]]


def pod_with(path: str, *, read_only: bool = True) -> dict[str, Any]:
    mount: dict[str, Any] = {"name": "endpoint", "mountPath": "/run/membroker"}
    mount |= {"readOnly": True} if read_only else {}
    volumes = [{"name": "endpoint", "hostPath": {"path": path}}, {"name": "own", "emptyDir": {}}]
    own = {"name": "own", "mountPath": "/own"}
    return {"containers": [{"name": "w", "volumeMounts": [mount, own]}], "volumes": volumes}


TENANT = {"membroker/tenant": "true"}


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/run/membroker/0/tenants/acme", True),
        ("/run/membroker/gpu-12345678/tenants/acme/", True),
        ("/run/membroker/0/tenants/other", False),
        ("/run/membroker/0/tenants/acme2", False),
        ("/run/membroker/0/tenants", False),
        ("/run/membroker/0/admin", False),
        ("/run/membroker/0/tenants/acme/../../admin", False),
        ("/run/membroker", False),
        ("/run//membroker/0/admin", False),
        ("/var/run/membroker/0/admin", False),
        ("/run/membroker-keeper/0", False),
        ("/run", False),
        ("/", False),
    ],
)
def test_a_tenant_may_mount_its_own_endpoint_and_nothing_else(path: str, allowed: bool) -> None:
    assert all(verdicts(pod_with(path), "acme", TENANT)) == allowed


def test_a_tenant_mounts_read_only() -> None:
    path = "/run/membroker/0/tenants/acme"
    assert all(verdicts(pod_with(path), "acme", TENANT))
    assert not all(verdicts(pod_with(path, read_only=False), "acme", TENANT))
    pod = pod_with(path)
    pod["ephemeralContainers"] = pod_with(path, read_only=False)["containers"]
    assert not all(verdicts(pod, "acme", TENANT))


@pytest.mark.parametrize("labels", [{}, {"team": "a"}])
def test_other_namespaces_mount_no_endpoint_and_whatever_else_they_did(labels: Mapping[str, str]) -> None:
    for path in ("/run/membroker/0/tenants/acme", "/var/run/membroker/0/admin", "/run//membroker"):
        assert not all(verdicts(pod_with(path), "acme", labels))
    assert all(verdicts(pod_with("/var/log", read_only=False), "monitoring", labels))
    assert all(verdicts({"containers": [{"name": "w"}]}, "web", labels))


def test_the_policy_lets_the_example_run() -> None:
    namespace, deployment = load_yaml(EXAMPLE.read_text())
    pod = deployment["spec"]["template"]["spec"]
    assert deployment["metadata"]["namespace"] == namespace["metadata"]["name"]
    assert all(verdicts(pod, namespace["metadata"]["name"], namespace["metadata"]["labels"]))
