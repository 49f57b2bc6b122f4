"""DeviceAgentService: what only a device is asked."""

import grpc
import torch

from collapipe.errors import InvalidInputError
from collapipe.models import adapter_for
from collapipe.pipeline.profile import profile_block
from collapipe.v1 import device_agent_pb2, device_agent_pb2_grpc


class DeviceAgentServicer(device_agent_pb2_grpc.DeviceAgentServiceServicer):
    """Serves profiles.

    Args:
        device: Where blocks compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def ProfileBlock(
        self, request: device_agent_pb2.ProfileBlockRequest, context: grpc.ServicerContext
    ) -> device_agent_pb2.ProfileBlockResponse:
        """Times one block of a model."""
        if not request.micro_batch_size or not request.sequence_length:
            raise InvalidInputError(
                f"a profile needs a micro-batch and a length of at least 1, not "
                f"{request.micro_batch_size} and {request.sequence_length}"
            )
        model = request.model
        adapter = adapter_for(model.family, model.task, model.config_json)
        profile = profile_block(
            adapter, self._device, request.micro_batch_size, request.sequence_length
        )
        return device_agent_pb2.ProfileBlockResponse(
            seconds_per_sample=profile.seconds_per_sample,
            state_bytes=profile.state_bytes,
            stash_bytes=profile.stash_bytes,
        )
