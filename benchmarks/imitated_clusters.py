"""Imitates the control units and devices of many clusters, for benchmarks/load.py.

    python -m benchmarks.imitated_clusters --ready-file ready.json

This one process answers for all hosts. Each host has an address of its own in 127.1.0.0/16, and all share a port. It takes
part in rounds of a real scheduler and a real edge server, as far as they can see:

- Devices answer profiles and probes with values that a seed chooses, and report metrics with matching counters.
- A control unit runs each cluster's head at the edge server: it opens the session of that stage, and the stream on which a
  device would send its activations. It sends frames of random activations, and waits for the gradients of each.
- The other stages compute nothing. Their hosts fetch the global weights, and push the same weights after the steps.
- Optimizer states of blocks do not exist, so nothing is copied, and the control units say that they have the copy.
"""

import argparse
import asyncio
import hashlib
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from collapipe.control_unit.stage_configuration import stage_configuration
from collapipe.documents import write_document
from collapipe.job import JobConfig
from collapipe.rpc.options import COMMON_OPTIONS, SERVER_OPTIONS
from collapipe.tasks import MicroBatch, Task, load_task
from collapipe.tensors import ACTIVATION, LABELS, Frame, FrameKind, encode_frame
from collapipe.v1 import (
    blob_pb2,
    blob_pb2_grpc,
    control_unit_pb2,
    control_unit_pb2_grpc,
    edge_server_pb2,
    edge_server_pb2_grpc,
    job_pb2,
    link_pb2,
    link_pb2_grpc,
    plan_pb2,
    profile_pb2,
    profile_pb2_grpc,
    stage_pb2,
    stage_pb2_grpc,
    telemetry_pb2,
    telemetry_pb2_grpc,
)

DEVICES_PER_CLUSTER = 10
HOSTS_PER_CLUSTER = DEVICES_PER_CLUSTER + 2
"""A control unit, the devices, and one more device that comes and goes."""

STEP_SECONDS = 2.0
"""The other stages need this long for a step, so the streams stay open and carry frames all the time."""

_SIGN_OF_LIFE_SECONDS = 1.0
_GOODPUT_BPS = 1e9


def address_of(cluster_index: int, position: int, port: int) -> str:
    """Returns the address of a host. Position 0 is the control unit, and the last one is the device that comes and goes."""
    number = cluster_index * HOSTS_PER_CLUSTER + position
    return f"127.1.{number // 250}.{number % 250 + 1}:{port}"


