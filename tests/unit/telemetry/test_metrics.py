import shutil
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from collapipe.errors import InvalidInputError
from collapipe.telemetry import metrics
from collapipe.telemetry.exporter import serve_metrics


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_series_of_a_stage_appear_at_zero_when_it_opens() -> None:
    metrics.stage_opened("80", "1")
    stage = {"cluster": "80", "stage": "1"}
    assert value("collapipe_stage_steps_total", **stage) == 0
    assert value("collapipe_stage_waiting_seconds_total", **stage) == 0
    for action in ("forward", "backward"):
        assert value(f"collapipe_stage_{action}_seconds_count", **stage) == 0
        for way in ("sent", "received"):
            series = {**stage, "direction": action, "way": way}
            assert value("collapipe_link_bytes_total", **series) == 0


def test_stage_counts_actions_steps_and_bytes() -> None:
    stage = {"cluster": "81", "stage": "2"}
    metrics.stage_opened("81", "2")
    metrics.stage_action("81", "2", "forward", 0.25)
    metrics.stage_action("81", "2", "forward", 0.5)
    metrics.stage_waited("81", "2", 1.5)
    metrics.stage_step("81", "2")
    metrics.link_bytes("81", "2", "backward", "received", 300)
    assert value("collapipe_stage_forward_seconds_sum", **stage) == 0.75
    assert value("collapipe_stage_backward_seconds_count", **stage) == 0
    assert value("collapipe_stage_steps_total", **stage) == 1
    assert value("collapipe_stage_waiting_seconds_total", **stage) == 1.5
    series = {**stage, "direction": "backward", "way": "received"}
    assert value("collapipe_link_bytes_total", **series) == 300


def test_time_of_sending_is_kept_by_direction() -> None:
    metrics.stage_opened("83", "0")
    stage = {"cluster": "83", "stage": "0"}
    for seconds in (0.25, 0.5):
        metrics.stage_sent("83", "0", "forward", seconds)
    sending = "collapipe_stage_sending_seconds_total"
    assert value(sending, **stage, direction="forward") == 0.75
    assert value(sending, **stage, direction="backward") == 0


def test_series_of_a_scheduler_appear_at_zero_when_it_opens() -> None:
    metrics.scheduler_opened("source-of-test")
    assert value("collapipe_telemetry_failures_total", source="source-of-test") == 0
    assert value("collapipe_plans_kept_total", reason="solver_slow") is not None
    assert value("collapipe_jobs_ended_total", outcome="failed") is not None
    infeasible = value("collapipe_plans_infeasible_total")
    assert infeasible is not None
    metrics.plan_infeasible()
    assert value("collapipe_plans_infeasible_total") == infeasible + 1


def test_room_for_state_is_told_before_its_directory_exists(tmp_path: Path) -> None:
    later = tmp_path / "not" / "yet"
    metrics.state_kept(later)
    free = value("collapipe_state_free_bytes", directory=str(later))
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)


def test_training_and_evaluation_are_told() -> None:
    metrics.trained("82", 16, 0.5)
    metrics.trained("82", 16, 0.25)
    metrics.evaluated("82", "accuracy", 0.75)
    metrics.hosts_alive("device_agent", 3)
    assert value("collapipe_trained_samples_total", cluster="82") == 32
    assert value("collapipe_training_loss", cluster="82") == 0.25
    assert value("collapipe_evaluation_metric", cluster="82", metric="accuracy") == 0.75
    assert value("collapipe_hosts", role="device_agent") == 3


def test_outcomes_of_rounds_and_ways_of_blobs_exist_before_the_first() -> None:
    for outcome in ("committed", "aborted"):
        assert value("collapipe_round_seconds_count", outcome=outcome) is not None
    for way in ("sent", "received"):
        assert value("collapipe_blob_bytes_total", way=way) is not None


def test_aggregation_is_timed() -> None:
    before = value("collapipe_aggregation_seconds_count")
    assert before is not None
    with metrics.aggregation_timer():
        pass
    assert value("collapipe_aggregation_seconds_count") == before + 1


def test_calls_have_the_established_names_of_grpc() -> None:
    call = {"grpc_type": "unary", "grpc_service": "a.Service", "grpc_method": "Method"}
    metrics.call_started("unary", "a.Service", "Method")
    metrics.call_handled("unary", "a.Service", "Method", "NOT_FOUND", 0.125)
    assert value("grpc_server_started_total", **call) == 1
    assert value("grpc_server_handled_total", **call, grpc_code="NOT_FOUND") == 1
    assert value("grpc_server_handling_seconds_sum", **call) == 0.125


def test_memory_of_this_process_is_told() -> None:
    peak = value("collapipe_process_peak_resident_memory_bytes")
    assert peak is not None
    assert 10e6 < peak < 1e12


def test_every_metric_has_our_prefix_and_a_base_unit() -> None:
    established = ("grpc_server_", "process_", "python_")
    units = ("seconds", "bytes", "bps", "joules", "watts", "celsius", "hertz", "ratio")
    counted = (
        "samples",
        "steps",
        "hosts",
        "batches",
        "blocks",
        "plans_kept",
        "failures",
        "infeasible",
        "ended",
    )
    plain = ("loss", "metric", "in_flight", "gain", "present", "backlog", "objective")
    ours = [
        family
        for family in text_string_to_metric_families(generate_latest().decode())
        if not family.name.startswith(established) and not family.name.endswith("_created")
    ]
    assert len(ours) >= 11
    for family in ours:
        assert family.name.startswith("collapipe_")
        assert family.name.endswith((*units, *counted, *plain)), family.name
        assert family.documentation.endswith(".")


# --- the page


def test_page_is_served_on_a_free_port_that_is_told() -> None:
    address = serve_metrics("127.0.0.1:0")
    assert not address.endswith(":0")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        assert b"collapipe_round_seconds" in page.read()


def test_nothing_is_served_when_nothing_is_asked_for() -> None:
    assert serve_metrics("") == ""


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:x", "127.0.0.1:70000", "1.2.3.4:5"])
def test_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(InvalidInputError, match=f"cannot serve metrics on {listen} .*--metrics-l"):
        serve_metrics(listen)


def test_port_in_use_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(InvalidInputError, match=f"cannot serve metrics on {listen}"):
            serve_metrics(listen)
