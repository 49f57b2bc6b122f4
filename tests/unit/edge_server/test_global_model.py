import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from collapipe.errors import (
    CollapipeError,
    CorruptDataError,
    InfeasibleError,
    InvalidInputError,
    NotFoundError,
    WrongStateError,
)
from collapipe.v1.plan_pb2 import Attempt, ClusterState, Commit, DataCursor, UnitState
from collapipe.weights.blob_store import BlobStore
from collapipe.weights.tensor_blob import TensorBlob

from .edges import SAMPLES, Edge


class ProcessEnd(BaseException):
    """Stands for the end of the process."""


def die(*_: object) -> None:
    raise ProcessEnd


@contextmanager
def refusing(edge: Edge, error: type[CollapipeError], named: str) -> Iterator[None]:
    """Expects an error that leaves the last commit as it is."""
    before = edge.model.commit()
    with pytest.raises(error, match=named):
        yield
    assert edge.model.commit() == before


def digests(units: Iterable[UnitState]) -> list[str]:
    return [unit.weights_digest for unit in units]


def of_all_units(commits: Iterable[Commit]) -> set[str]:
    return {digest for commit in commits for digest in digests(commit.global_units)}


def check_average(
    averaged: Mapping[str, Tensor], trained: Sequence[Mapping[str, Tensor]], samples: Sequence[int]
) -> None:
    """Compares weights with those of the formula of FedAvg, bit for bit."""
    assert averaged.keys() == trained[0].keys()
    for name, tensor in averaged.items():
        expected = torch.zeros(tensor.shape, dtype=torch.float64)
        for weights, count in zip(trained, samples, strict=True):
            expected += weights[name].double() * (count / sum(samples))
        assert torch.equal(tensor, expected.to(tensor.dtype)), name


# --- the initial model


def test_initial_commit_gives_every_cluster_the_same_model(edge: Edge) -> None:
    commit = edge.model.commit()
    assert (commit.job_id, commit.num_rounds) == ("job", 0)
    assert [unit.unit_index for unit in commit.global_units] == [0, 1, 2, 3]
    assert [cluster.cluster_index for cluster in commit.clusters] == [0, 1]
    for cluster in commit.clusters:
        assert list(cluster.units) == list(commit.global_units)
        assert (cluster.step_index, cluster.cursor) == (0, DataCursor())
    assert commit.restore_point.num_rounds == 0
    assert list(commit.restore_point.clusters) == list(commit.clusters)
    assert not commit.HasField("candidate")
    spec, num_blocks = edge.model.model_spec()
    assert (spec.family, spec.task, num_blocks) == ("bert", "classification", 2)
    assert json.loads(spec.config_json)["id2label"] == {"0": "a", "1": "b"}


def test_initial_weights_depend_on_the_seed_alone(
    edge: Edge, tmp_path: Path, vocabulary: bytes
) -> None:
    same, other = (Edge(tmp_path / str(seed), vocabulary).prepare(seed) for seed in (0, 1))
    first = digests(edge.model.commit().global_units)
    assert digests(same.global_units) == first
    assert not {*digests(other.global_units)} & {*first}


def test_preparing_again_finds_the_last_commit_or_makes_the_same_model(edge: Edge) -> None:
    before = edge.model.commit()
    edge.commits.delete("job")  # The process ended before the first commit.
    edge.restart()
    assert edge.prepare() == before
    committed = edge.run_round()
    edge.restart()
    assert edge.prepare(seed=99) == committed
    assert edge.run_round(round_index=1).num_rounds == 2


def test_model_is_made_anew_if_the_data_have_grown_before_the_first_round(edge: Edge) -> None:
    labels = ["a", "b", "c"]
    edge.prepare(labels=labels)
    spec, _ = edge.model.model_spec()
    assert list(json.loads(spec.config_json)["id2label"].values()) == labels
    committed = edge.run_round()
    with pytest.raises(WrongStateError, match="1 committed rounds"):
        edge.prepare(labels=["a", "b"])
    assert edge.model.commit() == committed


