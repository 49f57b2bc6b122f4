import itertools
from dataclasses import replace

import pytest

from collapipe.allocation import ClusterPlan, LinkPlan, StagePlan
from collapipe.allocation.round_model.weights_transfer import moved_states
from collapipe.job import AveragingConfig, JobConfig
from collapipe.radio_rate import radio_rate_bps
from collapipe.scheduler.knowledge import HostKnowledge, Knowledge, LinkKnowledge
from collapipe.scheduler.round_problem import blocks_beyond_devices, build_problem
from collapipe.v1 import plan_pb2

from .jobs import SIZES, hosts, job, knowledge


def test_weights_have_the_rates_of_probed_wires_until_they_are_measured() -> None:
    taking_part = hosts()
    known = knowledge(taking_part, rate_bps=1e7)
    known.links["device-0>edge-server"].weights_bps = 3e6
    known.links["edge-server>device-1"].weights_bps = 4e6
    (cluster,) = build_problem(job(), SIZES, taking_part, known, round_index=0).clusters
    # The control unit and three devices send at once, each on its own wire.
    assert cluster.control_unit.push_bps == cluster.control_unit.fetch_bps == 4e7
    assert [device.push_bps for device in cluster.devices] == [3e6, 4e7, 4e7]
    assert [device.fetch_bps for device in cluster.devices] == [4e7, 4e6, 4e7]
    config = job(channel_rate_bps=1.5e7)
    (cluster,) = build_problem(config, SIZES, taking_part, known, round_index=0).clusters
    assert [device.push_bps for device in cluster.devices] == [3e6, 1.5e7, 1.5e7]


def test_split_backward_has_the_measured_share_or_that_of_the_operations() -> None:
    taking_part = hosts()
    known = knowledge(taking_part)
    known.hosts["device-1"].deferred_share = 0.3
    shares = []
    for split in (False, True):
        config = job()
        training = config.training.model_copy(update={"split_backward": split})
        config = config.model_copy(update={"training": training})
        (cluster,) = build_problem(config, SIZES, taking_part, known, round_index=0).clusters
        shares.append([device.deferred_share for device in cluster.devices])
    assert shares == [[0.0] * 3, [1 / 3, 0.3, 1 / 3]]


def test_wires_overlap_as_much_as_the_last_plan_lets_them() -> None:
    taking_part = hosts()
    known = knowledge(taking_part, rate_bps=1e7)
    known.block_state_bytes = 16000

    def push_bps(segments: tuple[tuple[str, int], ...]) -> float:
        edges = list(itertools.accumulate((blocks for _, blocks in segments), initial=1))
        stages = [StagePlan("control-unit", 0, 1, 1)]
        stages += [
            StagePlan(host_id, start, stop, 1)
            for (host_id, _), (start, stop) in zip(segments, itertools.pairwise(edges), strict=True)
        ]
        stages.append(StagePlan("edge-server", 7, 8, 1))
        plan = ClusterPlan(tuple(stages), 1, (LinkPlan(),) * (len(stages) - 1))
        problem = build_problem(job(), SIZES, taking_part, known, round_index=1, previous=(plan,))
        return problem.clusters[0].devices[2].push_bps

    # The embedding has 1000 bytes and each of the 6 blocks 4000.
    assert push_bps((("device-0", 6),)) == pytest.approx(1e7 * 25 / 24)
    assert push_bps((("device-0", 3), ("device-1", 3))) == pytest.approx(1e7 * 25 / 12)


def test_weights_have_the_whole_radio_channel_until_they_are_measured() -> None:
    taking_part = hosts()
    for host in (taking_part.edge_server, *taking_part.devices):
        host.max_transmit_watts = 0.1
    known = knowledge(taking_part)
    for name in known.links:
        known.links[name] = LinkKnowledge(gain=1e-9, noise_watts_per_hertz=1e-16, efficiency=0.5)
    config = job(channel_bandwidth_hz=2e6)
    (cluster,) = build_problem(config, SIZES, taking_part, known, round_index=0).clusters
    expected = radio_rate_bps(2e6, 0.1, 1e-9, 1e-16, 0.5)
    assert [device.push_bps for device in cluster.devices] == [expected] * 3
    assert [device.fetch_bps for device in cluster.devices] == [expected] * 3


