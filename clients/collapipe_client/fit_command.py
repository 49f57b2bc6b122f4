"""The `collapipe fit` command: the constants of the convergence term, from runs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from collapipe.codecs import CODECS
from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe_client.cli_options import AsJson
from collapipe_client.reporting import exit_codes, print_json, say

if TYPE_CHECKING:
    from collapipe.allocation import ClusterPlan, RoundProblem
    from collapipe.allocation.round_model.convergence_fit import (
        ConvergenceFit,
        FittedConstant,
        TrainedRun,
    )

_MAY_DIFFER = {
    "rounds",
    "local_steps",
    "mini_batch",
    "update_per",
    "warm_up_steps",
    "recompute",
    "evaluate_every",
}
"""Keys of [training] that runs of one fit may differ in."""

_HOW_TO_RECORD = "write it with `collapipe train JOB.toml --json > RUN.jsonl`"


def fit(
    run_files: Annotated[
        list[Path], typer.Argument(metavar="RUN.jsonl...", show_default=False, help="One a run.")
    ],
    as_json: AsJson = False,
) -> None:
    """Fit the constants of the convergence term to runs, for schedule.convergence_constants.

    A run is what `collapipe train JOB.toml --json > RUN.jsonl` writes. Give runs of one job that
    differ in training.rounds, local_steps and mini_batch, in the number of clusters, and in
    schedule.codecs where a lossy one is allowed: one more than there are constants to tell, better
    twice as many.

    The constants belong to one model, its data and its learning rate. Fit them again when one of
    these changes.
    """
    with exit_codes(as_json):
        try:  # numpy and scipy: many clients lack them
            from collapipe.allocation.round_model.convergence_fit import fit_constants
        except ModuleNotFoundError as error:
            raise InvalidInputError(
                f"fitting needs {error.name}, which is not installed here: "
                "pip install 'collapipe[scheduler]'"
            ) from error

        recorded = [_Recording.read(path) for path in run_files]
        _check_comparable(recorded)
        runs = [recording.run() for recording in recorded]
        fitted = fit_constants(runs)
        if as_json:
            print_json(_document(runs, fitted))
        else:
            _say_fit(runs, fitted)


@dataclass(frozen=True)
class _Recording:
    """What a file says of a run, by round from 0; only rounds that were committed.

    Args:
        path: The file.
        job: The job.
        plans: One a cluster, as documents.
        norms: Gradient norms of each step, one list a cluster.
        tries: Of the round, the last of which was committed.
    """

    path: Path
    job: JobConfig
    plans: Sequence[Sequence[Mapping[str, Any]]]
    norms: Sequence[Sequence[Sequence[float]]]
    tries: Sequence[int]

    @classmethod
    def read(cls, path: Path) -> "_Recording":
        """Reads a file.

        Raises:
            InvalidInputError: It is no run, or a part of one.
        """
        job: JobConfig | None = None
        started: dict[int, Mapping[str, Any]] = {}
        norms: dict[int, list[list[float]]] = {}
        for event in _events(path):
            try:
                kind = event["event"]
                if kind == "job":
                    job = JobConfig.from_dict(event["config"], str(path))
                elif kind == "round_started":
                    started[event["round_index"]] = event
                elif kind == "round_committed":
                    round_index = event["num_rounds"] - 1
                    if round_index in norms:
                        raise InvalidInputError(
                            f"{path}: round {round_index + 1} is committed twice: it holds several "
                            "runs; give one file a run"
                        )
                    norms[round_index] = [s["gradient_norms"] for s in event["summaries"]]
            except (KeyError, TypeError) as error:
                raise _no_run(path, f"an event that is not of a run ({error})") from error
        if job is None:
            raise _no_run(path, "no event that says what the job was")
        if not norms:
            raise _no_run(path, "no committed round")
        if sorted(norms) != list(range(len(norms))) or not norms.keys() <= started.keys():
            raise InvalidInputError(
                f"{path}: has the rounds {', '.join(str(index + 1) for index in sorted(norms))}, "
                "and a run starts with round 1: join the files of a job that was resumed, "
                "`cat FIRST.jsonl RESUMED.jsonl > RUN.jsonl`"
            )
        rounds = range(len(norms))
        return cls(
            path,
            job,
            [started[index]["plans"] for index in rounds],
            [norms[index] for index in rounds],
            [started[index]["attempt"] + 1 for index in rounds],
        )

    def run(self) -> "TrainedRun":
        """What the fit takes from it."""
        from collapipe.allocation.round_model.convergence_fit import (
            TrainedRun,
            convergence_features,
        )

        lost = 1 - len(self.tries) / sum(self.tries)
        features = []
        for documents in self.plans:
            plans = tuple(_cluster_plan(document) for document in documents)
            features.append(convergence_features(self._problem(plans, lost), plans))
        squares = [_mean(_mean(norm**2 for norm in steps) for steps in each) for each in self.norms]
        f0, f1, f2, f3, f4 = (_mean(column) for column in zip(*features, strict=True))
        samples = self.job.training.mini_batch / _mean(self._updates(each) for each in self.plans)
        return TrainedRun(str(self.path), (f0, f1, f2, f3, f4), _mean(squares), samples)

    def _updates(self, plans: Sequence[Mapping[str, Any]]) -> float:
        """Updates of a mini-batch in a round, on average over its clusters."""
        if self.job.training.update_per == "mini_batch":
            return 1.0
        return _mean(plan["num_micro_batches"] for plan in plans)

    def _problem(self, plans: Sequence["ClusterPlan"], lost: float) -> "RoundProblem":
        """The problem of a round, as far as convergence depends on it: nobody's speed, links or memory matter.

        Clusters weigh the same, as they do when the scheduler decides.
        """
        from collapipe.allocation import ClusterProblem, Convergence, Host, ModelCost, RoundProblem

        training = self.job.training
        clusters = []
        for plan in plans:
            first, *devices, last = (Host(stage.host_id, 0.0) for stage in plan.stages)
            options = (plan.num_micro_batches,)
            clusters.append(
                ClusterProblem(
                    first,
                    tuple(devices),
                    last,
                    {},
                    options,
                    weight=1 / len(plans),
                    loss_probability=lost,
                )
            )
        return RoundProblem(
            tuple(clusters),
            ModelCost(plans[0].stages[-1].stop_unit - 2),
            training.mini_batch,
            training.local_steps,
            update_per_micro_batch=training.update_per == "micro_batch",
            convergence=Convergence(num_rounds=len(self.norms)),
        )


def _events(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise InvalidInputError(f"{path} does not exist: {_HOW_TO_RECORD}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise _no_run(path, f"line {number}, which is not JSON") from error


def _no_run(path: Path, found: str) -> InvalidInputError:
    return InvalidInputError(f"{path} is no run: it has {found}; {_HOW_TO_RECORD}")


def _cluster_plan(document: Mapping[str, Any]) -> "ClusterPlan":
    from collapipe.allocation import ClusterPlan, LinkPlan, StagePlan

    stages = tuple(
        StagePlan(stage["host_id"], stage["start_unit"], stage["stop_unit"], stage["in_flight"])
        for stage in document["stages"]
    )
    links = tuple(
        LinkPlan(link["codec"] if link["codec"] in CODECS else "fp32") for link in document["links"]
    )
    return ClusterPlan(stages, document["num_micro_batches"], links)


def _check_comparable(recorded: Sequence[_Recording]) -> None:
    """Refuses runs of different models, data or ways to train."""

    def settings(job: JobConfig) -> dict[str, Any]:
        document = job.model_dump()
        return {
            f"{section}.{key}": value
            for section in ("task", "data", "model", "training")
            for key, value in document[section].items()
            if section != "training" or key not in _MAY_DIFFER
        }

    first = recorded[0]
    expected = settings(first.job)
    for other in recorded[1:]:
        found = settings(other.job)
        for key, value in expected.items():
            if found[key] != value:
                raise InvalidInputError(
                    f"{key} is {found[key]!r} in {other.path} and {value!r} in {first.path}, but constants "
                    "belong to one model, its data and its way to train: fit each alone"
                )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


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
                "relative_residual": _relative(run, value),
            }
            for run, value in zip(runs, fitted.fitted, strict=True)
        ],
    }


def _say_fit(runs: Sequence["TrainedRun"], fitted: "ConvergenceFit") -> None:
    table = Table("run", "squared gradient norm", "fitted", "off by", box=None, header_style="bold")
    for run, value in zip(runs, fitted.fitted, strict=True):
        table.add_row(
            run.name,
            f"{run.squared_gradient_norm:.4g}",
            f"{value:.4g}",
            f"{_relative(run, value):+.1%}",
        )
    Console().print(table)
    if fitted.r_squared is not None:
        say(f"R^2 {fitted.r_squared:.3f}")
    for position, constant in enumerate(fitted.constants):
        say(f"c{position} {_say_constant(constant)}")
    say(
        f"variance of a sample's gradient, no part of the term: {_say_constant(fitted.sampling_variance)}"
    )
    say(
        "\nfor jobs of this model, data and learning rate:\n\n"
        f"[schedule]\nconvergence_constants = {_rounded(fitted)}"
    )


def _say_constant(constant: "FittedConstant") -> str:
    uncertain = f" +- {constant.standard_error:.2g}" if constant.standard_error is not None else ""
    return f"{constant.value:.4g}{uncertain}" + (f": {constant.note}" if constant.note else "")


def _relative(run: "TrainedRun", fitted: float) -> float:
    return fitted / run.squared_gradient_norm - 1


def _rounded(fitted: "ConvergenceFit") -> list[float]:
    return [float(f"{constant.value:.4g}") for constant in fitted.constants]
