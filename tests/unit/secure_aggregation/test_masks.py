"""Masks of clusters, which their sum does not have any more when the shares are revealed."""

from collections.abc import Collection, Mapping

import numpy as np
import pytest

from collapipe.errors import CorruptDataError, InvalidInputError, WrongStateError
from collapipe.secure_aggregation.cluster_masks import ClusterMasks
from collapipe.secure_aggregation.keys import AttemptName, PublicKeys, is_public_key
from collapipe.secure_aggregation.masks import MaskStream
from collapipe.secure_aggregation.shares import encrypt
from collapipe.secure_aggregation.unmasking import RemainingMasks

NAME = AttemptName("job", 3, 1)
NUM_VALUES = 1000
VALUES = {i: np.random.default_rng(i).integers(0, 2**32, NUM_VALUES, np.uint32) for i in range(5)}
"""What each cluster would send without a mask."""


def with_shared_secrets(num_clusters: int, threshold: int) -> dict[int, ClusterMasks]:
    clusters = {i: ClusterMasks(NAME, i, num_clusters, threshold) for i in range(num_clusters)}
    pass_shares(clusters, keys_of(clusters))
    return clusters


def keys_of(clusters: Mapping[int, ClusterMasks]) -> dict[int, PublicKeys]:
    return {i: cluster.public_keys for i, cluster in clusters.items()}


def pass_shares(clusters: Mapping[int, ClusterMasks], public: Mapping[int, PublicKeys]) -> None:
    sent = {i: cluster.share(public) for i, cluster in clusters.items()}
    for i, cluster in clusters.items():
        cluster.receive({sender: shares[i] for sender, shares in sent.items() if sender != i})


def masked(cluster: ClusterMasks, unit_index: int = 4) -> np.ndarray:
    return VALUES[cluster.cluster_index] + MaskStream(cluster.unit_masks(unit_index)).take(
        NUM_VALUES
    )


def unmasked_sum(clusters: Mapping[int, ClusterMasks], present: Collection[int]) -> np.ndarray:
    public = keys_of(clusters)
    total = sum(masked(clusters[i]) for i in present)
    revealed = {i: clusters[i].reveal(present) for i in present}
    remaining = RemainingMasks(NAME, public, revealed)
    assert isinstance(total, np.ndarray)
    return total - MaskStream(remaining.unit_masks(4)).take(NUM_VALUES)


@pytest.mark.parametrize("present", [[0, 1, 2, 3, 4], [0, 2, 4], [1, 2, 3]])
def test_masks_are_removed_from_the_sum_of_the_present_clusters(present: list[int]) -> None:
    total = unmasked_sum(with_shared_secrets(5, 3), present)
    assert np.array_equal(total, sum(VALUES[i] for i in present))


def test_masks_hide_an_upload_and_the_sum_of_two_and_differ_in_each_attempt_and_unit() -> None:
    first, second = with_shared_secrets(3, 3), with_shared_secrets(3, 3)
    uploads = [masked(first[0]), masked(second[0]), masked(first[0], unit_index=5), VALUES[0]]
    for number, upload in enumerate(uploads):
        for other in uploads[:number]:
            assert np.count_nonzero(upload == other) < NUM_VALUES // 100
    # The masks that two clusters have in common cancel, but their self-masks remain.
    total = sum(masked(first[i]) for i in range(3))
    assert np.count_nonzero(total == sum(VALUES[i] for i in range(3))) < NUM_VALUES // 100


def test_stream_does_not_depend_on_how_it_is_cut() -> None:
    keys = with_shared_secrets(3, 3)[1].unit_masks(0)
    assert keys.added and keys.subtracted
    stream = MaskStream(keys)
    parts = [stream.take(count) for count in (1, 17, 982)]
    assert np.array_equal(np.concatenate(parts), MaskStream(keys).take(NUM_VALUES))


def test_cluster_reveals_once_and_never_both_secrets_of_a_cluster() -> None:
    clusters = with_shared_secrets(3, 2)
    revealed = clusters[0].reveal([0, 1])
    assert set(revealed) == {0, 1, 2}
    for present in ([0, 1], [0, 1, 2], [0, 2]):
        with pytest.raises(WrongStateError, match="round 3, attempt 1"):
            clusters[0].reveal(present)


