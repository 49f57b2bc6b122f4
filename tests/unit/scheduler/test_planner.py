import json
import threading
import time
from dataclasses import replace

import pytest

from collapipe.allocation import RoundPlan
from collapipe.errors import InfeasibleError, InvalidInputError, PeerLostError
from collapipe.job import JobConfig
from collapipe.scheduler.decisions import RoundDecision
from collapipe.scheduler.explanation import explain
from collapipe.scheduler.host_registry import JobHosts
from collapipe.scheduler.knowledge import HostKnowledge, Knowledge, LinkKnowledge
from collapipe.scheduler.plan_messages import replay
from collapipe.scheduler.planner import Planner
from collapipe.scheduler.planner_state import PlannerState
from collapipe.scheduler.profiling import IdleMeasurements
from collapipe.scheduler.telemetry_window import Telemetry
from collapipe.telemetry.sources import Series
from collapipe.v1.job_pb2 import RoundSummary
from collapipe.v1.plan_pb2 import Plan

from .jobs import SIZES, Clock, Source, hosts, job, knowledge, measured, planner, summary


def blocks(decision: RoundDecision) -> dict[str, int]:
    return {host: s.num_blocks for host, s in decision.plans[0].segments.items()}


def run_round(
    deciding: Planner,
    clock: Clock,
    round_index: int,
    measured_summary: RoundSummary,
    seconds: float = 10.0,
) -> RoundDecision:
    _, decision = deciding.decide(round_index, ())
    deciding.round_started(decision)
    clock.now += seconds
    deciding.round_committed(decision, [measured_summary], seconds)
    return decision


def test_guessed_speeds_are_marked_until_a_round_has_measured_them() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    guessed = Knowledge(
        hosts={host.host_id: HostKnowledge(seconds_per_sample=1.0) for host in taking_part.devices}
    )
    pipeline = job(strategy="pipeline")
    deciding = planner(taking_part, guessed, source, clock, pipeline)
    first = run_round(deciding, clock, 0, summary(taking_part))
    assert set(first.guessed) == {"device-0", "device-1", "device-2"}
    source.series = measured(taking_part, (0.01, 0.01, 0.01), clock.now - 10, clock.now)
    assert deciding.decide(1, ())[1].guessed == ()
    for device in taking_part.devices:
        device.speed = 100.0
    assert planner(taking_part, guessed, source, clock, pipeline).decide(0, ())[1].guessed == ()


def test_first_round_uses_the_profile() -> None:
    taking_part = hosts()
    known = knowledge(taking_part, seconds=(0.01, 0.02, 0.04))
    source = Source()
    _, decision = planner(taking_part, known, source, Clock()).decide(0, ())
    assert decision.estimates is None
    assert source.asked == []
    placed = blocks(decision)
    assert placed["device-0"] > placed.get("device-2", 0)
    assert sum(placed.values()) == SIZES.num_blocks


def test_blocks_leave_a_device_that_is_slow_in_a_round() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    before = blocks(run_round(deciding, clock, 0, summary(taking_part)))
    source.series = measured(taking_part, (0.08, 0.01, 0.01), clock.now - 10, clock.now)
    after = blocks(run_round(deciding, clock, 1, summary(taking_part)))
    assert after.get("device-0", 0) < before["device-0"]


def with_memory(taking_part: JobHosts) -> JobHosts:
    """Lets the control unit and the edge server run blocks."""
    taking_part.clusters[0].control_unit.memory_bytes = 10**9
    taking_part.edge_server.memory_bytes = 10**9
    return taking_part


def with_profiles(known: Knowledge, **seconds: float) -> Knowledge:
    for host_id, each in seconds.items():
        name = host_id.replace("_", "-")
        known.hosts[name] = HostKnowledge(seconds_per_sample=each, source="profile")
    return known


@pytest.mark.parametrize(("seconds", "place"), [(0.002, "control-unit"), (0.5, "device-0")])
def test_fast_control_unit_runs_blocks_and_slow_one_none(seconds: float, place: str) -> None:
    taking_part = with_memory(hosts())
    known = with_profiles(knowledge(taking_part), control_unit=seconds, edge_server=0.5)
    plans, decision = planner(taking_part, known, Source(), Clock()).decide(0, ())
    placed = blocks(decision)
    assert placed[place] >= 2
    assert ("control-unit" in placed) == (place == "control-unit")
    assert replay(decision, plans) == plans
    assert any(f"cluster 0: {next(iter(placed))} runs" in line for line in explain(decision))


