"""Plans as the hosts get them, and the replay of a recorded one."""

import hashlib
import math
from collections.abc import Mapping, Sequence

from collapipe.allocation import ClusterPlan, LinkPlan, RadioLink, RoundProblem
from collapipe.codec_names import CODECS_BY_NAME
from collapipe.scheduler.decisions import RoundDecision, decide_again
from collapipe.v1 import plan_pb2


def to_message(
    addresses: Mapping[str, str], problem: RoundProblem, cluster_index: int, decided: ClusterPlan
) -> plan_pb2.Plan:
    """The plan of one cluster as its hosts get it.

    Args:
        addresses: Of the hosts, by their identities.
        problem: What was decided about: its links tell wires from radios.
        cluster_index: The cluster.
        decided: Its plan.
    """
    plan = plan_pb2.Plan(
        cluster_index=cluster_index,
        num_micro_batches=decided.num_micro_batches,
        stages=[
            plan_pb2.Stage(
                host_id=stage.host_id,
                address=addresses[stage.host_id],
                start_unit=stage.start_unit,
                stop_unit=stage.stop_unit,
                in_flight=stage.in_flight,
            )
            for stage in decided.stages
        ],
    )
    links = problem.clusters[cluster_index].links
    for position, link in enumerate(decided.links):
        pair = (decided.stages[position].host_id, decided.stages[position + 1].host_id)
        plan.links.append(_link_message(link, is_radio=isinstance(links.get(pair), RadioLink)))
    content = plan.SerializeToString(deterministic=True)
    plan.plan_id = hashlib.sha256(content).hexdigest()[:16]
    return plan


def _link_message(link: LinkPlan, *, is_radio: bool) -> plan_pb2.LinkPlan:
    wire = plan_pb2.LinkPlan(codec=CODECS_BY_NAME[link.codec])
    if is_radio:
        wire.bandwidth_hz = link.share if math.isfinite(link.share) else 0.0
        wire.transmit_power_watts = link.forward_watts
        wire.return_transmit_power_watts = link.backward_watts
    elif math.isfinite(link.share):
        wire.rate_limit_bps = max(1, round(link.share))
    return wire


def replay(decision: RoundDecision, recorded: Sequence[plan_pb2.Plan]) -> list[plan_pb2.Plan]:
    """Decides again what was decided, with the addresses of the recorded plans.

    A plan that was kept without asking (no telemetry, a solver that failed) is kept again.
    """
    again = decide_again(decision)
    addresses = {stage.host_id: stage.address for plan in recorded for stage in plan.stages}
    problem = decision.question.problem
    return [to_message(addresses, problem, index, plan) for index, plan in enumerate(again.plans)]
