"""What people are told of a job: about its data, its progress, and what may go wrong."""

import logging
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from planned_jobs import NO_STATE, hosts, job, published, serving
from stored_jobs import StoredRow, refusing_writes

from collapipe.database import Database
from collapipe.errors import (
    CancelledError,
    CollapipeError,
    InvalidInputError,
    PeerFaultyError,
    WrongStateError,
)
from collapipe.finding import MOST_LINES
from collapipe.job import JobConfig
from collapipe.planning.job_hosts import JobHosts
from collapipe.planning.job_warnings import (
    FlatLoss,
    OneAnswer,
    WaitingDevices,
    few_rows,
    find_passes,
    long_warm_up,
    random_base,
    slow_emulation,
)
from collapipe.rpc import ChannelPool
from collapipe.scheduler.events import EventLog
from collapipe.scheduler.host_calls import HostCalls
from collapipe.scheduler.job_preparation import JobPreparation, describe_data
from collapipe.scheduler.job_progress import JobProgress
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.unusual_changes import UnusualChanges, unusual_clusters
from collapipe.telemetry.sources import Series
from collapipe.v1 import control_unit_pb2_grpc, edge_server_pb2_grpc, scheduler_pb2
from collapipe.v1.control_unit_pb2 import HeldOutLabel, PrepareDataResponse
from collapipe.v1.edge_server_pb2 import PrepareJobResponse
from collapipe.v1.job_pb2 import BlobSource, Evaluation, RoundSummary
from collapipe.v1.job_pb2 import Finding as FindingMessage
from collapipe.v1.plan_pb2 import Commit, Plan, Stage
from collapipe.v1.scheduler_pb2 import (
    INCIDENT_CODE_HOST_LOST,
    JOB_STATE_FAILED,
    JobTrouble,
    JobWarning,
    RoundCommitted,
)
from collapipe_client import load_preset


def with_data(kind: str = "classification", **data: Any) -> JobConfig:
    made = job()
    task, read = made.task.model_copy(update={"kind": kind}), made.data.model_copy(update=data)
    return made.model_copy(update={"task": task, "data": read})


def loaded(num_rows: int, num_held_out: int, **places: str) -> PrepareDataResponse:
    listed = [HeldOutLabel(label=label, place=place) for label, place in places.items()]
    return PrepareDataResponse(
        num_rows=num_rows, num_held_out_rows=num_held_out, held_out_labels=listed
    )


def described(config: JobConfig, data: list[PrepareDataResponse], labels: list[str]) -> list[str]:
    """Describes data, without saying that few rows are held out."""
    lines = map(str, describe_data(config, data, labels))
    return [line for line in lines if "measured, so" not in line]


_NOTE = FindingMessage(place="a", what="its tags are IOB1")
_WARNING = FindingMessage(is_warning=True, place="b", what="c", remedy="do d")
_OF_WEIGHTS = FindingMessage(place="model", what="it is pretrained")
WARM_AND_COLD = [loaded(50, 8, warm="a:1"), loaded(49, 7, cold="a:2")]
WET = [loaded(50, 2, warm="b:1", wet="b:4"), loaded(50, 2, wet="b:9")]
OF_TAGS = [loaded(9, 1, **{"B-place": "a:1", "O": "a:1"})]
TAGS = ["O", "B-person", "I-person", "B-place", "I-place"]


@pytest.mark.parametrize(
    ("config", "data", "labels", "words"),
    [
        (with_data(), WARM_AND_COLD, ["cold", "mild", "warm"], "15 of 114 rows.* 3 labels: mild$"),
        (with_data(), WARM_AND_COLD, ["cold", "warm"], r"15%\)$"),
        (with_data("ner"), OF_TAGS, TAGS, "1 of the 2 labels: person$"),
        (with_data(held_out="b.jsonl"), WET, ["cold", "warm"], r"^warning: .*wet \(b:4\)"),
        (with_data(max_held_out_rows=8), WARM_AND_COLD[:1], ["warm"], r"15%; .*_rows allows 8\b"),
        (
            with_data(max_held_out_rows=8),
            WARM_AND_COLD,
            ["cold", "warm"],
            r"15%; .*_rows allows 8\b",
        ),
    ],
)
def test_rows_that_are_held_out_and_their_labels_are_told(
    config: JobConfig, data: list[PrepareDataResponse], labels: list[str], words: str
) -> None:
    [note] = described(config, data, labels)
    assert re.search(words, note)


