"""The pipeline of one cluster for one attempt: the control unit's own stage and those on other hosts."""

import itertools
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from collapipe.control_unit.remote_stage import RemoteStage
from collapipe.errors import (
    AttemptFailedError,
    CancelledError,
    CollapipeError,
    DivergedError,
    PeerLostError,
)
from collapipe.job import JobConfig
from collapipe.stage_host import HostResources, StageSession
from collapipe.stage_runtime import clip_scale
from collapipe.tasks import MicroBatch
from collapipe.tensors import Frame, FrameKind
from collapipe.v1 import control_unit_pb2, job_pb2, plan_pb2, stage_pb2
from collapipe.weights.blob_store import BlobStore
from collapipe.weights.transfer import store_blob

_GRACE_SECONDS = 0.5
"""How long the first failure waits for a better witness: a dead stage is first noticed by its neighbours."""


@dataclass(frozen=True)
class StepOutcome:
    """What one mini-batch gave: mean loss per target, and the global gradient norm before clipping."""

    loss: float
    gradient_norm: float


class ClusterPipeline:
    """Configures, drives and gathers the stages of a plan.

    Args:
        request: The attempt and everything that it starts from.
        job: The parsed job.
        resources: Of the control unit.
        store: Where gathered state is kept.
        own_address: Of the control unit, for stages that fetch from it.
    """

    def __init__(
        self,
        request: control_unit_pb2.RunRoundRequest,
        job: JobConfig,
        resources: HostResources,
        store: BlobStore,
        own_address: str,
    ) -> None:
        self._request = request
        self._job = job
        self._resources = resources
        self._store = store
        self._own_address = own_address
        self._stages = request.plan.stages
        self._aborted: CollapipeError | None = None
        self._abort_lock = threading.Lock()
        self._predictions: list[Tensor] = []
        self._times = [stage_pb2.StageTimes() for _ in self._stages]
        self._busy_ratios = [0.0 for _ in self._stages]
        self._pending_scale = 0.0
        self._under_way = False
        self._last_seen = ("", 0)
        self._last_moved = time.monotonic()
        self._phase = "configuring stages"
        self._local = StageSession(self._configuration(0), resources, self._collect)
        self._remotes: list[RemoteStage] = []

    def configure(self) -> int:
        """Brings every stage into its state; returns the bytes that had to be fetched."""
        self._remotes = [
            RemoteStage(
                stage,
                self._configuration(index),
                self._resources.channels,
                self._job.schedule.silence_seconds,
                self.abort,
            )
            for index, stage in enumerate(self._stages)
            if index > 0
        ]
        fetched = self._local.configure().fetched_bytes
        for remote in self._remotes:
            fetched += remote.expect("configured").configured.fetched_bytes
        return fetched

    def run_mini_batch(self, step_index: int, micro_batches: Sequence[MicroBatch]) -> StepOutcome:
        """Trains one optimizer step; its update stays pending until the next one or `finish`.

        Raises:
            DivergedError: The loss or the gradient norm is not finite.
            CollapipeError: Why the attempt failed.
        """
        self._phase = f"step {step_index}"
        command = stage_pb2.RunStep(
            step_index=step_index,
            num_micro_batches=len(micro_batches),
            num_targets=sum(micro_batch.num_targets for micro_batch in micro_batches),
            pending_gradient_scale=self._pending_scale,
        )
        request = stage_pb2.RunStageRequest(run_step=command)
        self._send(request, f"run step {step_index}")
        self._feed(FrameKind.FORWARD, step_index, micro_batches)
        self._under_way = True
        results = [self._local.run_step(command)]
        results += [remote.expect("step_done").step_done for remote in self._remotes]
        self._under_way = False
        squares = itertools.chain.from_iterable(r.squared_gradient_norms for r in results)
        norm = math.sqrt(math.fsum(squares))
        loss = results[-1].loss
        if not (math.isfinite(loss) and math.isfinite(norm)):
            training = self._job.training
            raise DivergedError(
                f"the loss is {loss} and the gradient norm {norm} in step {step_index} of round "
                f"{self._request.attempt.round_index}, at a peak learning rate of {training.learning_rate} and "
                f"clip_norm = {training.clip_norm}: the model of the last commit is intact; lower "
                "training.learning_rate, lengthen training.warm_up_steps, or look for bad values in the data"
            )
        self._pending_scale = clip_scale(norm, self._job.training.clip_norm)
        for index, result in enumerate(results):
            self._note_times(index, result.times)
        return StepOutcome(loss, norm)

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Predicts for each micro-batch, in order."""
        self._phase = "evaluating"
        self._predictions = []
        command = stage_pb2.RunEvaluation(num_micro_batches=len(micro_batches))
        self._send(stage_pb2.RunStageRequest(run_evaluation=command), "evaluate")
        self._feed(FrameKind.EVALUATE, 0, micro_batches)
        self._under_way = True
        self._local.run_evaluation(command)
        for remote in self._remotes:
            remote.expect("evaluation_done")
        self._under_way = False
        return self._predictions

    def finish(self) -> list[plan_pb2.UnitState]:
        """Applies the last update; returns the state of every unit, in order."""
        self._phase = "finishing the round"
        command = stage_pb2.FinishRound(pending_gradient_scale=self._pending_scale)
        self._send(stage_pb2.RunStageRequest(finish=command), "finish the round")
        states = list(self._local.finish(command).units)
        for remote in self._remotes:
            states += remote.expect("finished").finished.units
        return states

    def gather_weights_and_moments(
        self, states: Sequence[plan_pb2.UnitState]
    ) -> list[job_pb2.GatheredState]:
        """Copies the weights and the optimizer state of each unit from the devices to this host's disk.

        This happens once, at the end of every round. The edge server stores the state of the head itself.

        Returns:
            The bytes that each device sent. A device is left out if its states were already on the disk.
        """
        self._phase = "gathering segments"
        started = time.perf_counter()

        def gather_stage(stage: plan_pb2.Stage) -> job_pb2.GatheredState:
            fetched_bytes = 0
            for state in states[stage.start_unit : stage.stop_unit]:
                for digest in (state.weights_digest, state.optimizer_digest):
                    if digest and digest not in self._store:
                        store_blob(self._store, self._resources.channels, digest, [stage.address])
                        fetched_bytes += self._store.total_bytes(digest)
            seconds = time.perf_counter() - started
            return job_pb2.GatheredState(
                host_id=stage.host_id, bytes=fetched_bytes, seconds=seconds
            )

        edge = self._request.edge_address
        devices = [stage for stage in self._stages[1:] if stage.address != edge]
        if not devices:
            return []
        with ThreadPoolExecutor(len(devices), "gather") as executor:
            return [found for found in executor.map(gather_stage, devices) if found.bytes]

    def abort(self, reason: CollapipeError) -> None:
        """Makes whatever runs or waits end with `reason`; any thread may call it."""
        with self._abort_lock:
            if self._aborted is not None:
                return
            self._aborted = reason
        self._local.abort(reason)
        for remote in self._remotes:
            remote.abort(reason)

    def verdict(self, first: CollapipeError) -> CollapipeError:
        """The best explanation of a failed attempt, called once with what was noticed first.

        A dead host is noticed by its neighbours before its own session breaks; so the others may speak for a moment,
        and a session that was lost itself is the best witness.
        """
        if isinstance(first, (CancelledError, DivergedError)):
            return first
        time.sleep(_GRACE_SECONDS)
        failures = [(remote, remote.failure) for remote in self._remotes if remote.failure]
        for remote, failure in failures:
            if isinstance(failure, PeerLostError) and failure.host_id == remote.host_id:
                return failure
        for _, failure in failures:
            if isinstance(failure, PeerLostError) and failure.host_id:
                return failure
        return self._aborted or first

    def close(self) -> None:
        """Ends every session."""
        for remote in self._remotes:
            remote.close()
        self._local.close()

    def stage_reports(self) -> list[job_pb2.StageReport]:
        """How each stage is doing."""
        return [
            job_pb2.StageReport(
                host_id=stage.host_id,
                start_unit=stage.start_unit,
                stop_unit=stage.stop_unit,
                busy_ratio=busy_ratio,
                times=times,
            )
            for stage, busy_ratio, times in zip(
                self._stages, self._busy_ratios, self._times, strict=True
            )
        ]

    def waiting_for(self) -> str:
        """What holds the cluster up, in words; empty while some stage computes."""
        waits = {self._stages[0].host_id: self._local.waiting_for}
        waits |= {remote.host_id: remote.progress.waiting_for for remote in self._remotes}
        if not all(waits.values()):
            return ""
        return f"{self._phase}: " + "; ".join(
            f"{host} waits to {what}" for host, what in waits.items()
        )

    def abort_if_stalled(self) -> None:
        """Gives up when micro-batches are under way, and nothing moves for longer than the silence deadline.

        Every stage waits for another, says the same as before, and no link has brought a byte. Called every second.
        """
        waiting_for = self.waiting_for()
        received = sum(remote.progress.received_bytes for remote in self._remotes)
        seen = (waiting_for, received + self._local.meter.received_bytes)
        now = time.monotonic()
        if seen != self._last_seen or not waiting_for or not self._under_way:
            self._last_seen, self._last_moved = seen, now
        silence = self._job.schedule.silence_seconds
        if now - self._last_moved > silence:
            self.abort(AttemptFailedError(f"nothing has moved for {silence:g} s ({waiting_for})"))

    def _configuration(self, stage_index: int) -> stage_pb2.ConfigureStage:
        request, stage = self._request, self._stages[stage_index]
        previous_owner = {
            unit: owner.address
            for owner in request.previous_stages
            for unit in range(owner.start_unit, owner.stop_unit)
        }
        units = range(stage.start_unit, stage.stop_unit)
        return stage_pb2.ConfigureStage(
            attempt=request.attempt,
            plan=request.plan,
            stage_index=stage_index,
            model=request.model,
            training_json=self._job.training.model_dump_json(),
            seed=self._job.seed,
            units=[request.base.units[unit] for unit in units],
            sources=[
                stage_pb2.UnitSource(
                    unit_index=unit,
                    addresses=_without(
                        [previous_owner.get(unit), self._own_address, request.edge_address],
                        stage.address,
                    ),
                )
                for unit in units
            ],
            step_index=request.base.step_index,
            total_steps=self._job.total_steps,
        )

    def _send(self, request: stage_pb2.RunStageRequest, task: str) -> None:
        for remote in self._remotes:
            remote.send(request, task)

    def _feed(self, kind: FrameKind, step_index: int, micro_batches: Sequence[MicroBatch]) -> None:
        for number, micro_batch in enumerate(micro_batches):
            self._local.mailbox.put(Frame(kind, step_index, number, micro_batch.tensors))

    def _collect(self, frame: Frame) -> None:
        """Takes what reaches the beginning of the pipeline; gradients end here."""
        if frame.kind is FrameKind.PREDICTION:
            self._predictions.append(frame.tensors["predictions"])

    def _note_times(self, stage_index: int, times: stage_pb2.StageTimes) -> None:
        busy = times.forward_seconds + times.backward_seconds
        self._busy_ratios[stage_index] = busy / times.total_seconds if times.total_seconds else 0.0
        total = self._times[stage_index]
        total.forward_seconds += times.forward_seconds
        total.backward_seconds += times.backward_seconds
        total.waiting_seconds += times.waiting_seconds
        total.total_seconds += times.total_seconds


def _without(addresses: Sequence[str | None], own: str) -> list[str]:
    """Drops what is missing, repeated, or the host itself."""
    return [address for address in dict.fromkeys(addresses) if address and address != own]
