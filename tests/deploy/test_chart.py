"""The Helm chart, as Helm renders it: by the schemas of Kubernetes, by our own parsers, and as real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.client.dra.claims import NODE, UID, claim
from tests.deploy.test_deploy import load_yaml
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.workers import worker
from tools import manifests

import membroker
from membroker.cli import main
from membroker.dra import claims, plugin
from membroker.ext import names
from membrokerd import cli
from membrokerd.config.config import load

helm = pytest.importorskip("helm_python", reason="Helm is not installed (pip install helm-python-sdk)")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kubernetes" / "tenant.yaml"
CLAIM = EXAMPLE.with_name("claim.yaml")
SWITCHES = ("podMonitor", "prometheusRule", "dashboard", "networkPolicy", "openshift", "admissionPolicy")
OPTIONS: Mapping[str, Any] = {name: {"enabled": True} for name in SWITCHES}
NOT_OF_KUBERNETES = {"PodMonitor", "PrometheusRule", "SecurityContextConstraints"}
EVERYTHING: Mapping[str, Any] = {
    **OPTIONS,
    "fullnameOverride": "pool-b",
    "image": {"registry": "registry.example", "digest": f"sha256:{'0' * 64}"},
    "affinity": {"nodeAffinity": {}},
    "updateStrategy": "OnDelete",
    "serviceAccount": {"create": False, "name": "gpu"},
    "podAnnotations": {"team": "a"},
    "podLabels": {"cost": "b"},
    "extraEnv": [{"name": "PYTHONASYNCIODEBUG", "value": "1"}],
    "seLinuxOptions": {"type": "spc_t"},
    "hostPID": True,
    "podNames": True,
    "dra": {"enabled": True},
}
TENANTS = {"acme": {"group": 10001, "limit": "8GiB", "uids": [7], "models": {"a.b": {"limit": "1GiB", "weight": 2}}}}


def documents(values: Mapping[str, Any]) -> list[Any]:
    rendered = manifests.render(values)
    return [document for name, text in rendered.items() if name != "NOTES.txt" for document in load_yaml(text)]


def one(values: Mapping[str, Any], kind: str, name: str = "") -> Any:
    (found,) = [
        document
        for document in documents(values)
        if document["kind"] == kind and document["metadata"]["name"] == (name or document["metadata"]["name"])
    ]
    return found


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    for path, text in (*manifests.sources().items(), *manifests.manifests().items()):
        assert path.read_text() == text, "make manifests"
        assert path.suffix != ".yaml" or "helm.sh/hook" not in text, "only Helm runs hooks"


def test_kubernetes_accepts_what_is_rendered() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    found = load_yaml(EXAMPLE.read_text())
    for gpus, more in (
        *((1, {}), (2, OPTIONS), (8, OPTIONS), (2, EVERYTHING), (8, EVERYTHING)),
        *((8, {"keeper": {"enabled": False}}), (1, {"tenants": TENANTS, "gpuDevices": "cdi"})),
    ):
        values = {"gpus": gpus, **more}
        report = helm.lint(manifests.CHART, dict(values), strict=True)
        assert not report["errors"], report
        found += [document for document in documents(values) if document["kind"] not in NOT_OF_KUBERNETES]
    for document in found:
        for version in ("1.36",) if document["kind"] == "DeviceClass" else ("1.30", "1.33", "1.36"):
            validate.validate(document, version, strict=True)


def test_each_gpu_has_a_keeper_and_its_share_of_the_limit() -> None:
    where = "/run/membroker-keeper/{}/fdstore.sock"
    for gpus in (1, 8):
        daemons = one({"gpus": gpus}, "DaemonSet", "membrokerd")["spec"]["template"]["spec"]
        keepers = one({"gpus": gpus}, "DaemonSet", "membroker-keeper")["spec"]["template"]["spec"]
        assert daemons["containers"][0]["resources"]["limits"] == {"memory": f"{2048 * gpus}Mi"}
        commands = [container["command"] for container in keepers["containers"]]
        assert commands == [["membroker-fdstore", "--stay", where.format(number)] for number in range(gpus)]
        assert f"seq 0 {gpus - 1})" in daemons["initContainers"][0]["command"][2]


def test_a_node_whose_keepers_are_fewer_gets_its_daemons_all_the_same(tmp_path: Path) -> None:
    """`gpus` was raised from 4 to 8, and keepers are replaced only by hand: the daemons waited for the rest forever."""
    values = {"gpus": 8, "keeper": {"waitSeconds": 1}}
    pod = one(values, "DaemonSet", "membrokerd")["spec"]["template"]["spec"]
    wait = [part.replace("/run/membroker-keeper", str(tmp_path)) for part in pod["initContainers"][0]["command"]]
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        with socket.socket(socket.AF_UNIX) as keeper:
            keeper.bind(str(tmp_path / str(number) / "fdstore.sock"))
    done = subprocess.run(wait, capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS)
    assert [line.split(" after")[0] for line in done.stdout.splitlines()] == [
        f"GPU {number} has no keeper" for number in range(4, 8)
    ]
    assert "delete its pod of membroker-keeper" in done.stdout


@pytest.mark.parametrize("way", ["variable", "mount", "cdi"])
def test_each_pod_that_opens_a_gpu_asks_for_it_in_one_way(way: str) -> None:
    """NVIDIA's runtime may take no variable from an unprivileged pod. The keepers never open a GPU."""
    found = documents({"gpuDevices": way})
    pods = [each for each in found if each["kind"] == "Pod"]
    pods += [each["spec"]["template"] for each in found if each["kind"] in ("DaemonSet", "Job")]
    told = []
    for pod in pods:
        (container, *_) = pod["spec"]["containers"]
        variables = {one["name"]: one.get("value") for one in container.get("env", ())}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounted = volumes.get(mounts.get("/var/run/nvidia-container-devices/all", ""))
        asks = {
            "variable": variables.get("NVIDIA_VISIBLE_DEVICES") == "all",
            "mount": bool(mounted) and mounted["hostPath"]["path"] == "/dev/null",
            "cdi": pod["metadata"].get("annotations", {}).get("cdi.k8s.io/membroker") == "nvidia.com/gpu=all",
        }
        told.append([name for name, does in asks.items() if does])
    assert sorted(told) == [[], [way], [way], [way]]


