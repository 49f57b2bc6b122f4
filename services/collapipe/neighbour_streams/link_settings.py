"""The settings that a plan gives to one direction of a link."""

import math
from dataclasses import dataclass

from collapipe.codec_numbers import CODEC_NAMES
from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.outgoing_links import NO_SHARE, LinkShare
from collapipe.v1 import plan_pb2, tensor_pb2


@dataclass(frozen=True)
class LinkSettings:
    """The settings of one direction of a link. By default it is lossless and has no limit."""

    codec: tensor_pb2.Codec = tensor_pb2.CODEC_FP32
    share: LinkShare = NO_SHARE


def link_settings(plan: plan_pb2.Plan, sender_index: int, receiver_index: int) -> LinkSettings:
    """Returns the settings of the link from one stage to a neighbouring stage.

    Raises:
        InvalidInputError: The codec is unknown, or the bandwidth or the power is negative or not finite.
    """
    index = min(sender_index, receiver_index)
    if index >= len(plan.links):
        return LinkSettings()
    link = plan.links[index]
    codec = link.codec or tensor_pb2.CODEC_FP32
    if codec not in CODEC_NAMES:
        raise InvalidInputError(
            f"link {index} of the plan has the codec {codec}, which this version does not know: run the same "
            "version everywhere"
        )
    goes_forward = sender_index < receiver_index
    power = link.transmit_power_watts if goes_forward else link.return_transmit_power_watts
    _check(f"link {index}", link.bandwidth_hz, power)
    return LinkSettings(codec, LinkShare(link.rate_limit_bps, link.bandwidth_hz, power))


def upload_share(plan: plan_pb2.Plan, stage_index: int) -> LinkShare:
    """Returns what the plan gives to a stage while it uploads its weights.

    Raises:
        InvalidInputError: The bandwidth or the power is negative or not finite.
    """
    stage = plan.stages[stage_index]
    bandwidth, power = stage.upload_bandwidth_hz, stage.upload_transmit_power_watts
    _check(f"the upload of stage {stage_index}", bandwidth, power)
    return LinkShare(0, bandwidth, power)


def _check(what: str, bandwidth_hz: float, watts: float) -> None:
    for name, value in (("bandwidth", bandwidth_hz), ("transmit power", watts)):
        if not (math.isfinite(value) and value >= 0):
            raise InvalidInputError(
                f"{what} of the plan has a {name} of {value}: it needs a finite value of at least 0"
            )