def test_disk_that_cannot_hold_the_first_commit_is_refused_before_anything_is_made(
    edge: Edge, tmp_path: Path, vocabulary: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = edge.model.stored_bytes() - len(vocabulary)  # With a header for each unit.
    small = Edge(tmp_path / "small", vocabulary)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=trained))
    with pytest.raises(InfeasibleError, match="small"):
        small.prepare()
    assert list(small.store.files()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * trained))
    assert digests(small.prepare().global_units) == digests(edge.model.commit().global_units)


def test_job_that_was_never_prepared_is_not_found(tmp_path: Path) -> None:
    model = Edge(tmp_path, b"").model
    for ask in (model.commit, model.model_spec):
        with pytest.raises(NotFoundError, match="job job"):
            ask()


# --- a round


def test_round_commits_the_average_and_the_state_of_each_cluster(edge: Edge) -> None:
    states = edge.train_all()
    commit = edge.commit(states)
    assert commit.num_rounds == 1
    trained = [edge.weights(state.units) for state in states]
    check_average(edge.weights(commit.global_units), trained, SAMPLES[:2])
    for cluster, state in zip(commit.clusters, states, strict=True):
        assert digests(cluster.units) == digests(commit.global_units)
        assert cluster.units[-1].optimizer_digest == state.units[-1].optimizer_digest
        assert (cluster.cursor, cluster.step_index) == (state.cursor, state.step_index)
        assert cluster.num_samples == state.num_samples


def test_edge_server_knows_how_far_each_cluster_has_changed_the_model(edge: Edge) -> None:
    old, clusters = edge.weights(edge.model.commit().global_units), edge.train_all()
    edge.commit(clusters)
    for cluster in clusters:
        new = edge.weights(cluster.units)
        changes = [(new[name].double() - old[name].double()).reshape(-1) for name in old]
        expected = pytest.approx(float(torch.cat(changes).norm()))
        assert edge.pushed.changes[cluster.cluster_index] == expected


def test_round_without_a_late_cluster_averages_the_others_and_keeps_its_state(
    tmp_path: Path, vocabulary: bytes
) -> None:
    edge = Edge(tmp_path, vocabulary, num_clusters=3)
    edge.prepare()
    before = edge.run_round()
    states = edge.train_all()
    trained = [edge.weights(states[index].units) for index in (0, 2)]
    # The late cluster has pushed one of its units already.
    attempt = Attempt(job_id="job", round_index=1, attempt=2)
    late = ClusterState(cluster_index=1, num_samples=SAMPLES[1], units=states[1].units[:1])
    for state in (states[0], late, states[2]):
        edge.push(attempt, state)
    states[1] = before.clusters[1]
    commit = edge.commit(states, round_index=1, late_clusters=[1])
    check_average(edge.weights(commit.global_units), trained, [SAMPLES[0], SAMPLES[2]])
    assert commit.late_clusters == [1]
    assert edge.model.commit() == commit
    kept, earlier = commit.clusters[1], before.clusters[1]
    assert digests(kept.units) == digests(commit.global_units)
    assert not {*digests(kept.units)} & {*digests(earlier.units)}
    assert [u.optimizer_digest for u in kept.units] == [u.optimizer_digest for u in earlier.units]
    assert kept.units[-1].optimizer_digest in edge.blobs()
    assert (kept.cursor, kept.step_index) == (earlier.cursor, earlier.step_index)
    # The next round has all clusters again.
    assert edge.run_round(round_index=2).late_clusters == []


def test_global_model_equals_a_single_cluster_bit_for_bit(
    tmp_path: Path, vocabulary: bytes
) -> None:
    edge = Edge(tmp_path, vocabulary, num_clusters=1)
    edge.prepare()
    (state,) = edge.train_all()
    assert digests(edge.commit([state]).global_units) == digests(state.units)