def test_two_pools_in_a_namespace_share_nothing() -> None:
    """No name, and no selector that takes the other's pods."""

    def of(release: str) -> list[Any]:
        with helm.Chart.load(manifests.CHART) as chart:
            rendered = chart.render(dict(OPTIONS), name=release, namespace="membroker")
        return [one for name, text in rendered.items() if not name.endswith(".txt") for one in load_yaml(text)]

    pools = [of("membroker"), of("other")]
    names = [{(one["kind"], one["metadata"]["name"]) for one in pool} for pool in pools]
    assert not names[0] & names[1]
    assert ("DaemonSet", "membrokerd") in names[0]
    assert ("DaemonSet", "other-membrokerd") in names[1]
    for pool, other in (pools, pools[::-1]):
        for each in pool:
            if each["kind"] == "DaemonSet":
                wanted = each["spec"]["selector"]["matchLabels"].items()
                assert wanted <= each["spec"]["template"]["metadata"]["labels"].items()
                pods = [one["spec"]["template"]["metadata"]["labels"] for one in other if one["kind"] == "DaemonSet"]
                assert not any(wanted <= labels.items() for labels in pods)


def test_the_operators_rules_are_the_alerts_and_rules_of_prometheus() -> None:
    values = {"prometheusRule": {"enabled": True, "runbooks": "https://docs.example/membroker/"}}
    groups = one(values, "PrometheusRule")["spec"]["groups"]
    found = {rule.get("alert") or rule["record"] for group in groups for rule in group["rules"]}
    there = "".join((ROOT / "deploy" / "prometheus" / name).read_text() for name in ("alerts.yml", "rules.yml"))
    assert found == set(re.findall(r"- (?:alert|record): (\S+)", there))
    links = [rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert all(link.startswith("https://docs.example/membroker/alerts.html#membroker") for link in links)
    board = one({"dashboard": {"enabled": True}}, "ConfigMap", "membrokerd-dashboard")
    assert [json.loads(board["data"][name])["panels"] != [] for name in ("membroker.json", "membroker-fleet.json")]


def test_an_upgrade_is_preceded_by_a_check_of_its_configuration(tmp_path: Path) -> None:
    """The job has the new configuration, and fails for what the schema cannot see; the plain manifests have no hook."""
    values = {"driver": "host", "config": {"capacity": "64MiB"}, "tenants": {"red": {"guarantee": "900GiB"}}}
    job, text = one(values, "Job"), one(values, "ConfigMap", "membrokerd-check")["data"]["membrokerd.toml"]
    assert {job["metadata"]["annotations"]["helm.sh/hook"]} == {"pre-upgrade"}
    assert text == one(values, "ConfigMap", "membrokerd")["data"]["membrokerd.toml"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (tmp_path / "membrokerd.toml").write_text(text.replace("/run/membroker", str(tmp_path)))
    words = [part.replace("/etc/membroker", str(tmp_path)) for part in container["args"]]
    command = [sys.executable, "-m", "membrokerd.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_SECONDS)
    assert done.returncode == 1
    assert "900GiB" in done.stderr


def test_our_own_parsers_accept_what_is_rendered(tmp_path: Path) -> None:
    """The command line and the configuration, with tenants, models and more keys."""
    values = {"tenants": TENANTS, "config": {"headroom": "4GiB"}, "runtimeDirectory": "/run/mb"}
    values["metrics"] = {"port": 9, "modelReasons": False}
    daemonset = one(values, "DaemonSet", "membrokerd")
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    given = cli._parser().parse_args(container["args"])
    assert given.all == 0
    path = tmp_path / given.config.name
    path.write_text(one(values, "ConfigMap", "membrokerd")["data"][given.config.name])
    found = load(path, {}, env={}, uid=0)
    assert (found.driver, found.headroom) == ("cuda", 4 << 30)
    assert (found.metrics.port, found.metrics.model_reasons) == (9, False)
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


def test_the_agent_has_its_own_token_and_the_nodes_own_paths() -> None:
    """The daemons' container gets neither a token nor the kubelet's directories; by default there is no agent."""
    assert not {"ClusterRole", "ClusterRoleBinding", "DeviceClass"} & {each["kind"] for each in documents({})}
    values = {"dra": {"enabled": True}, "runtimeDirectory": "/run/mb", "openshift": {"enabled": True}}
    pod = one(values, "DaemonSet", "membrokerd")["spec"]["template"]["spec"]
    daemons, agent = pod["containers"]
    assert {mount["name"] for mount in daemons["volumeMounts"]} == {"config", "runtime", "state", "keeper"}
    assert not pod["automountServiceAccountToken"]
    paths = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in agent["volumeMounts"]}
    assert {name: path for name, path in mounts.items() if name != "token"} == {
        name: paths[name] for name in mounts if name != "token"
    }
    given = main._parser().parse_args(agent["command"][1:])
    assert mounts["runtime"] == str(given.runtime_directory) == "/run/mb"
    assert mounts["kubelet-plugin"] == str(plugin.data_directory(given.kubelet_directory))
    assert mounts["kubelet-registry"] == f"{given.kubelet_directory}/plugins_registry"
    assert (mounts["cdi"], mounts["token"]) == (str(given.cdi_directory), str(given.account_directory))
    assert [variable["name"] for variable in agent["env"]] == [names.NODE_VARIABLE]
    assert agent["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "projected" in one(values, "SecurityContextConstraints")["volumes"]
    policies = [one({**OPTIONS, "dra": {"enabled": enabled}}, "NetworkPolicy") for enabled in (False, True)]
    assert [policy["spec"]["egress"] for policy in policies] == [[], [{}]], "only the agent connects to anything"
    subject, role = one(values, "ClusterRoleBinding")["subjects"][0], one(values, "ClusterRole")
    assert (subject["name"], subject["namespace"]) == (pod["serviceAccountName"], "membroker")
    assert {rule["resources"][0]: rule["verbs"] for rule in role["rules"]} == {
        "resourceclaims": ["get"],
        "resourceslices": ["get", "create", "update"],
        "nodes": ["get"],
    }


def test_the_class_has_parameters_that_the_agent_takes() -> None:
    given = {"maxGuarantee": "8Gi", "maxLimit": "16Gi", "weight": 2, "group": 10001}
    spec = one({"dra": {"enabled": True, "deviceClass": {"parameters": given}}}, "DeviceClass")["spec"]
    configs = [{"source": "FromClass", **each} for each in spec["config"]]
    wanted = claims.read(claim(configs=configs), UID, NODE)
    assert wanted.tenants["host"] == {"weight": 2, "group": 10001, "mode": 0o666, "limit_bytes": 16 << 30}
    assert f'"{claims.DRIVER}"' in spec["selectors"][0]["cel"]["expression"]


def test_the_example_claim_is_one_that_the_agent_takes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    template, pod = load_yaml(CLAIM.read_text())
    for document in (template, pod):
        validate.validate(document, "1.36", strict=True)
    devices = template["spec"]["spec"]["devices"]
    given = claim(configs=[{"source": "FromClaim", **each} for each in devices["config"]])
    given["spec"]["devices"] = devices
    assert claims.read(given, UID, NODE).tenants == {"host": {"guarantee_bytes": 4 << 30, "limit_bytes": 16 << 30}}
    (named,) = pod["spec"]["resourceClaims"]
    assert named["resourceClaimTemplateName"] == template["metadata"]["name"]
    assert "volumes" not in pod["spec"]


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


WRONG: tuple[Mapping[str, Any], ...] = (
    {"tenants": {"Upper": {}}},
    # A misspelled option would be off, and nothing would say so.
    *({"gpu": 2}, {"admissionPolicies": {"enabled": True}}, {"networkPolicy": {"enable": True}}),
    {"networkPolicy": {"enabled": True, "from": []}},  # everybody, to Kubernetes
    # What membrokerd.toml does not have.
    *({"tenants": {"red": {"limitt": "1GiB"}}}, {"config": "not toml"}, {"config": {"headroomx": "4GiB"}}),
    *({"tenants": {"red": {"limit": "1 gig!"}}}, {"tenants": {"red": {"models": {"m": {"weight": 0.5}}}}}),
    *({"config": {"keeper_socket": "/x"}}, {"image": {"digest": "latest"}}, {"maxUnavailable": 0}),
    {"podNames": True},  # without hostPID no process's pod is seen
    {"tenants": {"red": {"weight": 0.5}}},  # as 0 it would wait for all others
    {"dra": {"deviceClass": {"parameters": {"maxLimt": "1Gi"}}}},
)


def test_wrong_values_are_refused() -> None:
    for values in WRONG:
        with pytest.raises(helm.HelmError):
            manifests.render(values)


def test_the_schema_knows_every_value() -> None:
    """With their own values, and those that Helm adds for a chart that contains this one."""
    (values,) = load_yaml((manifests.CHART / "values.yaml").read_text())
    manifests.render({**values, "global": {"registry": "x"}})


def test_a_number_is_not_rounded_on_its_way_into_the_configuration(tmp_path: Path) -> None:
    """Helm has a large number of a values file as a float."""
    path = tmp_path / "membrokerd.toml"
    values = {"config": {"capacity": 1 << 34}, "tenants": {"red": {"weight": 2, "limit": float(1 << 33)}}}
    path.write_text(one(values, "ConfigMap", "membrokerd")["data"]["membrokerd.toml"])
    found = load(path, {}, env={}, uid=0)
    assert (found.capacity, found.tenants["red"].limit) == (1 << 34, 1 << 33)


# --- As real processes ---


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="mb-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


class Node:
    """The processes of both pods, with the host driver and the node's directories below the test's own."""

    def __init__(self, stack: ExitStack, place: Path) -> None:
        self._stack, self.place = stack, place
        tenants: dict[str, Any] = {"acme": {}}  # only root can give a socket to another group
        values = {"gpus": 2, "driver": "host", "config": {"capacity": "256MiB"}, "tenants": tenants}
        text = one(values, "ConfigMap", "membrokerd")["data"]["membrokerd.toml"].replace('"*"', '"127.0.0.1"')
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
        node = Node(stack, place)
        workers = [stack.enter_context(worker()) for _ in range(2)]
        for number, each in enumerate(workers):
            each.do(f"client = membroker.connect({str(node.endpoint(number))!r})")
            each.do("model = client.model('m'); segment = model.create_segment('weights', PAGE)")
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


def test_helm_test_fails_while_a_gpu_has_no_daemon(place: Path) -> None:
    """Its pod has the daemons' directory of the node, read-only, and no other right than its user."""
    pod = one({}, "Pod")
    (container,) = pod["spec"]["containers"]
    assert [(mount["name"], mount["readOnly"]) for mount in container["volumeMounts"]] == [("runtime", True)]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    command = [part.replace("/run/membroker", f"{place}/membroker") for part in container["command"]]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MEMBROKER_SYSTEM_DIRECTORY": f"{place}/membroker"}

    def helm_test() -> tuple[bool, list[str]]:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_SECONDS
        )
        brokers = re.findall(r"^(ok|warn|fail) +broker: ", done.stdout, re.MULTILINE)
        return done.returncode == 0, brokers

    with ExitStack() as stack:
        assert helm_test() == (False, ["fail"])
        node = Node(stack, place)
        assert helm_test() == (True, ["ok", "ok"]), node.log()
        node.daemons.send_signal(signal.SIGTERM)
        assert node.daemons.wait(DEADLINE_SECONDS) == 0
        assert helm_test() == (False, ["fail", "fail"])


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


def test_a_tenant_may_mount_its_own_endpoint_and_nothing_else() -> None:
    own = "/run/membroker/0/tenants/acme"
    for path in (own, "/run/membroker/gpu-12345678/tenants/acme/"):
        assert all(verdicts(pod_with(path), "acme", TENANT)), path
    for path in (
        *("/run/membroker/0/tenants/other", "/run/membroker/0/tenants/acme2", "/run/membroker/0/tenants"),
        *("/run/membroker/0/admin", "/run/membroker/0/tenants/acme/../../admin", "/run/membroker"),
        *("/run//membroker/0/admin", "/var/run/membroker/0/admin", "/run/membroker-keeper/0", "/run", "/"),
    ):
        assert not all(verdicts(pod_with(path), "acme", TENANT)), path
    assert not all(verdicts(pod_with(own, read_only=False), "acme", TENANT))
    pod = pod_with(own)
    pod["ephemeralContainers"] = pod_with(own, read_only=False)["containers"]
    assert not all(verdicts(pod, "acme", TENANT))


def test_other_namespaces_mount_no_endpoint_and_whatever_else_they_did() -> None:
    for labels in ({}, {"team": "a"}):
        for path in ("/run/membroker/0/tenants/acme", "/var/run/membroker/0/admin", "/run//membroker"):
            assert not all(verdicts(pod_with(path), "acme", labels))
        assert all(verdicts(pod_with("/var/log", read_only=False), "monitoring", labels))
        assert all(verdicts({"containers": [{"name": "w"}]}, "web", labels))


def test_the_policy_lets_the_example_run() -> None:
    namespace, deployment = load_yaml(EXAMPLE.read_text())
    pod = deployment["spec"]["template"]["spec"]
    assert deployment["metadata"]["namespace"] == namespace["metadata"]["name"]
    assert all(verdicts(pod, namespace["metadata"]["name"], namespace["metadata"]["labels"]))
