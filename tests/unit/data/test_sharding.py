"""Every row belongs to one cluster, and never moves to another one."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.data import stable_random
from collapipe.data.sharding import dirichlet_clusters, iid_clusters


@given(num_clusters=st.integers(1, 9), num_rows=st.integers(1, 80), seed=st.integers(0, 5))
def test_iid_sizes_differ_by_at_most_one(num_clusters: int, num_rows: int, seed: int) -> None:
    sizes = Counter(iid_clusters(seed, num_clusters, 0, num_rows))
    counts = [sizes[cluster] for cluster in range(num_clusters)]
    assert sum(counts) == num_rows
    assert max(counts) - min(counts) <= 1


@given(num_clusters=st.integers(1, 9), first=st.integers(0, 40), appended=st.integers(0, 40))
def test_iid_appended_rows_move_no_earlier_row(
    num_clusters: int, first: int, appended: int
) -> None:
    whole = iid_clusters(3, num_clusters, 0, first + appended)
    pieces = [(0, first), (first, appended)]
    assert [c for piece in pieces for c in iid_clusters(3, num_clusters, *piece)] == whole


def test_iid_depends_on_the_seed() -> None:
    assert iid_clusters(0, 4, 0, 40) != iid_clusters(1, 4, 0, 40)


@given(
    groups=st.lists(st.sampled_from("abc"), max_size=60),
    cut=st.integers(0, 60),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 100.0]),
)
def test_dirichlet_appended_rows_move_no_earlier_row(
    groups: list[str], cut: int, alpha: float
) -> None:
    whole = dirichlet_clusters(5, 4, alpha, 0, groups)
    cut = min(cut, len(groups))
    head = dirichlet_clusters(5, 4, alpha, 0, groups[:cut])
    tail = dirichlet_clusters(5, 4, alpha, cut, groups[cut:])
    assert head + tail == whole
    assert set(whole) <= {0, 1, 2, 3}


def test_dirichlet_small_alpha_gives_a_label_to_one_cluster_and_large_alpha_to_all() -> None:
    groups = ["a", "b", "c"] * 400
    skewed = Counter(zip(groups, dirichlet_clusters(0, 4, 1e-3, 0, groups), strict=True))
    even = Counter(zip(groups, dirichlet_clusters(0, 4, 1e4, 0, groups), strict=True))
    for group in "abc":
        assert max(skewed[group, cluster] for cluster in range(4)) > 390
        assert min(even[group, cluster] for cluster in range(4)) > 60


def test_dirichlet_shares_have_the_distribution_s_moments() -> None:
    alpha, count = 0.5, 3
    first = [stable_random.shares("test", i, alpha=alpha, count=count)[0] for i in range(2000)]
    mean = sum(first) / len(first)
    variance = sum((value - mean) ** 2 for value in first) / len(first)
    assert mean == pytest.approx(1 / count, abs=0.03)
    expected = (count - 1) / count**2 / (count * alpha + 1)
    assert variance == pytest.approx(expected, abs=0.01)
