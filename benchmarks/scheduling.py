"""Measures the decisions of DSSRA on a running testbed with emulated devices and shaped links.

    python -m benchmarks.scheduling              # all sections
    python -m benchmarks.scheduling better --worlds wires     # a section, in one of the worlds of benchmarks/emulated.py

The sections are better, predicted, adaptive and noise; the last two use wires only. Emulated devices wait after real
work, and pacing limits all traffic between hosts. If the real work does not fit into this machine, the benchmark
fails. Each baseline uses the number of micro-batches that is best for it by prediction.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.emulated import (
    DEVICES,
    WORLDS,
    Round,
    World,
    describe,
    emulation,
    make_job,
    run,
    settled,
    settled_training,
    testbed,
)
from collapipe.allocation import RoundProblem, decide_round
from collapipe.emulation.emulation_file import Emulation
from collapipe.emulation.links import LinkDescription
from collapipe.errors import InfeasibleError, WrongStateError
from collapipe.simulation.outcome import run_round
from collapipe_client import LocalTestbed
from collapipe_client.testbed_processes import Device

BASELINES = ("pipeline", "proportional", "titanic", "titanic_best", "vanilla_fl", "centralized")
MICRO_BATCHES = (4, 8, 16)
_EVERYWHERE = " everywhere"
MINE = ("dssra", "dssra" + _EVERYWHERE)
"""With the paper's roles, and with blocks on the control unit and the edge server, too."""
_TRIES = 4
"""Number of times that a job is measured until this machine is fast enough for the emulation."""
UNMEASURED_ROUNDS = 2
"""After so many rounds, the scheduler has measured everything that it predicts with."""
MEMORY = (40_000_000, 48_000_000, 128_000_000, 40_000_000)
"""Memory of the devices, in bytes. One of them can hold the whole model, but it is slow."""


def better(directory: Path, worlds: Sequence[str]) -> None:
    """Measures whole rounds of `dssra` and of every baseline in turn."""
    for world in worlds:
        with testbed(directory / world, _devices(), WORLDS[world]) as bed:
            print(f"\n{world}")
            _compare_strategies(bed, WORLDS[world])


def _compare_strategies(bed: LocalTestbed, world: World) -> None:
    def rounds_of(name: str, num_micro_batches: int) -> list[Round]:
        strategy = name.removesuffix(_EVERYWHERE)
        job = make_job(
            name.replace("_", "-").replace(" ", "-"),
            rounds=5,
            num_micro_batches=num_micro_batches,
            strategy=strategy,
            paper_placement=name == strategy,
            **world.schedule,
        )
        for _ in range(_TRIES - 1):
            try:
                return run(bed, job)
            except WrongStateError as error:
                print(f"{name} is measured again: {error}", flush=True)
        return run(bed, job)

    best: dict[str, int | None] = {}
    measured: dict[str, list[Round]] = {}
    for name in (*MINE, *BASELINES):
        if name in best and best[name] is None:
            print(f"{name} is infeasible")
            continue
        try:
            rounds = measured[name] = rounds_of(name, best.get(name) or 8)
        except (InfeasibleError, WrongStateError) as error:
            print(f"{name} was not measured: {error}", flush=True)
            continue
        print(
            f"{name}: {settled(rounds):.2f} s a round, {describe(rounds[-1].decision.plans)}",
            flush=True,
        )
        if not best:
            problem = rounds[-1].decision.question.problem
            best = {each: _best_micro_batches(each, problem) for each in BASELINES}
    mine = measured["dssra"]
    print(
        "\nstrategy         round s   of it training s   dssra is lower by   most memory of a host but the edge server, by docs/scheduling.md (10)"
    )
    for name, rounds in measured.items():
        memory = _largest_memory(rounds[-1])
        print(
            f"{name:16} {settled(rounds):7.2f}   {settled_training(rounds):16.2f}   {1 - settled(mine) / settled(rounds):17.1%}   "
            f"{memory / 1e6:8.1f} MB ({_largest_memory(mine[-1]) / memory:.2f} times for dssra)"
        )


def predicted(directory: Path, worlds: Sequence[str]) -> None:
    """Compares predicted and simulated round times of `dssra` with observed ones.

    The simulator runs the pipeline event by event, on the measurements that the scheduler had before the round.
    """
    errors: dict[str, list[float]] = {"predicted": [], "simulated": []}
    for world in worlds:
        with testbed(directory / world, _devices(), WORLDS[world]) as bed:
            print(f"\n{world}")
            job = make_job("predicted", rounds=10, strategy="dssra", **WORLDS[world].schedule)
            for one in run(bed, job):
                question = one.decision.question
                simulated = run_round(question.problem, one.decision.plans, num_steps=2).seconds
                for name, seconds in (
                    ("predicted", one.predicted_seconds),
                    ("simulated", simulated),
                ):
                    if one.number > UNMEASURED_ROUNDS:
                        errors[name].append(abs(seconds - one.seconds) / one.seconds)
                print(
                    f"round {one.number}: observed {one.seconds:.2f} s, predicted {one.predicted_seconds:.2f} s, "
                    f"simulated {simulated:.2f} s"
                )
    for name, each in errors.items():
        print(
            f"{name}: median error {statistics.median(each):.1%}, largest {max(each):.1%}, from round "
            f"{UNMEASURED_ROUNDS + 1} on"
        )


