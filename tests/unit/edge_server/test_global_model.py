import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from collapipe.edge_server.global_model import GlobalModel
from collapipe.errors import CorruptDataError, InvalidInputError, NotFoundError, WrongStateError
from collapipe.v1.plan_pb2 import Attempt, ClusterState, Commit, DataCursor
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import BlobStore
from collapipe.weights.tensor_blob import TensorBlob, load_tensors

from .edges import SAMPLES, Edge

# --- the initial model


def test_initial_commit_gives_every_cluster_the_same_model(edge: Edge) -> None:
    commit = edge.model.commit()
    assert (commit.job_id, commit.num_rounds) == ("job", 0)
    assert [unit.unit_index for unit in commit.global_units] == [0, 1, 2, 3]
    assert [cluster.cluster_index for cluster in commit.clusters] == [0, 1]
    for cluster in commit.clusters:
        assert list(cluster.units) == list(commit.global_units)
        assert (cluster.step_index, cluster.cursor) == (0, DataCursor())
    spec, num_blocks = edge.model.model_spec()
    assert (spec.family, spec.task, num_blocks) == ("bert", "classification", 2)
    assert json.loads(spec.config_json)["id2label"] == {"0": "a", "1": "b"}


def test_initial_weights_depend_on_the_seed_alone(tmp_path: Path, vocabulary: bytes) -> None:
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        commit = Edge(tmp_path / name, vocabulary).prepare(seed)
        digests.append([unit.weights_digest for unit in commit.global_units])
    assert digests[0] == digests[1]
    assert all(one != other for one, other in zip(digests[0], digests[2], strict=True))


def test_preparing_again_finds_the_last_commit(edge: Edge) -> None:
    committed = edge.commit(edge.train_all())
    edge.restart()
    assert edge.prepare(seed=99) == committed


def test_job_is_prepared_again_if_the_process_ended_before_the_first_commit(edge: Edge) -> None:
    before = edge.model.commit()
    (edge.directory / "commit.json").unlink()
    edge.restart()
    assert edge.prepare() == before


def test_job_that_was_never_prepared_is_not_found(tmp_path: Path) -> None:
    model = GlobalModel(tmp_path / "job", BlobStore(tmp_path / "job" / "blobs"), BlobCache())
    with pytest.raises(NotFoundError, match="no commit of job job"):
        model.commit()
    with pytest.raises(NotFoundError, match="does not know job job"):
        model.model_spec()


# --- a round


def test_round_commits_the_average_weighted_by_samples(edge: Edge) -> None:
    states = edge.train_all()
    trained = [edge.weights(list(state.units)) for state in states]
    commit = edge.commit(states)
    assert commit.num_rounds == 1
    averaged = edge.weights(list(commit.global_units))
    assert averaged.keys() == trained[0].keys()
    for name, tensor in averaged.items():
        expected = 0.75 * trained[0][name].double() + 0.25 * trained[1][name].double()
        assert torch.equal(tensor, expected.to(tensor.dtype)), name


def test_edge_server_knows_how_far_each_cluster_has_changed_the_model(edge: Edge) -> None:
    before = edge.prepare()
    clusters = edge.train_all()
    edge.commit(clusters)
    old = edge.weights(list(before.global_units))
    for cluster in clusters:
        new = edge.weights(list(cluster.units))
        squares = sum(
            float((new[name].double() - old[name].double()).square().sum())
            for name in old
            if old[name].is_floating_point()
        )
        expected = pytest.approx(squares**0.5)
        assert edge.pushed.changes[cluster.cluster_index] == expected


def test_commit_keeps_the_optimizer_state_and_the_cursor_of_each_cluster(edge: Edge) -> None:
    states = edge.train_all()
    commit = edge.commit(states)
    for cluster, state in zip(commit.clusters, states, strict=True):
        digests = [unit.weights_digest for unit in cluster.units]
        assert digests == [unit.weights_digest for unit in commit.global_units]
        assert cluster.units[-1].optimizer_digest == state.units[-1].optimizer_digest
        assert (cluster.cursor, cluster.step_index) == (state.cursor, state.step_index)
        assert cluster.num_samples == state.num_samples


