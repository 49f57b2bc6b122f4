"""Decides the plans of every round of a job.

Start with `Planner.decide`, which runs before a round, and `Planner.round_committed`, which runs after it.
"""

import gc
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache

from collapipe.allocation import RoundPlan, idle_joules, reference_seconds
from collapipe.errors import AttemptFailedError, InfeasibleError
from collapipe.evaluation import evaluation_delay
from collapipe.job import JobConfig
from collapipe.planning.decisions import (
    Question,
    RoundDecision,
    decide,
    hosts_of,
    keep_current,
    link_shares,
    num_moved_blocks,
)
from collapipe.planning.job_hosts import JobHosts
from collapipe.planning.knowledge import HostKnowledge, Knowledge
from collapipe.planning.planner_state import PlannerState
from collapipe.planning.round_problem import ModelSizes, build_problem
from collapipe.rpc import ChannelPool
from collapipe.scheduler.host_calls import start_detached
from collapipe.scheduler.plan_messages import to_messages
from collapipe.scheduler.profiling import Ask, Explorer, profile_hosts, without_unknown
from collapipe.scheduler.telemetry_window import MIN_SCRAPES, Telemetry
from collapipe.telemetry import metrics
from collapipe.telemetry.estimates import Estimates
from collapipe.unit_costs import activation_bytes
from collapipe.v1 import job_pb2, plan_pb2, stage_pb2

logger = logging.getLogger(__name__)