@pytest.mark.parametrize("present", [[0], [1, 2], [0, 1, 3]])
def test_cluster_reveals_nothing_for_too_few_or_wrong_clusters(present: list[int]) -> None:
    with pytest.raises(InvalidInputError, match=r"2 of \[0, 1, 2\]"):
        with_shared_secrets(3, 2)[0].reveal(present)


def test_too_few_or_wrong_shares_do_not_give_the_key_of_a_late_cluster() -> None:
    clusters = with_shared_secrets(5, 3)
    revealed = {i: clusters[i].reveal([0, 1, 2]) for i in (0, 1, 2)}
    RemainingMasks(NAME, keys_of(clusters), revealed)
    too_few = {i: revealed[i] for i in (0, 1)}
    wrong = {**revealed, 2: {**revealed[2], 4: bytes(16)}}
    for shares in (too_few, wrong):
        with pytest.raises(CorruptDataError, match="key of cluster"):
            RemainingMasks(NAME, keys_of(clusters), shares)
    with pytest.raises(WrongStateError, match="cluster 2"):
        RemainingMasks(NAME, keys_of(clusters), {**revealed, 2: {0: bytes(16)}})


def test_mask_hides_one_upload_only() -> None:
    clusters = {i: ClusterMasks(NAME, i, 3, 3) for i in range(3)}
    with pytest.raises(WrongStateError, match="not masked"):
        clusters[0].reveal([0, 1, 2])
    sent = {i: cluster.share(keys_of(clusters)) for i, cluster in clusters.items()}
    shares = {1: sent[1][0], 2: sent[2][0]}
    with pytest.raises(WrongStateError, match=r"clusters \[1\]"):
        clusters[0].receive({1: sent[1][0]})
    clusters[0].receive(shares)
    with pytest.raises(WrongStateError, match="cannot mask"):
        clusters[0].receive(shares)
    with pytest.raises(WrongStateError, match="has shared"):
        clusters[0].share(keys_of(clusters))


@pytest.mark.parametrize(("num_keys", "terms"), [(3, b"9 rows"), (2, b"900 rows")])
def test_clusters_that_were_shown_other_keys_or_terms_cannot_read_their_shares(
    num_keys: int, terms: bytes
) -> None:
    clusters = {i: ClusterMasks(NAME, i, 3, 2) for i in range(3)}
    public = keys_of(clusters)
    sent_of_0 = clusters[0].share({i: public[i] for i in range(num_keys)}, b"9 rows")
    clusters[1].share({0: public[0], 1: public[1]}, terms)
    with pytest.raises(CorruptDataError, match="cluster 0"):
        clusters[1].receive({0: sent_of_0[1]})


def test_encrypted_shares_of_another_length_are_refused() -> None:
    clusters = {i: ClusterMasks(NAME, i, 3, 2) for i in range(2)}
    public = keys_of(clusters)
    for cluster in clusters.values():
        cluster.share(public)
    short = encrypt(clusters[0]._share_encryption_key(0, 1), b"", clusters[0]._agreed())
    with pytest.raises(CorruptDataError, match="cluster 0 .* 0 bytes .* 32"):
        clusters[1].receive({0: short})


def test_point_of_small_order_is_no_public_key() -> None:
    assert is_public_key(ClusterMasks(NAME, 0, 3, 2).public_keys.mask)
    for key in (bytes(32), bytes(31), b""):
        assert not is_public_key(key)


def test_repeated_round_without_a_late_cluster_needs_all_others() -> None:
    clusters = {i: ClusterMasks(NAME, i, 3, 3) for i in (0, 2)}
    pass_shares(clusters, keys_of(clusters))
    with pytest.raises(InvalidInputError, match=" 2 of"):
        clusters[0].reveal([0])
    assert np.array_equal(unmasked_sum(clusters, [0, 2]), VALUES[0] + VALUES[2])


@pytest.mark.parametrize(("num_clusters", "chosen"), [(3, [0]), (3, [1, 2]), (4, [0, 1])])
def test_too_few_keys_or_keys_without_ones_own_are_refused(
    num_clusters: int, chosen: list[int]
) -> None:
    clusters = {i: ClusterMasks(NAME, i, num_clusters, 2) for i in range(num_clusters)}
    public = keys_of(clusters)
    with pytest.raises(InvalidInputError, match="mask|cluster 0"):
        clusters[0].share({i: public[i] for i in chosen})
