import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from collapipe.allocation import ClusterPlan, Convergence, LinkPlan, RoundProblem, StagePlan
from collapipe.allocation.round_model.convergence_fit import (
    Features,
    TrainedRun,
    convergence_features,
    fit_constants,
)
from collapipe.allocation.round_model.prediction import convergence_term
from collapipe.errors import InvalidInputError

from .changes import with_cluster
from .problems import problem

_TRUE = np.array([2.0, 0.5, 0.001, 30.0, 4.0])
_VARIANCE = 8.0


def _problem(**changes: Any) -> RoundProblem:
    given = problem([1.0], num_blocks=2, num_micro_batches=4)
    return replace(
        given, mini_batch=32, local_steps=10, convergence=Convergence(num_rounds=5), **changes
    )


def _plan(codec: str = "fp32", upload_codec: str = "fp32") -> ClusterPlan:
    hosts = (("control-unit", 0, 1), ("device-0", 1, 3), ("edge-server", 3, 4))
    stages = tuple(StagePlan(*host, 1) for host in hosts)
    links = (LinkPlan("fp32"), LinkPlan(codec))  # type: ignore[arg-type]
    return ClusterPlan(stages, 4, links, upload_codec)  # type: ignore[arg-type]


def _run(features: Features, samples: float, measured: float) -> TrainedRun:
    return TrainedRun("run", features, measured + _VARIANCE / samples, samples)


def _runs(noise: float = 0.0) -> list[TrainedRun]:
    """Returns runs of one and two clusters that follow docs/scheduling.md (11)."""
    random = np.random.default_rng(0)
    runs = []
    for steps, rounds, samples, clusters, error, lost in itertools.product(
        (5, 20), (2, 6), (8, 64), (1, 2), (0.0, 0.02), (0.0, 0.5)
    ):
        features = (1 / (steps * rounds), 1 / (clusters * samples), float(steps**2), error, lost)
        run = _run(features, samples, float(np.dot(_TRUE, features)))
        measured = run.squared_gradient_norm * (1 + noise * random.standard_normal())
        runs.append(replace(run, squared_gradient_norm=measured))
    return runs


@pytest.mark.parametrize("per_micro_batch", [False, True])
def test_features_times_constants_are_the_term(per_micro_batch: bool) -> None:
    given = _problem(update_per_micro_batch=per_micro_batch)
    constants = (2.0, 0.5, 0.001, 30.0, 4.0)
    given = replace(
        given, clusters=given.clusters * 2, convergence=Convergence(constants, num_rounds=5)
    )
    given = with_cluster(given, 0, weight=0.75, loss_probability=0.1)
    given = with_cluster(given, 1, weight=0.25, loss_probability=0.3)
    plans = (_plan("int8"), _plan("bf16"))
    features = convergence_features(given, plans)
    assert np.dot(constants, features) == pytest.approx(convergence_term(given, plans))
    assert np.all(np.array(features) > 0)


def test_features_are_the_factors_of_the_term() -> None:
    updates = 4  # one for each micro-batch
    given = _problem(update_per_micro_batch=True)
    features = convergence_features(given, (_plan("int8", upload_codec="bf16"),))
    errors = 2**-7 + 2**-9
    expected = (1 / (10 * 5 * updates), updates / (32 / updates), (10 * updates) ** 2, errors, 0.0)
    assert features == pytest.approx(expected)


def test_fit_finds_the_constants_that_made_the_runs() -> None:
    fit = fit_constants(_runs())
    assert [constant.value for constant in fit.constants] == pytest.approx(list(_TRUE))
    assert fit.sampling_variance.value == pytest.approx(_VARIANCE)
    assert fit.r_squared == pytest.approx(1.0)
    assert fit.fitted == pytest.approx([run.squared_gradient_norm for run in _runs()])
    assert not any(constant.note for constant in fit.constants)


def test_standard_errors_cover_the_truth_when_runs_are_noisy() -> None:
    fit = fit_constants(_runs(noise=0.01))
    found = [*fit.constants, fit.sampling_variance]
    for constant, truth in zip(found, [*_TRUE, _VARIANCE], strict=True):
        assert constant.standard_error is not None
        assert constant.standard_error > 0
        assert abs(constant.value - truth) < 4 * constant.standard_error


@pytest.mark.parametrize(
    ("features", "c0", "notes"),
    [
        (
            [(a, 0.1, 100.0, 0.0, 0.0) for a in (0.1, 0.2, 0.4)],
            2.0,
            {2: "training.local_steps", 3: "schedule.codecs"},
        ),
        (
            [(a, 0.0, 3 * a, 0.0, 0.0) for a in (0.1, 0.2, 0.4)],
            4.0,
            {2: "sampling variance and c0"},
        ),
    ],
    ids=["constant features", "collinear features"],
)
def test_fit_without_variation_sets_a_constant_to_zero_and_says_so(
    features: list[Features], c0: float, notes: dict[int, str]
) -> None:
    fit = fit_constants([_run(each, 8, c0 * each[0]) for each in features])
    assert [c.value for c in fit.constants] == pytest.approx([c0, 0.0, 0.0, 0.0, 0.0])
    for position, note in notes.items():
        assert note in fit.constants[position].note


def test_fit_with_one_number_of_clusters_explains_batch_size_by_the_sampling() -> None:
    runs = [_run((0.1, 1 / b, 100.0, 0.0, 0.0), b, 0.0) for b in (8.0, 16.0, 64.0)]
    fit = fit_constants(runs)
    assert fit.constants[1].value == 0
    assert "clusters" in fit.constants[1].note
    assert fit.sampling_variance.value == pytest.approx(_VARIANCE)


def test_fit_that_wants_a_negative_constant_gives_zero_and_says_so() -> None:
    runs = [
        _run((a, 0.0, 0.0, b, 0.0), 8, 2 * a - 0.2 * b)
        for a, b in [(1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (3.0, 1.0)]
    ]
    fit = fit_constants(runs)
    assert fit.constants[0].value > 0
    assert fit.constants[3].value == 0
    assert "negative" in fit.constants[3].note


def test_fit_that_cannot_tell_a_constant_from_zero_says_so() -> None:
    measured = [1.0, 1.04, 2.1, 1.9, 3.0, 3.26]  # The second feature only adds noise.
    runs = [
        _run((float(1 + index // 2), 0.0, 0.0, float(index % 2), 0.0), 8, value)
        for index, value in enumerate(measured)
    ]
    told, untold = (fit_constants(runs).constants[position] for position in (0, 3))
    assert untold.value > 0
    assert untold.standard_error is not None
    assert "cannot tell" in untold.note
    assert not told.note


def test_fit_of_as_many_runs_as_unknowns_has_no_standard_errors() -> None:
    runs = [_run((a, 0.0, 0.0, 0.0, 0.0), 8, 2 * a) for a in (0.1, 0.2)]
    fit = fit_constants(runs)
    assert [c.standard_error for c in fit.constants] == [None] * 5
    assert fit.constants[0].value == pytest.approx(2.0)


def test_fit_of_too_few_or_equal_runs_is_refused() -> None:
    runs = [_run((x, 0.3 - x, 1e4 * x * x, 0.0, 0.0), 8, 1.0) for x in (0.1, 0.2)]
    with pytest.raises(InvalidInputError, match=r"\b2 runs .*\b4 .*\(c0, c1, c2"):
        fit_constants(runs)
    with pytest.raises(InvalidInputError, match=r"training\.rounds"):
        fit_constants([_runs()[0]] * 3)
