"""Estimates a round of a job on boxes that nobody has started: memory, bytes and time, and what would make it fit.

The decision is that of the scheduler: the same problem, strategies and prediction. Only what a running scheduler measures comes from elsewhere:
speeds from device profiles, links from the request, and the costs of units from `collapipe.stage_runtime.unit_counts`,
which runs as a process because it needs torch.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from collapipe.allocation import RoundPlan, RoundProblem, decide_round, predict, violations
from collapipe.byte_sizes import say_bytes
from collapipe.emulation.boxes import Box
from collapipe.errors import CollapipeError, InfeasibleError, InvalidInputError
from collapipe.job import JobConfig, divisors
from collapipe.planning.estimate_documents import Change, Estimate, Request
from collapipe.planning.estimated_round import estimate_clusters
from collapipe.planning.job_hosts import ClusterHosts, JobHosts
from collapipe.planning.job_warnings import few_rows, find_passes, long_warm_up, random_base
from collapipe.planning.knowledge import HostKnowledge, Knowledge, LinkKnowledge
from collapipe.planning.round_problem import ModelSizes, build_problem, link_pairs
from collapipe.unit_costs import ModelCosts, UnitCost, activation_bytes
from collapipe.v1 import scheduler_pb2

Count = Callable[[Sequence[JobConfig]], list[ModelCosts | None]]
"""Counts the units of jobs that differ in their models: `count_in_process`."""

_MOST_MORE_BOXES = 16
_MEMORY_FACTORS = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)
_LORA_RANK = 8
_UNLIMITED_BPS = 1e12
_LAPTOP = Box(profile="laptop")


class Estimator:
    """Estimates variants of one request."""

    def __init__(self, request: Request, count: Count) -> None:
        self._request = request
        self._count = count
        self._costs: dict[str, ModelCosts | None] = {}

    def estimate(self) -> Estimate:
        """Estimates the request, and looks for changes if the model does not fit.

        Raises:
            InvalidInputError: The job cannot be used.
        """
        request, job = self._request, self._request.job
        self._count_models([request])
        request = self._request = _with_speeds(request, self._model_costs(job).flops_per_second)
        problem = self._problem(request)
        costs = self._model_costs(job)
        notes = costs.notes
        few = few_rows(job, costs.num_rows) if costs.num_rows else None
        if costs.num_rows:
            notes += (find_passes(job, costs.num_rows).text,)
        if costs.padded_length:
            notes += (
                f"compute times are estimated for rows of {costs.padded_length} tokens, the mean length with padding; memory and links "
                f"are estimated for task.max_length = {job.task.max_length}",
            )
        warnings = long_warm_up(job), random_base(job), few
        asked, given = job.num_devices(0), len(request.devices)
        if asked is not None and asked != given:
            notes += (
                f"the job asks for {asked} devices in a cluster, and {given} are given: train it with "
                f"--set devices_per_cluster={given}",
            )
        try:
            plans = _plans(problem, job)
            missing = violations(problem, plans)
        except InfeasibleError as error:
            plans, missing = (
                decide_round(_without_limits(problem), "proportional").plans,
                [str(error)],
            )
        changes = self._changes() if missing else []
        return Estimate(
            fits=not missing,
            strategy=job.schedule.strategy,
            missing=tuple(missing),
            clusters=tuple(estimate_clusters(problem, plans, costs, _boxes(request)[0])),
            changes=tuple(changes),
            notes=notes,
            warnings=(
                *(f"{each.message}: {each.advice}" for each in warnings if each),
                *costs.warnings,
            ),
        )

    def _fits(self, request: Request) -> bool:
        try:
            problem = self._problem(request)
            return not violations(problem, _plans(problem, request.job))
        except (InfeasibleError, InvalidInputError):  # LoRA may need to be told its target modules.
            return False

    def _changes(self) -> list[Change]:
        request = self._request
        job = request.job
        training, schedule = job.training, job.schedule
        steps: list[dict[str, Any]] = []
        if schedule.strategy not in ("dssra", "proportional"):
            steps.append({"schedule.strategy": "proportional"})
        if training.recompute is False:
            steps.append({"training.recompute": True})
        if schedule.strategy != "dssra":  # It has tried all numbers of micro-batches.
            steps += [
                {"schedule.num_micro_batches": count}
                for count in divisors(training.mini_batch)
                if count > schedule.num_micro_batches
            ]
        if not job.model.half_blocks:
            steps.append({"model.half_blocks": True})
        if job.model.lora is None:
            steps.append({"model.lora.r": _LORA_RANK})
        models = {
            key: value for step in steps for key, value in step.items() if key.startswith("model.")
        }
        variants = [{key: value} for key, value in models.items()]
        self._count_models([request, *(_changed(request, each) for each in [*variants, models])])
        found: list[dict[str, Any]] = []
        for step in steps:
            tried = [
                each.keys() for each in found
            ]  # Of several values of a setting, the first one counts.
            if step.keys() not in tried and self._fits(_changed(request, step)):
                found.append(step)
        if not found:
            # No single setting suffices. Take one after the other, until all together do.
            together: dict[str, Any] = {}
            for step in steps:
                together |= step
                if self._fits(_changed(request, together)):
                    found = [self._needed(together)]
                    break
        changes = [
            Change(settings=tuple(f"{k}={_as_toml(v)}" for k, v in step.items())) for step in found
        ]
        return [*changes, *self._other_boxes(request)]

    def _needed(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Leaves out each setting without which the others suffice."""
        for name in list(settings):
            others = {key: value for key, value in settings.items() if key != name}
            if others and self._fits(_changed(self._request, others)):
                settings = others
        return settings

    def _other_boxes(self, request: Request) -> list[Change]:
        """Tries more boxes like the largest one, and larger boxes."""
        largest = max(request.devices, key=lambda box: box.training_bytes)
        changes = []
        for count in range(1, _MOST_MORE_BOXES + 1):
            devices = (*request.devices, *[largest] * count)
            if self._fits(request.model_copy(update={"devices": devices})):
                changes.append(Change(boxes=f"{count} more {largest.device.short_name}"))
                break
        for factor in _MEMORY_FACTORS:
            devices = tuple(
                box.model_copy(update={"memory_bytes": math.ceil(factor * box.training_bytes)})
                for box in request.devices
            )
            if self._fits(request.model_copy(update={"devices": devices})):
                sizes = ", ".join(map(say_bytes, sorted({box.training_bytes for box in devices})))
                changes.append(Change(boxes=f"{factor:g} times the memory in every box: {sizes}"))
                break
        else:
            changes += self._with_enough_memory(request)
        return changes

    def _with_enough_memory(self, request: Request) -> list[Change]:
        """Tries boxes that have as much memory as a plan without limits uses, rounded up to what people are told."""
        problem = _without_limits(self._problem(request))
        try:
            prediction = predict(problem, _plans(problem, request.job))
        except InfeasibleError:  # The reason is no lack of memory.
            return []
        ids = {device.host_id for cluster in problem.clusters for device in cluster.devices}
        stages = [s for c in prediction.clusters for s in c.stages if s.host_id in ids]
        used = max((stage.memory_bytes for stage in stages), default=0.0)
        step = 10 ** max(6, len(str(math.ceil(used))) - 4)
        memory = step * math.ceil(used / step)
        devices = tuple(box.model_copy(update={"memory_bytes": memory}) for box in request.devices)
        if not self._fits(request.model_copy(update={"devices": devices})):
            return []
        return [Change(boxes=f"{say_bytes(memory)} of memory for training in every box")]

    def _model_costs(self, job: JobConfig) -> ModelCosts:
        costs = self._costs[job.model.model_dump_json()]
        if costs is None:
            raise InvalidInputError(
                f"the model of the job {job.name!r} cannot be made: check model.pretrained and model.config"
            )
        return costs

    def _count_models(self, requests: Sequence[Request]) -> None:
        """Counts the units of all models in one process, because its start takes seconds."""
        jobs = {request.job.model.model_dump_json(): request.job for request in requests}
        self._costs |= dict(zip(jobs, self._count(list(jobs.values())), strict=True))

    def _problem(self, request: Request) -> RoundProblem:
        job, costs = request.job, self._model_costs(request.job)
        boxes, hosts = _boxes(request)
        blocks = costs.units[1:-1]
        flops, stash = (
            [statistics.mean(values[k :: costs.period]) for k in range(costs.period)]
            for values in ([u.flops for u in blocks], [u.stash_bytes for u in blocks])
        )
        mean_flops, mean_stash = statistics.mean(flops), statistics.mean(stash)
        micro_batch_size = job.training.mini_batch / job.schedule.num_micro_batches
        ends = {hosts.edge_server.host_id: costs.units[-1]}
        ends |= {cluster.control_unit.host_id: costs.units[0] for cluster in hosts.clusters}
        knowledge = Knowledge(
            hosts={
                host_id: HostKnowledge(
                    seconds_per_sample=mean_flops / box.device.flops_per_second,
                    seconds_per_micro_batch=box.device.seconds_per_micro_batch,
                    end_seconds_per_sample=_end_seconds(ends.get(host_id), box, micro_batch_size),
                    source="profile",
                )
                for host_id, box in boxes.items()
            },
            links={
                f"{sender}>{receiver}": _link(boxes[sender], boxes[receiver])
                for cluster in hosts.clusters
                for sender, receiver in link_pairs(cluster, hosts.edge_server)
            },
            block_stash_bytes=math.ceil(mean_stash),
            work_shares=[value / mean_flops for value in flops],
            stash_shares=[value / mean_stash for value in stash],
            activation_bytes=float(
                activation_bytes(
                    costs.hidden_size, job.task.max_length, job.model.activation_value_bytes
                )
            ),
        )
        sizes = ModelSizes(
            num_blocks=len(blocks),
            unit_bytes=tuple(unit.weights_bytes for unit in costs.units),
            frozen_bytes=tuple(unit.frozen_bytes for unit in costs.units),
            hidden_size=costs.hidden_size,
            period=costs.period,
            frozen_memory_share=costs.frozen_memory_share,
        )
        problem = build_problem(job, sizes, hosts, knowledge, round_index=0)
        first, last = costs.units[0], costs.units[-1]
        model = replace(
            problem.model,
            embedding_work=first.flops / mean_flops,
            head_work=last.flops / mean_flops,
            embedding_stash_bytes=float(first.stash_bytes),
            head_stash_bytes=float(last.stash_bytes),
        )
        return replace(problem, model=model)


