"""The chart in a real cluster without machines: etcd, a kube-apiserver and its controllers are real, kubelets are not.

Debian has etcd-server, and no kube-apiserver. Bookworm's source package `kubernetes` (1.20) builds one with its Go.
In $GOPATH/src/k8s.io/kubernetes, with GO111MODULE=off, first write pkg/generated/openapi by
vendor/k8s.io/kube-openapi/cmd/openapi-gen, as Makefile.generated_files does, and then:

    go build -tags providerless ./cmd/kube-apiserver ./cmd/kube-controller-manager

With both on PATH these tests run.
"""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.test_chart import EVERYTHING, EXAMPLE, documents
from tests.deploy.test_deploy import load_yaml
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.ports import reserved_port
from tools import manifests

helm = pytest.importorskip("helm_python", reason="Helm is not installed (pip install helm-python-sdk)")

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "openssl")
pytestmark = [
    pytest.mark.deep,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(shutil.which(name) is None for name in PROGRAMS), reason="no kube-apiserver: the docstring says how"
    ),
]
SPACE = "/api/v1/namespaces/membroker"
SETS = "/apis/apps/v1/namespaces/membroker/daemonsets"
OF_NOBODY = {"keeper": {"enabled": False}, "serviceAccount": {"create": False, "name": "gpu"}}
TENANTS = {"tenants": {"acme": {"group": 10001}}}
SERVICES = "10.99.0.0/16"


