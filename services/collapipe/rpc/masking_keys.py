"""Masking keys: what a control unit signs, so that no other host can stand between two clusters (see `secure_aggregation`)."""

from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from collapipe.attempts import order
from collapipe.certificates.identity import Role
from collapipe.certificates.signatures import MASKING_KEYS
from collapipe.errors import NotPermittedError
from collapipe.rpc.credentials import Security
from collapipe.secure_aggregation.keys import PublicKeys
from collapipe.v1 import plan_pb2, secure_aggregation_pb2


def sign_masking_keys(
    security: Security, attempt: plan_pb2.Attempt, cluster_index: int, keys: PublicKeys
) -> secure_aggregation_pb2.SignedMaskingKeys:
    """Signs keys as the control unit of a cluster. In plain text, where nobody can check it, they have no signature."""
    message = secure_aggregation_pb2.MaskingKeys(
        attempt=attempt, cluster_index=cluster_index, mask_key=keys.mask, share_key=keys.share
    )
    signed = secure_aggregation_pb2.SignedMaskingKeys(keys=message.SerializeToString())
    if not security.is_insecure:
        signed.signature, signed.certificate = security.sign(signed.keys, MASKING_KEYS)
    return signed


def check_masking_keys(
    security: Security,
    attempt: plan_pb2.Attempt,
    signed: Iterable[secure_aggregation_pb2.SignedMaskingKeys],
    host_clusters: Sequence[int],
) -> dict[int, PublicKeys]:
    """Returns the keys of each cluster. Plain text has no names to check.

    Args:
        host_clusters: The cluster of the deployment on which each cluster of the job runs.

    Raises:
        NotPermittedError: The keys are of another attempt, twice of one cluster, or not signed by the control unit of their cluster.
    """
    public: dict[int, PublicKeys] = {}
    for one in signed:
        keys = _read(one)
        index = keys.cluster_index
        asked = attempt.job_id, order(attempt)
        if (keys.attempt.job_id, order(keys.attempt)) != asked or index in public:
            raise NotPermittedError(
                f"the masking keys of cluster {index} are there twice, or of another attempt than round {attempt.round_index}, attempt "
                f"{attempt.attempt} of job {attempt.job_id}: run the round again"
            )
        if index >= len(host_clusters):
            raise NotPermittedError(
                f"there are masking keys of cluster {index}, but the job has {len(host_clusters)} clusters: run the same version "
                "everywhere"
            )
        if not security.is_insecure:
            identity = security.check_signature(
                one.keys, one.signature, one.certificate, Role.CONTROL_UNIT, MASKING_KEYS
            )
            if identity.cluster != host_clusters[index]:
                raise NotPermittedError(
                    f"{identity} has signed the masking keys of cluster {index}, which runs on cluster {host_clusters[index]} of the "
                    "deployment: only the control unit of that cluster may"
                )
        public[index] = PublicKeys(keys.mask_key, keys.share_key)
    return public


def read_masking_keys(
    signed: Iterable[secure_aggregation_pb2.SignedMaskingKeys],
) -> dict[int, PublicKeys]:
    """Returns the keys of each cluster without a check, for whoever only adds; raises `NotPermittedError` if they are malformed."""
    read = [_read(one) for one in signed]
    return {keys.cluster_index: PublicKeys(keys.mask_key, keys.share_key) for keys in read}


def _read(
    signed: secure_aggregation_pb2.SignedMaskingKeys,
) -> secure_aggregation_pb2.MaskingKeys:
    try:
        return secure_aggregation_pb2.MaskingKeys.FromString(signed.keys)
    except DecodeError:
        raise NotPermittedError(
            "the masking keys of a cluster are malformed: run the same version of CollaPipe on all machines"
        ) from None
