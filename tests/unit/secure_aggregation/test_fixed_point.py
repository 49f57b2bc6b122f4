"""Changes of weights as integers modulo 2^32."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import CorruptDataError, DivergedError, WrongStateError
from collapipe.secure_aggregation.fixed_point import MOST_SECURE_CHANGE, from_ring, to_ring


@given(
    st.lists(
        st.tuples(
            st.floats(-MOST_SECURE_CHANGE, MOST_SECURE_CHANGE, width=32), st.integers(1, 10**6)
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 10**6),
)
def test_average_of_integers_is_that_of_the_changes(
    changes: list[tuple[float, int]], more: int
) -> None:
    num_samples = sum(count for _, count in changes)
    total_samples = num_samples + more
    base = torch.zeros(1, dtype=torch.float64)
    total = torch.zeros(1, dtype=torch.int32)
    for change, count in changes:
        weights = torch.tensor([change], dtype=torch.float64)
        total += to_ring(weights, base, count, total_samples, "w")
    average = from_ring(base, total, num_samples, total_samples, "w")
    expected = math.fsum(change * count for change, count in changes) / num_samples
    # Each cluster rounds by half a unit at most.
    unit = 2.0**-28 * total_samples / num_samples
    assert abs(float(average) - expected) <= unit * len(changes) / 2 + 1e-12


def test_rounding_is_that_of_doubles_and_the_result_has_the_type_of_the_base() -> None:
    base = torch.tensor([0.5, -0.25])
    weights = base + torch.tensor([2.0**-20, -(2.0**-22)])
    sent = to_ring(weights, base, 1, 2, "w")
    assert sent.tolist() == [2**7, -(2**5)]
    assert torch.equal(from_ring(base, sent, 1, 2, "w"), weights)


@pytest.mark.parametrize("value", [7.001, -8.0, math.inf, math.nan])
def test_change_that_the_ring_cannot_hold_is_refused(value: float) -> None:
    with pytest.raises(DivergedError, match="layer.weight"):
        to_ring(torch.tensor([value]), torch.zeros(1), 1, 2, "layer.weight")


def test_more_rows_than_announced_are_refused() -> None:
    with pytest.raises(WrongStateError, match=" 5 rows, .* 4"):
        to_ring(torch.zeros(1), torch.zeros(1), 5, 4, "w")


def test_sum_with_a_mask_left_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    masked = torch.randint(-(2**31), 2**31, (100,), dtype=torch.int64, generator=generator)
    with pytest.raises(CorruptDataError, match="mask"):
        from_ring(torch.zeros(100), masked.to(torch.int32), 1, 2, "w")