def test_round_without_a_late_cluster_averages_the_others_and_keeps_its_state(
    tmp_path: Path, vocabulary: bytes
) -> None:
    edge = Edge(tmp_path / "job", vocabulary, num_clusters=3)
    edge.prepare()
    before = edge.commit(edge.train_all())
    states = edge.train_all()
    trained = [edge.weights(list(state.units)) for state in states]
    # The late cluster has pushed one of its units already.
    attempt = Attempt(job_id="job", round_index=1, attempt=2)
    late = ClusterState(cluster_index=1, num_samples=SAMPLES[1], units=states[1].units[:1])
    for state in (states[0], late, states[2]):
        edge.push(attempt, state)
    states[1] = before.clusters[1]
    commit = edge.commit(states, round_index=1, late_clusters=[1])
    for name, tensor in edge.weights(list(commit.global_units)).items():
        expected = (
            SAMPLES[0] * trained[0][name].double().numpy()
            + SAMPLES[2] * trained[2][name].double().numpy()
        ) / (SAMPLES[0] + SAMPLES[2])
        np.testing.assert_allclose(tensor.double().numpy(), expected, rtol=1e-6, err_msg=name)
    assert commit.late_clusters == [1]
    assert edge.model.commit() == commit
    kept = commit.clusters[1]
    for unit, earlier, averaged in zip(
        kept.units, before.clusters[1].units, commit.global_units, strict=True
    ):
        assert unit.optimizer_digest == earlier.optimizer_digest
        assert unit.weights_digest == averaged.weights_digest != earlier.weights_digest
    assert kept.units[-1].optimizer_digest in edge.blobs()
    assert (kept.cursor, kept.step_index) == (
        before.clusters[1].cursor,
        before.clusters[1].step_index,
    )
    # The next round has all clusters again.
    assert edge.commit(edge.train_all(), round_index=2).late_clusters == []


def test_commit_without_all_clusters_is_refused(edge: Edge) -> None:
    before = edge.model.commit()
    with pytest.raises(InvalidInputError, match="all clusters are late for round 0"):
        edge.commit(edge.train_all(), late_clusters=[0, 1])
    assert edge.model.commit() == before


def test_global_model_equals_a_single_cluster_bit_for_bit(
    tmp_path: Path, vocabulary: bytes
) -> None:
    edge = Edge(tmp_path / "job", vocabulary, num_clusters=1)
    edge.prepare()
    (state,) = edge.train_all()
    commit = edge.commit([state])
    assert [unit.weights_digest for unit in commit.global_units] == [
        unit.weights_digest for unit in state.units
    ]


def test_commit_survives_a_restart(edge: Edge) -> None:
    commit = edge.commit(edge.train_all())
    edge.restart()
    assert edge.model.commit() == commit
    next_commit = edge.commit(edge.train_all(), round_index=1)
    assert next_commit.num_rounds == 2


def test_repeated_request_changes_nothing(edge: Edge) -> None:
    states = edge.train_all()
    commit = edge.commit(states)
    edge.restart()
    assert edge.commit(states) == commit
    assert edge.commit([]) == commit
    assert edge.model.commit() == commit


@pytest.mark.parametrize("attempt", [0, 1])
def test_older_attempt_at_a_committed_round_is_refused(edge: Edge, attempt: int) -> None:
    commit = edge.commit(edge.train_all(), attempt=2)
    late = Attempt(job_id="job", attempt=attempt)
    with pytest.raises(
        WrongStateError, match=f"round 0, attempt {attempt} cannot be committed: 1 rounds are"
    ):
        edge.model.commit_round(late, edge.train_all(), edge.pushed)
    assert edge.model.commit() == commit


@pytest.mark.parametrize("round_index", [1, 2, 7])
def test_later_round_is_refused(edge: Edge, round_index: int) -> None:
    before = edge.model.commit()
    with pytest.raises(
        WrongStateError, match=f"round {round_index}, attempt 2 cannot be committed: 0 rounds are"
    ):
        edge.commit(edge.train_all(), round_index)
    assert edge.model.commit() == before