def test_half_blocks_have_their_measured_shares_and_their_own_sizes() -> None:
    taking_part, sizes = hosts(), replace(SIZES, unit_bytes=(1000, *[3000, 5000] * 3, 2000))
    halves = replace(sizes, period=2)
    known = Knowledge(hosts=knowledge(taking_part).hosts)
    model = build_problem(job(), halves, taking_part, known, round_index=0).model
    assert [model.weights_bytes(u, u + 1) for u in range(8)] == [1000, *[3000, 5000] * 3, 2000]
    assert model.work(1, 2) == model.work(2, 3) == 1
    known.work_shares, known.stash_shares, known.block_stash_bytes = [0.5, 1.5], [1.2, 0.8], 100
    model = build_problem(job(), halves, taking_part, known, round_index=0).model
    assert [model.work(u, u + 2) for u in (1, 2)] == [2, 2]
    assert [model.work(u, u + 1) for u in (1, 2, 3)] == [0.5, 1.5, 0.5]
    assert [model.stash_bytes(u, u + 1) for u in (1, 2)] == pytest.approx([120, 80])


def test_frozen_weights_take_memory_and_move_but_are_not_pushed() -> None:
    taking_part = hosts()
    sizes = replace(
        SIZES,
        unit_bytes=(10, *[400] * 6, 10),
        frozen_bytes=(9000, *[40_000, 60_000] * 3, 9000),
        period=2,
    )
    known = Knowledge(hosts=knowledge(taking_part).hosts)
    problem = build_problem(job(), sizes, taking_part, known, round_index=0)
    model = problem.model
    assert [model.weights_bytes(u, u + 1) for u in (0, 1, 2, 7)] == [10, 400, 400, 10]
    assert model.frozen_bytes(0, 8) == 9000 + 300_000 + 9000
    assert [model.state_bytes(u, u + 1) for u in (0, 1, 2)] == [9040, 41_600, 61_600]
    quantised = replace(sizes, frozen_memory_share=0.25)
    model = build_problem(job(), quantised, taking_part, known, round_index=0).model
    assert [model.state_bytes(u, u + 1) for u in (0, 1, 2, 7)] == [9040, 11_600, 16_600, 9040]
    assert model.frozen_bytes(0, 8) == 9000 + 300_000 + 9000
    cluster = problem.clusters[0]
    ((sender, moved),) = moved_states(problem, cluster, cluster.devices[0], 1, 3)
    assert (sender, moved) == (cluster.edge_server.host_id, 800 + 100_000)


def test_state_of_lossy_uploads_counts_if_the_strategy_may_use_them() -> None:
    taking_part = hosts()
    known = knowledge(taking_part)
    training = {"upload_codecs": ["fp32", "int8"]}
    found = {}
    for strategy in ("dssra", "pipeline"):
        config = job(training, strategy=strategy)
        model = build_problem(config, SIZES, taking_part, known, round_index=0).model
        found[strategy] = (model.state_bytes(1, 2), model.weights_bytes(1, 2))
    assert found == {"dssra": (24000, 4000), "pipeline": (16000, 4000)}


def test_kept_optimizer_states_count_if_clusters_may_be_late() -> None:
    taking_part = hosts()
    config = job(round_deadline_seconds=60, min_clusters=1)
    changes = {"clusters": 2, "training": config.training}
    for codecs, expected in ((["fp32"], 24000), (["int8"], 36000)):
        changes["training"] = config.training.model_copy(update={"upload_codecs": codecs})
        two = config.model_copy(update=changes)
        model = build_problem(two, SIZES, taking_part, knowledge(taking_part), round_index=0).model
        assert model.state_bytes(1, 2) == expected


