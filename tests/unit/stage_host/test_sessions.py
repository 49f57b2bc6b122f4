import queue
import re
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from collapipe.errors import (
    CancelledError,
    InvalidInputError,
    NotFoundError,
    WrongStateError,
)
from collapipe.rpc import Security, serve
from collapipe.stage_host import servicer as stage_servicer
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.traffic_shaping.outgoing_links import LinkShare
from collapipe.v1.blob_pb2 import FetchBlobRequest, FetchBlobResponse
from collapipe.v1.blob_pb2_grpc import BlobServiceServicer, add_BlobServiceServicer_to_server
from collapipe.v1.plan_pb2 import SessionSettings, UnitState
from collapipe.v1.secure_aggregation_pb2 import UnitMasks
from collapipe.v1.stage_pb2 import (
    ConfigureStage,
    FinishRound,
    RunGeneration,
    RunStageRequest,
    RunStep,
    UpdatePrivacy,
)
from collapipe.weights.blob_store import JobStores
from collapipe.weights.transfer import fetch_blob

from .stage_hosts import Session, StageHost, activation_frame, train


def assert_alive(session: Session) -> None:
    """Checks that a session still answers, and that its units did not change."""
    assert [state.optimizer_digest for state in session.finish(0.0)] == [""] * 4


def assert_replaced(session: Session) -> None:
    """Checks that a newer attempt took over from a session."""
    assert "took over" in session.expect("failed").failed.message
    assert session.next() is None


# --- configuring


def test_missing_units_are_fetched_and_then_reused(host: StageHost) -> None:
    first = host.open(host.configure(0)).expect("configured").configured
    assert first.reused_units == 0
    assert first.fetched_bytes > 4000
    second = host.open(host.configure(1)).expect("configured").configured
    assert (second.reused_units, second.fetched_bytes) == (4, 0)


def test_damaged_unit_on_the_disk_is_fetched_from_another_host(
    host: StageHost, tmp_path: Path
) -> None:
    host.resources._stores = JobStores(tmp_path)
    store = host.resources._stores.store("job")
    for state in host.configuration.units:
        store.path(state.weights_digest).write_bytes(b"damaged")
    configured = host.open(host.configure()).expect("configured").configured
    assert configured.fetched_bytes > 4000
    for state in host.configuration.units:  # The next attempt need not fetch it anew.
        store.check(state.weights_digest)


def test_host_before_is_named_if_it_lacks_the_optimizer_state_that_it_must_have(
    host: StageHost,
) -> None:
    """It is in the memory of the host that ran the unit in the round before. Other hosts have copies of some rounds."""
    configure = host.configure()
    configure.units[0].optimizer_digest = "1" * 64
    configure.sources[0].optimizer_addresses[:] = [host.address]
    failed = host.open(configure).expect("failed").failed
    assert failed.blamed_host_id == host.address
    assert "1" * 64 in failed.message


def test_finished_round_is_named_served_and_reused(host: StageHost) -> None:
    session = host.ready()
    train(session, host.stream(session.configure), 2)
    states = session.finish(1.0)
    session.close()
    assert session.next() is None
    assert [state.unit_index for state in states] == host.units
    before = {state.weights_digest for state in host.configuration.units}
    for state in states:
        assert state.weights_digest not in before
        for digest in (state.weights_digest, state.optimizer_digest):
            fetch_blob(host.channels, digest, [host.address])  # This checks the digest.
    configured = host.open(host.configure(round_index=1, units=states)).expect("configured")
    assert configured.configured.reused_units == 4


def test_units_that_a_lost_control_unit_changed_are_dropped(host: StageHost) -> None:
    session = host.ready()
    train(
        session, host.stream(session.configure), 2
    )  # The second step applies the update of the first.
    session.run_step(2)
    session.waits_for("forward frame of micro-batch 0 in step 2")
    session.vanish()
    configured = host.open(host.configure(1)).expect("configured").configured
    assert configured.reused_units == 0
    assert configured.fetched_bytes > 0


