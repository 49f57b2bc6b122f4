"""The plans that hosts receive."""

from dataclasses import replace

from collapipe.allocation import ClusterPlan, LinkPlan, StagePlan, UploadPlan
from collapipe.scheduler.plan_messages import equal_plan, to_messages, with_addresses
from collapipe.scheduler.round_problem import build_problem

from .jobs import SIZES, hosts, job, knowledge

_STAGES = (StagePlan("device-0", 0, 7, 1), StagePlan("edge-server", 7, 8, 1))


def test_message_has_the_slices_of_a_plan_and_none_for_whole_rows() -> None:
    problem = build_problem(job(), SIZES, hosts(), knowledge(hosts()), round_index=0)
    plan = ClusterPlan(_STAGES, 1, (LinkPlan(),))
    addresses = {stage.host_id: "" for stage in _STAGES}
    (whole,), (cut,) = (
        to_messages(addresses, problem, (replace(plan, num_slices=s),)) for s in (1, 4)
    )
    assert (whole.num_slices, cut.num_slices) == (0, 4)
    assert whole.plan_id != cut.plan_id


def test_message_has_the_uploads_of_a_plan_and_its_identity_depends_on_them() -> None:
    problem = build_problem(job(), SIZES, hosts(), knowledge(hosts()), round_index=0)
    plan = ClusterPlan(_STAGES, 1, (LinkPlan(),))
    uploading = replace(plan, uploads=(UploadPlan(2e6, 0.1), UploadPlan()))
    addresses = {stage.host_id: "" for stage in _STAGES}
    (without,), (message,) = (to_messages(addresses, problem, (one,)) for one in (plan, uploading))
    first, last = message.stages
    assert (first.upload_bandwidth_hz, first.upload_transmit_power_watts) == (2e6, 0.1)
    assert (last.upload_bandwidth_hz, last.upload_transmit_power_watts) == (0.0, 0.0)
    assert without.stages[0].upload_bandwidth_hz == 0.0
    assert message.plan_id != without.plan_id


def test_equal_plan_divides_the_blocks_among_the_devices_that_are_there() -> None:
    def ranges(num_devices: int, most_devices: int | None) -> list[tuple[str, int, int]]:
        plan = equal_plan(hosts(num_devices), most_devices, num_blocks=5, num_micro_batches=4)
        assert (len(plan.links), plan.num_micro_batches) == (len(plan.stages) - 1, 4)
        assert all(stage.in_flight >= 1 and stage.address for stage in plan.stages)
        return [(stage.host_id, stage.start_unit, stage.stop_unit) for stage in plan.stages]

    unit, edge = ("control-unit", 0, 1), ("edge-server", 6, 7)
    assert ranges(2, None) == [unit, ("device-0", 1, 4), ("device-1", 4, 6), edge]
    assert ranges(2, 1) == [unit, ("device-0", 1, 6), edge]
    assert [name for name, _, _ in ranges(9, None)[1:-1]] == [f"device-{k}" for k in range(5)]


def test_recorded_plan_gets_the_present_addresses_and_another_identity() -> None:
    plan = equal_plan(hosts(1), None, num_blocks=2, num_micro_batches=1)
    same = with_addresses(plan, {stage.host_id: stage.address for stage in plan.stages})
    moved = with_addresses(plan, {stage.host_id: "elsewhere:1" for stage in plan.stages})
    assert same == plan
    assert {stage.address for stage in moved.stages} == {"elsewhere:1"}
    assert moved.plan_id != plan.plan_id
