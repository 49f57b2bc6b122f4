"""The stages of one cluster for one attempt: the control unit's own stage and those on other hosts."""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from collapipe.control_unit.moment_copy import MomentCopy
from collapipe.control_unit.remote_stage import RemoteStage
from collapipe.control_unit.stage_configuration import check_round, stage_configuration
from collapipe.control_unit.stage_words import error_that_ends, what_stages_wait_for
from collapipe.errors import AttemptFailedError, CollapipeError, DivergedError
from collapipe.job import JobConfig
from collapipe.job_life import stage_progress
from collapipe.job_life.failure_cause import explains, explains_itself
from collapipe.job_life.failures import failure_of
from collapipe.job_life.stage_progress import HostSeen, StagePhase
from collapipe.rpc import SIGN_OF_LIFE_SECONDS
from collapipe.secure_aggregation.cluster_masks import ClusterMasks
from collapipe.stage_host import HostResources, StageSession
from collapipe.stage_runtime import clip_scale, cut_into_slices
from collapipe.tasks import MicroBatch
from collapipe.tensors import LABELS, Frame, FrameKind
from collapipe.v1 import control_unit_pb2, generation_pb2, job_pb2, plan_pb2, stage_pb2

_BLAME_SECONDS = 0.5
"""How long to wait for further failures before blaming a host. Neighbours notice a dead host first."""


