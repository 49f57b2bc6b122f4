"""Whom a control unit believes to be lost, which stages it leaves, and how it names what they wait for."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import grpc
import pytest

from collapipe.control_unit.cluster_pipeline import ClusterPipeline, hosts_do
from collapipe.control_unit.remote_stage import RemoteStage
from collapipe.errors import CancelledError, CollapipeError, DivergedError, PeerLostError
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.v1 import stage_pb2, stage_pb2_grpc
from collapipe.v1.plan_pb2 import Plan, Stage

from .clusters import SECONDS

PLAIN = Security.insecure()


@pytest.mark.parametrize(
    ("hosts", "words"),
    [("a", "a waits"), ("ab", "a and b wait"), ("abc", "a, b and c wait")],
)
def test_hosts_are_named_with_the_right_verb(hosts: str, words: str) -> None:
    assert hosts_do(list(hosts), "wait") == words


class StageHost(stage_pb2_grpc.StageServiceServicer):
    """A host whose stage fails at once if a test says how, and else works on until its caller goes away."""

    def __init__(self) -> None:
        self.failed: stage_pb2.StageFailed | None = None
        self.has_begun, self.is_left = threading.Event(), threading.Event()
        self.channels = ChannelPool(PLAIN)
        self.server = serve("127.0.0.1:0", PLAIN, self._add)
        self.stage = Stage(host_id="stage", address=self.server.address)

    def _add(self, server: grpc.Server, address: str) -> None:
        stage_pb2_grpc.add_StageServiceServicer_to_server(self, server)

    def close(self) -> None:
        self.is_left.set()
        self.channels.close()
        self.server.drain(0)

    def RunStage(
        self, request_iterator: Iterator[stage_pb2.RunStageRequest], context: grpc.ServicerContext
    ) -> Iterator[stage_pb2.RunStageResponse]:
        next(request_iterator)
        if self.failed is not None:
            yield stage_pb2.RunStageResponse(failed=self.failed)
            return
        context.add_callback(self.is_left.set)
        self.has_begun.set()
        self.is_left.wait(SECONDS)


@pytest.fixture
def host() -> Iterator[StageHost]:
    with ExitStack() as stack:
        host = StageHost()
        stack.callback(host.close)
        yield host


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
    host: StageHost, blamed: str, believed: str, diverged: bool
) -> None:
    host.failed = stage_pb2.StageFailed(message="lost", blamed_host_id=blamed, diverged=diverged)
    has_failed = threading.Event()
    failures: list[CollapipeError] = []

    def on_failure(failure: CollapipeError) -> None:
        failures.append(failure)
        has_failed.set()

    plan = Plan(stages=[host.stage, Stage(host_id="neighbour", address="127.0.0.1:9")])
    source = stage_pb2.UnitSource(weights_addresses=["10.0.0.9:7100"])
    configure = stage_pb2.ConfigureStage(plan=plan, sources=[source])
    remote = RemoteStage(host.stage, configure, host.channels, SECONDS, on_failure)
    assert has_failed.wait(SECONDS)
    remote.close()
    (failure,) = failures
    assert isinstance(failure, DivergedError if diverged else PeerLostError)
    assert failure.host_id == believed


def test_stage_is_left_if_the_round_ends_before_the_abort_has_reached_it(host: StageHost) -> None:
    pipeline = ClusterPipeline.__new__(ClusterPipeline)
    # The round ends as soon as its local stage is aborted.
    local = SimpleNamespace(abort=lambda reason: pipeline.close(), close=lambda: None)
    configure = stage_pb2.ConfigureStage(plan=Plan(stages=[host.stage]))
    remote = RemoteStage(host.stage, configure, host.channels, SECONDS, lambda failure: None)
    vars(pipeline).update(
        _abort_lock=threading.Lock(), _aborted=None, _local=local, _remotes=[remote]
    )
    assert host.has_begun.wait(SECONDS)
    pipeline.abort(CancelledError("the job was cancelled"))
    assert host.is_left.wait(SECONDS)


def test_host_whose_own_session_broke_is_blamed_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    noticed, own = PeerLostError("dead", "its neighbour waits"), PeerLostError("dead", "it broke")
    pipeline = ClusterPipeline.__new__(ClusterPipeline)
    neighbour = SimpleNamespace(host_id="neighbour", failure=noticed)
    dead = SimpleNamespace(host_id="dead", failure=own)
    vars(pipeline).update(_aborted=noticed, _remotes=[neighbour, dead])
    assert pipeline.failure_cause(noticed) is own
    vars(pipeline).update(_remotes=[neighbour])
    assert pipeline.failure_cause(noticed) is noticed
