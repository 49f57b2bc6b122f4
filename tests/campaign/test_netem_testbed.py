"""Tests a job over links that netem emulates, and what the metrics show of these links.

pytest -s tests/campaign/test_netem_testbed.py      # prints the metrics and the true values
"""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from containers.compose_jobs import write_rows
from containers.uml.guest import SHARED, need_uml
from containers.uml.testbed import HOSTS, GuestTestbed, guest_testbed
from reference.federated_job import train_job

from collapipe_client.job_files import load_job

pytestmark = pytest.mark.timeout(1200)

TOLERANCE, SECONDS = 0.15, 0.005
BUSY_TOLERANCE, BUSY_SECONDS = 0.35, 0.01
"""All processes share the one processor of the guest, so hosts send and read late."""
ROUNDS, ROUNDS_BEFORE = 4, 2
TRAINED = {"device-0-0": "wifi", "device-0-1": "lan", "device-0-2": "wifi"}
"""Network profiles without losses: with losses, the goodput of TCP varies by half between runs."""
NARROWED, NARROW_PROFILE = "device-0-1", "4g"
PROBED = {"device-0-0": "wifi-congested", "device-0-1": "lte-lossy", "device-0-2": "satellite"}
ATTEMPTS = 3
"""Each link may be measured wrongly twice: a probe is late if it queues behind the burst of another probe."""
TCP_SHARE = 1448 / 1514
FRAMES = 10
MINI_BATCH, MICRO_BATCHES, TOKENS, HIDDEN = 64, 2, 64, 128
FRAME_BYTES = MINI_BATCH // MICRO_BATCHES * TOKENS * HIDDEN * 4
JOB_SECONDS = 400.0
_GOODPUT = (
    "8 * increase(collapipe_link_transfer_bytes_total[{0}s]) / on(link) group_left "
    "increase(collapipe_link_transfer_seconds_total[{0}s])"
)
_JOB = """\
name = "{name}"
clusters = 1
devices_per_cluster = 3

[task]
kind = "classification"
max_length = {tokens}

[data]
train = "{data}/train.jsonl"
held_out = "{data}/held-out.jsonl"

[model]
vocabulary_size = 1000
config = {{ hidden_size = {hidden}, intermediate_size = 64, num_hidden_layers = 6, num_attention_heads = 2 }}

[training]
rounds = {rounds}
local_steps = 3
mini_batch = {mini_batch}
evaluate_every = 0

[schedule]
strategy = "{strategy}"
num_micro_batches = {micro_batches}
silence_seconds = 240
"""


def write_job(
    folder: Path, name: str, strategy: str, rounds: int, data: str = f"{SHARED}/data"
) -> Path:
    path = folder / f"{name}.toml"
    sizes = {"tokens": TOKENS, "hidden": HIDDEN, "mini_batch": MINI_BATCH}
    sizes["micro_batches"] = MICRO_BATCHES
    path.write_text(_JOB.format(name=name, strategy=strategy, rounds=rounds, data=data, **sizes))
    return path


@pytest.fixture(scope="module")
def testbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuestTestbed]:
    need_uml()
    if not shutil.which("prometheus"):
        pytest.skip("no prometheus on this machine: apt-get install prometheus")
    shared = tmp_path_factory.mktemp("uml")
    (shared / "data").mkdir()
    write_rows(shared / "data")
    began_at = time.monotonic()
    with guest_testbed(shared) as testbed:
        print(f"\nthe testbed was up after {time.monotonic() - began_at:.0f} s")
        yield testbed


@dataclass(frozen=True)
class MeasuredGoodput:
    """The goodput of each link in bit/s that Prometheus showed during a job, before and after a change."""

    events: list[dict[str, Any]]
    before: dict[str, float]
    after: dict[str, float]


@pytest.fixture(scope="module")
def measured(testbed: GuestTestbed) -> MeasuredGoodput:
    """Trains over the links of TRAINED. Half-way, shapes the links of one device to a slower profile."""
    for device, profile in TRAINED.items():
        result = testbed.shape(device, profile)
        assert not result["problems"] and set(result["applied"]) == set(HOSTS)
    write_job(testbed.shared / "data", "shaped", "pipeline", ROUNDS)
    testbed.start_job("shaped.toml", "shaped")
    testbed.wait_for_rounds("shaped", 1, JOB_SECONDS)
    began_at = time.time()
    testbed.wait_for_rounds("shaped", ROUNDS_BEFORE, JOB_SECONDS)
    before = goodput(testbed, began_at)
    testbed.shape(NARROWED, NARROW_PROFILE)
    testbed.wait_for_rounds("shaped", ROUNDS_BEFORE + 1, JOB_SECONDS)
    changed_at = time.time()
    testbed.wait_for_end("shaped", JOB_SECONDS)
    return MeasuredGoodput(testbed.events("shaped"), before, goodput(testbed, changed_at))


