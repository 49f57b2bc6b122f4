"""The part of a control unit in the masks of a round: its keys, its shares, and what it reveals."""

import threading
from collections.abc import Sequence

from collapipe.attempts import order
from collapipe.errors import InvalidInputError, WrongStateError
from collapipe.job import JobConfig
from collapipe.rpc import Security, check_masking_keys, sign_masking_keys
from collapipe.secure_aggregation.cluster_masks import ClusterMasks
from collapipe.secure_aggregation.keys import AttemptName
from collapipe.v1 import control_unit_pb2, plan_pb2, secure_aggregation_pb2


class RoundMasking:
    """Keeps the masks of the newest attempt. Several threads may use it."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._lock = threading.Lock()
        self._attempt = plan_pb2.Attempt()
        self._host_clusters: Sequence[int] = ()
        self._config_json = ""
        self._total_samples = 0
        self._masks: ClusterMasks | None = None

    def begin(
        self, request: control_unit_pb2.MakeMaskingKeysRequest
    ) -> secure_aggregation_pb2.SignedMaskingKeys:
        """Makes keys, and forgets those of earlier attempts.

        Raises:
            WrongStateError: The attempt is not newer than the last one.
        """
        job, attempt = JobConfig.from_json(request.job.config_json), request.attempt
        with self._lock:
            before = self._attempt
            if attempt.job_id == before.job_id and order(attempt) <= order(before):
                raise WrongStateError(
                    f"round {attempt.round_index}, attempt {attempt.attempt} of job {attempt.job_id} gets no masking keys, because "
                    f"those of round {before.round_index}, attempt {before.attempt} were made already: run the round again"
                )
            masks = ClusterMasks(
                _name(attempt), request.cluster_index, job.clusters, job.reveal_threshold
            )
            self._attempt, self._masks = attempt, masks
            self._host_clusters, self._config_json = job.host_clusters, request.job.config_json
        return sign_masking_keys(self._security, attempt, request.cluster_index, masks.public_keys)

    def share(
        self, request: control_unit_pb2.ShareMasksRequest
    ) -> list[secure_aggregation_pb2.EncryptedShares]:
        """Shares the secrets among the clusters whose keys the request has. Raises the errors of `check_masking_keys` and of
        `ClusterMasks.share`."""
        with self._lock:
            masks = self._of(request.attempt)
            public = check_masking_keys(
                self._security, request.attempt, request.keys, self._host_clusters
            )
            self._total_samples = request.total_samples
            # A scheduler that gives other orders to some clusters could read what one of them sends.
            terms = f"{request.total_samples}/{self._config_json}".encode()
            shares = masks.share(public, terms)
        return [
            secure_aggregation_pb2.EncryptedShares(
                sender=masks.cluster_index, receiver=receiver, ciphertext=ciphertext
            )
            for receiver, ciphertext in shares.items()
        ]

    def of_round(
        self, request: control_unit_pb2.RunRoundRequest, job: JobConfig
    ) -> ClusterMasks | None:
        """Returns the masks of a round, with the shares of the other clusters; `None` if the round is not masked.

        Raises:
            InvalidInputError: The round would push weights without masks, although the job averages securely.
            CollapipeError: As `ClusterMasks.receive`.
        """
        if not request.HasField("masked"):
            if job.averaging.secure and request.local_steps:
                raise InvalidInputError(
                    f"{_name(request.attempt)} came without shares of masks, but the job has averaging.secure: run the same version "
                    "everywhere"
                )
            return None
        with self._lock:
            masks = self._of(request.attempt)
            agreed = self._config_json, self._total_samples
            if (request.job.config_json, request.masked.total_samples) != agreed:
                raise WrongStateError(
                    f"{_name(request.attempt)} came with another job file or another number of rows than its masks: run the same "
                    "version everywhere"
                )
            masks.receive({each.sender: each.ciphertext for each in request.masked.shares})
        return masks

    def reveal(
        self, request: control_unit_pb2.RevealMasksRequest
    ) -> secure_aggregation_pb2.RevealedShares:
        """Reveals shares. Raises the errors of `ClusterMasks.reveal`."""
        with self._lock:
            masks = self._of(request.attempt)
            shares = masks.reveal(request.present_clusters)
        revealed = secure_aggregation_pb2.RevealedShares(holder=masks.cluster_index)
        for cluster, share in shares.items():
            revealed.shares.add(cluster_index=cluster, share=share)
        return revealed

    def _of(self, attempt: plan_pb2.Attempt) -> ClusterMasks:
        if self._masks is None or self._masks.name != _name(attempt):
            raise WrongStateError(
                f"{_name(attempt)} has no masking keys here, because this control unit was restarted or a newer attempt has begun: run "
                "the round again"
            )
        return self._masks


def _name(attempt: plan_pb2.Attempt) -> AttemptName:
    return AttemptName(attempt.job_id, attempt.round_index, attempt.attempt)
