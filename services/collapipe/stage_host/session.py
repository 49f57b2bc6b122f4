"""One stage in one attempt at a round, from its configuration to its prepared state."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from pydantic import ValidationError

from collapipe.codec_table import UPLOAD_CODECS, UploadCodecName
from collapipe.errors import (
    CollapipeError,
    CorruptDataError,
    InvalidInputError,
    PeerLostError,
    WrongStateError,
)
from collapipe.job import TrainingConfig
from collapipe.mistakes import explain_mistakes
from collapipe.models import IGNORED, GenerationSettings, ModelAdapter
from collapipe.neighbour_streams.frame_limits import (
    frame_limits,
    of_kinds,
    rows_of_micro_batch,
)
from collapipe.neighbour_streams.frame_shapes import FrameShapes
from collapipe.neighbour_streams.incoming_link import IncomingLink
from collapipe.neighbour_streams.link_settings import link_settings, upload_share
from collapipe.neighbour_streams.outgoing_link import OutgoingLink
from collapipe.neighbour_streams.stream import (
    NeighbourLinks,
    StreamToNextStage,
    serve_previous_stage,
)
from collapipe.rpc import Outbox, impossible_value
from collapipe.secure_aggregation.masks import MaskKeys
from collapipe.stage_host.host_resources import HostResources
from collapipe.stage_host.unit_pushes import Report, UnitPushes
from collapipe.stage_runtime import (
    Mailbox,
    ResidentUnit,
    ResidentUnits,
    Stage,
    StageContext,
    StageMetrics,
)
from collapipe.stage_runtime.private_updates import UpdatePrivacy
from collapipe.stage_runtime.resident_units import StateDigests, Upload
from collapipe.telemetry.spans import SPANS, Moved
from collapipe.tensors import LABELS, Frame, FrameAssembler, FrameKind
from collapipe.tensors.frames import TOWARDS_EMBEDDING, TOWARDS_HEAD
from collapipe.v1 import edge_server_pb2, plan_pb2, stage_pb2, stage_pb2_grpc
from collapipe.weights.blob_store import BlobStore
from collapipe.weights.transfer import fetch_blob, push_unit, store_blob

logger = logging.getLogger(__name__)

_OPENING_SHARE = 0.8
"""The next stage has to accept a stream within this share of the allowed silence. So a cut link is noticed by the stage before it,
which knows the link, and not by the control unit, which only sees that nothing moves."""

_MOST_SECRET_BYTES = 64
_MOST_SILENCE_SECONDS = 1e6
"""The largest `schedule.silence_seconds` of a job."""


class StageSession:
    """One stage in one attempt. One thread calls every method but `take_labels`, `abort` and `lose_stream`, in the order
    of the commands.

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
        self.plan = configure.plan
        self._configure = configure
        self._resources = resources
        self.cluster_index = configure.plan.cluster_index
        self._in_flight = configure.plan.stages[self.stage_index].in_flight
        self._num_slices = configure.plan.num_slices or 1
        self._training = _training(configure)
        is_first = self.stage_index == 0
        neighbour = 1 if is_first else self.stage_index - 1
        # A stage without neighbours has only frames of its own.
        capacity = self._link_capacity(neighbour) if len(self.plan.stages) > 1 else None
        self.mailbox = Mailbox(capacity, is_first=is_first)
        self._to_previous_stage: Outbox[Frame] = Outbox()
        self._to_next_stage: Outbox[Frame] = Outbox()
        self._send_backward = send_backward or self._put_backward
        self._incoming: list[IncomingLink] = []
        self._frame_limits: dict[FrameKind, int] = {}
        """Empty until the stage is configured."""
        self._shapes: FrameShapes | None = None
        self._labels = FrameAssembler({})
        self._received_label_bytes = 0
        self._num_classes = 0
        self._shares = ExitStack()
        self._stream_to_next_stage: StreamToNextStage | None = None
        self._resident_units: ResidentUnits | None = None
        self._units: list[ResidentUnit] = []
        self._stage: Stage | None = None
        self._pushes: UnitPushes | None = None
        self._phase = "be configured"
        self._finished = False
        self._aborted: CollapipeError | None = None
        self._fetched_bytes = self._pushed_bytes = 0

    @property
    def waiting_for(self) -> str:
        """What the stage waits for, in words; empty while it computes."""
        pushes, stage = self._pushes, self._stage  # `close` forgets both, in another thread.
        if pushes is not None and pushes.waiting_for:
            return pushes.waiting_for
        if self._finished:
            return "see the round end"
        return stage.waiting_for if stage else self._phase

    @property
    def is_idle(self) -> bool:
        """Whether the stage waits for the next command, or has ended the round."""
        pushes, stage = self._pushes, self._stage
        if pushes is not None and pushes.waiting_for:
            return False
        return self._finished or (stage is not None and stage.is_idle)

    @property
    def received_bytes(self) -> int:
        """Bytes that have arrived from both neighbours, and bytes of labels."""
        return self._received_label_bytes + sum(link.received_bytes for link in self._incoming)

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights and optimizer states that the stage has fetched and pushed so far."""
        pushes = self._pushes
        return self._fetched_bytes + (pushes.arrived_bytes if pushes is not None else 0)

    @property
    def is_configured(self) -> bool:
        """Whether the stage has begun to hold units, so that it knows how large frames may be."""
        return bool(self._frame_limits)

    def configure(self) -> stage_pb2.StageConfigured:
        """Brings the units of the stage into the wanted state. Fetches those that this host does not have."""
        configure, resources = self._configure, self._resources
        attempt = configure.attempt
        SPANS.begin_round(attempt.job_id, attempt.round_index, attempt.attempt)
        store = resources.store(configure.attempt.job_id)
        for stage in configure.plan.stages:
            # Calls to their addresses use the links to these hosts.
            resources.links.link_to(stage.host_id, stage.address)
        self._take_shares()
        addresses: dict[str, list[str]] = {}
        holders: dict[str, str] = {}
        """Where each optimizer state must be: in the memory of the host that ran the unit in the round before."""
        wanted = {}
        for state, source in zip(configure.units, configure.sources, strict=True):
            addresses[state.weights_digest] = list(source.weights_addresses)
            addresses[state.optimizer_digest] = list(source.optimizer_addresses)
            addresses[state.frozen_digest] = list(source.frozen_addresses)
            others = {configure.plan.stages[0].address, *source.weights_addresses[-1:]}
            if (first := next(iter(source.optimizer_addresses), "")) not in others:
                holders[state.optimizer_digest] = first
            wanted[state.unit_index] = StateDigests(state.weights_digest, state.optimizer_digest)
        fetched_bytes, fetch_seconds = 0, 0.0

        def go_on(num_bytes: int = 0) -> None:
            self._fetched_bytes += num_bytes
            if self._aborted:
                raise self._aborted

        @contextmanager
        def fetching(unit_index: int) -> Iterator[Moved]:
            nonlocal fetched_bytes, fetch_seconds
            started = time.perf_counter()
            track = f"weights of cluster {self._configure.host_cluster}"
            with SPANS.span(track, "fetch", unit=unit_index) as moved:
                yield moved
            fetched_bytes += moved.num_bytes
            fetch_seconds += time.perf_counter() - started

        def fetch(unit_index: int, digest: str) -> bytes:
            go_on()
            self._phase = f"fetch unit {unit_index}"
            is_damaged = False
            if store is not None and digest in store:
                try:
                    return store.read_checked(digest)
                except CorruptDataError as error:
                    if not addresses[digest]:
                        raise
                    logger.warning("unit %d is fetched from another host: %s", unit_index, error)
                    is_damaged = True
            with fetching(unit_index) as moved:
                data = fetch_blob(
                    resources.channels,
                    digest,
                    addresses[digest],
                    configure.settings.silence_seconds,
                    go_on,
                    holders.get(digest, ""),
                )
                moved.num_bytes = len(data)
            if store is not None and is_damaged:
                store.put(digest, [data], is_checked=True)
            return data

        # On a slow host, the import of a model family can take longer than `silence_seconds`. So the import
        # happens here, where signs of life are sent, and not in the constructor.
        self._phase = "import its model's code"
        self._resident_units = resources.resident_units(configure, self._training)
        adapter = self._resident_units.adapter
        self._num_classes = adapter.num_classes
        # Before the limits: from then on, neighbours may open their streams.
        self._shapes = FrameShapes(
            configure.settings,
            adapter,
            rows_of_micro_batch(configure.plan, self._training),
            has_tokens=not configure.plan.stages[self.stage_index].start_unit,
        )
        self._frame_limits = frame_limits(
            configure.plan, configure.settings, self._training, adapter
        )
        self._labels = FrameAssembler(of_kinds(self._frame_limits, {FrameKind.LABELS}))

        def frozen_file(unit_index: int, digest: str) -> Path:
            def fetch_into(kept: BlobStore) -> None:
                name = configure.model.pretrained
                if local := resources.local_frozen(name, adapter, unit_index, digest):
                    kept.put(digest, local.read(), is_checked=True)
                    return
                with fetching(unit_index) as moved:
                    store_blob(
                        kept,
                        resources.channels,
                        digest,
                        addresses[digest],
                        configure.settings.silence_seconds,
                        go_on,
                    )
                    moved.num_bytes = kept.total_bytes(digest)

            go_on()
            self._phase = f"fetch the frozen weights of unit {unit_index}"
            return resources.frozen.file(digest, fetch_into, frozen.values())

        frozen = {
            unit.unit_index: unit.frozen_digest for unit in configure.units if unit.frozen_digest
        }
        frozen_files = {
            unit_index: frozen_file(unit_index, digest) for unit_index, digest in frozen.items()
        }

        self._resident_units.keep_moments(configure.kept_optimizer_digests)
        self._units, num_reused = self._resident_units.take(
            wanted,
            fetch,
            _upload_codec(configure.plan),
            frozen_files,
            _privacy_of_units(configure, adapter),
            is_masked=configure.is_masked,
            is_hidden=configure.is_hidden,
        )
        hosts = ["", *(stage.host_id for stage in configure.plan.stages), ""]
        context = StageContext(
            adapter=adapter,
            training=self._training,
            device=resources.device,
            seed=configure.settings.seed,
            cluster_index=self.cluster_index,
            host_cluster=configure.host_cluster,
            round_index=configure.attempt.round_index,
            stage_index=self.stage_index,
            previous_host=hosts[self.stage_index],
            next_host=hosts[self.stage_index + 2],
            in_flight=self._in_flight,
            num_slices=self._num_slices,
            recompute=configure.plan.stages[self.stage_index].recompute,
            first_step=configure.settings.step_index,
            total_steps=configure.settings.total_steps,
        )
        self._stage = Stage(
            context,
            self._units,
            self.mailbox,
            self._to_next_stage.put,
            self._send_backward,
            StageMetrics(configure.host_cluster, self.stage_index, resources.busy_watts),
            resources.processor,
        )
        return stage_pb2.StageConfigured(
            fetched_bytes=fetched_bytes, reused_units=num_reused, fetch_seconds=fetch_seconds
        )

    def take_labels(self, part: stage_pb2.FrameHeader | bytes) -> None:
        """Takes the next part of labels. Waits while the queue of labels is full. One thread calls this.

        Raises:
            CorruptDataError: The parts do not make whole frames of labels, or bytes are damaged.
            InvalidInputError: The labels are larger than a frame may be, or are no classes of the model.
        """
        if isinstance(part, bytes):
            self._received_label_bytes += len(part)
            frame = self._labels.add(part)
        else:
            frame = self._labels.begin(part)
        if frame is None:
            return
        if frame.tensors.keys() != {LABELS}:
            raise CorruptDataError(
                f"a frame of labels has the tensors {', '.join(frame.tensors) or 'none'} instead of {LABELS!r}: run the same version "
                "everywhere"
            )
        labels = frame.tensors[LABELS]
        if labels.dtype != torch.int64:
            raise CorruptDataError(
                f"labels came as {labels.dtype} instead of torch.int64: run the same version everywhere"
            )
        # After a label outside the classes, CUDA fails in this process until it is restarted.
        if not ((labels == IGNORED) | ((labels >= 0) & (labels < self._num_classes))).all():
            raise InvalidInputError(
                f"the labels of micro-batch {frame.micro_batch} in step {frame.step_index} are not all from 0 to "
                f"{self._num_classes - 1}, the classes of the model: run the same version everywhere"
            )
        self.mailbox.put(frame)

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
        self._ready_stage().run_evaluation(command.num_micro_batches, has_labels=command.has_labels)
        return stage_pb2.EvaluationDone()

    def run_generation(self, command: stage_pb2.RunGeneration) -> stage_pb2.GenerationDone:
        options = command.options
        settings = GenerationSettings(
            options.max_new_tokens, options.temperature, options.top_k, options.seed
        )
        self._ready_stage().run_generation(command.num_sequences, settings)
        return stage_pb2.GenerationDone()

    def finish(self, command: stage_pb2.FinishRound) -> stage_pb2.RoundFinished:
        """Applies the last update, and pushes each unit as soon as it has its update.

        The digests of the optimizer states are computed while the weights travel.
        """
        stage = self._ready_stage()
        edge_link = self._resources.links.link_to(command.edge_host_id, command.edge_address)
        share = upload_share(self._configure.plan, self.stage_index)
        if share.bandwidth_hz:
            self._shares.enter_context(edge_link.limited_to(share))
        pushes = self._pushes = UnitPushes(
            lambda upload, report: self._push(upload, command, report),
        )
        if reason := self._aborted:
            pushes.abort(reason)

        masks = {
            unit.unit_index: MaskKeys(tuple(unit.added), tuple(unit.subtracted))
            for unit in command.masks
        }
        if self._configure.is_masked and masks.keys() != {unit.unit_index for unit in self._units}:
            raise InvalidInputError(
                f"stage {self.stage_index} got masks of units {sorted(masks)} instead of its own: run the same version everywhere"
            )
        masked: dict[int, Upload] = {}

        def push(unit: ResidentUnit) -> None:
            if self._configure.is_masked:
                upload = masked[unit.unit_index] = unit.masked_upload(
                    command.num_samples, command.total_samples, masks[unit.unit_index]
                )
            else:
                # A private or lossy one changes the weights, and a lossy one also the optimizer state.
                upload = unit.upload()
            if command.edge_address:
                pushes.put(upload)

        stage.apply_update(command.pending_gradient_scale, push)
        states = []
        for unit in self._units:
            track = f"weights of cluster {self._configure.host_cluster}"
            with SPANS.span(track, "seal", unit=unit.unit_index):
                digests = unit.seal()
                upload = masked.get(unit.unit_index)
                # Hosts serve a blob to those who know its digest. So the digest of hidden weights stays here.
                weights_digest = upload.blob.digest if upload else digests.weights
            states.append(
                plan_pb2.UnitState(
                    unit_index=unit.unit_index,
                    weights_digest=weights_digest,
                    optimizer_digest=digests.optimizer,
                )
            )
        pushes.wait()
        self._finished = True
        return stage_pb2.RoundFinished(
            units=states, pushed_bytes=self._pushed_bytes, push_seconds=pushes.seconds
        )

    def serve_previous_stage(
        self, requests: Iterator[stage_pb2.ExchangeActivationsRequest]
    ) -> Iterator[stage_pb2.ExchangeActivationsResponse]:
        """Serves the stream of the previous stage, from the message after the opening one."""
        links = self._links_with(self.stage_index - 1, self._to_previous_stage)
        return serve_previous_stage(requests, links, self.lose_stream)

    def lose_stream(self, reason: CollapipeError) -> None:
        """Fails the micro-batches that are under way or come later. Any thread may call it.

        Pushes go on, because they need no stream: a connection that broke during a push carries the rest later.
        """
        self.mailbox.fail(reason)

    def abort(self, reason: CollapipeError) -> None:
        """Makes everything that runs or waits in this session end with `reason`. Any thread may call it."""
        self._aborted = self._aborted or reason
        self.mailbox.fail(reason)
        pushes = self._pushes
        if pushes is not None:
            pushes.abort(reason)

    def close(self) -> None:
        """Ends the streams, drops units of an unfinished attempt, and releases the other units."""
        self.abort(WrongStateError(f"the session of stage {self.stage_index} has ended"))
        if self._stream_to_next_stage is not None:
            self._stream_to_next_stage.close(broken=not self._finished)
        self._to_previous_stage.close()
        self._shares.close()
        if self._resident_units is not None:
            self._resident_units.drop_unsealed()
        # Whoever still refers to this session must not keep units in memory that have moved to another host, or
        # that belong to an ended job. Sessions and streams refer to each other, so they are freed late.
        self._stage, self._units, self._phase = None, [], "end"
        self._resident_units = self._pushes = None

    def _push(self, upload: Upload, command: stage_pb2.FinishRound, report: Report) -> None:
        """Brings the new weights of a unit to the edge server."""
        blob = upload.blob
        announced = edge_server_pb2.PushedUnit(
            attempt=self.attempt,
            cluster_index=self.cluster_index,
            unit_index=upload.unit_index,
            total_bytes=blob.total_bytes,
            num_samples=command.num_samples,
            base_digest=upload.base_digest,
            grant=self._configure.grant,
        )
        resources = self._resources
        if resources.keep_unit is not None:
            resources.keep_unit(announced, blob)
            return
        silence, track = self._configure.settings.silence_seconds, "weights to the edge server"
        with SPANS.span(track, "push", unit=upload.unit_index) as moved:
            push_unit(resources.channels, command.edge_address, announced, blob, silence, report)
            moved.num_bytes = blob.total_bytes
        self._pushed_bytes += blob.total_bytes

    def _put_backward(self, frame: Frame) -> None:
        """Sends a frame to the previous stage. If it does not take its frames, they must not fill the memory.

        Raises:
            PeerLostError: More frames wait than its in-flight window allows.
        """
        most = self._link_capacity(self.stage_index - 1)
        # The tokens of an answer are small, and a head may generate all of them at once.
        if len(self._to_previous_stage) >= most and not self._configure.settings.is_use:
            host_id = self.plan.stages[self.stage_index - 1].host_id
            raise PeerLostError(
                host_id,
                f"{host_id} has not taken {most} frames, but sent further ones, and its in-flight window allows no more: it hangs, or "
                "runs another version",
            )
        self._to_previous_stage.put(frame)

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
            attempt=self.attempt, cluster_index=self.cluster_index, stage_index=next_index
        )
        address = self._configure.plan.stages[next_index].address
        stub = stage_pb2_grpc.StageServiceStub(self._resources.channels.channel(address))
        links = self._links_with(next_index, self._to_next_stage)
        seconds = _OPENING_SHARE * self._configure.settings.silence_seconds
        return StreamToNextStage(stub, opening, links, seconds, self.lose_stream)

    def _take_shares(self) -> None:
        """Gives the links to both neighbours their shares of the plan, until the session is closed."""
        plan = self._configure.plan
        for index in (self.stage_index - 1, self.stage_index + 1):
            if 0 <= index < len(plan.stages):
                link = self._resources.links.link_to(plan.stages[index].host_id)
                share = link_settings(plan, self.stage_index, index).share
                self._shares.enter_context(link.limited_to(share))

    def _links_with(self, neighbour_index: int, outbox: Outbox[Frame]) -> NeighbourLinks:
        assert self._shapes is not None
        plan, links = self._configure.plan, self._resources.links
        neighbour = plan.stages[neighbour_index]
        stage_labels = (str(self._configure.host_cluster), str(self.stage_index))
        settings = link_settings(plan, self.stage_index, neighbour_index)
        incoming = IncomingLink(
            neighbour.host_id,
            links.host_id,
            of_kinds(
                self._frame_limits,
                TOWARDS_HEAD if neighbour_index < self.stage_index else TOWARDS_EMBEDDING,
            ),
            stage_labels,
            self._link_capacity(neighbour_index),
            links.emulation,
            self.mailbox.put,
            self._shapes.mistake_in,
        )
        self._incoming.append(incoming)
        shared = links.link_to(neighbour.host_id, neighbour.address)
        return NeighbourLinks(stage_labels, outbox, OutgoingLink(shared, settings), incoming)

    def _link_capacity(self, neighbour_index: int) -> int:
        """Returns the frames that the larger in-flight window of this stage and a neighbour holds."""
        window = max(self._in_flight, self._configure.plan.stages[neighbour_index].in_flight)
        return window * self._num_slices


def _training(configure: stage_pb2.ConfigureStage) -> TrainingConfig:
    """Reads the training settings of a session; raises `InvalidInputError`."""
    try:
        return TrainingConfig.model_validate_json(configure.settings.training_json)
    except ValidationError as error:
        origin = "the training settings of the session"
        raise InvalidInputError(explain_mistakes(error, origin, TrainingConfig)) from error


def _check_configuration(configure: stage_pb2.ConfigureStage) -> None:
    """Refuses a configuration that contradicts itself, before anything is allocated."""
    stages = configure.plan.stages
    if configure.stage_index >= len(stages):
        raise InvalidInputError(
            f"stage {configure.stage_index} does not exist: it must be less than the number of stages of the plan, {len(stages)}"
        )
    stage = stages[configure.stage_index]
    units = [state.unit_index for state in configure.units]
    # A range takes no memory, however long it is.
    wanted = range(stage.start_unit, stage.stop_unit)
    if len(units) != len(wanted) or units != list(wanted):
        raise InvalidInputError(
            f"stage {configure.stage_index} is to run units {stage.start_unit} to {stage.stop_unit - 1}, "
            f"but was given the state of units {units}"
        )
    if len(configure.sources) != len(units):
        raise InvalidInputError(
            f"stage {configure.stage_index} was given the sources of {len(configure.sources)} of its {len(units)} units: run the same "
            "version everywhere"
        )
    if configure.HasField("privacy") and len(configure.privacy.secrets) != len(units):
        raise InvalidInputError(
            f"stage {configure.stage_index} was given {len(configure.privacy.secrets)} secrets for the noise of "
            f"{len(units)} units: run the same version everywhere"
        )
    if wrong := impossible_value(configure.privacy, most_characters=_MOST_SECRET_BYTES):
        raise InvalidInputError(
            f"stage {configure.stage_index} was given {wrong}: run the same version everywhere"
        )
    if stage.in_flight < 1:
        raise InvalidInputError(
            f"stage {configure.stage_index} has an in-flight window of 0: it needs at least 1"
        )
    if not 0 < configure.settings.silence_seconds <= _MOST_SILENCE_SECONDS:
        raise InvalidInputError(
            f"a transfer to stage {configure.stage_index} may be silent for {configure.settings.silence_seconds:g} s, but this must be above 0 "
            f"and at most {_MOST_SILENCE_SECONDS:.0f} s: run the same version everywhere"
        )
    _upload_codec(configure.plan)
    for index in range(len(configure.plan.links)):
        link_settings(configure.plan, index, index + 1)
        link_settings(configure.plan, index + 1, index)
    upload_share(configure.plan, configure.stage_index)


def _privacy_of_units(
    configure: stage_pb2.ConfigureStage, adapter: ModelAdapter
) -> dict[int, UpdatePrivacy]:
    """Returns how the change of each unit becomes private; nothing if it does not."""
    privacy = configure.privacy
    if not privacy.secrets:
        return {}
    clip_norm = privacy.clip_norm / math.sqrt(adapter.num_trained_units)
    return {
        unit.unit_index: UpdatePrivacy(clip_norm, privacy.noise_stddev, secret)
        for unit, secret in zip(configure.units, privacy.secrets, strict=True)
    }


def _upload_codec(plan: plan_pb2.Plan) -> UploadCodecName:
    """Returns the codec of uploads in a plan. Raises `InvalidInputError` if this version does not know it."""
    name = plan.upload_codec or "fp32"
    for known in UPLOAD_CODECS:
        if known == name:
            return known
    raise InvalidInputError(
        f"the plan uploads with codec {name!r}, which this version does not know: use one of {', '.join(UPLOAD_CODECS)}, "
        "or run the same version on all hosts"
    )