def _plans(problem: RoundProblem, job: JobConfig) -> RoundPlan:
    schedule = job.schedule
    return decide_round(problem, schedule.strategy, segments=schedule.segments).plans


def count_in_process(jobs: Sequence[JobConfig], *, timed: bool = False) -> list[ModelCosts | None]:
    """Counts the units of jobs in a process with torch: see `count_jobs` in `collapipe.stage_runtime.unit_counts`.

    Raises:
        InvalidInputError: The first job cannot be used.
        CollapipeError: The process failed.
    """
    command = [sys.executable, "-m", "collapipe.stage_runtime.unit_counts"]
    command += ["--timed"] * timed
    documents = json.dumps([job.model_dump(mode="json", exclude_unset=True) for job in jobs])
    done = subprocess.run(command, input=documents, capture_output=True, text=True)
    if done.returncode == 2:
        raise InvalidInputError(done.stderr.strip())
    if done.returncode:
        raise CollapipeError(f"counting the units of the model failed: {done.stderr.strip()}")
    return TypeAdapter(list[ModelCosts | None]).validate_json(done.stdout)


def _boxes(request: Request) -> tuple[dict[str, Box], JobHosts]:
    """Returns the box of each host, and the hosts as they would register."""
    boxes: dict[str, Box] = {}
    ends = _LAPTOP.model_copy(update={"flops_per_second": request.end_flops_per_second})

    def host(host_id: str, role: Any, box: Box, memory_bytes: int) -> scheduler_pb2.Host:
        boxes[host_id] = box
        return scheduler_pb2.Host(
            host_id=host_id, role=role, memory_bytes=memory_bytes, busy_watts=box.device.busy_watts
        )

    def other(host_id: str, role: Any, box: Box | None) -> scheduler_pb2.Host:
        return host(host_id, role, box or ends, box.training_bytes if box else 0)

    clusters = tuple(
        ClusterHosts(
            other(
                f"control-unit-{index}", scheduler_pb2.HOST_ROLE_CONTROL_UNIT, request.control_unit
            ),
            tuple(
                host(
                    f"device-{index}-{number}",
                    scheduler_pb2.HOST_ROLE_DEVICE_AGENT,
                    box,
                    box.training_bytes,
                )
                for number, box in enumerate(request.devices)
            ),
        )
        for index in range(request.job.clusters)
    )
    return boxes, JobHosts(
        other("edge-server", scheduler_pb2.HOST_ROLE_EDGE_SERVER, request.edge_server), clusters
    )