class ClusterPipeline:
    """Configures, drives and gathers the stages of a plan.

    Args:
        job: The job of the request, parsed.
        own_address: Address of the control unit, from which stages fetch units.
        noise_secret: As in `stage_configuration`.

    Raises:
        InvalidInputError: The plan does not fit the job and the model.
    """

    def __init__(
        self,
        request: control_unit_pb2.RunRoundRequest,
        job: JobConfig,
        resources: HostResources,
        own_address: str,
        noise_secret: bytes = b"",
    ) -> None:
        check_round(request, job)
        self._request = request
        self._job = job
        self._resources = resources
        self._own_address = own_address
        self._noise_secret = noise_secret
        self._stages = request.plan.stages
        self._aborted: CollapipeError | None = None
        self._abort_lock = threading.Lock()
        self._take_prediction: Callable[[Frame], None] = lambda frame: None
        """What happens to the predictions that reach the first stage."""
        self._reports = [
            job_pb2.StageReport(
                host_id=stage.host_id,
                start_unit=stage.start_unit,
                stop_unit=stage.stop_unit,
                times=stage_pb2.StageTimes(),
            )
            for stage in self._stages
        ]
        self.num_predictions = 0
        """Micro-batches that were evaluated so far."""
        self._pending_scale = 0.0
        self._progress = stage_progress.begin(
            job.schedule.silence_seconds, request.predicted_step_seconds, time.monotonic()
        )
        self._progress_lock = threading.Lock()
        self._local = StageSession(self._configuration(0), resources, self._receive_backward)
        self._remotes: list[RemoteStage] = []

    def configure(self) -> list[job_pb2.WeightsTransfer]:
        """Brings the units of every stage into their state. Returns what each host had to fetch."""
        for index, stage in enumerate(self._stages[1:], start=1):
            if self._aborted is not None:  # `close` ends the sessions that are open already.
                raise self._aborted
            remote = RemoteStage(
                stage,
                self._configuration(index),
                self._resources.channels,
                self._job.schedule.silence_seconds,
                self.abort,
            )
            self._remotes.append(remote)
        configured = [self._local.configure()]
        configured += [remote.expect("configured").configured for remote in self._remotes]
        return self._transfers((each.fetched_bytes, each.fetch_seconds) for each in configured)

    def _configuration(self, stage_index: int) -> stage_pb2.ConfigureStage:
        return stage_configuration(
            self._request, self._job, stage_index, self._own_address, self._noise_secret
        )

    def train(self, batches: Iterable[Sequence[MicroBatch]]) -> Iterator[tuple[float, float]]:
        """Trains one optimizer step for each item of `batches`, which are the micro-batches of the step.

        With clipping, the next step begins when every stage has reported its gradient norms. The last update
        stays pending until `finish`. Without clipping, nothing waits for the norms: the next step begins as
        soon as the control unit's own stage is ready, so results are collected one step late.

        Yields:
            For each step, the mean loss of the targets, and the gradient norm of the whole model before
            clipping.

        Raises:
            DivergedError: The loss or the gradient norm is not finite.
            CollapipeError: A stage failed.
        """
        steps_ahead = 0 if self._job.training.clip_norm else 1
        not_collected: deque[tuple[int, stage_pb2.StepDone]] = deque()
        for step_index, micro_batches in enumerate(batches):
            with self._progress_lock:
                now = time.monotonic()
                self._progress = stage_progress.enter_step(self._progress, step_index, now)
            command = stage_pb2.RunStep(
                step_index=step_index,
                num_micro_batches=len(micro_batches),
                num_targets=sum(micro_batch.num_targets for micro_batch in micro_batches),
                pending_gradient_scale=self._pending_scale,
            )
            self._command(stage_pb2.RunStageRequest(run_step=command), f"run step {step_index}")
            self._feed(FrameKind.FORWARD, step_index, micro_batches)
            with self._stages_work():
                own = self._local.run_step(command)
            not_collected.append((step_index, own))
            if len(not_collected) > steps_ahead:
                yield self._collect(*not_collected.popleft())
        while not_collected:
            yield self._collect(*not_collected.popleft())

    def _collect(self, step_index: int, own: stage_pb2.StepDone) -> tuple[float, float]:
        """Waits for the results of the other stages. Returns the loss and the gradient norm of a step."""
        with self._stages_work():
            results = [own, *(remote.expect("step_done").step_done for remote in self._remotes)]
        with self._progress_lock:
            self._progress = stage_progress.end_step(self._progress, time.monotonic())
        loss = results[-1].loss
        squares = itertools.chain.from_iterable(r.squared_gradient_norms for r in results)
        norm = math.sqrt(math.fsum(squares))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(
                f"the loss is {loss} and the gradient norm {norm} in step {step_index}"
            )
        self._pending_scale = clip_scale(norm, self._job.training.clip_norm)
        for report, result in zip(self._reports, results, strict=True):
            _add_times(report, result.times)
        return loss, norm

    def _diverged(self, what: str, host_id: str = "") -> DivergedError:
        training = self._job.training
        return DivergedError(
            f"{what} of round {self._request.attempt.round_index + 1}, at a peak learning rate of {training.learning_rate} and "
            f"clip_norm = {training.clip_norm}: the model of the last commit is intact; lower training.learning_rate, "
            "lengthen training.warm_up_steps, or look for bad values in the data",
            host_id,
        )

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Returns the predictions for each micro-batch, in order."""
        self._enter(StagePhase.EVALUATING)
        predictions: list[Tensor] = []

        def take(frame: Frame) -> None:
            predictions.append(frame.tensors["predictions"])
            self.num_predictions = len(predictions)

        self._take_prediction = take
        command = stage_pb2.RunEvaluation(
            num_micro_batches=len(micro_batches),
            has_labels=any(LABELS in micro_batch.tensors for micro_batch in micro_batches),
        )
        self._command(stage_pb2.RunStageRequest(run_evaluation=command), "evaluate")
        self._feed(FrameKind.EVALUATE, 0, micro_batches)
        with self._stages_work():
            self._local.run_evaluation(command)
            for remote in self._remotes:
                remote.expect("evaluation_done")
        return predictions

    def generate(
        self,
        prompts: Sequence[Tensor],
        options: generation_pb2.GenerationOptions,
        take: Callable[[int, int], bool],
        *,
        feeds_back: bool,
    ) -> None:
        """Generates an answer to each prompt, with as many under way as the in-flight window of the first stage allows.

        Args:
            prompts: Token ids, each [1, length].
            take: Takes the number of a prompt and the next token of its answer. Returns whether the answer goes on.
            feeds_back: Whether each token is the input of the next pass. Otherwise the first pass gives all tokens.
        """
        self._enter(StagePhase.GENERATING)
        num_sequences = min(len(prompts), self._stages[0].in_flight)
        command = stage_pb2.RunGeneration(num_sequences=num_sequences, options=options)
        self._command(stage_pb2.RunStageRequest(run_generation=command), "generate")
        waiting = iter(enumerate(prompts))
        under_way: dict[int, int] = {}

        def feed(sequence: int, pass_index: int, tokens: Tensor) -> None:
            tensors = {"input_ids": tokens}
            self._local.mailbox.put(Frame(FrameKind.GENERATE, pass_index, sequence, tensors))

        def begin(sequence: int) -> None:
            number, prompt = next(waiting, (None, None))
            if number is not None and prompt is not None:
                under_way[sequence] = number
                feed(sequence, 0, prompt)
                return
            under_way.pop(sequence, None)
            if not under_way:
                self._local.mailbox.put(Frame(FrameKind.END_GENERATION, 0, 0))

        def go_on(frame: Frame) -> None:
            tokens = frame.tensors["predictions"]
            if frame.micro_batch not in under_way or tokens.numel() != 1:
                raise AttemptFailedError(
                    f"the stages sent {tokens.numel()} tokens for sequence {frame.micro_batch}, but 1 token for one of the "
                    f"sequences {sorted(under_way)} comes next: run the same version everywhere"
                )
            if not take(under_way[frame.micro_batch], int(tokens)):
                begin(frame.micro_batch)
            elif feeds_back:
                feed(frame.micro_batch, frame.step_index + 1, tokens)

        self._take_prediction = go_on
        for sequence in range(num_sequences):
            begin(sequence)
        with self._stages_work():
            self._local.run_generation(command)
            for remote in self._remotes:
                remote.expect("generation_done")

    def finish(
        self, num_samples: int, masks: ClusterMasks | None = None
    ) -> tuple[list[plan_pb2.UnitState], list[job_pb2.WeightsTransfer]]:
        """Applies the last update, and waits until the edge server has the new weights of every unit.

        A round that is committed already pushes nothing.

        Args:
            num_samples: Weight of the cluster in the average.
            masks: Hide what the stages push. `None` if the round is not masked.

        Returns:
            The state of every unit, in order, and what each host pushed to the edge server.
        """
        self._enter(StagePhase.FINISHING)
        own, *others = (self._finish_command(stage, num_samples, masks) for stage in self._stages)
        for remote, command in zip(self._remotes, others, strict=True):
            remote.send(stage_pb2.RunStageRequest(finish=command), "finish the round")
        finished = [self._local.finish(own)]
        finished += [remote.expect("finished").finished for remote in self._remotes]
        states = [state for result in finished for state in result.units]
        return states, self._transfers((each.pushed_bytes, each.push_seconds) for each in finished)

    def _finish_command(
        self, stage: plan_pb2.Stage, num_samples: int, masks: ClusterMasks | None
    ) -> stage_pb2.FinishRound:
        """Returns the command to one stage, with the masks of its own units only."""
        command = stage_pb2.FinishRound(
            pending_gradient_scale=self._pending_scale,
            edge_address="" if self._request.is_committed else self._request.edge_address,
            edge_host_id=self._request.edge_host_id,
            num_samples=num_samples,
        )
        if masks is not None:
            command.total_samples = self._request.masked.total_samples
            for unit_index in range(stage.start_unit, stage.stop_unit):
                keys = masks.unit_masks(unit_index)
                command.masks.add(
                    unit_index=unit_index, added=keys.added, subtracted=keys.subtracted
                )
        return command

    def wait_for(self, copy: MomentCopy) -> None:
        """Waits for the end of a copy; raises the error that ends the attempt meanwhile."""
        self._enter(StagePhase.COPYING)
        while not copy.wait(SIGN_OF_LIFE_SECONDS):
            if self._aborted is not None:
                raise self._aborted

    def abort(self, reason: CollapipeError) -> None:
        """Makes everything that runs or waits end with `reason`. Any thread may call it."""
        with self._abort_lock:
            if self._aborted is not None:
                return
            self._aborted = reason
        self._local.abort(reason)
        for remote in self._remotes:
            remote.abort(reason)

    def failure_cause(self, first: CollapipeError) -> CollapipeError:
        """Returns the failure that explains why the attempt failed, given the one that was noticed first.

        Waits a moment for the failures of other hosts, unless the first one explains itself.
        """
        if explains_itself(failure_of(first)):
            return first
        time.sleep(_BLAME_SECONDS)
        errors = [(self._aborted or first, ""), (first, "")]
        errors += [(each.failure, each.host_id) for each in self._remotes if each.failure]
        # Of those that explain equally much, the first one is taken.
        cause, _ = max(errors, key=lambda each: explains(failure_of(each[0]), each[1]))
        if isinstance(cause, DivergedError):
            return self._diverged(str(cause), cause.host_id)
        return cause

    def close(self) -> None:
        for remote in self._remotes:
            # `abort` may have made the caller end before it has reached each remote stage, which would work on.
            if self._aborted is not None:
                remote.abort(self._aborted)
            remote.close()
        self._local.close()

    def stage_reports(self) -> list[job_pb2.StageReport]:
        """Returns the times of each stage since the beginning of the attempt."""
        return self._reports

    def moved_bytes(self) -> int:
        """Returns the bytes of weights and optimizer states that the stages have fetched and pushed so far."""
        return self._local.moved_bytes + sum(r.progress.moved_bytes for r in self._remotes)

    def waiting_for(self) -> str:
        """Returns what every stage waited for at the last look, in words; empty while some stage computes and is not slow."""
        return what_stages_wait_for(self._progress, time.monotonic())

    def abort_if_stalled(self) -> None:
        """Looks at the stages. Aborts the attempt if micro-batches are under way, and nothing has moved for too long."""
        hosts = {self._stages[0].host_id: HostSeen(self._local.waiting_for, self._local.is_idle)}
        received_bytes = self._local.received_bytes
        for remote in self._remotes:
            told = remote.progress
            hosts[remote.host_id] = HostSeen(told.waiting_for, told.is_idle)
            received_bytes += told.received_bytes
        with self._progress_lock:
            now = time.monotonic()
            progress = stage_progress.see(self._progress, hosts, received_bytes, now)
            self._progress = progress
        if trouble := progress.trouble(now):
            self.abort(error_that_ends(trouble, progress))

    def _enter(self, phase: StagePhase) -> None:
        with self._progress_lock:
            self._progress = stage_progress.enter(self._progress, phase)

    @contextmanager
    def _stages_work(self) -> Iterator[None]:
        """The control unit waits for stages that have micro-batches. If nothing moves meanwhile, the attempt is aborted."""
        with self._progress_lock:
            self._progress = stage_progress.work(self._progress, time.monotonic())
        try:
            yield
        finally:
            with self._progress_lock:
                self._progress = stage_progress.rest(self._progress)

    def _transfers(self, moved: Iterable[tuple[int, float]]) -> list[job_pb2.WeightsTransfer]:
        """Returns the bytes and seconds of the stages by their hosts, without those that moved nothing."""
        return [
            job_pb2.WeightsTransfer(host_id=stage.host_id, bytes=num_bytes, seconds=seconds)
            for stage, (num_bytes, seconds) in zip(self._stages, moved, strict=True)
            if num_bytes
        ]

    def _command(self, request: stage_pb2.RunStageRequest, task: str) -> None:
        for remote in self._remotes:
            remote.send(request, task)

    def _feed(self, kind: FrameKind, step_index: int, micro_batches: Sequence[MicroBatch]) -> None:
        # An evaluation has no backward passes, so its micro-batches stay whole.
        num_slices = self._request.plan.num_slices if kind is FrameKind.FORWARD else 1
        for number, micro_batch in enumerate(micro_batches):
            for index, part in enumerate(cut_into_slices(micro_batch.tensors, num_slices or 1)):
                if LABELS in part:
                    labels = {LABELS: part.pop(LABELS)}
                    self._send_labels(Frame(FrameKind.LABELS, step_index, number, labels, index))
                self._local.mailbox.put(Frame(kind, step_index, number, part, index))

    def _send_labels(self, labels: Frame) -> None:
        """Sends labels to the last stage, so that no stage between sees them."""
        if self._remotes:
            self._remotes[-1].send_labels(labels)
        else:
            self._local.mailbox.put(labels)

    def _receive_backward(self, frame: Frame) -> None:
        """Takes the frames that leave the first stage backward. Only predictions are of use here."""
        if frame.kind is FrameKind.PREDICTION:
            self._take_prediction(frame)


def _add_times(report: job_pb2.StageReport, times: stage_pb2.StageTimes) -> None:
    """Adds the times of one step to a report, and sets its busy ratio to that of the step."""
    busy = times.forward_seconds + times.backward_seconds
    report.busy_ratio = busy / times.total_seconds if times.total_seconds else 0.0
    report.times.forward_seconds += times.forward_seconds
    report.times.backward_seconds += times.backward_seconds
    report.times.waiting_seconds += times.waiting_seconds
    report.times.total_seconds += times.total_seconds