def test_labels_of_held_out_rows_that_training_rows_have_are_not_told() -> None:
    assert described(with_data(held_out="b.jsonl"), WET, ["warm", "wet"]) == []


def test_passes_over_the_data_are_told() -> None:
    config = job(training={"rounds": 10, "local_steps": 20, "mini_batch": 8})
    assert (
        "200 steps of 8 rows take each of the 3,712 training rows 0.43 times"
        in find_passes(config, [3712]).what
    )
    assert (
        "400 steps of 8 rows take each of the 1,000 training rows 3.2 times"
        in find_passes(config, [400, 600]).what
    )


def test_notes_stay_short() -> None:
    places = {f"label {number}": f"b:{number}" for number in range(500)}
    [note] = describe_data(with_data(held_out="b.jsonl"), [loaded(9, 500, **places)], [])
    assert "label 104 (b:104), ..." in note.what and len(note.text) < 400


def test_note_about_how_rows_were_read_comes_once() -> None:
    data = [loaded(9, 1), loaded(9, 1)]
    for each in data:
        each.findings.append(_NOTE)
    assert described(with_data(held_out="b.jsonl"), data, []) == ["a: its tags are IOB1"]


@pytest.mark.parametrize(("num_rows", "is_told"), [(1, True), (99, True), (100, False)])
def test_few_held_out_rows_are_a_warning(num_rows: int, is_told: bool) -> None:
    found = describe_data(with_data(held_out="b.jsonl"), [loaded(50, num_rows)], [])
    assert [each.is_warning for each in found] == [True] * is_told


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("classification", ["3 of 100 training rows", "2 of 20 held-out rows", "max_length = {}"]),
        ("ner", ["2 of 20 held-out rows are cut", "misses"]),
        ("instruction", ["3 of 103 training rows are left out", "2 of 20 held-out rows"]),
    ],
)
def test_long_rows_of_all_clusters_are_told(kind: str, said: list[str]) -> None:
    data = [loaded(50, 10), loaded(50, 10)]
    data[0].num_long_rows, data[1].num_long_rows = 1, 2
    data[1].num_long_held_out_rows = 2
    asked = with_data(kind, held_out="b.jsonl")
    [note] = described(asked, data, [])
    assert all(words.format(asked.task.max_length) in note for words in said)


def test_findings_about_all_clusters_come_before_those_of_clusters() -> None:
    data = [loaded(50, 8, warm="a:1")]
    data[0].findings.extend([_NOTE, _WARNING])
    found = describe_data(with_data(), data, ["cold", "warm"])
    places = ["held-out data", "b", "data.held_out is not set", "a"]
    assert [each.place for each in found] == places
    assert [each.is_warning for each in found] == [True, True, False, False]