def test_repeated_request_changes_nothing_but_the_restore_point(edge: Edge) -> None:
    states = edge.train_all()
    commit = edge.commit(states, is_candidate=True)
    edge.restart()
    assert edge.commit(states) == edge.commit([]) == edge.model.commit() == commit
    repeated = edge.commit([], candidate_copied=True)
    assert (repeated.num_rounds, repeated.restore_point.num_rounds) == (1, 1)
    assert not repeated.HasField("candidate")
    assert edge.model.commit() == repeated


@pytest.mark.parametrize(
    ("committed", "round_index", "attempt"),
    [(1, 0, 0), (1, 0, 1), (0, 1, 2), (0, 7, 2), (2, 0, 2)],
)
def test_round_that_is_not_the_next_one_is_refused(
    edge: Edge, committed: int, round_index: int, attempt: int
) -> None:
    for earlier in range(committed):
        edge.run_round(earlier, attempt=2)
    named = f"^round {round_index}, attempt {attempt} .* {committed} rounds"
    with refusing(edge, WrongStateError, named):
        edge.run_round(round_index, attempt)


@pytest.mark.parametrize("present", [[], [0], [1, 0], [0, 0], [0, 1, 1]], ids=str)
def test_round_without_all_clusters_in_order_is_refused(edge: Edge, present: list[int]) -> None:
    states = edge.train_all()
    with refusing(edge, InvalidInputError, r"clusters \[.*\].* round 0, .*\[0, 1\]"):
        edge.commit([states[index] for index in present])


@pytest.mark.parametrize("change", ["swapped", "missing"])
def test_round_without_all_units_in_order_is_refused(edge: Edge, change: str) -> None:
    states = edge.train_all()
    units = list(states[1].units)
    states[1].ClearField("units")
    states[1].units.extend(units[1:] if change == "missing" else units[::-1])
    with refusing(edge, InvalidInputError, r"^cluster 1 .*\[0, 1, 2, 3\]"):
        edge.commit(states)


def test_round_without_any_samples_or_clusters_in_time_is_refused(edge: Edge) -> None:
    states = edge.train_all()
    with refusing(edge, InvalidInputError, "late for round 0"):
        edge.commit(states, late_clusters=[0, 1])
    for state in states:
        state.num_samples = 0
    with refusing(edge, InvalidInputError, r"\[0, 0\] samples"):
        edge.commit(states, attempt=3)


# --- restore points


def test_candidate_becomes_the_restore_point_when_it_is_copied(edge: Edge) -> None:
    first = edge.run_round(0, is_candidate=True)
    assert (first.candidate.num_rounds, first.restore_point.num_rounds) == (1, 0)
    assert list(first.candidate.clusters) == list(first.clusters)
    second = edge.run_round(1)
    assert (second.candidate.num_rounds, second.restore_point.num_rounds) == (1, 0)
    assert edge.weights(second.candidate.global_units)
    third = edge.run_round(2, candidate_copied=True, is_candidate=True)
    assert (third.candidate.num_rounds, third.restore_point.num_rounds) == (3, 1)
    assert third.restore_point == first.candidate
    edge.restart()
    assert edge.model.commit() == third
    assert edge.weights(third.restore_point.global_units)


def test_changes_may_refer_to_the_last_commit_and_to_the_restore_point_only(edge: Edge) -> None:
    commits = [edge.model.commit()]
    commits += [edge.run_round(round_index) for round_index in range(2)]
    of_unit_1 = [commit.global_units[1].weights_digest for commit in commits]
    for round_index in (0, 2):
        path = edge.model.global_weights(1, of_unit_1[round_index])
        assert hashlib.sha256(path.read_bytes()).hexdigest() == of_unit_1[round_index]
    for unit_index, digest in ((1, of_unit_1[1]), (2, of_unit_1[0])):
        with pytest.raises(WrongStateError, match=digest):
            edge.model.global_weights(unit_index, digest)


