import pytest
from prometheus_client import REGISTRY

from collapipe.stage_runtime.stage_metrics import StageMetrics
from collapipe.tensors import FrameKind

STAGE = {"cluster": "90", "stage": "3"}


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def energy() -> float:
    return value("collapipe_energy_joules_total", sensor="model")


def test_metrics_count_the_actions_of_the_stage() -> None:
    stage = StageMetrics(90, 3, 0.0)
    stage.acted(FrameKind.BACKWARD, 0, 0.25, 0.125)
    stage.worked(num_blocks=4, num_samples=6, activation_bytes=700)
    stage.worked(num_blocks=4, num_samples=6, activation_bytes=700)
    stage.updated(0.125)
    stage.waited(1.0)
    stage.waited(0.5)
    stage.stepped(in_flight=2, stash_bytes=900)
    assert value("collapipe_stage_backward_seconds_sum", **STAGE) == 0.25
    assert value("collapipe_stage_block_samples_total", **STAGE) == 48
    assert value("collapipe_stage_end_unit_seconds_total", **STAGE) == 0.125
    assert value("collapipe_stage_samples_total", **STAGE) == 12
    assert value("collapipe_stage_activation_bytes_total", **STAGE) == 1400
    assert value("collapipe_stage_update_seconds_total", **STAGE) == 0.125
    assert value("collapipe_stage_steps_total", **STAGE) == 1
    assert value("collapipe_stage_waiting_seconds_total", **STAGE) == 1.5
    assert value("collapipe_stage_in_flight", **STAGE) == 2
    assert value("collapipe_stage_stash_bytes", **STAGE) == 900


def test_energy_is_watts_times_busy_seconds() -> None:
    before = energy()
    stage = StageMetrics(90, 4, 8.0)
    stage.acted(FrameKind.FORWARD, 0, 0.25, 0.0)
    stage.acted(FrameKind.BACKWARD, 0, 0.5, 0.0)
    stage.updated(0.125)
    stage.evaluated(0.125)
    stage.waited(100.0)
    stage.stepped(in_flight=1, stash_bytes=0)
    assert energy() - before == pytest.approx(8.0)


def test_device_of_unknown_power_counts_no_energy() -> None:
    before = energy()
    StageMetrics(90, 5, 0.0).acted(FrameKind.FORWARD, 0, 1.0, 0.0)
    assert energy() == before
