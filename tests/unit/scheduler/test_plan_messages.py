"""The plans that hosts receive."""

from dataclasses import replace

from collapipe.allocation import ClusterPlan, LinkPlan, StagePlan, UploadPlan
from collapipe.scheduler.plan_messages import to_messages
from collapipe.scheduler.round_problem import build_problem

from .jobs import SIZES, hosts, job, knowledge

_STAGES = (StagePlan("device-0", 0, 7, 1), StagePlan("edge-server", 7, 8, 1))


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