def test_earlier_round_is_refused(edge: Edge) -> None:
    for round_index in range(2):
        edge.commit(edge.train_all(), round_index)
    with pytest.raises(
        WrongStateError, match="round 0, attempt 2 cannot be committed: 2 rounds are"
    ):
        edge.commit(edge.train_all(), 0)


@pytest.mark.parametrize("present", [[], [0], [1], [1, 0], [0, 0], [0, 1, 1]], ids=str)
def test_round_without_all_clusters_in_order_is_refused(edge: Edge, present: list[int]) -> None:
    before, states = edge.model.commit(), edge.train_all()
    with pytest.raises(
        InvalidInputError, match=r"clusters \[.*\] prepared round 0, but a commit needs all of"
    ):
        edge.commit([states[index] for index in present])
    assert edge.model.commit() == before


@pytest.mark.parametrize("change", ["swapped", "missing"])
def test_round_without_all_units_in_order_is_refused(edge: Edge, change: str) -> None:
    before, states = edge.model.commit(), edge.train_all()
    units = list(states[1].units)
    states[1].ClearField("units")
    states[1].units.extend(units[1:] if change == "missing" else units[::-1])
    with pytest.raises(
        InvalidInputError, match=r"cluster 1 prepared units \[.*\], but the model has"
    ):
        edge.commit(states)
    assert edge.model.commit() == before


def test_clusters_without_samples_are_refused(edge: Edge) -> None:
    before, states = edge.model.commit(), edge.train_all()
    for state in states:
        state.num_samples = 0
    with pytest.raises(InvalidInputError, match="cannot be averaged"):
        edge.commit(states)
    assert edge.model.commit() == before


# --- restore points


def test_initial_model_is_the_first_restore_point(edge: Edge) -> None:
    initial = edge.model.commit()
    assert initial.restore_point.num_rounds == 0
    assert list(initial.restore_point.clusters) == list(initial.clusters)
    assert not initial.HasField("candidate")


def test_candidate_becomes_the_restore_point_when_it_is_copied(edge: Edge) -> None:
    first = edge.commit(edge.train_all(), 0, is_candidate=True)
    assert (first.candidate.num_rounds, first.restore_point.num_rounds) == (1, 0)
    assert list(first.candidate.clusters) == list(first.clusters)
    second = edge.commit(edge.train_all(), 1)
    assert (second.candidate.num_rounds, second.restore_point.num_rounds) == (1, 0)
    assert edge.weights(list(second.candidate.global_units))
    third = edge.commit(edge.train_all(), 2, candidate_copied=True, is_candidate=True)
    assert (third.candidate.num_rounds, third.restore_point.num_rounds) == (3, 1)
    assert third.restore_point == first.candidate
    edge.restart()
    assert edge.model.commit() == third
    assert edge.weights(list(third.restore_point.global_units))


def test_restore_point_moves_when_the_last_commit_is_repeated(edge: Edge) -> None:
    edge.commit(edge.train_all(), 0, is_candidate=True)
    repeated = edge.commit([], 0, candidate_copied=True)
    assert (repeated.num_rounds, repeated.restore_point.num_rounds) == (1, 1)
    assert not repeated.HasField("candidate")
    assert edge.model.commit() == repeated


def test_changes_may_refer_to_the_last_commit_and_to_the_restore_point_only(edge: Edge) -> None:
    commits = [edge.model.commit()]
    commits += [edge.commit(edge.train_all(), round_index) for round_index in range(2)]
    digests = [commit.global_units[1].weights_digest for commit in commits]
    for round_index in (0, 2):
        path = edge.model.global_weights(1, digests[round_index])
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digests[round_index]
    for unit_index, digest in ((1, digests[1]), (2, digests[0])):
        with pytest.raises(WrongStateError, match=digest):
            edge.model.global_weights(unit_index, digest)


