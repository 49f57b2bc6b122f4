"""A stage host on loopback, with a control unit and a previous stage that call it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from collapipe.job import TrainingConfig
from collapipe.models import ModelAdapter
from collapipe.rpc import ChannelPool, Outbox, Security, serve, within_silence
from collapipe.stage_host import HostResources, StageServicer
from collapipe.stage_runtime import CPU
from collapipe.tensors import Frame, FrameAssembler, FrameKind, encode_frame
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.v1 import blob_pb2_grpc, stage_pb2_grpc
from collapipe.v1.plan_pb2 import Attempt, ModelSpec, Plan, SessionSettings, Stage, UnitState
from collapipe.v1.stage_pb2 import (
    ConfigureStage,
    ExchangeActivationsRequest,
    FinishRound,
    OpenLink,
    RunStageRequest,
    RunStageResponse,
    RunStep,
    UnitSource,
)
from collapipe.v1.tensor_pb2 import CODEC_FP32, Codec
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.tensor_blob import TensorBlob
from collapipe.weights.transfer import BlobServicer

PLAIN = Security.insecure()
FIRST_UNIT = 1
CLUSTER = 70
TRAINING = TrainingConfig(learning_rate=0.1, mini_batch=6)

StreamPart = ExchangeActivationsRequest


@dataclass
class StageHost:
    """A host that runs the blocks and the head: the last stage of a plan of two."""

    address: str
    servicer: StageServicer
    resources: HostResources
    channels: ChannelPool
    configuration: ConfigureStage
    streams: list["NeighbourStream"] = field(default_factory=list)
    """Every stream that was opened, because gRPC cancels a call to which nothing refers."""

    @property
    def units(self) -> list[int]:
        return [state.unit_index for state in self.configuration.units]

    def configure(
        self,
        attempt: int = 0,
        round_index: int = 0,
        job_id: str = "job",
        units: Iterable[UnitState] | None = None,
        host_cluster: int = 0,
    ) -> ConfigureStage:
        """Returns a configuration as a control unit sends it."""
        made = ConfigureStage(host_cluster=host_cluster)
        made.MergeFrom(self.configuration)
        made.attempt.MergeFrom(
            Attempt(job_id=job_id, round_index=round_index, attempt=attempt, plan_id="plan")
        )
        if units is not None:
            del made.units[:]
            made.units.extend(units)
        return made

    def open(self, configure: ConfigureStage) -> "Session":
        return Session(self, configure)

    def ready(self, attempt: int = 0, **where: object) -> "Session":
        """Opens a session and waits until its stage is configured."""
        session = self.open(self.configure(attempt, **where))  # type: ignore[arg-type]
        session.expect("configured")
        return session

    def stream(
        self, configure: ConfigureStage, change: OpenLink | None = None
    ) -> "NeighbourStream":
        """Opens the stream of the previous stage, with another opening message if a test says so."""
        opening = OpenLink(attempt=configure.attempt, cluster_index=CLUSTER, stage_index=1)
        if change is not None:
            opening.MergeFrom(change)
        made = NeighbourStream(self, opening)
        self.streams.append(made)
        return made


LABELS = torch.tensor([0, 1, 2])
"""Of each micro-batch."""


class Session:
    """A control unit's session with the host."""

    def __init__(self, host: StageHost, configure: ConfigureStage) -> None:
        self.configure = configure
        self._requests: Outbox[RunStageRequest] = Outbox()
        self.send(RunStageRequest(configure=configure))
        stub = stage_pb2_grpc.StageServiceStub(host.channels.channel(host.address))
        self._call = stub.RunStage(iter(self._requests))
        self._answers = within_silence(self._call, 60.0, "the host", lambda: "answer")

    def send(self, request: RunStageRequest) -> None:
        self._requests.put(request)

    def run_step(self, step: int, num_micro_batches: int = 1, scale: float = 0.0) -> None:
        command = RunStep(
            step_index=step,
            num_micro_batches=num_micro_batches,
            num_targets=3 * num_micro_batches,
            pending_gradient_scale=scale,
        )
        self.send(RunStageRequest(run_step=command))
        for number in range(num_micro_batches):
            self.send_labels(Frame(FrameKind.LABELS, step, number, {"labels": LABELS}))

    def send_labels(self, frame: Frame) -> None:
        header, chunks = encode_frame(frame)
        self.send(RunStageRequest(labels=header))
        for chunk in chunks:
            self.send(RunStageRequest(labels_chunk=chunk))

    def finish(self, scale: float) -> list[UnitState]:
        self.send(RunStageRequest(finish=FinishRound(pending_gradient_scale=scale)))
        return list(self.expect("finished").finished.units)

    def next(self) -> RunStageResponse | None:
        """Returns the next answer that is no sign of life; `None` at the end."""
        for answer in self._answers:
            if answer.WhichOneof("event") != "progress":
                return answer
        return None

    def expect(self, event: str) -> RunStageResponse:
        answer = self.next()
        assert answer is not None, f"the session ended without {event!r}"
        assert answer.WhichOneof("event") == event, answer
        return answer

    def waits_for(self, what: str) -> None:
        """Reads signs of life until the host says that it waits for `what`."""
        for answer in self._answers:
            assert answer.WhichOneof("event") == "progress", answer
            if what in answer.progress.waiting_for:
                return
        raise AssertionError(f"the session ended before it waited for {what!r}")

    def waits_for_nothing(self) -> None:
        """Reads signs of life until the host says that it computes."""
        while self.next_of_any_kind().progress.waiting_for:
            pass

    def next_of_any_kind(self) -> RunStageResponse:
        """Returns the next answer, which may be a sign of life."""
        answer = next(self._answers, None)
        assert answer is not None, "the session ended"
        return answer

    def close(self) -> None:
        """Ends the session in good order."""
        self._requests.close()

    def vanish(self) -> None:
        """Breaks the session, as a killed control unit does."""
        self._call.cancel()
        self._requests.close()