def test_weights_that_no_host_has_fail_the_session_with_their_digest(host: StageHost) -> None:
    states = [*host.configuration.units]
    states[0] = UnitState(unit_index=1, weights_digest="0" * 64)
    session = host.open(host.configure(units=states))
    assert "0" * 64 in session.expect("failed").failed.message
    assert session.next() is None
    with pytest.raises(NotFoundError, match="device-1"):
        host.resources.find_blob("0" * 64)


def test_link_to_the_edge_server_has_the_share_of_the_upload_until_the_session_ends(
    host: StageHost,
) -> None:
    configure = host.configure()
    stage = configure.plan.stages[1]
    stage.upload_bandwidth_hz, stage.upload_transmit_power_watts = 2e6, 0.1
    session = host.open(configure)
    session.expect("configured")
    link = host.resources.links.link_to("edge-server")
    assert not link._shares
    session.send(RunStageRequest(finish=FinishRound(edge_host_id="edge-server")))
    session.expect("finished")
    assert link._shares == (LinkShare(0, 2e6, 0.1),)
    session.close()
    assert session.next() is None
    assert not link._shares


def settings(**values: Any) -> ConfigureStage:
    return ConfigureStage(settings=SessionSettings(**values))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda it: it.MergeFrom(ConfigureStage(stage_index=2)), "stage 2 .* plan, 2"),
        (lambda it: it.units.pop(), r"units 1 to 4,.*\[1, 2, 3\]"),
        (lambda it: it.sources.pop(), "stage 1 .* 3 of its 4 units"),
        (lambda it: it.plan.stages[1].ClearField("in_flight"), "stage 1 .*window of 0"),
        (lambda it: it.MergeFrom(settings(training_json="nan")), "training"),
        (lambda it: it.MergeFrom(settings(silence_seconds=float("inf"))), "inf s.* 1000000"),
        (lambda it: it.plan.links.add(codec=9), "link 0 .* 9"),
    ],
    ids=["stage", "units", "sources", "window", "training", "silence", "codec"],
)
def test_configuration_that_contradicts_itself_is_refused(
    host: StageHost, spoil: Callable[[ConfigureStage], object], said: str
) -> None:
    configure = host.configure()
    spoil(configure)
    with pytest.raises(InvalidInputError, match=said):
        host.open(configure).next()
    host.ready()  # The refused attempt does not count as served.


def test_a_plan_with_millions_of_units_is_refused_without_listing_them(host: StageHost) -> None:
    configure = host.configure()
    configure.plan.stages[1].stop_unit = 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError, match="1 to 1048575"):
            host.open(configure).next()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_session_begins_with_its_only_configuration(host: StageHost) -> None:
    for requests in ([RunStageRequest()], []):
        with pytest.raises(InvalidInputError, match="ConfigureStage"):
            list(host.servicer.RunStage(iter(requests), GONE))
    session = host.ready()
    session.send(RunStageRequest(configure=session.configure))
    assert "configure" in session.expect("failed").failed.message


def test_masked_round_without_the_masks_of_a_unit_pushes_nothing(host: StageHost) -> None:
    configure = host.configure()
    configure.is_masked = True
    session = host.open(configure)
    session.expect("configured")
    finish = FinishRound(num_samples=1, total_samples=2)
    finish.masks.extend(UnitMasks(unit_index=unit, added=[bytes(32)]) for unit in host.units[1:])
    session.send(RunStageRequest(finish=finish))
    assert str(host.units[1:]) in session.expect("failed").failed.message


# --- attempts that are not newer


@pytest.mark.parametrize(("round_index", "attempt"), [(3, 2), (3, 1), (4, 1), (2, 2), (0, 0)])
def test_attempt_that_is_not_newer_is_refused_and_changes_nothing(
    host: StageHost, round_index: int, attempt: int
) -> None:
    session = host.ready(2, round_index=3)
    said = f"round {round_index}, attempt {attempt} .*3.*2"
    with pytest.raises(WrongStateError, match=said):
        host.open(host.configure(attempt, round_index)).next()
    assert_alive(session)