class Cluster:
    """The programs, and what asks them. Each node has a kubelet that says what it is told to say."""

    def __init__(self, stack: ExitStack, place: Path) -> None:
        self._stack, self._place = stack, place
        self._secure, store, peer = reserved_port(), reserved_port(), reserved_port()
        self._plain = ssl.create_default_context()
        self._plain.check_hostname, self._plain.verify_mode = False, ssl.CERT_NONE
        key = place / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        (place / "tokens.csv").write_text('token,admin,1,"system:masters"\n')
        etcd = f"http://127.0.0.1:{store}"
        self._start(
            "etcd",
            *(f"--data-dir={place}/etcd", f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}"),
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
        )
        self._start(
            "kube-apiserver",
            *(f"--etcd-servers={etcd}", f"--secure-port={self._secure}", "--bind-address=127.0.0.1"),
            *(f"--cert-dir={place}/certificates", f"--token-auth-file={place}/tokens.csv", "--authorization-mode=RBAC"),
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            *("--service-account-issuer=https://cluster", f"--service-cluster-ip-range={SERVICES}"),
        )
        until(lambda: self.ask("GET", "/readyz") == "ok", 10 * DEADLINE_SECONDS)
        until(lambda: self.ask("GET", "/apis/scheduling.k8s.io/v1/priorityclasses/system-node-critical"))
        cluster = {"server": f"https://127.0.0.1:{self._secure}", "insecure-skip-tls-verify": True}
        configuration = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": "token"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        self.kubeconfig = place / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(configuration))
        self._start(
            "kube-controller-manager",
            *(f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", f"--service-account-private-key-file={key}"),
            *("--controllers=daemonset,job,garbagecollector,namespace,serviceaccount", "--port=0", "--secure-port=0"),
        )
        over = threading.Event()
        kubelets = threading.Thread(target=self._be_kubelets, args=(over,))
        kubelets.start()
        stack.callback(kubelets.join)
        stack.callback(over.set)
        self.job_ends: str = "Succeeded"
        """How a pod ends that is no daemon's: a job's, or that of `helm test`."""

    def _start(self, *command: str) -> None:
        log = self._stack.enter_context((self._place / f"{command[0]}.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._place)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """Return the answer of a request, or None at an error."""
        headers = {"Authorization": "Bearer token", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"https://127.0.0.1:{self._secure}{path}", data=data, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS, context=self._plain) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            print(method, path, error.read().decode())  # shown if the test fails
            return None
        except OSError:
            return None
        return json.loads(text) if text.startswith("{") else text

    def make(self, path: str, kind: str, version: str, name: str, **more: Any) -> None:
        labels = more.pop("labels", {})
        document = {"kind": kind, "apiVersion": version, "metadata": {"name": name, "labels": labels}, **more}
        assert self.ask("POST", path, document), name

    def all_of(self, path: str) -> list[Any]:
        found = self.ask("GET", path)
        return list(found["items"]) if found else []

    def pods(self) -> list[tuple[str, str]]:
        """Return the node and the application of each pod that is to stay."""
        return sorted(
            (pod["spec"].get("nodeName", ""), pod["metadata"]["labels"]["app.kubernetes.io/name"])
            for pod in self.all_of(f"{SPACE}/pods")
            if "deletionTimestamp" not in pod["metadata"] and pod["status"]["phase"] == "Running"
        )

    def set(self, name: str) -> tuple[int, int, int]:
        """Return how many pods a DaemonSet wants, how many are ready, and how many of these have its last template."""
        status = self.ask("GET", f"{SETS}/{name}")["status"]
        return (
            status["desiredNumberScheduled"],
            status["numberReady"],
            status.get("updatedNumberScheduled", 0),
        )

    def _be_kubelets(self, over: threading.Event) -> None:
        while not over.wait(0.1):
            for pod in self.all_of("/api/v1/pods"):
                with suppress(KeyError, IndexError):
                    self._take_care(pod)

    def _take_care(self, pod: Any) -> None:
        """Do what the scheduler and the node's kubelet would: bind it, run it, end it."""
        name, space = pod["metadata"]["name"], pod["metadata"]["namespace"]
        path = f"/api/v1/namespaces/{space}/pods/{name}"
        if "deletionTimestamp" in pod["metadata"]:
            self.ask("DELETE", path, {"gracePeriodSeconds": 0})
        elif "nodeName" not in pod["spec"]:
            node = "gpu-0"
            if "affinity" in pod["spec"]:
                needed = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
                node = needed["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
            target = {"kind": "Node", "name": node}
            self.ask("POST", f"{path}/binding", {"metadata": {"name": name}, "target": target})
        elif pod["status"]["phase"] == "Pending":
            owners = [owner["kind"] for owner in pod["metadata"].get("ownerReferences", ())]
            phase = "Running" if owners == ["DaemonSet"] else self.job_ends
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"}
            status = {"status": {"phase": phase, "conditions": [ready]}}
            self.ask("PATCH", f"{path}/status", status, "application/strategic-merge-patch+json")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster with two GPU nodes, a node without a GPU, and the namespace."""
    with ExitStack() as stack:
        made = Cluster(stack, tmp_path)
        for name in ("gpu-0", "gpu-1", "plain"):
            labels = {"nvidia.com/gpu.present": "true"} if name.startswith("gpu") else {}
            made.make("/api/v1/nodes", "Node", "v1", name, labels=labels)
            ready = {"spec": {"taints": None}}  # its kubelet would say that it is ready
            made.ask("PATCH", f"/api/v1/nodes/{name}", ready, "application/merge-patch+json")
        made.make("/api/v1/namespaces", "Namespace", "v1", "membroker")
        yield made


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """The chart, without its bound: Debian's source is of 1.20, and what the chart needs of 1.27 are options."""
    copy = tmp_path / "chart"
    shutil.copytree(manifests.CHART, copy)
    about = copy / "Chart.yaml"
    about.write_text(re.sub(r"^kubeVersion: .*\n", "", about.read_text(), flags=re.MULTILINE))
    return copy


def test_install_test_upgrade_rollback_and_uninstall(cluster: Cluster, chart: Path) -> None:
    """By Helm itself, as docs/kubernetes.md says it; the API server takes each object, and pods come where GPUs are."""
    config = helm.Config(kubeconfig_path=cluster.kubeconfig, namespace="membroker")
    config.install(chart, "membroker", dict(TENANTS), namespace="membroker")
    keepers = [(node, "membroker-keeper") for node in ("gpu-0", "gpu-1")]
    until(lambda: cluster.pods() == keepers)
    until(lambda: any("RuntimeClass" in event["message"] for event in cluster.all_of(f"{SPACE}/events")))
    assert cluster.set("membrokerd") == (0, 0, 0), "DESIRED is 0 where no pod can be made, as the page says"
    cluster.make("/apis/node.k8s.io/v1/runtimeclasses", "RuntimeClass", "node.k8s.io/v1", "nvidia", handler="nvidia")
    both = [(node, app) for node in ("gpu-0", "gpu-1") for app in ("membroker-keeper", "membrokerd")]
    until(lambda: cluster.pods() == both)
    until(lambda: cluster.set("membrokerd") == (2, 2, 2))
    before = {pod["metadata"]["uid"]: pod for pod in cluster.all_of(f"{SPACE}/pods")}

    config.test("membroker")
    cluster.job_ends = "Failed"
    with pytest.raises(helm.HelmError, match="membrokerd-test"):
        config.test("membroker")

    # The check of the configuration fails: nothing of the upgrade has happened.
    with pytest.raises(helm.HelmError, match="membrokerd-check"):
        config.upgrade(chart, "membroker", {**TENANTS, "log": {"level": "debug"}})
    assert 'level = "info"' in cluster.ask("GET", f"{SPACE}/configmaps/membrokerd")["data"]["membrokerd.toml"]
    assert cluster.ask("GET", "/apis/batch/v1/namespaces/membroker/jobs/membrokerd-check"), "its log says why"

    cluster.job_ends = "Succeeded"
    config.upgrade(chart, "membroker", {**TENANTS, "log": {"level": "debug"}})
    assert 'level = "debug"' in cluster.ask("GET", f"{SPACE}/configmaps/membrokerd")["data"]["membrokerd.toml"]

    def replaced() -> set[str]:
        now = {pod["metadata"]["uid"] for pod in cluster.all_of(f"{SPACE}/pods")}
        return {pod["metadata"]["labels"]["app.kubernetes.io/name"] for uid, pod in before.items() if uid not in now}

    until(lambda: replaced() >= {"membrokerd"} and cluster.set("membrokerd") == (2, 2, 2))
    assert "membroker-keeper" not in replaced(), "they keep what the daemons have lent"

    # Without a revision Helm would go back to the one before, which was refused.
    states = {one["revision"]: one["status"] for one in config.history("membroker")}
    assert states == {1: "superseded", 2: "failed", 3: "deployed"}
    config.rollback("membroker", version=1)
    assert 'level = "info"' in cluster.ask("GET", f"{SPACE}/configmaps/membrokerd")["data"]["membrokerd.toml"]
    until(lambda: cluster.pods() == both)
    config.uninstall("membroker")
    until(lambda: cluster.pods() == [] and cluster.all_of(SETS) == [])
    left = [one["metadata"]["name"] for one in cluster.all_of(f"{SPACE}/configmaps")]
    assert not [name for name in left if name.startswith("membroker")]


def test_the_api_server_takes_every_option_and_the_example(cluster: Cluster) -> None:
    """Its own validation knows more than a schema: names that refer to others, what excludes what, and which values."""
    cluster.make("/apis/node.k8s.io/v1/runtimeclasses", "RuntimeClass", "node.k8s.io/v1", "nvidia", handler="nvidia")
    cluster.make(f"{SPACE}/serviceaccounts", "ServiceAccount", "v1", "gpu")
    cluster.make("/api/v1/namespaces", "Namespace", "v1", "acme")
    example = [each for each in load_yaml(EXAMPLE.read_text()) if each["kind"] != "Namespace"]
    known, refused = set(), []
    for all_ in (documents(EVERYTHING), documents(OF_NOBODY), example):
        for each in all_:
            kind, version = each["kind"], each["apiVersion"]
            group = "/api/v1" if version == "v1" else f"/apis/{version}"
            found = cluster.ask("GET", group) or {"resources": []}  # of the operators, or younger than this server
            (names,) = [one for one in found["resources"] if one["kind"] == kind and "/" not in one["name"]] or [None]
            if names is None:
                continue
            known.add(kind)
            space = f"/namespaces/{each['metadata'].get('namespace', 'membroker')}" if names["namespaced"] else ""
            if not cluster.ask("POST", f"{group}{space}/{names['name']}?dryRun=All", each):
                refused.append((kind, each["metadata"]["name"]))
    assert refused == []
    assert known >= {"DaemonSet", "Job", "Pod", "ConfigMap", "NetworkPolicy", "ClusterRole", "Deployment"}
