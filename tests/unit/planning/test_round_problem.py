"""The problem of a round, the plans that hosts receive, and what clients are told when plans change."""

from dataclasses import replace

import pytest
from planned_jobs import SIZES, hosts, job, knowledge

from collapipe.allocation import (
    ClusterPlan,
    ClusterProblem,
    LinkPlan,
    ModelCost,
    StagePlan,
    UploadPlan,
)
from collapipe.allocation.round_model.weights_transfer import moved_states
from collapipe.job import AveragingConfig, JobConfig
from collapipe.planning.decisions import Question, RoundDecision, decide
from collapipe.planning.job_hosts import JobHosts
from collapipe.planning.knowledge import HostKnowledge, Knowledge, LinkKnowledge
from collapipe.planning.plan_change import say_change
from collapipe.planning.round_problem import ModelSizes, blocks_beyond_devices, build_problem
from collapipe.radio_rate import radio_rate_bps
from collapipe.scheduler.plan_messages import equal_plan, to_messages, with_addresses
from collapipe.v1 import plan_pb2

SECURE = {"averaging": AveragingConfig(secure=True)}


@pytest.fixture
def taking_part() -> JobHosts:
    return hosts()


@pytest.fixture
def known(taking_part: JobHosts) -> Knowledge:
    """All links have 10 Mbit/s."""
    return knowledge(taking_part, rate_bps=1e7)


def cluster_of(
    of: JobHosts, known: Knowledge, config: JobConfig | None = None, *previous: ClusterPlan
) -> ClusterProblem:
    problem = build_problem(config or job(), SIZES, of, known, round_index=1, previous=previous)
    return problem.clusters[0]


def model_of(
    config: JobConfig | None = None, known: Knowledge | None = None, sizes: ModelSizes = SIZES
) -> ModelCost:
    known = known or knowledge(hosts())
    return build_problem(config or job(), sizes, hosts(), known, round_index=0).model


def test_weights_have_the_rates_of_probed_wires(taking_part: JobHosts, known: Knowledge) -> None:
    known.links["device-0>edge-server"].weights_bps = 3e6
    known.links["edge-server>device-1"].weights_bps = 4e6
    cluster = cluster_of(taking_part, known)
    # The control unit and three devices send at once, each on its own wire.
    assert cluster.control_unit.push_bps == cluster.control_unit.fetch_bps == 4e7
    assert [device.push_bps for device in cluster.devices] == [3e6, 4e7, 4e7]
    assert [device.fetch_bps for device in cluster.devices] == [4e7, 4e6, 4e7]
    cluster = cluster_of(taking_part, known, job(channel_rate_bps=1.5e7))
    assert [device.push_bps for device in cluster.devices] == [3e6, 1.5e7, 1.5e7]


def test_split_backward_has_a_share(taking_part: JobHosts, known: Knowledge) -> None:
    known.hosts["device-1"].deferred_share = 0.3
    for split, shares in ((False, [0.0] * 3), (True, [1 / 3, 0.3, 1 / 3])):
        config = job()
        training = config.training.model_copy(update={"split_backward": split})
        config = config.model_copy(update={"training": training})
        devices = cluster_of(taking_part, known, config).devices
        assert [device.deferred_share for device in devices] == shares


@pytest.mark.parametrize(
    ("segments", "overlap"),
    [([("device-0", 1, 7)], 25 / 24), ([("device-0", 1, 4), ("device-1", 4, 7)], 25 / 12)],
)
def test_wires_overlap_as_much_as_the_last_plan_lets_them(
    taking_part: JobHosts, known: Knowledge, segments: list[tuple[str, int, int]], overlap: float
) -> None:
    known.block_state_bytes = 16000
    ranges = [("control-unit", 0, 1), *segments, ("edge-server", 7, 8)]
    stages = tuple(StagePlan(*each, 1) for each in ranges)
    plan = ClusterPlan(stages, 1, (LinkPlan(),) * (len(stages) - 1))
    # The embedding has 1000 bytes and each of the 6 blocks 4000.
    last = cluster_of(taking_part, known, None, plan).devices[2]
    assert last.push_bps == pytest.approx(1e7 * overlap)


def test_weights_have_the_whole_channel(taking_part: JobHosts, known: Knowledge) -> None:
    for host in (taking_part.edge_server, *taking_part.devices):
        host.max_transmit_watts = 0.1
    for name in known.links:
        known.links[name] = LinkKnowledge(gain=1e-9, noise_watts_per_hertz=1e-16, efficiency=0.5)
    devices = cluster_of(taking_part, known, job(channel_bandwidth_hz=2e6)).devices
    expected = radio_rate_bps(2e6, 0.1, 1e-9, 1e-16, 0.5)
    assert {rate for device in devices for rate in (device.push_bps, device.fetch_bps)} == {
        expected
    }