class Planner:
    """Decides which host runs which units, and what each link may use.

    Args:
        knowledge: What is known about the hosts; the planner updates it.
        explorer: Only for the strategy `dssra`.
        profile: Measures hosts that are not in the knowledge yet. If it is `None`, no unknown device can join.
    """

    def __init__(
        self,
        job: JobConfig,
        sizes: ModelSizes,
        hosts: JobHosts,
        knowledge: Knowledge,
        telemetry: Telemetry,
        explorer: Explorer | None = None,
        profile: Callable[[JobHosts, Knowledge | None], Knowledge] | None = None,
    ) -> None:
        self._job = job
        self._sizes = sizes
        self._hosts = hosts
        self._knowledge = knowledge
        self._telemetry = telemetry
        self._current_plans: RoundPlan = ()
        """The plans of the last committed round; empty before the first one."""
        self._explorer = explorer
        self._profile = profile
        self._profiling: Future[Knowledge] | None = None
        self._profiled: JobHosts | None = None
        """The hosts of that call."""
        self._known_links: set[str] = set()
        """The links that were known when it began, so that it did not probe them."""
        self._addresses = {host_id: host.address for host_id, host in hosts.by_id.items()}
        self._created = telemetry.now()
        self._round_start: float | None = None
        self._has_committed = False

    @classmethod
    def for_job(
        cls,
        job: JobConfig,
        model: plan_pb2.ModelSpec,
        sizes: ModelSizes,
        hosts: JobHosts,
        channels: ChannelPool,
        ask: Ask,
        telemetry: Telemetry,
        state: PlannerState | None,
    ) -> "Planner":
        """Creates the planner of a job from its stored state; profiles the hosts if no state fits them.

        Args:
            ask: Makes the calls that measure hosts, so that they end with the job.
        """
        is_adaptive = job.schedule.strategy == "dssra"
        explorer = Explorer(job, model, hosts, channels, ask) if is_adaptive else None

        def profile(hosts: JobHosts, known: Knowledge | None) -> Knowledge:
            return profile_hosts(job, model, hosts, channels, ask, known)

        if is_adaptive:
            # This takes seconds, and longer if nothing was compiled before. Do it while the devices are profiled.
            threading.Thread(target=_load_search, daemon=True).start()
        if state is not None and state.strategy == job.schedule.strategy:
            knowledge = state.knowledge
            known = without_unknown(job, hosts, knowledge, ())
            if known is None:
                known, knowledge = hosts, profile(hosts, knowledge)
            if explorer is not None:
                explorer.take_hosts(known)
            planner = cls(job, sizes, known, knowledge, telemetry, explorer, profile)
            planner._current_plans = _among(known, state.current_plans)
            planner.take_hosts(hosts)
            return planner
        knowledge = profile(hosts, None)
        if state is not None:
            # The backlogs stay, because these hosts have used that energy. tau_ref of docs/scheduling.md (13)
            # stays, so that the penalties of all rounds can be compared.
            knowledge.backlogs = state.knowledge.backlogs
            knowledge.reference_seconds = state.knowledge.reference_seconds
        knowledge.activation_bytes = float(
            activation_bytes(
                sizes.hidden_size, job.task.max_length, job.model.activation_value_bytes
            )
        )
        planner = cls(job, sizes, hosts, knowledge, telemetry, explorer=explorer, profile=profile)
        if job.schedule.channel_bandwidth_hz:
            planner._detect_radio_links()
        return planner

    def state(self) -> PlannerState:
        """Returns the state from which `for_job` continues after a restart of the scheduler."""
        return PlannerState(
            strategy=self._job.schedule.strategy,
            knowledge=self._knowledge,
            current_plans=self._current_plans,
        )

    @property
    def hosts(self) -> JobHosts:
        """The hosts that plans may use."""
        return self._hosts

    @property
    def being_measured(self) -> set[str]:
        """Ids of devices that take no part before their profiles and links are known. `take_hosts` adds them when they are."""
        if self._profiling is None or self._profiled is None:
            return set()
        return self._profiled.by_id.keys() - self._hosts.by_id.keys()

    @property
    def is_measuring(self) -> bool:
        """Whether devices are profiled now, or their links probed."""
        return self._profiling is not None and not self._profiling.done()

    def forget_links(self, host_id: str) -> None:
        """Forgets the links of a device that takes no part at present, so that they are probed before it does."""
        self._knowledge.forget_links(host_id)

    def take_hosts(self, hosts: JobHosts) -> None:
        """Replaces the hosts, but leaves out devices that are not profiled yet.

        These are profiled during the training, and join at a later call. The old hosts stay if a cluster would have no
        device.
        """
        if self._profiling is not None and self._profiling.done():
            profiling, self._profiling = self._profiling, None
            try:
                found = profiling.result()
                measured = {
                    n: link for n, link in self._knowledge.links.items() if link.capacity_bps
                }
                self._knowledge.hosts = found.hosts | self._knowledge.hosts
                probed = {n: v for n, v in found.links.items() if n not in self._known_links}
                self._knowledge.links |= probed | measured
            except Exception as error:  # The job goes on without them.
                logger.warning("new devices cannot take part yet: %s", error)
        known = without_unknown(self._job, hosts, self._knowledge, self._hosts.by_id)
        if known != hosts and self._profiling is None and self._profile is not None:
            profile, knowledge = self._profile, self._knowledge.model_copy(deep=True)
            self._profiled = hosts
            self._known_links = {n for n, link in knowledge.links.items() if link.capacity_bps}
            self._profiling = start_detached(lambda: profile(hosts, knowledge))
        if known is None or known == self._hosts:
            return
        self._hosts = known
        self._addresses = {host_id: host.address for host_id, host in known.by_id.items()}
        self._current_plans = _among(known, self._current_plans)
        if self._explorer is not None:
            self._explorer.take_hosts(known)

    def decide(
        self,
        round_index: int,
        earlier: Sequence[plan_pb2.Plan],
        *,
        evaluation_only: bool = False,
    ) -> tuple[list[plan_pb2.Plan], RoundDecision]:
        """Decides one round.

        Args:
            earlier: The plans of an earlier attempt at this round; empty if there was none. A retry keeps what
                would change the result of the training.
            evaluation_only: The round trains nothing, so the current plans are kept.

        Raises:
            InfeasibleError: No plan satisfies the limits.
            AttemptFailedError: No plan satisfies the limits, but the probes of some links failed.
        """
        estimates = self._update_from_telemetry()
        self._update_from_explorer()
        if self._knowledge.reference_seconds is None:
            self._knowledge.reference_seconds = self._reference_seconds(round_index)
        problem = build_problem(
            self._job,
            self._sizes,
            self._hosts,
            self._knowledge,
            round_index=round_index,
            previous=self._current_plans,
            earlier=earlier,
        )
        schedule = self._job.schedule
        question = Question(schedule.strategy, schedule.segments, schedule.hysteresis, problem)
        decision = None
        if evaluation_only:
            decision = keep_current(question, "evaluation", estimates)
        elif self._telemetry_is_stale(estimates) and not earlier:
            decision = keep_current(question, "telemetry_missing", estimates)
        decision = decision or self._solve(question, estimates)
        decision = replace(decision, guessed=self._guessed(decision.plans))
        if not evaluation_only:
            self._export_metrics(decision)
        return to_messages(self._addresses, problem, decision.plans), decision

    def _guessed(self, plans: RoundPlan) -> tuple[str, ...]:
        """Returns the hosts with blocks that no profile, no round and no setting gives a speed."""
        hosts, known = self._hosts.by_id, self._knowledge.hosts
        return tuple(
            host_id
            for plan in plans
            for host_id in plan.segments
            if not hosts[host_id].speed and known.get(host_id, HostKnowledge()).source == "guess"
        )

    def predicted_step_seconds(self, decision: RoundDecision, cluster_index: int) -> float:
        """Returns the predicted time of a mini-batch; 0 if rounds have not measured all hosts, because it is a guess then."""
        if not self._knowledge.has_measured(decision.plans):
            return 0.0
        return decision.prediction.clusters[cluster_index].mini_batch_seconds

    def round_started(self, decision: RoundDecision) -> None:
        """Starts the telemetry window of the round, and the measurements of idle devices and links."""
        self._round_start = self._telemetry.now()
        if self._explorer is not None:
            self._explorer.start(decision.plans)

    def round_committed(
        self,
        decision: RoundDecision,
        summaries: Sequence[job_pb2.RoundSummary],
        seconds: float,
        *,
        is_typical: bool = True,
    ) -> None:
        """Adds the measured times and energy of a round, which took `seconds` from decision to commit.

        Args:
            is_typical: Whether all clusters ran in this attempt, and none was late. The times of another round are not used.
        """
        if is_typical:
            self._add_times(decision, summaries, seconds)
        self._has_committed = True
        self.take_over_round(decision, summaries, seconds)

    def take_over_round(
        self, decision: RoundDecision, summaries: Sequence[job_pb2.RoundSummary], seconds: float
    ) -> None:
        """Adds the plans and the energy of a committed round, whose hosts may be gone. It adds no times."""
        self._current_plans = _among(self._hosts, decision.plans)
        budgets = {
            host_id: host.energy_budget_joules
            for host_id, host in self._hosts.by_id.items()
            if host.energy_budget_joules
        }
        self._knowledge.update_backlogs(_energy_joules(decision, summaries, seconds), budgets)

    def _add_times(
        self,
        decision: RoundDecision,
        summaries: Sequence[job_pb2.RoundSummary],
        seconds: float,
    ) -> None:
        trained = [s.configure_seconds + s.training_seconds + s.gather_seconds for s in summaries]
        observed = seconds - evaluation_delay(summaries)
        # Without measurements of all its hosts, the prediction is a guess.
        if self._knowledge.has_measured(decision.plans):
            predicted = decision.prediction.full_round_seconds
            metrics.ROUND_PREDICTED_SECONDS.set(predicted)
            metrics.ROUND_OBSERVED_SECONDS.set(observed)
            metrics.ROUND_PREDICTION_ERROR_RATIO.observe(abs(predicted - observed) / observed)
        # In the first round, hosts also load code and open connections, so its times are not typical.
        if self._has_committed:
            moved = [
                num_moved_blocks(cluster.previous, plan) > 0
                for cluster, plan in zip(
                    decision.question.problem.clusters, decision.plans, strict=True
                )
            ]
            if not any(moved):
                slowest = summaries[trained.index(max(trained))]
                weights = _longest(slowest.pushed) + _longest(slowest.fetched)
                overhead = observed - slowest.training_seconds - weights
                self._knowledge.update_fixed_seconds(overhead)
            edge_server = self._hosts.edge_server.host_id
            for summary, has_moved in zip(summaries, moved, strict=True):
                self._knowledge.update_weights_rates(
                    {f"{t.host_id}>{edge_server}": (t.bytes, t.seconds) for t in summary.pushed}
                )
                # The states of moved blocks do not come from the edge server alone.
                if not has_moved:
                    self._knowledge.update_weights_rates(
                        {
                            f"{edge_server}>{t.host_id}": (t.bytes, t.seconds)
                            for t in summary.fetched
                        }
                    )

    def close(self) -> None:
        if self._explorer is not None:
            self._explorer.close()

    def _solve(self, question: Question, estimates: Estimates | None) -> RoundDecision:
        """Lets the strategy decide. If no plan exists, the error names the links whose probe failed."""
        try:
            return decide(question, estimates)
        except InfeasibleError as error:
            links = self._knowledge.links
            dead = [name for name, link in sorted(links.items()) if not link.capacity_bps]
            if not dead:
                raise
            raise AttemptFailedError(  # The next attempt probes them again.
                f"{error}; the probes of {', '.join(dead)} failed: the scheduler's log says why"
            ) from error

    def _telemetry_is_stale(self, estimates: Estimates | None) -> bool:
        """Returns whether `dssra` lacks recent telemetry of a host in the current plans."""
        if self._round_start is None or self._job.schedule.strategy != "dssra":
            return False
        return estimates is None or not hosts_of(self._current_plans).isdisjoint(estimates.missing)

    def _update_from_telemetry(self) -> Estimates | None:
        """Adds the measurements since the start of the last round, and returns them if there are any."""
        if self._round_start is None:
            return None
        estimates = self._telemetry.estimates(
            self._hosts, self._knowledge, since=self._round_start, earliest=self._created
        )
        if estimates is None:
            return None
        for reason in estimates.rejected:
            logger.warning("rejected implausible telemetry: %s", reason)
        if estimates.missing:
            logger.warning("no recent telemetry from %s", ", ".join(estimates.missing))
        self._knowledge.update(estimates, self._current_plans, link_shares(self._current_plans))
        return estimates

    def _update_from_explorer(self) -> None:
        if self._explorer is None:
            return
        found = self._explorer.collect()
        # The streams of links in use give newer rates than a probe.
        in_use = link_shares(self._current_plans)
        idle_links = {name: link for name, link in found.links.items() if name not in in_use}
        used_hosts = hosts_of(self._current_plans)
        self._knowledge.update_idle(found.seconds_per_sample, idle_links, used_hosts)

    def _detect_radio_links(self) -> None:
        """Waits for telemetry that shows which links are radio links. Hosts export it after a probe."""
        interval = self._telemetry.interval_seconds
        for _ in range(2 * MIN_SCRAPES):
            time.sleep(interval)
            since = self._telemetry.now() - interval
            estimates = self._telemetry.estimates(
                self._hosts, self._knowledge, since, self._created
            )
            if estimates is not None and not estimates.missing:
                self._knowledge.update_radio_links(estimates)
                return
        logger.warning("the hosts report no telemetry yet: radio links are treated as wired links")

    def _reference_seconds(self, round_index: int) -> float:
        """Returns tau_ref of docs/scheduling.md (13), for the micro-batches of the job file."""
        problem = build_problem(
            self._job,
            self._sizes,
            self._hosts,
            self._knowledge,
            round_index=round_index,
        )
        options = (self._job.schedule.num_micro_batches,)
        clusters = tuple(replace(c, micro_batch_options=options) for c in problem.clusters)
        problem = replace(problem, clusters=clusters)
        return reference_seconds(lambda strategy: problem) or 1.0

    def _export_metrics(self, decision: RoundDecision) -> None:
        metrics.PLAN_SOLVE_SECONDS.observe(decision.solve_seconds)
        if decision.kept_because:
            metrics.PLANS_KEPT.labels(decision.kept_because).inc()
            level = logging.INFO if decision.kept_because == "hysteresis" else logging.WARNING
            reasons = "; ".join([decision.kept_because, *decision.notes])
            logger.log(level, "the current plans are kept: %s", reasons)
        metrics.OBJECTIVE.labels("penalty").set(decision.prediction.penalty)
        metrics.OBJECTIVE.labels("drift").set(decision.prediction.drift)
        placed = dict.fromkeys(self._hosts.by_id, 0)
        for index, plan in enumerate(decision.plans):
            for host_id, segment in plan.segments.items():
                placed[host_id] += segment.num_blocks
            before = self._current_plans[index] if self._current_plans else None
            cluster = str(self._job.host_clusters[index])
            metrics.MOVED_BLOCKS.labels(cluster).inc(num_moved_blocks(before, plan))
            metrics.PLANNED_MICRO_BATCHES.labels(cluster).set(plan.num_micro_batches)
        for host_id, num_blocks in placed.items():
            metrics.PLACED_BLOCKS.labels(host_id).set(num_blocks)


