"""Measures links that the project's own shaper emulates with each network profile, in a kernel with netem.

pytest -s tests/campaign/test_netem_profiles.py      # prints the measurements
"""

import math
import time
from pathlib import Path

import pytest
from containers.test_shaper import FRAME_BYTES, command
from containers.test_shaper import hosts as hosts
from containers.uml.two_hosts import TwoHosts

from collapipe.emulation.network_profiles import NETWORK_PROFILES

pytestmark = pytest.mark.timeout(600)

RATE_TOLERANCE = 0.10
ROUND_TRIP_TOLERANCE, ROUND_TRIP_SECONDS = 0.10, 0.005
LOSS_PACKETS = 6000
SMALL_FRAME_BYTES = 128
MOST_SMALL_BPS = 1.5e6
"""Largest rate of small packets. At this rate, a pause of the machine does not overflow the queue."""
TCP_SHARE = 1448 / FRAME_BYTES
MOST_TCP_DELAY_SECONDS = 0.005
"""Largest delay with which TCP surely fills a link within a few seconds.

With a larger delay or with losses, UDP packets measure the rate instead.
"""
_TRACE = """at_seconds,rate_bps,delay_seconds
0,8e6,0.01
4,2e6,0.05
"""


@pytest.mark.parametrize("name", NETWORK_PROFILES)
def test_link_has_rate_loss_and_delay_of_its_profile_in_both_directions(
    hosts: TwoHosts, name: str
) -> None:
    applied = command(hosts, "shape", "near", name)["applied"]
    assert applied["near"]["far"]["addresses"] == ["10.90.0.2"]
    profile = NETWORK_PROFILES[name]
    for sender, wanted in (("near", profile.up), ("far", profile.down)):
        assert wanted.rate_bps
        gentle_bps = min(0.25 * wanted.rate_bps, MOST_SMALL_BPS)
        seen = hosts.send(sender, gentle_bps, LOSS_PACKETS, SMALL_FRAME_BYTES)
        if wanted.loss_ratio or wanted.delay_seconds > MOST_TCP_DELAY_SECONDS:
            frames = max(1000, math.ceil(2.5 * wanted.rate_bps / 8 / FRAME_BYTES))
            rate_bps = hosts.send(sender, 1.2 * wanted.rate_bps, frames, FRAME_BYTES).rate_bps
        else:
            rate_bps = hosts.tcp_bps(sender, 3.0, 1.0 + 10 * wanted.delay_seconds) / TCP_SHARE
        print(
            f"\n{name:15} {sender:4}>: rate {rate_bps / 1e6:6.2f} of {wanted.rate_bps / 1e6:5.1f} Mbit/s, "
            f"loss {seen.loss_ratio:.4f} of {wanted.loss_ratio:.4f}",
            end="",
        )
        assert rate_bps == pytest.approx(wanted.rate_bps, rel=RATE_TOLERANCE)
        three_errors = 3 * math.sqrt(wanted.loss_ratio * (1 - wanted.loss_ratio) / LOSS_PACKETS)
        assert seen.loss_ratio == pytest.approx(wanted.loss_ratio, abs=three_errors)
        assert seen.out_of_order == 0
    there_and_back = profile.up.delay_seconds + profile.down.delay_seconds
    measured = hosts.round_trip_seconds()
    print(f"; round trip {1e3 * measured:.1f} of {1e3 * there_and_back:.1f} ms")
    allowed = max(ROUND_TRIP_SECONDS, ROUND_TRIP_TOLERANCE * there_and_back)
    assert measured == pytest.approx(there_and_back, abs=allowed)


def test_link_to_one_host_changes_while_packets_flow(hosts: TwoHosts) -> None:
    command(hosts, "shape", "near>far", "none", "--rate", "4mbit", "--delay", "5ms")
    assert hosts.send("near", 6e6, 1000, FRAME_BYTES).rate_bps == pytest.approx(4e6, rel=0.1)
    before = hosts.qdisc("near")
    command(hosts, "shape", "near>far", "none", "--rate", "8mbit", "--delay", "40ms")
    assert hosts.qdisc("near") != before
    assert hosts.send("near", 12e6, 2000, FRAME_BYTES).rate_bps == pytest.approx(8e6, rel=0.1)
    command(hosts, "shape", "far>near", "none")
    assert hosts.round_trip_seconds() == pytest.approx(0.040, abs=0.005)


def test_trace_changes_the_link_at_the_start_of_each_step(hosts: TwoHosts, tmp_path: Path) -> None:
    trace = tmp_path / "steps.csv"
    trace.write_text(_TRACE)
    command(hosts, "shape", "far>near", "none")
    began_at = time.time()
    command(hosts, "shape", "near>far", "--trace", str(trace))
    first = hosts.round_trip_seconds(20)
    assert time.time() < began_at + 4, "this machine is too slow to measure the first step"
    time.sleep(max(0.0, began_at + 5.5 - time.time()))
    second = hosts.round_trip_seconds(20)
    rate = hosts.send("near", 3e6, 500, FRAME_BYTES).rate_bps
    print(f"\ntrace: {1e3 * first:.1f} ms, then {1e3 * second:.1f} ms and {rate / 1e6:.2f} Mbit/s")
    assert first == pytest.approx(0.010, abs=0.005)
    assert second == pytest.approx(0.050, abs=0.005)
    assert rate == pytest.approx(2e6, rel=0.1)
