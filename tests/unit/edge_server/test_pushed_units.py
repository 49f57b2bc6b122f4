"""How the edge server takes the weights that clusters push."""

import errno
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from damaged_files import flip
from torch import Tensor

from collapipe.edge_server import push_stream
from collapipe.edge_server.push_stream import receive_push
from collapipe.edge_server.pushed_units import PushedUnits
from collapipe.edge_server.unit_averages import Averaged
from collapipe.errors import CorruptDataError, InvalidInputError, WrongStateError
from collapipe.job import AveragingConfig
from collapipe.v1.edge_server_pb2 import PushedUnit, PushUnitRequest
from collapipe.v1.plan_pb2 import Attempt, ClusterState, UnitState
from collapipe.weights.delta_codecs import EncodedDelta, encode_delta
from collapipe.weights.tensor_blob import TensorBlob, load_tensors

SAMPLES = (3, 1, 2, 2)
UNIT = 5


@pytest.fixture
def pushed(tmp_path: Path) -> PushedUnits:
    return pushed_units_of(tmp_path)


def pushed_units_of(tmp_path: Path, num_clusters: int = 2, rule: str = "mean") -> PushedUnits:
    path = tmp_path / BASE.digest
    path.write_bytes(b"".join(BASE.read()))

    def find_base(unit_index: int, digest: str) -> Path:
        assert (unit_index, digest) == (UNIT, BASE.digest)
        return path

    averaging = AveragingConfig.model_validate({"rule": rule})
    directory, sizes = tmp_path / "pushed", [BASE.total_bytes] * (UNIT + 1)
    return PushedUnits(directory, num_clusters, sizes, find_base, lambda *_: path, averaging)


