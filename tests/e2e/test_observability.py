"""Tests the Prometheus configuration, rules and dashboards of deploy/ with services that train a job."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from dashboard_panels import ROOT, panels, to_promql
from integration.running import run_job
from prometheus_server import PrometheusServer, eventually, running_prometheus
from typer.testing import CliRunner

from collapipe.documents import read_document
from collapipe.emulation.emulation_file import EmulatedDevice, EmulatedRadio, Emulation
from collapipe.job import JobConfig
from collapipe.telemetry.estimates import Estimates, HostPrior, estimate
from collapipe.telemetry.host_estimates import ENERGY_SENSORS
from collapipe.telemetry.sources.prometheus import PrometheusSource
from collapipe_client import Device, LocalTestbed
from collapipe_client.cli import app
from collapipe_client.testbed_certificates import PROMETHEUS, LocalCertificates

RULES = ROOT / "deploy/prometheus/rules"
WINDOW_SECONDS = 5
"""A short window, which starts long after the counters. Near 0, increase() would extrapolate differently."""
CLOSE = 0.05
"""Largest relative difference between a rule and the scheduler's estimate of the same window."""

NEEDS = {
    "collapipe-devices/Hottest": "a sensor of temperature",
    "collapipe-devices/Temperature": "a sensor of temperature",
    "collapipe-devices/Calls that fail": "a call that fails",
    "collapipe-scheduler/Largest backlog": "a device with an energy budget",
    "collapipe-scheduler/Backlog of the energy queues": "a device with an energy budget",
}
"""Panels that may be empty here, and what they would need."""

SMALL = 3_000_000
"""Memory limit in bytes, too small for the whole model, so that both devices get blocks."""
EMULATION = Emulation(
    devices={
        "device-0-0": EmulatedDevice(profile="raspberry-pi-5"),
        "device-0-1": EmulatedDevice(profile="raspberry-pi-4"),
    },
    radios={"*": EmulatedRadio(gain=1e-7, noise_watts_per_hertz=1e-17, delay_seconds=0.002)},
)
JOB = JobConfig.model_validate(
    {
        "name": "observed",
        "task": {"kind": "classification", "max_length": 32},
        "data": {"source": "stdlib_docstrings", "max_rows": 300, "max_held_out_rows": 16},
        "model": {
            "vocabulary_size": 1000,
            "config": {
                "hidden_size": 64,
                "intermediate_size": 256,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
            },
        },
        "training": {"rounds": 8, "local_steps": 6, "mini_batch": 16},
        "schedule": {
            "strategy": "dssra",
            "num_micro_batches": 2,
            "channel_bandwidth_hz": 2e6,
            "hysteresis": 10.0,  # keeps the plan, so that no new series appear within the job
            "silence_seconds": 60,
        },
    }
)


