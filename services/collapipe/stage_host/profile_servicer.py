"""ProfileService: measures what a block costs on this host."""

import grpc

from collapipe.models import adapter_for
from collapipe.stage_host.host_resources import HostResources
from collapipe.stage_runtime.block_profile import profile_block
from collapipe.v1 import profile_pb2, profile_pb2_grpc


class ProfileServicer(profile_pb2_grpc.ProfileServiceServicer):
    """Times blocks on this host."""

    def __init__(self, resources: HostResources) -> None:
        self._resources = resources

    def ProfileBlock(
        self, request: profile_pb2.ProfileBlockRequest, context: grpc.ServicerContext
    ) -> profile_pb2.ProfileBlockResponse:
        """Times the blocks of one layer of a model."""
        model = request.model
        profile = profile_block(
            adapter_for(model.family, model.task, model.config_json),
            self._resources.device,
            list(request.micro_batch_sizes),
            request.sequence_length,
            self._resources.processor,
        )
        return profile_pb2.ProfileBlockResponse(
            seconds_per_sample=profile.seconds_per_sample,
            seconds_per_micro_batch=profile.seconds_per_micro_batch,
            state_bytes=profile.state_bytes,
            stash_bytes_per_sample=profile.stash_bytes_per_sample,
            num_parameters=profile.num_parameters,
            work_shares=profile.work_shares,
            stash_shares=profile.stash_shares,
        )