class Hosts(
    control_unit_pb2_grpc.ControlUnitServiceServicer, edge_server_pb2_grpc.EdgeServerServiceServicer
):
    """A control unit with 100 held-out rows and some findings, and an edge server that has lost a commit."""

    findings: Sequence[FindingMessage] = ()
    more = PrepareDataResponse()
    vocabularies: tuple[BlobSource, ...] = ()
    asked: Callable[[], None] | None = None
    """Called when the edge server is asked to make the model, which then takes until the call has ended."""
    given_up: tuple[str, ...] = ()

    def PrepareData(self, request: Any, context: Any) -> Iterator[PrepareDataResponse]:
        found = loaded(50, 100)
        found.findings.extend(self.findings)
        found.MergeFrom(self.more)
        yield found

    def PrepareJob(self, request: Any, context: Any) -> Iterator[PrepareJobResponse]:
        if request.gives_up:
            self.given_up += (request.job.job_id,)
            return
        self.vocabularies += (request.vocabulary,)
        if self.asked is not None:
            yield PrepareJobResponse()
            ended = threading.Event()
            if context.add_callback(ended.set):  # Otherwise the call has ended already.
                self.asked()
                assert ended.wait(60)
        yield PrepareJobResponse(findings=[_OF_WEIGHTS])


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Hosts, str]]:
    def add(servicer: Hosts, server: Any) -> None:
        control_unit_pb2_grpc.add_ControlUnitServiceServicer_to_server(servicer, server)
        edge_server_pb2_grpc.add_EdgeServerServiceServicer_to_server(servicer, server)

    each = Hosts()
    with serving(each, add) as address:
        yield each, address


@pytest.mark.parametrize(
    ("findings", "is_strict", "is_resumed", "error"),
    [
        ([_WARNING], True, False, InvalidInputError),
        ([_WARNING], True, True, WrongStateError),
        ([_WARNING], False, False, WrongStateError),
        ([_NOTE], True, False, WrongStateError),
        ([FindingMessage(place=f"a:{n}") for n in range(100)], False, False, WrongStateError),
        ([FindingMessage(place=f"a:{n}") for n in range(101)], False, False, PeerFaultyError),
    ],
)
def test_warnings_stop_a_new_strict_job_and_a_flood_of_findings_is_refused(
    served: tuple[Hosts, str],
    store: JobStore,
    events: EventLog,
    channels: ChannelPool,
    findings: list[FindingMessage],
    is_strict: bool,
    is_resumed: bool,
    error: type[CollapipeError],
) -> None:
    served[0].findings = findings
    config = job(more={"data": {"held_out": "b.jsonl", "strict": is_strict}})
    progress = JobProgress(store.create(config), store, events)
    progress.document.last_commit = (0, 1)
    progress.document.vocabulary_digest = "0" * 64 if is_resumed else ""
    of = hosts_at(served[1])
    preparation = JobPreparation(progress, HostCalls(channels, 60.0))
    for _ in range(2):  # What was told once is not told again.
        with pytest.raises(error):
            preparation.prepare(of)
    told = [each.data_note for each in published(events) if each.HasField("data_note")]
    if error is WrongStateError:
        *told, of_weights = told
        assert of_weights.message.startswith("model: ")
        assert len(told) == min(len(findings), MOST_LINES) + 1
        assert told[0].is_warning == findings[0].is_warning
        assert "each of the 50 training rows" in told[-1].message
    else:
        assert told == []


@pytest.mark.parametrize(
    "more",
    [
        {"num_first_rows": 1 << 63},
        {"num_long_rows": (1 << 64) - 1},
        {"num_long_held_out_rows": 1 << 62},
    ],
)
def test_control_unit_with_impossible_numbers_of_rows_is_named(
    served: tuple[Hosts, str], preparation: JobPreparation, more: dict[str, int]
) -> None:
    served[0].more = PrepareDataResponse(**more)
    ((name, number),) = more.items()
    with pytest.raises(PeerFaultyError, match=f"{number} as {name}") as raised:
        preparation.prepare(hosts_at(served[1]))
    assert raised.value.host_id == "control-unit"


def test_vocabulary_is_fetched_from_the_control_unit_itself_whatever_it_tells(
    served: tuple[Hosts, str], preparation: JobPreparation
) -> None:
    vocabulary = BlobSource(digest="0" * 64, address="169.254.169.254:80")
    served[0].more = PrepareDataResponse(vocabulary=vocabulary)
    with pytest.raises(WrongStateError, match="last commit"):
        preparation.prepare(hosts_at(served[1]))
    assert served[0].vocabularies[-1].address == served[1]


