"""The sampler is a pure function of its cursor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import InvalidInputError
from collapipe.tasks import Cursor, begin_round, draw


def draw_many(cursor: Cursor, mini_batch: int, count: int) -> tuple[list[list[int]], Cursor]:
    drawn = []
    for _ in range(count):
        rows, cursor = draw(7, 1, cursor, mini_batch)
        drawn.append(rows)
    return drawn, cursor


@given(num_rows=st.integers(1, 60), mini_batch=st.integers(1, 60), epochs=st.integers(1, 3))
def test_draw_covers_each_row_once_an_epoch(num_rows: int, mini_batch: int, epochs: int) -> None:
    per_epoch = num_rows // mini_batch
    if per_epoch == 0:
        with pytest.raises(InvalidInputError, match=str(mini_batch)):
            draw(0, 0, Cursor(num_rows=num_rows), mini_batch)
        return
    cursor = begin_round(Cursor(), num_rows)
    for epoch in range(epochs):
        drawn, cursor = draw_many(cursor, mini_batch, per_epoch)
        rows = [row for batch in drawn for row in batch]
        assert all(len(batch) == mini_batch for batch in drawn)
        assert len(set(rows)) == len(rows) == per_epoch * mini_batch
        assert set(rows) <= set(range(num_rows))
        assert cursor == Cursor(epoch, per_epoch, num_rows)


@given(first=st.integers(0, 12), second=st.integers(0, 12))
def test_draw_from_a_recorded_cursor_continues_the_same_rows(first: int, second: int) -> None:
    start = begin_round(Cursor(), 23)
    whole, end = draw_many(start, 5, first + second)
    head, cursor = draw_many(start, 5, first)
    tail, resumed_end = draw_many(cursor, 5, second)
    assert head + tail == whole
    assert resumed_end == end


def test_order_is_frozen() -> None:
    """Guards resumed jobs against another numpy, and against us."""
    assert draw(0, 0, Cursor(num_rows=10), 10)[0] == [5, 6, 9, 1, 3, 0, 8, 4, 7, 2]


def test_order_differs_between_epochs_clusters_and_seeds() -> None:
    orders = [
        draw(seed, cluster, Cursor(epoch, 0, 50), 50)[0]
        for seed, cluster, epoch in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    ]
    assert len(set(map(tuple, orders))) == 4


def test_begin_round_starts_an_epoch_only_over_appended_rows() -> None:
    assert begin_round(Cursor(2, 3, 100), 101) == Cursor(3, 0, 101)
    assert begin_round(Cursor(2, 3, 100), 100) == Cursor(2, 3, 100)
    with pytest.raises(InvalidInputError, match="99 .* 100 "):
        begin_round(Cursor(2, 3, 100), 99)
