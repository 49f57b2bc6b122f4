"""One attempt of one cluster at one round: configure, evaluate, train, gather."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from collapipe.control_unit.cluster_pipeline import ClusterPipeline
from collapipe.documents import read_document, write_document
from collapipe.errors import CancelledError, CollapipeError
from collapipe.job import JobConfig
from collapipe.tasks import Cursor, MicroBatch, Task, begin_round, draw
from collapipe.telemetry import metrics
from collapipe.v1 import control_unit_pb2, job_pb2, plan_pb2

Emit = Callable[[control_unit_pb2.RunRoundResponse], None]


class ClusterRound:
    """Runs one attempt.

    Args:
        job: The job of the request, parsed.
        state_directory: Directory of the job on this control unit's disk.
    """

    def __init__(
        self,
        request: control_unit_pb2.RunRoundRequest,
        job: JobConfig,
        task: Task,
        pipeline: ClusterPipeline,
        state_directory: Path,
    ) -> None:
        self._request = request
        self._job = job
        self._task = task
        self._pipeline = pipeline
        self._state_directory = state_directory
        self._cluster_index = request.plan.cluster_index
        self._summary = job_pb2.RoundSummary()
        self._steps_done = 0
        self._training_started: float | None = None

    def run(self, emit: Emit) -> None:
        """Runs the attempt to its prepared state, and closes the pipeline in any case.

        Raises:
            CollapipeError: The attempt failed. The last commit is intact.
        """
        try:
            self._run(emit)
        except CollapipeError as error:
            raise self._pipeline.failure_cause(error) from None
        finally:
            self._pipeline.close()

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
        )
        return control_unit_pb2.RunRoundResponse(progress=progress)

    def _run(self, emit: Emit) -> None:
        request, pipeline, summary = self._request, self._pipeline, self._summary
        started = time.perf_counter()
        summary.fetched_bytes = pipeline.configure()
        summary.configure_seconds = time.perf_counter() - started
        if request.evaluate:
            started = time.perf_counter()
            emit(control_unit_pb2.RunRoundResponse(evaluation=self._evaluate()))
            summary.evaluation_seconds = time.perf_counter() - started
        cursor = self._train(emit) if request.local_steps else request.base.cursor
        states = pipeline.finish()
        started = time.perf_counter()
        summary.gathered.extend(pipeline.gather_weights_and_moments(states))
        summary.gather_seconds = time.perf_counter() - started
        summary.stages.extend(pipeline.stage_reports())
        state = plan_pb2.ClusterState(
            cluster_index=self._cluster_index,
            units=states,
            cursor=cursor,
            num_samples=cursor.num_rows,
            step_index=request.base.step_index + len(summary.losses),
        )
        prepared = control_unit_pb2.RoundPrepared(state=state, summary=summary)
        emit(control_unit_pb2.RunRoundResponse(prepared=prepared))

    def _train(self, emit: Emit) -> plan_pb2.DataCursor:
        """Trains the mini-batches of the round. Returns the position in the data after them."""
        training, summary = self._job.training, self._summary
        cluster = str(self._cluster_index)
        base = self._request.base.cursor
        cursor = begin_round(Cursor(base.epoch, base.offset, base.num_rows), self._num_rows())
        self._training_started = time.perf_counter()
        for _ in range(self._request.local_steps):
            indices, cursor = draw(self._job.seed, self._cluster_index, cursor, training.mini_batch)
            batch = self._task.micro_batches(indices, self._request.plan.num_micro_batches)
            for micro_batches in self._batches_of_updates(batch):
                loss, norm = self._pipeline.run_mini_batch(len(summary.losses), micro_batches)
                summary.losses.append(loss)
                summary.gradient_norms.append(norm)
            self._steps_done += 1
            metrics.TRAINED_SAMPLES.labels(cluster).inc(training.mini_batch)
            metrics.TRAINING_LOSS.labels(cluster).set(summary.losses[-1])
            emit(self.progress())
        summary.training_seconds = time.perf_counter() - self._training_started
        return plan_pb2.DataCursor(
            epoch=cursor.epoch, offset=cursor.offset, num_rows=cursor.num_rows
        )

    def _batches_of_updates(self, batch: Sequence[MicroBatch]) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each optimizer step: all of the mini-batch, or each one alone."""
        if self._job.training.update_per == "micro_batch":
            yield from ([micro_batch] for micro_batch in batch)
        else:
            yield batch

    def _num_rows(self) -> int:
        """Returns the rows that the first attempt at this round found, so that a retry uses the same rows."""
        path = self._state_directory / "round.json"
        round_index = self._request.attempt.round_index
        recorded = read_document(path)
        if recorded is not None and recorded["round_index"] == round_index:
            return int(recorded["num_rows"])
        num_rows = self._task.refresh()
        write_document(path, {"round_index": round_index, "num_rows": num_rows})
        return num_rows

    def _evaluate(self) -> job_pb2.Evaluation:
        size = max(1, self._job.training.mini_batch // self._request.plan.num_micro_batches)
        predictions = self._pipeline.evaluate(self._task.held_out_micro_batches(size))
        value = self._task.score(predictions)
        metrics.EVALUATION_METRIC.labels(str(self._cluster_index), self._task.metric).set(value)
        return job_pb2.Evaluation(
            num_rounds=self._request.attempt.round_index,
            metric=self._task.metric,
            value=value,
            num_rows=self._task.num_held_out_rows,
            cluster_index=self._cluster_index,
        )
