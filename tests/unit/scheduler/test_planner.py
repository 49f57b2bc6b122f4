"""Plans of rounds: what they follow from, and what stays when the planner or the scheduler restarts."""

import json
import math
import threading
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned_jobs import SIZES, Clock, Rounds, Source, hosts, job, knowledge, summary
from stored_jobs import StoredRow

from collapipe.allocation import ClusterPlan, LinkPlan, RoundPlan, StagePlan
from collapipe.errors import InfeasibleError, InvalidInputError, PeerLostError
from collapipe.job import JobConfig
from collapipe.planning.decisions import RoundDecision, hosts_of
from collapipe.planning.explanation import explain
from collapipe.planning.job_hosts import JobHosts
from collapipe.planning.knowledge import HostKnowledge, Knowledge, LinkKnowledge
from collapipe.planning.planner_state import PlannerState
from collapipe.scheduler.job_documents import JobDocument
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.plan_messages import replay
from collapipe.scheduler.planner import Planner
from collapipe.scheduler.profiling import IdleMeasurements
from collapipe.scheduler.telemetry_window import Telemetry
from collapipe.telemetry.estimates import Estimates, HostEstimate
from collapipe.v1.job_pb2 import RoundSummary
from collapipe.v1.plan_pb2 import Plan


def blocks(decision: RoundDecision) -> dict[str, int]:
    return {host: s.num_blocks for host, s in decision.plans[0].segments.items()}


def test_guessed_speeds_are_marked_until_a_round_has_measured_them() -> None:
    taking_part, pipeline = hosts(), job(strategy="pipeline")
    guessed = Knowledge(
        hosts={host.host_id: HostKnowledge(seconds_per_sample=1.0) for host in taking_part.devices}
    )
    rounds = Rounds(taking_part, guessed, pipeline)
    assert set(rounds.run().guessed) == {"device-0", "device-1", "device-2"}
    rounds.measure(0.01, 0.01, 0.01)
    assert rounds.decide(1)[1].guessed == ()
    for device in taking_part.devices:
        device.speed = 100.0
    assert Rounds(taking_part, guessed, pipeline).decide()[1].guessed == ()


def test_first_round_uses_the_profile() -> None:
    rounds = Rounds(known=knowledge(hosts(), seconds=(0.01, 0.02, 0.04)))
    _, decision = rounds.decide()
    assert decision.estimates is None
    assert rounds.source.asked == []
    placed = blocks(decision)
    assert placed["device-0"] > placed.get("device-2", 0)
    assert sum(placed.values()) == SIZES.num_blocks


def with_memory(taking_part: JobHosts) -> JobHosts:
    """Lets the control unit and the edge server run blocks."""
    taking_part.clusters[0].control_unit.memory_bytes = 10**9
    taking_part.edge_server.memory_bytes = 10**9
    return taking_part


def profiled(control_unit: float, edge_server: float) -> Knowledge:
    """Devices of 10 ms, and a control unit and an edge server with these times of a block."""
    known = knowledge(hosts())
    for host_id, each in (("control-unit", control_unit), ("edge-server", edge_server)):
        known.hosts[host_id] = HostKnowledge(seconds_per_sample=each, source="profile")
    return known


@pytest.mark.parametrize(("seconds", "place"), [(0.002, "control-unit"), (0.5, "device-0")])
def test_fast_control_unit_runs_blocks_and_slow_one_none(seconds: float, place: str) -> None:
    plans, decision = Rounds(with_memory(hosts()), profiled(seconds, 0.5)).decide()
    placed = blocks(decision)
    assert placed[place] >= 2
    assert ("control-unit" in placed) == (place == "control-unit")
    assert replay(decision, plans) == plans
    assert any(f"cluster 0: {next(iter(placed))} runs" in line for line in explain(decision))


@pytest.mark.parametrize("change", ["paper_placement", "no memory"])
def test_only_devices_run_blocks_if_the_job_or_the_host_says_so(change: str) -> None:
    taking_part = with_memory(hosts()) if change == "paper_placement" else hosts()
    config = job(paper_placement=change == "paper_placement")
    _, decision = Rounds(taking_part, profiled(0.001, 0.001), config).decide()
    assert set(blocks(decision)) <= {"device-0", "device-1", "device-2"}