def test_half_blocks_have_their_measured_shares_and_their_own_sizes(known: Knowledge) -> None:
    halves = replace(SIZES, unit_bytes=(1000, *[3000, 5000] * 3, 2000), period=2)
    model = model_of(None, Knowledge(hosts=known.hosts), halves)
    assert [model.weights_bytes(u, u + 1) for u in range(8)] == [1000, *[3000, 5000] * 3, 2000]
    assert model.work(1, 2) == model.work(2, 3) == 1
    known.work_shares, known.stash_shares, known.block_stash_bytes = [0.5, 1.5], [1.2, 0.8], 100
    model = model_of(None, known, halves)
    assert [model.work(u, u + 2) for u in (1, 2)] == [2, 2]
    assert [model.work(u, u + 1) for u in (1, 2, 3)] == [0.5, 1.5, 0.5]
    assert [model.stash_bytes(u, u + 1) for u in (1, 2)] == pytest.approx([120, 80])


def test_frozen_weights_are_not_pushed(taking_part: JobHosts, known: Knowledge) -> None:
    sizes = replace(
        SIZES,
        unit_bytes=(10, *[400] * 6, 10),
        frozen_bytes=(9000, *[40_000, 60_000] * 3, 9000),
        period=2,
    )
    known = Knowledge(hosts=known.hosts)
    problem = build_problem(job(), sizes, taking_part, known, round_index=0)
    model = problem.model
    assert [model.weights_bytes(u, u + 1) for u in (0, 1, 2, 7)] == [10, 400, 400, 10]
    assert [model.state_bytes(u, u + 1) for u in (0, 1, 2)] == [9040, 41_600, 61_600]
    quantised = model_of(None, known, replace(sizes, frozen_memory_share=0.25))
    assert [quantised.state_bytes(u, u + 1) for u in (0, 1, 2, 7)] == [9040, 11_600, 16_600, 9040]
    assert model.frozen_bytes(0, 8) == quantised.frozen_bytes(0, 8) == 9000 + 300_000 + 9000
    cluster = problem.clusters[0]
    ((sender, moved),) = moved_states(problem, cluster, cluster.devices[0], 1, 3)
    assert (sender, moved) == (cluster.edge_server.host_id, 800 + 100_000)


TWO = {"clusters": 2}
LATE = {"round_deadline_seconds": 60, "min_clusters": 1}


@pytest.mark.parametrize(
    ("config", "state_bytes"),
    [
        (job({"upload_codecs": ["fp32", "int8"]}), 24000),
        (job({"upload_codecs": ["fp32", "int8"]}, strategy="pipeline"), 16000),
        (job({"upload_codecs": ["fp32"]}, TWO, **LATE), 24000),
        (job({"upload_codecs": ["int8"]}, TWO, **LATE), 36000),
        (job().model_copy(update=SECURE), 20000),
    ],
)
def test_state_counts_residuals_kept_optimizer_states_and_weights_before_a_masked_round(
    config: JobConfig, state_bytes: int
) -> None:
    model = model_of(config)
    assert (model.state_bytes(1, 2), model.weights_bytes(1, 2)) == (state_bytes, 4000)
    if config.averaging.secure:
        assert model.optimizer_bytes(1, 2) == 8000


def test_measured_time_of_embedding_and_head_replaces_the_guess(taking_part: JobHosts) -> None:
    known = knowledge(taking_part, seconds=(0.01, 0.02, 0.04))
    control_unit = cluster_of(taking_part, known).control_unit
    # Without a profile, both count with the speed of the fastest device.
    assert (control_unit.seconds_per_sample, control_unit.end_unit_work) == (0.01, None)
    assert model_of(None, known).head_work == 2000 / 4000
    known.hosts["control-unit"] = HostKnowledge(seconds_per_sample=0.05, end_seconds_per_sample=0.2)
    known.hosts["edge-server"] = HostKnowledge(end_seconds_per_sample=0.003)
    cluster, model = cluster_of(taking_part, known), model_of(None, known)
    for host, units, seconds in (
        (cluster.control_unit, (0, 3), 0.2 + 2 * 0.05),
        (cluster.edge_server, (7, 8), 0.003),
    ):
        work = model.work(*units, host.end_unit_work)
        assert host.compute_seconds(2, work) == pytest.approx(2 * seconds)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (job(), [(False, False), (True, False), (True, True)]),
        (job().model_copy(update=SECURE), [(False, False), (True, False), (True, False)]),
        (job(paper_placement=True), [(False, False)] * 3),
        (job(strategy="pipeline"), [(False, False)] * 3),
    ],
)
def test_blocks_run_beyond_devices_only_where_the_hosts_give_memory(
    taking_part: JobHosts, config: JobConfig, expected: list[tuple[bool, bool]]
) -> None:
    found = [blocks_beyond_devices(config, taking_part)]
    for host in (taking_part.clusters[0].control_unit, taking_part.edge_server):
        host.memory_bytes = 5
        found.append(blocks_beyond_devices(config, taking_part))
    assert found == expected


