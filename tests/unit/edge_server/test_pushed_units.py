"""How the edge server takes the weights that clusters push."""

import errno
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from collapipe.edge_server import push_stream
from collapipe.edge_server.pushed_units import PushedUnits
from collapipe.edge_server.servicer import EdgeServerServicer
from collapipe.errors import CorruptDataError, InvalidInputError, WrongStateError
from collapipe.job import AveragingConfig
from collapipe.stage_host import HostResources
from collapipe.v1.edge_server_pb2 import PushedUnit
from collapipe.v1.plan_pb2 import Attempt, ClusterState, UnitState
from collapipe.weights.blob_store import JobStores
from collapipe.weights.delta_codecs import EncodedDelta, encode_delta
from collapipe.weights.tensor_blob import TensorBlob, load_tensors

SAMPLES = (3, 1)


@pytest.fixture
def pushed(tmp_path: Path) -> PushedUnits:
    return pushed_units_of(tmp_path)


def pushed_units_of(tmp_path: Path, num_clusters: int = 2, rule: str = "mean") -> PushedUnits:
    path = tmp_path / "base"
    path.write_bytes(b"".join(BASE.read()))

    def find_base(unit_index: int, digest: str) -> Path:
        assert (unit_index, digest) == (5, BASE.digest)
        return path

    averaging = AveragingConfig.model_validate({"rule": rule})
    directory, sizes = tmp_path / "pushed", [BASE.total_bytes] * 6
    return PushedUnits(directory, num_clusters, sizes, find_base, lambda *_: path, averaging)


def blob_of(cluster: int) -> TensorBlob:
    generator = torch.Generator().manual_seed(cluster)
    tensors: dict[str, Tensor] = {
        "large": torch.randn(700, 1000, generator=generator),  # more than two slices
        "half": torch.randn(5, generator=generator).bfloat16(),
        "positions": torch.arange(4),
        "empty": torch.zeros(0),
    }
    return TensorBlob(tensors)


BASE = blob_of(9)
"""The weights that the round began with."""


def announce(cluster: int, blob: TensorBlob, attempt: int = 0, base_digest: str = "") -> PushedUnit:
    return PushedUnit(
        base_digest=base_digest,
        attempt=Attempt(job_id="job", attempt=attempt),
        cluster_index=cluster,
        unit_index=5,
        total_bytes=blob.total_bytes,
        num_samples=SAMPLES[cluster],
    )


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    raise OSError(errno.ENOSPC, "No space left on device")
    yield


def push(pushed: PushedUnits, cluster: int, attempt: int = 0) -> ClusterState:
    blob = blob_of(cluster)
    stream = pushed.begin(announce(cluster, blob, attempt))
    for piece in blob.read():
        stream.write(piece)
    stream.complete(blob.digest)
    unit = UnitState(unit_index=5, weights_digest=blob.digest)
    return ClusterState(cluster_index=cluster, units=[unit], num_samples=SAMPLES[cluster])


@pytest.mark.parametrize("first", [0, 1])
def test_average_is_that_of_the_formula_whichever_cluster_comes_first(
    pushed: PushedUnits, first: int
) -> None:
    states = sorted(
        (push(pushed, cluster) for cluster in (first, 1 - first)),
        key=lambda state: state.cluster_index,
    )
    (average,) = pushed.averages(Attempt(job_id="job"), states)
    data = average.path.read_bytes()
    assert hashlib.sha256(data).hexdigest() == average.digest
    one, other = (load_tensors(b"".join(blob_of(cluster).read())) for cluster in (0, 1))
    for name, tensor in load_tensors(data).items():
        expected = (0.75 * one[name].double() + 0.25 * other[name].double()).to(tensor.dtype)
        assert torch.equal(tensor, expected), name
    # A blob has one form only, so that every host finds the same digest.
    assert TensorBlob(load_tensors(data)).digest == average.digest


