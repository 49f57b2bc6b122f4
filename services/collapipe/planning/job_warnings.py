"""The rules by which a person is warned of a job that goes on, but will not do what they want."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from collapipe.emulation.device_profiles import MAX_OVERRUN_RATIO
from collapipe.finding import Finding
from collapipe.job import JobConfig
from collapipe.telemetry.sources import Series
from collapipe.telemetry.sources.samples import BUSY, increase
from collapipe.v1 import job_pb2, scheduler_pb2, stage_pb2

JobWarning = scheduler_pb2.JobWarning

_LONG_WARM_UP = 0.5
"""A warm-up that takes more than this part of the training is too long."""
_SAME_ANSWERS = 3
"""So many evaluations in a row with one answer are told, but only after a quarter of the rounds, because many models begin so.
Of the last evaluation, one is enough."""
_LEAST_STEPS, _MANY_STEPS = 40, 1000
"""The loss is looked at after so many steps, in the second half of the job or after many steps, and after twice the warm-up."""
_LEAST_FALL = 0.02
"""A loss that falls by a smaller part from the first quarter of the steps to the last one, and by less than twice the standard
error, does not fall."""
_MOST_NOISE = 0.05
"""With a larger standard error, as a part of the loss, nothing is said."""
_MOST_LOSSES = 4000
_LEAST_BUSY, _WAITING_SECONDS, _WAITING_ROUNDS = 0.05, 10.0, 2
"""A device that is busy for a smaller share, and waits for more seconds, in so many rounds in a row only waits."""
_LEAST_BUSY_SECONDS = 5.0
_OVERRUN = "collapipe_emulation_overrun_seconds_total"
_MOST_NAMED = 3


def long_warm_up(job: JobConfig) -> JobWarning | None:
    """Warns if the learning rate rises during most of the training."""
    warm_up, total = job.training.num_warm_up_steps(job.total_steps), job.total_steps
    if warm_up <= _LONG_WARM_UP * total:
        return None
    return JobWarning(
        code=scheduler_pb2.WARNING_CODE_LONG_WARM_UP,
        message=f"the warm-up takes {warm_up} steps, but the whole training has {total}, so the learning rate is low for most of it",
        advice='set training.warm_up_steps to "auto", which is a tenth of the training, or train more rounds',
    )


def random_base(job: JobConfig) -> JobWarning | None:
    """Warns if LoRA freezes weights that nobody has trained."""
    if job.model.lora is None or job.model.pretrained:
        return None
    return JobWarning(
        code=scheduler_pb2.WARNING_CODE_RANDOM_BASE,
        message="model.lora trains an adapter of weights that are random, and stay as they are",
        advice="set model.pretrained to a trained model, or remove model.lora to train all weights",
    )


def few_rows(job: JobConfig, num_rows: Sequence[int]) -> JobWarning | None:
    """Warns if a cluster sees its rows several times in a round.

    Args:
        num_rows: Training rows of each cluster.
    """
    wanted, fewest = job.training.local_steps * job.training.mini_batch, min(num_rows)
    if fewest >= wanted:
        return None
    steps = max(1, fewest // job.training.mini_batch)
    return JobWarning(
        code=scheduler_pb2.WARNING_CODE_FEW_ROWS,
        message=f"cluster {num_rows.index(fewest)} has {fewest} training rows, but a round takes {wanted}, so it repeats its rows "
        f"{wanted / max(fewest, 1):.1f} times in every round",
        advice=f"add rows, or set training.local_steps to {steps}",
    )


def find_passes(job: JobConfig, num_rows: Sequence[int]) -> Finding:
    """Says how often the training takes each row, given the training rows of each cluster."""
    training, num_all = job.training, sum(num_rows)
    steps = training.rounds * training.local_steps * len(num_rows)
    passes = steps * training.mini_batch / max(num_all, 1)
    return Finding(
        "note",
        "training",
        f"{steps:,} steps of {training.mini_batch} rows take each of the {num_all:,} training rows {float(f'{passes:.2g}'):,g} times on average",
    )


class OneAnswer:
    """Looks for a model that gives all rows the same answer."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def look_at(self, job: JobConfig, evaluation: job_pb2.Evaluation) -> JobWarning | None:
        """Looks at the next evaluation."""
        self._in_a_row = self._in_a_row + 1 if evaluation.one_answer else 0
        is_last = evaluation.num_rounds >= job.training.rounds
        is_late = 4 * evaluation.num_rounds >= job.training.rounds
        lasts = self._in_a_row >= _SAME_ANSWERS and is_late
        if not self._in_a_row or not (lasts or is_last):
            return None
        answers = {"ner": "tags every word O", "translation": "translates every row alike"}
        answer = answers.get(job.task.kind, "gives every row the same label")
        return JobWarning(
            code=scheduler_pb2.WARNING_CODE_ONE_CLASS,
            message=f"after {evaluation.num_rounds} round{'s' * (evaluation.num_rounds != 1)}, the model {answer} ({evaluation.num_rows} held-out rows)",
            advice="train more rounds or steps, raise training.learning_rate, and look whether most training rows have this answer",
        )