@pytest.mark.parametrize("change", ["paper_placement", "no memory"])
def test_only_devices_run_blocks_if_the_job_or_the_host_says_so(change: str) -> None:
    taking_part = with_memory(hosts()) if change == "paper_placement" else hosts()
    config = job(paper_placement=change == "paper_placement")
    known = with_profiles(knowledge(taking_part), control_unit=0.001, edge_server=0.001)
    _, decision = planner(taking_part, known, Source(), Clock(), config).decide(0, ())
    assert set(blocks(decision)) <= {"device-0", "device-1", "device-2"}


def test_blocks_leave_a_control_unit_that_is_slow_in_a_round() -> None:
    taking_part, source, clock = with_memory(hosts()), Source(), Clock()
    known = with_profiles(knowledge(taking_part), control_unit=0.005, edge_server=0.5)
    deciding = planner(taking_part, known, source, clock)
    before = blocks(run_round(deciding, clock, 0, summary(taking_part)))
    source.series = measured(
        taking_part, (0.01,) * 3, clock.now - 10, clock.now, on_control_unit=0.08
    )
    after = blocks(run_round(deciding, clock, 1, summary(taking_part)))
    assert after.get("control-unit", 0) < before["control-unit"]


def test_window_starts_with_the_round_but_spans_at_least_four_scrapes() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    run_round(deciding, clock, 0, summary(taking_part))
    run_round(deciding, clock, 1, summary(taking_part), seconds=2.0)
    assert source.asked == [(1000.0, 1010.0)]
    deciding.decide(2, ())
    assert source.asked[-1] == (1008.0, 1012.0)


def test_window_never_starts_before_the_job() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    run_round(deciding, clock, 0, summary(taking_part), seconds=2.0)
    deciding.decide(1, ())
    assert source.asked == [(1000.0, 1002.0)]


def test_unreachable_telemetry_keeps_the_current_plans() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    first = run_round(deciding, clock, 0, summary(taking_part))
    second = run_round(deciding, clock, 1, summary(taking_part))
    assert second.kept_because == "telemetry_missing"
    assert blocks(second) == blocks(first)
    assert "no recent telemetry" in "\n".join(explain(second))


def test_device_without_telemetry_keeps_the_current_plans_and_is_named() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    run_round(deciding, clock, 0, summary(taking_part))
    everything = measured(taking_part, (0.08, 0.01, 0.01), clock.now - 10, clock.now)
    source.series = [one for one in everything if one.instance != "device-1:2"]
    _, decision = deciding.decide(1, ())
    assert decision.kept_because == "telemetry_missing"
    assert any("device-1" in line for line in explain(decision))


def test_impossible_telemetry_is_rejected_and_the_profile_is_used() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    first = run_round(deciding, clock, 0, summary(taking_part))
    valid = measured(taking_part, (0.01, 0.01, 0.01), clock.now - 10, clock.now)

    def corrupt(one: Series) -> Series:
        if one.instance != "device-0:2":
            return one
        return replace(one, points=tuple((at, float("nan")) for at, _ in one.points))

    source.series = [corrupt(one) for one in valid]
    second = run_round(deciding, clock, 1, summary(taking_part))
    assert blocks(second) == blocks(first)
    assert second.estimates is not None
    assert any("device-0" in words for words in second.estimates.rejected)


def test_retry_keeps_the_micro_batches_of_the_first_attempt() -> None:
    taking_part = hosts()
    plans, _ = planner(taking_part, knowledge(taking_part), Source(), Clock()).decide(
        0, [Plan(num_micro_batches=2)]
    )
    assert plans[0].num_micro_batches == 2


