"""The calls that mask the uploads of a round: the scheduler passes keys and shares between control units, and to the edge server."""

from collections.abc import Sequence
from typing import Any

from collapipe.rpc import ChannelPool
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.planner import Planner
from collapipe.v1 import (
    control_unit_pb2,
    control_unit_pb2_grpc,
    plan_pb2,
    secure_aggregation_pb2,
)


class MaskingCalls:
    """The masks of one attempt at a round. The calls to all control units run at the same time.

    Args:
        attempt: Its plan is not set.
        clusters: Indices of the clusters that take part, ascending.
        total_samples: At least the rows of these clusters together.

    Raises:
        CollapipeError: A control unit failed.
    """

    def __init__(
        self,
        progress: JobProgress,
        planner: Planner,
        channels: ChannelPool,
        calls: HostCalls,
        attempt: plan_pb2.Attempt,
        clusters: Sequence[int],
        total_samples: int,
    ) -> None:
        self._planner = planner
        self._channels = channels
        self._calls = calls
        self._attempt = attempt
        self._total_samples = total_samples

        def make_keys(cluster: int) -> secure_aggregation_pb2.SignedMaskingKeys:
            request = control_unit_pb2.MakeMaskingKeysRequest(
                attempt=attempt, job=progress.spec, cluster_index=cluster
            )
            answer = self._ask(cluster, "MakeMaskingKeys", request, "make masking keys")
            keys: secure_aggregation_pb2.SignedMaskingKeys = answer.keys
            return keys

        def share(cluster: int) -> Sequence[secure_aggregation_pb2.EncryptedShares]:
            request = control_unit_pb2.ShareMasksRequest(attempt=attempt, keys=self._keys)
            answer = self._ask(cluster, "ShareMasks", request, "share the secrets of its masks")
            shares: Sequence[secure_aggregation_pb2.EncryptedShares] = answer.shares
            return shares

        self._keys = calls.in_parallel(make_keys, clusters)
        self._shares = [one for sent in calls.in_parallel(share, clusters) for one in sent]

    def masked_round(self, cluster: int) -> secure_aggregation_pb2.MaskedRound:
        """Returns what a cluster needs to mask its upload."""
        return secure_aggregation_pb2.MaskedRound(
            shares=[one for one in self._shares if one.receiver == cluster],
            total_samples=self._total_samples,
        )

    def reveal(self, present: Sequence[int]) -> secure_aggregation_pb2.Unmasking:
        """Asks the clusters whose uploads count for what removes the masks.

        Args:
            present: Their indices, ascending.

        Raises:
            CollapipeError: A control unit failed.
        """

        def reveal(cluster: int) -> secure_aggregation_pb2.RevealedShares:
            request = control_unit_pb2.RevealMasksRequest(
                attempt=self._attempt, present_clusters=present
            )
            answer = self._ask(cluster, "RevealMasks", request, "reveal shares of the masks")
            revealed: secure_aggregation_pb2.RevealedShares = answer.revealed
            return revealed

        return secure_aggregation_pb2.Unmasking(
            keys=self._keys,
            revealed=self._calls.in_parallel(reveal, present),
            total_samples=self._total_samples,
        )

    def _ask(self, cluster: int, method: str, request: Any, task: str) -> Any:
        control_unit = self._planner.hosts.clusters[cluster].control_unit
        channel = self._channels.channel(control_unit.address)
        stub = control_unit_pb2_grpc.ControlUnitServiceStub(channel)
        call = getattr(stub, method)(request, wait_for_ready=True)
        return self._calls.last_answer(call, control_unit.host_id, task)