def test_edge_server_is_told_that_the_job_was_cancelled(
    served: tuple[Hosts, str], store: JobStore, events: EventLog, channels: ChannelPool
) -> None:
    served[0].findings = ()
    progress = JobProgress(store.create(job()), store, events)
    calls = HostCalls(channels, 60.0)
    served[0].asked = lambda: calls.cancel("no more")
    preparation = JobPreparation(progress, calls)
    try:
        with pytest.raises(CancelledError):
            preparation.prepare(hosts_at(served[1]))
    finally:
        served[0].asked = None
    assert served[0].given_up == ()  # The scheduler may only have stopped.
    preparation.give_up()
    assert served[0].given_up == (progress.spec.job_id,)


def hosts_at(address: str) -> JobHosts:
    """Returns hosts whose control unit and edge server have an address."""
    of = hosts()
    for host in (of.edge_server, of.clusters[0].control_unit):
        host.address, host.incarnation = address, "first"
    return of


@pytest.fixture
def preparation(
    served: tuple[Hosts, str], store: JobStore, events: EventLog, channels: ChannelPool
) -> Iterator[JobPreparation]:
    config = job(more={"data": {"held_out": "b.jsonl"}})
    progress = JobProgress(store.create(config), store, events)
    progress.document.last_commit = (0, 1)
    served[0].findings = ()
    yield JobPreparation(progress, HostCalls(channels, 60.0))
    served[0].more = PrepareDataResponse()


def test_page_of_a_private_job_has_no_places_and_no_counts_but_those_of_rows() -> None:
    config = job(more={"privacy": {"noise_multiplier": 1.0, "clip_norm": 1.0}})
    [few] = describe_data(config, [loaded(50, 8), loaded(50, 7)], ["cold", "warm"])
    assert few.is_warning and "15 rows" in few.what
    assert describe_data(config, [loaded(500, 100)], ["cold", "warm"]) == []


def trouble(seconds: int, num_failures: int = 1) -> JobTrouble:
    found = JobTrouble(num_failures=num_failures)
    found.gives_up_at.FromSeconds(seconds)
    found.missing.add(host_id="device-0").last_seen.FromSeconds(seconds)
    return found