def goodput(testbed: GuestTestbed, since: float) -> dict[str, float]:
    rows = testbed.query(_GOODPUT.format(round(time.time() - since)))
    return {row["link"]: row["value"] for row in rows if row["value"] > 0}


def test_job_trains_over_shaped_links_to_the_losses_of_one_process(
    testbed: GuestTestbed, measured: MeasuredGoodput, tmp_path: Path
) -> None:
    committed = [event for event in measured.events if event["event"] == "round_committed"]
    losses = [loss for event in committed for loss in event["summaries"][0]["losses"]]
    data = str(testbed.shared / "data")
    job = load_job(write_job(tmp_path, "alone", "pipeline", ROUNDS, data), [], local=True)
    assert losses == train_job(job).losses[0]


def test_prometheus_has_the_goodput_of_every_used_link(
    testbed: GuestTestbed, measured: MeasuredGoodput
) -> None:
    """The true value is the rate of a plain TCP connection with frames of the same size on the same link."""
    assert len(measured.after) == 8, "the pipeline has four links, each with two directions"
    print()
    for link, goodput_bps in sorted(measured.after.items()):
        sender, receiver = link.split(">")
        link_settings = testbed.applied(sender)[receiver]
        true = testbed.frames_bps(sender, receiver, FRAME_BYTES, FRAMES)
        print(
            f"{link:30} {goodput_bps / 1e6:6.2f}, plain {true / 1e6:6.2f} Mbit/s of "
            f"{link_settings['rate_bps'] / 1e6:5.1f}"
        )
        assert goodput_bps == pytest.approx(true, rel=BUSY_TOLERANCE), link


def test_prometheus_shows_the_new_rate_of_a_link_that_changes_during_a_job(
    testbed: GuestTestbed, measured: MeasuredGoodput
) -> None:
    narrowed = [
        link for link in measured.after if NARROWED in link.split(">") and link in measured.before
    ]
    assert len(narrowed) == 4
    print()
    for link in narrowed:
        sender, receiver = link.split(">")
        link_settings = testbed.applied(sender)[receiver]
        print(
            f"{link}: {measured.before[link] / 1e6:.2f}, then {measured.after[link] / 1e6:.2f} Mbit/s"
        )
        assert measured.after[link] == pytest.approx(
            TCP_SHARE * link_settings["rate_bps"], rel=BUSY_TOLERANCE
        )
        assert measured.before[link] > 2 * measured.after[link]


def test_prometheus_has_the_round_trip_of_every_link(
    testbed: GuestTestbed, measured: MeasuredGoodput
) -> None:
    for device, profile in PROBED.items():
        testbed.shape(device, profile)
    missed: set[str] | None = None
    for attempt in range(ATTEMPTS):
        name = f"probed-{attempt}"
        write_job(testbed.shared / "data", name, "dssra", 1)
        testbed.start_job(f"{name}.toml", name)
        testbed.wait_for_end(name, JOB_SECONDS)
        rows = testbed.query("collapipe_link_round_trip_seconds")
        assert len(rows) == 20, (
            "ten pairs of hosts exchange activations or weights, in two directions"
        )
        now = {row["link"] for row in rows if not round_trip_is_true(testbed, row)}
        missed = now if missed is None else missed & now
        if not missed:
            break
    assert not missed


def round_trip_is_true(testbed: GuestTestbed, row: dict[str, Any]) -> bool:
    """Returns whether the measured round trip of a link fits its delays.

    The scheduler reports the smallest of six probes. With jitter, that is less than the mean delay, but the guest's
    processor may delay them all.
    """
    sender, receiver = row["link"].split(">")
    directions = testbed.applied(sender)[receiver], testbed.applied(receiver)[sender]
    true = sum(direction["delay_seconds"] for direction in directions)
    jitter = sum(direction["jitter_seconds"] for direction in directions)
    print(
        f"\n{row['link']:30} {1e3 * row['value']:6.1f} of {1e3 * true:6.1f} ms, jitter {1e3 * jitter:.0f}",
        end="",
    )
    least = true - max(SECONDS, TOLERANCE * true, jitter)
    most = true + max(BUSY_SECONDS, TOLERANCE * true) + jitter
    return bool(least <= row["value"] <= most)