@pytest.mark.parametrize(
    ("slow", "times", "of_control_unit"),
    [("device-0", (0.08, 0.01, 0.01), 0.0), ("control-unit", (0.01, 0.01, 0.01), 0.08)],
)
def test_blocks_leave_a_host_that_is_slow_in_a_round(
    slow: str, times: tuple[float, ...], of_control_unit: float
) -> None:
    taking_part = with_memory(hosts()) if of_control_unit else hosts()
    rounds = Rounds(taking_part, profiled(0.005, 0.5))
    before = blocks(rounds.run(0))
    rounds.measure(*times, on_control_unit=of_control_unit)
    assert blocks(rounds.run(1)).get(slow, 0) < before[slow]


def test_window_starts_with_the_round_but_spans_at_least_four_scrapes_of_the_job() -> None:
    rounds = Rounds()
    for round_index, seconds in enumerate((2.0, 10.0, 2.0)):
        rounds.run(round_index, seconds=seconds)
    rounds.decide(3)
    # The first window does not start before the job.
    assert rounds.source.asked == [(1000.0, 1002.0), (1002.0, 1012.0), (1010.0, 1014.0)]


def test_unreachable_telemetry_keeps_the_current_plans() -> None:
    rounds = Rounds()
    first, second = rounds.run(0), rounds.run(1)
    assert second.kept_because == "telemetry_missing"
    assert blocks(second) == blocks(first)
    assert "no recent telemetry" in "\n".join(explain(second))


def test_device_without_telemetry_keeps_the_plans_that_use_it_and_is_named() -> None:
    rounds = Rounds()
    rounds.run(0)
    series = rounds.measure(0.08, 0.01, 0.01)
    rounds.source.series = [one for one in series if one.instance != "device-1:2"]
    _, decision = rounds.decide(1)
    assert decision.kept_because == "telemetry_missing"
    assert any("device-1" in line for line in explain(decision))


def test_missing_telemetry_of_an_unused_host_does_not_keep_the_plans() -> None:
    rounds = Rounds(known=knowledge(hosts(), (0.01, 0.01, 10.0)))
    assert "device-2" not in blocks(rounds.run(0))
    series = rounds.measure(0.01, 0.01, 0.01)
    rounds.source.series = [one for one in series if one.instance != "device-2:2"]
    assert rounds.decide(1)[1].kept_because in ("", "hysteresis")


def test_impossible_telemetry_is_rejected_and_the_profile_is_used() -> None:
    rounds = Rounds()
    first = rounds.run(0)
    rounds.source.series = [
        replace(one, points=tuple((at, float("nan")) for at, _ in one.points))
        if one.instance == "device-0:2"
        else one
        for one in rounds.measure(0.01, 0.01, 0.01)
    ]
    second = rounds.run(1)
    assert blocks(second) == blocks(first)
    assert second.estimates is not None
    assert any("device-0" in words for words in second.estimates.rejected)


@pytest.mark.parametrize("codec", ["", "int8", "top_k"])
def test_retry_keeps_the_micro_batches_and_the_codec_of_uploads(codec: str) -> None:
    rounds = Rounds(config=job({"upload_codecs": ["fp32", "int8", "top_k"]}))
    assert rounds.decide()[0][0].upload_codec == "top_k"
    (plan,), decision = rounds.decide(0, [Plan(num_micro_batches=2, upload_codec=codec)])
    assert (plan.num_micro_batches, plan.upload_codec) == (2, codec)
    assert any(f"with the codec {codec or 'fp32'}" in line for line in explain(decision))


def test_strategies_without_choice_use_the_first_codec_of_uploads() -> None:
    config = job({"upload_codecs": ["int8", "top_k"]}, strategy="pipeline")
    assert Rounds(config=config).decide()[0][0].upload_codec == "int8"


def test_budget_pays_for_idle_power_during_the_whole_round() -> None:
    taking_part = hosts(budget_joules=0.5)
    taking_part.devices[0].idle_watts = 0.2
    rounds = Rounds(taking_part)
    rounds.run()
    assert rounds.known.backlogs["device-0"] == pytest.approx((2.0 + 0.2 * 10.0) / 0.5 - 1)


def test_telemetry_goes_on_when_the_clock_was_set_back() -> None:
    """The clock of Prometheus is that of the machine."""
    rounds = Rounds()
    rounds.run()
    rounds.clock.now -= 900
    rounds.run(1)
    rounds.clock.now += 10
    rounds.decide(2)
    start, end = rounds.source.asked[-1]
    assert end == rounds.clock.now and 4 <= end - start <= 20


def restart(stored: PlannerState, of: JobHosts, config: JobConfig | None = None) -> Planner:
    """Makes a planner from a stored state, which may profile no host."""
    telemetry = Telemetry(Source(now=Clock()), 1.0)
    return Planner.for_job(config or job(), None, SIZES, of, None, None, telemetry, stored)  # type: ignore[arg-type]


