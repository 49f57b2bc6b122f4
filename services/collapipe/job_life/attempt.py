"""Decides what happens in the rounds of one attempt at a job.

`step` takes what was observed, and returns the new state and what is to be done. `TRANSITIONS` has all cases. A cluster is named by
its index in the job.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from collapipe.job_life import round_clusters
from collapipe.job_life.attempt_events import (
    Action,
    AgreeOnMasks,
    Because,
    CancelAll,
    CancelCalls,
    CatchUp,
    CaughtUp,
    ClusterFailed,
    ClusterFinished,
    Commit,
    Committed,
    Copied,
    CountNoRows,
    Done,
    EndTraining,
    Event,
    Fail,
    Failed,
    Masked,
    MoveRestorePoint,
    Plan,
    Planned,
    ReportLeftOut,
    RoundWanted,
    Run,
    SpendPrivacy,
    Ticked,
    TrainingBegan,
)
from collapipe.job_life.commits import Kept
from collapipe.job_life.failing_clusters import (
    FailingClusters,
    after_failure,
    after_round,
    leave_out,
)
from collapipe.job_life.machine import transitions
from collapipe.job_life.restore_points import becomes_candidate
from collapipe.job_life.round_clusters import RoundClusters, RoundRules
from collapipe.job_life.tries import Failure, Kind


class Phase(Enum):
    """What an attempt is doing."""

    BETWEEN_ROUNDS = "no round, or the last one is done"
    FAILED = "the round has failed"
    CATCHING_UP = "some clusters repeat committed rounds"
    PLANNING = "the round is being planned"
    MASKING = "clusters agree on masks"
    RUNNING = "clusters train or evaluate"
    COMMITTING = "the edge server commits"


@dataclass(frozen=True)
class AttemptRules:
    """What the job file and the deployment say about all rounds of an attempt.

    Args:
        replicate_every: Rounds after which optimizer states are copied.
        evaluate_every: Rounds after which the model is evaluated; 0 for never.
        is_masked: Whether the changes of the clusters are masked.
        is_private: Whether each round counts in the privacy account.
        edge_server: Its host id.
        edge_process: Its process.
        is_retry: Whether there was an attempt before.
    """

    clusters: RoundRules
    replicate_every: int
    evaluate_every: int
    is_masked: bool
    is_private: bool
    edge_server: str
    edge_process: str
    is_retry: bool


@dataclass(frozen=True)
class AttemptState:
    """One attempt at a job.

    Args:
        commit: The attempt and the number of rounds of the last commit.
        began_at: Committed rounds from which the attempt went on.
        failing: The clusters that have failed in this and in earlier attempts.
        kept: What clusters have kept of the next round.
        failures_before: `kept.num_failures` when the attempt began.
        is_behind: Whether the clusters that kept nothing still have to repeat committed rounds.
        candidate: The commit whose optimizer states are copied to disks at present.
        has_copy: The clusters that have copied them, or have none to copy.
        has_plan: False if no plan was possible for the last round, or for a round that clusters repeat before it. Then links may have to be
            measured again.
        trains: Whether the round trains. Otherwise, it only evaluates the last commit.
        decides_anew: Whether a repeated round may be decided anew if it cannot be repeated as it was.
        clusters: Who is late or has failed in this round.
        total_samples: How many rows the clusters of a masked round may have together; 0 without masks.
        samples: The rows of each cluster that has finished.
        processes: The process of each host, by cluster and host id.
        running: The clusters whose calls are open.
        first_failed: The first cluster because of which the round fails.
        is_ending: Whether all calls were cancelled.
        is_revealed: Whether the keys that remove the masks may have been revealed. Then the round must keep its clusters.
    """

    rules: AttemptRules
    commit: tuple[int, int]
    began_at: int
    clusters: RoundClusters
    failing: FailingClusters = field(default_factory=FailingClusters)
    kept: Kept | None = None
    failures_before: int = 0
    is_behind: bool = False
    candidate: tuple[int, int] | None = None
    has_copy: frozenset[int] = frozenset()
    phase: Phase = Phase.BETWEEN_ROUNDS
    has_plan: bool = True
    trains: bool = True
    decides_anew: bool = True
    total_samples: int = 0
    samples: Mapping[int, int] = field(default_factory=dict)
    processes: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    running: frozenset[int] = frozenset()
    first_failed: int | None = None
    is_ending: bool = False
    is_revealed: bool = False

    @property
    def num_rounds(self) -> int:
        """Number of committed rounds, which is also the index of the present round."""
        return self.commit[1]

    @property
    def all_clusters(self) -> frozenset[int]:
        """The indices of all clusters."""
        return frozenset(range(self.rules.clusters.num_clusters))

    @property
    def present(self) -> frozenset[int]:
        """The clusters whose results count in this round."""
        return self.all_clusters - self.clusters.late

    @property
    def evaluates(self) -> bool:
        """Whether the round begins with an evaluation of the model that it starts from."""
        every = self.rules.evaluate_every
        return not self.trains or bool(every and self.num_rounds and not self.num_rounds % every)

    @property
    def makes_candidate(self) -> bool:
        """Whether the optimizer states of the next commit are to be copied."""
        rules = self.rules
        return becomes_candidate(
            self.num_rounds + 1, rules.replicate_every, self.began_at, has_failed=rules.is_retry
        )

    @property
    def is_copied(self) -> bool:
        """Whether all clusters have copied the optimizer states of the candidate."""
        return self.candidate is not None and self.has_copy == self.all_clusters


def begin_attempt(
    rules: AttemptRules, commit: tuple[int, int], failing: FailingClusters, kept: Kept | None
) -> AttemptState:
    """Returns the state at the beginning of an attempt that goes on from a commit."""
    return AttemptState(
        rules,
        commit,
        began_at=commit[1],
        clusters=RoundClusters(rules.clusters),
        failing=failing,
        kept=kept,
        failures_before=kept.num_failures if kept else 0,
        is_behind=kept is not None,
    )


_OF_SCHEDULER = (Kind.CANCELLED, Kind.BUG)
"""Failures that are not those of the cluster."""

Result = tuple[AttemptState, list[Action]]


def step(state: AttemptState, event: Event, now: float) -> Result:
    """Returns the state after an event, and what is to be done, in order.

    Args:
        now: Seconds from any fixed start.

    Raises:
        KeyError: The event cannot happen in this phase.
    """
    result: Result = TRANSITIONS[state.phase, type(event)].decide(state, event, now)
    return result


def _wanted(state: AttemptState, event: RoundWanted, now: float) -> Result:
    state = replace(state, trains=event.trains, decides_anew=event.decides_anew)
    if state.kept is not None and state.is_behind:
        behind = state.all_clusters - state.kept.processes.keys()
        return replace(state, phase=Phase.CATCHING_UP, has_plan=False), [CatchUp(behind)]
    return _plan(state)


def _failed_on_the_way(state: AttemptState, event: ClusterFailed, now: float) -> Result:
    state = replace(state, has_plan=True)
    if event.failure.kind in _OF_SCHEDULER:
        return state, []
    failing, goes_on = _count_failure(state, event)
    kept = state.kept
    if goes_on and state.rules.clusters.may_leave_out:
        kept = None  # If all clusters repeat the rounds, they can go on without this one.
    if kept is not None:
        # Once for each attempt, though several clusters may fail at the same time.
        kept = replace(kept, num_failures=state.failures_before + 1)
    return replace(state, failing=failing, kept=kept), []


def _not_caught_up(state: AttemptState, event: Failed, now: float) -> Result:
    if event.failure.kind is Kind.NO_PLAN and state.decides_anew:
        # The next attempt may change the rounds, but then all clusters repeat them.
        return _fail(replace(state, kept=None), Because.CANNOT_REPEAT, event.cluster)
    return _failed(state, event, now)


def _caught_up(state: AttemptState, event: CaughtUp, now: float) -> Result:
    if event.differing:
        return _fail(replace(state, kept=None), Because.DIFFERS, event.differing[0])
    return _plan(replace(state, is_behind=False))


def _plan(state: AttemptState) -> Result:
    kept = frozenset(state.kept.processes) if state.kept else frozenset[int]()
    state = replace(state, phase=Phase.PLANNING, has_plan=False)
    return state, [Plan(kept, state.decides_anew)]


def _planned(state: AttemptState, event: Planned, now: float) -> Result:
    # An evaluation waits for all clusters.
    recorded = event.left_out if event.is_decided else None
    clusters = round_clusters.begin(
        state.rules.clusters,
        recorded if state.trains else (),
        failed=event.failed if state.trains else (),
        may_fail=not event.is_revealed,
    )
    for cluster in state.failing.pausing(state.num_rounds):
        clusters, _ = round_clusters.fail(clusters, cluster)
    state = replace(
        state,
        has_plan=True,
        clusters=clusters,
        total_samples=event.total_samples,
        samples={},
        processes=event.processes,
        first_failed=None,
        is_ending=False,
        is_revealed=event.is_revealed,
    )
    if event.total_samples:
        return replace(state, phase=Phase.MASKING), [AgreeOnMasks(state.present)]
    return _run(state)


def _masked(state: AttemptState, event: Masked, now: float) -> Result:
    return _run(state)


def _not_masked(state: AttemptState, event: Failed, now: float) -> Result:
    if event.cluster is None:
        return _failed(state, event, now)
    failed = ClusterFailed(event.cluster, event.failure)
    state, goes_on = _without(state, failed, Because.CLUSTER_FAILED)
    if not goes_on:
        return _failed(state, event, now)
    # Control units make keys once in an attempt.
    state, fails = _fail(state, Because.NEEDS_NEW_MASKS, event.cluster)
    return state, [*goes_on, *fails]


def _run(state: AttemptState) -> Result:
    actions: list[Action] = []
    if state.trains and state.rules.is_private:
        actions.append(SpendPrivacy())
    clusters, running = state.clusters, set[int]()
    for cluster in sorted(state.all_clusters):
        ended = False
        if state.kept is not None and cluster in state.kept.processes:
            clusters, ended = round_clusters.end(clusters, cluster)
        if cluster in clusters.late:
            if state.evaluates and cluster in clusters.failed:
                actions.append(CountNoRows(cluster))
        elif not ended:
            running.add(cluster)
    state = replace(state, phase=Phase.RUNNING, clusters=clusters, running=frozenset(running))
    if not running:
        return _when_all_finished(state, actions)
    return state, [*actions, Run(state.running)]


def _training_began(state: AttemptState, event: TrainingBegan, now: float) -> Result:
    return replace(state, clusters=round_clusters.train(state.clusters, now)), []


def _copied(state: AttemptState, event: Copied, now: float) -> Result:
    return replace(state, has_copy=state.has_copy | {event.cluster}), []


def _cluster_finished(state: AttemptState, event: ClusterFinished, now: float) -> Result:
    clusters, _ = round_clusters.end(state.clusters, event.cluster)
    state = replace(
        state,
        clusters=clusters,
        samples={**state.samples, event.cluster: event.num_samples},
        running=state.running - {event.cluster},
    )
    return _when_all_finished(state, [])


def _cluster_failed(state: AttemptState, event: ClusterFailed, now: float) -> Result:
    state = replace(state, running=state.running - {event.cluster})
    if event.cluster in state.clusters.late and event.failure.kind is not Kind.BUG:
        return _when_all_finished(state, [])
    state, actions = _without(state, event, Because.CLUSTER_FAILED)
    if actions:
        if state.evaluates:
            actions.append(CountNoRows(event.cluster))
        return _when_all_finished(state, actions)
    if state.first_failed is None:
        state = replace(state, first_failed=event.cluster)
    ends_all = _ends_all(state.rules, event.failure) or not _keeps(state)
    if ends_all and not state.is_ending and state.running:
        state = replace(state, is_ending=True)
        actions.append(CancelAll())
    return _when_all_finished(state, actions)


def _ticked(state: AttemptState, event: Ticked, now: float) -> Result:
    clusters = round_clusters.look(state.clusters, now)
    if clusters is not state.clusters:
        state = replace(state, clusters=clusters)
    to_end = clusters.to_end & state.running
    if not to_end:
        return state, []
    ends: Action = (
        CancelCalls(to_end) if state.rules.clusters.may_leave_out else EndTraining(to_end)
    )
    return state, [ends]


def _when_all_finished(state: AttemptState, actions: list[Action]) -> Result:
    if state.running:
        return state, actions
    if state.first_failed is not None:
        if _keeps(state):
            state = replace(state, kept=_kept(state))
        state, after = _fail(state, Because.CLUSTER_FAILED, state.first_failed)
    elif state.trains:
        state, after = _commit(replace(state, kept=None))
    elif state.is_copied:
        state, after = replace(state, kept=None, phase=Phase.COMMITTING), [MoveRestorePoint()]
    else:
        state, after = replace(state, kept=None, phase=Phase.BETWEEN_ROUNDS), [Done()]
    return state, [*actions, *after]


def _keeps(state: AttemptState) -> bool:
    """Returns whether clusters that end the round may keep their results. Masked ones are of no use without all other clusters."""
    return state.trains and not state.rules.is_masked


def _kept(state: AttemptState) -> Kept | None:
    """Returns what clusters keep of a round that failed; `None` if others were left out, because they could not catch up alone."""
    if state.clusters.failed:
        return None
    return Kept(
        state.commit,
        state.rules.edge_process,
        {i: state.processes[i] for i in sorted(state.clusters.ended)},
        state.failures_before + 1 if state.kept else 0,
    )


def _commit(state: AttemptState) -> Result:
    """Commits without the clusters that are late, and without those for whose rows a masked round has no room."""
    actions: list[Action] = []
    while state.total_samples:
        rows = {i: state.samples[i] for i in sorted(state.present)}
        num_rows = sum(rows.values())
        if num_rows <= state.total_samples:
            break
        most = max(rows, key=rows.__getitem__)
        failed = ClusterFailed(most, Failure(Kind.HOST_FAULTY))
        state, goes_on = _without(state, failed, Because.TOO_MANY_ROWS, num_rows)
        if not goes_on:
            state = replace(state, phase=Phase.FAILED)
            return state, [*actions, Fail(Because.TOO_MANY_ROWS, most, num_rows)]
        actions += goes_on
    commit = Commit(
        state.clusters.late, state.clusters.failed, state.makes_candidate, state.is_copied
    )
    is_revealed = state.is_revealed or bool(state.total_samples)
    state = replace(state, phase=Phase.COMMITTING, is_revealed=is_revealed)
    return state, [*actions, commit]


def _committed(state: AttemptState, event: Committed, now: float) -> Result:
    failing = state.failing
    for cluster in sorted(state.present) if state.trains else ():
        failing = after_round(failing, cluster, state.num_rounds)
    has_copy = state.has_copy
    if state.trains and event.candidate is not None and event.candidate[1] == event.commit[1]:
        has_copy = state.clusters.failed  # They have no optimizer states.
    state = replace(
        state,
        phase=Phase.BETWEEN_ROUNDS,
        failing=failing,
        commit=event.commit,
        candidate=event.candidate,
        has_copy=has_copy,
    )
    return state, [Done()]


def _not_committed(state: AttemptState, event: Failed, now: float) -> Result:
    if state.trains and event.cluster in state.present and not state.is_revealed:
        failed = ClusterFailed(event.cluster, Failure(Kind.HOST_FAULTY))
        state, goes_on = _without(state, failed, Because.NOT_COMMITTED)
        if goes_on:
            state, after = _commit(state)
            return state, [*goes_on, *after]
    return _failed(state, event, now)


def _without(
    state: AttemptState, event: ClusterFailed, because: Because, num_rows: int = 0
) -> tuple[AttemptState, list[Action]]:
    """Counts a failure. Returns the actions with which the round goes on without the cluster; none if it does not."""
    if event.failure.kind in _OF_SCHEDULER:
        return state, []
    failing, goes_on = _count_failure(state, event)
    clusters, may = state.clusters, False
    if goes_on and state.first_failed is None:
        clusters, may = round_clusters.fail(clusters, event.cluster)
    if not may:
        return replace(state, failing=failing), []
    failing, again = leave_out(failing, event.cluster, state.num_rounds)
    left_out = ReportLeftOut(event.cluster, again, because, num_rows)
    return replace(state, failing=failing, clusters=clusters), [left_out]


def _count_failure(state: AttemptState, event: ClusterFailed) -> tuple[FailingClusters, bool]:
    is_faulty = event.failure.kind in (Kind.HOST_FAULTY, Kind.HOST_REFUSES)
    return after_failure(state.failing, event.cluster, is_faulty=is_faulty)


def _ends_all(rules: AttemptRules, failure: Failure) -> bool:
    """Returns whether the failure of one cluster cancels the round of the others at once. Otherwise they finish it first."""
    if failure.kind in (Kind.HOST_LOST, Kind.HOST_FAULTY):
        return failure.host_id == rules.edge_server
    return failure.kind in (Kind.HOST_REFUSES, Kind.CANCELLED, Kind.BUG)


def _failed(state: AttemptState, event: Failed, now: float) -> Result:
    return _fail(state, Because.PHASE_FAILED, event.cluster)


def _fail(state: AttemptState, because: Because, cluster: int | None) -> Result:
    return replace(state, phase=Phase.FAILED), [Fail(because, cluster)]


_BETWEEN, _FAILED, _PLANNING = Phase.BETWEEN_ROUNDS, Phase.FAILED, Phase.PLANNING
_RUNNING, _COMMITTING = Phase.RUNNING, Phase.COMMITTING
_AFTER_RUNNING = (_COMMITTING, _BETWEEN, _FAILED)

TRANSITIONS = transitions(
    (
        (_BETWEEN, RoundWanted, _wanted, (Phase.CATCHING_UP, _PLANNING)),
        (_FAILED, RoundWanted, _wanted, (Phase.CATCHING_UP, _PLANNING)),
        (Phase.CATCHING_UP, ClusterFailed, _failed_on_the_way, (Phase.CATCHING_UP,)),
        (Phase.CATCHING_UP, CaughtUp, _caught_up, (_PLANNING, _FAILED)),
        (Phase.CATCHING_UP, Failed, _not_caught_up, (_FAILED,)),
        (_PLANNING, Planned, _planned, (Phase.MASKING, _RUNNING, _COMMITTING)),
        (_PLANNING, Failed, _failed, (_FAILED,)),
        (Phase.MASKING, Masked, _masked, (_RUNNING,)),
        (Phase.MASKING, Failed, _not_masked, (_FAILED,)),
        (_RUNNING, TrainingBegan, _training_began, (_RUNNING,)),
        (_RUNNING, Copied, _copied, (_RUNNING,)),
        (_RUNNING, ClusterFinished, _cluster_finished, (_RUNNING, *_AFTER_RUNNING)),
        (_RUNNING, ClusterFailed, _cluster_failed, (_RUNNING, *_AFTER_RUNNING)),
        (_RUNNING, Ticked, _ticked, (_RUNNING,)),
        (_COMMITTING, Committed, _committed, (_BETWEEN,)),
        (_COMMITTING, Failed, _not_committed, (_COMMITTING, _FAILED)),
    )
)
"""All cases, by phase and event."""
