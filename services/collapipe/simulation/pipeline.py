"""Event-driven 1F1B: how long mini-batches take when stages, links and windows do what they do.

This is what the formula of the delay, design (5), is checked against, so it shares nothing with it: there are a clock,
a heap of events, and the rule by which a stage chooses its next action, the same as of the real stages
(`collapipe.stage_runtime.action_order`): a backward pass before a forward pass, and never more than a window of forward passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class SimulatedStage:
    """One stage; seconds are of one micro-batch.

    Args:
        forward_seconds, backward_seconds: Of its passes.
        in_flight: Forward micro-batches that it may hold.
        processor: Names what it computes on. Last stages of several pipelines may name the same one, and share it.
    """

    forward_seconds: float
    backward_seconds: float
    in_flight: int
    processor: str


@dataclass(frozen=True)
class SimulatedLink:
    """One link, both directions; seconds are of one micro-batch.

    Args:
        forward_seconds, backward_seconds: For which it is occupied.
        latency_seconds: After which what left has arrived; the link is free meanwhile.
        half_duplex: Whether both directions take turns.
    """

    forward_seconds: float
    backward_seconds: float
    latency_seconds: float = 0.0
    half_duplex: bool = False


@dataclass(frozen=True)
class SimulatedPipeline:
    """A cluster's pipeline; link i leads from stage i to stage i + 1.

    Args:
        stages: In order; a forward pass of the last one is followed by its backward pass at once.
        links: One fewer.
        num_micro_batches: Of a mini-batch.
        num_steps: Mini-batches, one after the other.
        step_seconds: Between them, and after the last: clipping barrier and optimizer.
    """

    stages: Sequence[SimulatedStage]
    links: Sequence[SimulatedLink]
    num_micro_batches: int
    num_steps: int = 1
    step_seconds: float = 0.0


@dataclass(frozen=True)
class PipelineRun:
    """What came of a pipeline.

    Args:
        seconds: Until its last step was done.
        peak_in_flight: Most forward micro-batches that each stage held.
    """

    seconds: float
    peak_in_flight: tuple[int, ...]


def simulate(pipelines: Sequence[SimulatedPipeline]) -> list[PipelineRun]:
    """Runs pipelines side by side; they begin together, and meet only where their last stages share a processor.

    A link that carries nothing (infinite seconds) makes its pipeline take infinite time.
    """
    simulation = _Simulation(pipelines)
    simulation.run()
    runs, first = [], 0
    for pipeline, seconds in zip(pipelines, simulation.finished, strict=True):
        after = first + len(pipeline.stages)
        runs.append(PipelineRun(seconds, tuple(simulation.peaks[first:after])))
        first = after
    return runs


class _Simulation:
    """Stages of all pipelines are nodes 0 to n - 1, and link i leads from node i to node i + 1.

    An event is a time and a code, which says what happened where. Codes order what happens at the same time: gradients
    arrive, then activations, then passes end, later stages first, so that a stage that becomes idle knows of everything
    that is there. Micro-batches need no names, for every queue is first in, first out.
    """

    def __init__(self, pipelines: Sequence[SimulatedPipeline]) -> None:
        self._pipelines = pipelines
        self._stages = [stage for pipeline in pipelines for stage in pipeline.stages]
        self._owner = [index for index, pipeline in enumerate(pipelines) for _ in pipeline.stages]
        nowhere = SimulatedLink(0.0, 0.0)  # after a last stage, so that every node has a link
        self._links = [link for pipeline in pipelines for link in [*pipeline.links, nowhere]]
        self.finished = [0.0] * len(pipelines)
        self.peaks = [0] * len(self._stages)

    def run(self) -> None:
        """Runs until nothing happens any more.

        One function with local lists: a call for each of its events would double the time.
        """
        n, pipelines, owner, peaks = len(self._stages), self._pipelines, self._owner, self.peaks
        forward = [stage.forward_seconds for stage in self._stages]
        backward = [stage.backward_seconds for stage in self._stages]
        window = [stage.in_flight for stage in self._stages]
        up = [link.forward_seconds for link in self._links]
        down = [link.backward_seconds for link in self._links]
        latency = [link.latency_seconds for link in self._links]
        down_server = [2 * i + (not link.half_duplex) for i, link in enumerate(self._links)]
        is_first = [node == 0 or owner[node - 1] != owner[node] for node in range(n)]
        is_last = [*is_first[1:], True]

        link_free = [0.0] * (2 * n)  # link i sends activations by server 2 i
        processor_free = {stage.processor: 0.0 for stage in self._stages}
        activations, gradients = [0] * n, [0] * n  # arrived and not taken
        held, done, busy = [0] * n, [0] * n, [False] * n
        steps_left = [pipeline.num_steps for pipeline in pipelines]
        gradient_at, activation_at, ended_at = n - 1, 2 * n - 1, 4 * n - 2  # codes, of node 0
        heap = [
            (0.0, activation_at - node)
            for node in range(n)
            if is_first[node]
            for _ in range(pipelines[owner[node]].num_micro_batches)
        ]
        heap.sort()
        while heap:
            now, code = heappop(heap)
            if code < n:
                node = gradient_at - code
                gradients[node] += 1
            elif code < 2 * n:
                node = activation_at - code
                if is_last[node]:
                    peaks[node] = 1
                    name = self._stages[node].processor
                    end = max(now, processor_free[name]) + forward[node] + backward[node]
                    processor_free[name] = end
                    held[node] += 1
                    heappush(heap, (end, ended_at - 2 * node))
                    continue
                activations[node] += 1
            else:
                node, was_forward = (ended_at + 1 - code) // 2, code & 1
                busy[node] = False
                if was_forward:
                    end = max(now, link_free[2 * node]) + up[node]
                    link_free[2 * node] = end
                    heappush(heap, (end + latency[node], activation_at - node - 1))
                else:
                    held[node] -= 1
                    done[node] += 1
                    if not is_first[node]:
                        before = node - 1
                        end = max(now, link_free[down_server[before]]) + down[before]
                        link_free[down_server[before]] = end
                        heappush(heap, (end + latency[before], gradient_at - before))
                    elif done[node] == pipelines[owner[node]].num_micro_batches:
                        pipeline = pipelines[owner[node]]
                        done[node] = 0
                        self.finished[owner[node]] = end = now + pipeline.step_seconds
                        steps_left[owner[node]] -= 1
                        if steps_left[owner[node]]:
                            for _ in range(pipeline.num_micro_batches):
                                heappush(heap, (end, activation_at - node))
            if busy[node]:
                continue
            if gradients[node]:
                gradients[node] -= 1
                busy[node] = True
                heappush(heap, (now + backward[node], ended_at - 2 * node))
            elif activations[node] and held[node] < window[node]:
                activations[node] -= 1
                held[node] += 1
                peaks[node] = max(peaks[node], held[node])
                busy[node] = True
                heappush(heap, (now + forward[node], ended_at - 2 * node + 1))
