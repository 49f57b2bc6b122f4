"""What `collapipe plan show` tells of each cluster in a round: its stages, links and idle devices."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from collapipe.codec_numbers import CODEC_NAMES
from collapipe.evaluation import evaluation_delay
from collapipe.recorded_decisions import prediction_of, prediction_of_plan
from collapipe.v1.plan_pb2 import LinkPlan, Plan
from collapipe.v1.scheduler_pb2 import ExplainDecisionResponse, RoundCommitted
from collapipe.v1.tensor_pb2 import CODEC_FP32
from collapipe_client.quantities import say_mbit
from collapipe_client.view_state import stage_views

_UNMEASURED_BPS = 1e12
"""The rate with which the scheduler plans for a link that nobody has measured."""


@dataclass(frozen=True)
class StageRow:
    """A stage. `None` is what nobody has predicted, measured or limited.

    Args:
        needs_bytes, allowed_bytes: Memory of the host.
        predicted_seconds, measured_seconds: How long it computes in a step.
    """

    host_id: str
    units: str
    window: int
    recomputes: bool
    needs_bytes: float | None
    allowed_bytes: int | None
    predicted_seconds: float | None
    measured_seconds: float | None


@dataclass(frozen=True)
class LinkRow:
    """A link of the pipeline. The rate and the round trip are those with which the round was planned."""

    sender: str
    receiver: str
    rate_bps: float | None
    round_trip_seconds: float | None
    busy_seconds: float | None
    """Predicted time of a step for which the link is busy."""
    limits: list[str]

    @property
    def words(self) -> str:
        """Describes it in one line."""
        known = (
            "rate not measured" if self.rate_bps is None else f"{say_mbit(self.rate_bps)} Mbit/s"
        )
        trip, busy = self.round_trip_seconds, self.busy_seconds
        told = [
            known,
            f"round trip {1e3 * trip:.3g} ms" if trip else "",
            f"busy {busy:.3f} s of a step" if busy else "",
            *(f"limit {limit}" if limit[0].isdigit() else limit for limit in self.limits),
        ]
        return f"{self.sender} > {self.receiver}: {', '.join(filter(None, told))}"


@dataclass(frozen=True)
class ClusterTable:
    """A cluster in a round."""

    cluster: int
    stages: list[StageRow]
    links: list[LinkRow]
    idle: dict[str, str]
    """Why devices hold no blocks, by id."""


@dataclass(frozen=True)
class RoundRecord:
    """What the scheduler has recorded of a round.

    Args:
        decision: As JSON.
        committed: What the round has measured; `None` before its commit.
        idle: Why devices hold no blocks, by id.
    """

    decision: Mapping[str, Any]
    committed: RoundCommitted | None
    idle: Mapping[str, str]

    @classmethod
    def of(cls, answer: ExplainDecisionResponse) -> "RoundRecord":
        """Reads an answer of the scheduler."""
        decision = read_decision(answer)
        return cls(
            decision,
            answer.committed if answer.HasField("committed") else None,
            dict(answer.idle),
        )

    def seconds(self) -> str:
        """Tells how long the round was predicted to take, and took."""
        predicted = prediction_of(self.decision).get("full_round_seconds")
        told = "not predicted (`collapipe plan explain` says why)"
        if predicted is not None:
            told = f"predicted {predicted:.2f} s"
        if self.committed is None:
            return f"{told}, not committed yet"
        late = set(self.committed.late_clusters)
        in_time = [s for index, s in enumerate(self.committed.summaries) if index not in late]
        evaluation = evaluation_delay(in_time)
        rest = f", of which {evaluation:.2f} s evaluated the model" if evaluation else ""
        return f"{told}, measured {self.committed.round_seconds:.2f} s{rest}"

    def cluster(self, plan: Plan) -> ClusterTable:
        """Tells of one cluster."""
        index = plan.cluster_index
        problems = self.decision.get("question", {}).get("problem", {}).get("clusters")
        problem = _at(problems, index)
        predicted = prediction_of_plan(self.decision, plan)
        summaries = self.committed.summaries if self.committed is not None else ()
        steps = summaries[index].local_steps if index < len(summaries) else 0
        reports = summaries[index].stages if steps else ()
        measured = {
            report.host_id: (report.times.forward_seconds + report.times.backward_seconds) / steps
            for report in reports
        }
        devices = problem.get("devices", ())
        ends = (problem.get("control_unit"), problem.get("edge_server"))
        allowed = {
            host["host_id"]: host["memory_bytes"] for host in (*devices, *ends) if host is not None
        }
        num_parts = plan.num_micro_batches * max(plan.num_slices, 1)
        stages = []
        for position, (stage, view) in enumerate(
            zip(plan.stages, stage_views(plan.stages), strict=True)
        ):
            expected = _at(predicted.get("stages"), position)
            computes = expected.get("compute_seconds")
            stages.append(
                StageRow(
                    view.host_id,
                    view.units,
                    stage.in_flight,
                    stage.recompute,
                    expected.get("memory_bytes"),
                    allowed.get(view.host_id),
                    None if computes is None else num_parts * computes,
                    measured.get(view.host_id),
                )
            )
        links = []
        for position, ((one, other), limits) in enumerate(
            zip(itertools.pairwise(plan.stages), plan.links, strict=False)
        ):
            known = problem.get("links", {}).get(f"{one.host_id}>{other.host_id}", {})
            rate = known.get("capacity_bps")
            load = _at(predicted.get("links"), position).get("load_seconds")
            links.append(
                LinkRow(
                    one.host_id,
                    other.host_id,
                    rate if rate is not None and rate < _UNMEASURED_BPS else None,
                    known.get("round_trip_seconds"),
                    None if load is None else num_parts * load,
                    link_limits(limits),
                )
            )
        ids = [device["host_id"] for device in devices]
        idle = {host_id: self.idle[host_id] for host_id in ids if host_id in self.idle}
        return ClusterTable(index, stages, links, idle)


def read_decision(answer: ExplainDecisionResponse) -> dict[str, Any]:
    """Reads the decision. Infinity and NaN become null: neither is valid JSON, so other readers refuse them."""
    if not answer.decision_json:
        return {}
    decision: dict[str, Any] = json.loads(answer.decision_json, parse_constant=lambda _: None)
    return decision


def link_limits(link: LinkPlan) -> list[str]:
    """Tells what a plan allows a link to use, and its codec if that is lossy."""
    limits = []
    if link.rate_limit_bps:
        limits.append(f"{say_mbit(link.rate_limit_bps)} Mbit/s")
    if link.bandwidth_hz:
        limits.append(f"{link.bandwidth_hz / 1e6:.3g} MHz")
    if link.transmit_power_watts:
        limits.append(f"{link.transmit_power_watts:.3g} W forward")
    if link.return_transmit_power_watts:
        limits.append(f"{link.return_transmit_power_watts:.3g} W back")
    if link.codec != CODEC_FP32 and link.codec in CODEC_NAMES:
        limits.append(CODEC_NAMES[link.codec])
    return limits


def _at(values: Any, index: int) -> Mapping[str, Any]:
    return values[index] if values and index < len(values) else {}