class FlatLoss:
    """Compares the loss of the last quarter of all steps so far with that of the first quarter."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        """Means over the clusters, each of `_steps_of_mean` steps."""
        self._steps_of_mean = 1
        self._num_rounds = 0

    def look_at(self, job: JobConfig, committed: scheduler_pb2.RoundCommitted) -> JobWarning | None:
        """Looks at the next round. It ignores repeated rounds, and jobs that began before this process."""
        if committed.num_rounds != self._num_rounds + 1:
            return None
        self._num_rounds += 1
        steps = max((len(s.losses) for s in committed.summaries), default=0)
        for i in range(0, steps - self._steps_of_mean + 1, self._steps_of_mean):
            part = [x for s in committed.summaries for x in s.losses[i : i + self._steps_of_mean]]
            self._losses.append(statistics.fmean(part))
        while len(self._losses) > _MOST_LOSSES:
            pairs = zip(self._losses[::2], self._losses[1::2], strict=False)
            self._losses, self._steps_of_mean = (
                [(a + b) / 2 for a, b in pairs],
                (2 * self._steps_of_mean),
            )
        num_steps = len(self._losses) * self._steps_of_mean
        warm_up = job.training.num_warm_up_steps(job.total_steps)
        if num_steps < max(_LEAST_STEPS, min(job.total_steps / 2, _MANY_STEPS), 2 * warm_up):
            return None
        size = len(self._losses) // 4
        first, last = self._losses[:size], self._losses[-size:]
        before, now = statistics.fmean(first), statistics.fmean(last)
        noise = math.sqrt((statistics.variance(first) + statistics.variance(last)) / size)
        if before - now >= min(_LEAST_FALL * abs(before), 2 * noise):
            return None
        if noise > _MOST_NOISE * abs(before):
            return None
        return JobWarning(
            code=scheduler_pb2.WARNING_CODE_FLAT_LOSS,
            message=f"the loss does not fall: its mean was {before:.4f} in the first quarter of {num_steps} steps, and is {now:.4f} in the "
            "last quarter",
            advice="try another training.learning_rate (ten times as large if the loss stays, a tenth if it rises), and look whether "
            "the labels belong to their texts",
        )


class WaitingDevices:
    """Looks for devices that wait during nearly the whole training of their rounds."""

    def __init__(self) -> None:
        self._rounds: dict[str, int] = {}
        """How many rounds in a row each of them has only waited, by host id."""

    def look_at(self, committed: scheduler_pb2.RoundCommitted) -> JobWarning | None:
        """Looks at the next round."""
        waiting = {
            stage.host_id: stage.times
            for index, summary in enumerate(committed.summaries)
            if index not in committed.late_clusters  # Those show how far they came.
            for stage in summary.stages[1:-1]  # Neither the control unit nor the edge server.
            if _only_waits(stage.times)
        }
        self._rounds = {host_id: self._rounds.get(host_id, 0) + 1 for host_id in waiting}
        found = [host_id for host_id in waiting if self._rounds[host_id] >= _WAITING_ROUNDS]
        if not found:
            return None
        named = ", ".join(
            f"{host_id} waited for {waiting[host_id].waiting_seconds:.1f} of {waiting[host_id].total_seconds:.1f} s"
            for host_id in found[:_MOST_NAMED]
        )
        more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        return JobWarning(
            code=scheduler_pb2.WARNING_CODE_WAITING_DEVICE,
            message=f"in the training of round {committed.num_rounds}, {named}{more}, as in the round before",
            advice='`collapipe plan explain` names what they wait for; schedule.strategy = "dssra" or "proportional" divides the blocks '
            "by speed, and fewer devices may be as fast",
        )


def _only_waits(times: stage_pb2.StageTimes) -> bool:
    busy = times.forward_seconds + times.backward_seconds
    return busy < _LEAST_BUSY * times.total_seconds and times.waiting_seconds > _WAITING_SECONDS


def slow_emulation(series: Iterable[Series], hosts: Mapping[str, str]) -> JobWarning | None:
    """Warns if real work takes longer than on the emulated devices.

    Args:
        series: Counters of a round.
        hosts: Ids of the hosts of the job by instance.
    """
    busy, overrun = dict.fromkeys(hosts.values(), 0.0), dict.fromkeys(hosts.values(), 0.0)
    for one in series:
        host_id = hosts.get(one.instance)
        if host_id is not None and one.name in (*BUSY, _OVERRUN):
            counted = overrun if one.name == _OVERRUN else busy
            counted[host_id] += increase(one) or 0.0
    worst = max(overrun, key=overrun.__getitem__, default="")
    total = sum(overrun.values())
    busy_seconds = sum(busy[host_id] for host_id in busy if overrun[host_id])
    if busy_seconds < _LEAST_BUSY_SECONDS or total <= MAX_OVERRUN_RATIO * busy_seconds:
        return None
    return JobWarning(
        code=scheduler_pb2.WARNING_CODE_SLOW_EMULATION,
        message=f"this machine is slower than the devices that it emulates: their work took {total:.1f} s longer than it should, "
        f"{total / busy_seconds:.0%} of the {busy_seconds:.1f} s that they were busy, most of it on {worst}; the times of rounds are too long",
        advice="raise time_scale of the emulation, use a smaller model or fewer devices, or emulate slower devices",
    )