def test_push_continues_where_the_last_stream_stopped(pushed: PushedUnits) -> None:
    blob = blob_of(0)
    pieces = list(blob.read())
    broken = pushed.begin(announce(0, blob))
    for piece in (*pieces[:2], pieces[2][:100]):  # the header, the tensor "half", a part of "large"
        broken.write(piece)
    stream = pushed.begin(announce(0, blob))
    assert stream.received_bytes == len(pieces[0]) + len(pieces[1]) + 100
    with pytest.raises(WrongStateError, match="newer stream"):
        broken.write(pieces[2][100:])
    for piece in blob.read(stream.received_bytes):
        stream.write(piece)
    stream.complete(blob.digest)
    again = pushed.begin(announce(0, blob))  # the sender did not get the last answer
    assert again.received_bytes == blob.total_bytes
    again.complete(blob.digest)


def test_push_whose_file_lacks_bytes_begins_again(
    pushed: PushedUnits, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = blob_of(0)
    broken = pushed.begin(announce(0, blob))
    broken.write(b"12345")
    with monkeypatch.context() as patch:
        patch.setattr(push_stream, "name_full_disk", full_disk)
        with pytest.raises(OSError, match="No space left"):
            broken.write(b"6789")
    assert pushed.begin(announce(0, blob)).received_bytes == 0
    push(pushed, 0)


def test_older_attempt_is_refused_and_its_files_are_deleted(
    pushed: PushedUnits, tmp_path: Path
) -> None:
    blob = blob_of(0)
    old = pushed.begin(announce(0, blob))
    old.write(b"12345")
    state = push(pushed, 1, attempt=1)
    assert [path.name for path in (tmp_path / "pushed").iterdir()] == ["cluster-1-unit-5"]
    with pytest.raises(WrongStateError, match="newer attempt has begun"):
        old.write(b"6789")
    with pytest.raises(WrongStateError, match="attempt 0 is older than round 0, attempt 1"):
        pushed.begin(announce(0, blob))
    with pytest.raises(WrongStateError, match="attempt 0 is older"):
        list(pushed.averages(Attempt(job_id="job"), [state]))


def test_newer_attempt_at_a_round_takes_what_other_clusters_pushed_before(
    pushed: PushedUnits, tmp_path: Path
) -> None:
    kept, failed = push(pushed, 0), push(pushed, 1)
    (before,) = pushed.averages(Attempt(job_id="job"), [kept, failed])
    blob = blob_of(3)
    again = pushed.begin(announce(1, blob, attempt=1))
    assert again.received_bytes == 0
    with pytest.raises(WrongStateError, match="was not pushed"):
        list(pushed.averages(Attempt(job_id="job", attempt=1), [kept, failed]))
    for piece in blob.read():
        again.write(piece)
    again.complete(blob.digest)
    with pytest.raises(WrongStateError, match="was not pushed"):
        list(pushed.averages(Attempt(job_id="job", attempt=1), [kept, failed]))
    failed.units[0].weights_digest = blob.digest
    (average,) = pushed.averages(Attempt(job_id="job", attempt=1), [kept, failed])
    assert average.cluster_digests == (blob_of(0).digest, blob.digest)
    assert average.digest != before.digest


def test_attempt_at_another_round_deletes_what_was_pushed(
    pushed: PushedUnits, tmp_path: Path
) -> None:
    kept = push(pushed, 0)
    with pytest.raises(WrongStateError, match="was not pushed"):
        list(pushed.averages(Attempt(job_id="job", attempt=1, round_index=1), [kept]))
    assert list((tmp_path / "pushed").iterdir()) == []


@pytest.mark.parametrize("garble", ["other bytes", "too few", "too many"])
def test_bytes_that_are_not_those_of_the_digest_are_refused(
    pushed: PushedUnits, garble: str
) -> None:
    blob = blob_of(0)
    data = b"".join(blob.read())
    stream = pushed.begin(announce(0, blob))
    with pytest.raises(CorruptDataError, match="run the round again"):
        if garble == "other bytes":
            stream.write(data[:-1] + b"!")
        else:
            stream.write(data[:-1] if garble == "too few" else data + b"!")
        stream.complete(blob.digest)


@pytest.mark.parametrize(
    ("cluster", "unit_index", "size", "message"),
    [
        (2, 5, 10, "cluster 2 pushed"),
        (0, 6, 10, "units 0 to 5, but cluster 0 pushed unit 6"),
        (0, 5, 5 << 20, "cluster 0 announced 5242880 bytes for unit 5"),
    ],
)
def test_wrong_announcement_is_refused_before_anything_is_stored(
    pushed: PushedUnits, tmp_path: Path, cluster: int, unit_index: int, size: int, message: str
) -> None:
    unit = PushedUnit(
        attempt=Attempt(job_id="job"),
        cluster_index=cluster,
        unit_index=unit_index,
        total_bytes=size,
    )
    with pytest.raises(InvalidInputError, match=message):
        pushed.begin(unit)
    assert not (tmp_path / "pushed").exists()


def test_clusters_with_other_tensors_are_not_averaged(pushed: PushedUnits) -> None:
    states = [push(pushed, 0)]
    other = TensorBlob({"large": torch.zeros(3)})
    stream = pushed.begin(announce(1, other))
    stream.take(other)
    unit = UnitState(unit_index=5, weights_digest=other.digest)
    states.append(ClusterState(cluster_index=1, units=[unit], num_samples=SAMPLES[1]))
    with pytest.raises(
        CorruptDataError, match=r"^cluster-1-unit-5 .* other names, types or shapes"
    ):
        list(pushed.averages(Attempt(job_id="job"), states))


@pytest.mark.parametrize("num_clusters", [1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_and_their_cluster_is_named(
    tmp_path: Path, num_clusters: int, value: float
) -> None:
    pushed = pushed_units_of(tmp_path, num_clusters)
    states = [push(pushed, cluster) for cluster in range(num_clusters - 1)]
    tensors = load_tensors(b"".join(BASE.read()))
    tensors["large"][-1, -1] = value
    blob = TensorBlob(tensors)
    pushed.begin(announce(num_clusters - 1, blob)).take(blob)
    unit = UnitState(unit_index=5, weights_digest=blob.digest)
    states.append(
        ClusterState(
            cluster_index=num_clusters - 1, units=[unit], num_samples=SAMPLES[num_clusters - 1]
        )
    )
    with pytest.raises(CorruptDataError, match=rf"^cluster-{num_clusters - 1}-unit-5 .* infinite"):
        list(pushed.averages(Attempt(job_id="job"), states))


@pytest.mark.parametrize("rule", ["clipped_mean", "trimmed_mean", "median"])
def test_poisoned_cluster_moves_no_robust_average_far(tmp_path: Path, rule: str) -> None:
    pushed = pushed_units_of(tmp_path, 4, rule)
    base = load_tensors(b"".join(BASE.read()))
    states = []
    for cluster in range(4):
        tensors = {name: tensor.clone() for name, tensor in base.items()}
        tensors["large"] += 1e9 if cluster == 2 else 1 + cluster / 10
        blob = TensorBlob(tensors)
        unit = announce(0, blob)
        unit.cluster_index = cluster
        pushed.begin(unit).take(blob)
        digests = [UnitState(unit_index=5, weights_digest=blob.digest)]
        states.append(ClusterState(cluster_index=cluster, units=digests, num_samples=SAMPLES[0]))
    (average,) = pushed.averages(Attempt(job_id="job"), states)
    change = load_tensors(average.path.read_bytes())["large"] - base["large"]
    assert float(change.min()) > 0.9
    assert float(change.max()) < 1.4


def test_bytes_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    pushed = pushed_units_of(tmp_path, 1)
    data, unit = b"no tensors", announce(0, BASE)
    unit.total_bytes = len(data)
    stream = pushed.begin(unit)
    stream.write(data)
    digest = hashlib.sha256(data).hexdigest()
    stream.complete(digest)
    state = UnitState(unit_index=5, weights_digest=digest)
    with pytest.raises(CorruptDataError, match="no header of safetensors"):
        list(
            pushed.averages(
                Attempt(job_id="job"),
                [ClusterState(units=[state], num_samples=SAMPLES[0])],
            )
        )


# --- encoded deltas


def delta_of(cluster: int) -> EncodedDelta:
    new, base = (load_tensors(b"".join(blob.read())) for blob in (blob_of(cluster), BASE))
    return encode_delta("int8", new, base, {})


def push_delta(
    pushed: PushedUnits, cluster: int, tensors: dict[str, Tensor], weights_digest: str
) -> ClusterState:
    blob = TensorBlob(tensors)
    pushed.begin(announce(cluster, blob, base_digest=BASE.digest)).take(blob)
    unit = UnitState(unit_index=5, weights_digest=weights_digest)
    return ClusterState(cluster_index=cluster, units=[unit], num_samples=SAMPLES[cluster])


def test_delta_is_decoded_and_averaged_with_weights(pushed: PushedUnits) -> None:
    delta = delta_of(1)
    decoded = TensorBlob(delta.weights)
    states = [push(pushed, 0), push_delta(pushed, 1, delta.tensors, decoded.digest)]
    (average,) = pushed.averages(Attempt(job_id="job"), states)
    assert average.cluster_digests == (blob_of(0).digest, decoded.digest)
    one = load_tensors(b"".join(blob_of(0).read()))
    for name, tensor in load_tensors(average.path.read_bytes()).items():
        expected = 0.75 * one[name].double() + 0.25 * delta.weights[name].double()
        assert torch.equal(tensor, expected.to(tensor.dtype)), name


def test_equal_deltas_are_the_weights_of_the_sender(pushed: PushedUnits) -> None:
    delta = delta_of(1)
    digest = TensorBlob(delta.weights).digest
    states = [push_delta(pushed, cluster, delta.tensors, digest) for cluster in (0, 1)]
    (average,) = pushed.averages(Attempt(job_id="job"), states)
    assert average.digest == digest


def test_delta_that_decodes_to_other_weights_than_those_of_the_sender_is_refused(
    pushed: PushedUnits,
) -> None:
    states = [push(pushed, 0), push_delta(pushed, 1, delta_of(1).tensors, blob_of(1).digest)]
    with pytest.raises(WrongStateError, match="unit 5 of cluster 1 with digest"):
        list(pushed.averages(Attempt(job_id="job"), states))


def test_average_without_a_late_cluster_has_the_weights_of_the_others(pushed: PushedUnits) -> None:
    delta = delta_of(1)
    decoded = TensorBlob(delta.weights).digest
    # The average over both clusters has begun already.
    states = [push(pushed, 0), push_delta(pushed, 1, delta.tensors, decoded)]
    for state, digest in zip(states, (blob_of(0).digest, decoded), strict=True):
        (average,) = pushed.averages(Attempt(job_id="job"), [state])
        assert average.digest == digest
        assert hashlib.sha256(average.path.read_bytes()).hexdigest() == digest
    (average,) = pushed.averages(Attempt(job_id="job"), states)
    assert average.digest not in (blob_of(0).digest, decoded)


def test_garbage_instead_of_a_delta_is_refused(pushed: PushedUnits) -> None:
    states = [push(pushed, 0), push_delta(pushed, 1, {"large": torch.zeros(3)}, "some digest")]
    with pytest.raises(CorruptDataError, match="a delta contains 'large' with shape"):
        list(pushed.averages(Attempt(job_id="job"), states))


def test_started_edge_server_deletes_what_a_killed_one_has_received(tmp_path: Path) -> None:
    left = tmp_path / "jobs/job/pushed/cluster-0-unit-5"
    left.parent.mkdir(parents=True)
    left.touch()
    EdgeServerServicer(JobStores(tmp_path), cast(HostResources, SimpleNamespace(channels=None)))
    assert not left.parent.exists()