def tensors_of(cluster: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(cluster)
    return {
        "large": torch.randn(700, 1000, generator=generator),  # more than two slices
        "half": torch.randn(5, generator=generator).bfloat16(),
        "positions": torch.arange(4),
        "empty": torch.zeros(0),
    }


def blob_of(cluster: int) -> TensorBlob:
    return TensorBlob(tensors_of(cluster))


BASE = blob_of(9)
"""The weights that the round began with."""


def announce(cluster: int, blob: TensorBlob, attempt: int = 0, base_digest: str = "") -> PushedUnit:
    return PushedUnit(
        base_digest=base_digest,
        attempt=Attempt(job_id="job", attempt=attempt),
        cluster_index=cluster,
        unit_index=UNIT,
        total_bytes=blob.total_bytes,
        num_samples=SAMPLES[cluster],
    )


def push(
    pushed: PushedUnits,
    cluster: int,
    blob: TensorBlob | None = None,
    *,
    attempt: int = 0,
    base_digest: str = "",
    weights_digest: str | None = None,
) -> ClusterState:
    """Pushes a blob, by default that of the cluster, and returns the state that the cluster would prepare."""
    blob = blob or blob_of(cluster)
    stream = pushed.begin(announce(cluster, blob, attempt, base_digest))
    for piece in blob.read():
        stream.write(piece)
    stream.complete(blob.digest)
    unit = UnitState(unit_index=UNIT, weights_digest=weights_digest or blob.digest)
    return ClusterState(cluster_index=cluster, units=[unit], num_samples=SAMPLES[cluster])


def average_of(pushed: PushedUnits, states: Sequence[ClusterState], attempt: int = 0) -> Averaged:
    (average,) = pushed.averages(Attempt(job_id="job", attempt=attempt), states)
    return average


def check_weighted_mean(
    average: Averaged, one: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> None:
    for name, tensor in load_tensors(average.path.read_bytes()).items():
        expected = 0.75 * one[name].double() + 0.25 * other[name].double()
        assert torch.equal(tensor, expected.to(tensor.dtype)), name


@pytest.mark.parametrize("first", [0, 1])
def test_average_is_that_of_the_formula_whichever_cluster_comes_first(
    pushed: PushedUnits, first: int
) -> None:
    states = {cluster: push(pushed, cluster) for cluster in (first, 1 - first)}
    average = average_of(pushed, [states[0], states[1]])
    data = average.path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == average.digest
    check_weighted_mean(average, tensors_of(0), tensors_of(1))
    # A blob has one form only, so that every host finds the same digest.
    assert TensorBlob(load_tensors(data)).digest == average.digest


# --- streams


def test_push_continues_where_the_last_stream_stopped(pushed: PushedUnits) -> None:
    blob = blob_of(0)
    pieces = list(blob.read())
    broken = pushed.begin(announce(0, blob))
    for piece in (*pieces[:2], pieces[2][:100]):  # the header, the tensor "half", a part of "large"
        broken.write(piece)
    stream = pushed.begin(announce(0, blob))
    assert stream.received_bytes == len(pieces[0]) + len(pieces[1]) + 100
    with pytest.raises(WrongStateError, match="newer"):
        broken.write(pieces[2][100:])
    for piece in blob.read(stream.received_bytes):
        stream.write(piece)
    stream.complete(blob.digest)
    again = pushed.begin(announce(0, blob))  # the sender did not get the last answer
    assert again.received_bytes == blob.total_bytes
    again.complete(blob.digest)


def test_sender_is_told_how_far_its_push_is_after_a_time_and_after_many_bytes(
    pushed: PushedUnits, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(push_stream, "time", clock)
    data = b"".join(BASE.read())

    def requests() -> Iterator[PushUnitRequest]:
        yield PushUnitRequest(unit=announce(0, BASE))
        reached = 0
        for size, seconds in ((100, 0.1), (100, 0.2), (1 << 20, 0.0), (len(data), 0.0)):
            clock.now += seconds
            yield PushUnitRequest(chunk=data[reached : reached + size])
            reached += size
        yield PushUnitRequest(digest=BASE.digest)

    answers = list(receive_push(requests(), pushed.begin))
    reached = [0, 200, 200 + (1 << 20), len(data), len(data)]
    assert [answer.received_bytes for answer in answers] == reached
    assert [answer.complete for answer in answers] == [False] * 4 + [True]


def test_push_without_an_announcement_is_refused(pushed: PushedUnits) -> None:
    for requests in ([], [PushUnitRequest(chunk=b"1")]):
        with pytest.raises(InvalidInputError, match="PushedUnit"):
            next(receive_push(iter(requests), pushed.begin))


@pytest.mark.parametrize(
    "part",
    [PushUnitRequest(chunk=b""), PushUnitRequest(), PushUnitRequest(unit=PushedUnit())],
    ids=["an empty chunk", "nothing", "a second announcement"],
)
@pytest.mark.parametrize("is_complete", [False, True])
def test_push_that_goes_on_without_bytes_is_refused_and_leaves_the_unit_as_it_is(
    pushed: PushedUnits, part: PushUnitRequest, is_complete: bool
) -> None:
    states = [push(pushed, 1)]
    if is_complete:
        states = [push(pushed, 0), *states]
    requests = iter([PushUnitRequest(unit=announce(0, blob_of(0))), part])
    with pytest.raises(InvalidInputError, match="unit 5 .* 0 bytes"):
        list(receive_push(requests, pushed.begin))
    if not is_complete:
        states = [push(pushed, 0), *states]
    check_weighted_mean(average_of(pushed, states), tensors_of(0), tensors_of(1))


def test_unit_that_is_complete_takes_no_other_bytes(pushed: PushedUnits) -> None:
    states = [push(pushed, cluster) for cluster in (0, 1)]
    requests = [PushUnitRequest(unit=announce(0, blob_of(0))), PushUnitRequest(chunk=b"!")]
    with pytest.raises(CorruptDataError, match="more than the"):
        list(receive_push(iter(requests), pushed.begin))
    requests[1] = PushUnitRequest(digest=blob_of(3).digest)
    with pytest.raises(CorruptDataError, match=blob_of(3).digest):
        list(receive_push(iter(requests), pushed.begin))
    with pytest.raises(InvalidInputError, match="and now with"):
        pushed.begin(announce(0, BASE, base_digest=BASE.digest))
    check_weighted_mean(average_of(pushed, states), tensors_of(0), tensors_of(1))


def test_push_whose_file_lacks_bytes_begins_again(
    pushed: PushedUnits, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def full_disk(path: Path) -> Iterator[None]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    blob = blob_of(0)
    broken = pushed.begin(announce(0, blob))
    broken.write(b"12345")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(push_stream, "name_full_disk", full_disk)
        broken.write(b"6789")
    assert pushed.begin(announce(0, blob)).received_bytes == 0
    push(pushed, 0)


@pytest.mark.parametrize("garble", ["other bytes", "too few", "too many"])
def test_bytes_that_are_not_those_of_the_digest_are_refused(
    pushed: PushedUnits, garble: str
) -> None:
    data = b"".join(BASE.read())
    sent = {"other bytes": data[:-1] + b"!", "too few": data[:-1], "too many": data + b"!"}
    stream = pushed.begin(announce(0, BASE))
    with pytest.raises(CorruptDataError, match=str(BASE.total_bytes)):
        stream.write(sent[garble])
        stream.complete(BASE.digest)


@pytest.mark.parametrize(
    ("cluster", "unit_index", "size", "named"),
    [
        (2, UNIT, 10, "^cluster 2 .* 2 clusters"),
        (0, UNIT + 1, 10, "units 0 to 5, .*cluster 0 .*unit 6"),
        (0, UNIT, 5 << 20, "^cluster 0 .*5242880 .*unit 5"),
    ],
)
def test_wrong_announcement_is_refused_before_anything_is_stored(
    pushed: PushedUnits, tmp_path: Path, cluster: int, unit_index: int, size: int, named: str
) -> None:
    unit = PushedUnit(
        attempt=Attempt(job_id="job"),
        cluster_index=cluster,
        unit_index=unit_index,
        total_bytes=size,
    )
    with pytest.raises(InvalidInputError, match=named):
        pushed.begin(unit)
    assert not (tmp_path / "pushed").exists()


# --- attempts


def test_older_attempt_is_refused_and_its_files_are_deleted(
    pushed: PushedUnits, tmp_path: Path
) -> None:
    blob = blob_of(0)
    old = pushed.begin(announce(0, blob))
    old.write(b"12345")
    state = push(pushed, 1, attempt=1)
    assert [path.name for path in (tmp_path / "pushed").iterdir()] == ["cluster-1-unit-5"]
    with pytest.raises(WrongStateError, match="newer"):
        old.write(b"6789")
    with pytest.raises(WrongStateError, match="attempt 0 .* round 0, attempt 1"):
        pushed.begin(announce(0, blob))
    with pytest.raises(WrongStateError, match="attempt 0"):
        average_of(pushed, [state])


def test_newer_attempt_at_a_round_takes_what_other_clusters_pushed_before(
    pushed: PushedUnits,
) -> None:
    kept, failed = push(pushed, 0), push(pushed, 1)
    before = average_of(pushed, [kept, failed])
    blob = blob_of(3)
    again = pushed.begin(announce(1, blob, attempt=1))
    assert again.received_bytes == 0
    with pytest.raises(WrongStateError, match="unit 5 of cluster 1"):
        average_of(pushed, [kept, failed], attempt=1)
    again.take(blob)
    with pytest.raises(WrongStateError, match="unit 5 of cluster 1"):
        average_of(pushed, [kept, failed], attempt=1)
    failed.units[0].weights_digest = blob.digest
    average = average_of(pushed, [kept, failed], attempt=1)
    assert average.cluster_digests == (blob_of(0).digest, blob.digest)
    assert average.digest != before.digest


def test_attempt_at_another_round_deletes_what_was_pushed(
    pushed: PushedUnits, tmp_path: Path
) -> None:
    kept = push(pushed, 0)
    with pytest.raises(WrongStateError, match="unit 5 of cluster 0"):
        list(pushed.averages(Attempt(job_id="job", attempt=1, round_index=1), [kept]))
    assert list((tmp_path / "pushed").iterdir()) == []


# --- averages


@pytest.mark.parametrize("wrong_clusters", [(0, 1), (1,)], ids=str)
@pytest.mark.parametrize("change", ["name", "shape", "type"])
def test_other_tensors_than_before_are_not_averaged(
    pushed: PushedUnits, change: str, wrong_clusters: tuple[int, ...]
) -> None:
    tensors = tensors_of(0)
    large = tensors.pop("large")
    wrong = {"name": large, "shape": large.reshape(-1), "type": large.view(torch.int32)}[change]
    tensors["larger" if change == "name" else "large"] = wrong
    blobs = [TensorBlob(tensors) if i in wrong_clusters else blob_of(i) for i in range(2)]
    states = [push(pushed, cluster, blob) for cluster, blob in enumerate(blobs)]
    with pytest.raises(CorruptDataError, match=f"^cluster-{wrong_clusters[0]}-unit-5 ") as refused:
        average_of(pushed, states)
    assert refused.value.cluster_index == wrong_clusters[0]


@pytest.mark.parametrize("num_clusters", [1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_and_their_cluster_is_named(
    tmp_path: Path, num_clusters: int, value: float
) -> None:
    pushed, wrong = pushed_units_of(tmp_path, num_clusters), num_clusters - 1
    tensors = tensors_of(9)
    tensors["large"][-1, -1] = value
    states = [push(pushed, cluster) for cluster in range(wrong)]
    states.append(push(pushed, wrong, TensorBlob(tensors)))
    with pytest.raises(CorruptDataError, match=f"^cluster-{wrong}-unit-5 .* infinite"):
        average_of(pushed, states)


@pytest.mark.parametrize("rule", ["clipped_mean", "trimmed_mean", "median"])
def test_poisoned_cluster_moves_no_robust_average_far(tmp_path: Path, rule: str) -> None:
    pushed, states = pushed_units_of(tmp_path, 4, rule), []
    for cluster in range(4):
        tensors = tensors_of(9)
        tensors["large"] += 1e9 if cluster == 2 else 1 + cluster / 10
        states.append(push(pushed, cluster, TensorBlob(tensors)))
    average = average_of(pushed, states)
    change = load_tensors(average.path.read_bytes())["large"] - tensors_of(9)["large"]
    assert float(change.min()) > 0.9
    assert float(change.max()) < 1.4


@pytest.mark.parametrize("rule", ["mean", "clipped_mean"])
def test_no_cluster_is_blamed_for_damaged_weights_of_before(tmp_path: Path, rule: str) -> None:
    pushed = pushed_units_of(tmp_path, 2, rule)
    for _ in flip(tmp_path / BASE.digest):
        states = [push(pushed, cluster, blob_of(cluster)) for cluster in range(2)]
        with pytest.raises(CorruptDataError, match=BASE.digest) as refused:
            average_of(pushed, states)
        assert refused.value.cluster_index is None


def test_bytes_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    pushed = pushed_units_of(tmp_path, 1)
    data, unit = b"no tensors", announce(0, BASE)
    unit.total_bytes = len(data)
    stream = pushed.begin(unit)
    stream.write(data)
    digest = hashlib.sha256(data).hexdigest()
    stream.complete(digest)
    state = UnitState(unit_index=UNIT, weights_digest=digest)
    with pytest.raises(CorruptDataError, match="safetensors"):
        average_of(pushed, [ClusterState(units=[state], num_samples=SAMPLES[0])])


# --- encoded deltas


@pytest.fixture(scope="module")
def delta() -> EncodedDelta:
    """The change of cluster 1."""
    return encode_delta("int8", tensors_of(1), tensors_of(9), {})


def push_delta(
    pushed: PushedUnits, cluster: int, tensors: dict[str, Tensor], weights_digest: str
) -> ClusterState:
    blob = TensorBlob(tensors)
    return push(pushed, cluster, blob, base_digest=BASE.digest, weights_digest=weights_digest)


def test_delta_is_decoded_and_averaged_with_weights(
    pushed: PushedUnits, delta: EncodedDelta
) -> None:
    plain, decoded = blob_of(0).digest, TensorBlob(delta.weights).digest
    states = [push(pushed, 0), push_delta(pushed, 1, delta.tensors, decoded)]
    # The average over both clusters has begun already. If one is late, the other's weights are the average.
    for state, digest in zip(states, (plain, decoded), strict=True):
        average = average_of(pushed, [state])
        assert average.digest == digest
        assert hashlib.sha256(average.path.read_bytes()).hexdigest() == digest
    average = average_of(pushed, states)
    assert average.cluster_digests == (plain, decoded)
    check_weighted_mean(average, tensors_of(0), delta.weights)


def test_equal_deltas_are_the_weights_of_the_sender(
    pushed: PushedUnits, delta: EncodedDelta
) -> None:
    digest = TensorBlob(delta.weights).digest
    states = [push_delta(pushed, cluster, delta.tensors, digest) for cluster in (0, 1)]
    assert average_of(pushed, states).digest == digest


def test_delta_that_decodes_to_other_weights_than_those_of_the_sender_is_refused(
    pushed: PushedUnits, delta: EncodedDelta
) -> None:
    states = [push(pushed, 0), push_delta(pushed, 1, delta.tensors, blob_of(1).digest)]
    with pytest.raises(WrongStateError, match="unit 5 of cluster 1"):
        average_of(pushed, states)


def test_garbage_instead_of_a_delta_is_refused(pushed: PushedUnits) -> None:
    states = [push(pushed, 0), push_delta(pushed, 1, {"large": torch.zeros(3)}, "some digest")]
    with pytest.raises(CorruptDataError, match="'large'"):
        average_of(pushed, states)