@pytest.mark.parametrize("runs", [False, True], ids=["idle", "running"])
@pytest.mark.parametrize(("round_index", "attempt"), [(3, 3), (4, 2), (0, 3)])
def test_newer_attempt_takes_over(
    host: StageHost, round_index: int, attempt: int, runs: bool
) -> None:
    old = host.ready(2, round_index=3)
    if runs:
        old.run_step(0, num_micro_batches=2)
        old.waits_for("forward frame of micro-batch 0 in step 0")
    new = host.ready(attempt, round_index=round_index)
    assert_replaced(old)
    assert_alive(new)


class SlowBlobs(BlobServiceServicer):
    """Sends a byte of a large blob whenever a test says so."""

    def __init__(self) -> None:
        self.bytes: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def FetchBlob(
        self, request: FetchBlobRequest, context: grpc.ServicerContext
    ) -> Iterator[FetchBlobResponse]:
        yield FetchBlobResponse(total_bytes=1 << 20)
        while chunk := self.bytes.get(timeout=60):
            yield FetchBlobResponse(chunk=chunk)


def test_newer_attempt_takes_over_from_one_that_fetches_weights(host: StageHost) -> None:
    blobs = SlowBlobs()
    slow = serve(
        "127.0.0.1:0",
        Security.insecure(),
        lambda server, address: add_BlobServiceServicer_to_server(blobs, server),
    )
    configure = host.configure(0)
    configure.units[0].weights_digest = "0" * 64
    configure.sources[0].weights_addresses[:] = [slow.address]
    old = host.open(configure)
    old.waits_for("fetch unit 1")
    new = host.open(host.configure(1))
    new.next_of_any_kind()  # It was admitted, and waits for its turn.
    blobs.bytes.put(b"0")
    assert_replaced(old)
    new.expect("configured")
    assert_alive(new)
    blobs.bytes.put(b"")
    slow.drain(0)


def test_sessions_of_two_jobs_on_other_clusters_stay_beside_each_other(host: StageHost) -> None:
    first = host.ready(job_id="first", host_cluster=4)
    second = host.ready(job_id="second", host_cluster=5)
    assert_alive(first)
    assert_alive(second)
    units_of = host.resources._units_of_clusters
    kept = units_of[5]
    third = host.ready(job_id="third", host_cluster=4)
    assert_replaced(first)
    assert_alive(second)
    assert_alive(third)
    assert units_of.keys() == {4, 5}
    assert units_of[5] is kept


def test_units_of_all_clusters_of_a_job_go_when_another_job_takes_one(host: StageHost) -> None:
    for job_id, clusters in (("wide", (0, 1)), ("other", (2,)), ("narrow", (1,))):
        for round_index, cluster in enumerate(clusters):
            host.ready(job_id=job_id, round_index=round_index, host_cluster=cluster).close()
    assert host.resources._job_of_clusters == {2: "other", 1: "narrow"}
    assert host.resources._units_of_clusters.keys() == {2, 1}


def test_late_attempt_of_an_earlier_job_is_refused(host: StageHost) -> None:
    host.ready(5, round_index=5).close()
    session = host.ready(0, job_id="other")
    with pytest.raises(WrongStateError, match="round 5, attempt 5"):
        host.open(host.configure(4, 5)).next()
    assert_alive(session)


# --- ends


