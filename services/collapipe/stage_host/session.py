"""One stage in one attempt at a round, from its configuration to its prepared state."""

import logging
import threading
from collections.abc import Callable

import torch

from collapipe.emulation.world import EmulationFile
from collapipe.errors import CollapipeError, InvalidInputError, NotFoundError, WrongStateError
from collapipe.job import TrainingConfig
from collapipe.models import adapter_for
from collapipe.neighbour_streams.endpoints import (
    LinkMeter,
    LinkReceiver,
    LinkSender,
    LinkSettings,
    link_settings,
)
from collapipe.neighbour_streams.stream import DownstreamLink
from collapipe.rpc import ChannelPool, Outbox
from collapipe.stage_host.stage_meter import StageMeter
from collapipe.stage_runtime import (
    EmulatedProcessor,
    Mailbox,
    ResidentUnit,
    ResidentUnits,
    Stage,
    StageContext,
)
from collapipe.stage_runtime.resident_units import StateDigests
from collapipe.tensors import Frame
from collapipe.traffic_shaping.pacing import PacedShaper, Shaper
from collapipe.traffic_shaping.radio import EmulatedRadioDriver, RadioDriver
from collapipe.v1 import plan_pb2, stage_pb2, stage_pb2_grpc
from collapipe.weights.blob_store import BlobStore
from collapipe.weights.tensor_blob import TensorBlob
from collapipe.weights.transfer import fetch_blob

logger = logging.getLogger(__name__)


class HostResources:
    """What a host brings to every session: its processor, its channels, its units, and perhaps a disk.

    Args:
        host_id: The host, as registered.
        device: Where it computes.
        channels: To other hosts.
        emulation: The world that this host is to seem to be in.
        store: Where prepared units are kept; `None` on a device, whose memory is enough.
        shaper: Holds links to their rates; by default it paces.
        radio: Sets powers; by default that of the emulated world.
    """

    def __init__(
        self,
        host_id: str,
        device: torch.device,
        channels: ChannelPool,
        emulation: EmulationFile | None = None,
        store: Callable[[str], BlobStore] | None = None,
        shaper: Shaper | None = None,
        radio: RadioDriver | None = None,
    ) -> None:
        self.host_id = host_id
        self.device = device
        self.channels = channels
        self.emulation = emulation or EmulationFile(None)
        self.shaper = shaper or PacedShaper()
        self.radio = radio or EmulatedRadioDriver(self.emulation)
        self.processor = EmulatedProcessor(self.emulation, host_id)
        self.modelled_watts = 0.0
        """Power beyond idle while this host computes, where no sensor measures it; 0 counts no energy."""
        self._store = store
        self._lock = threading.Lock()
        self._job_id = ""
        self._banks: dict[int, ResidentUnits] = {}

    def bank(self, configure: stage_pb2.ConfigureStage, training: TrainingConfig) -> ResidentUnits:
        """The units of a job and cluster; those of another job are dropped."""
        with self._lock:  # an edge server opens the sessions of all clusters at once
            if configure.attempt.job_id != self._job_id:
                self._banks = {}
                self._job_id = configure.attempt.job_id
            cluster_index = configure.plan.cluster_index
            if cluster_index not in self._banks:
                model = configure.model
                adapter = adapter_for(model.family, model.task, model.config_json)
                self._banks[cluster_index] = ResidentUnits(adapter, training, self.device)
            return self._banks[cluster_index]

    def held_blob(self, digest: str) -> TensorBlob:
        """Finds a blob among the units in memory; raises `NotFoundError`."""
        for bank in list(self._banks.values()):
            try:
                return bank.blob(digest)
            except NotFoundError:
                continue
        raise NotFoundError(f"blob {digest} is not held by {self.host_id}")

    def link_to(self, host_id: str, address: str, settings: LinkSettings) -> LinkSender:
        """What sends to another host as a plan and the world allow."""
        return LinkSender(
            self.host_id, host_id, address, settings, self.emulation, self.shaper, self.radio
        )

    def store(self, job_id: str) -> BlobStore | None:
        """The disk of this host for a job, if it has one."""
        return self._store(job_id) if self._store else None


