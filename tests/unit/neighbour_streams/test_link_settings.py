"""What a plan decides for each direction of a link."""

import pytest

from collapipe.errors import InvalidInputError
from collapipe.neighbour_streams.link_settings import LinkSettings, link_settings, upload_share
from collapipe.traffic_shaping.outgoing_links import LinkShare
from collapipe.v1.plan_pb2 import LinkPlan, Plan, Stage
from collapipe.v1.tensor_pb2 import CODEC_INT8


def plan_of(**link: object) -> Plan:
    return Plan(links=[LinkPlan(), LinkPlan(**link)])  # type: ignore[arg-type]


def test_directions_differ_only_in_the_power_of_their_sender() -> None:
    plan = plan_of(
        codec=CODEC_INT8,
        rate_limit_bps=5,
        bandwidth_hz=3.0,
        transmit_power_watts=0.1,
        return_transmit_power_watts=0.2,
    )
    assert link_settings(plan, 1, 2) == LinkSettings(CODEC_INT8, LinkShare(5, 3.0, 0.1))
    assert link_settings(plan, 2, 1) == LinkSettings(CODEC_INT8, LinkShare(5, 3.0, 0.2))


def test_link_without_settings_in_the_plan_is_lossless_and_unlimited() -> None:
    assert link_settings(Plan(), 0, 1) == link_settings(plan_of(), 1, 0) == LinkSettings()


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ({"codec": 9}, "link 1 of the plan has the codec 9, which"),
        ({"bandwidth_hz": -1.0}, "link 1 of the plan has a bandwidth of -1.0"),
        ({"transmit_power_watts": float("nan")}, "a transmit power of nan"),
        ({"return_transmit_power_watts": float("inf")}, "a transmit power of inf"),
    ],
)
def test_impossible_settings_are_refused(link: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        for ends in ((1, 2), (2, 1)):
            link_settings(plan_of(**link), *ends)


def test_upload_of_a_stage_has_its_share_and_power() -> None:
    sending = Stage(upload_bandwidth_hz=2e6, upload_transmit_power_watts=0.1)
    plan = Plan(stages=[sending, Stage()])
    assert upload_share(plan, 0) == LinkShare(0, 2e6, 0.1)
    assert upload_share(plan, 1) == LinkShare()
    with pytest.raises(InvalidInputError, match=r"upload of stage 0 .* has a bandwidth of -1.0"):
        upload_share(Plan(stages=[Stage(upload_bandwidth_hz=-1.0)]), 0)
