import itertools
import math
import weakref
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collapipe.aggregation import (
    bounded_weights,
    clipped_average,
    clipping_scales,
    federated_average,
    trimmed_mean,
)
from collapipe.errors import InvalidInputError


def matrix(seed: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


MATRICES = [matrix(seed) for seed in range(7)]


@pytest.mark.parametrize(
    "tensor", [MATRICES[0], torch.tensor([1e-45, 3.4e38, -0.0, 1 / 3]), torch.tensor(0.1).half()]
)
@pytest.mark.parametrize("samples", [1, 777])
def test_average_of_one_cluster_equals_that_cluster_bit_for_bit(
    tensor: Tensor, samples: int
) -> None:
    average = federated_average([tensor], [samples])
    assert torch.equal(average, tensor)
    assert average.dtype == tensor.dtype


@pytest.mark.parametrize("samples", [(10, 1, 89), (0, 100, 0)])
def test_average_of_unequal_clusters_equals_the_formula_in_double_precision(
    samples: tuple[int, ...],
) -> None:
    average = federated_average(MATRICES[:3], samples)
    expected = torch.zeros(5, 4, dtype=torch.float64)
    for tensor, count in zip(MATRICES, samples, strict=False):
        expected = expected + count / 100 * tensor.double()
    assert torch.equal(average, expected.float())


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(0, 10_000)), min_size=1, max_size=5
    )
)
def test_average_is_the_exact_average_rounded_to_single_precision(
    clusters: list[tuple[float, int]],
) -> None:
    values, samples = [value for value, _ in clusters], [count for _, count in clusters]
    if not any(samples):
        return
    exact = sum(Fraction(value) * count for value, count in clusters) / sum(samples)
    result = federated_average([torch.tensor([value]) for value in values], samples).item()
    # Below 2^-126, the steps of single precision are 2^-149.
    tolerance = max(max(map(abs, values)) * 2**-50, 2**-149)
    assert math.isclose(result, float(exact), rel_tol=2**-23, abs_tol=tolerance)


def test_integer_tensors_are_not_averaged() -> None:
    positions = torch.arange(2**53 - 2, 2**53 + 2)
    assert torch.equal(federated_average([positions, positions.clone()], [1, 2]), positions)
    assert torch.equal(trimmed_mean([positions] * 2, 1), positions)


@pytest.mark.parametrize("other", [torch.zeros(5), torch.zeros(4, 1), torch.zeros(4).half()])
def test_different_shapes_or_types_are_refused(other: Tensor) -> None:
    with pytest.raises(InvalidInputError, match=r"float32 \[4\] .*\["):
        federated_average([torch.zeros(4), other], [1, 1])


@pytest.mark.parametrize("samples", [[0, 0], [0, -1]])
def test_clusters_without_any_samples_are_refused(samples: list[int]) -> None:
    with pytest.raises(InvalidInputError, match=rf"\[0, {samples[1]}\] samples"):
        federated_average(MATRICES[:2], samples)


def test_tensors_of_few_clusters_are_in_memory_at_the_same_time() -> None:
    given: list[weakref.ref[Tensor]] = []

    def read() -> Iterator[Tensor]:
        for _ in range(6):
            alive = sum(reference() is not None for reference in given)
            assert alive <= 2, "only the first tensor and the last one may still be there"
            tensor = torch.zeros(2)
            given.append(weakref.ref(tensor))
            yield tensor
            del tensor

    federated_average(read(), [1] * 6)
    assert len(given) == 6


# --- averages that a few poisoned clusters cannot move far


@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=8).filter(any),
    st.floats(0.05, 1.0),
)
def test_no_cluster_has_a_larger_share_than_allowed(samples: list[int], max_share: float) -> None:
    weights = bounded_weights(samples, max_share)
    shares = [weight / sum(weights) for weight in weights]
    allowed = max(max_share, 1 / sum(count > 0 for count in samples))
    assert max(shares) <= allowed * (1 + 1e-9)
    for count, share in zip(samples, shares, strict=True):
        assert (share > 0) == (count > 0)
    for (one, less), (other, more) in itertools.pairwise(sorted(zip(samples, shares, strict=True))):
        assert one <= other and less <= more * (1 + 1e-9)


def test_what_a_bounded_cluster_loses_goes_to_the_others_in_proportion() -> None:
    weights = bounded_weights([2**62, 30, 10], 0.6)
    assert [weight / sum(weights) for weight in weights] == pytest.approx([0.6, 0.3, 0.1])
    assert bounded_weights([3, 2, 1], 0.5) == [3, 2, 1]


def test_median_and_trimmed_mean_are_those_of_each_value() -> None:
    stacked = torch.stack(MATRICES[:5]).double()
    assert torch.equal(trimmed_mean(MATRICES[:5], None), stacked.median(dim=0).values.float())
    kept = stacked.sort(dim=0).values[1:4].mean(dim=0).float()
    assert torch.equal(trimmed_mean(MATRICES[:5], 1), kept)
    assert torch.equal(trimmed_mean(MATRICES[:2], None), stacked[:2].mean(dim=0).float())


@pytest.mark.parametrize("num_poisoned", [1, 2])
def test_poisoned_clusters_of_seven_cannot_leave_the_range_of_the_others(num_poisoned: int) -> None:
    honest = torch.stack(MATRICES[num_poisoned:])
    clusters = [torch.full((5, 4), 1e30)] * num_poisoned + MATRICES[num_poisoned:]
    for averaged in (trimmed_mean(clusters, None), trimmed_mean(clusters, num_poisoned)):
        assert (averaged <= honest.amax(dim=0)).all()
        assert (averaged >= honest.amin(dim=0)).all()


def test_change_of_a_cluster_is_clipped_to_the_median_norm() -> None:
    base = torch.ones(4)
    changes = [torch.full((4,), value) for value in (1.0, -1.0, 1.0, 1e6, 0.5)]
    clusters = [base + change for change in changes]
    scales = clipping_scales([float(change.norm()) for change in changes])
    assert scales == [1.0, 1.0, 1.0, pytest.approx(1e-6), 1.0]
    averaged = clipped_average(base, clusters, [1] * 5, scales)
    assert torch.allclose(averaged, base + (1 - 1 + 1 + 1 + 0.5) / 5)
    unchanged = clipped_average(base, clusters[:1], [7], [1.0])
    assert torch.equal(unchanged, clusters[0])