@pytest.mark.parametrize("codec", ["", "int8", "top_k"])
def test_retry_keeps_the_codec_of_uploads_of_the_first_attempt(codec: str) -> None:
    taking_part = hosts()
    config = job(training={"upload_codecs": ["fp32", "int8", "top_k"]})
    deciding = planner(taking_part, knowledge(taking_part), Source(), Clock(), config)
    assert deciding.decide(0, ())[0][0].upload_codec == "top_k"
    (plan,), decision = deciding.decide(0, [Plan(num_micro_batches=4, upload_codec=codec)])
    assert plan.upload_codec == codec
    assert any(f"with the codec {codec or 'fp32'}" in line for line in explain(decision))


def test_strategies_without_choice_use_the_first_codec_of_uploads() -> None:
    taking_part = hosts()
    config = job(strategy="pipeline", training={"upload_codecs": ["int8", "top_k"]})
    deciding = planner(taking_part, knowledge(taking_part), Source(), Clock(), config)
    assert deciding.decide(0, ())[0][0].upload_codec == "int8"


def test_budget_pays_for_idle_power_during_the_whole_round() -> None:
    taking_part = hosts(budget_joules=0.5)
    taking_part.devices[0].idle_watts = 0.2
    deciding = planner(taking_part, knowledge(taking_part), Source(), Clock())
    run_round(deciding, Clock(), 0, summary(taking_part), seconds=10.0)
    backlog = deciding.state().knowledge.backlogs["device-0"]
    assert backlog == pytest.approx((2.0 + 0.2 * 10.0) / 0.5 - 1)


def test_restarted_planner_continues_with_queues_plans_and_profile() -> None:
    taking_part, source, clock = hosts(budget_joules=0.5), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    run_round(deciding, clock, 0, summary(taking_part))  # 2 W for 1 s: 2 J, with a budget of 0.5 J
    stored = PlannerState.model_validate_json(json.dumps(deciding.state().model_dump(mode="json")))
    assert stored.knowledge.backlogs["device-0"] == pytest.approx(3.0)
    restarted = Planner.for_job(
        job(),
        None,  # type: ignore[arg-type]  # no host is profiled again
        SIZES,
        taking_part,
        None,  # type: ignore[arg-type]
        Telemetry(source, 1.0, clock),
        stored,
    )
    assert restarted.state() == deciding.state()
    assert restarted.decide(1, ())[1].plans == deciding.decide(1, ())[1].plans


def restart(stored: PlannerState, of_hosts: JobHosts, config: JobConfig) -> Planner:
    telemetry = Telemetry(Source(), 1.0, Clock())
    return Planner.for_job(config, None, SIZES, of_hosts, None, telemetry, stored)  # type: ignore[arg-type]


def test_planner_continues_when_its_hosts_register_in_another_order() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    run_round(deciding, clock, 0, summary(taking_part))
    stored = deciding.state()
    cluster = taking_part.clusters[0]
    back = replace(taking_part, clusters=(replace(cluster, devices=cluster.devices[::-1]),))
    assert restart(stored, back, job()).state() == stored


def test_planner_goes_on_with_the_hosts_that_are_left_and_with_those_that_return() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    run_round(deciding, clock, 0, summary(taking_part))
    known = deciding.state().knowledge
    fewer = hosts(num_devices=2)
    left = restart(deciding.state(), fewer, job())
    assert left.state().knowledge == known
    assert left.state().current_plans == ()  # they need the third device
    assert "device-2" not in blocks(left.decide(1, ())[1])
    left.take_hosts(taking_part)
    assert left.hosts == taking_part
    assert left.state().knowledge == known
    assert "device-2" in blocks(left.decide(2, ())[1])


def test_new_host_takes_part_when_it_is_profiled() -> None:
    taking_part, more = hosts(num_devices=2), hosts(num_devices=3)
    go_on = threading.Event()
    outcomes: list[Knowledge | PeerLostError] = [PeerLostError("device-2", "gone"), knowledge(more)]

    def profile(of: JobHosts, known: Knowledge | None) -> Knowledge:
        assert of is more
        go_on.wait(10)
        outcome = outcomes.pop(0)
        if isinstance(outcome, PeerLostError):
            raise outcome
        return outcome

    known = knowledge(taking_part, (0.02, 0.01))
    telemetry = Telemetry(Source(), 1.0, Clock())
    deciding = Planner(job(), SIZES, taking_part, known, telemetry, profile=profile)
    for _ in range(2):
        deciding.take_hosts(more)
        assert deciding.hosts == taking_part  # the rounds go on meanwhile
    go_on.set()
    while deciding.hosts != more:
        deciding.take_hosts(more)
        time.sleep(0.01)
    assert outcomes == []
    found = deciding.state().knowledge
    assert found.hosts["device-0"].seconds_per_sample == 0.02  # what rounds have measured stays
    assert "device-2" in blocks(deciding.decide(0, ())[1])


