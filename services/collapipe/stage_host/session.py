"""One stage in one attempt at a round, from its configuration to its prepared state."""

from collections.abc import Callable, Iterator

from collapipe.errors import CollapipeError, InvalidInputError, WrongStateError
from collapipe.job import TrainingConfig
from collapipe.neighbour_streams.incoming_link import IncomingLink
from collapipe.neighbour_streams.link_settings import link_settings
from collapipe.neighbour_streams.stream import (
    NeighbourLinks,
    StreamToNextStage,
    serve_previous_stage,
)
from collapipe.rpc import Outbox
from collapipe.stage_host.host_resources import HostResources
from collapipe.stage_runtime import (
    Mailbox,
    ResidentUnit,
    ResidentUnits,
    Stage,
    StageContext,
    StageMetrics,
)
from collapipe.stage_runtime.resident_units import StateDigests
from collapipe.tensors import Frame
from collapipe.v1 import plan_pb2, stage_pb2, stage_pb2_grpc
from collapipe.weights.transfer import fetch_blob


class StageSession:
    """One stage in one attempt. One thread calls every method but `abort`, in the order of the commands.

    Args:
        send_backward: Takes the frames for the previous stage. By default the stream of that stage sends them.
    """

    def __init__(
        self,
        configure: stage_pb2.ConfigureStage,
        resources: HostResources,
        send_backward: Callable[[Frame], None] | None = None,
    ) -> None:
        _check_configuration(configure)
        self.attempt = configure.attempt
        self.stage_index = configure.stage_index
        self._configure = configure
        self._resources = resources
        self._cluster_index = configure.plan.cluster_index
        self._in_flight = configure.plan.stages[self.stage_index].in_flight
        self._training = TrainingConfig.model_validate_json(configure.training_json)
        # The frames of the first stage come from this host, so only later stages need a limit.
        capacity = self._link_capacity(self.stage_index - 1) if self.stage_index else None
        self.mailbox = Mailbox(capacity)
        self._to_previous_stage: Outbox[Frame] = Outbox()
        self._to_next_stage: Outbox[Frame] = Outbox()
        self._send_backward = send_backward or self._to_previous_stage.put
        self._incoming: list[IncomingLink] = []
        self._stream_to_next_stage: StreamToNextStage | None = None
        self._resident_units: ResidentUnits | None = None
        self._units: list[ResidentUnit] = []
        self._stage: Stage | None = None
        self._phase = "be configured"
        self._finished = False

    @property
    def waiting_for(self) -> str:
        """What the stage waits for, in words; empty while it computes."""
        stage = self._stage
        return stage.waiting_for if stage else self._phase

    @property
    def received_bytes(self) -> int:
        """Bytes that have arrived from both neighbours."""
        return sum(link.received_bytes for link in self._incoming)

    def configure(self) -> stage_pb2.StageConfigured:
        """Brings the units of the stage into the wanted state. Fetches those that this host does not have."""
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
        # On a slow host, the import of a model family can take longer than `silence_seconds`. So the import
        # happens here, where signs of life are sent, and not in the constructor.
        self._phase = "import its model's code"
        self._resident_units = resources.resident_units(configure, self._training)
        self._units, num_reused = self._resident_units.take(wanted, fetch)
        context = StageContext(
            adapter=self._resident_units.adapter,
            training=self._training,
            device=resources.device,
            seed=configure.seed,
            cluster_index=self._cluster_index,
            round_index=configure.attempt.round_index,
            stage_index=self.stage_index,
            in_flight=self._in_flight,
            first_step=configure.step_index,
            total_steps=configure.total_steps,
        )
        self._stage = Stage(
            context,
            self._units,
            self.mailbox,
            self._to_next_stage.put,
            self._send_backward,
            StageMetrics(self._cluster_index, self.stage_index, resources.busy_watts),
            resources.processor,
        )
        return stage_pb2.StageConfigured(fetched_bytes=fetched_bytes, reused_units=num_reused)

    def run_step(self, command: stage_pb2.RunStep) -> stage_pb2.StepDone:
        result = self._ready_stage().run_step(
            command.step_index,
            command.num_micro_batches,
            command.num_targets,
            command.pending_gradient_scale,
        )
        return stage_pb2.StepDone(
            step_index=command.step_index,
            squared_gradient_norms=result.squared_norms,
            loss=result.loss,
            times=stage_pb2.StageTimes(**vars(result.times)),
        )

    def run_evaluation(self, command: stage_pb2.RunEvaluation) -> stage_pb2.EvaluationDone:
        self._ready_stage().run_evaluation(command.num_micro_batches)
        return stage_pb2.EvaluationDone()

    def finish(self, command: stage_pb2.FinishRound) -> stage_pb2.RoundFinished:
        """Applies the last update, computes the digests of the units, and stores the units if the host has a disk."""
        self._ready_stage().apply_update(command.pending_gradient_scale)
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

    def serve_previous_stage(
        self, requests: Iterator[stage_pb2.ExchangeActivationsRequest]
    ) -> Iterator[stage_pb2.ExchangeActivationsResponse]:
        """Serves the stream of the previous stage, from the message after the opening one."""
        links = self._links_with(self.stage_index - 1, self._to_previous_stage)
        return serve_previous_stage(requests, links, self.abort)

    def abort(self, reason: CollapipeError) -> None:
        """Makes everything that runs or waits in this session end with `reason`. Any thread may call it."""
        self.mailbox.fail(reason)

    def close(self) -> None:
        """Ends the streams, drops units of an unfinished attempt, and releases the other units."""
        self.mailbox.fail(WrongStateError("the session has ended"))
        if self._stream_to_next_stage is not None:
            self._stream_to_next_stage.close(broken=not self._finished)
        self._to_previous_stage.close()
        if self._resident_units is not None:
            self._resident_units.drop_unsealed()
        # Whoever still refers to this session must not keep units in memory that have moved to another host.
        self._stage, self._units, self._phase = None, [], "end"

    def _ready_stage(self) -> Stage:
        """Returns the stage for a command. The first command also opens the stream to the next stage.

        It drops the units that moved to other hosts, too. Every stage is configured by then, so no host still
        fetches these units.
        """
        if self._stage is None or self._resident_units is None:
            raise WrongStateError(
                f"stage {self.stage_index} got a command before it was configured"
            )
        is_last = self.stage_index + 1 == len(self._configure.plan.stages)
        if self._stream_to_next_stage is None and not is_last:
            self._stream_to_next_stage = self._open_stream_to_next_stage()
        self._resident_units.retain(unit.unit_index for unit in self._units)
        return self._stage

    def _open_stream_to_next_stage(self) -> StreamToNextStage:
        next_index = self.stage_index + 1
        opening = stage_pb2.OpenLink(
            attempt=self.attempt, cluster_index=self._cluster_index, stage_index=next_index
        )
        address = self._configure.plan.stages[next_index].address
        stub = stage_pb2_grpc.StageServiceStub(self._resources.channels.channel(address))
        links = self._links_with(next_index, self._to_next_stage)
        return StreamToNextStage(stub, opening, links, self.abort)

    def _links_with(self, neighbour_index: int, outbox: Outbox[Frame]) -> NeighbourLinks:
        plan, links = self._configure.plan, self._resources.links
        neighbour = plan.stages[neighbour_index]
        stage_labels = (str(self._cluster_index), str(self.stage_index))
        settings = link_settings(plan, self.stage_index, neighbour_index)
        incoming = IncomingLink(
            neighbour.host_id,
            links.host_id,
            stage_labels,
            self._link_capacity(neighbour_index),
            links.emulation,
            self.mailbox.put,
        )
        self._incoming.append(incoming)
        outgoing = links.link_to(neighbour.host_id, neighbour.address, settings)
        return NeighbourLinks(stage_labels, outbox, outgoing, incoming)

    def _link_capacity(self, neighbour_index: int) -> int:
        """Returns the larger in-flight window of this stage and a neighbour."""
        return max(self._in_flight, self._configure.plan.stages[neighbour_index].in_flight)


def _check_configuration(configure: stage_pb2.ConfigureStage) -> None:
    """Refuses a configuration that contradicts itself, before anything is allocated."""
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
            f"stage {configure.stage_index} has an in-flight window of 0: it needs at least 1"
        )
    for index in range(len(configure.plan.links)):
        link_settings(configure.plan, index, index + 1)
        link_settings(configure.plan, index + 1, index)
