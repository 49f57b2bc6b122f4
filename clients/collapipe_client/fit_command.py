"""The `collapipe fit` command: fits the constants of the convergence term to training runs."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from collapipe.errors import InvalidInputError
from collapipe_client.cli_options import AsJson
from collapipe_client.reporting import exit_codes, plain_table, print_json, print_table, say

if TYPE_CHECKING:
    from collapipe.allocation.round_model.convergence_fit import (
        ConvergenceFit,
        FittedConstant,
        TrainedRun,
    )


def fit(
    run_files: Annotated[
        list[Path],
        typer.Argument(metavar="RUN.jsonl...", show_default=False, help="One file for each run."),
    ],
    as_json: AsJson = False,
) -> None:
    """Fit the constants of the convergence term, schedule.convergence_constants, to runs.

    `collapipe train JOB.toml --json > RUN.jsonl` records a run. Give runs of one job that differ in
    training.rounds, local_steps and mini_batch, in the number of clusters, and in schedule.codecs or
    training.upload_codecs if the job may use a lossy codec. The fit needs at least one run more than it has constants to find; twice as
    many runs are better.

    The constants belong to one model, its data and its learning rate. Fit them again if one of these changes.
    """
    with exit_codes(as_json):
        # Imported here, because these need numpy and scipy, which many clients do not have.
        try:
            from collapipe.allocation.round_model.convergence_fit import fit_constants
            from collapipe_client.recorded_run import check_comparable, read_run
        except ModuleNotFoundError as error:
            raise InvalidInputError(
                f"fitting needs {error.name}, which is not installed here: "
                "pip install -e '.[scheduler]' in the folder of the repository"
            ) from error
        recorded = [read_run(path) for path in run_files]
        check_comparable(recorded)
        runs = [run.trained_run() for run in recorded]
        fitted = fit_constants(runs)
        if as_json:
            print_json(_document(runs, fitted))
        else:
            _say_fit(runs, fitted)


def _document(runs: Sequence["TrainedRun"], fitted: "ConvergenceFit") -> dict[str, Any]:
    return {
        "convergence_constants": _rounded(fitted),
        "constants": [asdict(constant) for constant in fitted.constants],
        "sampling_variance": asdict(fitted.sampling_variance),
        "r_squared": fitted.r_squared,
        "runs": [
            {
                "file": run.name,
                "features": run.features,
                "samples_per_update": run.samples_per_update,
                "squared_gradient_norm": run.squared_gradient_norm,
                "fitted": value,
                "relative_residual": _relative_residual(run, value),
            }
            for run, value in zip(runs, fitted.fitted, strict=True)
        ],
    }


def _say_fit(runs: Sequence["TrainedRun"], fitted: "ConvergenceFit") -> None:
    table = plain_table("run", "squared gradient norm", "fitted", "error")
    for run, value in zip(runs, fitted.fitted, strict=True):
        measured = f"{run.squared_gradient_norm:.4g}"
        table.add_row(run.name, measured, f"{value:.4g}", f"{_relative_residual(run, value):+.1%}")
    print_table(table)
    if fitted.r_squared is not None:
        say(f"R^2 {fitted.r_squared:.3f}")
    for position, constant in enumerate(fitted.constants):
        say(f"c{position} {_say_constant(constant)}")
    variance = _say_constant(fitted.sampling_variance)
    say(f"variance of the gradient of one sample (not a part of the term): {variance}")
    say("\nfor jobs with this model, data and learning rate:\n")
    say(f"[schedule]\nconvergence_constants = {_rounded(fitted)}")


def _say_constant(constant: "FittedConstant") -> str:
    error = constant.standard_error
    uncertainty = "" if error is None else f" +- {error:.2g}"
    note = f": {constant.note}" if constant.note else ""
    return f"{constant.value:.4g}{uncertainty}{note}"


def _relative_residual(run: "TrainedRun", fitted: float) -> float:
    return fitted / run.squared_gradient_norm - 1


def _rounded(fitted: "ConvergenceFit") -> list[float]:
    return [float(f"{constant.value:.4g}") for constant in fitted.constants]
