import math
import weakref
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from collapipe.aggregation import federated_average
from collapipe.errors import InvalidInputError


def average(clusters: list[dict[str, Tensor]], samples: list[int]) -> dict[str, Tensor]:
    return {
        name: federated_average((cluster[name] for cluster in clusters), samples)
        for name in clusters[0]
    }


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(5, 4, generator=generator),
        "scalar": torch.randn((), generator=generator),
    }


@pytest.mark.parametrize("samples", [1, 3, 777])
def test_average_of_one_cluster_equals_that_cluster_bit_for_bit(samples: int) -> None:
    cluster = tensors(0) | {"extreme": torch.tensor([1e-45, 3.4e38, -0.0, 1 / 3])}
    result = average([cluster], [samples])
    assert result.keys() == cluster.keys()
    for name, tensor in cluster.items():
        assert torch.equal(result[name].view(-1), tensor.view(-1))
        assert result[name].dtype == tensor.dtype


def test_average_of_unequal_clusters_equals_the_formula_in_double_precision() -> None:
    clusters, samples = [tensors(seed) for seed in range(3)], [10, 1, 89]
    result = average(clusters, samples)
    for name, averaged in result.items():
        expected = torch.zeros_like(clusters[0][name], dtype=torch.float64)
        for cluster, count in zip(clusters, samples, strict=True):
            expected = expected + count / 100 * cluster[name].double()
        assert torch.equal(averaged, expected.float())


@given(
    st.lists(
        st.tuples(
            st.floats(-1e6, 1e6, width=32),
            st.integers(0, 10_000),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_average_is_the_exact_average_rounded_to_single_precision(
    clusters: list[tuple[float, int]],
) -> None:
    values, samples = [value for value, _ in clusters], [count for _, count in clusters]
    total = sum(samples)
    if total == 0:
        return
    exact = sum(Fraction(value) * count for value, count in clusters) / total
    result = average([{"x": torch.tensor([value])} for value in values], samples)["x"].item()
    scale = max(abs(value) for value in values)
    # Below 2^-126, the steps of single precision are 2^-149.
    tolerance = max(scale * 2**-50, 2**-149)
    assert math.isclose(result, float(exact), rel_tol=2**-23, abs_tol=tolerance)


def test_cluster_without_samples_has_no_weight() -> None:
    clusters = [tensors(0), tensors(1)]
    for name, tensor in average(clusters, [0, 5]).items():
        assert torch.equal(tensor, clusters[1][name])


def test_integer_tensors_are_not_averaged() -> None:
    positions = torch.arange(2**53 - 2, 2**53 + 2)
    clusters = [{"positions": positions.clone()} for _ in range(2)]
    assert torch.equal(average(clusters, [1, 2])["positions"], positions)


@pytest.mark.parametrize("other", [torch.zeros(5), torch.zeros(4, 1), torch.zeros(4).half()])
def test_different_shapes_or_types_are_refused(other: Tensor) -> None:
    with pytest.raises(InvalidInputError, match=r"in one cluster and .* in another"):
        average([{"matrix": torch.zeros(4)}, {"matrix": other}], [1, 1])


@pytest.mark.parametrize("samples", [[0, 0], [0, -1]])
def test_clusters_without_any_samples_are_refused(samples: list[int]) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot be averaged: at least one needs samples"):
        average([tensors(0), tensors(1)], samples)


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
