"""The order of the time limits of docs/operations.md: where one has to end before another one."""

import inspect
import re
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from collapipe import health_check
from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig, ScheduleConfig
from collapipe.job_life import tries
from collapipe.neighbour_streams import link_probe
from collapipe.rpc import SIGN_OF_LIFE_SECONDS, Security, server
from collapipe.rpc.options import KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS
from collapipe.rpc.processor_shares import LONGEST_WAIT_SECONDS
from collapipe.scheduler import calls_back, host_registry, model_use, profiling
from collapipe.stage_host import registration
from collapipe.weights import transfer
from collapipe_client.client import CollaPipeClient

_DEPLOY = Path(__file__).parents[2] / "deploy"


def test_limits_that_are_constants_are_in_the_order_that_they_need() -> None:
    schedule = ScheduleConfig()
    shortest_silence = 5.0  # The least value of schedule.silence_seconds; the test below checks it.
    client_silence = inspect.signature(CollaPipeClient).parameters["silence_timeout"].default
    connection = KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT_SECONDS
    answer = registration._DEADLINE_SECONDS + registration._RETRY_SECONDS
    lost = host_registry.SILENCE_SECONDS
    probe, profile = link_probe._DEADLINE_SECONDS, profiling._PROFILE_SECONDS
    longest_wait = tries._LONGEST_WAIT_SECONDS
    orders = {
        "a single late sign of life ends no call": (2 * SIGN_OF_LIFE_SECONDS, shortest_silence),
        "one heartbeat without an answer loses no host": (
            host_registry.MOST_HEARTBEAT_SECONDS + answer,
            lost,
        ),
        "a silent service is noticed before its connection": (schedule.silence_seconds, connection),
        "a client outlives a dead connection": (connection, client_silence.total_seconds()),
        "a use of a model waits for hosts that register again": (
            lost,
            model_use._LATE_HOST_SECONDS,
        ),
        "a job waits for hosts that register again": (lost, schedule.wait_for_hosts_seconds),
        "a job tries again after its longest wait": (longest_wait, tries._OTHER_SECONDS),
        "a host waits until it is called back": (
            calls_back._TWIN_SECONDS + calls_back._CALL_SECONDS,
            registration._REGISTER_SECONDS,
        ),
        "a lost host may take longest": (tries._OTHER_SECONDS, schedule.retry_seconds),
        "a probe names the end that is silent": (link_probe._SILENCE_SECONDS, probe),
        "a probe ends before its caller gives up": (probe, profiling._PROBE_SECONDS),
        "a probe waits for its share": (LONGEST_WAIT_SECONDS, link_probe._SILENCE_SECONDS),
        "a profile is within the tries of a job": (profile, schedule.retry_seconds),
        "a silent transfer ends before its connection": (
            transfer.DEFAULT_SILENCE_SECONDS,
            connection,
        ),
    }
    wrong = {why: limits for why, limits in orders.items() if not limits[0] < limits[1]}
    assert wrong == {}


def test_service_managers_wait_longer_than_a_service_drains() -> None:
    for kind in ("system", "user"):
        unit = (_DEPLOY / "systemd" / kind / "collapipe.service").read_text()
        (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
        assert float(seconds) > server._DRAIN_SECONDS
    compose = (_DEPLOY / "compose" / "compose.yaml").read_text()
    timeouts = [float(s) for s in re.findall(r"\btimeout: (\d+)s", compose)]
    assert timeouts and all(seconds >= health_check._DEADLINE_SECONDS for seconds in timeouts)


@pytest.mark.parametrize(
    ("schedule", "named"),
    [
        ({"silence_seconds": 4.9}, "silence_seconds"),
        ({"silence_seconds": 20, "retry_seconds": 19}, r"retry_seconds is 19, .*20"),
    ],
)
def test_job_file_with_limits_in_the_wrong_order_is_refused(
    schedule: dict[str, float], named: str
) -> None:
    with pytest.raises(ValidationError, match=named):
        JobConfig.model_validate({"task": {"kind": "classification"}, "schedule": schedule})


@pytest.mark.parametrize("retry_seconds", [0, 20])
def test_job_file_may_exclude_retries_or_allow_one_silence(retry_seconds: float) -> None:
    schedule = {"silence_seconds": 20, "retry_seconds": retry_seconds}
    JobConfig.model_validate({"task": {"kind": "classification"}, "schedule": schedule})


def test_client_that_would_lose_healthy_peers_is_refused() -> None:
    silence = timedelta(seconds=SIGN_OF_LIFE_SECONDS)
    with pytest.raises(InvalidInputError, match=r"silence_timeout is 1 s"):
        CollaPipeClient("127.0.0.1:1", Security.insecure(), silence_timeout=silence)
