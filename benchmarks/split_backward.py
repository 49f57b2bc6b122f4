"""Compares whole backward passes with split ones (`training.split_backward`).

    python -m benchmarks.split_backward               # both sections
    python -m benchmarks.split_backward block --repetitions 40

`block`: forward and backward pass of a block of BERT-base on one thread, in turn.
`rounds`: rounds of `proportional` with four unlike emulated devices on wires of 3 Mbit/s, in turn: real processes,
whose processors and links are paced.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.emulated import DEVICES, World, emulation, make_job, run, settled_training
from collapipe.emulation.links import LinkDescription
from collapipe.models import adapter_for
from collapipe.stage_runtime.weight_gradients import (
    SplitLinear,
    deferred_gradients,
    use_split_backward,
)
from collapipe_client import LocalTestbed
from collapipe_client.testbed_processes import Device

BERT_BASE = '{"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}'
SHAPES = ((1, 64), (4, 128))
"""Samples and tokens of a micro-batch."""
TIME_SCALE = 40.0
"""Factor on all emulated times. The rate of the wires suits it."""


def block(directory: Path, options: argparse.Namespace) -> None:
    """Prints the median seconds of both, and the parts of the split one."""
    torch.set_num_threads(1)
    adapter = adapter_for("bert", "classification", BERT_BASE)
    whole, split = adapter.build_unit(1), adapter.build_unit(1)
    layers = use_split_backward(split)
    for parameter in (*whole.parameters(), *split.parameters()):
        nn.init.normal_(parameter, std=0.02)
    for size, length in SHAPES:
        side = {"attention_mask": torch.ones(size, length, dtype=torch.int64)}
        activation, gradient = torch.randn(2, size, length, 768).unbind()
        found: dict[str, list[tuple[float, ...]]] = {"whole": [], "split": []}
        for _ in range(options.repetitions + 1):
            found["whole"].append(_passes(whole, [], activation, gradient, side))
            found["split"].append(_passes(split, layers, activation, gradient, side))
        totals = {}
        for name, times in found.items():
            forward, backward, weights = (
                statistics.median(t) for t in zip(*times[1:], strict=True)
            )
            totals[name] = statistics.median(map(sum, times[1:]))
            print(
                f"{size} x {length} tokens, {name}: forward {1000 * forward:.1f} ms, backward "
                f"{1000 * backward:.1f} ms, weights {1000 * weights:.1f} ms, together "
                f"{1000 * totals[name]:.1f} ms"
            )
        print(f"split / whole: {totals['split'] / totals['whole']:.3f}", flush=True)


def _passes(
    unit: nn.Module,
    layers: Sequence[SplitLinear],
    activation: Tensor,
    gradient: Tensor,
    side: dict[str, Tensor],
) -> tuple[float, float, float]:
    started = time.perf_counter()
    outputs = unit(activation.clone().requires_grad_(), side)
    ran_forward = time.perf_counter()
    with deferred_gradients(layers) as deferred:
        torch.autograd.backward(outputs, gradient)
    ran_backward = time.perf_counter()
    deferred.compute()
    ended = time.perf_counter()
    return ran_forward - started, ran_backward - ran_forward, ended - ran_backward


def rounds(directory: Path, options: argparse.Namespace) -> None:
    """Prints the median seconds of a round and of its training, and the range of the ratios of pairs."""
    world = World({"*": LinkDescription(rate_bps=3e6, delay_seconds=0.015)})
    emulated = emulation(world=world).model_copy(update={"time_scale": TIME_SCALE})
    found: dict[bool, list[float]] = {False: [], True: []}
    with LocalTestbed([[Device()] * len(DEVICES)], directory, emulation=emulated) as bed:
        bed.wait_until_registered()
        for _ in range(options.repetitions):
            for split, seconds in found.items():
                job = make_job("split", rounds=2, strategy="proportional")
                training = job.training.model_copy(update={"split_backward": split})
                ran = run(bed, job.model_copy(update={"training": training}))
                seconds.append(settled_training(ran))
                print(f"split {split}: training {seconds[-1]:.2f} s, {ran[-1].blocks}", flush=True)
    whole, split = map(statistics.median, found.values())
    ratios = sorted(b / a for a, b in zip(*found.values(), strict=True))
    print(
        f"training in a round: {whole:.2f} s whole, {split:.2f} s split; median ratio of pairs "
        f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


def main(arguments: Sequence[str] = ()) -> None:
    """Runs a section, or both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[[], "block", "rounds"], default=[])
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args(arguments)
    for section in (block, rounds):
        if not options.sections or section.__name__ in options.sections:
            with tempfile.TemporaryDirectory() as directory:
                section(Path(directory), options)


if __name__ == "__main__":
    main(sys.argv[1:])
