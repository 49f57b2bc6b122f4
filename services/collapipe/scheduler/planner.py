"""Decides every round of a job: keeps what is known up to date, asks the strategy, writes the plans.

Reading order: `decide` before a round, `observe` after it.
"""

import importlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from collapipe.allocation import (
    RoundPlan,
    predict,
    strategy_for,
)
from collapipe.errors import CollapipeError, InfeasibleError
from collapipe.job import JobConfig
from collapipe.rpc import ChannelPool
from collapipe.scheduler.decisions import (
    Question,
    RoundDecision,
    decide,
    full_round_seconds,
    keep,
    moved,
)
from collapipe.scheduler.host_registry import JobHosts
from collapipe.scheduler.knowledge import Knowledge
from collapipe.scheduler.plan_messages import to_message
from collapipe.scheduler.planner_state import KeptState, members
from collapipe.scheduler.profiling import Explorer, probe_links, profile_hosts
from collapipe.scheduler.round_problem import ModelFacts, build_problem, micro_batch_options
from collapipe.telemetry import metrics
from collapipe.telemetry.estimates import Estimates, estimate
from collapipe.telemetry.sources import TelemetrySource
from collapipe.v1 import job_pb2, plan_pb2, scheduler_pb2

logger = logging.getLogger(__name__)

_LEAST_SCRAPES = 4
_BYTES_PER_VALUE = 4


@dataclass(frozen=True)
class Telemetry:
    """Where measurements come from.

    Args:
        source: Answers with raw samples.
        interval_seconds: Between two scrapes.
        now: The clock of the samples, in Unix seconds.
    """

    source: TelemetrySource
    interval_seconds: float
    now: Callable[[], float] = time.time


