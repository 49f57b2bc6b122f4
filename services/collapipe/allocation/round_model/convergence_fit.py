"""Fits the constants of the convergence term, docs/scheduling.md (11), to recorded runs.

The term bounds the mean squared gradient norm of a run. A run can only measure the norm of the gradient over
the samples of one update. The expected square of that norm is larger, by the variance of a sample's gradient
divided by the number of samples. So the fit has one more unknown, this variance, with the feature 1 /
samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from collapipe.allocation.round_model.prediction import convergence_term
from collapipe.allocation.round_model.problem import RoundPlan, RoundProblem
from collapipe.errors import InvalidInputError

Features = tuple[float, float, float, float, float]
"""The factors of c0 to c4 in (11)."""

_NAMES = ("c0", "c1", "c2", "c3", "c4", "the sampling variance")
_SAMPLING = 5
_REMEDIES = (
    "vary training.rounds or training.local_steps",
    "vary the number of clusters, and training.mini_batch",
    "vary training.local_steps",
    'vary schedule.codecs or training.upload_codecs, for example with ["int8"]',
    "give runs with aborted rounds",
    "vary training.mini_batch",
)
"""For each entry of `_NAMES`: how further runs can tell it from the others."""

_EQUAL = 1e-9
_INDEPENDENT = 1e-3
"""Part of a feature that the others must not explain. Gradient norms have more noise than that."""

_SIGNIFICANT = 2.0
"""A constant that is fewer standard errors above 0 than this gets a note."""


@dataclass(frozen=True)
class TrainedRun:
    """One run.

    Args:
        name: Name for messages.
        features: Means over the rounds.
        squared_gradient_norm: Mean over the steps, with clusters weighted as in (11).
        samples_per_update: b_u of (11).
    """

    name: str
    features: Features
    squared_gradient_norm: float
    samples_per_update: float


@dataclass(frozen=True)
class FittedConstant:
    """One constant.

    Args:
        standard_error: `None` if the value is 0, or if there are no more runs than constants.
        note: Why the value is 0, or why 0 would fit as well. Empty otherwise.
    """

    value: float
    standard_error: float | None
    note: str


@dataclass(frozen=True)
class ConvergenceFit:
    """The result of a fit.

    Args:
        constants: c0 to c4.
        sampling_variance: Variance of the gradient of one sample.
        fitted: Fitted squared gradient norm of each run, in the order of the runs.
        r_squared: Share of the variance between runs that the fit explains. Negative if their mean explains
            more. `None` if all runs have the same norm.
    """

    constants: tuple[FittedConstant, ...]
    sampling_variance: FittedConstant
    fitted: tuple[float, ...]
    r_squared: float | None


def convergence_features(problem: RoundProblem, plans: RoundPlan) -> Features:
    """Returns the factors of c0 to c4 in a round."""

    def feature(position: int) -> float:
        c0, c1, c2, c3, c4 = (float(position == other) for other in range(5))
        constants = replace(problem.convergence, constants=(c0, c1, c2, c3, c4))
        return convergence_term(replace(problem, convergence=constants), plans)

    return feature(0), feature(1), feature(2), feature(3), feature(4)


def fit_constants(runs: Sequence[TrainedRun]) -> ConvergenceFit:
    """Fits c0 to c4 by least squares, with no constant below 0.

    A constant is set to 0, and gets a note, if the runs cannot determine it. Its feature is then zero or
    equal in all runs, or a combination of the sampling and of earlier features. All runs must have the same
    model, data set and learning rate.

    Raises:
        InvalidInputError: All runs are alike, or there are fewer runs than unknowns.
    """
    features = np.array([[*run.features, 1 / run.samples_per_update] for run in runs])
    measured = np.array([run.squared_gradient_norm for run in runs])
    notes = [_note_on_constant_feature(features[:, k], _REMEDIES[k]) for k in range(_SAMPLING)]
    notes.append("")
    varied = [k for k in range(_SAMPLING) if not notes[k]]
    _check_enough(len(runs), varied)
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    scaled = features / scale  # The features differ by orders of magnitude.
    kept = [_SAMPLING]
    for k in varied:
        if _unexplained(scaled[:, kept], scaled[:, k]) < _INDEPENDENT:
            names = " and ".join(_NAMES[other] for other in kept)
            notes[k] = (
                f"in these runs its feature follows from that of {names}: {_REMEDIES[k]} alone"
            )
        else:
            kept.append(k)
    values = np.zeros(len(_NAMES))
    values[kept] = nnls(scaled[:, kept], measured)[0] / scale[kept]
    fitted = features @ values
    errors = _standard_errors(scaled, scale, values, measured - fitted)
    for k in kept:
        if not values[k]:
            notes[k] = "the runs give no sign of it: a negative value would fit them better"
        elif k in errors and values[k] < _SIGNIFICANT * errors[k]:
            notes[k] = f"the runs cannot tell it from 0: {_REMEDIES[k]} more"
    *constants, sampling_variance = (
        FittedConstant(float(value), errors.get(k), notes[k]) for k, value in enumerate(values)
    )
    spread = float(np.sum((measured - measured.mean()) ** 2))
    residual = float(np.sum((measured - fitted) ** 2))
    return ConvergenceFit(
        tuple(constants),
        sampling_variance,
        tuple(fitted.tolist()),
        1 - residual / spread if spread else None,
    )


def _note_on_constant_feature(column: npt.NDArray[np.float64], remedy: str) -> str:
    if not column.any():
        return f"its feature is zero in every run: {remedy}"
    if np.ptp(column) <= _EQUAL * column.max():
        return f"its feature is the same in every run: {remedy}"
    return ""


def _check_enough(num_runs: int, varied: Sequence[int]) -> None:
    num_unknowns = len(varied) + 1
    if not varied:
        raise InvalidInputError(
            f"{num_runs} runs that differ in nothing that the convergence term depends on: "
            f"{', '.join(_REMEDIES[:4])}"
        )
    if num_runs < num_unknowns:
        names = ", ".join(_NAMES[k] for k in (*varied, _SAMPLING))
        raise InvalidInputError(
            f"{num_runs} runs for {num_unknowns} unknowns ({names}): give at least {num_unknowns} runs, better twice as "
            "many, or vary fewer settings"
        )


def _unexplained(others: npt.NDArray[np.float64], column: npt.NDArray[np.float64]) -> float:
    """Returns the length of a unit vector's part that is orthogonal to all others."""
    coefficients = np.linalg.lstsq(others, column, rcond=None)[0]
    return float(np.linalg.norm(column - others @ coefficients))


def _standard_errors(
    scaled: npt.NDArray[np.float64],
    scale: npt.NDArray[np.float64],
    values: npt.NDArray[np.float64],
    residuals: npt.NDArray[np.float64],
) -> dict[int, float]:
    """Returns the standard errors of ordinary least squares, by position, for the constants that are not 0."""
    positive = np.flatnonzero(values)
    freedom = len(residuals) - len(positive)
    if not freedom or not len(positive):
        return {}
    columns = scaled[:, positive]
    variance = float(residuals @ residuals) / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.inv(columns.T @ columns))) / scale[positive]
    return dict(zip(positive.tolist(), errors.tolist(), strict=True))
