"""The keys, masks and shares of one cluster in one attempt at a round."""

import hashlib
import secrets
from collections.abc import Collection, Mapping

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from collapipe.errors import CorruptDataError, InvalidInputError, WrongStateError
from collapipe.secure_aggregation.keys import (
    SECRET_BYTES,
    AttemptName,
    PublicKeys,
    agree,
    derive,
    mask_key,
    pair_mask_key,
    public_bytes,
    self_mask_key,
)
from collapipe.secure_aggregation.masks import MaskKeys
from collapipe.secure_aggregation.shares import decrypt, encrypt, split_secret


class ClusterMasks:
    """The secrets of a cluster, and what it keeps of the secrets of others. Call the methods in their order here.

    Args:
        num_clusters: Clusters of the job.
        threshold: Control units that must reveal a share before a secret is known. It is more than half of the clusters, so
            that no lie about who is late makes the control units reveal both secrets of a cluster.
    """

    def __init__(
        self, name: AttemptName, cluster_index: int, num_clusters: int, threshold: int
    ) -> None:
        self.name = name
        self.cluster_index = cluster_index
        self._num_clusters = num_clusters
        self._threshold = threshold
        self._self_seed = secrets.token_bytes(SECRET_BYTES)
        self._key_seed = secrets.token_bytes(SECRET_BYTES)
        self._mask_key = mask_key(self._key_seed)
        self._share_key = X25519PrivateKey.generate()
        self._public: Mapping[int, PublicKeys] = {}
        self._terms = b""
        self._pair_secrets: dict[int, bytes] = {}
        self._kept: dict[int, tuple[bytes, bytes]] = {}
        """A share of the self-mask and one of the mask key, by the cluster whose secrets they are of."""
        self._is_used = False
        self._has_revealed = False

    @property
    def public_keys(self) -> PublicKeys:
        return PublicKeys(public_bytes(self._mask_key), public_bytes(self._share_key))

    def share(self, public: Mapping[int, PublicKeys], terms: bytes = b"") -> dict[int, bytes]:
        """Takes the keys of all clusters that take part. Returns encrypted shares for each other one.

        Args:
            terms: What all clusters must have been told alike. Otherwise they cannot decrypt each other's shares.

        Raises:
            InvalidInputError: The keys lack this cluster's own, are too few, or cannot be used.
            WrongStateError: The secrets of this attempt are shared already.
        """
        if self._public:
            raise WrongStateError(
                f"cluster {self.cluster_index} has shared its secrets of {self.name} already: run the round again"
            )
        if public.get(self.cluster_index) != self.public_keys:
            raise InvalidInputError(
                f"the keys of {self.name} lack those that cluster {self.cluster_index} has made: run the round again"
            )
        clusters = sorted(public)
        if 2 * len(clusters) <= self._num_clusters:
            raise InvalidInputError(
                f"clusters {clusters} take part in the masks of {self.name}, but it needs more than half of {self._num_clusters}: wait "
                "until more clusters are there"
            )
        # A repeated round goes without the clusters that were late before.
        self._threshold = min(self._threshold, len(clusters))
        self._public, self._terms = dict(public), terms
        self_shares = split_secret(self._self_seed, self._threshold, clusters)
        key_shares = split_secret(self._key_seed, self._threshold, clusters)
        sent = {}
        for other in clusters:
            shares = self_shares[other], key_shares[other]
            if other == self.cluster_index:
                self._kept[other] = shares
                continue
            self._pair_secrets[other] = agree(self._mask_key, public[other].mask)
            key = self._share_encryption_key(self.cluster_index, other)
            sent[other] = encrypt(key, b"".join(shares), self._agreed())
        return sent

    def receive(self, encrypted: Mapping[int, bytes]) -> None:
        """Takes the shares that the other clusters have made for this one. Only once: a mask hides one upload.

        Args:
            encrypted: By sender.

        Raises:
            WrongStateError: The masks were used already, or the shares of a cluster are missing.
            CorruptDataError: A cluster was shown other keys, or the shares were garbled.
        """
        if self._is_used or set(encrypted) != set(self._pair_secrets) or not encrypted:
            raise WrongStateError(
                f"cluster {self.cluster_index} cannot mask its upload of {self.name}: it has masked one already, or got shares of clusters "
                f"{sorted(encrypted)} instead of {sorted(self._pair_secrets)}; run the round again"
            )
        self._is_used = True
        for sender, ciphertext in encrypted.items():
            key = self._share_encryption_key(sender, self.cluster_index)
            both = decrypt(key, ciphertext, self._agreed(), sender)
            if len(both) != 2 * SECRET_BYTES:
                raise CorruptDataError(
                    f"cluster {sender} has sent shares of {len(both)} bytes instead of {2 * SECRET_BYTES}: leave it out"
                )
            self._kept[sender] = both[:SECRET_BYTES], both[SECRET_BYTES:]

    def unit_masks(self, unit_index: int) -> MaskKeys:
        """Returns the keys of the masks of a unit. A host that gets them learns nothing about the masks of other units."""
        own, name = self.cluster_index, self.name
        added = [self_mask_key(self._self_seed, name, own, unit_index)]
        subtracted: list[bytes] = []
        for other, secret in sorted(self._pair_secrets.items()):
            (added if own < other else subtracted).append(
                pair_mask_key(secret, name, own, other, unit_index)
            )
        return MaskKeys(tuple(added), tuple(subtracted))

    def reveal(self, present: Collection[int]) -> dict[int, bytes]:
        """Returns a share of one secret of each cluster: of the self-mask if its upload counts, else of the mask key.

        Raises:
            WrongStateError: Shares of this attempt are revealed already, or this cluster has not masked its upload.
            InvalidInputError: The clusters are too few, did not take part, or lack this one.
        """
        if self._has_revealed or not self._is_used:
            raise WrongStateError(
                f"cluster {self.cluster_index} reveals no shares of {self.name}: it has revealed some already, or has not masked its upload; run the round again"
            )
        wrong = set(present) - set(self._public) or self.cluster_index not in present
        if wrong or len(present) < self._threshold:
            raise InvalidInputError(
                f"cluster {self.cluster_index} was asked to reveal shares of {self.name} for the uploads of clusters {sorted(present)}: "
                f"it needs at least {self._threshold} of {sorted(self._public)}, itself among them"
            )
        self._has_revealed = True
        return {
            cluster: shares[0] if cluster in present else shares[1]
            for cluster, shares in sorted(self._kept.items())
        }

    def _share_encryption_key(self, sender: int, receiver: int) -> bytes:
        other = receiver if sender == self.cluster_index else sender
        secret = agree(self._share_key, self._public[other].share)
        return derive(secret, self.name, "shares", sender, receiver)

    def _agreed(self) -> bytes:
        """Returns a digest of the terms and of all public keys. A cluster that was told others can decrypt no share."""
        checksum = hashlib.sha256(hashlib.sha256(self._terms).digest())
        for cluster, keys in sorted(self._public.items()):
            checksum.update(f"{cluster}\0{keys.mask.hex()}\0{keys.share.hex()}\0".encode())
        return checksum.digest()