def test_next_run_repeats_the_rounds_since_the_restore_point(edge: Edge) -> None:
    states = edge.train_all()
    first = edge.commit(states, 0, is_candidate=True)
    for round_index in (1, 2):
        edge.commit(edge.train_all(), round_index)
    with pytest.raises(WrongStateError, match="next is round 0 or 3"):
        edge.commit(states, 1, attempt=3)
    again = edge.commit(states, 0, attempt=3)
    assert (again.num_rounds, again.attempt) == (1, 3)
    assert list(again.global_units) == list(first.global_units)
    assert not again.HasField("candidate"), "its optimizer states may be lost"
    with pytest.raises(WrongStateError, match="the last by attempt 3, so the next is round 1"):
        edge.commit(states, 2, attempt=2)


def test_own_optimizer_states_are_stored_before_a_commit_becomes_the_candidate(edge: Edge) -> None:
    def die(commit: Commit) -> None:
        raise ProcessEnd

    before, states = edge.model.commit(), edge.train_all()
    with pytest.raises(ProcessEnd):
        edge.commit(states, is_candidate=True, store_moments=die)
    assert edge.model.commit() == before
    assert edge.commit(states).num_rounds == 1


# --- the process ends during a commit


class ProcessEnd(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("change", ["name", "shape", "type"])
def test_old_commit_stays_if_all_clusters_push_other_tensors(edge: Edge, change: str) -> None:
    before = edge.model.commit()
    clusters = edge.train_all()
    blob = edge.trained[clusters[0].units[2].weights_digest]
    tensors = load_tensors(b"".join(blob.read()))
    name, tensor = next(iter(tensors.items()))
    if change == "name":
        tensors[f"{name}.other"] = tensors.pop(name)
    else:
        tensors[name] = tensor.half() if change == "type" else tensor.reshape(-1, 1)
    wrong = TensorBlob(tensors)
    edge.trained[wrong.digest] = wrong
    for cluster in clusters:
        cluster.units[2].weights_digest = wrong.digest
    with pytest.raises(CorruptDataError, match="unit-2 .* tensors of other names, types or shape"):
        edge.commit(clusters)
    assert edge.model.commit() == before


def test_old_commit_stays_if_a_cluster_changes_far_more_than_any_did_before(edge: Edge) -> None:
    first = edge.commit(edge.train_all())
    clusters = edge.train_all()
    tensors = edge.weights([clusters[1].units[2]])
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1)[3] = 2.0**40  # a damaged exponent
    wrong = TensorBlob(tensors)
    edge.trained[wrong.digest] = wrong
    clusters[1].units[2].weights_digest = wrong.digest
    largest = first.global_units[2].largest_change
    with pytest.raises(
        CorruptDataError,
        match=rf"cluster 1 changed unit 2 by 1.1e\+12, but no earlier round by more than {largest:.3g} ",
    ):
        edge.commit(clusters, round_index=1)
    assert edge.model.commit() == first
    assert edge.commit(edge.train_all(), round_index=1, attempt=3).num_rounds == 2


def test_old_commit_stays_if_a_cluster_has_not_pushed_what_it_prepared(edge: Edge) -> None:
    before, states = edge.model.commit(), edge.train_all()
    asking = Attempt(job_id="job", attempt=1)
    edge.push(asking, states[0])
    with pytest.raises(WrongStateError, match="unit 0 of cluster 1 .* was not pushed by round 0"):
        edge.model.commit_round(asking, states, edge.pushed)
    edge.push(asking, edge.train(1))
    states[1].num_samples += 1
    with pytest.raises(WrongStateError, match="unit 0 of cluster 1 .* and 11 samples"):
        edge.model.commit_round(asking, states, edge.pushed)
    states[1].num_samples -= 1
    edge.restart()
    assert edge.model.commit() == before
    assert edge.weights(list(before.global_units))  # the blobs are still stored
    assert edge.commit(states).num_rounds == 1


