"""The calls that mask the uploads of a round: the scheduler passes keys and shares between control units, and to the edge server."""

from collections.abc import Sequence
from typing import Any

from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    InfeasibleError,
    InvalidInputError,
    NotFoundError,
    NotPermittedError,
    PeerFaultyError,
    PeerLostError,
    WrongStateError,
)
from collapipe.rpc import check_masking_keys
from collapipe.scheduler.attempt_tools import AttemptTools
from collapipe.scheduler.host_calls import told_by
from collapipe.secure_aggregation.keys import ENCRYPTED_BYTES, SECRET_BYTES, is_public_key
from collapipe.v1 import control_unit_pb2, plan_pb2, secure_aggregation_pb2

_LIMIT_SECONDS = 120.0
"""A control unit that only sends signs of life for longer is given up."""
_MOST_KEY_BYTES = 16384
"""Two keys, a signature and a certificate have about 1,000 bytes."""


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
        tools: AttemptTools,
        attempt: plan_pb2.Attempt,
        clusters: Sequence[int],
        total_samples: int,
    ) -> None:
        self._tools = tools
        self._attempt = attempt
        self._clusters = clusters
        self._total_samples = total_samples

        def make_keys(cluster: int) -> secure_aggregation_pb2.SignedMaskingKeys:
            request = control_unit_pb2.MakeMaskingKeysRequest(
                attempt=attempt, job=tools.progress.spec, cluster_index=cluster
            )
            task = "make masking keys"
            answer = self._ask(cluster, "MakeMaskingKeys", request, task)
            keys: secure_aggregation_pb2.SignedMaskingKeys = answer.keys
            try:
                clusters, security = tools.job.host_clusters, tools.calls.channels.security
                found = check_masking_keys(security, attempt, [keys], clusters)
                is_right = found.keys() == {cluster} and all(
                    is_public_key(key) for key in (found[cluster].mask, found[cluster].share)
                )
            except NotPermittedError:
                is_right = False
            if not is_right or keys.ByteSize() > _MOST_KEY_BYTES:
                raise self._wrong(cluster, task)
            return keys

        def share(cluster: int) -> Sequence[secure_aggregation_pb2.EncryptedShares]:
            request = control_unit_pb2.ShareMasksRequest(
                attempt=attempt, keys=self._keys, total_samples=total_samples
            )
            task = "share the secrets of its masks"
            answer = self._ask(cluster, "ShareMasks", request, task)
            shares: Sequence[secure_aggregation_pb2.EncryptedShares] = answer.shares
            receivers = sorted(one.receiver for one in shares)
            if receivers != [other for other in clusters if other != cluster] or any(
                (one.sender, len(one.ciphertext)) != (cluster, ENCRYPTED_BYTES) for one in shares
            ):
                raise self._wrong(cluster, task)
            return shares

        self._keys = tools.calls.in_parallel(make_keys, clusters)
        self._shares = [one for sent in tools.calls.in_parallel(share, clusters) for one in sent]

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
            task = "reveal shares of the masks"
            answer = self._ask(cluster, "RevealMasks", request, task)
            revealed: secure_aggregation_pb2.RevealedShares = answer.revealed
            owners = [one.cluster_index for one in revealed.shares]
            if (revealed.holder, sorted(owners)) != (cluster, list(self._clusters)) or any(
                len(one.share) != SECRET_BYTES for one in revealed.shares
            ):
                raise self._wrong(cluster, task)
            return revealed

        return secure_aggregation_pb2.Unmasking(
            keys=self._keys,
            revealed=self._tools.calls.in_parallel(reveal, present),
            total_samples=self._total_samples,
        )

    def _ask(self, cluster: int, method: str, request: Any, task: str) -> Any:
        control_unit, calls = self._tools.control_unit(cluster), self._tools.calls
        stub = calls.control_unit(control_unit)
        call = getattr(stub, method)(request, wait_for_ready=True, timeout=_LIMIT_SECONDS)
        try:
            return calls.last_answer(call, control_unit.host_id, task)
        except CancelledError:
            raise
        except PeerLostError as error:
            # These calls need no other host, so it may blame none.
            raise PeerLostError(control_unit.host_id, str(error)) from error
        except CollapipeError as error:
            if isinstance(error, (AttemptFailedError, NotFoundError, WrongStateError)):
                raise told_by(
                    control_unit.host_id, error
                ) from None  # It was started again, perhaps.
            refuses = isinstance(error, (InvalidInputError, InfeasibleError, NotPermittedError))
            message = f"{control_unit.host_id} failed when it was asked to {task}: {error}"
            raise PeerFaultyError(control_unit.host_id, message, refuses=refuses) from error

    def _wrong(self, cluster: int, task: str) -> PeerFaultyError:
        host_id = self._tools.control_unit(cluster).host_id
        return PeerFaultyError(
            host_id,
            f"{host_id} gave a wrong answer when it was asked to {task}: run the same version everywhere, or leave the cluster out",
        )