def _among(hosts: JobHosts, plans: RoundPlan) -> RoundPlan:
    """Returns plans that need no other hosts than these; otherwise none."""
    return plans if hosts_of(plans) <= hosts.by_id.keys() else ()


def _longest(transfers: Iterable[job_pb2.WeightsTransfer]) -> float:
    return max((transfer.seconds for transfer in transfers), default=0.0)


def _energy_joules(
    decision: RoundDecision, summaries: Sequence[job_pb2.RoundSummary], seconds: float
) -> dict[str, float]:
    """Returns the energy of each host in a round of `seconds`: measured for computing, predicted for sending."""
    problem = decision.question.problem
    energy = idle_joules(problem, seconds)
    for index, cluster in enumerate(decision.prediction.clusters):
        plan, hosts = decision.plans[index], problem.clusters[index].hosts
        passes = problem.local_steps * plan.num_parts
        # A cluster that ended early has sent less. One that was left out may have sent everything.
        sent_share = (summaries[index].local_steps or problem.local_steps) / problem.local_steps
        times = {report.host_id: report.times for report in summaries[index].stages}
        for stage in cluster.stages:
            watts = hosts[stage.host_id].busy_watts
            sending = sent_share * (stage.energy_joules - passes * watts * stage.compute_seconds)
            measured = times.get(
                stage.host_id, stage_pb2.StageTimes()
            )  # A late cluster may lack it.
            busy = measured.forward_seconds + measured.backward_seconds
            energy[stage.host_id] = energy.get(stage.host_id, 0.0) + sending + watts * busy
    return energy


@lru_cache(1)
def _load_search() -> None:
    """Imports what only `dssra` needs, and compiles its search."""
    importlib.import_module("cvxpy")
    importlib.import_module("collapipe.allocation.search.labels").compile_search()
    # The garbage collector holds up all threads while it looks at every object. These imports made a million that stay.
    gc.collect()
    gc.freeze()