class Planner:
    """Decides where a job's units run, and what every link is given.

    Args:
        job: The job.
        facts: Its model.
        hosts: Who takes part.
        knowledge: What is known of them.
        telemetry: What rounds measured.
        in_force: The plan of the last committed round, if there is one.
        explorer: Looks at what rounds do not use; `None` where nobody chooses.
    """

    def __init__(
        self,
        job: JobConfig,
        facts: ModelFacts,
        hosts: JobHosts,
        knowledge: Knowledge,
        telemetry: Telemetry,
        in_force: RoundPlan | None = None,
        explorer: Explorer | None = None,
    ) -> None:
        self._job = job
        self._facts = facts
        self._hosts = hosts
        self._knowledge = knowledge
        self._telemetry = telemetry
        self._in_force = in_force
        self._explorer = explorer
        self._addresses = {host.host_id: host.address for host in _participants(hosts)}
        self._round_began: float | None = None
        self._decision: RoundDecision | None = None
        self._observed_rounds = 0
        self._born = telemetry.now()

    @classmethod
    def for_job(
        cls,
        job: JobConfig,
        model: plan_pb2.ModelSpec,
        facts: ModelFacts,
        hosts: JobHosts,
        channels: ChannelPool,
        telemetry: Telemetry,
        kept: Mapping[str, Any] | None,
    ) -> "Planner":
        """Profiles the hosts of a job, or goes on with what was kept of it.

        Args:
            job: The job.
            model: Its model.
            facts: What its units weigh.
            hosts: Who takes part.
            channels: To them.
            telemetry: What rounds measure.
            kept: What `to_json` returned, of hosts that may be others by now.
        """
        chooses = job.schedule.strategy == "dssra"
        explorer = Explorer(job, model, hosts, channels) if chooses else None
        if chooses:  # a second, while the devices are profiled
            threading.Thread(target=importlib.import_module, args=("cvxpy",), daemon=True).start()
        before = KeptState.read(kept)
        if before is not None and before.fits(job, hosts):
            return cls(job, facts, hosts, before.knowledge, telemetry, before.in_force, explorer)
        knowledge = profile_hosts(job, model, hosts, channels)
        if chooses:
            knowledge.links = probe_links(hosts, channels)
        if (
            before is not None
        ):  # what the hosts that stayed owe, they owe; and V means what it meant
            knowledge.backlogs = before.knowledge.backlogs
            knowledge.reference_seconds = before.knowledge.reference_seconds
        knowledge.activation_bytes = float(
            facts.hidden_size * job.task.max_length * _BYTES_PER_VALUE
        )
        planner = cls(job, facts, hosts, knowledge, telemetry, None, explorer)
        if job.schedule.channel_bandwidth_hz:
            planner._listen_to_radios()
        return planner

    def to_json(self) -> dict[str, Any]:
        """Returns what a restarted scheduler needs to go on."""
        strategy, hosts = self._job.schedule.strategy, members(self._hosts)
        return KeptState(strategy, hosts, self._knowledge, self._in_force).to_json()

    def decide(
        self,
        round_index: int,
        replayed_micro_batches: Sequence[int] | None,
        *,
        evaluation_only: bool = False,
    ) -> tuple[list[plan_pb2.Plan], RoundDecision]:
        """Decides one round.

        Args:
            round_index: The round.
            replayed_micro_batches: M of each cluster in an earlier attempt at it, which a retry keeps.
            evaluation_only: Nothing is trained, so nothing need move.

        Raises:
            InfeasibleError: No plan satisfies the limits.
        """
        estimates = self._listen()
        if self._explorer is not None:
            found = self._explorer.collect()
            in_force = self._in_force or ()
            in_use = _links_of(in_force)  # by now: their streams know them better
            idle_links = {name: link for name, link in found.links.items() if name not in in_use}
            working = {stage.host_id for plan in in_force for stage in plan.stages}
            self._knowledge.learn_idle(found.seconds_per_sample, idle_links, working)
        if self._knowledge.reference_seconds is None:
            self._knowledge.reference_seconds = self._reference_seconds(round_index)
        problem = build_problem(
            self._job,
            self._facts,
            self._hosts,
            self._knowledge,
            round_index=round_index,
            previous=self._in_force,
            replayed_micro_batches=replayed_micro_batches,
        )
        schedule = self._job.schedule
        question = Question(schedule.strategy, schedule.segments, schedule.hysteresis, problem)
        decision = None
        if evaluation_only:
            decision = keep(question, "evaluation", estimates)
        elif self._is_blind(estimates) and replayed_micro_batches is None:
            decision = keep(question, "telemetry_missing", estimates)
        decision = decision or self._ask_strategy(question, estimates)
        self._decision = decision
        if not evaluation_only:
            self._export(decision)
        plans = [
            to_message(self._addresses, problem, index, plan)
            for index, plan in enumerate(decision.plans)
        ]
        return plans, decision

    def _ask_strategy(self, question: Question, estimates: Estimates | None) -> RoundDecision:
        """Asks the strategy; an answer that there is no plan names the links that no probe came through."""
        try:
            return decide(question, estimates)
        except InfeasibleError as error:
            metrics.PLANS_INFEASIBLE.inc()
            links = self._knowledge.links
            dead = [name for name, link in sorted(links.items()) if not link.capacity_bps]
            if not dead:
                raise
            raise InfeasibleError(
                f"{error}; no probe came through from {', '.join(dead)} within its deadline: see the scheduler's log"
            ) from error

    def _is_blind(self, estimates: Estimates | None) -> bool:
        """Whether nothing fresh was heard of some host that the plan in force uses, where that is what is decided on."""
        if self._round_began is None or self._in_force is None:
            return False
        if self._job.schedule.strategy != "dssra":
            return False
        working = {stage.host_id for plan in self._in_force for stage in plan.stages}
        return estimates is None or not working.isdisjoint(estimates.missing)

    def begin(self) -> None:
        """Notes that the decided round begins."""
        self._round_began = self._telemetry.now()
        decision = self._decision
        if self._explorer and decision and decision.kept != "evaluation":
            self._explorer.start(decision.plans)

    def close(self) -> None:
        """Looks at nothing more."""
        if self._explorer is not None:
            self._explorer.close()

    def observe(self, summaries: Sequence[job_pb2.RoundSummary], seconds: float) -> None:
        """Takes in how the decided round went.

        Args:
            summaries: Of each cluster.
            seconds: The whole round, from its plan to its commit.
        """
        decision = self._decision
        assert decision is not None
        self._in_force = decision.plans
        trained = [s.configure_seconds + s.training_seconds + s.gather_seconds for s in summaries]
        measured = [t + s.evaluation_seconds for t, s in zip(trained, summaries, strict=True)]
        observed = seconds - max(measured) + max(trained)
        if self._is_measured(decision):
            predicted = full_round_seconds(decision)
            metrics.ROUND_PREDICTED_SECONDS.set(predicted)
            metrics.ROUND_OBSERVED_SECONDS.set(observed)
            metrics.ROUND_PREDICTION_ERROR_RATIO.observe(abs(predicted - observed) / observed)
        slowest = max(range(len(summaries)), key=trained.__getitem__)
        summary = summaries[slowest]
        has_moved = any(cluster.migrate_seconds for cluster in decision.prediction.clusters)
        # the first round of a process also loads code and makes connections
        if self._observed_rounds:
            if not has_moved:
                self._knowledge.learn_round(
                    observed - summary.training_seconds - summary.gather_seconds
                )
            self._knowledge.learn_gathering(
                {
                    f"{sent.host_id}>{cluster.control_unit.host_id}": (sent.bytes, sent.seconds)
                    for sent in each.gathered
                }
                for cluster, each in zip(self._hosts.clusters, summaries, strict=True)
            )
        self._observed_rounds += 1
        self._charge(decision, summaries)

    def _is_measured(self, decision: RoundDecision) -> bool:
        """Whether rounds have measured every host that the plan uses: else the prediction is a guess."""
        known = self._knowledge.hosts
        return all(
            stage.host_id in known and known[stage.host_id].origin == "rounds"
            for plan in decision.plans
            for stage in plan.stages
        )

    def _listen(self) -> Estimates | None:
        """Learns what was measured since the last round began; `None` when nothing could be."""
        if self._round_began is None or self._in_force is None:
            return None
        estimates = self._ask(self._round_began)
        if estimates is None:
            return None
        for words in estimates.rejected:
            logger.warning("telemetry rejected: %s", words)
        if estimates.missing:
            logger.warning("no fresh telemetry of %s", ", ".join(estimates.missing))
        shares = _links_of(self._in_force)
        self._knowledge.learn(estimates, self._in_force, shares)
        return estimates

    def _listen_to_radios(self) -> None:
        """Learns which links are radio links, which hosts tell once they have been probed."""
        interval = self._telemetry.interval_seconds
        for _ in range(2 * _LEAST_SCRAPES):
            time.sleep(interval)
            estimates = self._ask(self._telemetry.now() - interval)
            if estimates is not None and not estimates.missing:
                self._knowledge.learn_radios(estimates)
                return
        logger.warning("the hosts' telemetry is not there yet: radio links are taken for wires")

    def _ask(self, began: float) -> Estimates | None:
        telemetry = self._telemetry
        end = telemetry.now()
        # at least some scrapes, but nothing from before this job
        start = max(self._born, min(began, end - _LEAST_SCRAPES * telemetry.interval_seconds))
        instances = {
            host.metrics_address: host.host_id
            for host in _participants(self._hosts)
            if host.metrics_address
        }
        try:
            series = telemetry.source.window(start, end)
        except CollapipeError as error:
            metrics.TELEMETRY_FAILURES.labels(telemetry.source.name).inc()
            logger.warning("no telemetry from %s: %s", telemetry.source.name, error)
            return None
        return estimate(
            series,
            instances,
            self._knowledge.priors(),
            end=end,
            max_age_seconds=_LEAST_SCRAPES * telemetry.interval_seconds,
        )

    def _reference_seconds(self, round_index: int) -> float:
        """tau_ref of design (13): what equal segments would take, or whatever placement there is."""
        problem = build_problem(
            self._job, self._facts, self._hosts, self._knowledge, round_index=round_index
        )
        options = micro_batch_options(self._job)
        fixed = (self._job.schedule.num_micro_batches if len(options) > 1 else options[0],)
        nominal = replace(
            problem,
            clusters=tuple(replace(c, micro_batch_options=fixed) for c in problem.clusters),
        )
        for strategy in ("pipeline", "proportional"):
            try:
                seconds = predict(nominal, strategy_for(strategy)(nominal)).round_seconds
            except InfeasibleError:
                continue
            if seconds > 0 and math.isfinite(seconds):
                return seconds
        return 1.0

    def _charge(self, decision: RoundDecision, summaries: Sequence[job_pb2.RoundSummary]) -> None:
        """Energy of the round: computing as the stages report it, sending as predicted."""
        energy: dict[str, float] = {}
        problem = decision.question.problem
        for index, cluster in enumerate(decision.prediction.clusters):
            plan, hosts = decision.plans[index], problem.clusters[index].hosts
            passes = problem.local_steps * plan.num_micro_batches
            times = {report.host_id: report.times for report in summaries[index].stages}
            for stage in cluster.stages:
                watts = hosts[stage.host_id].busy_watts
                sending = stage.energy_joules - passes * watts * stage.compute_seconds
                seconds = (
                    times[stage.host_id].forward_seconds + times[stage.host_id].backward_seconds
                )
                energy[stage.host_id] = energy.get(stage.host_id, 0.0) + sending + watts * seconds
        budgets = {
            host.host_id: host.energy_budget_joules
            for host in _participants(self._hosts)
            if host.energy_budget_joules
        }
        self._knowledge.charge(energy, budgets)
        for host_id in budgets:
            metrics.BACKLOG.labels(host_id).set(self._knowledge.backlogs[host_id])

    def _export(self, decision: RoundDecision) -> None:
        metrics.PLAN_SOLVE_SECONDS.observe(decision.solve_seconds)
        if decision.kept:
            metrics.PLANS_KEPT.labels(decision.kept).inc()
            level = logging.INFO if decision.kept == "hysteresis" else logging.WARNING
            logger.log(
                level, "the plan in force is kept: %s", "; ".join([decision.kept, *decision.notes])
            )
        prediction = decision.prediction
        metrics.OBJECTIVE.labels("penalty").set(prediction.penalty)
        metrics.OBJECTIVE.labels("drift").set(prediction.drift)
        for index, plan in enumerate(decision.plans):
            blocks = {device.host_id: 0 for device in self._hosts.clusters[index].devices}
            blocks |= {host: segment.num_blocks for host, segment in plan.segments.items()}
            before = self._in_force[index] if self._in_force else None
            for host, num_blocks in blocks.items():
                metrics.PLACED_BLOCKS.labels(host).set(num_blocks)
            metrics.MOVED_BLOCKS.labels(str(index)).inc(moved(before, plan))
            metrics.PLANNED_MICRO_BATCHES.labels(str(index)).set(plan.num_micro_batches)


def _participants(hosts: JobHosts) -> list[scheduler_pb2.Host]:
    members = [host for c in hosts.clusters for host in (c.control_unit, *c.devices)]
    return [hosts.edge_server, *members]


def _links_of(plans: RoundPlan) -> dict[str, float]:
    """The share of every link that has a stream, by "sender>receiver", both directions."""
    return {
        link: link_plan.share
        for plan in plans
        for (before, after), link_plan in zip(
            itertools.pairwise(plan.stages), plan.links, strict=True
        )
        for link in (f"{before.host_id}>{after.host_id}", f"{after.host_id}>{before.host_id}")
    }
