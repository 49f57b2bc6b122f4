"""Decides how the commits of a job follow each other, and which attempts may push to the next one."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from collapipe.errors import InvalidInputError, NotFoundError, WrongStateError
from collapipe.v1 import edge_server_pb2, plan_pb2


@dataclass(frozen=True)
class Head:
    """What pushes need to know of a commit.

    Args:
        num_rounds: Committed rounds.
        attempt: The attempt that committed the last one.
        num_rounds_restorable: Committed rounds of its restore point.
        weights: Digest of the weights of each unit.
        restorable_weights: The same of the restore point.
    """

    num_rounds: int
    attempt: int
    num_rounds_restorable: int
    weights: tuple[str, ...]
    restorable_weights: tuple[str, ...]


def head_of(commit: plan_pb2.Commit) -> Head:
    """Returns what pushes need to know of a commit."""
    restorable = commit.restore_point
    return Head(
        commit.num_rounds,
        commit.attempt,
        restorable.num_rounds,
        tuple(unit.weights_digest for unit in commit.global_units),
        tuple(unit.weights_digest for unit in restorable.global_units),
    )


def initial_commit(
    job_id: str, units: Sequence[plan_pb2.UnitState], num_clusters: int
) -> plan_pb2.Commit:
    """Returns the commit before the first round. It is its own restore point."""
    clusters = [
        plan_pb2.ClusterState(cluster_index=index, units=units) for index in range(num_clusters)
    ]
    initial = plan_pb2.Commit(job_id=job_id, global_units=units, clusters=clusters)
    initial.restore_point.CopyFrom(_without_other_commits(initial))
    return initial


def check_is_next(last: Head, attempt: plan_pb2.Attempt) -> None:
    """Refuses an attempt whose round is not the next one.

    The first round of a new run of the job follows the last commit or the restore point.

    Raises:
        WrongStateError: Another round is the next one.
    """
    rounds = {last.num_rounds}
    if attempt.attempt > last.attempt:
        rounds.add(last.num_rounds_restorable)
    if attempt.attempt < last.attempt or attempt.round_index not in rounds:
        raise WrongStateError(
            f"round {attempt.round_index}, attempt {attempt.attempt} cannot be committed: "
            f"{last.num_rounds} rounds are committed, the last by attempt {last.attempt}, so the "
            f"next is round {' or '.join(map(str, sorted(rounds)))}"
        )


def is_already_committed(last: plan_pb2.Commit, attempt: plan_pb2.Attempt) -> bool:
    """Returns whether this attempt at this round has made the last commit, so that the request came twice."""
    return (attempt.round_index + 1, attempt.attempt) == (last.num_rounds, last.attempt)


def with_candidate_restorable(
    last: plan_pb2.Commit, request: edge_server_pb2.CommitRoundRequest
) -> plan_pb2.Commit:
    """Returns the last commit with its candidate as restore point."""
    commit = plan_pb2.Commit()
    commit.CopyFrom(last)
    commit.restore_point.CopyFrom(last.candidate)
    commit.ClearField("candidate")
    _set_history(commit, list(last.history), request)
    return commit


def began_with(last: plan_pb2.Commit, attempt: plan_pb2.Attempt) -> plan_pb2.Commit:
    """Returns the commit with which an attempt at a round began: the last one, or its restore point."""
    return last if attempt.round_index == last.num_rounds else last.restore_point


def present_clusters(
    last: plan_pb2.Commit, request: edge_server_pb2.CommitRoundRequest
) -> list[plan_pb2.ClusterState]:
    """Returns the states of the clusters that are not late.

    Raises:
        InvalidInputError: The state of a cluster or of a unit is missing, or all clusters are late.
    """
    indices = [cluster.cluster_index for cluster in request.clusters]
    if indices != list(range(len(last.clusters))):
        raise InvalidInputError(
            f"clusters {indices} prepared round {request.attempt.round_index}, but a commit needs all of "
            f"{list(range(len(last.clusters)))}, in this order"
        )
    expected = list(range(len(last.global_units)))
    for cluster in request.clusters:
        found = [unit.unit_index for unit in cluster.units]
        if found != expected:
            raise InvalidInputError(
                f"cluster {cluster.cluster_index} prepared units {found}, but the model has units {expected}: run "
                "the same version everywhere"
            )
    late = set(request.late_clusters)
    present = [cluster for cluster in request.clusters if cluster.cluster_index not in late]
    if not present:
        raise InvalidInputError(
            f"all clusters are late for round {request.attempt.round_index}, but a commit needs the weights of at least one: "
            "run the same version everywhere"
        )
    return present


def following(
    last: plan_pb2.Commit,
    request: edge_server_pb2.CommitRoundRequest,
    global_units: Sequence[plan_pb2.UnitState],
) -> plan_pb2.Commit:
    """Returns the commit that follows the last one. All clusters have the new weights.

    Args:
        global_units: The averaged weights.
    """
    attempt = request.attempt
    commit = plan_pb2.Commit(
        job_id=last.job_id,
        num_rounds=attempt.round_index + 1,
        global_units=global_units,
        clusters=request.clusters,
        attempt=attempt.attempt,
        anew_since=last.anew_since,
        late_clusters=request.late_clusters,
        restore_point=last.restore_point,
    )
    for cluster in commit.clusters:
        for unit, averaged in zip(cluster.units, global_units, strict=True):
            unit.weights_digest = averaged.weights_digest
            unit.frozen_digest = averaged.frozen_digest
    # The optimizer states of an earlier run's candidate may be lost.
    if attempt.attempt == last.attempt and last.HasField("candidate"):
        kept = commit.restore_point if request.candidate_copied else commit.candidate
        kept.CopyFrom(last.candidate)
    _set_history(commit, _kept_commits(last).values(), request)
    if request.is_candidate:
        commit.candidate.CopyFrom(_without_other_commits(commit))
    return commit


def going_to(last: plan_pb2.Commit, num_rounds: int, attempt: int) -> plan_pb2.Commit:
    """Returns the commit after going to a kept one; the last one itself if that changes nothing.

    The restore point keeps its optimizer states. Any other commit has none. Going to the last commit or an earlier one makes it the
    restore point. Going to a later one leaves the restore point as it is.

    Args:
        num_rounds: Committed rounds of the kept commit.
        attempt: An attempt number that is newer than that of the last commit.

    Raises:
        NotFoundError: That commit is not kept.
        WrongStateError: The attempt is not newer.
    """
    if num_rounds == last.num_rounds == last.restore_point.num_rounds:
        return last
    if attempt <= last.attempt:
        raise WrongStateError(
            f"attempt {attempt} of job {last.job_id} cannot go back to an earlier commit, because the last commit is of "
            f"attempt {last.attempt}: ask again"
        )
    kept = _kept_commits(last)
    if num_rounds not in kept:
        raise NotFoundError(
            f"job {last.job_id} cannot go back to {num_rounds} committed rounds: the edge server keeps the weights "
            f"after {', '.join(map(str, sorted(kept)))} rounds (training.keep_commits and the restore point), so "
            "choose one of these numbers"
        )
    commit = plan_pb2.Commit()
    if num_rounds == last.restore_point.num_rounds:
        commit.CopyFrom(last.restore_point)
        commit.restore_point.CopyFrom(last.restore_point)
        commit.attempt = attempt
    else:
        commit.CopyFrom(_for_history(kept[num_rounds]))
        for cluster in commit.clusters:
            cluster.units.extend(commit.global_units)
        commit.attempt = attempt
        if num_rounds > last.num_rounds:
            commit.restore_point.CopyFrom(last.restore_point)
        else:
            commit.anew_since = attempt
            # protobuf ends the process if a message is copied into its own field.
            commit.restore_point.CopyFrom(_without_other_commits(commit))
    commit.history.extend(one for one in last.history if one.num_rounds < num_rounds)
    return commit


def _without_other_commits(commit: plan_pb2.Commit) -> plan_pb2.Commit:
    """Returns a commit without its restore point, its candidate and its history."""
    copied = plan_pb2.Commit()
    copied.CopyFrom(commit)
    for field in ("restore_point", "candidate", "history"):
        copied.ClearField(field)
    return copied


def _for_history(commit: plan_pb2.Commit) -> plan_pb2.Commit:
    """Returns the part of a commit that stays when its optimizer states are gone."""
    copied = _without_other_commits(commit)
    for cluster in copied.clusters:
        cluster.ClearField("units")
    return copied


def _set_history(
    commit: plan_pb2.Commit,
    earlier: Iterable[plan_pb2.Commit],
    request: edge_server_pb2.CommitRoundRequest,
) -> None:
    """Chooses the other commits that a commit keeps, newest first."""
    others = {one.num_rounds: one for one in earlier}
    before = {number: one for number, one in others.items() if number < commit.num_rounds}
    furthest = max(others, default=0)
    later = request.keep_furthest and furthest > commit.num_rounds
    kept = [_for_history(others[furthest])] if later else []
    kept += [
        _for_history(before[num_rounds])
        for position, num_rounds in enumerate(sorted(before, reverse=True), 1)
        if position < request.keep_commits
        # A cluster that lost a host repeats the rounds since the restore point, maybe without the other clusters.
        or (len(commit.clusters) > 1 and num_rounds > commit.restore_point.num_rounds)
    ]
    del commit.history[:]
    commit.history.extend(kept)


def _kept_commits(last: plan_pb2.Commit) -> dict[int, plan_pb2.Commit]:
    """Returns the commits to which a person can go back, by their numbers of rounds."""
    return {kept.num_rounds: kept for kept in (last, *last.history, last.restore_point)}