def test_restarted_planner_continues_with_queues_plans_and_profile() -> None:
    rounds = Rounds(hosts(budget_joules=0.5))
    rounds.run()  # 2 W for 1 s: 2 J, with a budget of 0.5 J
    state = rounds.planner.state()
    stored = PlannerState.model_validate_json(json.dumps(state.model_dump(mode="json")))
    assert stored.knowledge.backlogs["device-0"] == pytest.approx(3.0)
    cluster = rounds.hosts.clusters[0]
    back = replace(cluster, devices=cluster.devices[::-1])  # They register in another order.
    assert restart(stored, replace(rounds.hosts, clusters=(back,))).state() == state
    restarted = restart(stored, rounds.hosts)
    assert restarted.state() == state
    assert restarted.decide(1, ())[1].plans == rounds.decide(1)[1].plans


def test_planner_goes_on_with_the_hosts_that_are_left_and_with_those_that_return() -> None:
    rounds = Rounds()
    rounds.run()
    left = restart(rounds.planner.state(), hosts(num_devices=2))
    assert left.state().knowledge == rounds.known
    assert left.state().current_plans == ()  # they need the third device
    assert "device-2" not in blocks(left.decide(1, ())[1])
    left.take_hosts(rounds.hosts)
    assert left.hosts == rounds.hosts
    assert left.state().knowledge == rounds.known
    assert "device-2" in blocks(left.decide(2, ())[1])


def test_planner_profiles_again_when_the_stored_state_is_of_another_strategy() -> None:
    rounds = Rounds()
    rounds.run()
    # The strategy `pipeline` needs no profile, so no host is called.
    restarted = restart(rounds.planner.state(), rounds.hosts, job(strategy="pipeline"))
    assert restarted.state().current_plans == ()


def test_new_host_takes_part_when_it_is_profiled() -> None:
    fewer, more = hosts(num_devices=2), hosts(num_devices=3)
    go_on = threading.Event()
    outcomes: list[Knowledge | PeerLostError] = [PeerLostError("device-2", "gone"), knowledge(more)]

    def profile(of: JobHosts, known: Knowledge | None) -> Knowledge:
        assert of is more and go_on.wait(60)
        outcome = outcomes.pop(0)
        if isinstance(outcome, PeerLostError):
            raise outcome
        return outcome

    rounds = Rounds(fewer, knowledge(fewer, (0.02, 0.01)), profile=profile)
    for _ in range(2):
        rounds.planner.take_hosts(more)
        assert rounds.planner.hosts == fewer  # the rounds go on meanwhile
    go_on.set()
    for _ in range(2):  # the first profile fails
        assert rounds.planner._profiling is not None
        futures.wait([rounds.planner._profiling], 60)
        rounds.planner.take_hosts(more)
    assert rounds.planner.hosts == more
    # What rounds have measured stays.
    assert rounds.known.hosts["device-0"].seconds_per_sample == 0.02
    assert "device-2" in blocks(rounds.decide()[1])


def test_links_that_were_forgotten_during_a_measurement_stay_unknown() -> None:
    fewer, more = hosts(num_devices=2), hosts(num_devices=3)
    go_on = threading.Event()

    def profile(of: JobHosts, known: Knowledge | None) -> Knowledge:
        assert known is not None and go_on.wait(60)
        return Knowledge(hosts=knowledge(of).hosts, links=knowledge(of).links | known.links)

    rounds = Rounds(fewer, knowledge(fewer, (0.01, 0.01)), profile=profile)
    rounds.planner.take_hosts(more)
    assert rounds.planner.being_measured == {"device-2"} and rounds.planner.is_measuring
    rounds.planner.forget_links("device-1")
    go_on.set()
    assert rounds.planner._profiling is not None
    futures.wait([rounds.planner._profiling], 60)
    assert not rounds.planner.is_measuring and rounds.planner.being_measured == {"device-2"}
    rounds.planner.take_hosts(more)
    assert "device-0>device-2" in rounds.known.links
    assert "device-0>device-1" not in rounds.known.links
    assert rounds.planner.being_measured == {"device-1"}


def test_device_with_a_link_that_was_dead_takes_no_part_until_the_link_is_probed_again() -> None:
    rounds = Rounds()
    rounds.run()
    stored = rounds.planner.state()
    stored.knowledge.links["device-0>device-1"].capacity_bps = 0.0
    assert restart(stored, rounds.hosts).hosts == rounds.hosts
    stored.knowledge.forget_dead_links()
    planner = restart(stored, rounds.hosts)
    assert [device.host_id for device in planner.hosts.devices] == ["device-0", "device-2"]


