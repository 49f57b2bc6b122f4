"""How the edge server adds masked changes of a unit."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from collapipe.edge_server.pushed_units import PushedUnits, Unmasking
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

    def __init__(self, folder: Path, *, secure: bool = True) -> None:
        self.train()
        self.base = TensorBlob(Layer().state_dict())
        self.base_path = folder / "base"
        self.base_path.write_bytes(b"".join(self.base.read()))
        self.pushed = PushedUnits(
            folder / "pushed",
            3,
            [self.base.total_bytes] * (UNIT + 1),
            lambda unit_index, digest: self.base_path,
            lambda attempt, unit_index: self.base_path,
            AveragingConfig(secure=secure),
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
        stream = self.pushed.begin(
            PushedUnit(
                attempt=Attempt(job_id="job", attempt=masks.name.attempt),
                cluster_index=masks.cluster_index,
                unit_index=UNIT,
                total_bytes=upload.blob.total_bytes,
                num_samples=SAMPLES[masks.cluster_index],
                base_digest=upload.base_digest,
            )
        )
        for piece in upload.blob.read():
            stream.write(piece)
        stream.complete(upload.blob.digest)
        return ClusterState(
            cluster_index=masks.cluster_index,
            units=[UnitState(unit_index=UNIT, weights_digest=upload.blob.digest)],
            num_samples=SAMPLES[masks.cluster_index],
        )

    def base_weight(self) -> Tensor:
        return load_file(self.base_path)["weight"]

    def expected(self, present: list[int]) -> dict[str, Tensor]:
        """Returns the average in fixed point, without masks."""
        before = load_file(self.base_path)
        averaged = dict(before)
        for name in ("weight", "transposed", "bias"):
            total = sum(
                to_ring(
                    self.units[i].module.state_dict()[name],
                    before[name],
                    SAMPLES[i],
                    TOTAL_SAMPLES,
                    name,
                ).long()
                for i in present
            )
            assert isinstance(total, Tensor)
            factor = TOTAL_SAMPLES / sum(SAMPLES[i] for i in present) / 2**28
            averaged[name] = (before[name].double() + total.double() * factor).float()
        return averaged


@pytest.fixture
def clusters(tmp_path: Path) -> Clusters:
    return Clusters(tmp_path)


def unmasking(masks: list[ClusterMasks], present: list[int]) -> Unmasking:
    public = {one.cluster_index: one.public_keys for one in masks}
    revealed = {index: masks[index].reveal(present) for index in present}
    return Unmasking(RemainingMasks(masks[0].name, public, revealed), TOTAL_SAMPLES)


def equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("present", [[0, 1, 2], [0, 2], [1, 2]])
def test_average_is_that_of_the_fixed_point_whoever_is_late(
    clusters: Clusters, present: list[int]
) -> None:
    masks = clusters.masks()
    # The late cluster has pushed, too.
    states = {one.cluster_index: clusters.push(one) for one in reversed(masks)}
    (average,) = clusters.pushed.averages(
        Attempt(job_id="job"), [states[i] for i in present], unmasking(masks, present)
    )
    assert average.changes == ()
    assert equal(load_file(average.path), clusters.expected(present))


def test_edge_server_receives_other_bytes_for_equal_weights_and_no_change_in_plain(
    tmp_path: Path,
) -> None:
    uploads = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        clusters = Clusters(tmp_path / name)
        masks = clusters.masks()
        for one in masks:
            clusters.push(one)
        uploads.append([load_file(path) for path in _pushed_files(tmp_path / name)])
    first, second = uploads
    changes = [
        to_ring(unit.module.state_dict()["weight"], clusters.base_weight(), 1, 1, "weight")
        for unit in clusters.units
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


def _pushed_files(folder: Path) -> list[Path]:
    return sorted((folder / "pushed").glob("cluster-*"))


def test_uploads_of_an_earlier_attempt_are_not_added(clusters: Clusters) -> None:
    for one in clusters.masks():
        clusters.push(one)
    clusters.train()
    masks = clusters.masks(attempt=1)
    states = [
        ClusterState(
            cluster_index=i,
            units=[
                UnitState(unit_index=UNIT, weights_digest=clusters.upload(masks[i]).blob.digest)
            ],
            num_samples=SAMPLES[i],
        )
        for i in range(3)
    ]
    with pytest.raises(WrongStateError, match="was not pushed by round 0, attempt 1"):
        list(
            clusters.pushed.averages(
                Attempt(job_id="job", attempt=1), states, unmasking(masks, [0, 1, 2])
            )
        )


def test_masks_of_another_attempt_do_not_give_an_average(clusters: Clusters) -> None:
    states = [clusters.push(one) for one in clusters.masks()]
    with pytest.raises(CorruptDataError, match="some mask was not removed"):
        list(
            clusters.pushed.averages(
                Attempt(job_id="job"), states, unmasking(clusters.masks(), [0, 1, 2])
            )
        )


def test_commit_needs_shares_of_exactly_the_clusters_that_count(clusters: Clusters) -> None:
    masks = clusters.masks()
    states = [clusters.push(one) for one in masks]
    attempt = Attempt(job_id="job")
    with pytest.raises(InvalidInputError, match="came without shares of masks"):
        list(clusters.pushed.averages(attempt, states))
    with pytest.raises(
        InvalidInputError, match=r"clusters \[0, 1, 2\] count, but clusters \[0, 1\]"
    ):
        list(clusters.pushed.averages(attempt, states, unmasking(masks, [0, 1])))


def test_more_rows_than_announced_are_refused(clusters: Clusters) -> None:
    masks = clusters.masks()
    states = [clusters.push(one) for one in masks]
    too_few = Unmasking(unmasking(masks, [0, 1, 2]).masks, sum(SAMPLES) - 1)
    with pytest.raises(WrongStateError, match="trained on 6 rows, but .* 1 to 5, twice"):
        list(clusters.pushed.averages(Attempt(job_id="job"), states, too_few))


def test_weights_in_plain_are_refused(clusters: Clusters) -> None:
    masks = clusters.masks()
    states = [clusters.push(one) for one in masks[:2]]
    blob = TensorBlob(clusters.units[2].module.state_dict())
    stream = clusters.pushed.begin(
        PushedUnit(
            attempt=Attempt(job_id="job"),
            cluster_index=2,
            unit_index=UNIT,
            total_bytes=blob.total_bytes,
            num_samples=SAMPLES[2],
        )
    )
    stream.take(blob)
    unit = UnitState(unit_index=UNIT, weights_digest=blob.digest)
    states.append(ClusterState(cluster_index=2, units=[unit], num_samples=SAMPLES[2]))
    with pytest.raises(CorruptDataError, match="a masked change of other tensors"):
        list(clusters.pushed.averages(Attempt(job_id="job"), states, unmasking(masks, [0, 1, 2])))


def test_digest_of_a_masked_upload_is_not_that_of_the_weights(clusters: Clusters) -> None:
    unit = clusters.units[0]
    upload = clusters.upload(clusters.masks()[0])
    sealed = unit.seal()
    assert isinstance(sealed, StateDigests)
    assert upload.base_digest == clusters.base.digest
    assert upload.blob.digest not in (sealed.weights, clusters.base.digest)
