"""The Kubernetes manifests are valid, and agree with the code, the images and the certificates."""

import base64
import copy
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from collapipe.certificates import Identity, Role, pki
from collapipe.certificates.authority_folder import AuthorityFolder
from collapipe.certificates.revoked_keys import parse_list, read_signed
from collapipe.service_process import ServiceSettings

from .kubernetes_files import (
    DEPLOY,
    KUBERNETES,
    NODE_PROCESSORS,
    Document,
    Pod,
    build,
    kustomize_command,
    pods,
)

pytestmark = pytest.mark.skipif(
    kustomize_command() is None,
    reason="no kustomize 5 on this machine: install kubectl 1.27 or later, or kustomize",
)

_SETTINGS = {
    "scheduler": "SchedulerSettings",
    "edge-server": "EdgeServerSettings",
    "control-unit": "ControlUnitSettings",
    "device-agent": "DeviceAgentSettings",
}
_OLDEST = "1.27"
"""The oldest Kubernetes that the README allows."""
_README = (KUBERNETES / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def base() -> list[Document]:
    return build(KUBERNETES / "base")


@pytest.fixture(scope="module")
def k3s() -> list[Document]:
    return build(KUBERNETES / "overlays" / "k3s")


@pytest.fixture(scope="module")
def on_nodes(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """Builds the base with the certificates that nodes have themselves."""
    return _build_overlay(
        tmp_path_factory.mktemp("on-nodes"),
        "resources: [../../base]\ncomponents: [../../components/certificates-on-nodes]\n",
    )


@pytest.fixture(scope="module")
def with_registry(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """Builds the overlay of the page for a registry."""
    page = (DEPLOY.parent / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (overlay,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return _build_overlay(tmp_path_factory.mktemp("registry"), overlay)


def _build_overlay(folder: Path, kustomization: str) -> list[Document]:
    """Builds an overlay beside those of the repository."""
    shutil.copytree(DEPLOY, folder / "deploy", ignore=shutil.ignore_patterns("tls", "data"))
    overlay = folder / "deploy" / "kubernetes" / "overlays" / "mine"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(kustomization, encoding="utf-8")
    return build(overlay)


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that issues certificates, in a folder of its own."""
    folder = tmp_path_factory.mktemp("certificates")
    return Path(shutil.copy(KUBERNETES / "certificates" / "issue.py", folder))


@pytest.fixture(scope="module")
def certificates(issuer: Path) -> list[Document]:
    return _secrets(_issue(issuer, _labelled_nodes()))


def _labelled_nodes() -> dict[str, dict[str, str]]:
    """Returns the labels that the commands of the README give to nodes, by the name of the node."""
    nodes: dict[str, dict[str, str]] = {}
    for command in re.findall(r"^ +kubectl label node (.+)$", _README, re.MULTILINE):
        *names, label = command.split()
        key, _, value = label.partition("=")
        for name in names:
            nodes.setdefault(name, {})[key] = value
    return nodes


def _issue(
    issuer: Path, nodes: dict[str, dict[str, str]], *options: str
) -> subprocess.CompletedProcess[str]:
    """Runs the program with nodes as kubectl prints them."""
    items = [
        {"kind": "Node", "metadata": {"name": name, "labels": labels}}
        for name, labels in nodes.items()
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, str(issuer), *options],
        input=json.dumps({"kind": "List", "items": items}),
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def _secrets(issued: subprocess.CompletedProcess[str]) -> list[Document]:
    assert issued.returncode == 0, issued.stderr
    secrets: list[Document] = json.loads(issued.stdout)["items"]
    return secrets


def _services(documents: list[Document]) -> list[Pod]:
    """Returns the pods that run a service."""
    return [pod for pod in pods(documents) if pod.target in _SETTINGS]


def _settings(pod: Pod) -> ServiceSettings:
    """Returns the settings of the service in a pod."""
    module = importlib.import_module(f"collapipe.{pod.target.replace('-', '_')}.app")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in pod.environment.items():
            patch.setenv(name, value)
        settings: ServiceSettings = getattr(module, _SETTINGS[pod.target])(_cli_parse_args=[])
    return settings


def test_every_document_is_valid(
    base: list[Document],
    k3s: list[Document],
    on_nodes: list[Document],
    with_registry: list[Document],
    certificates: list[Document],
) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="no kubernetes-validate: pip install kubernetes-validate"
    )
    misspelt = copy.deepcopy(pods(base)[0].owner)
    misspelt["spec"]["template"]["spec"]["hostNetworks"] = True
    for kubernetes in (_OLDEST, kubernetes_validate.latest_version()):
        for documents in (base, k3s, on_nodes, with_registry, certificates):
            assert len(documents) > 4
            for document in documents:
                kubernetes_validate.validate(document, kubernetes, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(misspelt, kubernetes, strict=True)
    assert f"{_OLDEST} or later" in _README


def test_every_file_is_a_part_of_what_is_valid(k3s: list[Document]) -> None:
    built = {(d["kind"], re.sub(r"-\d$", "", d["metadata"]["name"])) for d in k3s}
    files = set(KUBERNETES.rglob("*.yaml")) - set(KUBERNETES.rglob("kustomization.yaml"))
    written = {
        (document["kind"], document["metadata"]["name"])
        for file in files
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8"))
    }
    assert len(written) > 15
    assert written <= built
    # All folders are used: by each other, or by the fixtures of this module.
    folders = {file.parent for file in KUBERNETES.rglob("kustomization.yaml")}
    used = {KUBERNETES / "overlays" / "k3s", KUBERNETES / "components" / "certificates-on-nodes"}
    for folder in folders:
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
        for key in ("resources", "components"):
            used |= {(folder / name).resolve() for name in kustomization.get(key, [])}
    assert folders <= used


def test_everything_is_in_the_created_namespace(k3s: list[Document]) -> None:
    (namespace,) = [d["metadata"]["name"] for d in k3s if d["kind"] == "Namespace"]
    others = {d["metadata"].get("namespace") for d in k3s if d["kind"] != "Namespace"}
    assert others == {namespace}


def test_services_accept_their_environment_and_serve_metrics_where_prometheus_scrapes(
    base: list[Document],
) -> None:
    found = _services(base)
    assert {pod.target for pod in found} == set(_SETTINGS)
    for pod in found:
        settings = _settings(pod)
        named = {name for name in pod.environment if name.startswith("COLLAPIPE_")}
        fields = {f"COLLAPIPE_{field.upper()}" for field in type(settings).model_fields}
        assert named <= fields, pod.name
        assert not settings.insecure
        annotations = pod.template["metadata"]["annotations"]
        # The service registers this port with the host of its address, which is its host id.
        assert settings.metrics_listen == f"0.0.0.0:{annotations['prometheus.io/port']}"
        assert annotations["prometheus.io/scrape"] == "true"
        ports = {port["name"]: port for port in pod.container["ports"]}
        assert settings.listen == f"0.0.0.0:{ports['grpc']['containerPort']}"
        assert str(ports["metrics"]["containerPort"]) == annotations["prometheus.io/port"]


def test_host_ids_are_names_that_others_can_resolve(base: list[Document]) -> None:
    headless = {
        document["metadata"]["name"]: document["spec"]
        for document in base
        if document["kind"] == "Service" and document["spec"].get("clusterIP") == "None"
    }
    for pod in _services(base):
        settings = _settings(pod)
        if pod.target == "device-agent":
            # The pod uses the network of the node, which the name of the node resolves to.
            assert pod.spec["hostNetwork"] and settings.host_id == pod.node
            assert pod.spec["dnsPolicy"] == "ClusterFirstWithHostNet"
        else:
            service = headless[settings.host_id]
            assert service["publishNotReadyAddresses"]
            assert service["selector"].items() <= pod.template["metadata"]["labels"].items()
            assert pod.owner["spec"]["serviceName"] == settings.host_id
            assert [port["port"] for port in service["ports"]] == [7100]
        if pod.target != "scheduler":
            assert settings.advertise == f"{settings.host_id}:7100"
            assert pod.environment["COLLAPIPE_SCHEDULER"] == "scheduler:7100"
    assert "scheduler" in headless


def test_device_agents_compute_with_every_processor_of_their_node(base: list[Document]) -> None:
    threads = {pod.target: _settings(pod).threads for pod in _services(base)}
    assert threads.pop("device-agent") == NODE_PROCESSORS
    assert set(threads.values()) == {1}


def test_index_of_a_cluster_is_the_same_everywhere(base: list[Document]) -> None:
    clusters = {}
    for pod in pods(base):
        if pod.target in ("control-unit", "device-agent"):
            index = pod.environment["COLLAPIPE_CLUSTER_INDEX"]
            assert pod.name == f"{pod.target}-{index}"
            assert pod.owner["spec"]["selector"]["matchLabels"]["collapipe.io/cluster"] == index
            if pod.target == "device-agent":
                assert pod.spec["nodeSelector"]["collapipe.io/cluster"] == index
            else:
                assert pod.spec["nodeSelector"][f"collapipe.io/control-unit-{index}"] == ""
            clusters.setdefault(index, []).append(pod.target)
    assert {index: sorted(targets) for index, targets in clusters.items()} == {
        index: ["control-unit", "device-agent"] for index in ("0", "1")
    }


def test_readme_labels_nodes_for_every_cluster_and_reserves_them(base: list[Document]) -> None:
    """Each pod with a node selector finds a node, and the taint of the README does not keep it away."""
    nodes = _labelled_nodes()
    taint = re.search(r"^ +kubectl taint node .*?(\S+)=:(\S+)$", _README, re.MULTILINE)
    assert taint
    selecting = [
        pod for pod in pods(base) if "collapipe.io" in str(pod.spec.get("nodeSelector", {}))
    ]
    assert {pod.target for pod in selecting} == {"control-unit", "device-agent"}
    for pod in selecting:
        selector = {**pod.spec["nodeSelector"]}
        assert selector.pop("kubernetes.io/os") == "linux"
        found = [name for name, labels in nodes.items() if selector.items() <= labels.items()]
        assert len(found) == (1 if pod.target == "control-unit" else 2), pod.name
        assert {"key": taint[1], "operator": "Exists", "effect": taint[2]} in pod.spec[
            "tolerations"
        ]


def test_bake_file_builds_every_image_for_both_processors(k3s: list[Document]) -> None:
    bake = (DEPLOY / "docker" / "bake.hcl").read_text(encoding="utf-8")
    lists = {
        name: re.findall(r'"([^"]+)"', values)
        for name, values in re.findall(r"(\w+) += .*?\[(.*)\]", bake)
    }
    assert set(lists["matrix"]) == {pod.target for pod in pods(k3s)} - {""}
    assert lists["platforms"] == ["linux/amd64", "linux/arm64"]
    assert lists["tags"] == [f"${{REGISTRY}}collapipe/${{image}}:{version('collapipe')}"]
    # The loop of the README reads the archives that the file writes.
    assert lists["output"] == ["type=oci,dest=build/images/${image}.tar"]
    assert "in build/images/*.tar; do ssh" in _README
    arguments = set(re.findall(r"^    (\w+) += \1$", bake, re.MULTILINE))
    assert arguments == set(re.findall(r'^variable "(\w+)"', bake, re.MULTILINE)) - {"REGISTRY"}
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    declared = re.findall(r"^ARG (.+)$", dockerfile, re.MULTILINE)
    assert arguments <= {word.split("=")[0] for line in declared for word in line.split()}


def test_images_are_targets_of_the_dockerfile_at_this_version(k3s: list[Document]) -> None:
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    targets = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE)
    for pod in pods(k3s):
        if pod.name == "prometheus":
            assert re.fullmatch(r"prom/prometheus:v\d+\.\d+\.\d+", pod.container["image"])
            continue
        assert pod.target in targets
        assert pod.container["image"].endswith(f":{version('collapipe')}")
        # Images with these names must never come from a registry.
        assert pod.container["imagePullPolicy"] == "Never"


def test_images_come_from_the_registry_of_an_overlay(
    k3s: list[Document], with_registry: list[Document]
) -> None:
    for pod, other in zip(pods(k3s), pods(with_registry), strict=True):
        assert pod.name == other.name
        registry = "HOST/" if pod.target else ""
        assert other.container["image"] == f"{registry}{pod.container['image']}"
        assert other.container["imagePullPolicy"] == "IfNotPresent"


def test_health_checks_call_the_service_itself(base: list[Document]) -> None:
    for pod in _services(base):
        for probe in ("startupProbe", "readinessProbe"):
            command = pod.container[probe]["exec"]["command"]
            assert command[:2] == ["python", "-m"]
            assert importlib.util.find_spec(command[2]) is not None
            # Longer than the deadline of the health check and an import on a slow device.
            assert pod.container[probe]["timeoutSeconds"] >= 20
        assert pod.container["livenessProbe"]["tcpSocket"]["port"] == "grpc"
        # Draining takes 5 s, and closing the sensors 2 s.
        assert pod.spec["terminationGracePeriodSeconds"] >= 20


def test_every_pod_is_confined(k3s: list[Document]) -> None:
    for pod in pods(k3s):
        security, container = pod.spec["securityContext"], pod.container["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["readOnlyRootFilesystem"] and not container["allowPrivilegeEscalation"]
        assert container["capabilities"] == {"drop": ["ALL"]}
        assert not pod.spec.get("enableServiceLinks", True)
        assert pod.container["resources"]["limits"]["memory"]
        assert pod.name == "prometheus" or not pod.spec["automountServiceAccountToken"]
        assert pod.spec.get("hostNetwork", False) == (pod.target == "device-agent")


def test_state_is_on_a_volume_claim(base: list[Document]) -> None:
    for pod in _services(base):
        claims = [c["metadata"]["name"] for c in pod.owner["spec"].get("volumeClaimTemplates", [])]
        mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
        if "COLLAPIPE_STATE_DIR" in pod.environment:
            assert mounts[pod.environment["COLLAPIPE_STATE_DIR"]] in claims
        assert (pod.target == "control-unit") == (mounts.get("/data") in claims)


def test_each_pod_finds_its_own_certificate(
    base: list[Document], certificates: list[Document]
) -> None:
    secrets = {d["metadata"]["name"]: d["data"] for d in certificates if d["kind"] == "Secret"}
    assert not any("ca-key" in key for data in secrets.values() for key in data)
    nodes = {
        name: labels["collapipe.io/cluster"]
        for name, labels in _labelled_nodes().items()
        if "collapipe.io/cluster" in labels
    }
    found = []
    for pod in pods(base):
        index = pod.environment.get("COLLAPIPE_CLUSTER_INDEX", "0")
        of_cluster = [Pod(pod.owner, name) for name, cluster in nodes.items() if cluster == index]
        for one in of_cluster if pod.target == "device-agent" else [pod]:
            (volume,) = [v for v in one.spec["volumes"] if v["name"] == "tls"]
            secret = secrets[volume["secret"]["secretName"]]
            keys = one.mounted_keys("tls")
            files = {
                name: keys.get(f"/etc/collapipe/tls/{name}", name)
                for name in ("ca.pem", "cert.pem", "key.pem")
            }
            assert set(files.values()) <= set(secret), one.name
            certificate = pki.read_certificate(base64.b64decode(secret[files["cert.pem"]]))
            identity = pki.identity_of(certificate)
            assert identity is not None
            key = pki.read_key(base64.b64decode(secret[files["key.pem"]]))
            assert pki.is_of_key(certificate, key.public_key())
            assert identity.role.value == one.target
            assert identity.cluster == int(index)
            if one.target != "client":
                assert identity.name == one.environment["COLLAPIPE_HOST_ID"]
            found.append(identity)
    assert len(found) == len(set(found)) == 5 + len(nodes)


def test_scheduler_finds_the_list_of_revoked_keys(
    base: list[Document], issuer: Path, certificates: list[Document]
) -> None:
    (scheduler,) = [pod for pod in pods(base) if pod.target == "scheduler"]
    settings = _settings(scheduler).model_dump()
    # The volume is whole, because Kubernetes never updates a file that is mounted alone.
    (folder,) = scheduler.mounted_keys("tls")
    assert scheduler.mounted_keys("tls") == {folder: ""}
    assert settings["tls_revoked"].parent == Path(folder)

    def keys(secrets: list[Document]) -> int:
        (data,) = [d["data"] for d in secrets if d["metadata"]["name"] == "scheduler-tls"]
        signed = parse_list(base64.b64decode(data[settings["tls_revoked"].name]))
        root = pki.read_certificate(base64.b64decode(data["ca.pem"]))
        return len(read_signed(signed, root).keys)

    assert keys(certificates) == 0
    AuthorityFolder(issuer.parent / "tls").revoke(Identity(Role.DEVICE_AGENT, "pi-4", 1))
    assert keys(_secrets(_issue(issuer, _labelled_nodes()))) == 1


def test_certificates_of_devices_can_be_left_out(issuer: Path) -> None:
    secrets = _secrets(_issue(issuer, _labelled_nodes(), "--without-devices"))
    assert "device-agent-tls" not in {d["metadata"]["name"] for d in secrets}
    assert "control-unit-tls" in {d["metadata"]["name"] for d in secrets}


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ({"hub": {}}, "kubectl label node NAME collapipe.io/cluster=0"),
        (
            {"pi-1": {"collapipe.io/cluster": "2"}},
            "cluster 2 has devices, but no node has the label collapipe.io/control-unit-2",
        ),
        (
            {
                "pi-1": {"collapipe.io/cluster": "0", "collapipe.io/control-unit-0": ""},
                "hub": {"collapipe.io/control-unit-0": ""},
            },
            "kubectl label node hub collapipe.io/control-unit-0-",
        ),
        (
            {"pi-1": {"collapipe.io/cluster": "a", "collapipe.io/control-unit-a": ""}},
            "names no cluster after the @",
        ),
    ],
)
def test_labels_that_make_no_deployment_are_refused(
    nodes: dict[str, dict[str, str]], said: str, tmp_path: Path
) -> None:
    refused = _issue(Path(shutil.copy(KUBERNETES / "certificates/issue.py", tmp_path)), nodes)
    assert refused.returncode != 0
    assert refused.stdout == ""
    assert said in " ".join(refused.stderr.split())


def test_certificates_can_be_files_of_the_nodes(on_nodes: list[Document]) -> None:
    agents = [pod for pod in pods(on_nodes) if pod.target == "device-agent"]
    assert len(agents) == 2
    for pod in agents:
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        assert volumes["tls"] == {
            "name": "tls",
            "hostPath": {"path": "/etc/collapipe/device-agent/tls", "type": "Directory"},
        }
        assert pod.mounted_keys("tls") == {"/etc/collapipe/tls": ""}
        assert "tmp" in volumes


def test_scheduler_reads_telemetry_from_this_prometheus(k3s: list[Document]) -> None:
    (scheduler,) = [pod for pod in pods(k3s) if pod.target == "scheduler"]
    settings = _settings(scheduler).model_dump()
    (service,) = [
        d for d in k3s if d["kind"] == "Service" and d["metadata"]["name"] == "prometheus"
    ]
    (port,) = [port["port"] for port in service["spec"]["ports"]]
    assert settings["telemetry"] == "prometheus"
    assert settings["prometheus_url"] == f"https://prometheus:{port}"
    configuration = _prometheus_configuration(k3s)
    interval = configuration["global"]["scrape_interval"]
    assert interval == f"{settings['telemetry_interval_seconds']:g}s"


def test_prometheus_has_its_own_certificate(
    k3s: list[Document], certificates: list[Document]
) -> None:
    (pod,) = [pod for pod in pods(k3s) if pod.name == "prometheus"]
    (volume,) = [v for v in pod.spec["volumes"] if v["name"] == "tls"]
    (secret,) = [
        d["data"] for d in certificates if d["metadata"]["name"] == volume["secret"]["secretName"]
    ]
    identity = pki.identity_of(pki.read_certificate(base64.b64decode(secret["cert.pem"])))
    assert identity == Identity(Role.PROMETHEUS, pod.name)
    (mount,) = [m for m in pod.container["volumeMounts"] if m["name"] == "tls"]
    files = {f"{mount['mountPath']}/{name}" for name in secret}
    (job,) = _prometheus_configuration(k3s)["scrape_configs"]
    assert set(job["tls_config"].values()) == files
    assert files <= set(_prometheus_file(k3s, "web.yml")["tls_server_config"].values())


def test_prometheus_accepts_its_configuration_and_rules(
    k3s: list[Document], certificates: list[Document], tmp_path: Path
) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on this machine: apt-get install prometheus")
    (rules,) = [d["data"] for d in k3s if d["metadata"]["name"].startswith("prometheus-rules-")]
    assert len(rules) == 2
    for name, text in rules.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    configuration = _prometheus_configuration(k3s)
    (job,) = configuration["scrape_configs"]
    # The promtool of Debian is built without Kubernetes.
    assert job.pop("kubernetes_sd_configs") == [
        {"role": "pod", "namespaces": {"own_namespace": True}}
    ]
    configuration["rule_files"] = [str(tmp_path / name) for name in rules]
    (secret,) = [d["data"] for d in certificates if d["metadata"]["name"] == "prometheus-tls"]
    for name, data in secret.items():
        (tmp_path / name).write_bytes(base64.b64decode(data))
    web = _prometheus_file(k3s, "web.yml")
    for kind, document in (("config", configuration), ("web-config", web)):
        text = yaml.safe_dump(document).replace("/etc/collapipe/tls", str(tmp_path))
        (tmp_path / f"{kind}.yml").write_text(text, encoding="utf-8")
        checked = subprocess.run(
            ["promtool", "check", kind, str(tmp_path / f"{kind}.yml")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.returncode == 0, checked.stderr


def test_hosts_have_the_labels_that_rules_use(k3s: list[Document]) -> None:
    (job,) = _prometheus_configuration(k3s)["scrape_configs"]
    for pod in _services(k3s):
        labels = _relabelled(job["relabel_configs"], _discovered(pod))
        assert labels["service"] == pod.environment["COLLAPIPE_HOST_ID"]
        assert labels["host_role"] == pod.target.replace("-", "_")
        port = pod.template["metadata"]["annotations"]["prometheus.io/port"]
        assert labels["__address__"] == f"{pod.environment['COLLAPIPE_HOST_ID']}:{port}"
        assert labels["__metrics_path__"] == "/metrics"


def _prometheus_configuration(documents: list[Document]) -> Document:
    return _prometheus_file(documents, "prometheus.yml")


def _prometheus_file(documents: list[Document], name: str) -> Document:
    (text,) = [
        d["data"][name]
        for d in documents
        if d["metadata"]["name"].startswith("prometheus-configuration-")
    ]
    configuration: Document = yaml.safe_load(text)
    return configuration


def _discovered(pod: Pod) -> dict[str, str]:
    """Returns the labels that Prometheus discovers for the metrics port of a pod."""

    def meta(kind: str, pairs: dict[str, str]) -> dict[str, str]:
        return {
            f"__meta_kubernetes_pod_{kind}_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": value
            for name, value in pairs.items()
        }

    metadata = pod.template["metadata"]
    return {
        "__address__": "10.42.0.7:9100",
        "__meta_kubernetes_pod_ip": "10.42.0.7",
        "__meta_kubernetes_pod_node_name": pod.node,
        "__meta_kubernetes_pod_container_port_name": "metrics",
        **meta("label", metadata["labels"]),
        **meta("annotation", metadata["annotations"]),
    }


def _relabelled(rules: list[Document], labels: dict[str, str]) -> dict[str, str]:
    """Applies relabel_configs as Prometheus does, for the two actions that are used here."""
    for rule in rules:
        text = rule.get("separator", ";").join(labels.get(n, "") for n in rule["source_labels"])
        found = re.fullmatch(rule.get("regex", "(.*)"), text)
        if rule.get("action", "replace") == "keep":
            assert found, rule
        elif found:
            replacement = re.sub(r"\$(\d)", r"\\\1", rule.get("replacement", "$1"))
            labels[rule["target_label"]] = found.expand(replacement)
    return labels