@pytest.mark.parametrize("blobs_written", [0, 1, 3])
def test_old_commit_stays_if_the_process_ends_before_the_commit(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, blobs_written: int
) -> None:
    before, states = edge.model.commit(), edge.train_all()
    adopt, count = BlobStore.adopt, iter(range(100))

    def adopt_until_the_end(store: BlobStore, digest: str, path: Path) -> None:
        if next(count) == blobs_written:
            raise ProcessEnd
        adopt(store, digest, path)

    with monkeypatch.context() as patch:
        patch.setattr(BlobStore, "adopt", adopt_until_the_end)
        with pytest.raises(ProcessEnd):
            edge.commit(states)
    edge.restart()
    assert edge.model.commit() == before
    assert edge.weights(list(before.global_units))
    assert edge.commit(states).num_rounds == 1


def test_new_commit_stays_if_the_process_ends_after_the_commit(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = edge.train_all()

    def die(store: BlobStore, digests: set[str]) -> None:
        raise ProcessEnd

    with monkeypatch.context() as patch:
        patch.setattr(BlobStore, "keep_only", die)
        with pytest.raises(ProcessEnd):
            edge.commit(states)
    edge.restart()
    commit = edge.commit(states)  # the scheduler repeats the request
    assert commit.num_rounds == 1
    assert edge.weights(list(commit.global_units))


# --- earlier commits


def commit_rounds(edge: Edge, *rounds: int, keep_commits: int, attempt: int = 2) -> list[Commit]:
    """Commits these rounds. The first one becomes the restore point with the second one."""
    return [
        edge.commit(
            edge.train_all(),
            round_index,
            attempt,
            is_candidate=index == 0,
            candidate_copied=index == 1,
            keep_commits=keep_commits,
        )
        for index, round_index in enumerate(rounds)
    ]


def numbers(commit: Commit) -> list[int]:
    return [kept.num_rounds for kept in commit.history]


def test_last_commits_are_kept_without_what_only_the_last_one_needs(
    edge: Edge, vocabulary: bytes
) -> None:
    initial = edge.model.commit()
    commits = commit_rounds(edge, 0, 1, 2, 3, keep_commits=3)
    assert [numbers(commit) for commit in commits] == [[0], [1, 0], [2, 1], [3, 2]]
    kept = commits[-1].history[1]
    assert (kept.num_rounds, kept.attempt) == (2, 2)
    assert list(kept.global_units) == list(commits[1].global_units)
    assert [cluster.step_index for cluster in kept.clusters] == [7, 8]
    assert not any(cluster.units for cluster in kept.clusters)
    assert not kept.HasField("restore_point") and not kept.history
    weights = {unit.weights_digest for commit in commits for unit in commit.global_units}
    lost = {unit.weights_digest for unit in initial.global_units}
    assert weights <= edge.blobs() and not lost & edge.blobs()
    edge.restart()
    assert edge.model.commit() == commits[-1]


def test_number_of_kept_commits_may_change(edge: Edge) -> None:
    commit_rounds(edge, 0, 1, 2, keep_commits=4)
    edge.commit(edge.train_all(), 3, keep_commits=2, is_candidate=True)
    moved = edge.commit(edge.train_all(), 4, keep_commits=1, candidate_copied=True)
    assert (moved.restore_point.num_rounds, numbers(moved)) == (4, [])
    # While fewer commits are there than may be kept, the restore point is one of them.
    for round_index, kept in ((5, [5, 4]), (6, [6, 5]), (7, [7, 6, 5])):
        commit = edge.commit(edge.train_all(), round_index, keep_commits=3)
        assert numbers(commit) == kept
    named = {unit.weights_digest for kept in commit.history for unit in kept.global_units}
    assert named <= edge.blobs()


def test_clusters_can_repeat_all_rounds_since_the_restore_point(edge: Edge) -> None:
    commits = commit_rounds(edge, 0, 1, 2, 3, 4, keep_commits=1)
    assert [numbers(commit) for commit in commits] == [[], [], [2], [3, 2], [4, 3, 2]]
    weights = {unit.weights_digest for commit in commits for unit in commit.global_units}
    assert weights <= edge.blobs()


def test_repeated_round_replaces_later_commits(edge: Edge) -> None:
    commits = commit_rounds(edge, 0, 1, 2, 3, keep_commits=4)
    assert commits[-1].restore_point.num_rounds == 1
    again = edge.commit(edge.train_all(), 1, attempt=3, keep_commits=4)
    assert (again.num_rounds, numbers(again)) == (2, [1])
    assert list(again.history[0].global_units) == list(commits[0].global_units)
    gone = {unit.weights_digest for commit in commits[2:] for unit in commit.global_units}
    assert not gone & edge.blobs()


def test_furthest_commit_stays_while_rounds_are_repeated_if_it_is_wanted(edge: Edge) -> None:
    *_, last = commit_rounds(edge, 0, 1, 2, 3, keep_commits=2)
    for round_index, attempt in ((1, 3), (1, 4), (2, 4)):
        again = edge.commit(
            edge.train_all(), round_index, attempt, keep_commits=2, keep_furthest=True
        )
        assert numbers(again)[0] == 4
    commit = edge.model.roll_back(4, attempt=5)
    assert (commit.num_rounds, commit.attempt, commit.anew_since) == (4, 5, 0)
    assert list(commit.global_units) == list(last.global_units)
    assert {unit.weights_digest for unit in commit.global_units} <= edge.blobs()
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


@pytest.mark.parametrize("num_rounds", [2, 3, 4])
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
    following = edge.commit(edge.train_all(), num_rounds, attempt=7, keep_commits=3)
    assert following.anew_since == following.restore_point.anew_since == 5
    assert numbers(following)[0] == num_rounds


def test_older_attempts_cannot_commit_after_the_job_went_back(edge: Edge) -> None:
    commit_rounds(edge, 0, 1, 2, keep_commits=3)
    commit = edge.model.roll_back(2, attempt=5)
    for round_index in (2, 3):
        with pytest.raises(WrongStateError, match="attempt 2 cannot be committed: 2 rounds"):
            edge.commit(edge.train_all(), round_index, attempt=2)
    with pytest.raises(WrongStateError, match="attempt 5 of job job cannot go back"):
        edge.model.roll_back(1, attempt=5)
    assert edge.model.commit() == commit


def test_commit_that_is_not_kept_is_refused_with_those_that_are(edge: Edge) -> None:
    commit_rounds(edge, 0, 1, 2, 3, keep_commits=2)
    edge.commit(edge.train_all(), 4, keep_commits=2, is_candidate=True)
    edge.commit(edge.train_all(), 5, keep_commits=2, candidate_copied=True)
    before, blobs = edge.model.commit(), edge.blobs()
    for num_rounds in (0, 3, 7):
        with pytest.raises(NotFoundError, match="keeps the weights after 5, 6 rounds"):
            edge.model.roll_back(num_rounds, attempt=5)
    assert (edge.model.commit(), edge.blobs()) == (before, blobs)


# --- blobs and export


def test_only_blobs_of_the_commit_the_restore_point_and_the_vocabulary_are_kept(
    edge: Edge, vocabulary: bytes
) -> None:
    kept, commit = [], Commit()
    for round_index in range(3):
        commit = edge.commit(
            edge.train_all(), round_index, is_candidate=True, candidate_copied=True
        )
        kept.append(edge.blobs())
    named = set()
    for one in (commit, commit.restore_point):
        named |= {unit.weights_digest for unit in one.global_units}
        named |= {cluster.units[-1].optimizer_digest for cluster in one.clusters}
    assert kept[-1] == named | {edge.store.put_bytes(vocabulary)}
    assert len(kept[-2]) == len(kept[-1]), "the store grows with the rounds"


def test_export_loads_with_transformers(edge: Edge, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    commit = edge.commit(edge.train_all())
    folder = tmp_path / "export"
    folder.mkdir()
    edge.model.export(folder)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    for name, tensor in edge.weights(list(commit.global_units)).items():
        assert torch.equal(loaded[name], tensor), name
    assert len(AutoTokenizer.from_pretrained(folder)("w1 w2")["input_ids"]) >= 2
