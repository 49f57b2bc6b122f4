"""The masks that a sum of uploads still has, from the revealed shares."""

from collections.abc import Mapping

from collapipe.errors import CorruptDataError, WrongStateError
from collapipe.secure_aggregation.keys import (
    AttemptName,
    PublicKeys,
    agree,
    mask_key,
    pair_mask_key,
    public_bytes,
    self_mask_key,
)
from collapipe.secure_aggregation.masks import MaskKeys
from collapipe.secure_aggregation.shares import join_secret


class RemainingMasks:
    """The masks in the sum of the present clusters: their self-masks, and what they have in common with the others.

    Args:
        public: The keys of all clusters that took part in the masks.
        revealed: What each present cluster has revealed, by the cluster that revealed it and then by the cluster whose secret it
            is of.

    Raises:
        WrongStateError: A share is missing.
        CorruptDataError: The shares of a key do not give that key.
    """

    def __init__(
        self,
        name: AttemptName,
        public: Mapping[int, PublicKeys],
        revealed: Mapping[int, Mapping[int, bytes]],
    ) -> None:
        self._name = name
        self.present = frozenset(revealed)
        holders = sorted(public)
        for holder, shares in revealed.items():
            if holder not in public or set(shares) != set(public):
                raise WrongStateError(
                    f"cluster {holder} has revealed shares of clusters {sorted(shares)}, but {holders} took part in {name}: run the "
                    "round again"
                )
        self._self_seeds: dict[int, bytes] = {}
        self._pair_secrets: dict[tuple[int, int], bytes] = {}
        """By the present cluster and the other one."""
        for cluster in holders:
            secret = join_secret({h: shares[cluster] for h, shares in revealed.items()}, holders)
            if cluster in self.present:
                self._self_seeds[cluster] = secret
                continue
            key = mask_key(secret)
            if public_bytes(key) != public[cluster].mask:
                raise CorruptDataError(
                    f"the shares that clusters {sorted(self.present)} have revealed do not give the key of cluster {cluster} in "
                    f"{name}: one of them is wrong, or they are too few; run the round again"
                )
            for present in self.present:
                self._pair_secrets[present, cluster] = agree(key, public[present].mask)

    def unit_masks(self, unit_index: int) -> MaskKeys:
        """Returns what has to be subtracted from the sum of a unit."""
        added = [
            self_mask_key(seed, self._name, cluster, unit_index)
            for cluster, seed in self._self_seeds.items()
        ]
        subtracted: list[bytes] = []
        for (present, late), secret in self._pair_secrets.items():
            (added if present < late else subtracted).append(
                pair_mask_key(secret, self._name, present, late, unit_index)
            )
        return MaskKeys(tuple(added), tuple(subtracted))
