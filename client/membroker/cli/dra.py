"""The command `membroker dra`: the agent of Kubernetes' Dynamic Resource Allocation on a node.

Owns its command line, its signals, and how it ends. What it does is in `dra`.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
from itertools import count
from pathlib import Path

from ..errors import InvalidRequest
from ..ext import names
from . import tables
from .commands import Commands, add_bare

_COLLECT = 10
"""Every so many minutes what is left of claims that do not exist any more is looked for."""
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_NOTES = """
The command runs on each node beside the daemons, as a container of the chart (dra.enabled), until SIGTERM. The kubelet
asks it to prepare a ResourceClaim of the driver `membroker` before a pod starts. For each GPU of the claim it makes a
tenant, dra-UID, with the guarantee and the limit that the claim and its DeviceClass say, and writes a CDI file, by
which the runtime mounts the tenant's endpoint into the container, read-only, with MEMBROKER_ENDPOINT. When the kubelet
unprepares the claim, the tenant is deleted: the daemon drains it first.

It publishes the node's GPUs as the ResourceSlice NODE-membroker. It needs the admin endpoints of the daemons, the
directories of the kubelet and of CDI, and a service account that may get ResourceClaims, get, create and update
ResourceSlices, and get its node. It keeps a record of each claim in KUBELET/plugins/membroker/claims, and never changes
a tenant without one. docs/kubernetes.md has the parameters of a claim."""


def add_command(subparsers: Commands) -> None:
    """Add `dra`."""
    parser = add_bare(
        subparsers,
        "dra",
        "make a tenant for each ResourceClaim of this Kubernetes node",
        "dra                                        in a pod, with NODE_NAME set to its node's name",
        _NOTES,
    )
    parser.add_argument(
        "--node", metavar="NAME", default=os.environ.get(names.NODE_VARIABLE), help="default: $NODE_NAME"
    )
    for option, place, what in (
        ("runtime", names.SYSTEM_DIRECTORY, "the daemons' directory, with the same path as on the node"),
        ("kubelet", "/var/lib/kubelet", "the kubelet's directory"),
        ("cdi", "/var/run/cdi", "where the container runtime looks for CDI files"),
        ("account", "/var/run/secrets/kubernetes.io/serviceaccount", "the token and the CA of the service account"),
    ):
        parser.add_argument(
            f"--{option}-directory", metavar="DIR", type=Path, default=Path(place), help=f"{what} ({place})"
        )
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    host, port = os.environ.get(_HOST, ""), os.environ.get(_PORT, "443")
    if not host or not re.fullmatch("[0-9]{1,5}", port):
        raise InvalidRequest(f"this is no pod: {_HOST} and {_PORT} do not say where the API server is")
    if not options.node:
        raise InvalidRequest(f"name the node, by --node or {names.NODE_VARIABLE}")
    # Imported late: gRPC takes a tenth of a second.
    from ..dra import plugin
    from ..dra.agent import Agent
    from ..dra.api_server import ApiServer
    from ..dra.files import DeviceFiles, Records
    from ..dra.slices import SECONDS, Slices

    ends = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # and so in all threads from here on
    node, runtime = options.node, options.runtime_directory
    api = ApiServer(host, int(port), options.account_directory)
    agent = Agent(
        node,
        runtime,
        api,
        Records(plugin.data_directory(options.kubelet_directory) / "claims"),
        DeviceFiles(options.cdi_directory, runtime, names.ENDPOINT_VARIABLE),
        _say,
    )
    agent.restore()
    slices = Slices(node, runtime, api, _say)
    with plugin.serving(agent, options.kubelet_directory, _say):
        _say(f"serving the kubelet of {node}")
        for number in count(1):
            slices.publish()
            if signal.sigtimedwait(ends, SECONDS) is not None:
                break
            if number % _COLLECT == 0:
                agent.collect()
    return 0


def _say(line: str) -> None:
    print(tables.printable(line), flush=True)
