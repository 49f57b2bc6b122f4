"""Every rule of Prometheus has a test and a name, and every service is scraped. tests/integration/deploy runs promtool."""

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2] / "deploy/prometheus"
SERVICES = (
    *("scheduler", "edge-server", "control-unit-0", "control-unit-1"),
    *(f"device-0-{index}" for index in range(3)),
    *(f"device-1-{index}" for index in range(4)),
)


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def rules(path: str) -> Iterator[dict[str, Any]]:
    for group in load(path)["groups"]:
        yield from group["rules"]


def test_configuration_with_tls_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """It differs from the valid one only in the files of TLS, which do not exist here."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "build.py"), "--check"])
    runpy.run_path(str(ROOT / "build.py"), run_name="__main__")
    plain, secured = load("prometheus.yml"), load("prometheus.tls.yml")
    (job,) = [one for one in secured["scrape_configs"] if one["job_name"] == "collapipe"]
    assert job.pop("scheme") == "https"
    assert job.pop("tls_config")
    assert secured == plain


def test_every_alert_has_a_test_that_it_fires() -> None:
    text = (ROOT / "tests/alerts.yml").read_text(encoding="utf-8")
    fired = set(re.findall(r'ALERTS\{alertname="(\w+)", alertstate="firing"', text))
    fired |= {
        one["alertname"]
        for test in load("tests/alerts.yml")["tests"]
        for one in test.get("alert_rule_test", [])
        if one["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules("rules/alerts.yml")}


def test_every_recording_rule_has_a_test() -> None:
    tested = {
        word
        for test in load("tests/recording.yml")["tests"]
        for one in test["promql_expr_test"]
        if one["exp_samples"]
        for word in re.findall(r"[a-z]+:\w+:\w+", one["expr"])
    }
    assert tested == {rule["record"] for rule in rules("rules/recording.yml")}


def test_every_alert_says_what_happened_and_what_to_do() -> None:
    for rule in rules("rules/alerts.yml"):
        assert set(rule["annotations"]) == {"summary", "description", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]


def test_recording_rules_are_named_level_metric_operation() -> None:
    for rule in rules("rules/recording.yml"):
        assert re.fullmatch(r"(stage|cluster|link|service|job):\w+:\w+", rule["record"])


def test_every_service_of_the_testbed_is_scraped_once() -> None:
    (job,) = [
        one for one in load("prometheus.yml")["scrape_configs"] if one["job_name"] == "collapipe"
    ]
    targets = [target for group in job["static_configs"] for target in group["targets"]]
    assert sorted(targets) == sorted(f"{service}:9100" for service in SERVICES)
    roles = {"scheduler", "edge_server", "control_unit", "device_agent"}
    assert {group["labels"]["host_role"] for group in job["static_configs"]} == roles


def test_scheduler_and_prometheus_have_the_same_scrape_interval() -> None:
    """The scheduler's window has four intervals, so longer ones would leave it without samples."""
    path = ROOT.parent / "compose/compose.observability.yaml"
    services = yaml.safe_load(path.read_text(encoding="utf-8"))["services"]
    told = services["scheduler"]["environment"]["COLLAPIPE_TELEMETRY_INTERVAL_SECONDS"]
    assert load("prometheus.yml")["global"]["scrape_interval"] == f"{told}s"
    source = yaml.safe_load(
        (ROOT.parent / "grafana/provisioning/datasources/prometheus.yaml").read_text(
            encoding="utf-8"
        )
    )
    assert source["datasources"][0]["jsonData"]["timeInterval"] == f"{told}s"
