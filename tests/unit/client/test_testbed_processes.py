"""Tests of the command lines of a local testbed."""

from pathlib import Path

from collapipe_client.testbed_processes import command, expand_clusters, services
from collapipe_client.workspace import Workspace


def test_service_without_a_certificate_is_told_its_cluster(tmp_path: Path) -> None:
    clusters = {}
    for service in services(expand_clusters([1, 1])):
        line = command(service, Workspace(tmp_path), ["--insecure"])
        if "--cluster-index" in line:
            clusters[service.name] = line[line.index("--cluster-index") + 1]
    expected = {"control-unit-0": "0", "device-0-0": "0", "control-unit-1": "1", "device-1-0": "1"}
    assert clusters == expected