def test_evaluation_and_transfers_of_weights_do_not_count_as_fixed_time_of_a_round() -> None:
    rounds = Rounds()
    rounds.run(0)
    moving = summary(rounds.hosts, pushed_seconds={"control-unit": 1.5, "device-0": 0.5})
    moving.fetched.add(host_id="device-0", bytes=24000, seconds=2.0)
    moving.evaluation_seconds = 0.75
    rounds.run(1, moving)
    assert rounds.known.fixed_seconds == pytest.approx(10 - 4 - 1.5 - 2 - 0.75)
    rates = {name: link.weights_bps for name, link in rounds.known.links.items()}
    # Both hosts send for 0.5 s, and then the control unit alone for 1 s.
    assert {name: rate for name, rate in rates.items() if rate} == pytest.approx(
        {
            "control-unit>edge-server": 8 * 24000 / 1.25,
            "device-0>edge-server": 8 * 24000 / 0.25,
            "edge-server>device-0": 8 * 24000 / 2.0,
        }
    )


class Probes:
    """An explorer whose probe results a test sets."""

    def __init__(self) -> None:
        self.bps: dict[str, float] = {}

    def collect(self) -> IdleMeasurements:
        links = {
            f"{host_id}>edge-server": LinkKnowledge(capacity_bps=bps)
            for host_id, bps in self.bps.items()
        }
        return IdleMeasurements(links=links)

    def start(self, plans: RoundPlan) -> None:
        pass


def test_blocks_leave_a_device_with_a_slow_uplink_until_it_is_restored() -> None:
    probes, known = Probes(), knowledge(hosts())
    for link in known.links.values():
        link.probed_bps = link.capacity_bps
    rounds = Rounds(known=known, explorer=probes)
    narrow, found = "", []
    for round_index in range(8):
        if round_index:
            rounds.measure(0.01, 0.01, 0.01)
        if round_index == 5:
            probes.bps = {narrow: 1e8}
        plans, decision = rounds.decide(round_index)
        assert replay(decision, plans) == plans
        placed = blocks(decision)
        found.append(placed)
        if round_index == 2:
            narrow = max(placed, key=placed.__getitem__)
        is_slow = round_index < 5
        sent = {device: 20.0 if device == narrow and is_slow else 0.02 for device in placed}
        rounds.commit(decision, summary(rounds.hosts, pushed_seconds=sent))
    assert found[2][narrow] > 0
    assert [placed.get(narrow, 0) for placed in found[3:5]] == [0, 0]
    assert found[7][narrow] > 0


def test_times_of_a_round_with_late_clusters_are_not_used() -> None:
    rounds = Rounds(hosts(budget_joules=0.5))
    rounds.run(0)
    before = rounds.known.model_copy(deep=True)
    # A late cluster may not even have reports of its stages.
    rounds.run(1, RoundSummary(), seconds=500.0, is_typical=False)
    assert rounds.known.fixed_seconds == before.fixed_seconds
    assert rounds.known.backlogs != before.backlogs  # energy was used all the same


@pytest.mark.parametrize("reason", ["solver_slow", "solver_failed", "telemetry_missing"])
def test_replay_of_plans_that_were_kept_returns_them(reason: str) -> None:
    plans, decision = Rounds().decide()
    assert replay(replace(decision, kept_because=reason), plans) == plans


def test_replay_from_the_stored_document_gives_the_same_plan() -> None:
    rounds = Rounds(hosts(budget_joules=0.5), config=job(channel_rate_bps=3e7))
    rounds.run()
    rounds.measure(0.08, 0.01, 0.02)
    plans, decision = rounds.decide(1)
    limits = [link.rate_limit_bps for link in plans[0].links]
    assert all(limit > 0 for limit in limits) and sum(limits) <= 3e7 + len(limits)
    stored = json.loads(json.dumps(decision.to_json()))
    assert RoundDecision.from_json(stored) == decision
    assert replay(RoundDecision.from_json(stored), plans) == plans
    # A version without uploads and idle power stored none of them.
    del stored["prediction"]["idle_joules"]
    for plan in stored["plans"]:
        del plan["uploads"]
    for cluster in stored["question"]["problem"]["clusters"]:
        for host in (cluster["control_unit"], *cluster["devices"], cluster["edge_server"]):
            del host["push_watts"], host["idle_watts"]
    assert replay(RoundDecision.from_json(stored), plans) == plans


