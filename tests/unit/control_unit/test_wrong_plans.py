"""A control unit refuses a plan that does not fit its job, with the right status, and goes on."""

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from reference.tiny_jobs import make_job

from collapipe.v1.control_unit_pb2 import RunRoundRequest
from collapipe.v1.plan_pb2 import Stage

from .clusters import MakeCluster, Ranges

RANGES: Ranges = [("control-unit-0", 0, 1), ("device-0-0", 1, 4), ("edge-server", 4, 5)]


def of_cluster_7(request: RunRoundRequest) -> None:
    request.plan.cluster_index = 7


def without_stages(request: RunRoundRequest) -> None:
    del request.plan.stages[:]


def without_micro_batches(request: RunRoundRequest) -> None:
    request.plan.num_micro_batches = 0


def with_too_many_units(request: RunRoundRequest) -> None:
    request.plan.stages[0].stop_unit = 2**32 - 1


def after_a_stage_with_too_many_units(request: RunRoundRequest) -> None:
    # Listing these units would take all memory.
    request.previous_stages.append(Stage(host_id="device-0-0", stop_unit=2**32 - 1))


@pytest.mark.parametrize(
    "change",
    [
        of_cluster_7,
        without_stages,
        without_micro_batches,
        with_too_many_units,
        after_a_stage_with_too_many_units,
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    make_cluster: MakeCluster, tmp_path: Path, change: Callable[[RunRoundRequest], None]
) -> None:
    cluster = make_cluster(make_job(tmp_path, training={"rounds": 1}))
    with pytest.raises(grpc.RpcError) as refused:
        cluster.run_round(RANGES, change=change)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()
    cluster.prepare()  # A new attempt begins.
    cluster.run_round(RANGES)
    assert cluster.commit.num_rounds == 1