def adaptive(directory: Path, worlds: Sequence[str]) -> None:
    """Slows a processor, and then the links of a device, to a quarter of their speed in the middle of a job."""
    slow_link = LinkDescription(rate_bps=3.25e6, delay_seconds=0.004)
    for what, changed in (
        ("processor of device-0-1", emulation(slow={"device-0-1": 4.0})),
        (
            "links of device-0-1",
            emulation(links={"device-0-1>*": slow_link, "*>device-0-1": slow_link}),
        ),
    ):
        with testbed(directory / what.replace(" ", "-"), _devices()) as bed:

            def change(number: int, bed: LocalTestbed = bed, changed: Emulation = changed) -> None:
                if number == 5:
                    bed.emulate(changed)
                elif number == 11:
                    bed.emulate(emulation())

            rounds = run(bed, make_job("adaptive", rounds=17, strategy="dssra"), after_round=change)
            bed.emulate(changed)
            oracle = settled(run(bed, make_job("oracle", rounds=6, strategy="dssra")))
        print(f"\n{what} at a quarter after round 5, restored after round 11")
        for one in rounds:
            print(f"  round {one.number:2}: {one.seconds:6.2f} s  {describe(one.decision.plans)}")
        before, after, back = rounds[4], rounds[5:11], rounds[11:]
        moved = next((one.number for one in after if one.blocks != before.blocks), None)
        returned = next((one.number for one in back if one.blocks == before.blocks), None)
        ended = statistics.median(one.seconds for one in after[-3:])
        print(
            f"the plan changed in round {moved}; its last slow rounds take {ended:.2f} s, and those of a job that is slow "
            f"from its start take {oracle:.2f} s ({ended / oracle - 1:+.1%}); the old plan is back in round {returned}"
        )


def noise(directory: Path, worlds: Sequence[str]) -> None:
    """Counts the moves of blocks in 50 rounds in which the speed of every processor varies by 10 %."""
    import numpy as np

    generator = np.random.default_rng(0)
    with testbed(directory, _devices()) as bed:

        def shake(number: int) -> None:
            names = (f"device-0-{k}" for k in range(len(DEVICES)))
            bed.emulate(
                emulation(slow={name: float(np.exp(0.1 * generator.normal())) for name in names})
            )

        job = make_job("noise", rounds=52, strategy="dssra", local_steps=1)
        rounds = run(bed, job, after_round=shake)
    steady = rounds[2:]
    moves = sum(a.blocks != b.blocks for a, b in itertools.pairwise(steady))
    print(f"{moves} moves in {len(steady)} rounds under 10 % noise")


def _devices() -> list[Device]:
    return [Device(memory_bytes=limit) for limit in MEMORY]


def _best_micro_batches(strategy: str, problem: RoundProblem) -> int | None:
    """Returns the number of micro-batches with the shortest predicted round. `None` if the strategy is infeasible with all.

    Args:
        problem: A round that the scheduler has measured.
    """
    found: dict[int, float] = {}
    for number in MICRO_BATCHES:
        clusters = tuple(
            replace(c, micro_batch_options=(number,), previous=None) for c in problem.clusters
        )
        try:
            decision = decide_round(replace(problem, clusters=clusters), strategy)
        except InfeasibleError as error:
            print(f"{strategy} with {number} micro-batches: {error}")
            continue
        found[number] = decision.prediction.full_round_seconds
    texts = ", ".join(f"{seconds:.2f} s with {number}" for number, seconds in found.items())
    print(f"{strategy}: a round is predicted to take {texts} micro-batches", flush=True)
    return min(found, key=found.__getitem__) if found else None


def _largest_memory(one: Round) -> float:
    """Returns the memory of the fullest device or control unit, in bytes: docs/scheduling.md (10)."""
    return max(
        stage.memory_bytes
        for cluster in one.decision.prediction.clusters
        for stage in cluster.stages
        if stage.host_id != "edge-server"
    )


SECTIONS: dict[str, Callable[[Path, Sequence[str]], None]] = {
    "better": better,
    "predicted": predicted,
    "adaptive": adaptive,
    "noise": noise,
}


def main(arguments: Sequence[str] = ()) -> None:
    """Runs the given sections. The default is all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], default=[])
    parser.add_argument("--worlds", nargs="+", choices=[*WORLDS], default=[*WORLDS])
    options = parser.parse_args(arguments)
    for name in options.sections or SECTIONS:
        print(f"-- {name}: {(SECTIONS[name].__doc__ or '').strip()}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            SECTIONS[name](Path(directory), options.worlds)


if __name__ == "__main__":
    main(sys.argv[1:])
