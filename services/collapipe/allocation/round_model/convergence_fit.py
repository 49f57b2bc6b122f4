"""The constants of the convergence term, from runs: design (11).

A convergence bound bounds the mean squared gradient norm of a run. What is measured is the norm over the samples of an
update, whose square is larger by their variance over their number. So the measured mean is regressed on what (11)
multiplies with c0 to c4, and on one over the samples of an update, which takes up that excess and is no part of (11).
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
"""What (11) multiplies with c0 to c4."""

_REMEDIES = (
    "vary training.rounds or training.local_steps",
    "vary the number of clusters, and training.mini_batch",
    "vary training.local_steps",
    'vary schedule.codecs, for example with ["int8"]',
    "give runs some of whose rounds were aborted",
    "vary training.mini_batch",
)
_NAMES = ("c0", "c1", "c2", "c3", "c4", "the sampling variance")
_SAMPLING = 5
_SAME = 1e-9
_INDEPENDENT = 1e-3
"""Share of a feature that the others must leave unexplained: gradient norms are noisier than that."""

_SIGNIFICANT = 2.0
"""Standard errors that a constant has to be above 0 to be believed."""


@dataclass(frozen=True)
class TrainedRun:
    """What the fit takes from a run.

    Args:
        name: Names it in messages.
        features: Means over its rounds.
        squared_gradient_norm: Mean over its steps, clusters weighted as in (11).
        samples_per_update: b_u.
    """

    name: str
    features: Features
    squared_gradient_norm: float
    samples_per_update: float


@dataclass(frozen=True)
class FittedConstant:
    """One constant.

    Args:
        value: Not negative.
        standard_error: How uncertain the value is; `None` where it is 0, or where there are no more runs than constants.
        note: Why it is 0, or may as well be; empty otherwise.
    """

    value: float
    standard_error: float | None
    note: str


@dataclass(frozen=True)
class ConvergenceFit:
    """The outcome of a fit.

    Args:
        constants: c0 to c4.
        sampling_variance: Of a sample's gradient; over the samples of an update, it is in what was measured.
        fitted: What the constants and the sampling say of each run, in the order given.
        r_squared: Share of the variance between runs that is explained; below 0 where their mean would say more, `None`
            where the runs measured all the same.
    """

    constants: tuple[FittedConstant, ...]
    sampling_variance: FittedConstant
    fitted: tuple[float, ...]
    r_squared: float | None


def convergence_features(problem: RoundProblem, plans: RoundPlan) -> Features:
    """What `convergence_term` multiplies with c0 to c4: the term itself, with one constant 1 and the others 0."""

    def feature(position: int) -> float:
        c0, c1, c2, c3, c4 = (float(position == other) for other in range(5))
        constants = replace(problem.convergence, constants=(c0, c1, c2, c3, c4))
        return convergence_term(replace(problem, convergence=constants), plans)

    return feature(0), feature(1), feature(2), feature(3), feature(4)


def fit_constants(runs: Sequence[TrainedRun]) -> ConvergenceFit:
    """Fits c0 to c4 by least squares, none of them negative.

    A constant whose feature is zero, or the same in all runs, or a combination of the sampling and of features before
    it, is not determined by them: it is set to 0, with a note.

    Args:
        runs: Of one model, data set and learning rate.

    Raises:
        InvalidInputError: The runs differ in nothing, or are fewer than what is to be fitted.
    """
    features = np.array([[*run.features, 1 / run.samples_per_update] for run in runs])
    measured = np.array([run.squared_gradient_norm for run in runs])
    notes = [_why_undetermined(features[:, position], position) for position in range(5)] + [""]
    varied = [position for position in range(5) if not notes[position]]
    if not varied or len(runs) < len(varied) + 1:
        raise InvalidInputError(_too_few(len(runs), varied))
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    scaled = features / scale  # features differ by orders of magnitude
    kept = [_SAMPLING]
    for position in varied:
        if _unexplained(scaled[:, kept], scaled[:, position]) < _INDEPENDENT:
            names = " and ".join(_NAMES[other] for other in kept)
            notes[position] = (
                f"its feature follows from that of {names} in these runs: {_REMEDIES[position]} on its own"
            )
        else:
            kept.append(position)
    values = np.zeros(len(_NAMES))
    values[kept] = nnls(scaled[:, kept], measured)[0] / scale[kept]
    for position in kept:
        if not values[position]:
            notes[position] = "the runs give no sign of it: a negative value would fit them better"
    fitted = features @ values
    errors = _standard_errors(scaled, scale, values, measured - fitted)
    for position, error in errors.items():
        if values[position] < _SIGNIFICANT * error:
            notes[position] = f"the runs cannot tell it from 0: {_REMEDIES[position]} more"
    spread = float(np.sum((measured - measured.mean()) ** 2))
    left = float(np.sum((measured - fitted) ** 2))
    *constants, sampling_variance = (
        FittedConstant(float(value), errors.get(position), notes[position])
        for position, value in enumerate(values)
    )
    return ConvergenceFit(
        tuple(constants),
        sampling_variance,
        tuple(fitted.tolist()),
        1 - left / spread if spread else None,
    )


def _why_undetermined(column: npt.NDArray[np.float64], position: int) -> str:
    """Says why runs with this feature cannot tell its constant; empty when they can."""
    if not column.any():
        return f"its feature is zero in every run: {_REMEDIES[position]}"
    if np.ptp(column) <= _SAME * column.max():
        return f"its feature is the same in every run: {_REMEDIES[position]}"
    return ""


def _too_few(num_runs: int, varied: Sequence[int]) -> str:
    if not varied:
        return (
            f"{num_runs} runs that differ in nothing that the convergence term depends on: "
            f"{', '.join(_REMEDIES[:4])}"
        )
    names = ", ".join(_NAMES[position] for position in varied)
    return (
        f"{num_runs} runs for {len(varied) + 1} unknowns ({names}, as what these multiply differs between the runs, and "
        f"{_NAMES[_SAMPLING]}): give at least {len(varied) + 1} runs, better twice as many"
    )


def _unexplained(others: npt.NDArray[np.float64], column: npt.NDArray[np.float64]) -> float:
    """Length of what is left of a unit vector without its projection on others."""
    coefficients = np.linalg.lstsq(others, column, rcond=None)[0]
    return float(np.linalg.norm(column - others @ coefficients))


def _standard_errors(
    scaled: npt.NDArray[np.float64],
    scale: npt.NDArray[np.float64],
    values: npt.NDArray[np.float64],
    residuals: npt.NDArray[np.float64],
) -> dict[int, float]:
    """Those of ordinary least squares over the constants that are not 0, by position."""
    positive = np.flatnonzero(values)
    freedom = len(residuals) - len(positive)
    if not freedom or not len(positive):
        return {}
    columns = scaled[:, positive]
    variance = float(residuals @ residuals) / freedom
    errors = np.sqrt(variance * np.diag(np.linalg.inv(columns.T @ columns))) / scale[positive]
    return dict(zip(positive.tolist(), errors.tolist(), strict=True))