class ImitatedClusters(
    health_pb2_grpc.HealthServicer,
    control_unit_pb2_grpc.ControlUnitServiceServicer,
    blob_pb2_grpc.BlobServiceServicer,
    profile_pb2_grpc.ProfileServiceServicer,
    link_pb2_grpc.LinkServiceServicer,
    telemetry_pb2_grpc.TelemetryServiceServicer,
):
    """The services of all imitated hosts."""

    def __init__(self) -> None:
        self.port = 0
        self._started = time.monotonic()
        self._loading: asyncio.Task[Task] | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Answers for every process of every host."""
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def PrepareData(
        self, request: control_unit_pb2.PrepareDataRequest, context: Any
    ) -> AsyncIterator[control_unit_pb2.PrepareDataResponse]:
        """Loads the data once, and answers the same for each cluster."""
        if self._loading is None:
            job = JobConfig.from_json(request.job.config_json).model_copy(update={"clusters": 1})
            self._loading = asyncio.create_task(asyncio.to_thread(load_task, job, 0, None))
        while not self._loading.done():
            await asyncio.wait({self._loading}, timeout=_SIGN_OF_LIFE_SECONDS)
            yield control_unit_pb2.PrepareDataResponse()
        task, index = self._task, request.cluster_index
        task.set_labels(task.labels)
        digest = hashlib.sha256(task.vocabulary).hexdigest()
        source = job_pb2.BlobSource(digest=digest, address=address_of(index, 0, self.port))
        yield control_unit_pb2.PrepareDataResponse(
            num_rows=task.num_rows,
            labels=task.labels,
            vocabulary=source,
            num_held_out_rows=task.num_held_out_rows,
        )

    async def FetchBlob(
        self, request: blob_pb2.FetchBlobRequest, context: Any
    ) -> AsyncIterator[blob_pb2.FetchBlobResponse]:
        """Sends the vocabulary, which is the only blob that anybody fetches here."""
        yield blob_pb2.FetchBlobResponse(total_bytes=len(self._task.vocabulary))
        yield blob_pb2.FetchBlobResponse(chunk=self._task.vocabulary[request.offset :])

    async def ProfileBlock(
        self, request: profile_pb2.ProfileBlockRequest, context: Any
    ) -> profile_pb2.ProfileBlockResponse:
        return profile_pb2.ProfileBlockResponse(
            seconds_per_sample=random.uniform(0.01, 0.1),
            state_bytes=100_000,
            stash_bytes_per_sample=10_000,
            seconds_per_micro_batch=0.002,
            num_parameters=6_000,
            work_shares=[1.0],
            stash_shares=[1.0],
        )

    async def MeasureLink(
        self, request: link_pb2.MeasureLinkRequest, context: Any
    ) -> link_pb2.MeasureLinkResponse:
        return link_pb2.MeasureLinkResponse(
            goodput_bps=random.uniform(0.1, 1.0) * _GOODPUT_BPS,
            round_trip_seconds=random.uniform(0.001, 0.01),
        )

    async def ReceiveProbe(
        self, request_iterator: AsyncIterator[link_pb2.ReceiveProbeRequest], context: Any
    ) -> AsyncIterator[link_pb2.ReceiveProbeResponse]:
        """Answers a probe of the edge server, and ends it with its first chunk."""
        async for request in request_iterator:
            if request.chunk:
                yield link_pb2.ReceiveProbeResponse(goodput_bps=_GOODPUT_BPS)
                return
            yield link_pb2.ReceiveProbeResponse()

    async def GetMetrics(
        self, request: telemetry_pb2.GetMetricsRequest, context: Any
    ) -> telemetry_pb2.GetMetricsResponse:
        """Answers the same for each host, with counters that grow with the time. The labels do not matter to the scheduler."""
        steps = (time.monotonic() - self._started) / STEP_SECONDS
        counters = {
            "stage_forward_seconds_sum": 0.1 * steps,
            "stage_backward_seconds_sum": 0.2 * steps,
            "stage_backward_seconds_count": 4 * steps,
            "stage_block_samples_total": 8 * steps,
            "stage_end_unit_seconds_total": 0.0,
            "stage_samples_total": 8 * steps,
            "stage_steps_total": steps,
            "stage_update_seconds_total": 0.01 * steps,
        }
        answer = telemetry_pb2.GetMetricsResponse()
        for name, value in counters.items():
            labels = {"cluster": "0", "stage": "0"}
            answer.samples.add(name=f"collapipe_{name}", labels=labels, value=value)
        answer.samples.add(name="collapipe_process_peak_resident_memory_bytes", value=3e8)
        return answer

    async def RunRound(
        self, request: control_unit_pb2.RunRoundRequest, context: Any
    ) -> AsyncIterator[control_unit_pb2.RunRoundResponse]:
        """Runs a round, and sends its progress after each step and in each second without a step."""
        progress = job_pb2.RoundProgress(
            cluster_index=request.plan.cluster_index,
            local_steps=request.local_steps,
            candidate_copied=request.HasField("candidate"),
        )
        stepped = asyncio.Event()
        running = asyncio.create_task(self._run(request, progress, stepped))
        try:
            while not running.done():
                waiting = asyncio.create_task(stepped.wait())
                await asyncio.wait(
                    {running, waiting},
                    timeout=_SIGN_OF_LIFE_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                waiting.cancel()
                stepped.clear()
                yield control_unit_pb2.RunRoundResponse(progress=progress)
            yield control_unit_pb2.RunRoundResponse(prepared=running.result())
        finally:
            running.cancel()

    async def _run(
        self,
        request: control_unit_pb2.RunRoundRequest,
        progress: job_pb2.RoundProgress,
        stepped: asyncio.Event,
    ) -> control_unit_pb2.RoundPrepared:
        job = JobConfig.from_json(request.job.config_json)
        plan, base = request.plan, request.base
        stages, last = plan.stages, len(plan.stages) - 1
        cursor = plan_pb2.DataCursor(num_rows=self._task.num_rows)
        started = time.perf_counter()
        # The last stage is that of the edge server. The one before it sends the frames.
        session = self._stage_stub(stages[0], request.edge_address).RunStage()
        stream = self._stage_stub(stages[last - 1], request.edge_address).ExchangeActivations()
        try:
            configure = stage_configuration(request, job, last, stages[0].address)
            await session.write(stage_pb2.RunStageRequest(configure=configure))
            weights = await self._fetch(request)
            await _answer(session, "configured")
            configured = time.perf_counter()
            opening = stage_pb2.OpenLink(
                attempt=request.attempt, cluster_index=plan.cluster_index, stage_index=last
            )
            await stream.write(stage_pb2.ExchangeActivationsRequest(open=opening))
            await _part(stream)
            progress.training_began = True
            losses = []
            batch = self._micro_batches(job, plan.num_micro_batches)
            hidden = job.model.config["hidden_size"]
            for step_index in range(request.local_steps):
                await asyncio.sleep(STEP_SECONDS)
                losses.append(await _step(session, stream, step_index, batch, hidden))
                progress.steps_done, progress.loss = step_index + 1, losses[-1]
                stepped.set()
            trained = time.perf_counter()
            finish = stage_pb2.FinishRound(
                edge_address=request.edge_address,
                edge_host_id=request.edge_host_id,
                num_samples=cursor.num_rows,
            )
            await session.write(stage_pb2.RunStageRequest(finish=finish))
            await self._push(request, weights, cursor.num_rows)
            heads = (await _answer(session, "finished")).finished.units
            await session.done_writing()
            await stream.done_writing()
        finally:
            session.cancel()
            stream.cancel()
        gathered = time.perf_counter()
        state = plan_pb2.ClusterState(
            cluster_index=plan.cluster_index,
            units=[*base.units[: stages[last].start_unit], *heads],
            cursor=cursor,
            num_samples=cursor.num_rows,
            step_index=base.step_index + request.local_steps,
        )
        summary = job_pb2.RoundSummary(
            losses=losses,
            gradient_norms=losses,
            configure_seconds=configured - started,
            training_seconds=trained - configured,
            gather_seconds=gathered - trained,
            local_steps=request.local_steps,
            stages=[
                job_pb2.StageReport(
                    host_id=stage.host_id, start_unit=stage.start_unit, stop_unit=stage.stop_unit
                )
                for stage in stages
            ],
        )
        return control_unit_pb2.RoundPrepared(
            state=state, summary=summary, candidate_copied=progress.candidate_copied
        )

    @property
    def _task(self) -> Task:
        """The data of all clusters. A round comes after their preparation."""
        assert self._loading is not None
        return self._loading.result()

    def _micro_batches(self, job: JobConfig, num_micro_batches: int) -> list[MicroBatch]:
        rows = range(job.training.mini_batch)
        batches: list[MicroBatch] = self._task.micro_batches(rows, num_micro_batches)
        return batches

    async def _fetch(self, request: control_unit_pb2.RunRoundRequest) -> list[bytes]:
        """Fetches the global weights of the units of all stages but the last one, as their hosts would do."""

        async def fetch(stage: plan_pb2.Stage, unit_index: int) -> bytes:
            channel = self._channel(stage.host_id, request.edge_address)
            digest = request.base.units[unit_index].weights_digest
            call = blob_pb2_grpc.BlobServiceStub(channel).FetchBlob(
                blob_pb2.FetchBlobRequest(digest=digest)
            )
            return b"".join([answer.chunk async for answer in call])  # type: ignore[attr-defined]

        return await asyncio.gather(*(fetch(*pair) for pair in _units_before_head(request.plan)))

    async def _push(
        self,
        request: control_unit_pb2.RunRoundRequest,
        weights: list[bytes],
        num_samples: int,
    ) -> None:
        """Pushes the weights of those units."""

        async def push(stage: plan_pb2.Stage, unit_index: int) -> None:
            data = weights[unit_index]
            unit = edge_server_pb2.PushedUnit(
                attempt=request.attempt,
                cluster_index=request.plan.cluster_index,
                unit_index=unit_index,
                total_bytes=len(data),
                num_samples=num_samples,
            )
            channel = self._channel(stage.host_id, request.edge_address)
            call: Any = edge_server_pb2_grpc.EdgeServerServiceStub(channel).PushUnit()
            await call.write(edge_server_pb2.PushUnitRequest(unit=unit))
            await _part(call)
            await call.write(edge_server_pb2.PushUnitRequest(chunk=data))
            digest = request.base.units[unit_index].weights_digest
            await call.write(edge_server_pb2.PushUnitRequest(digest=digest))
            await call.done_writing()
            while not (await _part(call)).complete:
                pass

        await asyncio.gather(*(push(*pair) for pair in _units_before_head(request.plan)))

    def _stage_stub(self, stage: plan_pb2.Stage, edge_address: str) -> Any:
        return stage_pb2_grpc.StageServiceStub(self._channel(stage.host_id, edge_address))

    def _channel(self, host_id: str, address: str) -> grpc.aio.Channel:
        """Returns the connection of a host to the edge server."""
        if host_id not in self._channels:
            options = [*COMMON_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
            self._channels[host_id] = grpc.aio.insecure_channel(address, options)
        return self._channels[host_id]


def _units_before_head(plan: plan_pb2.Plan) -> list[tuple[plan_pb2.Stage, int]]:
    """Returns each unit of all stages but the last one, with its stage."""
    return [
        (stage, unit)
        for stage in plan.stages[:-1]
        for unit in range(stage.start_unit, stage.stop_unit)
    ]


async def _step(
    session: Any, stream: Any, step_index: int, batches: list[MicroBatch], hidden: int
) -> float:
    """Runs one step of the last stage. Returns its loss."""
    command = stage_pb2.RunStep(
        step_index=step_index,
        num_micro_batches=len(batches),
        num_targets=sum(batch.num_targets for batch in batches),
    )
    await session.write(stage_pb2.RunStageRequest(run_step=command))
    for number, batch in enumerate(batches):
        labels = Frame(FrameKind.LABELS, step_index, number, {LABELS: batch.tensors[LABELS]})
        header, chunks = encode_frame(labels)
        await session.write(stage_pb2.RunStageRequest(labels=header))
        for chunk in chunks:
            await session.write(stage_pb2.RunStageRequest(labels_chunk=chunk))
        tensors = {"attention_mask": batch.tensors["attention_mask"]}
        tensors[ACTIVATION] = torch.randn(*batch.tensors["input_ids"].shape, hidden)
        header, chunks = encode_frame(Frame(FrameKind.FORWARD, step_index, number, tensors))
        header.sent_at_seconds = time.perf_counter()
        await stream.write(stage_pb2.ExchangeActivationsRequest(frame=header))
        for chunk in chunks:
            await stream.write(stage_pb2.ExchangeActivationsRequest(chunk=chunk))
        gradients = (await _part(stream)).frame
        missing = sum(tensor.byte_length for tensor in gradients.tensors)
        while missing:
            missing -= len((await _part(stream)).chunk)
    return float((await _answer(session, "step_done")).step_done.loss)


async def _answer(session: Any, event: str) -> stage_pb2.RunStageResponse:
    """Returns the next answer of a stage that is no sign of life."""
    while True:
        answer: stage_pb2.RunStageResponse = await _part(session)
        if answer.WhichOneof("event") == event:
            return answer
        if answer.WhichOneof("event") != "progress":
            raise RuntimeError(f"the edge server answered {answer} instead of {event}")


async def _part(call: Any) -> Any:
    """Returns the next message of a stream."""
    message = await call.read()
    if message is grpc.aio.EOF:
        raise RuntimeError(f"the edge server ended a stream: {await call.details()}")
    return message


async def serve(ready_file: Path) -> None:
    """Serves all hosts until the process is ended."""
    clusters = ImitatedClusters()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(clusters, server)
    control_unit_pb2_grpc.add_ControlUnitServiceServicer_to_server(clusters, server)
    blob_pb2_grpc.add_BlobServiceServicer_to_server(clusters, server)
    profile_pb2_grpc.add_ProfileServiceServicer_to_server(clusters, server)
    link_pb2_grpc.add_LinkServiceServicer_to_server(clusters, server)
    telemetry_pb2_grpc.add_TelemetryServiceServicer_to_server(clusters, server)
    clusters.port = server.add_insecure_port("0.0.0.0:0")
    await server.start()
    write_document(ready_file, {"port": clusters.port, "pid": os.getpid()})
    await server.wait_for_termination()


def main() -> None:
    """Imitates the clusters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ready-file", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(serve(options.ready_file))


if __name__ == "__main__":
    main()
