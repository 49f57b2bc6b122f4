import math
from collections.abc import Sequence
from typing import Any

import pytest

from collapipe.emulation.boxes import Box
from collapipe.emulation.links import LinkValues
from collapipe.job import JobConfig
from collapipe.planning.estimate import Estimator
from collapipe.planning.estimate_documents import Estimate, Request
from collapipe.unit_costs import ModelCosts, UnitCost

MB = 1_000_000
STASH, HIDDEN, LENGTH = 2 * MB, 256, 100
ACTIVATION = 4 * HIDDEN * LENGTH


def count(jobs: Sequence[JobConfig]) -> list[ModelCosts | None]:
    """Returns the costs of a model with six layers of 10 MB, whose LoRA trains 1 MB in each."""

    def costs(job: JobConfig) -> ModelCosts | None:
        lora, period = job.model.lora is not None, 2 if job.model.half_blocks else 1

        def unit(weights: int, stash: int, share: int = 1) -> UnitCost:
            trained = weights // 10 if lora else weights
            return UnitCost(
                weights_bytes=trained // share,
                frozen_bytes=weights // share if lora else 0,
                stash_bytes=stash // share,
                flops=1.2e9 / share,
                gradient_bytes=0.0,
                update_bytes=7.0 * trained / share,
            )

        embedding = unit(5 * MB, 0)
        if lora:
            embedding = embedding.model_copy(update={"weights_bytes": 16})
        return ModelCosts(
            units=(embedding, *[unit(10 * MB, STASH, period)] * (6 * period), unit(5 * MB, MB)),
            hidden_size=HIDDEN,
            period=period,
            frozen_memory_share=0.25 if job.model.base_quantisation else 1.0,
        )

    return [costs(job) for job in jobs]


def estimate(
    *boxes: Box,
    clusters: int = 1,
    lora: bool = False,
    base_quantisation: str | None = None,
    **schedule: Any,
) -> Estimate:
    document: dict[str, Any] = {
        "clusters": clusters,
        "task": {"kind": "causal_lm", "max_length": LENGTH},
        "model": {"family": "llama", "base_quantisation": base_quantisation},
        "training": {"mini_batch": 16, "local_steps": 5},
        "schedule": {"num_micro_batches": 4, **schedule},
    }
    if lora:
        document["model"]["lora"] = {"r": 8}
    job = JobConfig.model_validate(document)
    return Estimator(Request(job=job, devices=boxes), count).estimate()


def box(profile: str = "pi4", memory: int | None = None, rate_bps: float | None = 80e6) -> Box:
    return Box(profile=profile, memory_bytes=memory, link=LinkValues(rate_bps=rate_bps))


def fits(memory: int, num_boxes: int = 2, **schedule: Any) -> bool:
    return estimate(*[box(memory=memory)] * num_boxes, **schedule).fits


def test_memory_of_a_host_is_the_sum_of_its_parts() -> None:
    answer = estimate(box(), box())
    assert answer.fits
    (cluster,) = answer.clusters
    control_unit, *devices, edge_server = cluster.hosts
    assert [host.num_blocks for host in cluster.hosts] == [0, 3, 3, 0]
    assert (control_unit.given_bytes, devices[0].given_bytes) == (None, 3_000_000_000)
    for host in devices:
        assert (host.weights_bytes, host.frozen_bytes) == (30 * MB, 0)
        assert host.optimizer_bytes == 90 * MB  # a gradient and two moments
        parts = (host.weights_bytes, host.frozen_bytes, host.optimizer_bytes, host.activation_bytes)
        assert host.needed_bytes == sum(parts)
    # All four micro-batches of four rows are in flight, each with two activations in the queues.
    assert devices[0].activation_bytes == 4 * 4 * (3 * STASH + 2 * ACTIVATION)
    assert edge_server.weights_bytes == 5 * MB


def test_quantised_weights_need_less_memory_but_travel_whole() -> None:
    (full,), (small,) = (
        estimate(box(), box(), lora=True, base_quantisation=kind).clusters for kind in (None, "nf4")
    )
    for before, after in zip(full.hosts[1:-1], small.hosts[1:-1], strict=True):
        assert (before.frozen_bytes, after.frozen_bytes) == (30 * MB, 7.5 * MB)
        assert before.needed_bytes - after.needed_bytes == 22.5 * MB
        assert after.optimizer_bytes == before.optimizer_bytes
        assert after.first_fetched_bytes == before.first_fetched_bytes
    assert full.hosts[-1] == small.hosts[-1]