@pytest.mark.parametrize(
    ("strategy", "recorded", "expected"),
    [
        ("dssra", None, (2, 4, 1)),
        ("pipeline", None, (2,)),
        ("dssra", 0, (1,)),
        ("dssra", 4, (4,)),
        # Whoever took a number out of the job after a failure can resume.
        ("dssra", 16, (2, 4, 1)),
    ],
)
def test_slices_are_those_of_the_job_and_a_retry_keeps_those_of_the_plan(
    taking_part: JobHosts,
    known: Knowledge,
    strategy: str,
    recorded: int | None,
    expected: tuple[int, ...],
) -> None:
    language_model = {"task": {"kind": "causal_lm"}}
    config = job(None, language_model, strategy=strategy, sequence_slices=[2, 4, 2, 1])
    earlier = [] if recorded is None else [plan_pb2.Plan(num_micro_batches=4, num_slices=recorded)]
    problem = build_problem(config, SIZES, taking_part, known, round_index=0, earlier=earlier)
    assert problem.clusters[0].slice_options == expected


_STAGES = (StagePlan("device-0", 0, 7, 1), StagePlan("edge-server", 7, 8, 1))
_PROBLEM = build_problem(job(), SIZES, hosts(), knowledge(hosts()), round_index=1)


def message(**changes: object) -> plan_pb2.Plan:
    plan = replace(ClusterPlan(_STAGES, 1, (LinkPlan(),)), **changes)  # type: ignore[arg-type]
    (found,) = to_messages({stage.host_id: "" for stage in _STAGES}, _PROBLEM, (plan,))
    return found


def test_message_has_the_slices_and_uploads_of_a_plan_and_its_identity_depends_on_them() -> None:
    plain, cut = message(), message(num_slices=4)
    uploading = message(uploads=(UploadPlan(2e6, 0.1), UploadPlan()))
    assert (plain.num_slices, cut.num_slices) == (0, 4)
    uploads = [
        (stage.upload_bandwidth_hz, stage.upload_transmit_power_watts)
        for stage in (*uploading.stages, plain.stages[0])
    ]
    assert uploads == [(2e6, 0.1), (0.0, 0.0), (0.0, 0.0)]
    assert len({plain.plan_id, cut.plan_id, uploading.plan_id}) == 3


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
    assert with_addresses(plan, {stage.host_id: stage.address for stage in plan.stages}) == plan
    moved = with_addresses(plan, {stage.host_id: "elsewhere:1" for stage in plan.stages})
    assert {stage.address for stage in moved.stages} == {"elsewhere:1"}
    assert moved.plan_id != plan.plan_id


def divided(
    first: int, second: int, *, other: str = "device-1", micro_batches: int = 4
) -> ClusterPlan:
    """Divides six blocks among two devices."""
    ranges = [(0, 1), (1, 1 + first), (1 + first, 1 + first + second), (7, 8)]
    names = ["control-unit", "device-0", other, "edge-server"]
    stages = tuple(StagePlan(name, *units, 2) for name, units in zip(names, ranges, strict=True))
    return ClusterPlan(stages, micro_batches, (LinkPlan(),) * 3)


def change(before: ClusterPlan | None, after: ClusterPlan) -> RoundDecision:
    clusters = (replace(_PROBLEM.clusters[0], previous=before),)
    decided = decide(Question("dssra", (), 0.05, replace(_PROBLEM, clusters=clusters)))
    return replace(decided, plans=(after,))


def test_moved_blocks_are_named_with_the_predicted_seconds_unless_nobody_measured_them() -> None:
    decided = change(divided(4, 2), divided(2, 4))
    said = say_change(decided)
    assert said.startswith("device-1 takes blocks 2-3 from device-0 (predicted: ")
    assert "predicted" not in say_change(replace(decided, guessed=("device-0",)))
    said = say_change(change(divided(3, 3), divided(2, 4)))
    assert said.startswith("device-1 takes block 2 from")


def test_same_plan_and_first_plan_are_no_change() -> None:
    for before in (divided(3, 3), None):
        assert say_change(change(before, divided(3, 3))) == ""


def test_host_that_is_gone_is_the_reason() -> None:
    said = say_change(change(divided(3, 3, other="device-9"), divided(3, 3)))
    assert said.startswith("device-1 takes blocks 3-5 from device-9 (device-9 ")


def test_other_numbers_of_micro_batches_are_a_change() -> None:
    said = say_change(change(divided(3, 3), divided(3, 3, micro_batches=8)))
    assert said.startswith("8 micro-batches instead of 4 (predicted: ")
