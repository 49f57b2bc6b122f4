"""From hosts and a model to the plans of a round: profiles devices, asks the strategy, writes the plan."""

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from collapipe.allocation import (
    BlockCost,
    Device,
    Placement,
    PlacementProblem,
    strategy_for,
)
from collapipe.job import JobConfig
from collapipe.rpc import ChannelPool, call
from collapipe.v1 import (
    device_agent_pb2,
    device_agent_pb2_grpc,
    plan_pb2,
    scheduler_pb2,
    tensor_pb2,
)

_PROFILE_LENGTH = 64
"""Tokens of the samples that a profile runs, unless the job's are shorter."""

_PROFILE_SECONDS = 120.0
"""Deadline of a profile: importing a model family on a slow device takes most of it."""


class Planner:
    """Decides where a model's blocks run in one cluster.

    Args:
        job: The job.
        model: Its model.
        num_blocks: Blocks of the model.
        cluster_index: The cluster.
        control_unit: Of the cluster.
        devices: Of the cluster, in registration order.
        edge_server: Runs the head.
        channels: To the devices.
    """

    def __init__(
        self,
        job: JobConfig,
        model: plan_pb2.ModelSpec,
        num_blocks: int,
        cluster_index: int,
        control_unit: scheduler_pb2.Host,
        devices: Sequence[scheduler_pb2.Host],
        edge_server: scheduler_pb2.Host,
        channels: ChannelPool,
    ) -> None:
        self._job = job
        self._model = model
        self._num_blocks = num_blocks
        self._cluster_index = cluster_index
        self._control_unit = control_unit
        self._edge_server = edge_server
        self._hosts = {host.host_id: host for host in devices}
        self._profile(channels)

    def plan(self, round_index: int, num_micro_batches: int | None) -> plan_pb2.Plan:
        """Decides one round.

        Args:
            round_index: The round.
            num_micro_batches: Of an earlier attempt at it, which a retry keeps.

        Raises:
            InfeasibleError: No placement satisfies the limits.
        """
        schedule = self._job.schedule
        problem = PlacementProblem(
            devices=self._devices,
            num_blocks=self._num_blocks,
            block_cost=self._block_cost,
            num_micro_batches=num_micro_batches or schedule.num_micro_batches,
            in_flight=schedule.in_flight,
            round_index=round_index,
        )
        placement = strategy_for(schedule.strategy, schedule.segments)(problem)
        return self._to_wire(placement)

    def _profile(self, channels: ChannelPool) -> None:
        """Asks the devices what a block costs, unless nothing depends on it."""
        hosts = list(self._hosts.values())
        needs_cost = any(host.memory_bytes for host in hosts)
        needs_speed = self._job.schedule.strategy == "proportional" and not all(
            host.speed for host in hosts
        )
        self._block_cost = BlockCost(state_bytes=0, stash_bytes=0)
        speeds: Mapping[str, float] = {host.host_id: host.speed or 1.0 for host in hosts}
        if needs_cost or needs_speed:
            with ThreadPoolExecutor(len(hosts), "profile") as executor:
                profiles = list(
                    executor.map(lambda host: self._profile_device(host, channels), hosts)
                )
            self._block_cost = BlockCost(
                state_bytes=max(profile.state_bytes for profile in profiles),
                stash_bytes=max(profile.stash_bytes for profile in profiles),
            )
            speeds = {
                host.host_id: host.speed or 1.0 / profile.seconds_per_sample
                for host, profile in zip(hosts, profiles, strict=True)
            }
        self._devices = [
            Device(host.host_id, speeds[host.host_id], host.memory_bytes or None) for host in hosts
        ]

    def _profile_device(
        self, host: scheduler_pb2.Host, channels: ChannelPool
    ) -> device_agent_pb2.ProfileBlockResponse:
        schedule, training = self._job.schedule, self._job.training
        stub = device_agent_pb2_grpc.DeviceAgentServiceStub(channels.channel(host.address))
        return call(
            stub.ProfileBlock,
            device_agent_pb2.ProfileBlockRequest(
                model=self._model,
                micro_batch_size=training.mini_batch // schedule.num_micro_batches,
                sequence_length=min(self._job.task.max_length, _PROFILE_LENGTH),
            ),
            host.host_id,
            _PROFILE_SECONDS,
        )

    def _to_wire(self, placement: Placement) -> plan_pb2.Plan:
        """The pipeline: the control unit's embedding, the segments, the edge server's head."""
        num_stages = len(placement.segments) + 2
        window = self._job.schedule.in_flight or num_stages
        plan = plan_pb2.Plan(
            cluster_index=self._cluster_index, num_micro_batches=placement.num_micro_batches
        )
        embedding_window = min(window, placement.num_micro_batches)
        plan.stages.append(_stage(self._control_unit, 0, 1, embedding_window))
        for placed in placement.segments:
            segment = placed.segment
            plan.stages.append(
                _stage(
                    self._hosts[placed.host_id],
                    segment.start_block + 1,
                    segment.stop_block + 1,
                    placed.in_flight,
                )
            )
        head = self._num_blocks + 1
        plan.stages.append(_stage(self._edge_server, head, head + 1, 1))
        for _ in plan.stages[1:]:
            plan.links.append(plan_pb2.LinkPlan(codec=tensor_pb2.CODEC_RAW))
        content = plan.SerializeToString(deterministic=True)
        plan.plan_id = hashlib.sha256(content).hexdigest()[:16]
        return plan


def _stage(
    host: scheduler_pb2.Host, start_unit: int, stop_unit: int, in_flight: int
) -> plan_pb2.Stage:
    return plan_pb2.Stage(
        host_id=host.host_id,
        address=host.address,
        start_unit=start_unit,
        stop_unit=stop_unit,
        in_flight=in_flight,
    )