def test_incident_is_published_and_logged_with_its_code(
    progress: JobProgress, events: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        progress.tell(INCIDENT_CODE_HOST_LOST, "device-0 is lost", "device-0")
    (event,) = published(events)
    assert event.incident.code == INCIDENT_CODE_HOST_LOST
    assert (event.incident.message, event.incident.host_ids) == ("device-0 is lost", ["device-0"])
    (record,) = caplog.records
    assert record.getMessage() == f"HOST_LOST job {progress.job_id}: device-0 is lost"
    assert (record.__dict__["code"], record.__dict__["job_id"]) == ("HOST_LOST", progress.job_id)


def test_trouble_with_other_times_is_not_published(progress: JobProgress, events: EventLog) -> None:
    for one in (trouble(1), trouble(2), trouble(3, num_failures=2), JobTrouble()):
        progress.set_trouble(one)
    first, second, last = (event.status for event in published(events))
    assert first.trouble == trouble(1)
    assert second.trouble == trouble(3, num_failures=2)
    assert not last.HasField("trouble")


def test_listed_job_has_the_newest_times_which_its_file_and_its_end_do_not_have(
    progress: JobProgress, store: JobStore, tmp_path: Path
) -> None:
    progress.set_trouble(trouble(1))
    progress.set_trouble(trouble(2))
    progress.save()
    assert store.get(progress.job_id).status().trouble == trouble(2)
    assert not JobStore(tmp_path).get(progress.job_id).status().HasField("trouble")
    progress.end(JOB_STATE_FAILED, "given up")
    assert not store.get(progress.job_id).status().HasField("trouble")


FIRST = RoundCommitted(num_rounds=1, round_seconds=2.0)


def test_result_of_a_round_is_stored_with_its_evaluation(
    progress: JobProgress, store: JobStore, events: EventLog
) -> None:
    progress.round_committed(FIRST, Commit(num_rounds=1), NO_STATE)
    progress.evaluated(Evaluation(num_rounds=0, metric="accuracy", value=0.25))
    progress.evaluated(Evaluation(num_rounds=1, metric="accuracy", value=0.5))
    result = store.find_result(progress.job_id, 0)
    assert result is not None and result.evaluation is not None
    assert (result.committed.round_seconds, result.evaluation.value) == (2.0, 0.5)
    assert store.find_result(progress.job_id, 1) is None
    kinds = [event.WhichOneof("event") for event in published(events)]
    assert kinds == ["round_committed", "evaluation", "evaluation"]


@pytest.mark.parametrize("is_full", [True, False])
def test_full_disk_or_damage_takes_the_stored_evaluation_but_not_the_job(
    progress: JobProgress,
    store: JobStore,
    events: EventLog,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_full: bool,
) -> None:
    progress.round_committed(FIRST, Commit(num_rounds=1), NO_STATE)
    with ExitStack() as full:
        if is_full:
            full.enter_context(refusing_writes(store))
        else:
            StoredRow(tmp_path, "result", progress.job_id, 0).write_text("{")
        progress.evaluated(Evaluation(num_rounds=1, metric="accuracy", value=0.5))
    assert "round 1" in caplog.text
    _, event = published(events)
    assert event.evaluation.value == 0.5


class _KilledError(BaseException):
    """Ends the storing of a round at some statement. tests/unit/test_database.py shows what a real kill leaves."""


@pytest.mark.parametrize("num_statements", range(6))
def test_round_is_stored_as_a_whole_or_not_at_all(
    progress: JobProgress,
    store: JobStore,
    events: EventLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_statements: int,
) -> None:
    left, execute = num_statements, Database.execute

    def killed(database: Database, statement: str, *values: Any) -> Any:
        nonlocal left
        if not left:
            raise _KilledError
        left -= 1
        return execute(database, statement, *values)

    with monkeypatch.context() as patch, suppress(_KilledError):
        patch.setattr(Database, "execute", killed)
        progress.round_committed(FIRST, Commit(num_rounds=1), NO_STATE)
    restarted, job_id = JobStore(tmp_path), progress.job_id
    is_stored = num_statements == 5  # BEGIN, three rows, COMMIT
    assert (restarted.find_result(job_id, 0) is not None) == is_stored
    assert (restarted.planner_state(job_id) is not None) == is_stored
    assert restarted.get(job_id).num_rounds_committed == is_stored
    assert len(published(events)) == is_stored, "nothing is told that is not stored"


def assert_warns(warning: JobWarning | None, words: str, advice: str) -> None:
    assert warning is not None
    assert words in warning.message
    assert advice in warning.advice


def test_warm_up_that_takes_most_of_the_training() -> None:
    for warm_up in (15, "auto", 0):
        short = job({"rounds": 6, "local_steps": 5, "warm_up_steps": warm_up})
        assert long_warm_up(short) is None
    found = long_warm_up(job({"rounds": 6, "local_steps": 5, "warm_up_steps": 31}))
    assert_warns(found, "31 steps", "training.warm_up_steps")
    assert_warns(found, "has 30", "")


def test_short_training_with_the_preset_of_ner_has_a_short_warm_up() -> None:
    short = load_preset("ner", ["training.rounds=2", "training.local_steps=12"])
    assert short.training.num_warm_up_steps(short.total_steps) == 2
    assert long_warm_up(short) is None


def test_adapter_of_random_weights() -> None:
    for settings in ([], ["model.lora.r=4"]):
        assert random_base(load_preset("classification", settings)) is None
    without = load_preset("classification", ["model.lora.r=4", "model.pretrained="])
    assert_warns(random_base(without), "random", "model.pretrained")


def test_cluster_with_fewer_rows_than_a_round_takes() -> None:
    warning = few_rows(job(), [500, 32])
    assert_warns(warning, "cluster 1 has 32 ", "training.local_steps to 2")
    assert_warns(warning, "takes 80", "")
    assert_warns(warning, "2.5 times", "")
    assert few_rows(job(), [500, 80]) is None


def answers(config: JobConfig, *one_answer: bool) -> list[bool]:
    """Returns whether each evaluation leads to a warning."""
    looking = OneAnswer()
    return [
        looking.look_at(config, Evaluation(num_rounds=index + 1, one_answer=each)) is not None
        for index, each in enumerate(one_answer)
    ]


def test_same_answer_for_all_rows_is_told_at_the_end_or_if_it_lasts() -> None:
    six = job({"rounds": 6})
    assert answers(six, True, True, False, False, False, True) == [False] * 5 + [True]
    assert answers(six, True, True, True) == [False, False, True]
    assert answers(six, *[False] * 6) == [False] * 6
    assert answers(job({"rounds": 20}), *[True] * 6) == [False] * 4 + [True] * 2


def train(
    config: JobConfig, loss: Callable[[int], float], noise: float = 0.1, first: int = 1
) -> list[JobWarning]:
    """Trains two clusters whose losses are normal around a mean, and returns the warnings."""
    chance, looking, found = random.Random(7), FlatLoss(), []
    steps = config.training.local_steps
    for number in range(first, config.training.rounds + 1):
        means = [loss(step) for step in range((number - 1) * steps, number * steps)]
        summaries = [
            RoundSummary(losses=[mean * chance.gauss(1.0, noise) for mean in means])
            for _ in range(2)
        ]
        committed = RoundCommitted(num_rounds=number, summaries=summaries)
        found.append(looking.look_at(config, committed))
    return [warning for warning in found if warning is not None]


def test_loss_that_stays_or_rises_is_told() -> None:
    demo = load_preset("demo")
    [warning] = train(demo, lambda step: 2.0, noise=0.03)
    assert warning.code == scheduler_pb2.WARNING_CODE_FLAT_LOSS
    assert_warns(warning, "1.9921", "training.learning_rate")
    assert_warns(warning, "40 steps", "")
    assert train(demo, lambda step: 2.0 + step / 40)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("rounds", [4, 40])
def test_loss_that_falls_by_a_fifth_is_not_told(noise: float, rounds: int) -> None:
    config = load_preset("demo", [f"training.rounds={rounds}"])
    total = config.total_steps
    assert not train(config, lambda step: 2.0 * (1 - 0.2 * step / total), noise)


def test_flat_end_after_a_fall_a_warm_up_and_a_resumed_job_are_not_told() -> None:
    assert not train(load_preset("demo"), lambda step: max(1.0, 2.0 - step / 10))
    warming_up = load_preset("demo", ["training.warm_up_steps=30"])
    assert not train(warming_up, lambda step: 2.0)
    assert not train(load_preset("demo", ["training.rounds=40"]), lambda step: 2.0, first=20)


def test_loss_of_a_long_job_is_looked_at_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapipe.planning.job_warnings._MOST_LOSSES", 64)
    config = load_preset("demo", ["training.rounds=60"])
    assert train(config, lambda step: 2.0, noise=0.03)
    assert not train(config, lambda step: 2.0 / (1 + step / 600))


def committed(number: int, **busy: float) -> RoundCommitted:
    """Returns a round of 30 s in which hosts were busy for so many seconds."""
    summary = RoundSummary()
    for host_id, seconds in busy.items():
        report = summary.stages.add(host_id=host_id)
        report.times.forward_seconds, report.times.total_seconds = seconds, 30.0
        report.times.waiting_seconds = 30.0 - seconds
    return RoundCommitted(num_rounds=number, summaries=[summary])


def test_device_that_waits_in_two_rounds_is_told_with_its_seconds() -> None:
    looking, busy = WaitingDevices(), {"unit": 0.1, "fast": 1.0, "slow": 20.0, "edge": 0.1}
    for number, seconds in ((1, 1.0), (2, 5.0), (3, 1.0)):
        assert looking.look_at(committed(number, **busy | {"fast": seconds})) is None
    warning = looking.look_at(committed(4, **busy))
    assert_warns(warning, "round 4, fast ", "")
    assert_warns(warning, "29.0 of 30.0 s", "")
    assert warning is not None
    assert "slow" not in warning.message and "edge" not in warning.message
    hanging = WaitingDevices()
    for number in (1, 2, 3):
        late = committed(number, **busy)
        late.late_clusters.append(0)
        assert hanging.look_at(late) is None


def counters(busy: float, overrun: float) -> list[Series]:
    at = 1000.0
    names = {
        "collapipe_stage_forward_seconds_sum": busy,
        "collapipe_emulation_overrun_seconds_total": overrun,
    }
    return [
        Series("a:1", name, (), ((at, 5.0), (at + 60, 5.0 + seconds)))
        for name, seconds in names.items()
    ]


def test_emulation_that_does_not_hold_is_told_with_the_host() -> None:
    hosts = {"a:1": "device-0"}
    warning = slow_emulation(counters(20.0, 1.0), hosts)
    assert_warns(warning, "took 1.0 s", "time_scale")
    assert_warns(warning, "5% of the 20.0 s", "")
    assert_warns(warning, "device-0", "")
    assert slow_emulation(counters(20.0, 0.3), hosts) is None
    assert slow_emulation(counters(2.0, 0.1), hosts) is None
    assert slow_emulation(counters(20.0, 1.0), {"b:1": "device-1"}) is None


def test_warning_is_an_event_and_is_told_once(store: JobStore, events: EventLog) -> None:
    progress = JobProgress(store.create(job({"rounds": 1})), store, events)
    for _ in range(2):
        progress.evaluated(Evaluation(num_rounds=1, num_rows=9, one_answer=True))
        for number in (1, 2):
            round_ = committed(number, unit=1.0, fast=0.1, edge=1.0)
            progress.round_committed(round_, Commit(num_rounds=number), NO_STATE)
    told = [event.warning for event in published(events) if event.HasField("warning")]
    assert [warning.code for warning in told] == [
        scheduler_pb2.WARNING_CODE_ONE_CLASS,
        scheduler_pb2.WARNING_CODE_WAITING_DEVICE,
    ]
    assert all(warning.message and warning.advice for warning in told)


@pytest.mark.parametrize(
    ("changes", "unusual"),
    [
        ({0: 1.0, 1: 1.0, 2: 4.0}, {2: 4.0}),
        ({0: 1.0, 1: 1.0, 2: 3.0}, {}),
        ({0: 8.0, 1: 2.0, 2: 2.0, 5: 8.0}, {0: 4.0, 5: 4.0}),
        ({0: 1.0, 1: 100.0}, {}),
        ({0: 0.0, 1: 0.0, 2: 1.0}, {}),
        ({}, {}),
    ],
)
def test_changes_of_clusters_are_compared_with_the_median(
    changes: dict[int, float], unusual: dict[int, float]
) -> None:
    assert unusual_clusters(changes) == unusual


def test_cluster_with_unusual_changes_is_told_once(progress: JobProgress, events: EventLog) -> None:
    looking = UnusualChanges(progress)
    plans = [
        Plan(cluster_index=index, stages=[Stage(host_id=f"control-unit-{index}")])
        for index in range(4)
    ]
    usual, unusual = {0: 1.0, 1: 1.0, 2: 1.5}, {0: 1.0, 1: 1.0, 2: 5.2}
    for round_index, changes in enumerate([usual, unusual, unusual, {}, unusual]):
        looking.look_at(round_index, changes, plans)
    first, second = (event.incident for event in published(events))
    for incident in (first, second):
        assert incident.code == scheduler_pb2.INCIDENT_CODE_UNUSUAL_CHANGE
        assert list(incident.host_ids) == ["control-unit-2"]
    for words in ("cluster 2", "round 2", "5.2 times"):
        assert words in first.message
    assert "round 5" in second.message
