"""Whom a control unit believes to be lost, over real gRPC."""

import threading
from collections.abc import Iterator

import grpc
import pytest

from collapipe.control_unit.cluster_pipeline import ClusterPipeline
from collapipe.control_unit.remote_stage import RemoteStage
from collapipe.errors import CancelledError, CollapipeError, DivergedError, PeerLostError
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.v1 import stage_pb2, stage_pb2_grpc
from collapipe.v1.plan_pb2 import Plan, Stage


class Failing(stage_pb2_grpc.StageServiceServicer):
    """A stage that fails at once, and blames whom a test chooses."""

    def __init__(self, failed: stage_pb2.StageFailed) -> None:
        self._failed = failed

    def RunStage(
        self, request_iterator: Iterator[stage_pb2.RunStageRequest], context: grpc.ServicerContext
    ) -> Iterator[stage_pb2.RunStageResponse]:
        next(request_iterator)
        yield stage_pb2.RunStageResponse(failed=self._failed)


@pytest.mark.parametrize("diverged", [False, True])
@pytest.mark.parametrize(
    ("blamed", "believed"),
    [
        ("neighbour", "neighbour"),
        ("127.0.0.1:9", "127.0.0.1:9"),
        ("10.0.0.9:7100", "10.0.0.9:7100"),
        ("device-of-others", "stage"),
    ],
    ids=["host of the plan", "address of the plan", "source of weights", "host of another cluster"],
)
def test_stage_may_blame_only_hosts_that_it_has_to_do_with(
    blamed: str, believed: str, diverged: bool
) -> None:
    failed = stage_pb2.StageFailed(message="lost", blamed_host_id=blamed, diverged=diverged)
    plain = Security.insecure()
    server = serve(
        "127.0.0.1:0",
        plain,
        lambda server, _: stage_pb2_grpc.add_StageServiceServicer_to_server(
            Failing(failed), server
        ),
    )
    channels, has_failed = ChannelPool(plain), threading.Event()
    failures: list[CollapipeError] = []

    def on_failure(failure: CollapipeError) -> None:
        failures.append(failure)
        has_failed.set()

    own = Stage(host_id="stage", address=server.address)
    plan = Plan(stages=[own, Stage(host_id="neighbour", address="127.0.0.1:9")])
    source = stage_pb2.UnitSource(weights_addresses=["10.0.0.9:7100"])
    configure = stage_pb2.ConfigureStage(plan=plan, sources=[source])
    remote = RemoteStage(own, configure, channels, 10.0, on_failure)
    try:
        assert has_failed.wait(20)
    finally:
        remote.close()
        channels.close()
        server.drain(0)
    (failure,) = failures
    assert isinstance(failure, DivergedError if diverged else PeerLostError)
    assert failure.host_id == believed


class Working(stage_pb2_grpc.StageServiceServicer):
    """A stage that works on until its caller goes away."""

    def __init__(self) -> None:
        self.has_begun, self.is_left = threading.Event(), threading.Event()

    def RunStage(
        self, request_iterator: Iterator[stage_pb2.RunStageRequest], context: grpc.ServicerContext
    ) -> Iterator[stage_pb2.RunStageResponse]:
        context.add_callback(self.is_left.set)
        next(request_iterator)
        self.has_begun.set()
        while not self.is_left.wait(0.1):
            yield stage_pb2.RunStageResponse(progress=stage_pb2.StageProgress())


def test_stage_is_left_if_the_round_ends_before_the_abort_has_reached_it() -> None:
    plain, working = Security.insecure(), Working()
    server = serve(
        "127.0.0.1:0",
        plain,
        lambda server, _: stage_pb2_grpc.add_StageServiceServicer_to_server(working, server),
    )
    channels = ChannelPool(plain)

    class LocalStage:
        """The round ends as soon as its local stage is aborted."""

        def abort(self, reason: CollapipeError) -> None:
            pipeline.close()

        def close(self) -> None:
            pass

    pipeline = ClusterPipeline.__new__(ClusterPipeline)
    own = Stage(host_id="stage", address=server.address)
    configure = stage_pb2.ConfigureStage(plan=Plan(stages=[own]))
    remote = RemoteStage(own, configure, channels, 10.0, lambda failure: None)
    vars(pipeline).update(
        _abort_lock=threading.Lock(), _aborted=None, _local=LocalStage(), _remotes=[remote]
    )
    try:
        assert working.has_begun.wait(20)
        pipeline.abort(CancelledError("the job was cancelled"))
        assert working.is_left.wait(10)
    finally:
        working.is_left.set()
        channels.close()
        server.drain(0)