def test_next_run_repeats_the_rounds_since_the_restore_point(edge: Edge) -> None:
    states = edge.train_all()
    first = edge.commit(states, 0, is_candidate=True)
    for round_index in (1, 2):
        edge.run_round(round_index)
    with refusing(edge, WrongStateError, "round 0 or 3"):
        edge.commit(states, 1, attempt=3)
    again = edge.commit(states, 0, attempt=3)
    assert (again.num_rounds, again.attempt) == (1, 3)
    assert list(again.global_units) == list(first.global_units)
    assert not again.HasField("candidate"), "its optimizer states may be lost"
    with refusing(edge, WrongStateError, "attempt 3, .* round 1$"):
        edge.commit(states, 2, attempt=2)


def test_own_optimizer_states_are_stored_before_a_commit_becomes_the_candidate(edge: Edge) -> None:
    before, states = edge.model.commit(), edge.train_all()
    with pytest.raises(ProcessEnd):
        edge.commit(states, is_candidate=True, store_moments=die)
    assert edge.model.commit() == before
    assert edge.commit(states).num_rounds == 1


# --- wrong weights, and a process that ends during a commit


def test_old_commit_stays_if_a_cluster_changes_far_more_than_any_did_before(edge: Edge) -> None:
    first = edge.run_round()
    clusters = edge.train_all()
    tensors = edge.weights([clusters[1].units[2]])
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1)[3] = 2.0**40  # a damaged exponent
    wrong = TensorBlob(tensors)
    edge.trained[wrong.digest] = wrong
    clusters[1].units[2].weights_digest = wrong.digest
    largest = first.global_units[2].largest_change
    named = rf"^cluster 1 .* unit 2 .*1.1e\+12, .* {largest:.3g} "
    with refusing(edge, CorruptDataError, named):
        edge.commit(clusters, round_index=1)
    assert edge.run_round(round_index=1, attempt=3).num_rounds == 2


def test_old_commit_stays_if_a_cluster_has_not_pushed_what_it_prepared(edge: Edge) -> None:
    states = edge.train_all()
    asking = Attempt(job_id="job", attempt=1)
    edge.push(asking, states[0])
    with refusing(edge, WrongStateError, "^unit 0 of cluster 1 .* round 0, attempt 1"):
        edge.commit_pushed(asking, states)
    edge.push(asking, edge.train(1))
    states[1].num_samples += 1
    with refusing(edge, WrongStateError, "^unit 0 of cluster 1 .* 11 samples"):
        edge.commit_pushed(asking, states)
    states[1].num_samples -= 1
    edge.restart()
    assert edge.weights(edge.model.commit().global_units)  # the blobs are still stored
    assert edge.commit(states).num_rounds == 1


@pytest.mark.parametrize("blobs_written", [0, 3])
def test_old_commit_stays_if_the_process_ends_before_the_commit(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, blobs_written: int
) -> None:
    before, states = edge.model.commit(), edge.train_all()
    adopt, count = BlobStore.adopt, iter(range(100))

    def adopt_until_the_end(store: BlobStore, digest: str, path: Path) -> None:
        if next(count) == blobs_written:
            raise ProcessEnd
        adopt(store, digest, path)

    with monkeypatch.context() as patch, pytest.raises(ProcessEnd):
        patch.setattr(BlobStore, "adopt", adopt_until_the_end)
        edge.commit(states)
    edge.restart()
    assert edge.model.commit() == before
    assert edge.weights(before.global_units)
    assert edge.commit(states).num_rounds == 1


