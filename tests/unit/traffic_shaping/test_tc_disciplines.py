import pytest

from collapipe.emulation.network_profiles import NETWORK_PROFILES, LinkConditions
from collapipe.traffic_shaping.tc.disciplines import Netem, TokenBucket, discipline_for


@pytest.mark.parametrize("name", NETWORK_PROFILES)
def test_queue_has_room_for_delayed_packets_of_any_size_and_is_bounded(name: str) -> None:
    for conditions in (NETWORK_PROFILES[name].up, NETWORK_PROFILES[name].down):
        netem = discipline_for(conditions, has_netem=True)
        assert isinstance(netem, Netem) and conditions.rate_bps
        delay = conditions.delay_seconds + conditions.jitter_seconds
        assert netem.limit_packets >= 1000 * delay + 8
        seconds = 8 * 1514 * netem.limit_packets / conditions.rate_bps
        assert delay + conditions.queue_seconds <= seconds
        # the limit counts packets, so the bound for full frames is wider
        assert seconds <= max(0.4, 4 * (delay + conditions.queue_seconds))


def test_without_netem_only_the_rate_is_emulated() -> None:
    lossy = NETWORK_PROFILES["lte-lossy"].up
    bucket = discipline_for(lossy, has_netem=False)
    assert isinstance(bucket, TokenBucket) and bucket.rate_bps == lossy.rate_bps
    assert discipline_for(LinkConditions(delay_seconds=0.1), has_netem=False) is None


def test_ideal_link_needs_no_discipline() -> None:
    assert discipline_for(LinkConditions(), has_netem=True) is None


def test_delay_without_a_rate_keeps_packets_in_order() -> None:
    netem = discipline_for(LinkConditions(delay_seconds=0.1, jitter_seconds=0.05), has_netem=True)
    assert isinstance(netem, Netem) and netem.rate_bps == 1e11
