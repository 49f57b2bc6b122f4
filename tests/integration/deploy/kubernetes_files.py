"""Builds the Kubernetes manifests with kustomize, and fills in pods as a node would."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"

Document = dict[str, Any]


@cache
def kustomize_command() -> tuple[str, ...] | None:
    """Returns the command of kustomize 5, which may be a part of kubectl; `None` if there is none."""
    if shutil.which("kustomize"):
        return ("kustomize", "build")
    if shutil.which("kubectl"):
        version = subprocess.run(
            ["kubectl", "version", "--client"], capture_output=True, text=True, check=False
        )
        if "Kustomize Version: v5" in version.stdout:
            return ("kubectl", "kustomize")
    return None


def build(folder: Path) -> list[Document]:
    """Returns the documents of a kustomization."""
    command = kustomize_command()
    assert command is not None
    built = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return [document for document in yaml.safe_load_all(built.stdout) if document]


NODE_PROCESSORS = 4
"""Processors of every node."""


@dataclass(frozen=True)
class Pod:
    """A pod of a workload on a node.

    Args:
        owner: The document of the workload.
        node: Name of the node.
    """

    owner: Document
    node: str = "pi-1"

    @property
    def name(self) -> str:
        """The name of the workload."""
        return str(self.owner["metadata"]["name"])

    @property
    def template(self) -> Document:
        """The metadata and the specification of the pod."""
        template: Document = self.owner["spec"]["template"]
        return template

    @property
    def spec(self) -> Document:
        """The specification of the pod."""
        spec: Document = self.template["spec"]
        return spec

    @property
    def container(self) -> Document:
        """The only container of the pod."""
        (container,) = self.spec["containers"]
        return dict(container)

    @property
    def target(self) -> str:
        """The target of the Dockerfile that builds its image; empty for an image of another project."""
        found = re.fullmatch(r"collapipe/([\w-]+):[\w.]+", self.container["image"])
        return found[1] if found else ""

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its process, as the kubelet makes it."""
        fields = {
            "spec.nodeName": self.node,
            **{
                f"metadata.labels['{label}']": value
                for label, value in self.template["metadata"]["labels"].items()
            },
        }
        # Without a limit, the kubelet takes what the node has.
        limits = self.container["resources"]["limits"]
        resources = {"limits.cpu": str(limits.get("cpu", NODE_PROCESSORS))}
        environment: dict[str, str] = {}
        for variable in self.container.get("env", []):
            if "value" in variable:
                environment[variable["name"]] = self._expand(variable["value"], environment)
            elif "resourceFieldRef" in variable["valueFrom"]:
                environment[variable["name"]] = resources[
                    variable["valueFrom"]["resourceFieldRef"]["resource"]
                ]
            else:
                field = variable["valueFrom"]["fieldRef"]["fieldPath"]
                environment[variable["name"]] = fields[field]
        return environment

    def mounted_keys(self, volume: str) -> dict[str, str]:
        """Returns the mounted keys of a Secret by their path in the container; empty for a whole volume."""
        mounts = {}
        for mount in self.container["volumeMounts"]:
            if mount["name"] == volume:
                key = mount.get("subPath") or mount.get("subPathExpr", "")
                mounts[mount["mountPath"]] = self._expand(key, self.environment)
        return mounts

    @staticmethod
    def _expand(text: str, environment: dict[str, str]) -> str:
        return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], text)


def pods(documents: list[Document]) -> list[Pod]:
    """Returns one pod for every workload."""
    kinds = ("StatefulSet", "DaemonSet", "Deployment")
    return [Pod(document) for document in documents if document["kind"] in kinds]