def test_new_commit_stays_if_the_process_ends_after_the_commit(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = edge.train_all()
    with monkeypatch.context() as patch, pytest.raises(ProcessEnd):
        patch.setattr(BlobStore, "keep_only", die)
        edge.commit(states)
    edge.restart()
    commit = edge.commit(states)  # the scheduler repeats the request
    assert commit.num_rounds == 1
    assert edge.weights(commit.global_units)


# --- earlier commits


def commit_rounds(edge: Edge, *rounds: int, keep_commits: int) -> list[Commit]:
    """Commits these rounds. The first one becomes the restore point with the second one."""
    return [
        edge.run_round(
            round_index,
            is_candidate=index == 0,
            candidate_copied=index == 1,
            keep_commits=keep_commits,
        )
        for index, round_index in enumerate(rounds)
    ]


def numbers(commit: Commit) -> list[int]:
    return [kept.num_rounds for kept in commit.history]


def test_last_commits_are_kept_without_what_only_the_last_one_needs(edge: Edge) -> None:
    initial = edge.model.commit()
    commits = commit_rounds(edge, 0, 1, 2, 3, keep_commits=3)
    assert [numbers(commit) for commit in commits] == [[0], [1, 0], [2, 1], [3, 2]]
    kept = commits[-1].history[1]
    assert (kept.num_rounds, kept.attempt) == (2, 2)
    assert list(kept.global_units) == list(commits[1].global_units)
    assert [cluster.step_index for cluster in kept.clusters] == [7, 8]
    assert not any(cluster.units for cluster in kept.clusters)
    assert not kept.HasField("restore_point") and not kept.history
    assert of_all_units(commits) <= edge.blobs()
    assert not of_all_units([initial]) & edge.blobs()
    edge.restart()
    assert edge.model.commit() == commits[-1]


def test_number_of_kept_commits_may_change(edge: Edge) -> None:
    commit_rounds(edge, 0, 1, 2, keep_commits=4)
    edge.run_round(3, keep_commits=2, is_candidate=True)
    moved = edge.run_round(4, keep_commits=1, candidate_copied=True)
    assert (moved.restore_point.num_rounds, numbers(moved)) == (4, [])
    # While fewer commits are there than may be kept, the restore point is one of them.
    for round_index, kept in ((5, [5, 4]), (6, [6, 5]), (7, [7, 6, 5])):
        commit = edge.run_round(round_index, keep_commits=3)
        assert numbers(commit) == kept
    assert of_all_units(commit.history) <= edge.blobs()


def test_clusters_can_repeat_all_rounds_since_the_restore_point(edge: Edge) -> None:
    commits = commit_rounds(edge, 0, 1, 2, 3, 4, keep_commits=1)
    assert [numbers(commit) for commit in commits] == [[], [], [2], [3, 2], [4, 3, 2]]
    assert of_all_units(commits) <= edge.blobs()


def test_repeated_round_replaces_later_commits(edge: Edge) -> None:
    commits = commit_rounds(edge, 0, 1, 2, 3, keep_commits=4)
    assert commits[-1].restore_point.num_rounds == 1
    again = edge.run_round(1, attempt=3, keep_commits=4)
    assert (again.num_rounds, numbers(again)) == (2, [1])
    assert list(again.history[0].global_units) == list(commits[0].global_units)
    assert not of_all_units(commits[2:]) & edge.blobs()


def test_furthest_commit_stays_while_rounds_are_repeated_if_it_is_wanted(edge: Edge) -> None:
    *_, last = commit_rounds(edge, 0, 1, 2, 3, keep_commits=2)
    for round_index, attempt in ((1, 3), (1, 4), (2, 4)):
        again = edge.run_round(round_index, attempt, keep_commits=2, keep_furthest=True)
        assert numbers(again)[0] == 4
    commit = edge.model.roll_back(4, attempt=5)
    assert (commit.num_rounds, commit.attempt, commit.anew_since) == (4, 5, 0)
    assert list(commit.global_units) == list(last.global_units)
    assert of_all_units([commit]) <= edge.blobs()
    assert commit.restore_point == last.restore_point


def test_job_goes_back_to_its_restore_point_with_its_optimizer_states(edge: Edge) -> None:
    *_, last = commit_rounds(edge, 0, 1, 2, keep_commits=3)
    commit = edge.model.roll_back(1, attempt=5)
    assert (commit.num_rounds, commit.attempt, commit.anew_since) == (1, 5, 0)
    assert commit.restore_point == last.restore_point
    assert list(commit.clusters) == list(last.restore_point.clusters)
    assert commit.clusters[0].units[-1].optimizer_digest in edge.blobs()
    assert numbers(commit) == []
    edge.restart()
    assert edge.model.commit() == commit
    assert edge.model.roll_back(1, attempt=6) == commit, "a repeated request changes something"


@pytest.mark.parametrize("num_rounds", [2, 4])
def test_job_goes_back_to_another_commit_without_optimizer_states(
    edge: Edge, num_rounds: int
) -> None:
    commits = commit_rounds(edge, 0, 1, 2, 3, keep_commits=3)
    commit = edge.model.roll_back(num_rounds, attempt=5)
    target = commits[num_rounds - 1]
    assert (commit.num_rounds, commit.attempt, commit.anew_since) == (num_rounds, 5, 5)
    assert list(commit.global_units) == list(target.global_units)
    for cluster, before in zip(commit.clusters, target.clusters, strict=True):
        assert list(cluster.units) == list(commit.global_units)
        assert (cluster.cursor, cluster.step_index) == (before.cursor, before.step_index)
    assert list(commit.restore_point.clusters) == list(commit.clusters)
    assert commit.restore_point.num_rounds == num_rounds and not commit.HasField("candidate")
    assert edge.model.roll_back(num_rounds, attempt=6) == commit
    for round_index in (num_rounds, num_rounds + 1):
        with refusing(edge, WrongStateError, f"attempt 2 .* {num_rounds} rounds"):
            edge.run_round(round_index, attempt=2)
    with refusing(edge, WrongStateError, "attempt 5 of job job"):
        edge.model.roll_back(1, attempt=5)
    following = edge.run_round(num_rounds, attempt=7, keep_commits=3)
    assert following.anew_since == following.restore_point.anew_since == 5
    assert numbers(following)[0] == num_rounds


def test_commit_that_is_not_kept_is_refused_with_those_that_are(edge: Edge) -> None:
    commit_rounds(edge, 0, 1, 2, 3, keep_commits=2)
    edge.run_round(4, keep_commits=2, is_candidate=True)
    edge.run_round(5, keep_commits=2, candidate_copied=True)
    blobs = edge.blobs()
    for num_rounds in (0, 3, 7):
        with refusing(edge, NotFoundError, rf"\b{num_rounds} .* 5, 6 rounds"):
            edge.model.roll_back(num_rounds, attempt=5)
    assert edge.blobs() == blobs


# --- blobs and export


def test_only_blobs_of_the_commit_the_restore_point_and_the_vocabulary_are_kept(
    edge: Edge, vocabulary: bytes
) -> None:
    kept, commit = [], Commit()
    for round_index in range(3):
        commit = edge.run_round(round_index, is_candidate=True, candidate_copied=True)
        kept.append(edge.blobs())
    named = of_all_units([commit, commit.restore_point])
    for one in (commit, commit.restore_point):
        named |= {cluster.units[-1].optimizer_digest for cluster in one.clusters}
    assert kept[-1] == named | {edge.store.put_bytes(vocabulary)}
    assert len(kept[-2]) == len(kept[-1]), "the store grows with the rounds"


def test_export_loads_with_transformers(edge: Edge, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    commit = edge.run_round()
    folder = tmp_path / "export"
    folder.mkdir()
    edge.model.export(folder)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    for name, tensor in edge.weights(commit.global_units).items():
        assert torch.equal(loaded[name], tensor), name
    assert len(AutoTokenizer.from_pretrained(folder)("w1 w2")["input_ids"]) >= 2
