"""What the scheduler does in the rounds of one attempt at an imitated job: it does what the real decisions say."""

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from collapipe.edge_server import commits
from collapipe.errors import WrongStateError
from collapipe.job_life import attempt_events as life
from collapipe.job_life.attempt import (
    TRANSITIONS,
    AttemptState,
    Phase,
    begin_attempt,
    step,
)
from collapipe.job_life.commits import Kept, can_catch_up, usable, where_to_begin
from collapipe.job_life.job_devices import Device
from collapipe.job_life.tries import Failure, Kind
from collapipe.scheduler.attempt_facts import candidate_of, commits_of, committed, name_of
from collapipe.v1.edge_server_pb2 import CommitRoundRequest
from collapipe.v1.plan_pb2 import Attempt, ClusterState, Commit

from .store import NUM_ROUNDS, Record, RoundFailedError, Store
from .world import EDGE_SERVER, JOB_ID, Outcome, digests, mix, promise, state_of, unit_of

if TYPE_CHECKING:
    from .job import ImitatedJob

_MOST_SECONDS_TO_END = 3.0
_ROWS = 10


def by_cluster(devices: Iterable[Device]) -> dict[int, dict[str, str]]:
    """Returns the processes of devices, by cluster and host id."""
    found: dict[int, dict[str, str]] = {}
    for device in devices:
        found.setdefault(device.cluster, {})[device.host_id] = device.process
    return found