def test_damaged_decision_is_refused() -> None:
    document = Rounds().decide()[1].to_json()
    changes: list[dict[str, object]] = [{"plans": 3}, {"question": None}, {"more": 1}]
    for change in changes:
        with pytest.raises(InvalidInputError, match="decision"):
            RoundDecision.from_json(document | change)


def test_error_without_a_feasible_plan_names_the_limit() -> None:
    rounds = Rounds()
    for device in rounds.hosts.devices:
        device.memory_bytes = 20000
    with pytest.raises(InfeasibleError, match="memory|hold"):
        rounds.decide()


@pytest.mark.parametrize(
    ("block_seconds", "rate_bps", "from_devices_bps", "bottleneck"),
    [
        (0.05, 1e9, 1e9, "the processor of device-"),
        (1e-4, 1e6, 1e6, "the link between"),
        (1e-4, 1e7, 1e6, "the link from device-"),
    ],
)
def test_explanation_names_the_bottleneck(
    block_seconds: float, rate_bps: float, from_devices_bps: float, bottleneck: str
) -> None:
    known = knowledge(hosts(), [block_seconds] * 3, rate_bps)
    for name, link in known.links.items():
        if name.startswith("device"):
            known.links[name] = link.model_copy(update={"capacity_bps": from_devices_bps})
    lines = explain(Rounds(known=known).decide()[1])
    assert any(f"bottleneck is {bottleneck}" in line for line in lines)


def test_explanation_says_when_a_budget_is_not_met() -> None:
    taking_part = hosts(num_devices=1, budget_joules=0.001)
    known = knowledge(taking_part, seconds=(0.05,))
    known.backlogs = {"device-0": 50.0}
    lines = explain(Rounds(taking_part, known).decide()[1])
    assert any("device-0 is not met" in line for line in lines)


PLAN = ClusterPlan(
    stages=(StagePlan("control-unit", 0, 1, 2), StagePlan("device-0", 1, 7, 1)),
    num_micro_batches=4,
    links=(LinkPlan(share=math.inf),),
)
OLDER = {"strategy": "dssra", "hosts": [], "knowledge": {}, "in_force": None}
"""A state of version 1, which has no `version`."""


def make_state() -> PlannerState:
    known = knowledge(hosts())
    known.links["device-0>device-1"] = LinkKnowledge(gain=1e-9, weights_bps=2e6)
    measured = {"device-0": HostEstimate(seconds_per_sample=0.5)}
    known.update(Estimates(end=0.0, hosts=measured), [], {})
    known.update_fixed_seconds(0.5)
    return PlannerState(strategy="dssra", knowledge=known, current_plans=(PLAN,))


def test_planner_state_survives_a_restart(
    tmp_path: Path, store: JobStore, document: JobDocument
) -> None:
    assert store.planner_state(document.job_id) is None
    state = make_state()
    store.save_planner_state(document.job_id, state)
    assert JobStore(tmp_path).planner_state(document.job_id) == state


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"knowledge": {"hosts": 3}}, "knowledge.hosts"),
        ({"current_plans": [{"stages": 3}]}, "current_plans"),
        ({"strategy": None}, "strategy"),
        ({"version": 1}, "version 1"),
        (None, "version 1"),
    ],
)
def test_state_that_cannot_be_used_is_ignored_with_a_warning(
    store: JobStore,
    document: JobDocument,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, Any] | None,
    reason: str,
) -> None:
    job_id = document.job_id
    store.save_planner_state(job_id, make_state())
    row = StoredRow(tmp_path, "planner", job_id)
    row.write(OLDER if change is None else row.read() | change)
    assert store.planner_state(job_id) is None
    assert job_id in caplog.text
    assert reason in caplog.text


def test_round_of_hosts_that_are_gone_leaves_no_plan() -> None:
    """The next attempt evaluates with the current plans, if there are any."""
    left = hosts()
    _, decision = Rounds(left).decide()
    assert "device-0" in hosts_of(decision.plans)
    cluster = replace(left.clusters[0], devices=left.clusters[0].devices[1:])
    for of, has_plan in ((left, True), (JobHosts(left.edge_server, (cluster,)), False)):
        after = Rounds(left)
        after.planner.take_hosts(of)
        after.planner.take_over_round(decision, [summary(left)], 10.0)
        assert bool(after.planner.state().current_plans) == has_plan
        after.planner.decide(1, [], evaluation_only=True)
