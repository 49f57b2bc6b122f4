import shutil
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from collapipe.telemetry import metrics


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_counters_of_a_stage_begin_at_zero_and_count_by_direction() -> None:
    metrics.create_stage_series("80", "1")
    stage = {"cluster": "80", "stage": "1"}
    counters = ("steps", "waiting_seconds", "block_samples", "samples", "update_seconds")
    for name in (*counters, "activation_bytes"):
        assert value(f"collapipe_stage_{name}_total", **stage) == 0
    for direction in ("forward", "backward"):
        assert value(f"collapipe_stage_{direction}_seconds_count", **stage) == 0
        sending = {**stage, "direction": direction}
        assert value("collapipe_stage_sending_seconds_total", **sending) == 0
        for way in ("sent", "received"):
            assert value("collapipe_link_bytes_total", **sending, way=way) == 0
    metrics.STAGE_PASS_SECONDS["forward"].labels("80", "1").observe(0.25)
    assert value("collapipe_stage_forward_seconds_sum", **stage) == 0.25
    assert value("collapipe_stage_backward_seconds_count", **stage) == 0


def test_series_exist_before_the_first_update() -> None:
    metrics.create_scheduler_series("source-of-test")
    assert value("collapipe_telemetry_failures_total", source="source-of-test") == 0
    assert value("collapipe_plans_kept_total", reason="solver_slow") is not None
    assert value("collapipe_jobs_ended_total", outcome="failed") is not None
    assert value("collapipe_plans_infeasible_total") is not None
    for outcome in ("committed", "aborted", "cancelled"):
        assert value("collapipe_round_seconds_count", outcome=outcome) is not None
    for way in ("sent", "received"):
        assert value("collapipe_blob_bytes_total", way=way) is not None


def test_metrics_have_their_names_and_labels() -> None:
    metrics.TRAINED_SAMPLES.labels("82").inc(16)
    metrics.TRAINING_LOSS.labels("82").set(0.25)
    metrics.EVALUATION_METRIC.labels("82", "accuracy").set(0.75)
    metrics.JOB_METRIC.labels("accuracy").set(0.5)
    metrics.HOSTS.labels("device_agent").set_function(lambda: 3)
    assert value("collapipe_trained_samples_total", cluster="82") == 16
    assert value("collapipe_training_loss", cluster="82") == 0.25
    assert value("collapipe_evaluation_metric", cluster="82", metric="accuracy") == 0.75
    assert value("collapipe_job_metric", metric="accuracy") == 0.5
    assert value("collapipe_hosts", role="device_agent") == 3
    # Those of calls have the established names of gRPC.
    call = {"grpc_type": "unary", "grpc_service": "a.Service", "grpc_method": "Method"}
    metrics.CALLS_STARTED.labels("unary", "a.Service", "Method").inc()
    metrics.CALLS_HANDLED.labels("unary", "a.Service", "Method", "NOT_FOUND").inc()
    metrics.CALL_SECONDS.labels("unary", "a.Service", "Method").observe(0.125)
    assert value("grpc_server_started_total", **call) == 1
    assert value("grpc_server_handled_total", **call, grpc_code="NOT_FOUND") == 1
    assert value("grpc_server_handling_seconds_sum", **call) == 0.125


def test_free_space_is_measured_before_the_state_directory_exists(tmp_path: Path) -> None:
    later = tmp_path / "not" / "yet"
    metrics.watch_free_space(later)
    free = value("collapipe_state_free_bytes", directory=str(later))
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)


def test_peak_memory_of_this_process_is_exported() -> None:
    peak = value("collapipe_process_peak_resident_memory_bytes")
    assert peak is not None
    assert 10e6 < peak < 1e12


def test_every_metric_has_our_prefix_and_a_base_unit() -> None:
    established = ("grpc_server_", "process_", "python_")
    units = ("seconds", "bytes", "bps", "joules", "watts", "celsius", "hertz", "ratio")
    counted = ("samples", "steps", "rounds", "hosts", "batches", "blocks")
    events = ("plans_kept", "failures", "infeasible", "ended")
    plain = ("loss", "metric", "in_flight", "gain", "present", "unshaped", "backlog")
    plain += ("objective", "epsilon")
    ours = [
        family
        for family in text_string_to_metric_families(generate_latest().decode())
        if not family.name.startswith(established) and not family.name.endswith("_created")
    ]
    assert len(ours) >= 11
    for family in ours:
        assert family.name.startswith("collapipe_")
        assert family.name.endswith((*units, *counted, *events, *plain)), family.name
        assert family.documentation.endswith(".")