def test_planner_profiles_again_when_the_stored_state_is_of_another_strategy() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    run_round(deciding, clock, 0, summary(taking_part))
    config = job(strategy="pipeline")  # this strategy needs no profile, so no host is called
    restarted = restart(deciding.state(), taking_part, config)
    assert restarted.state().current_plans == ()


def test_missing_telemetry_of_an_unused_host_does_not_keep_the_plans() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part, (0.01, 0.01, 10.0)), source, clock)
    first = run_round(deciding, clock, 0, summary(taking_part))
    assert "device-2" not in blocks(first)
    everything = measured(taking_part, (0.01, 0.01, 0.01), clock.now - 10, clock.now)
    source.series = [one for one in everything if one.instance != "device-2:2"]
    _, decision = deciding.decide(1, ())
    assert decision.kept_because in ("", "hysteresis")


def test_evaluation_does_not_count_as_fixed_time_of_a_round() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    run_round(deciding, clock, 0, summary(taking_part))
    with_evaluation = summary(
        taking_part
    )  # 4 s of training, 0.2 s of configuring, 0.5 s of finishing
    with_evaluation.evaluation_seconds = 5.0
    run_round(deciding, clock, 1, with_evaluation)
    assert deciding.state().knowledge.fixed_seconds == pytest.approx(10 - 4 - 5)