class _Context:
    """The context of a call whose caller went away before the call began."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


GONE: Any = _Context()


def test_session_of_a_lost_caller_lets_no_later_session_overtake_one_that_computes(
    host: StageHost,
) -> None:
    computing = host.ready(0)
    computing.run_step(0)
    computing.waits_for("forward frame of micro-batch 0")

    def begin() -> None:
        with pytest.raises(CancelledError):
            request = RunStageRequest(configure=host.configure(1))
            list(host.servicer.RunStage(iter([request]), GONE))

    with COMPUTE_LOCK:  # The first session computes.
        host.stream(computing.configure).send_frame(activation_frame())
        computing.waits_for_nothing()
        leaving = threading.Thread(target=begin)
        leaving.start()
        new = host.open(host.configure(2))
        signs = [new.next_of_any_kind() for _ in range(5)]
        assert [sign.WhichOneof("event") for sign in signs] == ["progress"] * 5
    new.expect("configured")
    leaving.join(60)
    assert_alive(new)


def step(**fields: Any) -> RunStageRequest:
    return RunStageRequest(run_step=RunStep(**{"num_micro_batches": 1, "num_targets": 3, **fields}))


def finish(**fields: Any) -> RunStageRequest:
    return RunStageRequest(finish=FinishRound(**fields))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (step(num_micro_batches=0), "0 as num_micro_batches"),
        (step(num_micro_batches=(1 << 32) - 1), "4294967295 as num_micro_batches"),
        (step(step_index=1 << 31), "2147483648 as step_index"),
        (step(num_targets=1 << 63), "9223372036854775808 as num_targets"),
        (step(pending_gradient_scale=float("nan")), "nan as pending_gradient_scale"),
        (step(pending_gradient_scale=-1.0), "-1.0 as pending_gradient_scale"),
        (step(pending_gradient_scale=2.0), "2.0 as pending_gradient_scale"),
        (finish(pending_gradient_scale=float("inf")), "inf as pending_gradient_scale"),
        (finish(num_samples=1 << 63), "as num_samples"),
        (finish(total_samples=(1 << 64) - 1), "as total_samples"),
        (finish(edge_host_id="x" * 1001), "1001 characters as edge_host_id"),
        (finish(edge_address="x" * 1001), "1001 characters as edge_address"),
        (finish(masks=[UnitMasks(unit_index=3, added=[b"short"])]), "a key of 5 bytes .*unit 3"),
        (
            RunStageRequest(run_generation=RunGeneration(num_sequences=3)),
            "3 as num_sequences, where at most 2",
        ),
        (
            RunStageRequest(run_generation=RunGeneration(options={"temperature": float("nan")})),
            "nan as temperature",
        ),
    ],
)
def test_impossible_command_ends_the_session(
    host: StageHost, command: RunStageRequest, said: str
) -> None:
    session = host.ready()
    session.send(command)
    assert re.search(said, session.expect("failed").failed.message)
    assert session.next() is None


@pytest.mark.parametrize(
    "privacy",
    [
        UpdatePrivacy(noise_stddev=float("nan")),
        UpdatePrivacy(clip_norm=-1.0),
        UpdatePrivacy(clip_norm=1.0, secrets=[bytes(65)] * 4),
    ],
)
def test_impossible_privacy_is_refused(host: StageHost, privacy: UpdatePrivacy) -> None:
    configure = host.configure()
    configure.privacy.CopyFrom(privacy)
    if not privacy.secrets:
        configure.privacy.secrets.extend([bytes(32)] * len(configure.units))
    with pytest.raises(InvalidInputError, match="nan as noise|-1.0 as clip|65 characters"):
        host.open(configure).next()


def test_host_that_computes_on_without_an_end_is_named(
    host: StageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_servicer, "_TURN_SECONDS", 0.2)
    computing = host.ready()
    computing.run_step(0)
    computing.waits_for("forward frame")
    with COMPUTE_LOCK:  # The first session computes.
        host.stream(computing.configure).send_frame(activation_frame())
        computing.waits_for_nothing()
        for attempt in (1, 2):
            failed = host.open(host.configure(attempt)).expect("failed").failed
            assert failed.blamed_host_id == host.resources.host_id
            assert "still computes" in failed.message
    assert_alive(host.ready(3))


def test_few_latest_attempts_are_remembered(
    host: StageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_servicer, "MOST_KEPT_ATTEMPTS", 2)
    for name in ("first", "second", "third"):
        session = host.ready(job_id=name)
        session.close()
        assert session.next() is None
    assert [job_id for _, job_id in host.servicer._latest] == ["second", "third"]