class StageSession:
    """One stage in one attempt.

    Every method but `abort` is called by one thread, in the order of the commands.

    Args:
        configure: What to hold, and for which attempt.
        resources: Of this host.
        send_backward: Takes what goes to the previous stage; by default a link that the previous stage opens.
    """

    def __init__(
        self,
        configure: stage_pb2.ConfigureStage,
        resources: HostResources,
        send_backward: Callable[[Frame], None] | None = None,
    ) -> None:
        _validate(configure)
        self.attempt = configure.attempt
        self.stage_index = configure.stage_index
        self.cluster_index = configure.plan.cluster_index
        self.upstream: Outbox[Frame] = Outbox()
        self._configure = configure
        self._units: list[ResidentUnit] = []
        self._resources = resources
        stages = configure.plan.stages
        self._stage_plan = stages[configure.stage_index]
        capacity = (
            max(stages[self.stage_index - 1].in_flight, self._stage_plan.in_flight)
            if self.stage_index
            else None
        )
        self.mailbox = Mailbox(capacity)
        self.meter = LinkMeter(self.cluster_index, self.stage_index)
        training = TrainingConfig.model_validate_json(configure.training_json)
        self._bank: ResidentUnits | None = None
        self._training = training
        self._send_backward = send_backward or self.upstream.put
        self._link: DownstreamLink | None = None
        self._stage: Stage | None = None
        self._phase = "be configured"
        self._finished = False

    @property
    def waiting_for(self) -> str:
        """What the stage waits for, in words; empty while it computes."""
        stage = self._stage
        return stage.waiting_for if stage else self._phase

    def configure(self) -> stage_pb2.StageConfigured:
        """Brings the stage's units into the wanted state."""
        configure, resources = self._configure, self._resources
        store = resources.store(configure.attempt.job_id)
        sources = {source.unit_index: list(source.addresses) for source in configure.sources}
        fetched_bytes = 0

        def fetch(unit_index: int, digest: str) -> bytes:
            nonlocal fetched_bytes
            self._phase = f"fetch unit {unit_index}"
            if store is not None and digest in store:
                return b"".join(store.read(digest))
            data = fetch_blob(resources.channels, digest, sources.get(unit_index, []))
            fetched_bytes += len(data)
            return data

        wanted = {
            state.unit_index: StateDigests(state.weights_digest, state.optimizer_digest)
            for state in configure.units
        }
        # not in the constructor: a slow host imports the model family for longer than it may be silent
        self._phase = "import its model's code"
        self._bank = bank = resources.bank(configure, self._training)
        self._units, num_reused = bank.take(wanted, fetch)
        context = StageContext(
            adapter=bank.adapter,
            training=self._training,
            device=resources.device,
            seed=configure.seed,
            cluster_index=self.cluster_index,
            round_index=configure.attempt.round_index,
            stage_index=self.stage_index,
            in_flight=self._stage_plan.in_flight,
            first_step=configure.step_index,
            total_steps=configure.total_steps,
        )
        meter = StageMeter(self.cluster_index, self.stage_index, resources.modelled_watts)
        self._stage = Stage(
            context,
            self._units,
            self.mailbox,
            self._send_forward,
            self._send_backward,
            meter,
            resources.processor,
        )
        return stage_pb2.StageConfigured(fetched_bytes=fetched_bytes, reused_units=num_reused)

    def run_step(self, command: stage_pb2.RunStep) -> stage_pb2.StepDone:
        """Runs one mini-batch."""
        result = self._begin().run_step(
            command.step_index,
            command.num_micro_batches,
            command.num_targets,
            command.pending_gradient_scale,
        )
        times = result.times
        return stage_pb2.StepDone(
            step_index=command.step_index,
            squared_gradient_norms=result.squared_norms,
            loss=result.loss,
            times=stage_pb2.StageTimes(
                forward_seconds=times.forward_seconds,
                backward_seconds=times.backward_seconds,
                waiting_seconds=times.waiting_seconds,
                total_seconds=times.total_seconds,
            ),
        )

    def run_evaluation(self, command: stage_pb2.RunEvaluation) -> stage_pb2.EvaluationDone:
        """Runs micro-batches forward only."""
        self._begin().run_evaluation(command.num_micro_batches)
        return stage_pb2.EvaluationDone()

    def finish(self, command: stage_pb2.FinishRound) -> stage_pb2.RoundFinished:
        """Applies the last update, and names and keeps the resulting state."""
        self._begin().apply_update(command.pending_gradient_scale)
        store = self._resources.store(self.attempt.job_id)
        states = []
        for unit in self._units:
            digests = unit.seal()
            for blob in unit.blobs():
                if store is not None and blob.digest not in store:
                    store.put(blob.digest, blob.read())
            states.append(
                plan_pb2.UnitState(
                    unit_index=unit.unit_index,
                    weights_digest=digests.weights,
                    optimizer_digest=digests.optimizer,
                )
            )
        self._finished = True
        return stage_pb2.RoundFinished(units=states)

    def link_ends(self, neighbour_index: int) -> tuple[LinkSender, LinkReceiver]:
        """This stage's ends of the link with a neighbour: what sends there, and what receives from there."""
        plan = self._configure.plan
        neighbour = plan.stages[neighbour_index]
        sender = self._resources.link_to(
            neighbour.host_id,
            neighbour.address,
            link_settings(plan, self.stage_index, neighbour_index),
        )
        receiver = LinkReceiver(
            neighbour.host_id,
            self._resources.host_id,
            max(neighbour.in_flight, self._stage_plan.in_flight),
            self._resources.emulation,
            self.meter,
            self.mailbox.put,
        )
        return sender, receiver

    def abort(self, reason: CollapipeError) -> None:
        """Makes whatever runs or waits in this session end with `reason`; any thread may call it."""
        self.mailbox.fail(reason)

    def close(self) -> None:
        """Ends the links, drops what was not sealed, and lets go of the units."""
        self.mailbox.fail(WrongStateError("the session has ended"))
        if self._link is not None:
            self._link.close(broken=not self._finished)
        self.upstream.close()
        if self._bank is not None:
            self._bank.drop_unsealed()
        # the stage refers to this session: blocks that moved away would stay until Python looks for cycles
        self._stage, self._units, self._phase = None, [], "end"

    def _begin(self) -> Stage:
        """The stage, linked to the next: every stage is configured when the first command comes."""
        if self._stage is None or self._bank is None:
            raise WrongStateError(
                f"stage {self.stage_index} got a command before it was configured"
            )
        stages = self._configure.plan.stages
        if self._link is None and self.stage_index + 1 < len(stages):
            following = stages[self.stage_index + 1]
            opening = stage_pb2.OpenLink(
                attempt=self.attempt,
                cluster_index=self.cluster_index,
                stage_index=self.stage_index + 1,
            )
            channel = self._resources.channels.channel(following.address)
            stub = stage_pb2_grpc.StageServiceStub(channel)
            sender, receiver = self.link_ends(self.stage_index + 1)
            self._link = DownstreamLink(
                stub, following.host_id, opening, sender, receiver, self.mailbox, self.meter
            )
        # everybody has fetched what moved: units that are not of this plan are no longer needed
        self._bank.retain(unit.unit_index for unit in self._units)
        return self._stage

    def _send_forward(self, frame: Frame) -> None:
        assert self._link is not None
        self._link.send(frame)


def _validate(configure: stage_pb2.ConfigureStage) -> None:
    """Refuses what contradicts itself, before anything is allocated."""
    stages = configure.plan.stages
    if configure.stage_index >= len(stages):
        raise InvalidInputError(
            f"stage {configure.stage_index} does not exist in a plan of {len(stages)} stages"
        )
    stage = stages[configure.stage_index]
    units = [state.unit_index for state in configure.units]
    if units != list(range(stage.start_unit, stage.stop_unit)):
        raise InvalidInputError(
            f"stage {configure.stage_index} is to run units {stage.start_unit} to {stage.stop_unit - 1}, "
            f"but was given the state of units {units}"
        )
    if stage.in_flight < 1:
        raise InvalidInputError(
            f"stage {configure.stage_index} has an in-flight window of 0: it needs 1"
        )
    for index in range(len(configure.plan.links)):
        for ends in ((index, index + 1), (index + 1, index)):
            link_settings(configure.plan, *ends)