def test_slices_need_memory_for_keys_and_values() -> None:
    (whole,), (cut,) = (
        estimate(box(), box(), sequence_slices=[s], in_flight=4).clusters for s in (1, 4)
    )
    assert (whole.num_slices, cut.num_slices) == (1, 4)
    # For each of the 16 rows, three layers keep eta of docs/scheduling.md (10).
    more = cut.hosts[1].needed_bytes - whole.hosts[1].needed_bytes
    assert more == 16 * 3 * 2 * ACTIVATION * 3 * (1 / 2 + 2 / 4)
    assert cut.hosts[1].micro_batch_seconds < whole.hosts[1].micro_batch_seconds


def test_round_is_the_sum_of_steps_and_of_the_slowest_transfers() -> None:
    (cluster,) = estimate(box(), box(rate_bps=40e6), clusters=1).clusters
    assert cluster.round_seconds == pytest.approx(
        5 * cluster.step_seconds + cluster.push_seconds + cluster.fetch_seconds
    )
    assert cluster.push_seconds == pytest.approx(30 * MB * 8 / 40e6)
    assert cluster.fetch_seconds == 0  # One cluster has the average already.
    assert cluster.first_fetch_seconds == pytest.approx(30 * MB * 8 / 40e6)
    # A micro-batch of four rows of three blocks on a Raspberry Pi 4, and its fixed time.
    assert cluster.hosts[1].micro_batch_seconds == pytest.approx(4 * 3 * 1.2e9 / 12e9 + 9e-3)
    two = estimate(box(), box(), clusters=2).clusters
    assert [host.fetched_bytes for host in two[1].hosts] == [5 * MB, 30 * MB, 30 * MB, 0]
    assert two[1].hosts[-1].weights_bytes == 10 * MB  # a head for each cluster


def test_no_gradient_travels_to_units_before_the_first_trained_one() -> None:
    (full,), (lora,) = estimate(box(), box()).clusters, estimate(box(), box(), lora=True).clusters
    step = 16 * ACTIVATION
    assert [link.backward_bytes for link in full.links] == [step] * 3
    assert [link.backward_bytes for link in lora.links] == [0, step, step]
    assert [link.backward_seconds > 0 for link in lora.links] == [False, True, True]
    assert [link.forward_bytes for link in lora.links] == [step] * 3
    assert lora.hosts[1].pushed_bytes == 3 * MB
    assert lora.hosts[1].first_fetched_bytes == 33 * MB
    assert lora.hosts[1].optimizer_bytes == 9 * MB


def test_model_that_does_not_fit_names_what_is_missing_and_changes_that_help() -> None:
    answer = estimate(box(memory=190 * MB), box(memory=190 * MB))
    assert not answer.fits
    assert "device-0-0" in answer.missing[0]
    assert {host.num_blocks for host in answer.clusters[0].hosts[1:3]} == {3}
    settings = [change.settings for change in answer.changes if change.settings]
    assert ("training.recompute=true",) in settings
    assert ("schedule.num_micro_batches=8",) in settings
    assert ("schedule.num_micro_batches=16",) not in settings  # A smaller change is enough.
    assert ("model.lora.r=8",) in settings
    assert [change.boxes for change in answer.changes if change.boxes] == [
        "1 more pi4",
        "1.25 times the memory in every box: 237.5 MB",
    ]
    # What is proposed fits.
    assert fits(190 * MB, num_micro_batches=8) and fits(190 * MB, num_boxes=3) and fits(238 * MB)


def test_memory_that_would_be_enough_is_named_if_the_boxes_have_nearly_none() -> None:
    answer = estimate(box(memory=MB), box(memory=MB))
    # Three blocks with moments take 120 MB, and four micro-batches of four rows 105.8 MB.
    enough = math.ceil((120 * MB + 16 * (3 * STASH + 2 * ACTIVATION)) / MB)
    assert answer.changes[-1].boxes == f"{enough} MB of memory for training in every box"
    assert fits(enough * MB)


def test_changes_that_help_only_together_are_named_together() -> None:
    answer = estimate(box(memory=60 * MB), box(memory=60 * MB))
    assert not answer.fits
    (together,) = [change.settings for change in answer.changes if change.settings]
    assert len(together) > 1
    assert "model.lora.r=8" in together
    assert "schedule.strategy=proportional" not in together  # The others suffice without it.


def test_dssra_uses_the_boxes_that_have_memory() -> None:
    answer = estimate(box(memory=60 * MB), box("laptop"), strategy="dssra")
    assert answer.fits
    blocks = {host.host_id: host.num_blocks for host in answer.clusters[0].hosts}
    assert sum(blocks.values()) == 6
    assert blocks["device-0-1"] >= 5  # One block with its moments takes 40 MB.


def test_other_number_of_devices_than_the_job_asks_for_is_noted() -> None:
    task = {"kind": "causal_lm", "max_length": LENGTH}
    job = JobConfig.model_validate({"task": task, "devices_per_cluster": 3})
    answer = Estimator(Request(job=job, devices=(box(), box())), count).estimate()
    assert "--set devices_per_cluster=2" in answer.notes[0]
