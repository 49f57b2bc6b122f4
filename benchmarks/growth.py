"""How does the time of a mini-batch grow with devices, micro-batches, tokens and parameters?

    python -m benchmarks.growth                 # all sections
    python -m benchmarks.growth devices         # one of: devices, micro_batches, tokens, model

Real services train on this machine: one cluster, one thread for each process, 64 rows a mini-batch, random weights. A section
changes one number of the middle point: 2 devices, 16 micro-batches, 64 tokens, a BERT of 12 blocks and hidden size 384.
Each point is the second round of a job with one mini-batch a round. Beside it stands the prediction of
docs/scheduling.md (5), from what the first round has measured. Writes build/growth.json and build/growth.svg.

On a machine with fewer cores than stages, stages wait for cores. Then more devices make nothing faster, and the
prediction, which knows nothing of shared cores, is too short.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import ascii_lowercase

from collapipe.job import JobConfig
from collapipe.planning.decisions import RoundDecision
from collapipe_client import CollaPipeClient, LocalTestbed

MINI_BATCH = 64
VOCABULARY = 30522
DEVICES = (1, 2, 4, 8)
RESULTS = Path("build/growth.json")
PLOT = Path("build/growth.svg")


@dataclass(frozen=True)
class Point:
    """What a job trains.

    Args:
        model: Number of blocks and hidden size.
    """

    devices: int = 2
    micro_batches: int = 16
    tokens: int = 64
    model: tuple[int, int] = (12, 384)

    @property
    def parameters(self) -> int:
        """Parameters of the embedding and of the blocks."""
        blocks, hidden = self.model
        return hidden * (VOCABULARY + 512 + 2 + 2) + blocks * (12 * hidden + 13) * hidden


@dataclass(frozen=True)
class Result:
    """The second round of a job. Times are those of a mini-batch, in seconds."""

    point: Point
    seconds: float
    predicted_seconds: float


SECTIONS = {
    "devices": DEVICES,
    "micro_batches": (1, 4, 16, 64),
    "tokens": (64, 128, 256, 512),
    "model": ((6, 384), (12, 384), (8, 512), (12, 768)),
}


def main(arguments: Sequence[str] = ()) -> None:
    """Measures the given sections. The default is all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], default=[])
    sections = parser.parse_args(arguments).sections or list(SECTIONS)
    growth: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_rows(directory)
        with LocalTestbed([max(DEVICES)], directory / "testbed") as testbed:
            testbed.wait_until_registered()
            with testbed.client() as client:
                for section in sections:
                    print(f"{section:16} s a mini-batch  samples/s  predicted s", flush=True)
                    growth[section] = []
                    for value in SECTIONS[section]:
                        point = replace(Point(), **{section: value})
                        result = measure(client, make_job(point, directory), point)
                        growth[section].append(result)
                        print(
                            f"  {label(section, point):14}{result.seconds:15.2f}{MINI_BATCH / result.seconds:11.1f}"
                            f"{result.predicted_seconds:13.2f}",
                            flush=True,
                        )
    RESULTS.parent.mkdir(exist_ok=True)
    document = {section: [asdict(one) for one in results] for section, results in growth.items()}
    RESULTS.write_text(json.dumps(document, indent=1))
    plot(growth)


def label(section: str, point: Point) -> str:
    """Returns the value of a point on the axis of its section."""
    if section == "model":
        return f"{point.parameters / 1e6:.0f} M"
    return str(getattr(point, section))


def write_rows(directory: Path) -> None:
    """Writes rows of random words, which give a full vocabulary and are longer than 512 tokens."""
    numbers = random.Random(0)
    for name, count in (("rows", 2 * MINI_BATCH), ("held_out", 1)):
        lines = []
        for index in range(count):
            words = ("".join(numbers.choices(ascii_lowercase, k=8)) for _ in range(300))
            lines.append(json.dumps({"text": " ".join(words), "label": f"label {index % 4}"}))
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_job(point: Point, directory: Path) -> JobConfig:
    """Makes a job of two rounds with one mini-batch each."""
    blocks, hidden = point.model
    return JobConfig.model_validate(
        {
            "name": "growth",
            "devices_per_cluster": point.devices,
            "task": {"kind": "classification", "max_length": point.tokens},
            "data": {
                "train": str(directory / "rows.jsonl"),
                "held_out": str(directory / "held_out.jsonl"),
            },
            "model": {
                "family": "bert",
                "vocabulary_size": VOCABULARY,
                "config": {
                    "num_hidden_layers": blocks,
                    "hidden_size": hidden,
                    "intermediate_size": 4 * hidden,
                    "num_attention_heads": hidden // 64 if hidden > 384 else 12,
                },
            },
            "training": {
                "rounds": 2,
                "local_steps": 1,
                "mini_batch": MINI_BATCH,
                "evaluate_every": 0,
            },
            "schedule": {"num_micro_batches": point.micro_batches, "silence_seconds": 120},
        }
    )


def measure(client: CollaPipeClient, job: JobConfig, point: Point) -> Result:
    """Runs a job, and returns the time of its last mini-batch."""
    job_id = client.submit(job)
    seconds: list[float] = []
    message = ""
    for event in client.watch(job_id):
        if event.HasField("round_committed"):
            seconds.append(event.round_committed.summaries[0].training_seconds)
        if event.HasField("status") and event.status.message:
            message = event.status.message
    if len(seconds) < job.training.rounds:
        raise SystemExit(f"the job of {point} did not run to its end: {message}")
    answer = client.explain(job_id, job.training.rounds - 1)
    decision = RoundDecision.from_json(json.loads(answer.decision_json))
    return Result(point, seconds[-1], decision.prediction.clusters[0].mini_batch_seconds)


def plot(growth: dict[str, list[Result]]) -> None:
    """Draws the growth if matplotlib is installed."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed (extra simulation)")
        return
    figure, axes = pyplot.subplots(
        1, len(growth), figsize=(3.5 * len(growth), 3.5), layout="constrained", squeeze=False
    )
    for axis, (section, results) in zip(axes[0], growth.items(), strict=True):
        labels = [label(section, result.point) for result in results]
        for name, style, seconds in (
            ("measured", "o-", [result.seconds for result in results]),
            ("predicted", "o--", [result.predicted_seconds for result in results]),
        ):
            axis.plot(labels, [MINI_BATCH / each for each in seconds], style, label=name)
        axis.set(xlabel=section.replace("_", "-"), ylabel="samples/s", ylim=(0, None))
        axis.grid(visible=True, alpha=0.3)
    axes[0][0].legend()
    figure.savefig(PLOT)
    print(f"results in {RESULTS}, plot in {PLOT}")


if __name__ == "__main__":
    main(sys.argv[1:])