def test_weights_before_the_round_count_if_uploads_are_masked() -> None:
    taking_part = hosts()
    config = job().model_copy(update={"averaging": AveragingConfig(secure=True)})
    model = build_problem(config, SIZES, taking_part, knowledge(taking_part), round_index=0).model
    assert (model.state_bytes(1, 2), model.optimizer_bytes(1, 2)) == (20000, 8000)


def test_measured_time_of_embedding_and_head_replaces_the_guess() -> None:
    taking_part = hosts()
    known = knowledge(taking_part, seconds=(0.01, 0.02, 0.04))
    problem = build_problem(job(), SIZES, taking_part, known, round_index=0)
    control_unit, edge_server = problem.clusters[0].control_unit, problem.clusters[0].edge_server
    # Without a profile, both count with the speed of the fastest device.
    assert (control_unit.seconds_per_sample, control_unit.end_unit_work) == (0.01, None)
    assert problem.model.head_work == 2000 / 4000
    known.hosts["control-unit"] = HostKnowledge(seconds_per_sample=0.05, end_seconds_per_sample=0.2)
    known.hosts["edge-server"] = HostKnowledge(end_seconds_per_sample=0.003)
    problem = build_problem(job(), SIZES, taking_part, known, round_index=1)
    control_unit, edge_server = problem.clusters[0].control_unit, problem.clusters[0].edge_server
    work = problem.model.work(0, 3, control_unit.end_unit_work)
    assert control_unit.compute_seconds(2, work) == pytest.approx(2 * (0.2 + 2 * 0.05))
    work = problem.model.work(7, 8, edge_server.end_unit_work)
    assert edge_server.compute_seconds(2, work) == pytest.approx(2 * 0.003)


def test_blocks_run_beyond_devices_only_where_the_hosts_give_memory() -> None:
    taking_part = hosts()
    assert blocks_beyond_devices(job(), taking_part) == (False, False)
    taking_part.clusters[0].control_unit.memory_bytes = 5
    assert blocks_beyond_devices(job(), taking_part) == (True, False)
    taking_part.edge_server.memory_bytes = 5
    assert blocks_beyond_devices(job(), taking_part) == (True, True)
    secure = job().model_copy(update={"averaging": AveragingConfig(secure=True)})
    assert blocks_beyond_devices(secure, taking_part) == (True, False)
    assert blocks_beyond_devices(job(paper_placement=True), taking_part) == (False, False)
    assert blocks_beyond_devices(job(strategy="pipeline"), taking_part) == (False, False)


def test_slices_are_those_of_the_job_and_a_retry_keeps_those_of_the_plan() -> None:
    taking_part = hosts()
    document = job().model_dump()
    document["task"]["kind"] = "causal_lm"
    document["schedule"]["sequence_slices"] = [2, 4, 2, 1]

    def options(strategy: str, earlier: tuple[plan_pb2.Plan, ...] = ()) -> tuple[int, ...]:
        document["schedule"]["strategy"] = strategy
        config = JobConfig.model_validate(document)
        problem = build_problem(
            config, SIZES, taking_part, knowledge(taking_part), round_index=0, earlier=earlier
        )
        return problem.clusters[0].slice_options

    assert options("dssra") == (2, 4, 1)
    assert options("pipeline") == (2,)
    for recorded, kept in ((0, 1), (4, 4)):
        earlier = plan_pb2.Plan(num_micro_batches=4, num_slices=recorded)
        assert options("dssra", (earlier,)) == (kept,)
    # Whoever took a number out of the job after a failure can resume.
    earlier = plan_pb2.Plan(num_micro_batches=4, num_slices=16)
    assert options("dssra", (earlier,)) == (2, 4, 1)
