"""Every row belongs to one side and one cluster, and never moves to another one."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.data import stable_random
from collapipe.data.hold_out import HELD_OUT_SHARE, HoldOut, choose
from collapipe.data.rows import Row, TaggedRow
from collapipe.data.sharding import dirichlet_clusters, iid_clusters

NUM_LABELS = 20


def row(number: int, label: str | None = None) -> Row:
    return Row("a", number, (f"text {number}",), (label or f"label {number % NUM_LABELS}",))


def held_out(rows: list[Row], kind: str = "classification") -> set[str]:
    return {each.key for each in HoldOut(kind).divide(rows)[1]}


ROWS = [row(number) for number in range(6000)]


def test_each_label_loses_about_the_same_share() -> None:
    train, chosen = HoldOut("classification").divide(ROWS)
    assert sorted([*train, *chosen], key=lambda each: each.line) == ROWS
    shares = Counter(each.labels[0] for each in chosen)
    assert len(shares) == NUM_LABELS
    # Each label has 300 rows, so the standard deviation of its share is 2 %.
    assert all(abs(count / 300 - HELD_OUT_SHARE) < 0.08 for count in shares.values())


def test_order_changes_only_the_first_rows_of_labels() -> None:
    shuffled = random.Random(0).sample(ROWS, len(ROWS))
    first = {each.labels[0]: each.key for each in reversed(ROWS)}.values()
    first_shuffled = {each.labels[0]: each.key for each in reversed(shuffled)}.values()
    assert held_out(ROWS) ^ held_out(shuffled) <= {*first, *first_shuffled}


@pytest.mark.parametrize("kind", ["translation", "causal_lm", "instruction"])
def test_without_labels_only_the_text_counts(kind: str) -> None:
    shuffled = random.Random(0).sample(ROWS, len(ROWS))
    assert held_out(ROWS, kind) == held_out(shuffled, kind)


def test_no_label_loses_its_only_row() -> None:
    rare = [row(number, f"rare {number}") for number in range(300)]
    assert held_out(rare) == set()
    assert len(held_out(rare, "translation")) > 20  # The hash alone would choose these.


def test_no_entity_type_loses_its_only_sentence() -> None:
    def sentence(number: int, tag: str) -> Row:
        words = ("word", str(number))
        return TaggedRow("a", number, (" ".join(words),), ("O", tag), words)

    rare = [sentence(number, f"B-{number}") for number in range(300)]
    plain = [sentence(number, "O") for number in range(300, 600)]
    chosen = held_out([*rare, *plain], "ner")
    assert not chosen & {each.key for each in rare}
    assert len(chosen) > 20  # A sentence without entities has no label to lose.


def test_rows_with_the_text_of_a_first_row_train_too() -> None:
    chosen_by_hash = held_out(ROWS[:100], "translation")
    only = next(each for each in ROWS if each.key in chosen_by_hash)
    again = [only, row(99_999, only.labels[0]), only]
    train, chosen = HoldOut("classification").divide(again)
    assert train.count(only) == 2
    assert not chosen or chosen == [again[1]]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), max_size=60),
    st.integers(0, 60),
    st.booleans(),
)
def test_appended_rows_change_no_side(
    drawn: list[tuple[int, int]], num_before: int, failed_first: bool
) -> None:
    rows = [row(number, f"label {label}") for number, label in drawn]
    whole = HoldOut("classification").divide(rows)
    growing = HoldOut("classification")
    before = growing.divide(rows[:num_before])
    growing.accept()
    if failed_first:  # What was read and not accepted is read again.
        growing.divide([row(7, "label 9"), *rows[num_before:]])
    after = growing.divide(rows[num_before:])
    assert (before[0] + after[0], before[1] + after[1]) == whole
    assert {each.labels[0] for each in whole[1]} <= {each.labels[0] for each in whole[0]}


# --- a limit of held-out rows


def test_limit_takes_rows_of_all_parts_of_a_sorted_file_and_the_others_train() -> None:
    ordered = sorted(ROWS, key=lambda each: each.labels)
    whole = HoldOut("classification").divide(ordered)[1]
    train, chosen = HoldOut("classification", limit=200).divide(ordered)
    assert len({each.labels for each in chosen}) == NUM_LABELS
    assert len(chosen) == 200 and set(chosen) < set(whole)
    assert sorted([*train, *chosen], key=lambda each: each.line) == ROWS
    assert train == [each for each in ordered if each not in set(chosen)]


def test_held_out_file_with_a_limit_is_measured_in_all_parts_and_in_its_order() -> None:
    ordered = sorted(ROWS, key=lambda each: each.labels)
    chosen = choose(ordered, 200)
    assert len({each.labels for each in chosen}) == NUM_LABELS
    assert chosen == [each for each in ordered if each in set(chosen)]
    assert choose(ordered, None) == ordered
    assert {*choose(ordered, 100)} < {*chosen}


def test_limit_of_sizes_is_reached_and_passed_by_one_row_at_most() -> None:
    def sizes(rows: Sequence[Row]) -> list[int]:
        return [each.line % 7 for each in rows]

    chosen = HoldOut("causal_lm", 100, sizes).divide(ROWS)[1]
    assert 100 <= sum(sizes(chosen)) < 107
    assert 100 <= sum(sizes(choose(ROWS, 100, sizes))) < 107


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=80),
    st.lists(st.integers(0, 80), max_size=3),
    st.integers(1, 8),
)
def test_with_a_limit_a_restart_divides_grown_files_as_before(
    drawn: list[tuple[int, int]], cuts: list[int], limit: int
) -> None:
    rows = [row(number, f"label {label}") for number, label in drawn]
    growing = HoldOut("translation", limit)
    sides: tuple[list[Row], list[Row]] = ([], [])
    stops = [*sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for start, stop in pairwise([0, *stops]):
        for side, divided in zip(sides, growing.divide(rows[start:stop]), strict=True):
            side.extend(divided)
        growing.accept()
    assert growing.num_first == stops[0]
    again = HoldOut("translation", limit, num_first=stops[0])
    train, chosen = again.divide(rows)
    assert train == sides[0]
    assert Counter(chosen) == Counter(sides[1])
    assert len(chosen) <= limit
    assert not {each.key for each in train} & {each.key for each in chosen}


# --- clusters


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
