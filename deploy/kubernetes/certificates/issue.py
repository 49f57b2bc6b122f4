"""Issues the certificates of a deployment, and prints them as Secrets. The labels of the nodes say which hosts there are.

    kubectl get nodes --output json | python3 deploy/kubernetes/certificates/issue.py | kubectl apply --server-side --filename -

The authority and all certificates are in the folder tls beside this program. Repeat the command after a change of the
nodes, after `collapipe certs revoke`, and before the certificates expire. Valid certificates stay as they are.
"""

import argparse
import base64
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AUTHORITY = Path(__file__).parent / "tls"
DEVICE = "collapipe.io/cluster"
"""Label of a node with a device agent. Its value is the cluster."""
CONTROL_UNIT = "collapipe.io/control-unit-"
"""Label of the node that keeps the data of a cluster. The cluster follows."""
SINGLE = {
    "scheduler": "scheduler",
    "edge-server": "edge-server",
    "client": "collapipe",
    "prometheus": "prometheus",
}
"""Name of the only holder of a role."""


class LabelError(Exception):
    """The labels of the nodes make no deployment. The message says which label to change."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of all clusters.

    Args:
        control_units: Cluster by host id.
        devices: Cluster by host id, which is the name of the node.
    """

    control_units: Mapping[str, str]
    devices: Mapping[str, str]


def hosts_of(nodes: Sequence[Mapping[str, Any]]) -> Hosts:
    """Returns the hosts that the labels of the nodes ask for.

    Args:
        nodes: Objects of kind Node.

    Raises:
        LabelError: There are no devices, or a cluster with devices does not have one node for its control unit.
    """
    labels = {node["metadata"]["name"]: node["metadata"].get("labels", {}) for node in nodes}
    devices = {name: of_node[DEVICE] for name, of_node in labels.items() if DEVICE in of_node}
    if not devices:
        raise LabelError(
            f"none of the {len(labels)} nodes has the label {DEVICE}, which says that a node trains: "
            f"kubectl label node NAME {DEVICE}=0"
        )
    units = {
        label.removeprefix(CONTROL_UNIT): [name for name in labels if label in labels[name]]
        for label in sorted({label for of_node in labels.values() for label in of_node})
        if label.startswith(CONTROL_UNIT)
    }
    if without := sorted({*devices.values()} - units.keys()):
        label = f"{CONTROL_UNIT}{without[0]}"
        raise LabelError(
            f"cluster {without[0]} has devices, but no node has the label {label}, which says where its data is: "
            f"kubectl label node NAME {label}="
        )
    if several := [cluster for cluster, names in units.items() if len(names) > 1]:
        label, names = f"{CONTROL_UNIT}{several[0]}", units[several[0]]
        raise LabelError(
            f"the nodes {', '.join(names)} have the label {label}, but the data of a cluster is on one node: "
            f"kubectl label node {names[-1]} {label}-"
        )
    return Hosts({f"control-unit-{cluster}": cluster for cluster in units}, devices)


def holders(hosts: Hosts, *, devices: bool) -> list[str]:
    """Returns the holders of certificates as `collapipe certs issue` names them."""
    named = [f"{role}:{name}" for role, name in SINGLE.items()]
    named += [f"control-unit:{name}@{cluster}" for name, cluster in hosts.control_units.items()]
    if devices:
        named += [f"device-agent:{name}@{cluster}" for name, cluster in hosts.devices.items()]
    return named


def files_of_secrets(hosts: Hosts, *, devices: bool) -> dict[str, dict[str, str]]:
    """Returns the file of each key of each Secret, relative to the folder of the authority."""
    secrets = {
        f"{role}-tls": {file: f"issued/{name}/{file}" for file in ("ca.pem", "cert.pem", "key.pem")}
        for role, name in SINGLE.items()
    }
    secrets["scheduler-tls"]["revoked.pb"] = "revoked.pb"
    shared = {"control-unit": hosts.control_units, "device-agent": hosts.devices if devices else {}}
    for role, names in shared.items():
        if names:
            secrets[f"{role}-tls"] = {"ca.pem": "ca.pem"} | {
                f"{name}.{file}": f"issued/{name}/{file}"
                for name in names
                for file in ("cert.pem", "key.pem")
            }
    return secrets


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description="Reads nodes as JSON, issues certificates, and prints Secrets."
    )
    parser.add_argument(
        "--without-devices",
        action="store_true",
        help="none for device agents, because `collapipe join` made them on the nodes (components/certificates-on-nodes)",
    )
    devices = not parser.parse_args().without_devices
    try:
        hosts = hosts_of(json.load(sys.stdin)["items"])
    except json.JSONDecodeError:
        sys.exit(
            "issue.py: the input is no list of nodes: it needs that of `kubectl get nodes --output json`"
        )
    except LabelError as error:
        sys.exit(f"issue.py: {error}")
    command = ["collapipe", "certs", "issue", "--init", str(AUTHORITY)]
    try:
        # The output of this program is for kubectl only.
        subprocess.run([*command, *holders(hosts, devices=devices)], stdout=sys.stderr, check=True)
    except FileNotFoundError:
        sys.exit("issue.py: this shell has no command `collapipe`: run `. .venv/bin/activate`")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # The command has said why.
    items = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": "collapipe"},
            "data": {
                key: base64.b64encode((AUTHORITY / file).read_bytes()).decode()
                for key, file in files.items()
            },
        }
        for name, files in files_of_secrets(hosts, devices=devices).items()
    ]
    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


if __name__ == "__main__":
    main()