class NeighbourStream:
    """A stream that the previous stage opens."""

    def __init__(self, host: StageHost, opening: OpenLink) -> None:
        self._parts: Outbox[StreamPart] = Outbox()
        self.codecs: dict[str, Codec] = {}
        """The codec of each tensor in the last frame that arrived."""
        self.send(StreamPart(open=opening))
        stub = stage_pb2_grpc.StageServiceStub(host.channels.channel(host.address))
        self._call = stub.ExchangeActivations(iter(self._parts))
        self._answers = within_silence(self._call, 60.0, "the host", lambda: "send a frame")
        self._assembler = FrameAssembler()

    def send(self, part: StreamPart) -> None:
        self._parts.put(part)

    def send_frame(self, frame: Frame, codec: Codec = CODEC_FP32) -> None:
        header, chunks = encode_frame(frame, codec)
        self.send(StreamPart(frame=header))
        for chunk in chunks:
            self.send(StreamPart(chunk=chunk))

    def receive(self) -> Frame | None:
        """Returns the next frame; `None` at the end. Raises the error that ended the stream."""
        for part in self._answers:
            frame = None
            match part.WhichOneof("part"):
                case "frame":
                    self.codecs = {tensor.name: tensor.codec for tensor in part.frame.tensors}
                    frame = self._assembler.begin(part.frame)
                case "chunk":
                    frame = self._assembler.add(part.chunk)
            if frame is not None:
                return frame
        return None

    def vanish(self) -> None:
        self._call.cancel()
        self._parts.close()


def activation_frame(number: int = 0, step: int = 0) -> Frame:
    generator = torch.Generator().manual_seed(number)
    tensors: dict[str, Tensor] = {
        "activation": torch.randn(3, 4, 16, generator=generator),
        "attention_mask": torch.ones(3, 4, dtype=torch.int64),
    }
    return Frame(FrameKind.FORWARD, step, number, tensors)


def train(session: Session, stream: NeighbourStream, num_steps: int = 1) -> None:
    """Runs steps of one micro-batch each."""
    for step in range(num_steps):
        session.run_step(step, scale=1.0)
        stream.send_frame(activation_frame(step=step))
        session.expect("step_done")


@contextmanager
def stage_host(
    adapter: ModelAdapter,
    config_json: str,
    states: list[dict[str, Tensor]],
    frozen: Sequence[dict[str, Tensor]] = (),
    model_dir: Path | None = None,
) -> Iterator[StageHost]:
    """Starts a stage host, and a server that has the initial weights.

    Args:
        states: What is trained of each unit.
        frozen: What is frozen of each unit, if the job has LoRA.
        model_dir: The host's folder of pretrained directories.
    """
    trained_digests, frozen_digests = (
        [TensorBlob(tensors).digest for tensors in each] for each in (states, frozen)
    )
    blobs = {blob.digest: blob for blob in map(TensorBlob, (*states, *frozen))}
    keeper = serve(
        "127.0.0.1:0",
        PLAIN,
        lambda server, address: blob_pb2_grpc.add_BlobServiceServicer_to_server(
            BlobServicer(blobs.__getitem__), server
        ),
    )
    channels = ChannelPool(PLAIN)
    links = OutgoingLinks.unlimited("device-1")
    resources = HostResources(CPU, channels, links, BlobCache(), model_dir=model_dir)
    servicer = StageServicer(resources)

    def add_services(server: object, address: str) -> None:
        stage_pb2_grpc.add_StageServiceServicer_to_server(servicer, server)  # type: ignore[arg-type]
        blob_pb2_grpc.add_BlobServiceServicer_to_server(
            BlobServicer(resources.find_blob),
            server,  # type: ignore[arg-type]
        )

    server = serve("127.0.0.1:0", PLAIN, add_services)
    units = range(FIRST_UNIT, adapter.num_units)
    frozen_of = dict(enumerate(frozen_digests))
    configuration = ConfigureStage(
        plan=Plan(
            plan_id="plan",
            cluster_index=CLUSTER,
            num_micro_batches=2,
            stages=[
                Stage(host_id="control-unit", start_unit=0, stop_unit=FIRST_UNIT, in_flight=2),
                Stage(
                    host_id="device-1",
                    address=server.address,
                    start_unit=FIRST_UNIT,
                    stop_unit=adapter.num_units,
                    in_flight=1,
                ),
            ],
        ),
        stage_index=1,
        model=ModelSpec(family=adapter.family, task=adapter.task, config_json=config_json),
        settings=SessionSettings(
            training_json=TRAINING.model_dump_json(),
            total_steps=10,
            silence_seconds=60,
            max_length=4,
        ),
        units=[
            UnitState(
                unit_index=unit,
                weights_digest=trained_digests[unit],
                frozen_digest=frozen_of.get(unit, ""),
            )
            for unit in units
        ],
        sources=[
            UnitSource(
                unit_index=unit,
                weights_addresses=[keeper.address],
                frozen_addresses=[keeper.address],
            )
            for unit in units
        ],
    )
    try:
        yield StageHost(server.address, servicer, resources, channels, configuration)
    finally:
        channels.close()
        server.drain(0)
        keeper.drain(0)