def _with_speeds(request: Request, flops_per_second: float | None) -> Request:
    """Gives boxes that are processes of this machine the speed that was timed on it."""
    if request.core_share is None or flops_per_second is None:
        return request
    speed = {"flops_per_second": request.core_share * flops_per_second}
    devices = tuple(
        box if box.flops_per_second else box.model_copy(update=speed) for box in request.devices
    )
    ends = {"end_flops_per_second": speed["flops_per_second"]}
    return request.model_copy(update={"devices": devices, **ends})


def _link(sender: Box, receiver: Box) -> LinkKnowledge:
    """Returns the link between two boxes, each of which has its own link to the network."""
    up, down = sender.link.in_direction("up"), receiver.link.in_direction("down")
    rate = min(up.rate_bps or _UNLIMITED_BPS, down.rate_bps or _UNLIMITED_BPS)
    ends = [box.link.in_direction(way) for box in (sender, receiver) for way in ("up", "down")]
    return LinkKnowledge(
        capacity_bps=rate, round_trip_seconds=sum(end.delay_seconds for end in ends)
    )


def _end_seconds(unit: UnitCost | None, box: Box, micro_batch_size: float) -> float:
    """Returns the time of the embedding or the head for one sample. Includes the gradient of an embedding table."""
    if unit is None:
        return 0.0
    moved = unit.gradient_bytes / micro_batch_size
    return unit.flops / box.device.flops_per_second + moved / box.device.memory_bytes_per_second


def _without_limits(problem: RoundProblem) -> RoundProblem:
    clusters = tuple(
        replace(
            cluster, devices=tuple(replace(host, memory_bytes=None) for host in cluster.devices)
        )
        for cluster in problem.clusters
    )
    return replace(problem, clusters=clusters)


def _changed(request: Request, settings: Mapping[str, Any]) -> Request:
    """Returns a request whose job has other settings, by their dotted names."""
    document = request.job.model_dump(exclude_unset=True)
    for key, value in settings.items():
        *sections, name = key.split(".")
        section = document
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    return request.model_copy(update={"job": JobConfig.from_dict(document, "the changed job")})


def _as_toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def estimate(document: Mapping[str, Any]) -> Estimate:
    """Estimates a `Request` that is given as a JSON object.

    Raises:
        InvalidInputError: The request or its job cannot be used.
    """
    try:
        request = Request.model_validate(document)
    except ValidationError as error:
        raise InvalidInputError("; ".join(str(error).splitlines())) from error
    count = partial(count_in_process, timed=request.core_share is not None)
    return Estimator(request, count).estimate()
