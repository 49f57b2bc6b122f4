"""One attempt of one cluster at one round: configure, evaluate, train, push."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

from collapipe.control_unit.cluster_pipeline import ClusterPipeline
from collapipe.control_unit.moment_copy import MomentCopy
from collapipe.control_unit.private_errors import private_errors
from collapipe.control_unit.recorded_rows import RecordedRows
from collapipe.errors import CancelledError, CollapipeError
from collapipe.evaluation import compute_metrics
from collapipe.job import JobConfig
from collapipe.secure_aggregation.cluster_masks import ClusterMasks
from collapipe.tasks import Cursor, MicroBatch, Task, begin_round, draw
from collapipe.telemetry import metrics
from collapipe.telemetry.spans import SPANS
from collapipe.v1 import control_unit_pb2, job_pb2, plan_pb2

T = TypeVar("T")

Emit = Callable[[control_unit_pb2.RunRoundResponse], None]

_TRACK = "round"
"""The track of the phases of a round in a trace."""


class ClusterRound:
    """Runs one attempt.

    Args:
        job: The job of the request, parsed.
        rows: Has the numbers of rows of earlier rounds.
        copy: The copy of optimizer states that runs beside the round, if any.
        masks: Hide what the cluster pushes, if the round is masked.
    """

    def __init__(
        self,
        request: control_unit_pb2.RunRoundRequest,
        job: JobConfig,
        task: Task,
        pipeline: ClusterPipeline,
        rows: RecordedRows,
        copy: MomentCopy | None = None,
        masks: ClusterMasks | None = None,
    ) -> None:
        self._request = request
        self._job = job
        self._task = task
        self._pipeline = pipeline
        self._rows = rows
        self._copy = copy
        self._masks = masks
        self._cluster_index = request.plan.cluster_index
        self._cluster_label = str(job.host_clusters[self._cluster_index])
        self._summary = job_pb2.RoundSummary()
        self._steps_done = 0
        self._ends_early = threading.Event()
        self._training_started: float | None = None

    def run(self, emit: Emit) -> None:
        """Runs the attempt to its prepared state, and closes the pipeline in any case.

        Raises:
            CollapipeError: The attempt failed. The last commit is intact.
        """
        try:
            self._run(emit)
        except CollapipeError as error:
            if self._copy is not None:
                # The next attempt begins at the restore point. After a late round, the next round goes on with the copy.
                self._copy.cancel()
            raise self._pipeline.failure_cause(error) from None
        finally:
            self._pipeline.close()

    @property
    def attempt(self) -> plan_pb2.Attempt:
        return self._request.attempt

    def end_training(self) -> None:
        """Makes the attempt train no further mini-batches after the present one. Any thread may call it."""
        self._ends_early.set()

    def abort(self, reason: CancelledError) -> None:
        """Makes the attempt end with `reason`. Any thread may call it."""
        self._pipeline.abort(reason)

    def progress(self) -> control_unit_pb2.RunRoundResponse:
        """Returns how far the attempt is. Aborts it if the pipeline is stalled."""
        self._pipeline.abort_if_stalled()
        started = self._training_started
        seconds = time.perf_counter() - started if started is not None else 0.0
        samples = self._steps_done * self._job.training.mini_batch
        progress = job_pb2.RoundProgress(
            cluster_index=self._cluster_index,
            steps_done=self._steps_done,
            local_steps=self._request.local_steps,
            loss=self._summary.losses[-1] if self._summary.losses else None,
            samples_per_second=samples / seconds if seconds else 0.0,
            stages=self._pipeline.stage_reports(),
            waiting_for=self._pipeline.waiting_for(),
            candidate_copied=self._has_copy(),
            training_began=started is not None,
            moved_bytes=self._pipeline.moved_bytes()
            + (self._copy.copied_bytes if self._copy is not None else 0),
            evaluated_rows=self._pipeline.num_predictions * self._evaluated_together,
        )
        return control_unit_pb2.RunRoundResponse(progress=progress)

    @property
    def _evaluated_together(self) -> int:
        """Held-out rows in a micro-batch."""
        plan = self._request.plan
        return max(1, self._job.training.mini_batch // plan.num_micro_batches)

    def _has_copy(self) -> bool:
        return self._copy is not None and self._copy.is_complete

    def _run(self, emit: Emit) -> None:
        request, pipeline, summary = self._request, self._pipeline, self._summary
        started = time.perf_counter()
        with SPANS.span(_TRACK, "configure"):
            summary.fetched.extend(pipeline.configure())
        summary.fetched_bytes = sum(transfer.bytes for transfer in summary.fetched)
        summary.configure_seconds = time.perf_counter() - started
        copy = self._copy
        if copy is not None:
            copy.start()
        if request.evaluate:
            started = time.perf_counter()
            with SPANS.span(_TRACK, "evaluate"):
                emit(control_unit_pb2.RunRoundResponse(evaluation=self._evaluate()))
            summary.evaluation_seconds = time.perf_counter() - started
        with SPANS.span(_TRACK, "train"):
            cursor = self._train(emit) if request.local_steps else request.base.cursor
        started = time.perf_counter()
        with SPANS.span(_TRACK, "finish"):
            num_samples = self._num_samples(cursor)
            states, pushed = pipeline.finish(num_samples, self._masks)
        summary.pushed.extend(pushed)
        summary.gather_seconds = time.perf_counter() - started
        if copy is not None and request.wait_for_copy:
            pipeline.wait_for(copy)
        summary.stages.extend(pipeline.stage_reports())
        summary.local_steps = self._steps_done
        state = plan_pb2.ClusterState(
            cluster_index=self._cluster_index,
            units=states,
            cursor=cursor,
            num_samples=num_samples,
            step_index=request.base.step_index + len(summary.losses),
        )
        prepared = control_unit_pb2.RoundPrepared(
            state=state,
            summary=summary,
            candidate_copied=self._has_copy(),
        )
        emit(control_unit_pb2.RunRoundResponse(prepared=prepared))

    def _train(self, emit: Emit) -> plan_pb2.DataCursor:
        """Trains the mini-batches of the round. Returns the position in the data after them."""
        training, summary = self._job.training, self._summary
        cluster = self._cluster_label
        base = self._request.base.cursor
        cursor = begin_round(Cursor(base.epoch, base.offset, base.num_rows), self._num_rows())
        num_micro_batches = self._request.plan.num_micro_batches
        # An optimizer step takes all micro-batches of a mini-batch, or each one alone.
        num_updates = num_micro_batches if training.update_per == "micro_batch" else 1
        size = num_micro_batches // num_updates

        def draw_mini_batches() -> Iterator[tuple[Sequence[MicroBatch], Cursor]]:
            after = cursor
            for _ in range(self._request.local_steps):
                with SPANS.span("data", "draw a mini-batch"):
                    indices, after = draw(
                        self._job.seed, self._cluster_index, after, training.mini_batch
                    )
                    batch = self._task.micro_batches(indices, num_micro_batches)
                yield batch, after

        def updates() -> Generator[Sequence[MicroBatch], None, None]:
            nonlocal cursor
            is_first = True
            with closing(_one_ahead(draw_mini_batches())) as mini_batches:
                for batch, after in mini_batches:
                    if self._ends_early.is_set() and not is_first:
                        return
                    cursor, is_first = after, False
                    yield from (batch[i : i + size] for i in range(0, num_micro_batches, size))

        self._training_started = time.perf_counter()
        with closing(updates()) as batches:
            for loss, norm in self._pipeline.train(batches):
                summary.losses.append(loss)
                summary.gradient_norms.append(norm)
                if len(summary.losses) % num_updates == 0:
                    self._steps_done += 1
                    metrics.TRAINED_SAMPLES.labels(cluster).inc(training.mini_batch)
                    metrics.TRAINING_LOSS.labels(cluster).set(loss)
                    emit(self.progress())
        summary.training_seconds = time.perf_counter() - self._training_started
        return plan_pb2.DataCursor(
            epoch=cursor.epoch, offset=cursor.offset, num_rows=cursor.num_rows
        )

    def _num_samples(self, cursor: plan_pb2.DataCursor) -> int:
        """Returns the weight of the cluster in the average: its rows, in proportion to the mini-batches that it has trained.

        Private updates all have the same weight, so that none moves the sum by more than its bound.
        """
        if self._job.privacy.is_on:
            return 1
        all_steps = self._job.training.local_steps
        if self._steps_done in (0, all_steps):  # An evaluation trains none.
            return cursor.num_rows
        return max(1, round(cursor.num_rows * self._steps_done / all_steps))

    def _num_rows(self) -> int:
        """Returns the rows that the first attempt at this round found, so that a repetition uses the same rows.

        Attempts before the last return to a commit without optimizer states do not count.
        """
        attempt, anew_since = self._request.attempt, self._request.anew_since
        place = attempt.job_id, attempt.round_index
        num_rows = self._rows.find(*place, anew_since)
        if num_rows is None:
            with private_errors(self._job):
                num_rows = self._task.refresh()
            first_round = self._request.restore_num_rounds
            self._rows.record(*place, num_rows, anew_since, first_round)
        return num_rows

    def _evaluate(self) -> job_pb2.EvaluationSums:
        if not self._task.num_held_out_rows:
            return job_pb2.EvaluationSums()
        batches = self._task.held_out_micro_batches(self._evaluated_together)
        # All held-out rows of an instruction task may be too long.
        predictions = self._pipeline.evaluate(batches) if batches else []
        sums = self._task.sums(predictions)
        for name, value in compute_metrics(self._job.task.kind, sums).items():
            metrics.EVALUATION_METRIC.labels(self._cluster_label, name).set(value)
        return job_pb2.EvaluationSums(sums=sums)


def _one_ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """Yields the items of an iterator. A thread makes the next one meanwhile; its errors are raised here."""
    with ThreadPoolExecutor(1, thread_name_prefix="next mini-batch") as thread:
        made = thread.submit(next, items, None)
        while (item := made.result()) is not None:
            made = thread.submit(next, items, None)
            yield item
