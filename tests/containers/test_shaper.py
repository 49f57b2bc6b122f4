"""Tests the project's own shaper in a kernel with netem. tests/campaign/test_netem_profiles.py measures its links."""

import json
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from collapipe_client.cli import app
from containers.uml.guest import need_uml
from containers.uml.two_hosts import TwoHosts, two_hosts

pytestmark = pytest.mark.timeout(600)

FRAME_BYTES = 1514


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    need_uml()
    shared = tmp_path_factory.mktemp("netem")
    (shared / "initial.json").write_text(json.dumps({"hosts": ["near", "far"]}))
    with two_hosts(shared) as hosts:
        for host in ("near", "far"):
            hosts.start_shaper(host)
        for host in ("near", "far"):
            deadline = time.monotonic() + 20
            while not (shared / "applied" / f"{host}.json").exists():
                assert time.monotonic() < deadline, hosts.guest.log(f"shaper-{host}")
                time.sleep(0.1)
        yield hosts


def command(hosts: TwoHosts, verb: str, *arguments: str, code: int = 0) -> dict[str, object]:
    line = ["testbed", verb, *arguments, "--state", str(hosts.state), "--json"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == code, result.output
    return json.loads(result.output)


def test_shaped_link_is_slower_than_without_a_profile(hosts: TwoHosts) -> None:
    """A busy machine can only lower the rate and lengthen the round trip. The last check has a large margin."""
    command(hosts, "shape", "near", "none", "--rate", "4mbit", "--delay", "40ms")
    assert hosts.send("near", 40e6, 1000, FRAME_BYTES).rate_bps < 8e6
    assert hosts.round_trip_seconds() > 0.075
    command(hosts, "unshape", "--all")
    assert hosts.round_trip_seconds() < 0.075


def test_shaper_runs_tc_only_for_changes_and_removes_everything_at_its_end(hosts: TwoHosts) -> None:
    command(hosts, "unshape", "--all")
    assert hosts.qdisc("near") == hosts.clean["near"]
    command(hosts, "shape", "near", "4g")
    for host in ("near", "far"):
        hosts.guest.stop(f"shaper-{host}", "KILL")
    shaped = hosts.qdisc("near")
    assert "netem" in shaped
    again = hosts.run("near", f"{hosts.shaper_command('near')} --once")
    assert ": tc " not in again
    assert hosts.qdisc("near") == shaped
    unconfirmed = command(hosts, "shape", "near", "wifi", "--wait", "0.1", code=1)
    assert unconfirmed["not_confirmed"] == ["far", "near"]
    changed = hosts.run("near", f"{hosts.shaper_command('near')} --once")
    assert changed.count(": tc qdisc change") == changed.count(": tc ") == 1
    hosts.start_shaper("near")
    hosts.guest.wait_for("shaper-near", "collapipe.traffic_shaping.shaper_process.host_addresses")
    hosts.guest.stop("shaper-near")
    hosts.run("far", f"{hosts.shaper_command('far')} --remove")
    for host in ("near", "far"):
        assert hosts.qdisc(host) == hosts.clean[host]
        offloads = hosts.run(host, "ethtool -k eth0")
        assert "tcp-segmentation-offload: on" in offloads
        assert "generic-segmentation-offload: on" in offloads