class AttemptShell:
    """What the scheduler does in the rounds of one attempt.

    Args:
        processes: The devices of each cluster, with their processes.
    """

    def __init__(self, job: "ImitatedJob", processes: dict[int, dict[str, str]]) -> None:
        self.owner, self.world, self.store = job, job.world, job.store
        self.processes = processes
        self.edge_process = str(job.world.edge.process)
        self.rules = replace(
            job.rules.rounds, edge_process=self.edge_process, is_retry=job.store.attempt > 0
        )
        self.holders: dict[int, Mapping[str, str]] = {}
        """The processes that have the optimizer states of each cluster, by host id."""
        self.events: deque[life.Event] = deque()
        self.error = Failure(Kind.BUG)
        self.errors: dict[int, Failure] = {}
        self.timeline: list[tuple[float, int, life.Event]] = []
        self.running: set[int] = set()
        self.ended_early: set[int] = set()
        self._number = 0
        self.outcomes: dict[int, life.Event] = {}
        """What will come of each cluster that runs."""
        self.differing: tuple[int, ...] = ()
        self.repeated: set[tuple[int, int]] = set()
        """The clusters and numbers of rounds that this attempt has repeated."""
        self.late_since: float | None = None
        self.kept: frozenset[int] = frozenset()
        """The clusters that have run the present round in the attempt before."""
        self.counted: set[int] = set()
        """The clusters that have evaluated the model of this round, or need not."""
        self._recover_result(job.world.edge.commit)
        last = self._with_copied_candidate(job.world.edge.commit)
        if self.store.num_committed != last.num_rounds:
            job.write(self._note_committed(last))
        beginning = self._where_to_begin(last, job.kept)
        job.num_to_repeat = beginning.num_rounds - last.restore_point.num_rounds
        self.results = dict(job.results) if beginning.kept else {}
        if beginning.kept is not None:
            self.holders = dict(beginning.kept.processes)
            held = [self.world.processes(of.keys()) == of for of in self.holders.values()]
            promise(all(held), "results are kept whose optimizer states are lost")
        self._is_trained = beginning.is_trained
        if beginning.num_rounds > last.num_rounds:
            last = commits.going_to(last, beginning.num_rounds, self.store.attempt)
            job.world.edge.commit = last
            job.write(self._note_committed(last))
        self.commit = Commit()
        restores = not (beginning.kept or beginning.is_trained)
        self.commit.CopyFrom(last.restore_point if restores else last)
        self.commit.ClearField("candidate")
        self.restore_point = last.restore_point
        is_there = self.commit.num_rounds == beginning.num_rounds
        promise(is_there, "the attempt begins with another commit than was decided")
        self.state: AttemptState = begin_attempt(
            self.rules, name_of(self.commit), job.job.failing, beginning.kept
        )
        self.world.tell(
            f"attempt {self.store.attempt} goes on from round {self.commit.num_rounds}"
            + (f" with the kept results of {sorted(self.results)}" if self.results else "")
        )

    @property
    def is_trained(self) -> bool:
        """Whether no round follows."""
        rules = self.owner.rules
        return (
            self._is_trained
            or self.state.num_rounds >= NUM_ROUNDS
            or not rules.is_private_enough(len(self.store.spent), 1)
        )

    def _note_committed(self, commit: Commit) -> Callable[[Store], object]:
        def note(store: Store) -> None:
            store.num_committed = commit.num_rounds
            store.num_reached = max(store.num_reached, commit.num_rounds)

        return note

    def _recover_result(self, last: Commit) -> None:
        index = last.num_rounds - 1
        record = self.store.rounds.get(index)
        if index < 0 or self.store.results.get(index) == last.attempt or record is None:
            return
        if record.attempt == last.attempt and record.is_measured:
            self._store_result(index, last)

    def _store_result(self, index: int, commit: Commit) -> None:
        def store_all(store: Store) -> None:
            store.results[index] = commit.attempt
            self._note_committed(commit)(store)

        self.owner.write(store_all)

    def _with_copied_candidate(self, last: Commit) -> Commit:
        self.store.num_reached = max(self.store.num_reached, last.num_rounds)
        if self.store.copied_candidate is None or self.store.copied_candidate != candidate_of(last):
            return last
        attempt = Attempt(round_index=last.num_rounds - 1, attempt=last.attempt)
        return self._commit(attempt, [], (), is_candidate=False, candidate_copied=True)

    def _where_to_begin(self, last: Commit, kept: Kept | None) -> Any:
        facts = commits_of(last)
        since = range(facts.restorable + 1, facts.num_rounds + 1)
        is_limited = (
            self.owner.rules.max_private_rounds < 10**6
        )  # Then it may go to the furthest one.
        is_kept = self.world.num_clusters == 1 or is_limited or facts.kept.issuperset(since)
        promise(is_kept, "a commit since the restore point is not kept")
        left = max(self.owner.rules.max_private_rounds - len(self.store.spent), 0)
        if kept is not None:
            present = {id: p for of in self.processes.values() for id, p in of.items()}
            kept = usable(kept, facts.last, self.edge_process, present)
        if kept is not None:
            found = [self.store.rounds.get(i) for i in range(facts.restorable, facts.num_rounds)]
            recorded = [one.attempt if one else None for one in found]
            may = can_catch_up(facts, self.rules.replicate_every, recorded, left)
            kept = kept if may else None
        return where_to_begin(facts, kept, NUM_ROUNDS, left)

    # One round.

    def run(self, *, trains: bool) -> None:
        """Runs a round; raises `RoundFailedError`."""
        self.errors, self.timeline, self.ended_early = {}, [], set()
        self.counted = set()
        failures_before = self.state.kept.num_failures if self.state.kept else 0
        self.events.append(life.RoundWanted(trains, self.owner.job.decides_anew))
        is_done, evaluates = False, replace(self.state, trains=trains).evaluates
        while not is_done:
            event = self._next_event()
            phase = self.state.phase
            self.state, actions = step(self.state, event, self.world.now)
            self.owner.seen.add((phase, type(event)))
            text = f"{type(event).__name__} leads from {phase.name} to {self.state.phase.name}"
            promise(self.state.phase in TRANSITIONS[phase, type(event)].to, text)
            if self.world.tells and not isinstance(event, life.Ticked):
                self.world.tell(f"  {event} → {', '.join(map(str, actions))}")
            self._check_lateness()
            for action in actions:
                self._do(action)
                is_done = isinstance(action, life.Done)
            more = self.state.kept.num_failures - failures_before if self.state.kept else 0
            promise(more <= 1, "an attempt counts twice among those that fail on their way")
        expected = self.state.clusters.failed if trains else set(range(self.world.num_clusters))
        lacking = expected - self.counted if evaluates else set()
        promise(not lacking, f"the evaluation waits for clusters {lacking} for ever")
        if trains:
            self._learn()

    def _check_lateness(self) -> None:
        """Checks that late clusters end soon."""
        if self.state.phase is not Phase.RUNNING or not self.state.clusters.overdue:
            self.late_since = None
            return
        if self.late_since is None:
            self.late_since = self.world.now
        waited = self.world.now - self.late_since
        promise(waited <= _MOST_SECONDS_TO_END, f"it has waited {waited:.1f} s for late clusters")

    def _next_event(self) -> life.Event:
        if self.events:
            return self.events.popleft()
        self._store_copied()
        at = self.timeline[0][0]
        if at > self.world.now + 1.0:
            self.world.now += 1.0
            return life.Ticked()
        self.world.now = max(self.world.now, at)
        _, _, event = heapq.heappop(self.timeline)
        return self._observed(event) or self._next_event()

    def _observed(self, event: life.Event) -> life.Event | None:
        """Lets what happens in a cluster change the world. Returns the event, or `None` if its call was ended before."""
        if not isinstance(event, (life.ClusterFinished, life.ClusterFailed)):
            cluster = event.cluster  # type: ignore[union-attr]
            if isinstance(event, life.Copied):
                moments = digests(self.commit.candidate.clusters[cluster])[1]
                if not self.world.has_moments(cluster, moments):
                    return None
                if moments is not None:
                    self.world.units[cluster].on_disk.add(moments)
            if isinstance(event, life.TrainingBegan) and cluster in self.running:
                self.counted.add(cluster)  # It evaluates first.
            return event if cluster in self.running else None
        cluster = event.cluster
        if cluster not in self.running:
            return None
        self.running.discard(cluster)
        if isinstance(event, life.ClusterFailed):
            self.errors[cluster] = event.failure
            return event
        if self.state.trains:
            state = self._trained(cluster)
            attempt = (self.commit.num_rounds, self.store.attempt)
            self.world.edge.pushed[cluster] = (*attempt, digests(state)[0])
            self.results[cluster] = state
            return life.ClusterFinished(cluster, state.num_samples)
        self.counted.add(cluster)
        return life.ClusterFinished(cluster, 0)

    def _trained(self, cluster: int) -> ClusterState:
        index = self.commit.num_rounds
        steps = 1 if cluster in self.ended_early else 2
        if cluster in self.record.ended_early:
            steps = 1
        state = self._compute(cluster, self.commit.clusters[cluster], index, steps)
        if self.rules.is_masked and self.world.happens(0.02):
            state.num_samples *= 100
        return state

    def _compute(self, cluster: int, base: ClusterState, index: int, steps: int) -> ClusterState:
        """Returns the state of a cluster after it has trained a round. It has to depend on all that the round depends on."""
        weights, moments = digests(base)
        unit = self.world.units[cluster]
        micro_batches = self.store.rounds[index].micro_batches[cluster]
        new = mix(weights, moments or 0, index, cluster, steps, micro_batches)
        if self.world.happens(unit.differs):
            new = mix(new, self.world.random.randrange(1000))
            self.world.tell(f"cluster {cluster} computes differently")
            self.world.edge.not_repeatable.add(index + 1)
        unit.in_memory[new] = self.processes[cluster]
        while len(unit.in_memory) > 4:
            del unit.in_memory[next(iter(unit.in_memory))]
        state = state_of(cluster, mix(new, 1), new, _ROWS)
        state.step_index = steps
        return state

    def _do(self, action: life.Action) -> None:
        match action:
            case life.CatchUp():
                self._catch_up(action.clusters)
            case life.Plan():
                self._plan(action)
            case life.AgreeOnMasks():
                self._agree_on_masks(action.clusters)
            case life.SpendPrivacy():
                key = (self.store.attempt, self.commit.num_rounds)
                self.owner.write(lambda store: store.spent.append(key))
            case life.ReportLeftOut():
                # A repeated round may go on without a cluster that fails again and again. Its record says so.
                self.world.edge.expect_others(self.commit.num_rounds + 1)
            case life.CountNoRows():
                self.counted.add(action.cluster)
            case life.Run():
                for cluster in sorted(action.clusters):
                    self._begin(cluster)
            case life.EndTraining():
                for cluster in sorted(action.clusters - self.ended_early):
                    self.ended_early.add(cluster)
                    self._at(0.5, self.outcomes[cluster])
            case life.CancelCalls():
                self._end_calls(action.clusters, Kind.PASSING)
            case life.CancelAll():
                self._end_calls(self.running, Kind.CANCELLED)
            case life.Commit():
                self._commit_clusters(action)
            case life.MoveRestorePoint():
                attempt = Attempt(
                    round_index=self.commit.num_rounds - 1, attempt=self.store.attempt
                )
                is_last = commits.is_already_committed(self.world.edge.commit, attempt)
                promise(is_last, "the restore point of another commit is moved")
                if self.world.happens(0.01):
                    self._fail(Failure(Kind.HOST_LOST, EDGE_SERVER))
                    return
                commit = self._commit(attempt, [], (), is_candidate=False, candidate_copied=True)
                self.events.append(committed(commit))
            case life.Done():
                promise(not self.running, "a round is done while clusters run")
            case life.Fail():
                promise(not self.running, "a round fails while clusters run")
                self.timeline.clear()
                raise RoundFailedError(self._why(action))

    def _why(self, fail: life.Fail) -> Failure:
        match fail.because:
            case life.Because.CLUSTER_FAILED:
                return self.errors[fail.cluster or 0]
            case life.Because.PHASE_FAILED:
                return self.error
        return Failure(Kind.PASSING)

    def _fail(self, failure: Failure, cluster: int | None = None) -> None:
        self.error = failure
        self.events.append(life.Failed(failure, cluster))

    def _at(self, seconds: float, event: life.Event) -> None:
        self._number += 1
        heapq.heappush(self.timeline, (self.world.now + seconds, self._number, event))

    def _end_calls(self, clusters: Collection[int], kind: Kind) -> None:
        for cluster in sorted(clusters):
            seconds = self.world.random.uniform(0.1, 1.0)
            self._at(seconds, life.ClusterFailed(cluster, Failure(kind)))

    def _begin(self, cluster: int) -> None:
        """Begins the part of a cluster, and decides what will come of it."""
        promise(cluster not in self.running, f"cluster {cluster} has two attempts running")
        promise(cluster not in self.results, f"cluster {cluster} runs although its result is kept")
        self.running.add(cluster)
        key = (self.store.attempt, self.commit.num_rounds)
        is_spent = not (self.state.trains and self.rules.is_private) or key in self.store.spent
        promise(is_spent, "a cluster trains, and the privacy account does not have it")
        has_other = self.commit.candidate.attempt != self.store.attempt
        is_other = self.commit.HasField("candidate") and has_other
        promise(not is_other, "a cluster is to copy the candidate of another attempt")
        self._forget_copies(cluster)
        _, moments = digests(self.commit.clusters[cluster])
        if self.state.trains and not self.world.has_moments(cluster, moments):
            is_restored = self.state.num_rounds == self.restore_point.num_rounds
            promise(not is_restored, "the optimizer states of the restore point exist nowhere")
            promise(self.state.kept is None, f"cluster {cluster} has not caught up")
            self.outcomes[cluster] = life.ClusterFailed(cluster, Failure(Kind.PASSING))
            self._at(0.1, self.outcomes[cluster])
            return
        outcome = self._outcome(cluster)
        # Until then, it evaluates. It may fail before.
        latest = 3.0 if outcome.failure is not None else min(3.0, outcome.at - 0.1)
        self._at(self.world.random.uniform(0.2, latest), life.TrainingBegan(cluster))
        if outcome.copied_at is not None:
            self._at(outcome.copied_at, life.Copied(cluster))
        end: life.Event = life.ClusterFinished(cluster, _ROWS)
        if outcome.failure is not None:
            end = life.ClusterFailed(cluster, outcome.failure)
        self.outcomes[cluster] = end
        self._at(outcome.at, end)

    def _outcome(self, cluster: int) -> Outcome:
        draw, unit = self.world.random, self.world.units[cluster]
        at = draw.uniform(1.0, 5.0) * (8.0 if self.world.happens(unit.slow) else 1.0)
        failure = self.world.disturb_cluster(cluster, self.processes[cluster])
        copied_at = None
        if self.state.candidate is not None and not self.world.happens(0.1):
            copied_at = draw.uniform(0.3, 6.0)
            waits = not self.state.trains or self.state.makes_candidate
            if waits and failure is None:
                at = max(at, copied_at + 0.1)
        return Outcome(at, failure, copied_at)

    def _forget_copies(self, cluster: int) -> None:
        """Lets a control unit keep only the copies that it is told of."""
        kept = [self.restore_point.clusters[cluster]]
        if self.commit.HasField("candidate"):
            kept.append(self.commit.candidate.clusters[cluster])
        wanted = {moments for _, moments in map(digests, kept) if moments is not None}
        self.world.units[cluster].on_disk &= wanted

    def _store_copied(self) -> None:
        state = self.state
        if state.is_copied and state.candidate != self.store.copied_candidate:
            candidate = state.candidate
            with suppress(RoundFailedError):  # The next change of the job stores it, too.
                self.owner.write(lambda store: setattr(store, "copied_candidate", candidate))

    def _catch_up(self, clusters: Collection[int]) -> None:
        restore, last = self.restore_point, self.commit
        states = {i: restore.clusters[i] for i in sorted(clusters)}
        kept = {commit.num_rounds: commit for commit in (*last.history, last)}
        for number in range(restore.num_rounds + 1, last.num_rounds + 1):
            record = self.store.rounds[number - 1]
            if self.world.happens(0.01):
                lacks_hosts = not self.state.decides_anew or self.world.happens(0.5)
                kind = Kind.NO_PLAN if lacks_hosts or self.world.happens(0.5) else Kind.PASSING
                self._fail(Failure(kind, lacks_hosts=lacks_hosts))
                return
            self.world.now += 0.5
            running = sorted(states.keys() - record.late)
            again = self.repeated.intersection((cluster, number) for cluster in running)
            promise(not again, "an attempt repeats a round twice, which control units refuse")
            self.repeated.update((cluster, number) for cluster in running)
            failures = {i: self.world.disturb_cluster(i, self.processes[i]) for i in running}
            failed = {i: failure for i, failure in failures.items() if failure is not None}
            if failed:  # Those that have not failed themselves are ended.
                for cluster in running:
                    failure = failed.get(cluster, Failure(Kind.CANCELLED))
                    self.events.append(life.ClusterFailed(cluster, failure))
                self._fail(next(iter(failed.values())))
                return
            for cluster in sorted(states):
                if cluster not in record.late:
                    _, moments = digests(states[cluster])
                    has = self.world.has_moments(cluster, moments)
                    promise(has, f"cluster {cluster} cannot catch up: its states exist nowhere")
                    self.holders[cluster] = self.processes[cluster]
                    steps = 1 if cluster in record.ended_early else 2
                    states[cluster] = self._compute(cluster, states[cluster], number - 1, steps)
                weights = int(kept[number].global_units[0].weights_digest)
                _, moments = digests(states[cluster])
                is_new = cluster in record.failed
                if is_new:
                    self.holders.pop(cluster, None)
                states[cluster] = state_of(cluster, weights, None if is_new else moments)
        differing = [
            i for i, state in states.items() if digests(state)[1] != digests(last.clusters[i])[1]
        ]
        self.differing = tuple(differing)
        self.events.append(life.CaughtUp(self.differing))

    def _plan(self, action: life.Plan) -> None:
        """Plans and records a round, as `RoundPlanning.decide` does."""
        promise(not self.differing, "a cluster goes on with other optimizer states than before")
        index, store, world = self.commit.num_rounds, self.store, self.world
        self.results = {i: self.results[i] for i in sorted(action.kept)}
        self.kept = action.kept
        self.counted |= action.kept  # They have evaluated in the attempt before.
        world.now += 0.1
        if world.happens(0.01):
            kind = world.random.choice((Kind.NO_PLAN, Kind.INVALID, Kind.LASTING))
            self._fail(Failure(kind, lacks_hosts=world.happens(0.5)))
            return
        earlier = store.rounds.get(index)
        if earlier is not None and earlier.attempt < self.commit.anew_since:
            earlier = None
        is_repeated = index < store.num_reached
        drawn = [world.random.randrange(1, 9) for _ in range(world.num_clusters)]
        micro_batches = earlier.micro_batches if earlier else tuple(drawn)
        if earlier is not None and world.happens(0.02):
            if not action.decides_anew:
                self._fail(Failure(Kind.NO_PLAN, lacks_hosts=True))
                return
            # Clusters that have kept their results keep the plans by which they ran.
            micro_batches = tuple(
                old if cluster in action.kept else new
                for cluster, (old, new) in enumerate(zip(micro_batches, drawn, strict=True))
            )
            world.tell(f"  round {index + 1} is decided anew")
            world.edge.expect_others(index + 1)
        repeated = earlier if is_repeated or (earlier and earlier.is_revealed) else None
        devices = {cluster: frozenset(of) for cluster, of in self.processes.items()}
        record = Record(self.store.attempt, micro_batches, devices)
        if repeated is not None:
            record = replace(repeated, attempt=store.attempt, micro_batches=micro_batches)
            record = replace(record, devices=devices, is_measured=False)
        is_masked = self.rules.is_masked and self.state.trains
        total = 2 * _ROWS * world.num_clusters if is_masked else 0
        record = replace(record, total_samples=total)
        self.record = record
        self.owner.write(lambda store: store.rounds.__setitem__(index, record))
        processes = dict(self.processes)
        for cluster in action.kept:
            assert self.state.kept is not None
            processes[cluster] = dict(self.state.kept.processes[cluster])
        self.events.append(
            life.Planned(
                processes,
                is_decided=is_repeated or record.is_revealed,
                left_out=record.late,
                failed=record.failed,
                is_revealed=record.is_revealed,
                total_samples=total,
            )
        )

    def _agree_on_masks(self, clusters: Collection[int]) -> None:
        for cluster in sorted(clusters):
            if self.world.happens(self.world.units[cluster].fails / 4):
                self._fail(Failure(Kind.HOST_LOST, unit_of(cluster)), cluster)
                return
        self.events.append(life.Masked())

    def _commit_clusters(self, action: life.Commit) -> None:
        index, world = self.commit.num_rounds, self.world
        clusters = self.state.clusters
        states = []
        for cluster in range(world.num_clusters):
            base = self.commit.clusters[cluster]
            if cluster in clusters.ended and cluster not in clusters.failed:
                states.append(self.results[cluster])
            else:
                weights, moments = digests(base)
                is_new = cluster in clusters.failed
                states.append(state_of(cluster, weights, None if is_new else moments))
        self.record = replace(
            self.record,
            late=action.left_out,
            failed=action.failed,
            ended_early=frozenset(
                i for i in clusters.ended - clusters.failed if self.results[i].step_index == 1
            ),
            is_revealed=self.rules.is_masked,
            is_measured=True,
        )
        record = self.record
        self.owner.write(lambda store: store.rounds.__setitem__(index, record))
        present = frozenset(range(world.num_clusters)) - action.left_out
        rows = sum(states[each].num_samples for each in present)
        promise(not record.total_samples or rows <= record.total_samples, "too many rows")
        for each in action.left_out:
            before = digests(self.commit.clusters[each])[1]
            is_kept = digests(states[each])[1] in (before, None)
            promise(is_kept, f"late cluster {each} has trained in a commit")
        if self.rules.is_masked:
            world.edge.reveal(index, present)
        if world.happens(world.edge.refuses):
            cluster = world.random.choice(sorted(present))
            self._fail(Failure(Kind.PASSING), cluster)
            return
        attempt = Attempt(job_id=JOB_ID, round_index=index, attempt=self.store.attempt)
        try:
            commit = self._commit(
                attempt,
                states,
                action.left_out,
                is_candidate=action.is_candidate,
                candidate_copied=action.candidate_copied,
                kept=self.kept,
            )
        except WrongStateError:
            is_restarted = str(world.edge.process) != self.edge_process
            promise(is_restarted, "a result is used that the edge server has lost")
            self._fail(Failure(Kind.PASSING))
            return
        for each in sorted(present):
            has = world.has_moments(each, digests(commit.clusters[each])[1])
            promise(has, f"the commit has optimizer states of cluster {each} that exist nowhere")
        world.tell(f"  round {commit.num_rounds} is committed")
        if world.happens(0.01):
            world.tell("  the scheduler does not hear of it")
            self._fail(Failure(Kind.HOST_LOST, EDGE_SERVER))
            return
        self.commit = commit
        self.events.append(committed(commit))

    def _commit(
        self,
        attempt: Attempt,
        states: list[ClusterState],
        late: Collection[int],
        *,
        is_candidate: bool,
        candidate_copied: bool,
        kept: Collection[int] = (),
    ) -> Commit:
        request = CommitRoundRequest(
            attempt=attempt,
            clusters=states,
            late_clusters=sorted(late),
            is_candidate=is_candidate,
            candidate_copied=candidate_copied,
            keep_commits=1,
            keep_furthest=self.owner.rules.max_private_rounds < 10**6,
        )
        commit = Commit()
        commit.CopyFrom(self.world.edge.commit_round(request, kept))
        return commit

    def _learn(self) -> None:
        for cluster in range(self.world.num_clusters):
            if cluster in self.state.clusters.failed:
                self.holders.pop(cluster, None)
            elif cluster not in self.state.clusters.late:
                self.holders[cluster] = self.state.processes[cluster]
        self.restore_point = self.commit.restore_point
        self._store_result(self.commit.num_rounds - 1, self.commit)
