"""Reads the record of a training run for `collapipe fit`.

Importing this module needs the extra `scheduler`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from collapipe.allocation import (
    ClusterPlan,
    ClusterProblem,
    Convergence,
    Host,
    LinkPlan,
    ModelCost,
    RoundProblem,
    StagePlan,
)
from collapipe.allocation.round_model.convergence_fit import TrainedRun, convergence_features
from collapipe.codec_table import CODECS, UPLOAD_CODECS
from collapipe.documents import decode_json
from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig

_HOW_TO_RECORD = "write it with `collapipe train JOB.toml --json > RUN.jsonl`"
_MAY_DIFFER = {
    "rounds",
    "local_steps",
    "mini_batch",
    "update_per",
    "warm_up_steps",
    "recompute",
    "split_backward",
    "evaluate_every",
    "upload_codecs",
}
"""Keys of [training] in which the runs of one fit may differ."""


class _Stage(BaseModel):
    host_id: str
    start_unit: int
    stop_unit: int
    in_flight: int


class _Plan(BaseModel):
    stages: list[_Stage]
    links: list[dict[str, Any]]
    num_micro_batches: int
    upload_codec: Any = ""


class _RoundStarted(BaseModel):
    round_index: int
    attempt: int
    plans: list[_Plan]


class _Summary(BaseModel):
    gradient_norms: list[float]


class _RoundCommitted(BaseModel):
    num_rounds: int
    summaries: list[_Summary]


@dataclass(frozen=True)
class RecordedRun:
    """The committed rounds of a run, in order.

    Args:
        plans: For each round, the plan of each cluster.
        gradient_norms: For each round and cluster that was not late, the norm of each step.
        attempts: For each round, how often it was started. The last time it was committed.
    """

    path: Path
    job: JobConfig
    plans: Sequence[tuple[ClusterPlan, ...]]
    gradient_norms: Sequence[Sequence[Sequence[float]]]
    attempts: Sequence[int]

    def trained_run(self) -> TrainedRun:
        """Computes the features of docs/scheduling.md (11) and the mean squared norm of the gradient."""
        loss_probability = 1 - len(self.attempts) / sum(self.attempts)
        features = [
            convergence_features(self._problem(plans, loss_probability), plans)
            for plans in self.plans
        ]
        f0, f1, f2, f3, f4 = map(_mean, zip(*features, strict=True))
        squared_norm = _mean(
            _mean(_mean(norm**2 for norm in norms) for norms in clusters)
            for clusters in self.gradient_norms
        )
        updates = _mean(self._updates_per_mini_batch(plans) for plans in self.plans)
        samples_per_update = self.job.training.mini_batch / updates
        return TrainedRun(str(self.path), (f0, f1, f2, f3, f4), squared_norm, samples_per_update)

    def _updates_per_mini_batch(self, plans: Sequence[ClusterPlan]) -> float:
        if self.job.training.update_per == "mini_batch":
            return 1.0
        return _mean(plan.num_micro_batches for plan in plans)

    def _problem(self, plans: Sequence[ClusterPlan], loss_probability: float) -> RoundProblem:
        """Returns the problem of a round. Convergence does not depend on speeds, links and memory.

        All clusters have the same weight, as in the scheduler.
        """
        training = self.job.training
        clusters = []
        for plan in plans:
            first, *devices, last = (Host(stage.host_id, 0.0) for stage in plan.stages)
            clusters.append(
                ClusterProblem(
                    first,
                    tuple(devices),
                    last,
                    {},
                    (plan.num_micro_batches,),
                    weight=1 / len(plans),
                    loss_probability=loss_probability,
                )
            )
        return RoundProblem(
            tuple(clusters),
            ModelCost(plans[0].stages[-1].stop_unit - 2),
            training.mini_batch,
            training.local_steps,
            update_per_micro_batch=training.update_per == "micro_batch",
            convergence=Convergence(num_rounds=len(self.plans)),
        )


def read_run(path: Path) -> RecordedRun:
    """Reads the events of a run.

    Raises:
        InvalidInputError: The file has no run, several runs, or only a part of one.
    """
    job: JobConfig | None = None
    started: dict[int, _RoundStarted] = {}
    starts: Counter[int] = Counter()
    attempt_of_commit: dict[int, int] = {}
    committed: dict[int, _RoundCommitted] = {}
    for event in _events(path):
        try:
            match event["event"]:
                case "job":
                    job = JobConfig.from_dict(event["config"], str(path))
                case "round_started":
                    start = _RoundStarted.model_validate(event)
                    started[start.round_index] = start
                    starts[start.round_index] += 1
                case "round_committed":
                    commit = _RoundCommitted.model_validate(event)
                    index = commit.num_rounds - 1
                    attempt = started[index].attempt if index in started else 0
                    if attempt <= attempt_of_commit.get(index, -1):
                        raise InvalidInputError(
                            f"{path}: round {commit.num_rounds} is committed twice, so the file has several runs: "
                            "give one file for each run"
                        )
                    # A later attempt may repeat a committed round.
                    committed[index], attempt_of_commit[index] = commit, attempt
        except (KeyError, TypeError, ValidationError) as error:
            raise _no_run(path, f"an event that is not of a run ({error})") from error
    if job is None:
        raise _no_run(path, "no event with the job")
    if not committed:
        raise _no_run(path, "no committed round")
    rounds = range(len(committed))
    if sorted(committed) != list(rounds) or not committed.keys() <= started.keys():
        raise InvalidInputError(
            f"{path} has the rounds {', '.join(str(index + 1) for index in sorted(committed))}, but a run starts "
            "with round 1: join the files of a job that was resumed, `cat FIRST.jsonl RESUMED.jsonl > RUN.jsonl`"
        )
    return RecordedRun(
        path,
        job,
        [tuple(map(_cluster_plan, started[index].plans)) for index in rounds],
        # A late cluster has no norms.
        [
            [
                summary.gradient_norms
                for summary in committed[index].summaries
                if summary.gradient_norms
            ]
            for index in rounds
        ],
        [starts[index] for index in rounds],
    )


def check_comparable(runs: Sequence[RecordedRun]) -> None:
    """Raises `InvalidInputError` for runs that differ in model, data or optimizer."""
    first = runs[0]
    expected = _settings(first.job)
    for other in runs[1:]:
        for key, value in _settings(other.job).items():
            if value != expected[key]:
                raise InvalidInputError(
                    f"{key} is {value!r} in {other.path} and {expected[key]!r} in {first.path}, but the constants "
                    "belong to one model, its data and its optimizer: fit these runs separately"
                )


def _settings(job: JobConfig) -> dict[str, Any]:
    """Returns the settings in which the runs of one fit must agree, by dotted key."""
    document = job.model_dump()
    return {
        f"{section}.{key}": value
        for section in ("task", "data", "model", "training")
        for key, value in document[section].items()
        if section != "training" or key not in _MAY_DIFFER
    }


def _events(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise InvalidInputError(f"{path} does not exist: {_HOW_TO_RECORD}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read ({error}): {_HOW_TO_RECORD}") from error
    for number, line in enumerate(lines, start=1):
        try:
            yield decode_json(line)
        except ValueError as error:
            raise _no_run(path, f"line {number}, which is not JSON") from error


def _no_run(path: Path, found: str) -> InvalidInputError:
    return InvalidInputError(f"{path} is no run, because it has {found}: {_HOW_TO_RECORD}")


def _cluster_plan(plan: _Plan) -> ClusterPlan:
    codecs: list[Any] = [link.get("codec") for link in plan.links]
    return ClusterPlan(
        tuple(StagePlan(s.host_id, s.start_unit, s.stop_unit, s.in_flight) for s in plan.stages),
        plan.num_micro_batches,
        tuple(LinkPlan(codec if codec in CODECS else "fp32") for codec in codecs),
        plan.upload_codec if plan.upload_codec in UPLOAD_CODECS else "fp32",
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
