"""How the edge server adds masked changes of a unit."""

from pathlib import Path

import pytest
import torch
from damaged_files import flip
from safetensors.torch import load_file
from torch import Tensor, nn

from collapipe.edge_server.pushed_units import PushedUnits, Unmasking
from collapipe.edge_server.unit_averages import Averaged
from collapipe.errors import CorruptDataError, InvalidInputError, WrongStateError
from collapipe.job import AveragingConfig, TrainingConfig
from collapipe.secure_aggregation.cluster_masks import ClusterMasks
from collapipe.secure_aggregation.fixed_point import to_ring
from collapipe.secure_aggregation.keys import AttemptName
from collapipe.secure_aggregation.unmasking import RemainingMasks
from collapipe.stage_runtime import ResidentUnit
from collapipe.stage_runtime.resident_units import StateDigests, Upload
from collapipe.v1.edge_server_pb2 import PushedUnit
from collapipe.v1.plan_pb2 import Attempt, ClusterState, UnitState
from collapipe.weights.tensor_blob import TensorBlob

SAMPLES = (3, 1, 2)
TOTAL_SAMPLES = 12
UNIT = 5


class Layer(nn.Module):
    """Its weights are more than two slices, and not in the order of their names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(700, 1000, generator=torch.Generator().manual_seed(0))
        )
        self.transposed = nn.Parameter(self.weight.detach()[:30, :20].clone().t())
        self.bias = nn.Parameter(torch.zeros(7))
        self.register_buffer("positions", torch.arange(4))


class Clusters:
    """Three clusters that have trained one unit, and an edge server."""

    def __init__(self, folder: Path) -> None:
        self.train()
        self.base = TensorBlob(Layer().state_dict())
        self.base_path = folder / self.base.digest
        self.base_path.write_bytes(b"".join(self.base.read()))
        self.pushed = PushedUnits(
            folder / "pushed",
            3,
            [self.base.total_bytes] * (UNIT + 1),
            lambda *_: self.base_path,
            lambda *_: self.base_path,
            AveragingConfig(secure=True),
        )

    def train(self) -> None:
        self.units = [self._unit(index) for index in range(3)]

    def _unit(self, index: int) -> ResidentUnit:
        unit = ResidentUnit(UNIT, Layer(), TrainingConfig(optimizer="sgd", weight_decay=0.0))
        unit.is_masked = True
        unit.seal()
        generator = torch.Generator().manual_seed(index)
        for parameter in unit.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        unit.update(0.1, 1.0)
        return unit

    def masks(self, attempt: int = 0, threshold: int = 2) -> list[ClusterMasks]:
        name = AttemptName("job", 0, attempt)
        masks = [ClusterMasks(name, index, 3, threshold) for index in range(3)]
        public = {one.cluster_index: one.public_keys for one in masks}
        sent = [one.share(public) for one in masks]
        for one in masks:
            others = [i for i in range(3) if i != one.cluster_index]
            one.receive({i: sent[i][one.cluster_index] for i in others})
        return masks

    def upload(self, masks: ClusterMasks) -> Upload:
        index = masks.cluster_index
        return self.units[index].masked_upload(
            SAMPLES[index], TOTAL_SAMPLES, masks.unit_masks(UNIT)
        )

    def push(self, masks: ClusterMasks) -> ClusterState:
        upload = self.upload(masks)
        return self.push_blob(
            masks.cluster_index, upload.blob, upload.base_digest, masks.name.attempt
        )

    def push_blob(
        self, index: int, blob: TensorBlob, base_digest: str = "", attempt: int = 0
    ) -> ClusterState:
        unit = PushedUnit(
            attempt=Attempt(job_id="job", attempt=attempt),
            cluster_index=index,
            unit_index=UNIT,
            total_bytes=blob.total_bytes,
            num_samples=SAMPLES[index],
            base_digest=base_digest,
        )
        self.pushed.begin(unit).take(blob)
        return state_of(index, blob.digest)

    def average(
        self, states: list[ClusterState], unmasking: Unmasking | None, attempt: int = 0
    ) -> Averaged:
        asking = Attempt(job_id="job", attempt=attempt)
        (average,) = self.pushed.averages(asking, states, unmasking)
        return average

    def expected(self, present: list[int]) -> dict[str, Tensor]:
        """Returns the average in fixed point, without masks."""
        before = load_file(self.base_path)
        averaged = dict(before)
        factor = TOTAL_SAMPLES / sum(SAMPLES[i] for i in present) / 2**28
        for name in ("weight", "transposed", "bias"):
            total = torch.zeros(before[name].shape, dtype=torch.int64)
            for i in present:
                trained = self.units[i].module.state_dict()[name]
                total += to_ring(trained, before[name], SAMPLES[i], TOTAL_SAMPLES, name).long()
            averaged[name] = (before[name].double() + total.double() * factor).float()
        return averaged


def state_of(index: int, digest: str) -> ClusterState:
    unit = UnitState(unit_index=UNIT, weights_digest=digest)
    return ClusterState(cluster_index=index, units=[unit], num_samples=SAMPLES[index])


@pytest.fixture
def clusters(tmp_path: Path) -> Clusters:
    return Clusters(tmp_path)


def unmasking(masks: list[ClusterMasks], present: list[int]) -> Unmasking:
    public = {one.cluster_index: one.public_keys for one in masks}
    revealed = {index: masks[index].reveal(present) for index in present}
    return Unmasking(RemainingMasks(masks[0].name, public, revealed), TOTAL_SAMPLES)


@pytest.mark.parametrize("present", [[0, 1, 2], [0, 2], [1, 2]], ids=str)
def test_average_is_that_of_the_fixed_point_whoever_is_late(
    clusters: Clusters, present: list[int]
) -> None:
    masks = clusters.masks()
    # The late cluster has pushed, too.
    states = {one.cluster_index: clusters.push(one) for one in reversed(masks)}
    average = clusters.average([states[i] for i in present], unmasking(masks, present))
    assert average.changes == ()
    found, expected = load_file(average.path), clusters.expected(present)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_edge_server_receives_other_bytes_for_equal_weights_and_no_change_in_plain(
    tmp_path: Path,
) -> None:
    uploads = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        clusters = Clusters(tmp_path / name)
        for one in clusters.masks():
            clusters.push(one)
        files = sorted((tmp_path / name / "pushed").glob("cluster-*"))
        uploads.append([load_file(path) for path in files])
    first, second = uploads
    base = load_file(clusters.base_path)["weight"]
    changes = [
        to_ring(unit.module.state_dict()["weight"], base, 1, 1, "weight") for unit in clusters.units
    ]
    values = [cluster["weight"] for cluster in (*first, *second)]
    values += [first[0]["weight"] + first[1]["weight"] + first[2]["weight"]]
    for value in values:
        for change in changes:
            table = torch.stack([value.double().reshape(-1), change.double().reshape(-1)])
            # 700,000 independent values have a correlation below 0.006 in all but one of a million cases.
            assert abs(float(torch.corrcoef(table)[0, 1])) < 0.01
    for one, other in zip(first, second, strict=True):
        assert "positions" not in one
        assert (one["weight"] == other["weight"]).double().mean() < 1e-4


def test_uploads_of_an_earlier_attempt_are_not_added(clusters: Clusters) -> None:
    for one in clusters.masks():
        clusters.push(one)
    clusters.train()
    masks = clusters.masks(attempt=1)
    states = [state_of(i, clusters.upload(masks[i]).blob.digest) for i in range(3)]
    with pytest.raises(WrongStateError, match="round 0, attempt 1"):
        clusters.average(states, unmasking(masks, [0, 1, 2]), attempt=1)


def test_masks_of_another_attempt_do_not_give_an_average(clusters: Clusters) -> None:
    states = [clusters.push(one) for one in clusters.masks()]
    with pytest.raises(CorruptDataError, match="mask"):
        clusters.average(states, unmasking(clusters.masks(), [0, 1, 2]))


def test_commit_needs_shares_of_exactly_the_clusters_that_count(clusters: Clusters) -> None:
    masks = clusters.masks()
    states = [clusters.push(one) for one in masks]
    with pytest.raises(InvalidInputError, match=r"averaging\.secure .*without"):
        clusters.average(states, None)
    with pytest.raises(InvalidInputError, match=r"\[0, 1, 2\] .*\[0, 1\] "):
        clusters.average(states, unmasking(masks, [0, 1]))


def test_more_rows_than_announced_are_refused(clusters: Clusters) -> None:
    masks = clusters.masks()
    states = [clusters.push(one) for one in masks]
    too_few = Unmasking(unmasking(masks, [0, 1, 2]).masks, sum(SAMPLES) - 1)
    with pytest.raises(WrongStateError, match=r" 6 rows.* 5\b"):
        clusters.average(states, too_few)


def test_weights_in_plain_are_refused(clusters: Clusters) -> None:
    masks = clusters.masks()
    states = [clusters.push(one) for one in masks[:2]]
    states.append(clusters.push_blob(2, TensorBlob(clusters.units[2].module.state_dict())))
    with pytest.raises(CorruptDataError, match="cluster-2-unit-5"):
        clusters.average(states, unmasking(masks, [0, 1, 2]))


def test_digest_of_a_masked_upload_is_not_that_of_the_weights(clusters: Clusters) -> None:
    upload = clusters.upload(clusters.masks()[0])
    sealed = clusters.units[0].seal()
    assert isinstance(sealed, StateDigests)
    assert upload.base_digest == clusters.base.digest
    assert upload.blob.digest not in (sealed.weights, clusters.base.digest)


def test_damaged_weights_of_before_are_not_in_the_average(clusters: Clusters) -> None:
    masks = clusters.masks()
    states = [clusters.push(one) for one in masks]
    removed = unmasking(masks, [0, 1, 2])
    for how in flip(clusters.base_path):
        with pytest.raises(CorruptDataError, match=str(clusters.base_path)) as refused:
            clusters.average(states, removed, attempt=0)
        assert refused.value.cluster_index is None, how