@dataclass
class Observed:
    """A Prometheus server that has scraped the hosts of a job."""

    server: PrometheusServer
    instances: dict[str, str]
    """Names of the hosts by the addresses of their metrics."""
    trained_at: float
    """Unix seconds at the end of the job."""
    ended_at: float
    """Unix seconds of a time after the next evaluation of the rules."""

    def ask(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Returns the rows of an instant query that are not NaN; by default at the end of the job."""
        form = {"query": expression, "time": f"{at or self.ended_at:.3f}"}
        with httpx.Client(base_url=self.server.url, trust_env=False) as client:
            answer = client.post("/api/v1/query", data=form).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        rows: list[dict[str, Any]] = answer["data"]["result"]
        return [row for row in rows if not math.isnan(float(row["value"][1]))]


def deployed_config(directory: Path, scheduler_metrics: str, certificate: Path) -> dict[str, Any]:
    """Returns the deployed prometheus.tls.yml without the targets of Compose, and with half the intervals."""
    source = ROOT / "deploy/prometheus"
    (directory / "rules").mkdir()
    for path in (source / "rules").glob("*.yml"):
        (directory / "rules" / path.name).write_text(path.read_text("utf-8"), encoding="utf-8")
    text = (source / "prometheus.tls.yml").read_text("utf-8")
    config: dict[str, Any] = yaml.safe_load(text.replace("/etc/collapipe/tls", str(certificate)))
    config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (job,) = [one for one in config["scrape_configs"] if one["job_name"] == "collapipe"]
    labels = {"host_role": "scheduler", "service": "scheduler"}
    job["static_configs"] = [{"targets": [scheduler_metrics], "labels": labels}]
    for discovery in job["file_sd_configs"]:
        discovery |= {"files": ["targets.json"], "refresh_interval": "1s"}
    config["scrape_configs"] = [job]
    return config


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Runs a job on two devices, whose addresses Prometheus gets from `collapipe targets`."""
    directory = tmp_path_factory.mktemp("observed")
    devices = [Device(memory_bytes=SMALL), Device(memory_bytes=SMALL)]
    with LocalTestbed([devices], directory / "testbed", emulation=EMULATION) as testbed:
        testbed.wait_until_registered()
        metrics = {
            (read_document(testbed.workspace.ready_file(one.name)) or {})[
                "metrics_address"
            ]: one.name
            for one in testbed.processes
        }
        certificate = testbed.workspace.certificates.folder(PROMETHEUS.name)
        scheduler = next(address for address, name in metrics.items() if name == "scheduler")
        with running_prometheus(
            directory, deployed_config(directory, scheduler, certificate)
        ) as server:
            options = ["targets", str(directory / "targets.json"), *testbed.endpoint_options]
            result = CliRunner().invoke(app, options)
            assert result.exit_code == 0, result.output
            watched = Observed(server, metrics, 0.0, 0.0)
            eventually(lambda: len(watched.ask("up == 1", time.time())) == len(metrics))
            run_job(testbed, JOB)
            watched.trained_at = time.time()
            # Prometheus evaluates the rules every five seconds.
            time.sleep(6)
            watched.ended_at = time.time()
            yield watched


def test_targets_have_the_labels_that_scheduler_and_rules_need(observed: Observed) -> None:
    rows = [row["metric"] for row in observed.ask("up")]
    # The scheduler compares the instance with the registered address.
    assert {row["instance"]: row["service"] for row in rows} == observed.instances
    assert {row["service"]: row["host_role"] for row in rows} == {
        "scheduler": "scheduler",
        "edge-server": "edge_server",
        "control-unit-0": "control_unit",
        "device-0-0": "device_agent",
        "device-0-1": "device_agent",
    }


def test_every_panel_has_data_or_says_what_it_needs(observed: Observed) -> None:
    empty = {
        panel.name
        for panel in panels()
        for target in panel.targets
        if not observed.ask(to_promql(target.expression))
    }
    assert empty <= NEEDS.keys(), empty - NEEDS.keys()
    assert NEEDS.keys() <= {panel.name for panel in panels()}, (
        "NEEDS names a panel that does not exist"
    )
    for panel in panels():
        reason = panel.document["fieldConfig"]["defaults"]["noValue"]
        assert panel.name not in NEEDS or not reason.startswith("no job"), panel.name


def test_panels_add_up_to_the_amount_of_training(observed: Observed) -> None:
    training = JOB.training
    expected = training.rounds * training.local_steps * training.mini_batch
    (row,) = observed.ask("collapipe_trained_samples_total")
    assert float(row["value"][1]) == expected
    (row,) = observed.ask("sum(collapipe_placed_blocks)")
    assert float(row["value"][1]) == 4
    (row,) = observed.ask('sum(collapipe_round_seconds_count{outcome="committed"})')
    assert float(row["value"][1]) == training.rounds


def test_stage_is_never_busy_for_longer_than_the_time_that_passed(observed: Observed) -> None:
    """Computing, updating and waiting exclude each other. Each direction of sending has its own thread."""
    for kinds in (("busy", "update", "waiting"), ("sending",)):
        sums = " + ".join(f"stage:{kind}_seconds:rate1m" for kind in kinds)
        rows = observed.ask(f"max_over_time(({sums})[2m:5s])")
        assert len(rows) == 4  # control unit, two devices, edge server
        assert all(0 <= float(row["value"][1]) <= 1.2 for row in rows), rows


def estimated(observed: Observed, seconds: float, end: float) -> Estimates:
    """Returns the scheduler's estimates of a window. Without profiles, it subtracts no fixed costs."""
    series = PrometheusSource(observed.server.url).window(end - seconds, end)
    hosts = {at: name for at, name in observed.instances.items() if name != "scheduler"}
    priors = {host: HostPrior() for host in hosts.values()}
    found = estimate(series, hosts, priors, end=end, max_age_seconds=10.0)
    assert found.missing == ()
    return found


def ratios(estimates: Estimates) -> dict[str, dict[str, float]]:
    """Returns the estimates by the names of the rules that are marked (estimate)."""
    hosts, links = estimates.hosts.items(), estimates.links.items()
    sensors = "|".join(ENERGY_SENSORS)
    each: dict[str, dict[str, float | None]] = {
        "link:goodput_bps:ratio_increase1m": {link: one.goodput_bps for link, one in links},
        "service:block_sample_seconds:ratio_increase1m": {
            host: one.seconds_per_sample for host, one in hosts
        },
        "service:step_seconds:ratio_increase1m": {host: one.step_seconds for host, one in hosts},
        f'service:busy_watts:ratio_increase1m{{sensor=~"{sensors}"}}': {
            host: one.busy_watts for host, one in hosts
        },
        "cluster:activation_bytes_per_sample:ratio_increase1m": {
            cluster: one.activation_bytes_per_sample for cluster, one in estimates.clusters.items()
        },
    }
    return {
        rule: {key: value for key, value in values.items() if value is not None}
        for rule, values in each.items()
    }


def values_of(rows: list[dict[str, Any]], rule: str) -> dict[str, float]:
    label = rule.partition(":")[0]
    return {row["metric"][label]: float(row["value"][1]) for row in rows}


def expressions() -> dict[str, str]:
    """Returns the expressions of the recording rules by name."""
    groups = yaml.safe_load((RULES / "recording.yml").read_text("utf-8"))["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}


def test_rules_agree_with_what_the_scheduler_estimates(observed: Observed) -> None:
    """The window is within the job, because increase() does not count the first value of a new series."""
    expected = ratios(estimated(observed, WINDOW_SECONDS, observed.trained_at))
    assert len(expected["link:goodput_bps:ratio_increase1m"]) >= 4
    assert len(expected["service:block_sample_seconds:ratio_increase1m"]) == 2  # the devices
    assert len(expected["cluster:activation_bytes_per_sample:ratio_increase1m"]) == 1
    for rule, values in expected.items():
        over_window = expressions()[rule.partition("{")[0]].replace("[1m]", f"[{WINDOW_SECONDS}s]")
        recorded = values_of(observed.ask(over_window, observed.trained_at), rule)
        assert {key: recorded[key] for key in values} == pytest.approx(values, rel=CLOSE), rule


def test_recorded_value_equals_the_expression_of_its_rule(observed: Observed) -> None:
    (stamp,) = observed.ask("timestamp(cluster:trained_samples:rate1m)")
    evaluated_at = float(stamp["value"][1])
    for rule, least in (
        ("link:goodput_bps:ratio_increase1m", 4),
        ("service:block_sample_seconds:ratio_increase1m", 2),
    ):
        expected = values_of(observed.ask(expressions()[rule], evaluated_at), rule)
        assert len(expected) >= least
        recorded = values_of(observed.ask(rule, evaluated_at), rule)
        # A scrape that was not complete when the rule was evaluated counts only for later queries.
        assert recorded == pytest.approx(expected, rel=CLOSE), rule


def test_every_rule_and_alert_is_evaluated_without_error(observed: Observed) -> None:
    with httpx.Client(base_url=observed.server.url, trust_env=False) as client:
        groups = client.get("/api/v1/rules").json()["data"]["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    assert len(found) >= 30
    assert [rule["lastError"] for rule in found if rule["health"] != "ok"] == []
    # The job has no problem except that its emulated devices share two processors.
    firing = {row["metric"]["alertname"] for row in observed.ask('ALERTS{alertstate="firing"}')}
    assert firing <= {"EmulationOverrun", "PredictionOff"}


def test_host_that_is_listed_twice_is_scraped_once(tmp_path: Path) -> None:
    """In Compose, the static list and `collapipe targets` may contain the same host."""
    certificates = LocalCertificates(tmp_path / "certificates")
    certificates.issue({PROMETHEUS: ()}, timedelta(days=1))
    config = deployed_config(tmp_path, "127.0.0.1:1", certificates.folder(PROMETHEUS.name))
    entry = {"targets": ["127.0.0.1:1"], "labels": {"host_role": "scheduler"}}
    config["scrape_configs"][0]["static_configs"] = [entry]
    with (
        running_prometheus(tmp_path, config) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        same = {**entry, "labels": {"host_role": "scheduler", "service": "127.0.0.1"}}
        other = {"targets": ["127.0.0.1:2"], "labels": {"host_role": "device_agent"}}
        text = json.dumps([same, other])
        (tmp_path / "targets.json").write_text(text, encoding="utf-8")

        def targets() -> list[str]:
            found = client.get("/api/v1/targets", params={"state": "active"}).json()["data"]
            return sorted(one["labels"]["instance"] for one in found["activeTargets"])

        eventually(lambda: "127.0.0.1:2" in targets())
        assert targets() == ["127.0.0.1:1", "127.0.0.1:2"]