def test_transfers_of_weights_do_not_count_as_fixed_time_of_a_round() -> None:
    taking_part, source, clock = hosts(), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    run_round(deciding, clock, 0, summary(taking_part))
    moving = summary(taking_part, pushed_seconds={"control-unit": 1.5, "device-0": 0.5})
    moving.fetched.add(host_id="device-0", bytes=24000, seconds=2.0)
    run_round(deciding, clock, 1, moving)
    known = deciding.state().knowledge
    assert known.fixed_seconds == pytest.approx(10 - 4 - 1.5 - 2)
    rates = {name: link.weights_bps for name, link in known.links.items() if link.weights_bps}
    # Both hosts send for 0.5 s, and then the control unit alone for 1 s.
    assert rates == pytest.approx(
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
    taking_part, source, clock, probes = hosts(), Source(), Clock(), Probes()
    known = knowledge(taking_part)
    for link in known.links.values():
        link.probed_bps = link.capacity_bps
    telemetry = Telemetry(source, 1.0, clock)
    deciding = Planner(job(), SIZES, taking_part, known, telemetry, explorer=probes)  # type: ignore[arg-type]
    narrow, found = "", []
    for round_index in range(8):
        if round_index:
            source.series = measured(taking_part, (0.01,) * 3, clock.now - 10, clock.now)
        if round_index == 5:
            probes.bps = {narrow: 1e8}
        plans, decision = deciding.decide(round_index, ())
        assert replay(decision, plans) == plans
        found.append(blocks(decision))
        if round_index == 2:
            narrow = max(found[-1], key=found[-1].__getitem__)
        deciding.round_started(decision)
        clock.now += 10
        sent = {
            host_id: 20.0 if host_id == narrow and round_index < 5 else 0.02
            for host_id in found[-1]
        }
        pushed = summary(taking_part, pushed_seconds=sent)
        deciding.round_committed(decision, [pushed], 10.0)
    assert found[2][narrow] > 0
    assert [placed.get(narrow, 0) for placed in found[3:5]] == [0, 0]
    assert found[7][narrow] > 0


def test_times_of_a_round_with_late_clusters_are_not_used() -> None:
    taking_part, source, clock = hosts(budget_joules=0.5), Source(), Clock()
    deciding = planner(taking_part, knowledge(taking_part), source, clock)
    run_round(deciding, clock, 0, summary(taking_part))
    before = deciding.state().knowledge.model_copy(deep=True)
    _, decision = deciding.decide(1, ())
    deciding.round_started(decision)
    # A late cluster may not even have reports of its stages.
    deciding.round_committed(decision, [RoundSummary()], 500.0, is_typical=False)
    after = deciding.state().knowledge
    assert after.fixed_seconds == before.fixed_seconds
    assert after.backlogs != before.backlogs  # energy was used all the same


@pytest.mark.parametrize("reason", ["solver_slow", "solver_failed", "telemetry_missing"])
def test_replay_of_plans_that_were_kept_returns_them(reason: str) -> None:
    taking_part = hosts()
    plans, decision = planner(taking_part, knowledge(taking_part), Source(), Clock()).decide(0, ())
    assert replay(replace(decision, kept_because=reason), plans) == plans


def test_replay_from_the_stored_document_gives_the_same_plan() -> None:
    taking_part, source, clock = hosts(budget_joules=0.5), Source(), Clock()
    config = job(channel_rate_bps=3e7)
    deciding = planner(taking_part, knowledge(taking_part), source, clock, config)
    run_round(deciding, clock, 0, summary(taking_part))
    source.series = measured(taking_part, (0.08, 0.01, 0.02), clock.now - 10, clock.now)
    plans, decision = deciding.decide(1, ())
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


@pytest.mark.parametrize("change", [{"plans": 3}, {"question": None}, {"more": 1}])
def test_damaged_decision_is_refused(change: dict[str, object]) -> None:
    taking_part = hosts()
    deciding = planner(taking_part, knowledge(taking_part), Source(), Clock())
    document = deciding.decide(0, ())[1].to_json()
    with pytest.raises(InvalidInputError, match="the stored decision cannot be used"):
        RoundDecision.from_json(document | change)


def test_shares_of_a_channel_become_rate_limits() -> None:
    taking_part = hosts()
    config = job(channel_rate_bps=3e7)
    plans, _ = planner(taking_part, knowledge(taking_part), Source(), Clock(), config).decide(0, ())
    limits = [link.rate_limit_bps for link in plans[0].links]
    assert all(limit > 0 for limit in limits)
    assert sum(limits) <= 3e7 + len(limits)


def test_error_without_a_feasible_plan_names_the_limit() -> None:
    taking_part = hosts()
    for device in taking_part.clusters[0].devices:
        device.memory_bytes = 20000
    with pytest.raises(InfeasibleError, match=r"memory|hold"):
        planner(taking_part, knowledge(taking_part), Source(), Clock()).decide(0, ())


def test_explanation_names_the_bottleneck() -> None:
    taking_part = hosts()
    known = knowledge(taking_part, seconds=(0.05, 0.05, 0.05), rate_bps=1e9)
    _, decision = planner(taking_part, known, Source(), Clock()).decide(0, ())
    lines = explain(decision)
    assert any("the bottleneck is the processor of device-" in line for line in lines)


def test_explanation_of_a_slow_link_names_the_link() -> None:
    taking_part = hosts()
    known = knowledge(taking_part, seconds=(1e-4, 1e-4, 1e-4), rate_bps=1e6)
    _, decision = planner(taking_part, known, Source(), Clock()).decide(0, ())
    assert any("the bottleneck is the link between" in line for line in explain(decision))


def test_explanation_names_the_slow_direction_of_a_link() -> None:
    taking_part = hosts()
    known = knowledge(taking_part, seconds=(1e-4, 1e-4, 1e-4), rate_bps=1e7)
    for name, link in known.links.items():
        if name.startswith("device"):
            known.links[name] = link.model_copy(update={"capacity_bps": 1e6})
    _, decision = planner(taking_part, known, Source(), Clock()).decide(0, ())
    assert any("the bottleneck is the link from device-" in line for line in explain(decision))


def test_explanation_says_when_a_budget_is_not_met() -> None:
    taking_part = hosts(num_devices=1, budget_joules=0.001)
    known = knowledge(taking_part, seconds=(0.05,))
    known.backlogs = {"device-0": 50.0}
    _, decision = planner(taking_part, known, Source(), Clock()).decide(0, ())
    assert any("budget of device-0 is not met: it needs" in line for line in explain(decision))
