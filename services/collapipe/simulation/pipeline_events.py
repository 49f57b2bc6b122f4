"""Simulates 1F1B pipelines event by event, with stages and links that wait for each other.

This simulation checks the formula of docs/scheduling.md (5), so it shares no code with it. A stage chooses
its next action by the rule of real stages (`collapipe.stage_runtime.action_order`): passes alternate as far
as frames have arrived, and a stage never holds more forward micro-batches than its window. Deferred gradients of
weights run when no frame can. Where micro-batches are cut into slices, the slices count as micro-batches here, but the
last stage runs the backward passes of a micro-batch only when all its slices went forward.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True)
class SimulatedStage:
    """One stage. Seconds are for one micro-batch.

    Last stages of several pipelines may have the same `processor`. They then take turns.

    Args:
        backward_seconds: Time of a backward pass until the gradient of the stage's input is sent.
        weights_seconds: Time of the gradients of the weights, if the stage leaves them for later.
    """

    forward_seconds: float
    backward_seconds: float
    in_flight: int
    processor: str
    weights_seconds: float = 0.0


@dataclass(frozen=True)
class SimulatedLink:
    """One link in both directions. Seconds are for one micro-batch.

    Args:
        forward_seconds, backward_seconds: Time for which a transfer occupies the link.
        latency_seconds: Further time until the transfer arrives. The link is free meanwhile.
        half_duplex: Whether both directions take turns.
    """

    forward_seconds: float
    backward_seconds: float
    latency_seconds: float = 0.0
    half_duplex: bool = False


@dataclass(frozen=True)
class SimulatedPipeline:
    """The pipeline of a cluster. Link i leads from stage i to stage i + 1.

    Args:
        stages: In order. The last stage runs each backward pass right after the forward pass.
        num_micro_batches: Micro-batches of a mini-batch, or slices of all of them.
        num_steps: Number of mini-batches, one after the other.
        step_seconds: Time of gradient clipping and the optimizer after each mini-batch.
        num_slices: Slices of a micro-batch.
    """

    stages: Sequence[SimulatedStage]
    links: Sequence[SimulatedLink]
    num_micro_batches: int
    num_steps: int = 1
    step_seconds: float = 0.0
    num_slices: int = 1


@dataclass(frozen=True)
class PipelineRun:
    """The time until the last step of a pipeline has ended, and the most forward micro-batches of each stage."""

    seconds: float
    peak_in_flight: tuple[int, ...]


_GRADIENT_ARRIVED, _ACTIVATION_ARRIVED, _ACTION_ENDED = range(3)
"""Kinds of events. Of events at the same time, arrivals come first, so that a stage knows them all when it chooses."""

_FORWARD, _BACKWARD, _WEIGHTS = range(3)
"""Actions of a stage. At a last stage, `_BACKWARD` is both passes, or with slices the second one."""


def simulate(pipelines: Sequence[SimulatedPipeline]) -> list[PipelineRun]:
    """Runs pipelines side by side. They start together, and only wait for each other at a shared processor.

    A link with infinite seconds makes its pipeline take infinite time. The stages of all pipelines are
    numbered as nodes, and link i leads from node i to node i + 1. Micro-batches need no names, because every
    queue is first in, first out. The loop is one function with local lists, because a function call for each
    event would double the time.
    """
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    owner = [index for index, pipeline in enumerate(pipelines) for _ in pipeline.stages]
    unused = SimulatedLink(0.0, 0.0)  # after each last stage, so that every node has a link
    links = [link for pipeline in pipelines for link in (*pipeline.links, unused)]
    nodes = range(len(stages))
    is_first = [node == 0 or owner[node - 1] != owner[node] for node in nodes]
    is_last = [*is_first[1:], True]

    link_free = [0.0] * (2 * len(nodes))  # entries 2 i and 2 i + 1: forward and backward on link i
    backward_entry = [2 * node + (not links[node].half_duplex) for node in nodes]
    # By processor of last stages: the nodes of waiting activations and of deferred gradients, in order.
    waiting = {stage.processor: deque[int]() for stage in stages}
    owed = {stage.processor: deque[int]() for stage in stages}
    # By processor: the nodes of slices that went forward at a last stage, as soon as their micro-batch is complete.
    returning = {stage.processor: deque[int]() for stage in stages}
    num_forward = [0] * len(
        nodes
    )  # slices of the present micro-batch that went forward at a last stage
    is_processor_busy = dict.fromkeys(waiting, False)
    activations, gradients = [0] * len(nodes), [0] * len(nodes)  # arrived, and not yet used
    held, peaks, deferred = [0] * len(nodes), [0] * len(nodes), [0] * len(nodes)
    busy = [False] * len(nodes)
    prefers_forward = [False] * len(nodes)
    steps_left = [pipeline.num_steps for pipeline in pipelines]
    to_release = [len(p.stages) * p.num_micro_batches for p in pipelines]  # in this step
    finished = [0.0] * len(pipelines)
    # An event is (time, kind, -node, the ended action). Later stages come first.
    events = [
        (0.0, _ACTIVATION_ARRIVED, -node, _FORWARD)
        for node in nodes
        if is_first[node]
        for _ in range(pipelines[owner[node]].num_micro_batches)
    ]
    heapify(events)
    while events:
        now, kind, negative_node, action = heappop(events)
        node = -negative_node
        stage, link = stages[node], links[node]
        if kind == _GRADIENT_ARRIVED:
            gradients[node] += 1
        elif kind == _ACTIVATION_ARRIVED:
            activations[node] += 1
            if is_last[node]:
                waiting[stage.processor].append(node)
        elif action == _FORWARD and is_last[node]:
            num_forward[node] += 1
            if num_forward[node] == pipelines[owner[node]].num_slices:
                returning[stage.processor].extend([node] * num_forward[node])
                num_forward[node] = 0
        elif action == _FORWARD:
            end = max(now, link_free[2 * node]) + link.forward_seconds
            link_free[2 * node] = end
            heappush(
                events, (end + link.latency_seconds, _ACTIVATION_ARRIVED, -(node + 1), _FORWARD)
            )
        else:
            if action == _BACKWARD and not is_first[node]:
                before, entry = links[node - 1], backward_entry[node - 1]
                end = max(now, link_free[entry]) + before.backward_seconds
                link_free[entry] = end
                heappush(
                    events,
                    (end + before.latency_seconds, _GRADIENT_ARRIVED, -(node - 1), _FORWARD),
                )
            if action == _BACKWARD and stage.weights_seconds:
                deferred[node] += 1
                if is_last[node]:
                    owed[stage.processor].append(node)
            else:
                held[node] -= 1
                index = owner[node]
                to_release[index] -= 1
                if not to_release[index]:
                    pipeline = pipelines[index]
                    finished[index] = end = now + pipeline.step_seconds
                    to_release[index] = len(pipeline.stages) * pipeline.num_micro_batches
                    steps_left[index] -= 1
                    if steps_left[index]:
                        first = node
                        while not is_first[first]:
                            first -= 1
                        for _ in range(pipeline.num_micro_batches):
                            heappush(events, (end, _ACTIVATION_ARRIVED, -first, _FORWARD))
        if kind == _ACTION_ENDED:
            busy[node] = False
        if is_last[node]:
            processor = stage.processor
            if kind == _ACTION_ENDED:
                is_processor_busy[processor] = False
            if is_processor_busy[processor]:
                continue
            if returning[processor]:
                node = returning[processor].popleft()
                action, seconds = _BACKWARD, stages[node].backward_seconds
            elif waiting[processor] and held[waiting[processor][0]] < (
                stages[waiting[processor][0]].in_flight
            ):
                node = waiting[processor].popleft()
                stage = stages[node]
                activations[node] -= 1
                held[node] += 1
                peaks[node] = max(peaks[node], held[node])
                action, seconds = _BACKWARD, stage.forward_seconds + stage.backward_seconds
                if pipelines[owner[node]].num_slices > 1:
                    action, seconds = _FORWARD, stage.forward_seconds
            elif owed[processor]:
                node = waiting[processor][0] if waiting[processor] else owed[processor][0]
                owed[processor].remove(node)
                deferred[node] -= 1
                action, seconds = _WEIGHTS, stages[node].weights_seconds
            else:
                continue
            is_processor_busy[processor] = True
            heappush(events, (now + seconds, _ACTION_ENDED, -node, action))
            continue
        if busy[node]:
            continue
        may_run_forward = activations[node] and held[node] < stage.in_flight
        if gradients[node] and not (may_run_forward and prefers_forward[node]):
            gradients[node] -= 1
            prefers_forward[node] = True
            action, seconds = _BACKWARD, stage.backward_seconds
        elif may_run_forward:
            activations[node] -= 1
            prefers_forward[node] = False
            held[node] += 1
            peaks[node] = max(peaks[node], held[node])
            action, seconds = _FORWARD, stage.forward_seconds
        elif deferred[node]:
            deferred[node] -= 1
            action, seconds = _WEIGHTS, stage.weights_seconds
        else:
            continue
        busy[node] = True
        heappush(events, (now + seconds, _ACTION_ENDED, -node, action))
    return [
        PipelineRun(finished[index], tuple(peaks[node] for node in nodes if owner[node] == index))
        for index in range(len(pipelines))
    ]
